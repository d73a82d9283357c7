"""ACPO in numbers: bins, clip ranges, loss, gradient and regimes against arithmetic done by hand.

What is worked out by hand is Python's float arithmetic on the numbers written out, never the
trainer's own formula.
"""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from test_algorithms import (
    E20,
    N,
    adamw,
    arguments,
    distance,
    gradients,
    lengths_of,
    loss_batch,
    plain_gradient,
    plain_log_softmax,
    share,
)
from transformers import AutoModelForCausalLM

import acpo
import grpo
from runtime import measure

HALF = N // 2  # rows in each of a step's two mini-batches
BINS = range(1, 6)


pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ------------------------------------------------------------------------------------------- bins and clip ranges


def ranges_of(tokens, dtype=torch.float64, **changes):
    """clip_ranges of (π, ρ) pairs, one response; around each token lies garbage, masked. (ε of each, statistics)"""
    mask = torch.zeros(1, 3 * len(tokens), dtype=torch.bool)
    mask[0, 1::3] = True
    logp = torch.full(mask.shape, -0.5, dtype=dtype)
    batch = {"mask": mask, "old_logp": torch.full(mask.shape, -9.0, dtype=dtype)}
    logp[0, 1::3] = torch.tensor([math.log(p) for p, _ in tokens], dtype=torch.float64).to(dtype)
    batch["old_logp"][0, 1::3] = logp[0, 1::3] - torch.tensor([math.log(r) for _, r in tokens], dtype=dtype)
    clip_range, of_bins = acpo.clip_ranges(logp, batch, arguments(acpo, **changes))
    assert clip_range.shape == logp.shape
    return clip_range[0, 1::3].tolist(), numbered(of_bins)


def numbered(of_bins):
    """{"bin_tokens_1": …, "sigma_1": …, "clip_range_1": …} of one update's bins."""
    table = {}
    for i, numbers in enumerate(of_bins, 1):
        table[f"bin_tokens_{i}"] = numbers["tokens"]
        table[f"sigma_{i}"], table[f"clip_range_{i}"] = numbers["sigma"], numbers["clip_range"]
    return table


def column(statistics, name, bins=BINS):
    return [statistics[f"{name}_{i}"] for i in bins]


def test_sigma_by_hand():
    """Bin 1: ρ 1.1, 0.9, 1.3: mean 1.1, squares 0, 0.04, 0.04 over 3 (ddof 0). Bin 3: 0.8, 1: mean
    0.9, σ 0.1.

    Bin 4: one token, σ 0. Bins 2 and 5 have none: σ 0, ε_b.
    """
    tokens = [(0.05, 1.1), (0.5, 0.8), (0.1, 0.9), (0.7, 1.9), (0.59, 1.0), (0.19, 1.3)]
    clip_range, statistics = ranges_of(tokens, clip_alpha=2.5, clip_base=0.15)
    sigma = math.sqrt(0.08 / 3)
    assert column(statistics, "bin_tokens") == [3, 0, 2, 1, 0]
    assert column(statistics, "sigma") == pytest.approx([sigma, 0, 0.1, 0, 0], abs=1e-12)
    wide = 0.15 + 2.5 * sigma
    assert column(statistics, "clip_range") == pytest.approx([wide, 0.15, 0.4, 0.15, 0.15], abs=1e-12)
    assert clip_range == pytest.approx([wide, 0.4, wide, 0.15, 0.4, wide], abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_bins", [1, 5])
def test_a_probability_on_an_edge_belongs_to_the_bin_above_and_1_to_the_last(n_bins, dtype):
    """Each token's ρ tells its bin by the ε it gets: k/n itself, the next number below it, and the bins' middles."""
    logp, expected = [], []
    for k in range(n_bins):
        if k:
            edge = torch.tensor(math.log(k / n_bins), dtype=torch.float64).to(dtype)
            logp += [edge, torch.nextafter(edge, torch.tensor(-100.0, dtype=dtype))]
            expected += [k + 1, k]
        logp.append(torch.tensor(math.log((k + 0.5) / n_bins), dtype=dtype))
        expected.append(k + 1)
    logp += [torch.tensor(0.0, dtype=dtype), torch.tensor(-1e-7, dtype=dtype), torch.tensor(-200.0, dtype=dtype)]
    expected += [n_bins, n_bins, 1]
    logp = torch.stack(logp)[None]
    args = arguments(acpo, n_bins=n_bins)
    for k in range(1, n_bins + 1):  # with a spread of ρ in bin k alone
        inside = torch.tensor([[bin_ == k for bin_ in expected]])
        spread = 0.1 * inside * torch.arange(logp.shape[1])
        batch = {"mask": torch.ones(logp.shape, dtype=torch.bool), "old_logp": logp - spread}
        clip_range, of_bins = acpo.clip_ranges(logp, batch, args)
        statistics = numbered(of_bins)
        assert (clip_range > 0.2001).tolist() == inside.tolist()
        assert column(statistics, "bin_tokens", range(1, n_bins + 1)) == [
            expected.count(j) for j in range(1, n_bins + 1)
        ]


def test_bins_are_of_the_current_probability():
    """π 0.1 that was 0.9 when it was sampled, and the other way round."""
    _, statistics = ranges_of([(0.1, 1 / 9), (0.9, 9.0), (0.95, 1.0)])
    assert column(statistics, "bin_tokens") == [1, 0, 0, 0, 2]
    assert statistics["sigma_5"] == pytest.approx(4, abs=1e-12) and statistics["sigma_1"] == 0


def test_clip_max_bounds_the_range():
    """ρ 0.5 and 9.5: σ 4.5, ε 13.7 without a bound. A base above the bound is held as well."""
    tokens = [(0.1, 0.5), (0.1, 9.5), (0.9, 1.0)]
    assert ranges_of(tokens)[0] == [3, 3, 0.2]
    assert ranges_of(tokens, clip_max=1e9)[0] == pytest.approx([13.7, 13.7, 0.2], abs=1e-9)
    assert ranges_of(tokens, clip_max=0.1)[0] == [0.1] * 3
    assert ranges_of(tokens, clip_max=0.0)[0] == [0] * 3
    assert ranges_of(tokens, clip_alpha=0.0)[0] == [0.2] * 3


def test_log_ratios_are_clamped_as_in_the_loss():
    """ρ of 30 nats counts as e^20; with ρ = 1 beside it the mean is (e^20 + 1)/2 and σ (e^20 − 1)/2."""
    _, statistics = ranges_of([(0.1, math.exp(30)), (0.1, 1.0), (0.9, math.exp(-30)), (0.9, 1.0)])
    assert statistics["sigma_1"] == pytest.approx((E20 - 1) / 2, rel=1e-12)
    assert statistics["sigma_5"] == pytest.approx((1 - math.exp(-20)) / 2, rel=1e-12)


def test_nothing_cancels_where_ratios_are_close_to_1():
    """ρ = 1 ± 1e-9: mean(ρ²) − mean(ρ)² would lose 1e-18 among digits of 1. In float32 ρ is rounded only after exp."""
    _, statistics = ranges_of([(0.5, math.exp(1e-9)), (0.5, math.exp(-1e-9))])
    assert statistics["sigma_3"] == pytest.approx(1e-9, rel=1e-6)
    logp = torch.tensor([[-1e-4, -3e-4]])
    batch = {"mask": torch.ones(1, 2, dtype=torch.bool), "old_logp": torch.tensor([[-1e-4 - 1e-8, -3e-4 + 1e-8]])}
    moved = (logp - batch["old_logp"])[0].tolist()  # exact in float32: the numbers are close
    assert moved[0] > 0 > moved[1] > -2e-8  # too little for float32's exp
    statistics = numbered(acpo.clip_ranges(logp, batch, arguments(acpo))[1])
    assert statistics["sigma_5"] == pytest.approx((moved[0] - moved[1]) / 2, rel=1e-6)


# ------------------------------------------------------------------------------------------------------------ loss


# (log π − log π_old, log π_ref − log π, A, ε) → (the surrogate, k3, whether the clip cuts it off);
# β 0.1
TOKENS = {
    "on policy": ((0, 0, 1.5, 0.2), (1.5, 0, False)),
    "above, A < 0": ((math.log(1.21), 0, -2, 0.2), (-2.42, 0, False)),
    "below, A > 0": ((math.log(0.79), 0, 2, 0.2), (1.58, 0, False)),
    "inside a wider range, A > 0": ((math.log(1.6), 0, 2, 0.65), (3.2, 0, False)),
    "inside a wider range, A < 0": ((math.log(0.4), 0, -2, 0.65), (-0.8, 0, False)),
    "above a wider range": ((math.log(1.7), 0, 2, 0.65), (3.3, 0, True)),
    "below a wider range": ((math.log(0.3), 0, -2, 0.65), (-0.7, 0, True)),
    "above a range over 1": ((math.log(5), 0, 2, 3.0), (8, 0, True)),
    "ρ never reaches 1 − 3": ((math.log(1e-6), 0, -2, 3.0), (-2e-6, 0, False)),
    "ε 0 clips whatever moved": ((math.log(1.01), 0, 1, 0.0), (1, 0, True)),
    "A = 0, far off": ((math.log(9), 0, 0, 0.2), (0, 0, False)),
    "no dual clip": ((math.log(50), 0, -2, 0.2), (-100, 0, False)),
    "clipped, yet its KL term counts": ((math.log(1.5), 0.5, 2, 0.2), (2.4, math.exp(0.5) - 0.5 - 1, True)),
    "ratio clamped above": ((30, 0, -2, 0.2), (-2 * E20, 0, False)),
    "ratio clamped below": ((-30, 0, 2, 0.2), (2 / E20, 0, False)),
}


def batch_with_ranges(tokens):
    """loss_batch of the tokens' first three numbers; the next two are each token's ε and weight."""
    logp, rest = loss_batch([token[:3] for token in tokens])
    rest["clip_range"] = torch.zeros_like(rest["old_logp"])
    rest["weight"] = torch.full_like(rest["old_logp"], 1e30)
    rest["clip_range"][0, 1::3] = torch.tensor([token[3] for token in tokens], dtype=torch.float64)
    rest["weight"][0, 1::3] = torch.tensor([token[4] for token in tokens], dtype=torch.float64)
    return logp, rest


def test_a_tokens_loss_by_hand():
    for name, (token, (surrogate, k3, is_clipped)) in TOKENS.items():
        logp, rest = batch_with_ranges([(*token, 1 / 7)])
        loss, clipped = acpo.policy_loss(logp, rest, arguments(acpo))
        loss.backward()
        assert loss.item() == pytest.approx((0.1 * k3 - surrogate) / 7, rel=1e-12, abs=1e-12), name
        assert clipped.item() == is_clipped, name
        slope = 0 if is_clipped or abs(token[0]) == 30 else surrogate  # beyond 20 nats the ratio is constant
        slope += 0.1 * math.exp(token[1]) - 0.1
        assert logp.grad[0].tolist() == pytest.approx([0, -slope / 7, 0], rel=1e-9, abs=1e-15), name


# ---------------------------------------------------------------------------------------------------------- update


def losses_of(batch, args, monkeypatch, policy=None, optimizer=None):
    """Each optimizer step's loss and its tokens' (number, ε, weight); update's metrics."""
    policy = policy or acpo.load_policy(args, trained=True)
    optimizer = optimizer or torch.optim.SGD(policy.parameters(), lr=0.0)
    log, loss_of, step_of = [(0.0, {})], acpo.policy_loss, optimizer.step

    def policy_loss(logp, micro, args):
        assert micro["weight"].isfinite().all() and micro["clip_range"].isfinite().all()  # padding included
        loss, clipped = loss_of(logp, micro, args)
        keys = ("token", "clip_range", "weight")
        seen = {token: numbers for token, *numbers in zip(*(micro[key][micro["mask"]].tolist() for key in keys))}
        log[-1] = (log[-1][0] + loss.item(), log[-1][1] | seen)
        return loss, clipped

    def step():
        step_of()
        log.append((0.0, {}))

    optimizer.step = step
    with monkeypatch.context() as patch:
        patch.setattr(acpo, "policy_loss", policy_loss)
        metrics = acpo.update(policy, optimizer, batch, 1, args)
    assert log.pop() == (0.0, {})
    return log, metrics


def pick(batch, sizes):
    """The batch's first rows, of whose responses the first `size` tokens are kept."""
    order = batch["mask"].cumsum(1) * batch["mask"]
    rows = [int((order.amax(1) >= size).nonzero()[i]) for i, size in enumerate(sizes)]
    picked = share(batch, rows)
    picked["mask"] = (order[rows] > 0) & (order[rows] <= torch.tensor(sizes)[:, None])
    return picked


def test_sequences_count_alike_however_long_they_are(tiny_model, batch, monkeypatch):
    """ρ = 1: one token of A 2, and three of 1, −4, 6, of mean 1: loss −(2 + 1)/2, not −(2 + 1 − 4 +
    6)/4. k3 alike.

    log π_ref − log π is 1 on the single token, 0 on two of the three and −2 on the last.
    """
    two = pick(batch, [1, 3])
    assert two["mask"].sum(1).tolist() == [1, 3]
    args = arguments(acpo, model=str(tiny_model))
    two["old_logp"], _ = acpo.log_probs(acpo.load_policy(args, trained=True), two, args)
    two["advantages"] = torch.zeros(two["ids"].shape).masked_scatter(two["mask"], torch.tensor([2.0, 1, -4, 6]))
    gap = torch.zeros(two["ids"].shape).masked_scatter(two["mask"], torch.tensor([1.0, 0, 0, -2]))
    two["ref_logp"] = two["old_logp"] + gap
    k3 = [math.e - 2, (math.exp(-2) + 2 - 1) / 3]
    for budget in (10**6, 1):
        small = dataclasses.replace(args, micro_batch_tokens=budget)
        ((loss, seen),), _ = losses_of(two, small, monkeypatch)
        assert loss == pytest.approx(-1.5 + 0.1 * sum(k3) / 2, abs=1e-5)
        assert sorted(weight for _, weight in seen.values()) == pytest.approx([1 / 6] * 3 + [1 / 2], rel=1e-6)
        ((loss, _),), _ = losses_of(two, dataclasses.replace(small, kl_coef=0.0), monkeypatch)
        assert loss == pytest.approx(-1.5, abs=1e-5)


def by_hand(logp, old_logp, args):
    """{bin: (tokens, σ, ε)} of lists of log-probabilities, and each token's bin, in Python's floats."""
    bins = [min(int(math.exp(value) * args.n_bins), args.n_bins - 1) + 1 for value in logp]
    table = {}
    for bin_ in range(1, args.n_bins + 1):
        ratios = [math.exp(new - old) for new, old, b in zip(logp, old_logp, bins) if b == bin_]
        mean = sum(ratios) / max(1, len(ratios))
        sigma = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / max(1, len(ratios)))
        table[bin_] = (len(ratios), sigma, min(args.clip_max, args.clip_base + args.clip_alpha * sigma))
    return table, bins


def plain_logp(model, batch, temperature):
    """{(row, position): log π} of the response tokens, by transformers and torch alone."""
    lm, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), {}
    with torch.no_grad():
        for i, length in enumerate(lengths_of(batch)):
            all_logp = plain_log_softmax(lm, batch["ids"][i, :length], temperature)
            for t in batch["mask"][i].nonzero()[:, 0].tolist():
                found[i, t] = all_logp[t - 1, batch["ids"][i, t]].item()
    return found


def eq_8_gradient(model, batch, epsilon, args):
    """The gradient of −eq. 8 + KL, the mean over the batch's sequences; epsilon: {(row, position): ε}."""
    n_tokens, sizes = batch["mask"].sum().item(), batch["mask"].sum(1).tolist()

    def weight(logp, *at):
        old, ref, advantage = (batch[key][at].item() for key in ("old_logp", "ref_logp", "advantages"))
        ratio = math.exp(logp - old)
        cut = ratio > 1 + epsilon[at] if advantage > 0 else ratio < 1 - epsilon[at]
        in_all = (0 if cut else ratio * advantage) + 0.1 * math.exp(ref - logp) - 0.1
        return in_all * n_tokens / sizes[at[0]] / len(sizes)  # plain_gradient divides by n_tokens

    return plain_gradient(model, batch, args, weight)


def test_both_updates_gradients_are_eq_8_on_transformers_own_log_probabilities(tiny_model, batch):
    """At fixed weights: the first update with ε_b, the second with ε_b + α·σ of its bins' own ρ. With KL, too."""
    args = arguments(acpo, model=str(tiny_model), updates_per_step=2, micro_batch_tokens=300, clip_alpha=1.5)
    steps, metrics = gradients(acpo, batch, args)
    for i, step in enumerate(steps):
        part = share(batch, slice(i * HALF, (i + 1) * HALF))
        logp = plain_logp(tiny_model, part, args.temperature)
        table, bins = by_hand(list(logp.values()), [part["old_logp"][at].item() for at in logp], args)
        epsilon = {at: table[b][2] if i else 0.2 for at, b in zip(logp, bins)}
        if i:
            assert len(set(epsilon.values())) > 2  # otherwise this would show little
        assert distance(step, eq_8_gradient(tiny_model, part, epsilon, args)) < 2e-5
    assert 0.05 < metrics["clip_rate"] < 0.95


def test_the_metrics_are_those_of_both_updates(tiny_model, batch):
    """First update: bins of old_logp, σ 0, ε_b. Second: by hand. So the largest is the second update's own."""
    args = arguments(acpo, model=str(tiny_model), updates_per_step=2)
    policy = acpo.load_policy(args, trained=True)
    _, metrics = gradients(acpo, batch, args, policy)
    logp, _ = acpo.log_probs(policy, batch, args)
    rows = slice(HALF, None), batch["mask"][HALF:]
    first, _ = by_hand(*[batch["old_logp"][:HALF][batch["mask"][:HALF]].tolist()] * 2, args)
    second, _ = by_hand(*(values[rows[0]][rows[1]].tolist() for values in (logp, batch["old_logp"])), args)
    for i in BINS:
        assert metrics[f"bin_tokens_{i}"] == first[i][0] + second[i][0]
        assert metrics[f"sigma_max_{i}"] == pytest.approx(second[i][1], rel=1e-5)
        assert metrics[f"clip_range_max_{i}"] == pytest.approx(second[i][2], rel=1e-5)
    assert sum(value > 0.01 for value in column(metrics, "sigma_max")) >= 3


def test_largest_and_mean_clip_range_by_hand():
    """Three updates, two bins: means by tokens, and a bin's empty update neither counts nor is the largest."""
    updates = [
        [{"tokens": 0, "sigma": 0.0, "clip_range": 0.2}, {"tokens": 30, "sigma": 0.0, "clip_range": 0.2}],
        [{"tokens": 10, "sigma": 0.1, "clip_range": 0.5}, {"tokens": 20, "sigma": 0.02, "clip_range": 0.26}],
        [{"tokens": 30, "sigma": 0.2, "clip_range": 0.8}, {"tokens": 10, "sigma": 0.04, "clip_range": 0.32}],
    ]
    metrics = measure.of_bins(updates)
    assert (metrics["bin_tokens_1"], metrics["bin_tokens_2"]) == (40, 60)
    assert (metrics["clip_range_max_1"], metrics["clip_range_max_2"], metrics["clip_range_max"]) == (0.8, 0.32, 0.8)
    assert metrics["clip_range_mean_1"] == pytest.approx((5 + 24) / 40)
    assert metrics["clip_range_mean_2"] == pytest.approx((6 + 5.2 + 3.2) / 60)
    assert metrics["clip_range_mean"] == pytest.approx((5 + 24 + 6 + 5.2 + 3.2) / 100)
    assert metrics["sigma_mean_1"] == pytest.approx((1 + 6) / 40) and metrics["sigma_max_2"] == 0.04
    empty = measure.of_bins([[{"tokens": 0, "sigma": 0.0, "clip_range": 0.2}, updates[0][1]]])
    assert empty["clip_range_mean_1"] == 0.2 and empty["clip_range_mean"] == 0.2


def test_a_base_above_is_dapos_clip():
    """ε 0.2 below and 0.3 above: ρ 1.25 and A > 0 stays, 1.31 goes; 0.79 and A < 0 goes whatever the base above is."""
    tokens = [(math.log(1.25), 0, 1, 0.2, 1), (math.log(1.31), 0, 1, 0.2, 1), (math.log(0.79), 0, -1, 0.2, 1)]
    for base_high, kept in ((None, []), (0.3, [1.25]), (0.32, [1.25, 1.31])):
        logp, rest = batch_with_ranges(tokens)
        loss, clipped = acpo.policy_loss(logp, rest, arguments(acpo, clip_base_high=base_high, kl_coef=0.0))
        loss.backward()
        lost = 3 - len(kept)
        assert clipped.item() == lost
        assert logp.grad[0, 1::3].tolist() == pytest.approx([-ratio for ratio in kept] + [0] * lost)


def test_the_first_update_has_the_base_range_and_needs_no_pass(tiny_model, batch):
    """Though old_logp lies away from the policy here. Three updates: three gradient passes and two without."""
    policy, seen = acpo.load_policy(arguments(acpo, model=str(tiny_model)), trained=True), []
    policy.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))

    def kinds():  # of passes, in order: with or without gradient
        return [with_gradient for with_gradient, _ in itertools.groupby(seen)]

    _, metrics = gradients(acpo, batch, arguments(acpo), policy)
    assert kinds() == [True]
    assert column(metrics, "sigma_max") == [0] * 5 and column(metrics, "clip_range_max") == [0.2] * 5
    seen.clear()
    gradients(acpo, share(batch, slice(0, 12)), arguments(acpo, updates_per_step=3), policy)
    assert kinds() == [True, False, True, False, True]


def test_a_later_updates_ranges_are_those_of_the_weights_the_first_one_left(tiny_model, batch, monkeypatch):
    """π_old is the policy's own here, as main has it; an AdamW step moves it; then σ > 0, and ε by hand."""
    args = arguments(acpo, model=str(tiny_model), updates_per_step=2, micro_batch_tokens=300)
    policy = acpo.load_policy(args, trained=True)
    batch = batch | {"old_logp": acpo.log_probs(policy, batch, args)[0]}
    after_one = copy.deepcopy(policy)
    one = dataclasses.replace(args, updates_per_step=1)
    acpo.update(after_one, adamw(after_one, lr=3e-3), share(batch, slice(0, HALF)), 1, one)
    second = share(batch, slice(HALF, None))
    logp, _ = acpo.log_probs(after_one, second, args)
    at = second["mask"]
    table, bins = by_hand(logp[at].tolist(), second["old_logp"][at].tolist(), args)
    expected = {token: table[b][2] for token, b in zip(second["token"][at].tolist(), bins)}
    log, _ = losses_of(batch, args, monkeypatch, policy, adamw(policy, lr=3e-3))
    assert {epsilon for epsilon, _ in log[0][1].values()} == {torch.tensor(0.2).item()}
    assert log[1][1].keys() == expected.keys()
    for token, (epsilon, _) in log[1][1].items():
        assert epsilon == pytest.approx(expected[token], rel=1e-4)
    assert len(set(expected.values())) >= 3 and max(expected.values()) > 0.25


def test_all_response_tokens_count_also_where_the_advantage_is_zero(tiny_model, batch, monkeypatch):
    """Without KL, tokens of A = 0 go through no gradient pass; statistics and weights are as if they did."""
    args = arguments(acpo, model=str(tiny_model), updates_per_step=2, kl_coef=0.0)
    advantages = batch["advantages"].clone()
    advantages[HALF : HALF + 9] = 0
    advantages[:, ::2] = 0  # within a response as well
    batch = batch | {"advantages": advantages}
    log, metrics = losses_of(batch, args, monkeypatch)
    log_with_kl, with_kl = losses_of(batch, dataclasses.replace(args, kl_coef=1e-12), monkeypatch)
    for i, ((loss, seen), (all_loss, everything)) in enumerate(zip(log, log_with_kl)):
        assert len(seen) < len(everything) == batch["mask"][i * HALF : (i + 1) * HALF].sum()
        assert all(everything[token] == pytest.approx(numbers, rel=1e-4) for token, numbers in seen.items())
        assert loss == pytest.approx(all_loss, rel=1e-4)
        assert sum(weight for _, weight in everything.values()) == pytest.approx(1, rel=1e-5)
    for name in ("bin_tokens", "sigma_max", "clip_range_max", "clip_range_mean"):
        assert column(metrics, name) == pytest.approx(column(with_kl, name), rel=1e-6)


def test_alpha_0_is_grpos_clip_with_the_mean_over_sequences(tiny_model, batch):
    """Where all responses have four tokens the mean over sequences is the one over tokens: grpo.py at ε 0.2/0.2."""
    alike = pick(batch, [4] * 20)
    settings = {"model": str(tiny_model), "updates_per_step": 2, "micro_batch_tokens": 300}
    plain, plain_metrics = gradients(grpo, alike, arguments(grpo, clip_low=0.2, clip_high=0.2, **settings))
    fixed, metrics = gradients(acpo, alike, arguments(acpo, clip_alpha=0.0, clip_base=0.2, **settings))
    assert len(fixed) == 2 and all(distance(a, b) < 1e-6 for a, b in zip(fixed, plain))
    assert metrics["clip_rate"] == plain_metrics["clip_rate"] > 0.05
    adaptive, _ = gradients(acpo, alike, arguments(acpo, clip_base=0.2, **settings))
    assert distance(adaptive[0], plain[0]) < 1e-6 and distance(adaptive[1], plain[1]) > 1e-2
