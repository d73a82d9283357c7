"""The lab's measurements, on cases worked by hand in Python's floats, and against gradients of a real model."""

import importlib
import json
import math
import statistics
import sys

import pytest
import torch
from conftest import KK_TINY, ROOT, run
from helpers import PROMPTS, flat, make_batch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import grpo
from lab import common, forking_tokens, key_factors, lens, off_policy, proposition, who_dominates
from tools.maintain import claims, updates

A = 2 / (math.sqrt(8) + 1e-6)  # rewards 3 and −1: mean 1, deviation √8


def script_args(script, rows=2, kl_coef=0.0):
    """A script's settings for `rows` responses to as many prompts; no KL term unless asked for."""
    sizes = common.Args(model=str(KK_TINY), prompts=rows, responses=1, max_tokens=100)
    changes = {} if script in ("reinforce", "opd", "sdpo", "maxrl") else {"kl_coef": kl_coef}
    return common.trainer_args(script, sizes, **changes)


def of_lab(module, **changes):
    return module.Args(**{"model": str(KK_TINY), "prompts": 1, "responses": 2} | changes)


def batch_of(rows):
    """(batch, log-probabilities now) of responses, each a list of tokens, behind one token of the prompt.

    A token: {p: π_old, ratio: ρ, A, entropy}, all but p with defaults. The shorter responses end with padding.
    """
    shape = (len(rows), max(len(row) for row in rows) + 1)
    batch = {"ids": torch.zeros(shape, dtype=torch.long), "mask": torch.zeros(shape, dtype=torch.bool)}
    for name in ("old_logp", "advantages", "entropy"):
        batch[name] = torch.zeros(shape, dtype=torch.float64)
    logp = torch.zeros(shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        for t, token in enumerate(row, 1):
            batch["mask"][i, t] = True
            batch["old_logp"][i, t] = math.log(token["p"])
            batch["advantages"][i, t] = token.get("A", 1.0)
            batch["entropy"][i, t] = token.get("entropy", 0.5)
            logp[i, t] = math.log(token["p"]) + math.log(token.get("ratio", 1.0))
    batch["ref_logp"] = batch["sampler_logp"] = batch["old_logp"]
    return batch, logp


class OneLayer(nn.Module):
    """A policy of one linear layer and two words: log-probabilities of [2, D] @ state.

    In place of ids: a number for each token, which has the state `states[number]`. Each token is the first word.
    """

    def __init__(self, states, weight):
        super().__init__()
        self.states = torch.tensor(states, dtype=torch.float64)  # [tokens, D]
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))  # [2, D]

    def forward(self, ids, mask, temperature, with_entropy=False):
        logp = (self.states[ids] @ self.weight.T / temperature).log_softmax(-1)[..., 0]
        return logp * mask, torch.zeros_like(logp)


OVERLAP = 0.6  # of the two tokens' states: their inner product
# Of GRPO's gradient for two_tokens: the low-probability token's part, the other's, and the whole. ∇ log π with respect
# to the layer is (1 − π) · (1, −1) ⊗ state, of length √2 · (1 − π). The advantages differ in sign.
LOW, HIGH = A * math.sqrt(2) * 0.9 / 2, A * math.sqrt(2) * 0.1 / 2
WHOLE = math.sqrt(LOW**2 + HIGH**2 - 2 * LOW * HIGH * OVERLAP)


def two_tokens():
    """A policy and a batch: a right response of a token with π 0.1, a wrong one with π 0.9. States have length 1."""
    ones = [math.log(0.1 / 0.9) / 2, math.log(0.9 / 0.1) / 2]  # logits of the first word
    height = math.sqrt(1 - OVERLAP**2)
    first = [ones[0], (ones[1] - OVERLAP * ones[0]) / height]
    policy = OneLayer([[1.0, 0.0], [OVERLAP, height]], [first, [-x for x in first]])
    batch, _ = batch_of([[{"p": 0.1}], [{"p": 0.9}]])
    batch["ids"] = torch.tensor([[0, 0], [0, 1]])
    return policy, common.Sampled(batch, torch.tensor([3.0, -1.0]), ["?"], [True, False])


def run_main(command, out, flags, monkeypatch, capsys):
    """The JSON that lab.COMMAND writes with these flags. It has drawn a picture, and its last line is the verdict."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [command, *flags.split(), "--out", str(out), "--cache", str(out / "cache")])
    importlib.import_module(f"lab.{command}").main()
    shown = capsys.readouterr().out
    result = json.loads((out / f"{command}.json").read_text())
    assert (out / f"{command}.png").stat().st_size > 20_000
    assert result["command"].startswith(f"python -m lab.{command} {flags}".strip())
    verdicts = claims.of_file(command, out)
    assert not verdicts or shown.rstrip().splitlines()[-1] == verdicts[-1]
    return result


for script in updates.ALGORITHMS:
    importlib.import_module(script)  # now: on_the_cpu patches what is loaded
pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def drawn():
    """A batch of kk_tiny's tokens, with ratios on both sides of every clip; and the policy."""
    policy = grpo.load_policy(script_args("grpo"), trained=True)
    batch = make_batch(KK_TINY)
    return {name: value for name, value in batch.items() if value.shape == batch["mask"].shape}, policy


@pytest.mark.parametrize("script", updates.ALGORITHMS)
def test_weights_times_gradients_of_log_pi_are_the_update_of_a_real_model(script, drawn):
    batch, policy = drawn
    args = script_args(script, len(batch["ids"]), kl_coef=0.1)
    logp, entropy = grpo.log_probs(policy, batch, args)
    weight, _ = updates.token_weights(script, batch, logp, entropy, args, is_first=True)
    recorder = updates.Recorder(policy)
    importlib.import_module(script).update(policy, recorder, batch, 1, args)
    expected = sum(flat(gradient).double() for gradient in recorder.gradients)
    policy.zero_grad()
    now, _ = policy(batch["ids"], batch["mask"], args.temperature)
    (-weight * now).sum().backward()
    found = flat(p.grad for p in policy.parameters()).double()
    policy.zero_grad()
    assert (found - expected).norm() < 1e-4 * expected.norm()


QUICK = "--quick --responses 3 --max_tokens 48"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """(A folder with the results of a quick run of lab.two_tasks, the run): vLLM samples a batch of each task."""
    out = tmp_path_factory.mktemp("lab")
    return out, run("lab/two_tasks.py", *QUICK.split(), "--model", KK_TINY, "--out", out, "--cache", out / "cache")


@pytest.mark.slow
def test_a_quick_run_of_two_tasks(quick):
    """kk_tiny can't read Countdown's prompts, but its tokens have probabilities all the same."""
    out, done = quick
    result = json.loads((out / "two_tasks.json").read_text())
    assert {"command", "commit", "machine", "versions", "date", "settings"} <= set(result)
    [batch] = result["batches"]
    assert list(batch) == result["tasks"] == ["kk", "countdown"]
    for found in batch.values():
        assert sum(found["share"]) == pytest.approx(1, abs=1e-4)
        assert all(norm > 0 for norm in found["norm"])
    assert result["advantages"] == "1"  # it is never right on Countdown
    assert done.stdout.count("TOO FEW RUNS TO TELL: ") == 2  # of one batch


@pytest.mark.parametrize("command", ["lens", "who_dominates", "right_direction", "proposition", "off_policy"])
@pytest.mark.slow
def test_a_quick_run_of_each_command(command, quick, monkeypatch, capsys):
    """With the batch of kk that was sampled."""
    monkeypatch.setattr(common, "sample", None)  # it would be called otherwise
    result = run_main(command, quick[0], QUICK, monkeypatch, capsys)
    assert command != "lens" or list(result["scripts"]) == lens.SCRIPTS


def test_no_response_breaks_the_page(tmp_path):
    """The page holds all it needs."""
    data = {"responses": [{"tokens": ["a </script><script>alert(1)</script>"]}], "scripts": ["grpo"]}
    lens.write_page(data, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "http" not in page and page.count("</script>") == 2
    assert json.loads(page.partition('id="lens-data">')[2].partition("</script>")[0]) == data


REFUSED = [
    ("right_direction", "--updates 5", "--updates is 5; it must be at least 2 and divide --prompts, which is 12"),
    ("lens", "--model models/nowhere", "--model models/nowhere is not a model folder"),
    ("reversal", "--lrs 1e-3 2e-3 3e-3 4e-3 5e-3", "List should have at most 4 items"),
    ("two_tasks", "--model models/kk_tiny --tasks kk kk", "--tasks kk kk: give two different ones"),
    ("stages", "--run runs/nowhere", "--run runs/nowhere is missing; `make runs/lab_stages` trains"),
    ("stages", "--run {run}", "has no checkpoint of step 5: name another folder, or continue"),
]


@pytest.mark.parametrize(("module", "flags", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(module, flags, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints" / "step_000010").mkdir(parents=True)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module, *flags.format(run=tmp_path).split()])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"lab.{module}").main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in error and error.count("\n") == 1


def test_batches_without_a_gradient_are_refused(tmp_path, monkeypatch):
    """Two groups of two: equal within each, though not between them, is nothing to learn from."""
    monkeypatch.setattr(common.models, "fingerprint", lambda model: "x")
    made = common.Sampled({}, torch.tensor([3.0, 3.0, -1.0, -1.0]), [], [])
    monkeypatch.setattr(common, "sample", lambda policy, args, numbers: [made])
    args = common.Args(prompts=2, responses=2, cache=str(tmp_path))
    with pytest.raises(ValueError, match="every group of batch 0 has equal rewards"):
        common.load_batches(None, args, 1)
    assert len(common.load_batches(None, args, 1, need_gradient=False)) == 1


def test_who_dominates_by_hand():
    policy, sampled = two_tokens()
    before = common.copy_weights(policy)
    args = of_lab(who_dominates, lr=0.5)
    found, values = who_dominates.measure(policy, before, sampled, args, large_lr=2.0)
    assert torch.equal(policy.weight, before[0])
    assert found["share"] == [0.5, 0, 0, 0.5]
    assert found["norm"] == pytest.approx([LOW, 0, 0, HIGH], abs=1e-9)
    assert found["norm_share"] == pytest.approx([0.9, 0, 0, 0.1])
    assert found["norm_of_all"] == pytest.approx(WHOLE)
    tail = found["tails"]["p < 0.2"]
    assert tail["norm"] == pytest.approx(2 * LOW / WHOLE)  # of its own mean: it is one of two
    assert tail["angle"] == pytest.approx(math.degrees(math.acos((LOW - HIGH * OVERLAP) / WHOLE)))

    # A step changes the difference of the two logits by 2 · lr · weight · (1 − π) · inner product.
    for name, lr in (("lr", 0.5), ("large_lr", 2.0)):
        push, pull = 2 * lr * A / 2 * 0.9, -2 * lr * A / 2 * 0.1
        odds = [math.log(0.1 / 0.9), math.log(0.9 / 0.1)]
        moved = {
            "all tokens": [push + OVERLAP * pull, pull + OVERLAP * push],
            "only p ≤ 0.25": [push, OVERLAP * push],
            "only p > 0.75": [OVERLAP * pull, pull],
        }
        for updated, shifts in moved.items():
            expected = [1 / (1 + math.exp(-z - shift)) - p for z, shift, p in zip(odds, shifts, (0.1, 0.9))]
            assert values[f"{name}/{updated}"].tolist() == pytest.approx(expected, abs=1e-7)
            of_top = found["steps"][name]["mean_change_of_top_bin"]
            assert of_top[updated] == pytest.approx(abs(expected[1]), abs=1e-7)


def test_outliers_do_not_decide_which_step_moves_the_probable_tokens_more():
    """The paper leaves out the top 1 %: without it the low bin's step moves them by 2 against 1, with it by less."""
    bins = torch.tensor([0, 1, 2] + [3] * 200)
    whole = torch.linspace(-1, 1, 203).double()
    moved = {"all tokens": whole, "only p ≤ 0.25": 2 * whole, "only p > 0.75": whole.clone()}
    moved["only p > 0.75"][-2:] = 1e3
    found = who_dominates.of_step(moved, bins)
    size = found["mean_change_of_top_bin"]
    assert size["only p ≤ 0.25"] == pytest.approx(2 * size["all tokens"], rel=0.02)
    assert size["only p > 0.75"] == pytest.approx(size["all tokens"], rel=0.02)
    assert found["mean_change"]["only p > 0.75"] < 1
    assert found["ranks"]["only p ≤ 0.25"] == pytest.approx(1)
    distance = found["distance"]
    assert distance["all tokens"] == 0 and distance["only p > 0.75"] < 0.05 < distance["only p ≤ 0.25"]


def test_the_gradient_at_the_logits_and_its_bounds_by_hand():
    p = torch.tensor([0.5, 0.3, 0.2])
    found = proposition.gradient_at_logits(2 * p.log(), torch.tensor(1), 2.0)
    assert found.tolist() == pytest.approx([-0.5, 0.7, -0.2])  # one-hot minus p
    # Its norm is √0.78 = 0.883, between √(3/2)·0.7 = 0.857 and √2·0.7 = 0.990.
    lower, upper = proposition.bounds_of([], 3)
    assert [lower[0] * 0.7, upper[0] * 0.7] == pytest.approx([0.8573, 0.9899], abs=1e-4)
    # They multiply the extremes over the tokens: two tokens, two functions.
    lower, upper = proposition.bounds_of([[(0.5, 2.0), (0.1, 3.0)], [(0.4, 1.0), (0.2, 5.0)]], 2)
    root = math.sqrt(2)
    assert lower == pytest.approx([0.4 * 0.1 * root, 0.1 * root, root])
    assert upper == pytest.approx([2.0 * 5.0 * root, 5.0 * root, root])


def test_two_planes_share_a_line():
    """The planes of x, y and of x, (y + z): 0° and 45°."""
    planes = [[[3.0, 0, 0], [0, 2, 0]], [[1.0, 0, 0], [0, 1, 1]]]
    vectors = [key_factors.right_vectors(torch.tensor(plane, dtype=torch.float64)) for plane in planes]
    for k in (2, 128):  # the rank is 2
        assert key_factors.principal_angles(*vectors, k).tolist() == pytest.approx([0, 45], abs=1e-5)


def test_subsets_of_two_tokens():
    """A token with π 0.1 and A > 0, one with π 0.9 and A < 0; each is half of the tokens."""
    policy, sampled = two_tokens()
    sampled.batch["entropy"][0, 1] = 2.0  # of the low-probability token
    whole, parts = key_factors.subsets_of(policy, sampled, of_lab(key_factors, updates=2))
    assert list(parts) == list(key_factors.SUBSETS)
    found = key_factors.compare_subsets(key_factors.Gradient(whole, 1), parts, 1)
    # The gradient is (1, −1) ⊗ (a sum of states): its right singular vector is that sum.
    of_low = {"norm_of_part": LOW / WHOLE, "angle": math.degrees(math.acos((LOW - HIGH * OVERLAP) / WHOLE))}
    to_high = math.degrees(math.acos((HIGH - LOW * OVERLAP) / WHOLE))
    of_high = {"norm_of_part": HIGH / WHOLE, "angle": min(to_high, 180 - to_high)}  # a subspace has no sign
    expected = {"p < 0.2": of_low, "A > 0": of_low, "top entropy": of_low, "p > 0.8": of_high, "A < 0": of_high}
    for name, numbers in expected.items():
        numbers = numbers | {"norm": 2 * numbers["norm_of_part"], "share": 0.5}
        assert {key: found[name][key] for key in numbers} == pytest.approx(numbers, abs=1e-4)


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
    assert list(flat.values()) == pytest.approx([2] * 4)
    assert off_policy.fit([0.0, 0.0], [0.5, 0.2])["kappa"] == 0  # ρ does not spread
    assert off_policy.fit([], [])["kappa"] is None


def test_the_updates_are_those_of_one_step_of_the_trainer():
    """With its own learning rate and gradient norm; here it cuts the gradient, which is 7 long."""
    moved = []
    for script in ("lab", "grpo"):
        policy, sampled = two_tokens()
        args = of_lab(off_policy, prompts=2, responses=1, updates=2)
        batch = sampled.batch | {"advantages": sampled.batch["mask"] * torch.tensor([[9.0], [-30.0]])}
        if script == "lab":
            assert list(off_policy.positions(policy, batch, args, common.learning_rate(args))) == [0, 1, 2]
        else:
            of_script = common.trainer_args("grpo", args, kl_coef=0.0, updates_per_step=2, max_grad_norm=1.0)
            kk_tinys = {"lr": 1e-4, "weight_decay": 0.01}
            optimizer = torch.optim.AdamW(policy.parameters(), fused=True, **kk_tinys)
            grpo.update(policy, optimizer, batch, 1, of_script)
        moved.append(policy.weight.detach())
    assert torch.equal(*moved)
    assert not torch.equal(moved[0], two_tokens()[0].weight)


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
    unlikely = [{"p": 0.1, "entropy": float(n)} for n in (1, 2, 3, 4)] + [{"p": 0.1, "A": 0.0, "entropy": 0.0}]
    batch, _ = batch_of([unlikely, [{"p": 0.9}, {"p": 0.9}, {"p": 0.5}]])
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


@pytest.mark.slow
def test_each_learning_rate_begins_at_the_same_weights(drawn, tmp_path, monkeypatch, capsys):
    """lab.reversal, twice with the same batch, of kk_tiny's tokens: a larger learning rate gives a larger κ."""
    batch, policy = drawn
    rows = len(batch["ids"])
    logp, entropy = grpo.log_probs(policy, batch, script_args("grpo", rows))
    batch = batch | {"old_logp": logp, "ref_logp": logp, "entropy": entropy}
    sampled = common.Sampled(batch, torch.tensor([0.0, 1.0, 2.0] * (rows // 3)), [], [])
    monkeypatch.setattr(common, "load_batches", lambda policy, args, count, need_gradient: [sampled] * count)
    flags = f"--prompts {PROMPTS} --responses 3 --updates 2 --batches 2 --lrs 1e-4 1e-3"
    batches = run_main("reversal", tmp_path, flags, monkeypatch, capsys)["batches"]
    assert batches[0] == batches[1]  # the policy has its weights again
    slow, fast = batches[0]["lr 0.0001"], batches[0]["lr 0.001"]
    assert set(slow) == set(fast) == {"0", "1", "2"} and slow["0"] == fast["0"]
    assert slow["0"]["kappa"] < 1e-5 < slow["2"]["kappa"] < fast["2"]["kappa"]
    assert slow["0"]["clip"]["share"] == [0, 0, 0, 0]


def mean_of(of_sigma, kappa, start, end, cells=500):
    """The mean of (1 − π)·F(σ) over π from start to end, with Lemma 1's σ = κ(1 − π)² (ACPO, eq. 54 and 55)."""
    rests = [1 - (start + (end - start) * (i + 0.5) / cells) for i in range(cells)]  # 1 − π
    return sum(rest * of_sigma(kappa * rest**2) for rest in rests) / cells


def test_by_the_propositions_own_formula_the_dominance_does_not_reverse():
    """lab/README.md says so. Eq. 56 and 64, in Remark 1's derivation, have Φ(−ε_l/σ) where eq. 6 has Φ(ε_l/σ)."""
    normal = statistics.NormalDist()
    high, low = 0.24, 0.2

    def above(x):  # 1 − Φ(x), with its digits where Φ is 1 to the last one
        return math.erfc(x / math.sqrt(2)) / 2

    def edges(sigma):
        return sigma * (normal.pdf(high / sigma) + normal.pdf(low / sigma))

    def with_signs(sigma):  # eq. 6
        return above(low / sigma) - above(high / sigma) - edges(sigma)

    def remarks(sigma):  # eq. 56
        return normal.cdf(high / sigma) - normal.cdf(-low / sigma) - edges(sigma)

    def size(sigma):  # of G, in place of its mean with signs: both parts of eq. 51, added
        between = sigma * (normal.pdf(low / sigma) - normal.pdf(high / sigma))
        return normal.cdf(high / sigma) + normal.cdf(low / sigma) + between

    def ratio(of_sigma, kappa):
        return abs(mean_of(of_sigma, kappa, 0, 0.25) / mean_of(of_sigma, kappa, 0.75, 1))

    kappas = [0.1, 0.17, 0.2, 0.3, 0.5, 0.55, 0.6, 0.7, 0.8, 1, 3, 10, 30]
    assert min(ratio(with_signs, kappa) for kappa in kappas) > 100
    # The low-probability tokens' mean passes through 0 once, near κ = 0.17031: there alone is it below the others'.
    assert mean_of(with_signs, 0.1703, 0, 0.25) > 0 > mean_of(with_signs, 0.1704, 0, 0.25)
    assert ratio(size, 0.01) == pytest.approx(7)  # the mean 1 − π of both: 0.875 and 0.125
    assert min(ratio(size, kappa) for kappa in kappas) == pytest.approx(3.9, abs=0.05)
    assert [kappa for kappa in kappas if ratio(remarks, kappa) < 1] == [0.55, 0.6, 0.7]


TEXTS = [  # (prompt, response); every word of the responses is a token of kk_tiny
    (" You meet Zoey and Rafael.", " Well, Zoey is honest, so Rafael is a knave.\n Suppose"),
    (" Who is a knight?", " Hence Zoey says so. If Rafael is honest, Zoey is"),
]


@pytest.fixture(scope="module")
def known():
    """(policy, tokenizer, Sampled): kk_tiny and two responses that it has not sampled itself."""
    args = of_lab(forking_tokens)
    policy, tokenizer = common.load_policy(args)
    rows = [[torch.tensor(tokenizer.encode(text)) for text in pair] for pair in TEXTS]
    masks = [torch.tensor([False] * len(prompt) + [True] * len(response)) for prompt, response in rows]
    batch = {"ids": pad_sequence(list(map(torch.cat, rows)), True), "mask": pad_sequence(masks, True)}
    of_script = common.trainer_args("grpo", args)
    batch["old_logp"], batch["entropy"] = grpo.log_probs(policy, batch, of_script)
    return policy, tokenizer, common.Sampled(batch, torch.ones(2), ["?"], [True, False])


def test_a_tokens_gradient_is_the_heads_jacobian_times_one_hot_minus_p(known):
    policy, _, sampled = known
    batch = sampled.batch
    for temperature in (1.0, 0.7):
        norms = forking_tokens.gradient_norms(policy, batch, of_lab(forking_tokens, temperature=temperature))
        assert (norms[~batch["mask"]] == 0).all()
        first, last_but_one = batch["mask"][0].nonzero()[0], batch["mask"][1].nonzero()[-2]
        for row, t in [(0, int(first)), (1, int(last_but_one))]:
            ids, mask = batch["ids"][row : row + 1, : t + 1], batch["mask"][row : row + 1, : t + 1]
            _, activations = proposition.activations_of(policy, ids, mask, temperature)
            last = activations[-1][:, t - 1 : t].detach()  # [1, 1, D]
            p = (policy.lm.lm_head(policy.lm.model.norm(last))[0, 0] / temperature).softmax(-1)
            one_hot = torch.zeros_like(p)
            one_hot[ids[0, t]] = 1
            matrix = proposition.last_jacobian(policy, last, temperature)  # [vocabulary, D]
            expected = (matrix.T @ (one_hot - p)).norm().item()
            assert norms[row, t].item() == pytest.approx(expected, rel=1e-4)


def test_a_batchs_numbers_by_hand():
    found = {
        "entropy": torch.tensor([1.0, 0.005, 0.61, 0.385]).double(),
        "probability": torch.tensor([0.4, 0.9995, 0.6, 0.9]).double(),
        "gradient": torch.tensor([6.0, 0.0, 3.0, 1.0]).double(),
    }
    chosen = {"in entropy": [0], "in probability": [0], "in gradient": [2], "connects": [0, 2], "begins": []}
    found |= {name: torch.tensor([i in places for i in range(4)]) for name, places in chosen.items()}
    numbers = forking_tokens.numbers_of(found, 630)
    expected = {"tokens": 4, "nearly_certain": 0.25, "mean_entropy": 0.5, "entropy_of_top": 0.5, "gradient_of_top": 0.6}
    expected["tokens_with_most_of_the_entropy"] = 0.5  # 1.61 of 2 nats
    expected["within_bounds"] = 0.75  # p 0.6 allows no less than 0.673 nats, and the third token has 0.61
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
    assert numbers["overlap"] == {"entropy, probability": 1, "entropy, gradient": 0, "probability, gradient": 0}
    # The ranks of entropy are 4 1 3 2, those of probability 1 4 2 3, those of gradient 4 1 3 2.
    assert numbers["rank_correlation"]["entropy, gradient"] == pytest.approx(1)
    assert numbers["rank_correlation"]["entropy, probability"] == pytest.approx(-1)
    connects = {"entropy": 0.805, "entropy_of_others": 0.195, "share": 0.5, "share_of_top": 1}
    assert numbers["connects"] == pytest.approx(connects)
    assert numbers["begins"]["entropy"] is None


def test_a_run_writes_json_and_picture(known, tmp_path, monkeypatch, capsys):
    policy, tokenizer, sampled = known
    monkeypatch.setattr(common, "load_policy", lambda args: (policy, tokenizer))
    monkeypatch.setattr(common, "load_batches", lambda policy, args, count, need_gradient: [sampled] * count)
    result = run_main("forking_tokens", tmp_path, "--batches 3 --least 1 --checked 4", monkeypatch, capsys)
    assert result["tokens"] == 3 * int(sampled.batch["mask"].sum())
    assert [row["within_bounds"] for row in result["batches"]] == [1, 1, 1]
    assert sum(len(of["all_weights"]) for of in result["responses"]) == 4
    highest = result["lists"]["highest entropy"]
    assert [row["entropy"] for row in highest] == sorted(r["entropy"] for r in highest)[::-1]
    assert all(row["count"] % 3 == 0 for row in highest)
