"""REINFORCE, RLOO and Dr. GRPO in numbers: advantages, loss, gradients and metrics against arithmetic done by hand.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

from statistics import fmean

import pytest
import torch
from conftest import step_of_main
from test_algorithms import (
    GROUP,
    PROMPTS,
    Recorder,
    advantages_of,
    arguments,
    distance,
    gradients,
    loss_batch,
    plain_gradient,
)

import dr_grpo
import grpo
import reinforce
import rloo

N = PROMPTS * GROUP  # rows of the batch that the model's tests use
LONGEST = 50  # --max_response_tokens in them: L of Dr. GRPO
without_ratio = pytest.mark.parametrize("trainer", [reinforce, rloo], ids=lambda trainer: trainer.__name__)


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def args_for(trainer, tiny_model, **changes):
    return arguments(trainer, model=str(tiny_model), max_response_tokens=LONGEST, **changes)


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


@without_ratio
def test_a_loss_without_ratio_and_its_gradient_by_hand(trainer):
    """log π is −40: the loss is Σ 40·A/n, and its slope −A/n, wherever π_old and the reference are; n is 7."""
    logp, rest = loss_batch([(0.3, 0, 1.5), (30, 5, -2), (1, 1, 0), (-30, -5, 3)])
    del rest["old_logp"], rest["ref_logp"]  # nothing of them is in it
    loss = trainer.policy_loss(logp, rest, 7, arguments(trainer))  # of rloo.py with --kl_coef 0.1
    loss.backward()
    assert loss.item() == pytest.approx(40 * (1.5 - 2 + 0 + 3) / 7, rel=1e-12)
    assert logp.grad[0, 1::3].tolist() == pytest.approx([-1.5 / 7, 2 / 7, 0, -3 / 7], rel=1e-12)
    assert not logp.grad[~rest["mask"]].any()


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


def test_reinforces_gradient_on_transformers_own_log_probabilities(tiny_model, batch):
    """−1/n Σ A·∇log π. A third of the responses has the mean reward 0.5: no gradient, and their tokens are in n."""
    args = args_for(reinforce, tiny_model, micro_batch_tokens=300)
    rewards = torch.tensor([3.5, -2.5, 0.5] * PROMPTS)
    batch = batch | {"advantages": reinforce.compute_advantages(rewards, batch, args)}
    (one,), metrics = gradients(reinforce, batch, args)
    expected = plain_gradient(tiny_model, batch, args, lambda logp, i, t: (3, -3, 0)[i % 3])
    assert distance(one, expected) < 1e-5
    assert metrics == {"grad_norm": pytest.approx(expected.norm().item(), rel=1e-5), "optimizer_steps": 1}

    policy, passed = reinforce.load_policy(args, trained=True), []
    logp_and_entropy = reinforce.log_probs(policy, batch, args)
    policy.register_forward_pre_hook(lambda _, inputs: passed.append(inputs[1].sum().item()))
    given = {key: value for key, value in batch.items() if key not in ("old_logp", "entropy")}
    reinforce.update(policy, Recorder(policy), given, 1, args)  # adds these two, without a pass of its own
    assert sum(passed) == batch["mask"].sum()
    torch.testing.assert_close([given["old_logp"], given["entropy"]], list(logp_and_entropy), atol=1e-5, rtol=1e-5)


def test_at_fixed_weights_dr_grpos_gradient_is_grpos_times_the_mean_length_over_l(tiny_model, batch):
    """Of each of two mini-batches, the first of long responses, the second of short ones; with the same advantages."""
    groups = torch.arange(N).view(PROMPTS, GROUP)
    long_first = torch.cat([groups[::2], groups[1::2]]).flatten()
    batch = {key: value[long_first] for key, value in batch.items()}
    settings = {"updates_per_step": 2, "micro_batch_tokens": 300}
    grpos, grpos_metrics = gradients(grpo, batch, args_for(grpo, tiny_model, **settings))
    steps, metrics = gradients(dr_grpo, batch, args_for(dr_grpo, tiny_model, **settings))
    lengths = batch["mask"].sum(1).tolist()
    mean_lengths = fmean(lengths[: N // 2]), fmean(lengths[N // 2 :])
    assert mean_lengths[0] > 3 * mean_lengths[1]
    for one, other, mean_length in zip(steps, grpos, mean_lengths, strict=True):
        assert distance(one, other * mean_length / LONGEST) < 1e-6
    assert metrics["clip_rate"] == grpos_metrics["clip_rate"] > 0
    assert metrics["grad_norm"] == pytest.approx(fmean(step.norm().item() for step in steps), rel=1e-5)
