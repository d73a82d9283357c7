"""GRPO with a correction for the sampler, in numbers.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

import dataclasses
import math

import pytest
import torch
from conftest import step_of_main
from helpers import E20, arguments

import grpo_tis

NAN, INF = math.nan, math.inf
both = pytest.mark.parametrize("correction", ["tis", "icepop"])


pytestmark = pytest.mark.usefixtures("on_the_cpu")


# ------------------------------------------------------------------------------------------------------ the weight


@both
def test_a_weight_at_the_very_bound_is_not_cut(correction):
    high, low = (torch.tensor(x, dtype=torch.float64).exp().item() for x in (0.25, -0.25))
    batch = {"old_logp": torch.tensor([0.25, -0.25], dtype=torch.float64), "sampler_logp": torch.zeros(2)}
    args = arguments(grpo_tis, correction=correction, correction_max=high, correction_min=low)
    weight, cut = grpo_tis.sampler_correction(batch, args)
    assert weight.tolist() == [high, low] and not cut.any()
    args = dataclasses.replace(args, correction_max=high - 1e-12, correction_min=low + 1e-12)
    weight, cut = grpo_tis.sampler_correction(batch, args)
    assert cut.tolist() == [True, correction == "icepop"]
    assert weight.tolist() == ([high - 1e-12, low] if correction == "tis" else [0, 0])


@pytest.mark.parametrize("sampler_logp", [-INF, -1e30, -200.0])
@both
def test_a_token_that_the_sampler_held_impossible_has_a_finite_weight(correction, sampler_logp):
    batch = {"old_logp": torch.tensor([-3.0]), "sampler_logp": torch.tensor([sampler_logp])}
    args = arguments(grpo_tis, correction=correction, correction_max=1e12)
    weight, cut = grpo_tis.sampler_correction(batch, args)
    assert weight.item() == pytest.approx(E20) and not cut.any()


# -------------------------------------------------------------------------------------------------------- the loss


# ------------------------------------------------------------------------------------ responses that are left out


# ------------------------------------------------------------------------------------------------------ the metrics


def metrics_of(batch, args):
    """Those that main writes."""
    with pytest.MonkeyPatch.context() as patch:
        metrics, given = step_of_main(grpo_tis, args, batch, [1.0] * len(batch["mask"]), patch)
    assert given["sampler_logp"] is batch["sampler_logp"]  # of which the loss makes the weights
    return metrics


@both
def test_the_metrics_by_hand(correction):
    """Ratios of 1.5, 3, 0.25 and 1 on four response tokens. Weights 1.5, 2, 0.25, 1, or 1.5, 0, 0, 1."""
    ratios = torch.tensor([[9.0, 1.5, 3.0, 9.0], [9.0, 9.0, 0.25, 1.0]], dtype=torch.float64)
    batch = {"mask": torch.tensor([[False, True, True, False], [False, False, True, True]])}
    batch |= {"old_logp": torch.full((2, 4), -5.0), "ref_logp": torch.full((2, 4), -5.0), "entropy": torch.zeros(2, 4)}
    batch |= {"sampler_logp": -5 - ratios.log(), "ids": torch.zeros(2, 4)}
    metrics = metrics_of(batch, arguments(grpo_tis, correction=correction, responses_per_prompt=1))
    mean, cut = (4.75 / 4, 1 / 4) if correction == "tis" else (2.5 / 4, 2 / 4)
    assert metrics["correction_mean"] == pytest.approx(mean, rel=1e-12) and metrics["correction_cut"] == cut
    assert metrics["sampler_gap"] == pytest.approx((math.log(1.5) + math.log(3) + math.log(4)) / 4, rel=1e-12)


def test_icepops_least_weight_is_at_most_the_largest():
    with pytest.raises(ValueError, match=r"^--correction_min is 3\.0; it must be at most --correction_max, 2\.0$"):
        grpo_tis.Args(correction="icepop", correction_min=3.0).check()
    with pytest.raises(ValueError, match=r"^--correction_min is 0\.5; it must be at most --correction_max, 0\.4$"):
        grpo_tis.Args(correction="icepop", correction_max=0.4).check()
    grpo_tis.Args(correction="icepop", correction_min=1.0, correction_max=1.0).check()
    grpo_tis.Args(correction="tis", correction_max=0.4).check()  # which has no least weight
