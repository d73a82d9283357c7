"""ACPO in numbers: bins, clip ranges, loss, gradient and regimes against arithmetic done by hand.

What is worked out by hand is Python's float arithmetic on the numbers written out, never the
trainer's own formula.
"""

import itertools
import math

import pytest
import torch
from helpers import arguments, gradients, share

import acpo
from runtime import measure

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


def column(statistics, name, bins=range(1, 6)):
    return [statistics[f"{name}_{i}"] for i in bins]


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


# ---------------------------------------------------------------------------------------------------------- update


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
