"""What the reference of token weights (test_token_weights.py) does not reach: edges of bins and regions in float32,
numbers that are none, passes, and the metrics of single scripts.

What is worked out by hand is Python's float arithmetic on the numbers written out, never a script's own formula.
"""

import math

import pytest
import torch
from conftest import step_of_main
from helpers import arguments, weights

import acpo
import dppo
import entropy_top
import grpo_async
import grpo_stale
import grpo_tis

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_bins", [1, 5])
def test_a_probability_on_an_edge_belongs_to_the_bin_above_and_1_to_the_last(n_bins, dtype):
    """Each token's ρ tells its bin by the ε it gets: k/n itself, the next number below it, and the bins' middles."""
    logp, expected = [0.0, -1e-7, -200.0], [n_bins, n_bins, 1]
    for k in range(n_bins):
        logp.append(math.log((k + 0.5) / n_bins))
        expected.append(k + 1)
    logp = torch.tensor(logp, dtype=torch.float64).to(dtype)
    edges = torch.tensor([math.log(k / n_bins) for k in range(1, n_bins)], dtype=torch.float64).to(dtype)
    logp = torch.cat([logp, edges, torch.nextafter(edges, torch.full_like(edges, -100))])[None]
    expected += [*range(2, n_bins + 1), *range(1, n_bins)]
    for k in range(1, n_bins + 1):  # with a spread of ρ in bin k alone
        inside = torch.tensor([[bin_ == k for bin_ in expected]])
        spread = 0.1 * inside * torch.arange(logp.shape[1])
        batch = {"mask": torch.ones(logp.shape, dtype=torch.bool), "old_logp": logp - spread}
        clip_range, of_bins = acpo.clip_ranges(logp, batch, arguments(acpo, n_bins=n_bins))
        assert (clip_range > 0.2001).tolist() == inside.tolist()
        assert [numbers["tokens"] for numbers in of_bins] == [expected.count(j) for j in range(1, n_bins + 1)]


@pytest.mark.parametrize(("dtype", "moved", "sigma"), [(torch.float64, 1e-9, 1e-9), (torch.float32, 1e-8, None)])
def test_nothing_cancels_where_ratios_are_close_to_1(dtype, moved, sigma):
    """ρ = 1 ± 1e-9: mean(ρ²) − mean(ρ)² would lose 1e-18 among digits of 1. In float32 ρ is rounded only after exp."""
    logp = torch.tensor([[-1e-4, -3e-4]], dtype=dtype)
    old_logp = torch.tensor([[-1e-4 - moved, -3e-4 + moved]], dtype=dtype)
    above, below = (logp - old_logp)[0].tolist()  # exact in float32: the numbers are close
    assert above > 0 > below > -2e-8  # too little for float32's exp
    _, of_bins = acpo.clip_ranges(logp, {"mask": logp < 0, "old_logp": old_logp}, arguments(acpo))
    assert of_bins[-1]["sigma"] == pytest.approx(sigma or (above - below) / 2, rel=1e-6)


def test_largest_and_mean_clip_range_by_hand():
    """Three updates, two bins: means by tokens, and a bin's empty update neither counts nor is the largest."""
    updates = [
        [{"tokens": 0, "sigma": 0.0, "clip_range": 0.2}, {"tokens": 30, "sigma": 0.0, "clip_range": 0.2}],
        [{"tokens": 10, "sigma": 0.1, "clip_range": 0.5}, {"tokens": 20, "sigma": 0.02, "clip_range": 0.26}],
        [{"tokens": 30, "sigma": 0.2, "clip_range": 0.8}, {"tokens": 10, "sigma": 0.04, "clip_range": 0.32}],
    ]
    metrics = acpo.bin_metrics(updates)
    assert (metrics["bin_tokens_1"], metrics["bin_tokens_2"]) == (40, 60)
    assert (metrics["clip_range_max_1"], metrics["clip_range_max_2"], metrics["clip_range_max"]) == (0.8, 0.32, 0.8)
    assert metrics["clip_range_mean_1"] == pytest.approx((5 + 24) / 40)
    assert metrics["clip_range_mean_2"] == pytest.approx((6 + 5.2 + 3.2) / 60)
    assert metrics["clip_range_mean"] == pytest.approx((5 + 24 + 6 + 5.2 + 3.2) / 100)
    empty = acpo.bin_metrics([[{"tokens": 0, "sigma": 0.0, "clip_range": 0.2}, updates[0][1]]])
    assert empty["clip_range_mean_1"] == 0.2 and empty["clip_range_mean"] == 0.2


NEARER, NEARLY, HALF = math.log(0.9), math.log(0.97), math.log(0.5)
AT_THE_ENDS = [  # log π_old, log π, divergence, δ, which of the advantages 1 and −1 cut the token off
    # e^-200 is 0 in float32. D from 0 to 1/2 is log 2; from 1/2 to 0 it is 99.
    *((-200.0, HALF, kind, None, [1]) for kind in ("tv", "kl")),
    *((HALF, -200.0, kind, None, [-1]) for kind in ("tv", "kl")),
    (-200.0, -300.0, "kl", None, []),  # 100 nats, but hardly any probability
]
for one in (0.0, -1e-9, 1e-7):
    # 1 − π counts as 10⁻⁸ then, also if it is negative by rounding. From 0.9 to 1 D is 0.9·log 0.9 + 0.1·log(0.1/10⁻⁸)
    # = 1.517, from 1 to 0.97 −log 0.97 = 0.0305.
    AT_THE_ENDS += [(NEARER, one, "kl", 1.52, []), (NEARER, one, "kl", 1.51, [1]), (one, one, "kl", None, [])]
    AT_THE_ENDS += [(one, NEARLY, "kl", 0.030, [-1]), (one, NEARLY, "kl", 0.031, [])]


@pytest.mark.parametrize("old_logp, new_logp, divergence, delta, cut_off", AT_THE_ENDS)
def test_dppo_with_probabilities_of_zero_and_one_to_rounding(old_logp, new_logp, divergence, delta, cut_off):
    """In the float32 that the trainer has. Loss and gradient are finite."""
    for advantage in (1, -1):
        logp = torch.tensor([[0.0, new_logp]], requires_grad=True)
        batch = {"old_logp": torch.tensor([[0.0, old_logp]]), "advantages": torch.tensor([[0.0, float(advantage)]])}
        batch |= {"mask": torch.tensor([[False, True]]), "ref_logp": batch["old_logp"]}
        loss, clipped = dppo.policy_loss(logp, batch, 1, arguments(dppo, divergence=divergence, delta=delta))
        loss.backward()
        assert math.isfinite(loss.item()) and logp.grad.isfinite().all()
        assert clipped.item() == (advantage in cut_off)


def test_a_token_whose_entropy_is_no_number_is_not_left_out_silently(tiny_model, batch, tmp_path):
    """As where the weights have gone: its loss is none either, and the program ends before they are touched."""
    args = arguments(entropy_top, model=str(tiny_model), run_dir=str(tmp_path))
    policy = entropy_top.load_policy(args, trained=True)
    start = weights(policy)
    broken = batch | {key: batch[key].clone() for key in ("entropy", "old_logp")}
    row, column = batch["mask"].nonzero()[0].tolist()
    broken["entropy"][row, column] = broken["old_logp"][row, column] = math.nan
    with pytest.raises(SystemExit, match="loss nan"):
        entropy_top.update(policy, torch.optim.SGD(policy.parameters(), lr=0.1), broken, 1, args)
    assert torch.equal(weights(policy), start)


@pytest.mark.parametrize("trainer", [grpo_tis, grpo_stale, grpo_async], ids=lambda trainer: trainer.__name__)
def test_the_weights_of_icepop_and_tis_by_value(trainer):
    """π_old/π_sampler of 0.1, 0.49, 0.51, 1, 1.9 and 2.1 within 0.5 and 2."""
    ratios = torch.tensor([0.1, 0.49, 0.51, 1, 1.9, 2.1])
    batch = {"old_logp": ratios.log() - 1, "sampler_logp": torch.full((6,), -1.0)}
    for correction, expected in (("icepop", [0, 0, 0.51, 1, 1.9, 0]), ("tis", [0.1, 0.49, 0.51, 1, 1.9, 2])):
        args = trainer.Args(correction=correction, correction_min=0.5, correction_max=2.0)
        weight, cut = trainer.sampler_correction(batch, args)
        torch.testing.assert_close(weight, torch.tensor(expected), rtol=1e-5, atol=0)
        assert cut.tolist() == [correction == "icepop"] * 2 + [False] * 3 + [True]


@pytest.mark.parametrize("correction", ["tis", "icepop"])
def test_the_metrics_by_hand(correction, monkeypatch):
    """Ratios of 1.5, 3, 0.25 and 1 on four response tokens. Weights 1.5, 2, 0.25, 1, or 1.5, 0, 0, 1."""
    ratios = torch.tensor([[9.0, 1.5, 3.0, 9.0], [9.0, 9.0, 0.25, 1.0]], dtype=torch.float64)
    batch = {"mask": torch.tensor([[False, True, True, False], [False, False, True, True]])}
    batch |= {"old_logp": torch.full((2, 4), -5.0), "ref_logp": torch.full((2, 4), -5.0), "entropy": torch.zeros(2, 4)}
    batch |= {"sampler_logp": -5 - ratios.log(), "ids": torch.zeros(2, 4)}
    args = arguments(grpo_tis, correction=correction, responses_per_prompt=1)
    metrics, given = step_of_main(grpo_tis, args, batch, [1.0, 1.0], monkeypatch)
    assert given["sampler_logp"] is batch["sampler_logp"]  # of which the loss makes the weights
    mean, cut = (4.75 / 4, 1 / 4) if correction == "tis" else (2.5 / 4, 2 / 4)
    assert metrics["correction_mean"] == pytest.approx(mean, rel=1e-12) and metrics["correction_cut"] == cut
    assert metrics["sampler_gap"] == pytest.approx((math.log(1.5) + math.log(3) + math.log(4)) / 4, rel=1e-12)
