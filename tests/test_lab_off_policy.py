"""lab/off_policy.py: each of its measurements on numbers worked by hand, and one run without a sampler."""

import itertools
import json
import math
import statistics
import sys

import pytest
import torch
from conftest import ROOT
from helpers import PROMPTS
from test_lab import A, OneLayer, batch_of, drawn, of_lab, script_args, sigmoid, two_tokens, words_on

import grpo
from lab import common, off_policy, reversal, verdicts

SHARED = drawn  # a fixture of test_lab.py, which pytest finds by its name here
pytestmark = pytest.mark.usefixtures("on_the_cpu")

# -------------------------------------------------------------------------------- the spread of ρ


def test_it_is_measured_after_powers_of_two_and_at_the_end():
    assert off_policy.counts_of(16) == [0, 1, 2, 4, 8, 16]
    assert off_policy.counts_of(6) == [0, 1, 2, 4, 6]
    assert off_policy.counts_of(1) == [0, 1]


def test_the_spread_of_two_bins_by_hand():
    """ρ 1.0 and 1.4 have σ 0.2 (ddof 0), 1.0 and 1.2 have 0.1; an edge belongs to the bin below."""
    p = torch.tensor([0.1, 0.5, 0.9, 0.7]).double()
    found = off_policy.spread_of(torch.tensor([1.0, 1.4, 1.0, 1.2]), p.log(), [0.5])
    assert found["tokens"] == [2, 2]
    assert found["sigma"] == pytest.approx([0.2, 0.1], rel=1e-6)
    low, high = ((0.9**4 + 0.5**4) / 2) ** 0.25, ((0.1**4 + 0.3**4) / 2) ** 0.25
    assert found["rest"] == pytest.approx([low, high])
    assert found["fit"]["bins"] == 0  # of two tokens each: too few


def test_an_empty_bin_has_no_spread():
    found = off_policy.spread_of(torch.ones(1), torch.zeros(1), [0.5])
    assert (found["tokens"], found["sigma"], found["rest"]) == ([0, 1], [None, 0], [None, 0])


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


def test_tokens_that_obey_the_lemma_give_its_exponent_in_wide_bins():
    """Each π comes with 1 ± κ(1 − π)², 20 tokens of each; a bin of 19 tokens that do not is left out."""
    p = torch.tensor([0.05, 0.2, 0.3, 0.6, 0.95]).double().repeat_interleave(20)
    signs = torch.tensor([1.0, -1.0]).double().repeat(50)
    ratio = 1 + 0.4 * signs * (1 - p) ** 2
    p = torch.cat([p, torch.full((19,), 0.8).double()])
    ratio = torch.cat([ratio, torch.linspace(0, 9, 19).double()])
    found = off_policy.spread_of(ratio, p.log(), [0.5, 0.75, 0.9])
    assert found["tokens"] == [60, 20, 19, 20]
    assert found["fit"]["bins"] == 3
    assert [found["fit"][name] for name in ("kappa", "exponent", "factor")] == pytest.approx([0.4, 4, 1])
    assert found["fit_without_last"]["bins"] == 2 and found["fit_without_last"]["exponent"] == pytest.approx(4)


def test_the_fit_without_the_last_bin_does_not_feel_it():
    p = torch.tensor([0.2, 0.6, 0.95]).double().repeat_interleave(20)
    signs = torch.tensor([1.0, -1.0]).double().repeat(30)
    sigma = torch.tensor([0.8, 0.4, 0.3]).double().repeat_interleave(20)  # 1 − π, but for the last
    found = off_policy.spread_of(1 + signs * sigma, p.log(), [0.5, 0.9])
    assert found["fit_without_last"]["exponent"] == pytest.approx(2)
    assert found["fit"]["exponent"] < 1.5


# ------------------------------------------------------------------------- two tokens and one layer


def moved_tokens(now):
    """The two tokens of test_lab, of π 0.1 (A > 0) and 0.9 (A < 0), when the policy gives them `now`."""
    _, sampled = two_tokens()
    first = [math.log(p / (1 - p)) / 2 for p in now]
    policy = OneLayer([[1.0, 0.0], [0.0, 1.0]], [first, [-x for x in first]])
    args = of_lab(off_policy, updates=2)
    batch = common.with_advantages("grpo", sampled, common.trainer_args("grpo", args))
    return policy, batch, args


def test_before_the_first_update_improbable_tokens_dominate_by_hand():
    """‖∇ log π‖ is √2 · (1 − π): the two gradients are as 0.9 to 0.1."""
    policy, batch, args = moved_tokens([0.1, 0.9])
    found, ratio, is_cut = off_policy.measure_at(0, policy, batch, args)
    low, high = A * math.sqrt(2) * 0.9 / 2, A * math.sqrt(2) * 0.1 / 2
    assert found["norm"] == pytest.approx([low, 0, 0, high])
    assert found["norm_share"] == pytest.approx([0.9, 0, 0, 0.1])
    assert found["own_norm"] == [pytest.approx(2 * low), None, None, pytest.approx(2 * high)]
    assert found["mean_signal"] == [pytest.approx(0.9 * A), None, None, pytest.approx(0.1 * A)]
    nine = pytest.approx(math.log(9))
    assert found["log_ratio"] == {"gradient": nine, "mean_signal": nine, "signed_signal": nine}
    assert ratio[batch["mask"]].tolist() == pytest.approx([1, 1])
    assert not is_cut.any() and found["clip"]["tokens"] == 0
    assert set(found["spread"]) == {"all", "waiting"}  # no token has had its update
    assert found["acpo_clip_ranges"] == pytest.approx([0.2] * 5)  # ρ 1 has no spread


def test_a_token_beyond_the_clip_has_no_gradient_and_dominance_reverses():
    """ρ 1.5 is above 1.24 and A > 0: cut off. The other has ρ 0.9 and 1 − π 0.19 now."""
    policy, batch, args = moved_tokens([0.15, 0.81])
    found, ratio, is_cut = off_policy.measure_at(1, policy, batch, args)
    assert ratio[batch["mask"]].tolist() == pytest.approx([1.5, 0.9])
    assert is_cut[batch["mask"]].tolist() == [True, False]
    assert found["norm"] == pytest.approx([0, 0, 0, A * math.sqrt(2) * 0.9 * 0.19 / 2])
    assert found["norm_share"] == pytest.approx([0, 0, 0, 1])
    assert found["mean_signal"] == found["signed_signal"] == [0, None, None, pytest.approx(A * 0.9 * 0.19)]
    assert found["log_ratio"]["gradient"] < -100
    clip = found["clip"]
    assert (clip["tokens"], clip["share"], clip["share_of_all"]) == (1, [1, 0, 0, 0], 0.5)
    assert clip["improbable"] == 1
    assert {name: sum(of["tokens"]) for name, of in found["spread"].items()} == {"all": 2, "used": 1, "waiting": 1}
    assert found["sigma"] == [0, None, None, 0]  # one token in two of the bins


def test_one_update_by_hand_and_the_policy_gets_its_weights_back():
    """AdamW's first update moves every weight by lr as the gradient's sign says, after its decay."""
    policy, sampled = two_tokens()
    before = common.copy_weights(policy)
    args = of_lab(off_policy, updates=1, lr=0.01)
    found, values = off_policy.measure(policy, before, sampled, args)
    assert torch.equal(policy.weight, before[0])
    assert list(found["after"]) == [0, 1] and found["share"] == [0.5, 0, 0, 0.5]
    decay = 1 - 0.01 * 0.01  # lr · weight_decay
    odds = [math.log(0.1 / 0.9) * decay + 0.02, math.log(0.9 / 0.1) * decay - 0.02]
    expected = [sigmoid(odds[0]) / 0.1, sigmoid(odds[1]) / 0.9]
    assert values["ratio"].tolist() == pytest.approx(expected, abs=1e-6)
    assert values["is_cut"].tolist() == [False, False]
    assert values["entropy"].tolist() == [0.5, 0.5]


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


def test_probability_and_entropy_by_hand():
    """The three unsure tokens lie on a rising line, and a sure one lets all four fall."""
    p, entropy = torch.tensor([0.1, 0.2, 0.3, 1.0]).double(), torch.tensor([1.0, 1.1, 1.2, 0.0])
    found = off_policy.of_entropy(p.log(), entropy)
    assert found["unsure"] == pytest.approx(1) and found["tokens_unsure"] == 3
    # p − 0.4: −.3 −.2 −.1 .6; H − 0.825: .175 .275 .375 −.825. Products: −.64; squares .5 and .9275.
    assert found["all"] == pytest.approx(-0.64 / math.sqrt(0.5 * 0.9275))


# --------------------------------------------------------------------------------------- verdicts


def row(low, high, exponent, near, far, shares, correlation):
    """One batch's numbers, as the comparisons read them, after 0, 1 and 16 updates."""
    fit = {"exponent": exponent}
    after = {}
    for number, log in ((0, 1.0), (1, near), (16, far)):
        after[number] = {
            "sigma": [low, 0, 0, high],
            "spread": {"all": {"fit": fit, "fit_without_last": fit}},
            "log_ratio": dict.fromkeys(off_policy.SIGNALS, log),
            "norm_share": [0.5 - 0.01 * number * (far < 0) + 0.02 * number * (far > 0)],
            "clip": {"improbable": shares},
        }
    return {"after": after, "entropy": {"all": correlation, "unsure": correlation}}


def test_verdicts_can_say_yes_no_and_that_they_cannot_tell(tmp_path):
    def words(*rows):
        return words_on("off_policy", tmp_path, rows)

    yes = row(0.9, 0.1, 4.3, near=1.0, far=-1.0, shares=0.8, correlation=-0.5)
    no = row(0.1, 0.3, 2.0, near=-1.0, far=1.5, shares=0.4, correlation=0.5)
    assert words(yes, yes, yes) == ["shows"] * 9
    no_such_exponent = ["no effect of that size"] * 2
    assert words(no, no, no) == ["the opposite", *no_such_exponent, *["the opposite"] * 6]
    assert words(yes, yes) == ["too few runs to tell"] * 9
    wide = row(2.0, 0.1, 4.3, near=1.0, far=-1.0, shares=0.8, correlation=-0.5)
    assert words(yes, yes, yes, wide)[0] == "shows"  # a ratio above 1 in each, though σ differs by batch


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
    assert shown.rstrip().splitlines()[-1] == verdicts.of_file("off_policy", tmp_path)[-1]


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

    kappas = [0.1, 0.17, 0.1703, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 1, 2, 3, 5, 10, 30]
    assert min(ratio_of_the_means(with_signs, kappa) for kappa in kappas) > 100
    # The improbable tokens' mean passes through 0 near 0.1703, and there alone is it below the others', which is 1e-82.
    means = {kappa: mean_of(with_signs, kappa, 0, 0.25) for kappa in kappas}
    assert [kappa for kappa in kappas if means[kappa] > 0] == [0.1, 0.17, 0.1703]
    slope = (mean_of(with_signs, 0.1704, 0, 0.25) - means[0.1703]) / 1e-4
    zero = 0.1703 - means[0.1703] / slope
    band = 2 * abs(mean_of(with_signs, zero, 0.75, 1) / slope)
    assert zero == pytest.approx(0.17031, abs=1e-5) and 1e-83 < band < 1e-80
    assert ratio_of_the_means(size, 0.01) == pytest.approx(7)  # the mean 1 − π of both: 0.875 and 0.125
    sizes = [ratio_of_the_means(size, kappa) for kappa in kappas]
    assert min(sizes) == sizes[kappas.index(3)] == pytest.approx(3.9, abs=0.05)
    reversed_at = [kappa for kappa in kappas if ratio_of_the_means(remarks, kappa) < 1]
    assert reversed_at == [0.55, 0.6, 0.7]
    high = low  # where the bounds are equal |F| = 2σφ(ε/σ), which grows with σ: improbable tokens have the larger one
    sigmas = [0.02 * 1.3**i for i in range(30)]
    assert [with_signs(s) for s in sigmas] == pytest.approx([-2 * s * normal.pdf(low / s) for s in sigmas])
    assert all(with_signs(b) < with_signs(a) < 0 for a, b in itertools.pairwise(sigmas))
