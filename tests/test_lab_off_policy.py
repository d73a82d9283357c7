"""lab/off_policy.py: each of its measurements on numbers worked by hand, and one run without a sampler."""

import json
import math
import statistics
import sys

import pytest
import torch
from conftest import ROOT
from helpers import PROMPTS
from test_lab import batch_of, drawn, of_lab, script_args, two_tokens

import grpo
from lab import common, off_policy, reversal
from tools.maintain import claims

SHARED = drawn  # a fixture of test_lab.py, which pytest finds by its name here
pytestmark = pytest.mark.usefixtures("on_the_cpu")

# -------------------------------------------------------------------------------- the spread of ρ


def test_the_spread_of_two_bins_by_hand():
    """ρ 1.0 and 1.4 have σ 0.2 (ddof 0), 1.0 and 1.2 have 0.1; an edge belongs to the bin below."""
    p = torch.tensor([0.1, 0.5, 0.9, 0.7]).double()
    found = off_policy.spread_of(torch.tensor([1.0, 1.4, 1.0, 1.2]), p.log(), [0.5])
    assert found["tokens"] == [2, 2]
    assert found["sigma"] == pytest.approx([0.2, 0.1], rel=1e-6)
    low, high = ((0.9**4 + 0.5**4) / 2) ** 0.25, ((0.1**4 + 0.3**4) / 2) ** 0.25
    assert found["rest"] == pytest.approx([low, high])
    assert found["fit"]["bins"] == 0  # of two tokens each: too few


def test_the_fit_of_lemma_1_by_hand():
    exact = off_policy.fit([0.5, 0.125, 0.5 * 0.01], [1.0, 0.5, 0.1])  # σ = 0.5 (1 − π)²
    assert exact == {"kappa": pytest.approx(0.5), "factor": pytest.approx(1), "exponent": pytest.approx(4), "bins": 3}
    # σ = 1 − π: the exponent is 2. σ/(1 − π)² is 1 and 4, their geometric mean 2, each off by 2.
    flat = off_policy.fit([1.0, 0.25], [1.0, 0.25])
    assert flat == {"kappa": pytest.approx(2), "factor": pytest.approx(2), "exponent": pytest.approx(2), "bins": 2}
    constant = off_policy.fit([0.3, 0.3, 0.0], [1.0, 0.25, 0.1])  # a bin without σ has no logarithm
    assert constant["exponent"] == pytest.approx(0) and constant["bins"] == 2
    assert off_policy.fit([0.3], [0.5]) == {"kappa": None, "factor": None, "exponent": None, "bins": 1}
    assert off_policy.fit([0.0, 0.0], [0.5, 0.2])["kappa"] == 0  # ρ does not spread
    assert off_policy.fit([], [])["kappa"] is None


# ------------------------------------------------------------------------- two tokens and one layer


def test_the_updates_are_those_of_one_step_of_the_trainer():
    """With its own learning rate and gradient norm; here it cuts the gradient, which is 7 long."""
    moved = []
    for script in ("lab", "grpo"):
        policy, sampled = two_tokens(overlap=0.6)
        args = of_lab(off_policy, prompts=2, responses=1, updates=2)
        batch = sampled.batch | {"advantages": sampled.batch["mask"] * torch.tensor([[9.0], [-30.0]])}
        if script == "lab":
            counts = [number for number in off_policy.positions(policy, batch, args, common.learning_rate(args))]
            assert counts == [0, 1, 2]
        else:
            of_script = common.trainer_args("grpo", args, kl_coef=0.0, updates_per_step=2, max_grad_norm=1.0)
            settings = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}  # kk_tiny's
            optimizer = torch.optim.AdamW(policy.parameters(), **settings)
            grpo.update(policy, optimizer, batch, 1, of_script)
        moved.append(policy.weight.detach())
    assert torch.equal(*moved)
    assert not torch.equal(moved[0], two_tokens(overlap=0.6)[0].weight)


# ---------------------------------------------------------------------------- the clip and entropy


def test_signals_of_both_signs_cancel_in_the_remarks_own_quantity():
    """(1 − π)·ρ·A of p ≤ 0.25: 0.9·1·2 and −0.8·1·1; their mean size is 1.3, and their mean 0.5."""
    batch, logp = batch_of([[{"p": 0.1}, {"p": 0.2}], [{"p": 0.9}]])
    weight = torch.tensor([[0, 2.0, -1.0], [0, -3.0, 0]]).double() / 3
    sizes, means = off_policy.mean_signals(weight, logp, batch)
    assert sizes == [pytest.approx(1.3), None, None, pytest.approx(0.3)]
    assert means == [pytest.approx(0.5), None, None, pytest.approx(-0.3)]
    assert off_policy.log_ratio(sizes) == pytest.approx(math.log(1.3 / 0.3)) and off_policy.log_ratio(means[1:]) is None


def test_what_the_clip_cuts_off_by_hand():
    """Of p ≤ 0.25: entropies 1, 2, 3, 4 with the first and the third cut off; one more has no advantage."""
    improbable = [{"p": 0.1, "entropy": float(n)} for n in (1, 2, 3, 4)] + [{"p": 0.1, "A": 0.0, "entropy": 0.0}]
    batch, _ = batch_of([improbable, [{"p": 0.9}, {"p": 0.9}, {"p": 0.5}]])
    weight = batch["advantages"].clone()
    weight[0, 1] = weight[0, 3] = weight[1, 2] = 0
    is_cut = off_policy.cut_off(weight, batch)
    assert is_cut.sum() == 3 and not is_cut[0, 5]
    found = off_policy.of_clip(is_cut, batch)
    assert found["share"] == [0.5, 0, 0, 0.5] and found["tokens"] == 3
    assert found["share_of_all"] == pytest.approx(3 / 7)
    assert found["by_entropy"] == {"low": 0.5, "high": 0.5}
    assert found["improbable"] == pytest.approx(2 / 3)
    weight[0, 3] = 1
    found = off_policy.of_clip(off_policy.cut_off(weight, batch), batch)
    assert found["by_entropy"] == {"low": 0.5, "high": 0}


# ------------------------------------------------------------------------------------- the command


def sampled_of(drawn):
    """The batch of kk_tiny's tokens as vLLM would have sampled it, with rewards 0, 1 and 2 in turn."""
    batch, policy = drawn
    logp, entropy = grpo.log_probs(policy, batch, script_args("grpo", rows=len(batch["ids"])))
    batch = batch | {"old_logp": logp, "ref_logp": logp, "entropy": entropy}
    rewards = torch.arange(len(batch["ids"])).remainder(3).float()
    return common.Sampled(batch, rewards, [], [], [])


def test_a_run_without_a_sampler(drawn, tmp_path, monkeypatch, capsys):
    """With a batch of kk_tiny's tokens in place of what vLLM would have sampled."""
    batch, _ = drawn
    sampled = sampled_of(drawn)
    monkeypatch.setattr(common, "load_batches", lambda policy, args, count, need_gradient: [sampled] * count)
    monkeypatch.chdir(ROOT)
    flags = f"--prompts {PROMPTS} --responses 3 --updates 2 --batches 1 --out {tmp_path} --cache {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["off_policy", *flags.split()])
    off_policy.main()
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "off_policy.json").read_text())
    assert (tmp_path / "off_policy.png").stat().st_size > 20_000
    assert result["command"].startswith(f"python -m lab.off_policy --prompts {PROMPTS}")
    assert result["lr"] == 1e-4 and result["tokens"] == int(batch["mask"].sum())
    after = result["batches"][0]["after"]
    assert set(after) == {"0", "1", "2"}
    assert sum(after["2"]["norm_share"]) == pytest.approx(1, abs=1e-3)
    spread = {number: max(after[number]["sigma"]) for number in after}
    assert spread["0"] < 1e-5 < spread["1"] < spread["2"]
    assert shown.rstrip().splitlines()[-1] == claims.of_file("off_policy", tmp_path)[-1]


def test_each_learning_rate_begins_at_the_same_weights(drawn, tmp_path, monkeypatch):
    """lab.reversal, three times with the same batch: a larger learning rate gives a larger κ."""
    sampled = sampled_of(drawn)
    monkeypatch.setattr(common, "load_batches", lambda policy, args, count, need_gradient: [sampled] * count)
    monkeypatch.chdir(ROOT)
    flags = (
        f"--prompts {PROMPTS} --responses 3 --updates 2 --batches 3 --lrs 1e-4 1e-3 --out {tmp_path} --cache {tmp_path}"
    )
    monkeypatch.setattr(sys, "argv", ["reversal", *flags.split()])
    reversal.main()
    assert (tmp_path / "reversal.png").stat().st_size > 20_000
    batches = json.loads((tmp_path / "reversal.json").read_text())["batches"]
    assert batches[0] == batches[1] == batches[2]  # the policy has its weights again
    slow, fast = batches[0]["lr 0.0001"], batches[0]["lr 0.001"]
    assert set(slow) == set(fast) == {"0", "1", "2"} and slow["0"] == fast["0"]
    assert slow["0"]["kappa"] < 1e-5 < slow["2"]["kappa"] < fast["2"]["kappa"]
    assert slow["0"]["clip"]["share"] == [0, 0, 0, 0]


# ------------------------------------------------------------------------------ ACPO, Proposition 1


@pytest.mark.parametrize(("sigma", "sigma_of_a"), [(0.25, 1.0), (0.2, 1.0), (0.15, 0.5)])
def test_grpos_mean_weight_is_that_of_the_proposition_under_its_assumptions(sigma, sigma_of_a):
    """Eq. 52 for A ~ N(0, σ_A²) and ρ ~ N(1, σ²), independent; (1 − π), which is its other factor, is left out.

    ρ and A stand on a grid of equally probable values, so that nothing is random. What is between them and eq. 52 is
    grpo.py's own clip: the gradient of its loss with respect to log π.
    """
    args = script_args("grpo")
    normal = statistics.NormalDist()
    ratios, advantages = (
        torch.tensor([mean + size * normal.inv_cdf((i + 0.5) / count) for i in range(count)], dtype=torch.float64)
        for mean, size, count in ((1, sigma, 4000), (0, sigma_of_a, 200))
    )
    logp = ratios.log()[:, None].repeat(1, 200).requires_grad_()  # [ρ, A]
    zeros = torch.zeros_like(logp)
    batch = {"old_logp": zeros, "ref_logp": zeros, "mask": zeros == 0, "advantages": advantages.expand(4000, -1)}
    loss, _ = grpo.policy_loss(logp, batch, logp.numel(), args)
    loss.backward()

    high, low = args.clip_high / sigma, args.clip_low / sigma
    bracket = normal.cdf(high) - normal.cdf(low) - sigma * (normal.pdf(high) + normal.pdf(low))
    expected = sigma_of_a / math.sqrt(2 * math.pi) * bracket
    assert -logp.grad.sum().item() == pytest.approx(expected, abs=1e-4)  # the grid is that fine
    # This is a mean with signs. That of the sizes is much larger: without a clip it would be σ_A·√(2/π).
    assert logp.grad.abs().sum().item() > 0.8 * sigma_of_a * math.sqrt(2 / math.pi) > 10 * abs(expected)


def mean_of(of_sigma, kappa, start, end, cells=500):
    """The mean of (1 − π)·F(σ) over π from start to end, with Lemma 1's σ = κ(1 − π)² (ACPO, eq. 54 and 55)."""
    rests = [1 - (start + (end - start) * (i + 0.5) / cells) for i in range(cells)]  # 1 − π
    return sum(rest * of_sigma(kappa * rest**2) for rest in rests) / cells


def ratio_of_the_means(of_sigma, kappa, low=0.25, high=0.75):
    """|mean over π ≤ low| over that of π ≥ high."""
    return abs(mean_of(of_sigma, kappa, 0, low) / mean_of(of_sigma, kappa, high, 1))


def test_by_the_propositions_own_formula_the_dominance_does_not_reverse():
    """lab/README.md says so. Eq. 56 and 64, in Remark 1's derivation, have Φ(−ε_l/σ) where eq. 6 has Φ(ε_l/σ)."""
    normal = statistics.NormalDist()
    high, low = 0.24, 0.2

    def above(x):  # 1 − Φ(x), with its digits where Φ is 1 to the last one
        return math.erfc(x / math.sqrt(2)) / 2

    def with_signs(sigma):  # eq. 6
        edges = normal.pdf(high / sigma) + normal.pdf(low / sigma)
        return above(low / sigma) - above(high / sigma) - sigma * edges

    def remarks(sigma):  # eq. 56
        edges = normal.pdf(high / sigma) + normal.pdf(low / sigma)
        return normal.cdf(high / sigma) - normal.cdf(-low / sigma) - sigma * edges

    def size(sigma):  # of G, in place of its mean with signs: both parts of eq. 51, added
        edges = normal.pdf(low / sigma) - normal.pdf(high / sigma)
        return normal.cdf(high / sigma) + normal.cdf(low / sigma) + sigma * edges

    kappas = [0.1, 0.17, 0.2, 0.3, 0.5, 0.55, 0.6, 0.7, 0.8, 1, 3, 10, 30]
    assert min(ratio_of_the_means(with_signs, kappa) for kappa in kappas) > 100
    # The improbable tokens' mean passes through 0 once, near κ = 0.17031: there alone is it below the others'.
    assert mean_of(with_signs, 0.1703, 0, 0.25) > 0 > mean_of(with_signs, 0.1704, 0, 0.25)
    assert ratio_of_the_means(size, 0.01) == pytest.approx(7)  # the mean 1 − π of both: 0.875 and 0.125
    assert min(ratio_of_the_means(size, kappa) for kappa in kappas) == pytest.approx(3.9, abs=0.05)
    assert [kappa for kappa in kappas if ratio_of_the_means(remarks, kappa) < 1] == [0.55, 0.6, 0.7]
