"""CISPO and GSPO in numbers: loss, gradient and clip rate against arithmetic done by hand.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

import dataclasses
import math

import pytest
import torch
from test_algorithms import arguments, distance, gradients, lengths_of, loss_batch, plain_gradient, plain_log_softmax
from transformers import AutoModelForCausalLM

import acpo
import cispo
import grpo
import gspo

E20 = math.exp(20)


pytestmark = pytest.mark.usefixtures("on_the_cpu")


# -------------------------------------------------------------------------------------------------- CISPO's loss

# ε_low 1, ε_high 0.45, β 0.1: (log π − log π_old, log π_ref − log π, A) → (weight, k3, whether it was clipped)
WEIGHTS = {
    "on policy": ((0, 0, 1.5), (1, 0, False)),
    "inside, A > 0": ((math.log(1.44), 0, 2), (1.44, 0, False)),
    "inside, A < 0": ((math.log(1.44), 0, -2), (1.44, 0, False)),
    "above, A > 0": ((math.log(1.46), 0, 2), (1.45, 0, True)),
    "above, A < 0": ((math.log(1.46), 0, -2), (1.45, 0, True)),
    "no lower bound, A > 0": ((math.log(1e-4), 0, 2), (1e-4, 0, False)),
    "no lower bound, A < 0": ((math.log(1e-4), 0, -2), (1e-4, 0, False)),
    "A = 0, far off": ((math.log(3), 0, 0), (1.45, 0, False)),
    "above, with KL": ((math.log(3), 0.5, -1), (1.45, math.exp(0.5) - 0.5 - 1, True)),
    "clamped above, and in the gradient": ((30, 0, -2), (1.45, 0, True)),
    "clamped below, and in the gradient": ((-30, 0, 2), (1 / E20, 0, False)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_cispos_loss_and_gradient_by_hand(name):
    """log π is −40: the loss is 1/n·(40·weight·A + β·k3), its gradient −1/n·(weight·A + β·π_ref/π − β); n is 7."""
    (moved, reference, advantage), (weight, k3, is_clipped) = WEIGHTS[name]
    logp, rest = loss_batch([(moved, reference, advantage)])
    loss, clipped = cispo.policy_loss(logp, rest, 7, arguments(cispo))
    loss.backward()
    assert loss.item() == pytest.approx((40 * weight * advantage + 0.1 * k3) / 7, rel=1e-12, abs=1e-15)
    slope = -(weight * advantage + 0.1 * math.exp(reference) - 0.1) / 7
    assert logp.grad[0].tolist() == pytest.approx([0, slope, 0], rel=1e-12, abs=1e-15)
    assert clipped.item() == is_clipped


# (log ρ, A) → (weight, whether the gate cuts the token off): PPO's gate at 1.3 for A > 0 and at 0.8 for A < 0
GATED = {
    "on policy": ((0, 1.5), (1, False)),
    "inside, A > 0": ((math.log(1.29), 2), (1.29, False)),
    "inside, A < 0": ((math.log(0.81), -2), (0.81, False)),
    "above the gate, A > 0": ((math.log(1.31), 2), (1.31, True)),
    "above the gate and the weight's bound, A > 0": ((math.log(1.6), 2), (1.45, True)),
    "above the gate, A < 0": ((math.log(1.31), -2), (1.31, False)),
    "above the weight's bound, A < 0": ((math.log(1.6), -2), (1.45, False)),
    "below the gate, A < 0": ((math.log(0.79), -2), (0.79, True)),
    "below the gate, A > 0": ((math.log(0.79), 2), (0.79, False)),
}


@pytest.mark.parametrize("name", GATED)
def test_the_gated_cispo_by_hand(name):
    """As ACPO's release has it (Control-derek/ACPO, cfcd73d: verl/trainer/ppo/core_algos.py, lines 795-807)."""
    (moved, advantage), (weight, is_cut) = GATED[name]
    logp, rest = loss_batch([(moved, 0, advantage)])
    loss, clipped = cispo.policy_loss(logp, rest, 7, arguments(cispo, gated=True, kl_coef=0.0))
    loss.backward()
    assert logp.grad[0].tolist() == pytest.approx([0, 0 if is_cut else -weight * advantage / 7, 0], rel=1e-12)
    assert clipped.item() == (is_cut or weight == 1.45)


def test_the_gated_cispos_update_divides_by_responses(tiny_model, batch):
    """On the tiny model, weights unmoved: the gradient is that of the mean over responses of their tokens' means."""
    args = arguments(cispo, model=str(tiny_model), gated=True, kl_coef=0.0, micro_batch_tokens=300)
    (step,), _ = gradients(cispo, batch, args)
    n_tokens, sizes = batch["mask"].sum().item(), batch["mask"].sum(1).tolist()

    def weight(logp, *at):
        ratio, advantage = math.exp(logp - batch["old_logp"][at].item()), batch["advantages"][at].item()
        cut = ratio > 1.3 if advantage > 0 else ratio < 0.8
        of_token = 0 if cut else min(ratio, 1.45) * advantage
        return of_token * n_tokens / sizes[at[0]] / len(sizes)  # plain_gradient divides by n_tokens

    assert distance(step, plain_gradient(tiny_model, batch, args, weight)) < 2e-5


# --------------------------------------------------------------------------------------------------- GSPO's loss

# ε_low 3e-4, ε_high 4e-4: (log π − log π_old of each token, A) → (log s, whether the clip cuts the response off)
SEQUENCES = {
    "on policy": (([0, 0, 0], 1.5), (0, False)),
    "one token inside, above 1 + ε_low": (([3.5e-4], 2), (3.5e-4, False)),
    "one token above, A > 0": (([5e-4], 2), (5e-4, True)),
    "one token above, A < 0": (([5e-4], -2), (5e-4, False)),
    "one token below 1 − ε_low, above 1 − ε_high": (([-3.5e-4], -2), (-3.5e-4, True)),
    "one token below, A > 0": (([-5e-4], 2), (-5e-4, False)),
    "inside, A > 0": (([2e-4, 9e-4, -2e-4], 2), (3e-4, False)),
    "inside, A < 0": (([-2e-4, -6e-4, 2e-4], -1), (-2e-4, False)),
    "above, A > 0": (([9e-4, 3e-4, 6e-4], 2), (6e-4, True)),
    "above, A < 0": (([9e-4, 3e-4, 6e-4], -2), (6e-4, False)),
    "below, A < 0": (([-9e-4, -3e-4, -6e-4], -2), (-6e-4, True)),
    "below, A > 0": (([-9e-4, -3e-4, -6e-4], 2), (-6e-4, False)),
    "each token far off, their mean not": (([1, -0.75, -0.25], 2), (0, False)),  # the mean of ρ is 1.32
    "one absurd token": (([50, 0.25, -0.25], -2), (50 / 3, False)),  # each token clamped by itself: 20/3
    "no dual clip": (([9, 0, 0], -2), (3, False)),
    "A = 0, far off": (([1, 1, 1], 0), (1, False)),
}


def sequence_batch(sequences):
    """log π [N, T], with gradient, and the rest of a batch in float64; before and after each response lies garbage."""
    longest = 2 + max(len(moved) for moved, _ in sequences)
    logp = torch.full((len(sequences), longest), -1e30, dtype=torch.float64)
    rest = {"mask": torch.zeros(logp.shape, dtype=torch.bool), "old_logp": logp - 7e29, "ref_logp": -logp}
    rest["advantages"] = 1e30 + 0 * logp
    for i, (moved, advantage) in enumerate(sequences):
        at = i, slice(1, 1 + len(moved))
        logp[at] = -2.0 - torch.arange(len(moved), dtype=torch.float64)
        rest["mask"][at], rest["advantages"][at] = True, advantage
        rest["old_logp"][at] = logp[at] - torch.tensor(moved, dtype=torch.float64)
        rest["ref_logp"][at] = logp[at]
    return logp.requires_grad_(), rest


def by_hand(log_s, advantage, is_clipped):
    """A response's term of J, and its slope in log s."""
    bound = 1 + 4e-4 if advantage > 0 else 1 - 3e-4
    s = math.exp(log_s)
    return (bound * advantage, 0) if is_clipped else (s * advantage, s * advantage)


@pytest.mark.parametrize("name", SEQUENCES)
def test_gspos_loss_and_gradient_by_hand(name):
    """−1/n·min[s·A, clip(s)·A], n 7; the slope is that in log s, of which each of |o| tokens has 1/|o|."""
    (moved, advantage), (log_s, is_clipped) = SEQUENCES[name]
    logp, rest = sequence_batch([(moved, advantage)])
    loss, clipped = gspo.policy_loss(logp, rest, 7, arguments(gspo, kl_coef=0.0))
    loss.backward()
    value, slope = by_hand(log_s, advantage, is_clipped)
    assert loss.item() == pytest.approx(-value / 7, rel=1e-12)
    assert logp.grad[rest["mask"]].tolist() == pytest.approx([-slope / 7 / len(moved)] * len(moved), rel=1e-12)
    assert not logp.grad[~rest["mask"]].any()
    assert clipped.item() == is_clipped * len(moved)


def test_responses_count_alike_however_long_they_are():
    """Of one token and of three, with KL terms: e − 2 on the one token, e^-2 + 1 on one of the three."""
    logp, rest = sequence_batch([([0], 2), ([0, 0, 0], 1)])
    rest["ref_logp"][0, 1] += 1
    rest["ref_logp"][1, 2] -= 2
    loss, _ = gspo.policy_loss(logp, rest, 2, arguments(gspo))
    assert loss.item() == pytest.approx((-2 - 1 + 0.1 * (math.e - 2) + 0.1 * (math.exp(-2) + 1) / 3) / 2, rel=1e-12)


@pytest.mark.parametrize(("moved", "log_s"), [([60, 0, 30], 20), ([-30], -20)])
def test_the_ratio_is_finite_beyond_20_nats_and_has_no_gradient(moved, log_s):
    logp, rest = sequence_batch([(moved, -2 if log_s > 0 else 2)])
    loss, _ = gspo.policy_loss(logp, rest, 1, arguments(gspo, kl_coef=0.0))
    loss.backward()
    assert loss.item() == pytest.approx(math.copysign(2, log_s) * math.exp(log_s), rel=1e-12) and not logp.grad.any()


@pytest.mark.parametrize(("ratio", "advantage"), [(1000, -2), (1 / 1000, 2)])  # neither script clips these
def test_an_outlier_above_weighs_less_in_gspos_mean_than_in_grpos_and_one_below_more(ratio, advantage):
    """Four tokens with ρ of r, 1, 1 and 1: GRPO has their arithmetic mean, GSPO the geometric one, r^(1/4)."""
    logp, rest = sequence_batch([([math.log(ratio), 0, 0, 0], advantage)])
    grpos, _ = grpo.policy_loss(logp, rest, 4, arguments(grpo, kl_coef=0.0))
    gspos, _ = gspo.policy_loss(logp, rest, 1, arguments(gspo, kl_coef=0.0))
    arithmetic, geometric = (ratio + 3) / 4, ratio**0.25
    assert grpos.item() == pytest.approx(-advantage * arithmetic, rel=1e-12)
    assert gspos.item() == pytest.approx(-advantage * geometric, rel=1e-12)
    assert (abs(geometric - 1) < abs(arithmetic - 1)) == (ratio > 1)
    weights = [torch.autograd.grad(loss, logp)[0][rest["mask"]].tolist() for loss in (grpos, gspos)]
    assert weights[0] == pytest.approx([-advantage / 4 * x for x in (ratio, 1, 1, 1)], rel=1e-12)
    assert weights[1] == pytest.approx([-advantage / 4 * geometric] * 4, rel=1e-12)


# ------------------------------------------------------------------------------------------- bounds of four scripts


@pytest.mark.parametrize("trainer", [grpo, acpo, cispo, gspo], ids=lambda trainer: trainer.__name__)
def test_a_ratio_at_the_very_bound_is_not_clipped(trainer):
    """The bounds are put exactly on the ratio: r − 1 and 1 − r are exact for r in [1/2, 2]. A token is a response."""
    above, below = (torch.tensor(x, dtype=torch.float64).exp().item() for x in (0.25, -0.25))
    logp, rest = sequence_batch([([0.25], 2), ([-0.25], -2)])

    def loss_of(narrower):
        high, low = above - 1 - narrower, 1 - below - narrower
        if trainer is acpo:  # its range and its divisor are in the batch
            ranges = torch.tensor([[high], [low]], dtype=torch.float64).expand(rest["mask"].shape)
            of_acpo = rest | {"clip_range": ranges, "weight": torch.ones_like(ranges)}
            return acpo.policy_loss(logp, of_acpo, arguments(acpo, kl_coef=0.0))
        args = arguments(trainer, clip_high=high, clip_low=low, kl_coef=0.0)
        return trainer.policy_loss(logp, rest, 1, args)

    loss, clipped = loss_of(0)
    loss.backward()
    assert logp.grad[rest["mask"]].tolist() == pytest.approx([-2 * above, 2 * below], abs=1e-12)
    assert clipped.item() == 0 and loss_of(1e-12)[1].item() == 2


# --------------------------------------------------------------------------------------------------------- update


def test_cispos_gradient_on_transformers_own_log_probabilities(tiny_model, batch):
    """−1/n Σ (clip(ρ)·A + β·π_ref/π − β)·∇log π; nothing of the trainer is used on the other side."""
    args = arguments(cispo, model=str(tiny_model), micro_batch_tokens=300, clip_low=0.2, clip_high=0.1)
    clipped = 0

    def weight(logp, *at):
        nonlocal clipped
        old, ref, advantage = (batch[key][at].item() for key in ("old_logp", "ref_logp", "advantages"))
        ratio = math.exp(logp - old)
        clipped += not 0.8 < ratio < 1.1
        return min(max(ratio, 0.8), 1.1) * advantage + 0.1 * math.exp(ref - logp) - 0.1

    (one,), metrics = gradients(cispo, batch, args)
    assert distance(one, plain_gradient(tiny_model, batch, args, weight)) < 1e-5
    assert metrics["clip_rate"] == clipped / batch["mask"].sum().item() and 0.1 < metrics["clip_rate"] < 0.9


def test_gspos_gradient_on_transformers_own_log_probabilities(tiny_model, batch):
    """−1/N Σ_i s·A·1_trust/|o_i| Σ_t ∇log π, N sequences, those of advantage 0 included."""
    batch = batch | {"advantages": batch["advantages"].clone()}
    batch["advantages"][::5] = 0
    args = arguments(gspo, model=str(tiny_model), micro_batch_tokens=300, clip_low=0.05, clip_high=0.03, kl_coef=0.0)
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    n_tokens, sizes = batch["mask"].sum().item(), batch["mask"].sum(1).tolist()
    of_row, clipped, kept = [], 0, 0
    for i, length in enumerate(lengths_of(batch)):
        at = batch["mask"][i].nonzero()[:, 0]
        ids = batch["ids"][i, :length]
        with torch.no_grad():
            logp = plain_log_softmax(lm, ids, args.temperature)[at - 1, ids[at]].tolist()
        s = math.exp(sum(new - old for new, old in zip(logp, batch["old_logp"][i, at].tolist())) / sizes[i])
        advantage = batch["advantages"][i, at[0]].item()
        cut = s > 1.03 if advantage > 0 else s < 0.95 and advantage < 0
        of_row.append(0 if cut else s * advantage)
        clipped, kept = clipped + cut * sizes[i], kept + (not cut and abs(s - 1) > 0.01)
    assert kept > 5  # of ratios that differ from 1
    (one,), metrics = gradients(gspo, batch, args)

    def weight(logp, i, t):
        return of_row[i] / sizes[i] * n_tokens / len(sizes)  # plain_gradient divides by n_tokens

    assert distance(one, plain_gradient(tiny_model, batch, args, weight)) < 1e-5
    assert metrics["clip_rate"] == clipped / n_tokens and 0.1 < metrics["clip_rate"] < 0.9
    (other,), with_kl = gradients(gspo, batch, dataclasses.replace(args, kl_coef=1e-12))  # through which A = 0 goes too
    assert distance(other, one) < 1e-5 and with_kl["clip_rate"] == metrics["clip_rate"]
