"""REINFORCE++ in numbers: returns, advantages, loss, gradients and metrics against arithmetic done
by hand.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

import math
import statistics

import pytest
import torch
from conftest import step_of_main
from helpers import REWARDS, ROWS, N, arguments, batch_of

import reinforce_pp

# ------------------------------------------------------------------------------------------------------------ helpers


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def args_for(**changes):
    return arguments(reinforce_pp, **changes)


def returns_of(rewards, rows, beta):
    """(the returns of each row's response tokens, mean, variance); it is 0 everywhere else."""
    batch = batch_of(rows)
    rewards = torch.tensor(rewards, dtype=torch.float64)
    returns, mean, variance = reinforce_pp.token_returns(rewards, batch, args_for(kl_coef=beta))
    assert returns.shape == batch["mask"].shape and returns.dtype == torch.float64
    assert not returns[~batch["mask"]].any()
    return [row[mask].tolist() for row, mask in zip(returns, batch["mask"])], mean, variance


# Of ROWS and REWARDS with β 0.5, by hand:
TO_GO = [[3, 2, 4], [-1], [2, 1.5, 1, 2]]  # Σ over j ≥ t of k1
RETURNS = [[1, 1.5, 0.5], [0.25], [0, 0.25, 0.5, 0]]  # their sum is 4, of 8 tokens


# ------------------------------------------------------------------------------------------------------------ returns


def test_a_tokens_return_is_the_reward_less_beta_times_the_k1_of_it_and_all_after_it():
    returns, mean, variance = returns_of(REWARDS, ROWS, beta=0.5)
    assert returns == RETURNS == [[r - 0.5 * x for x in row] for r, row in zip(REWARDS, TO_GO)]
    assert mean == 0.5
    assert variance == pytest.approx(1.875 / 7, abs=1e-15)  # Bessel: 8 tokens less one


def test_a_long_responses_penalties_add_up_in_float64():
    """5,000 tokens of k1 0.1, as float32 has it, from float32 log-probabilities; in float32 the sum is 1e-6 off."""
    k1 = torch.tensor(0.1).item()
    batch = {"mask": torch.ones(1, 5000, dtype=torch.bool), "old_logp": torch.zeros(1, 5000)}
    batch["ref_logp"] = batch["old_logp"] - 0.1
    returns, _, _ = reinforce_pp.token_returns(torch.ones(1), batch, args_for(kl_coef=1.0))
    assert returns[0, 0].item() == pytest.approx(1 - 5000 * k1, abs=1e-9)
    assert returns[0, -1].item() == pytest.approx(1 - k1, abs=1e-15)


# --------------------------------------------------------------------------------------------------------- advantages


def hand_made(rewards, batch, beta):
    """{(row, position): advantage} of a batch, and the returns, by Python's loops and statistics module."""
    returns = {}
    for i, reward in enumerate(rewards):
        penalty = 0.0
        for t in reversed(batch["mask"][i].nonzero()[:, 0].tolist()):
            penalty += batch["old_logp"][i, t].item() - batch["ref_logp"][i, t].item()
            returns[i, t] = reward - beta * penalty
    mean, variance = statistics.fmean(returns.values()), statistics.variance(returns.values())
    return {at: (value - mean) / math.sqrt(variance + 1e-8) for at, value in returns.items()}, returns


@pytest.mark.parametrize("beta", [0.0, 0.1, 5.0])
def test_advantages_of_a_models_batch_by_plain_loops(batch, beta):
    rewards = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    advantages = reinforce_pp.compute_advantages(rewards, batch, args_for(kl_coef=beta))
    expected, _ = hand_made(rewards.tolist(), batch, beta)
    assert len(expected) == batch["mask"].sum() > 100
    assert [advantages[at].item() for at in expected] == pytest.approx(list(expected.values()), abs=1e-12)
    assert not advantages[~batch["mask"]].any()
    assert statistics.fmean(expected.values()) == pytest.approx(0, abs=1e-12)


# --------------------------------------------------------------------------------------------------------------- loss


# ------------------------------------------------------------------------------------------------------------ metrics


def in_main(rewards, batch, beta, group=1):
    """(the metrics that main writes, the batch that it gives to update)."""
    shape = batch["mask"].shape
    batch = {"ids": torch.zeros(shape), "entropy": torch.zeros(shape), "sampler_logp": torch.zeros(shape)} | batch
    args = args_for(kl_coef=beta, responses_per_prompt=group)
    with pytest.MonkeyPatch.context() as patch:
        return step_of_main(reinforce_pp, args, batch, rewards, patch)


def test_the_metrics_by_hand():
    """Σ|β·Σk1| = (9 + 1 + 6.5)/2 = 8.25, Σ|r| = 3·2.5 + 0.25 + 4·1 = 11.75: the penalty's share is 8.25/20."""
    metrics, given = in_main(REWARDS, batch_of(ROWS), beta=0.5)
    expected = reinforce_pp.compute_advantages(torch.tensor(REWARDS), batch_of(ROWS), args_for(kl_coef=0.5))
    assert torch.equal(given["advantages"], expected)
    assert metrics["return"] == 0.5
    assert metrics["return_std"] == pytest.approx(math.sqrt(1.875 / 7), abs=1e-15)
    assert metrics["kl_share"] == pytest.approx(8.25 / 20, abs=1e-15)
    k3 = [math.exp(-x) + x - 1 for _, k1, _ in ROWS for x in k1]
    assert metrics["kl"] == pytest.approx(sum(k3) / 8, abs=1e-13)
    assert metrics["reward"] == pytest.approx(3.25 / 3, abs=1e-15)  # without the penalty


def test_the_penaltys_share_from_0_to_1():
    rows = [(1, [0.5, -2], 0), (2, [3], 0)]

    def share(rewards, beta, rows=rows):
        return in_main(rewards, batch_of(rows), beta)[0]["kl_share"]

    assert share([1.0, 0.0], beta=0.0) == 0
    assert share([0.0, 0.0], beta=0.0) == 0  # neither penalty nor reward
    assert share([0.0, 0.0], beta=0.5, rows=[(1, [0, 0], 0)] * 2) == 0
    assert share([0.0, 0.0], beta=0.5) == 1
    assert 0 < share([1.0, 0.0], beta=0.5) < 1
    assert in_main([0.7, 0.7], batch_of(rows), beta=0.0)[0]["return_std"] == 0
