"""entropy_top.py and archer.py in numbers: which tokens they single out, and the loss and gradient,
by hand.

What is worked out by hand is Python's float arithmetic on the numbers written out, never the
trainers' own formula.
"""

import dataclasses
import math

import pytest
import torch
from helpers import arguments, distance, gradients, share, weights

import entropy_top
import grpo

pytestmark = pytest.mark.usefixtures("on_the_cpu")


# -------------------------------------------------------------------------------------------- entropy_top: threshold


def test_the_gradient_is_grpos_of_the_chosen_tokens_and_no_other_token_goes_through_a_pass(tiny_model, batch):
    """Of each mini-batch, on the tiny model, however it is cut: grpo.py on the chosen tokens, times their share."""
    args = arguments(entropy_top, model=str(tiny_model), updates_per_step=2)
    half, expected, thresholds, n_top = len(batch["ids"]) // 2, [], [], []
    for rows in (slice(0, half), slice(half, None)):
        part = share(batch, rows)
        entropies = sorted(part["entropy"][part["mask"]].tolist(), reverse=True)
        thresholds.append(entropies[math.ceil(0.2 * len(entropies)) - 1])
        chosen = part["mask"] & (part["entropy"] >= thresholds[-1])
        n_top.append(int(chosen.sum()))
        (alone,), _ = gradients(grpo, part | {"mask": chosen}, arguments(grpo, model=str(tiny_model)))
        expected.append(alone * n_top[-1] / len(entropies))
    assert (chosen.any(1).sum() < part["mask"].any(1).sum()) and min(n_top) > 5
    before = {key: value.clone() for key, value in batch.items()}
    policy, seen = entropy_top.load_policy(args, trained=True), []
    # With a gradient: the entropy of later updates takes a pass of its own without.
    policy.register_forward_pre_hook(lambda _, inputs: seen.append(int(inputs[1].sum()) * torch.is_grad_enabled()))
    for budget in (10**6, 300, 1):
        seen.clear()
        cut = dataclasses.replace(args, micro_batch_tokens=budget)
        steps, metrics = gradients(entropy_top, batch, cut, policy)
        assert len(steps) == 2 and all(distance(a, b) < 1e-5 for a, b in zip(steps, expected))
        assert sum(seen) == sum(n_top)
        assert metrics["top_rate"] == pytest.approx(sum(n_top) / int(batch["mask"].sum()), rel=1e-12)
        assert metrics["entropy_threshold"] == pytest.approx(sum(thresholds) / 2, rel=1e-12)
    assert batch.keys() == before.keys() and all(torch.equal(batch[key], before[key]) for key in before)


def test_a_token_whose_entropy_is_no_number_is_not_left_out_silently(tiny_model, batch, tmp_path):
    """As where the weights have gone: its loss is none either, and the program ends before they are touched."""
    args = arguments(entropy_top, model=str(tiny_model), run_dir=str(tmp_path))
    policy = entropy_top.load_policy(args, trained=True)
    start = weights(policy)
    broken = batch | {key: batch[key].clone() for key in ("entropy", "old_logp")}
    at = batch["mask"].nonzero()[0].tolist()
    for key in ("entropy", "old_logp"):
        broken[key][*at] = math.nan
    with pytest.raises(SystemExit, match="loss nan"):
        entropy_top.update(policy, torch.optim.SGD(policy.parameters(), lr=0.1), broken, 1, args)
    assert torch.equal(weights(policy), start)


# ------------------------------------------------------------------------------------------- archer: reasoning tokens


# --------------------------------------------------------------------------------------------------------- archer: loss


# ------------------------------------------------------------------------------------------------------- archer: update
