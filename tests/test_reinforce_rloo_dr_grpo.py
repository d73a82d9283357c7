"""REINFORCE, RLOO and Dr. GRPO in numbers: advantages, loss, gradients and metrics against arithmetic done by hand.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

import pytest
import torch
from conftest import step_of_main
from helpers import advantages_of, arguments

import dr_grpo
import reinforce
import rloo

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ---------------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("group", [1, 2, 4])
def test_reinforces_baseline_is_the_mean_of_the_step_and_there_are_no_groups(group):
    """[3, -1, 0.5, 1.5]: mean 1."""
    advantages = advantages_of([3, -1, 0.5, 1.5], reinforce, group)
    assert advantages[:, 1].tolist() == [2, -2, -0.5, 0.5]
    assert not advantages[:, [0, 2]].any()


def test_rloos_baseline_is_the_mean_of_the_others_in_the_group():
    """[1, 2, 3, 6]: the others' means are 11/3, 10/3, 3 and 2. [-1, 3, 3, -1]: 5/3, 1/3, 1/3 and 5/3."""
    advantages = advantages_of([1, 2, 3, 6, -1, 3, 3, -1], rloo)
    expected = [1 - 11 / 3, 2 - 10 / 3, 0, 4, -1 - 5 / 3, 3 - 1 / 3, 3 - 1 / 3, -1 - 5 / 3]
    assert advantages[:, 1].tolist() == pytest.approx(expected, abs=1e-12)
    assert not advantages[:, [0, 2]].any()


def test_dr_grpos_baseline_is_the_mean_of_the_group_and_nothing_divides():
    """[1, 2, 3, 6]: mean 3. [-1, 3, 3, -1]: mean 1."""
    advantages = advantages_of([1, 2, 3, 6, -1, 3, 3, -1], dr_grpo)
    assert advantages[:, 1].tolist() == pytest.approx([-2, -1, 0, 3, -2, 2, 2, -2], abs=1e-12)
    assert not advantages[:, [0, 2]].any()


# ---------------------------------------------------------------------------------------------------------- loss


# ------------------------------------------------------------------------------------------------ rloo: KL penalty

# Three responses to one prompt, the log π_old − log π_ref of their tokens. By hand with β 0.5: the sums are 3, −1 and
# 2, so that the rewards 3, −1 and 1 are 1.5, −0.5 and 0; the means of the others' are −0.25, 0.75 and 0.5.
K1 = [[1, -2, 4], [-1], [0.5, 0.5, -1, 2]]
REWARDS = [3.0, -1.0, 1.0]
WITH_PENALTY = [1.75, -1.25, -0.5]
WITHOUT = [3, -3, 0]  # the means of the others' are 0, 2 and 1


def penalised(beta, monkeypatch, rewards=REWARDS):
    """(the metrics of main, each response's advantage); prompts have two tokens, padding fills six."""
    mask = torch.zeros(len(K1), 6, dtype=torch.bool)
    old_logp, ref_logp = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for i, of_tokens in enumerate(K1):
        mask[i, 2 : 2 + len(of_tokens)] = True
        old_logp[i, mask[i]] = -3.0
        ref_logp[i, mask[i]] = -3 - torch.tensor(of_tokens, dtype=torch.float32)
    batch = {"ids": torch.zeros(mask.shape), "mask": mask, "old_logp": old_logp, "ref_logp": ref_logp}
    batch |= {"sampler_logp": old_logp, "entropy": torch.zeros(mask.shape)}
    args = arguments(rloo, responses_per_prompt=3, kl_coef=beta)
    metrics, given = step_of_main(rloo, args, batch, rewards, monkeypatch)
    assert not given["advantages"][~mask].any() and given["advantages"].shape == mask.shape
    rows = [row[of_row].tolist() for row, of_row in zip(given["advantages"], mask)]
    assert all(row == [row[0]] * len(row) for row in rows)  # the whole response's, on each token
    return metrics, [row[0] for row in rows]


def test_rloos_penalty_is_that_of_the_whole_response_and_comes_before_the_baseline(monkeypatch):
    metrics, advantages = penalised(0.5, monkeypatch)
    assert advantages == pytest.approx(WITH_PENALTY, abs=1e-6)
    assert metrics["kl"] == pytest.approx(4 / 8)  # the mean of log(π_old/π_ref) over the 8 tokens
    assert metrics["reward"] == 1 and metrics["accuracy"] == pytest.approx(2 / 3)  # of the rule, without the penalty


def test_without_beta_rloo_asks_no_reference(monkeypatch):
    metrics, advantages = penalised(0.0, monkeypatch)
    assert advantages == WITHOUT and metrics["kl"] is None


# -------------------------------------------------------------------------------------------------------- update
