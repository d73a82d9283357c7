"""The lab's measurements, on cases worked by hand and against gradients of a real model.

What is worked out by hand is Python's float arithmetic on the numbers written out, never the
trainers' own formula.
"""

import importlib
import json
import math
import sys

import pytest
import torch
from conftest import KK_TINY, ROOT, run
from helpers import flat, make_batch
from torch import nn

import grpo
from lab import common, lens, proposition, right_direction, who_dominates
from tools.maintain import claims, updates

for script in updates.ALGORITHMS:
    importlib.import_module(script)  # now: on_the_cpu patches what is loaded
pytestmark = pytest.mark.usefixtures("on_the_cpu")


def script_args(script, model=KK_TINY, rows=2, **changes):
    """A script's settings for `rows` responses to as many prompts; no KL term unless asked for."""
    of_lab = common.Args(model=str(model), prompts=rows, responses=1, max_tokens=100)
    if script not in ("reinforce", "opd", "maxrl"):
        changes = {"kl_coef": 0.0} | changes
    return common.trainer_args(script, of_lab, **changes)


def batch_of(rows):
    """(batch, log-probabilities now) of responses, each a list of tokens.

    A token: {p: π_old, ratio: ρ, A, entropy, sampled: what the sampler said}, all but p with
    defaults. Each row begins with a token of the prompt, and the shorter ones end with padding.
    """
    longest = max(len(row) for row in rows) + 1
    shape = (len(rows), longest)
    batch = {"ids": torch.zeros(shape, dtype=torch.long)}
    batch["mask"] = torch.zeros(shape, dtype=torch.bool)
    for name in ("old_logp", "advantages", "entropy", "sampler_logp"):
        batch[name] = torch.zeros(shape, dtype=torch.float64)
    logp = torch.zeros(shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        for t, token in enumerate(row, 1):
            batch["mask"][i, t] = True
            batch["old_logp"][i, t] = math.log(token["p"])
            batch["sampler_logp"][i, t] = math.log(token.get("sampled", token["p"]))
            batch["advantages"][i, t] = token.get("A", 1.0)
            batch["entropy"][i, t] = token.get("entropy", 0.5)
            logp[i, t] = math.log(token["p"]) + math.log(token.get("ratio", 1.0))
    batch["ref_logp"] = batch["old_logp"]
    return batch, logp


def weights_of(script, rows, is_first=False, **changes):
    """The weights of the tokens, a list for each response; and their stages."""
    batch, logp = batch_of(rows)
    args = script_args(script, rows=len(rows), **changes)
    weight, stage = updates.token_weights(script, batch, logp, batch["entropy"], args, is_first)
    lengths = [len(row) for row in rows]
    assert weight[~batch["mask"]].abs().sum() == 0
    weights = [weight[i, 1 : n + 1].tolist() for i, n in enumerate(lengths)]
    return weights, [stage[i, 1 : n + 1].tolist() for i, n in enumerate(lengths)]


def exactly(rows):
    return [pytest.approx(row, rel=1e-6, abs=1e-12) for row in rows]


# ------------------------------------------------------------ the lens: weights of a script's update


def test_acpos_range_is_wider_in_a_bin_whose_ratios_spread():
    """ρ 1 and 1.3 in one bin: σ 0.15, ε 0.2 + 3·0.15. At the first update it would be 0.2."""
    rows = [[{"p": 0.1}, {"p": 0.1, "ratio": 1.3}, {"p": 0.5, "ratio": 1.3}], [{"p": 0.9}]]
    expected = [[1 / 3 / 2, 1.3 / 3 / 2, 0], [1 / 1 / 2]]
    assert weights_of("acpo", rows)[0] == exactly(expected)


# ------------------------------------------------------------------------- the lens: a real model


@pytest.fixture(scope="module")
def drawn():
    """A batch of kk_tiny's tokens, with ratios on both sides of every clip; and the policy."""
    policy = grpo.load_policy(script_args("grpo"), trained=True)
    batch = make_batch(KK_TINY)
    shape = batch["mask"].shape
    return {name: value for name, value in batch.items() if value.shape == shape}, policy


@pytest.mark.parametrize("script", updates.ALGORITHMS)
def test_weights_times_gradients_of_log_pi_are_the_update_of_a_real_model(script, drawn):
    batch, policy = drawn
    kl = {} if script in ("reinforce", "opd", "maxrl") else {"kl_coef": 0.1}
    args = script_args(script, rows=len(batch["ids"]), **kl)
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


# ------------------------------------------------------------------------- the lens: what it writes


def test_the_page_holds_all_it_needs_and_no_response_can_break_it(tmp_path):
    text = "a </script><script>alert(1)</script>"
    data = {"responses": [{"tokens": [text]}], "scripts": ["grpo"]}
    lens.write_page(data, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "http" not in page and "DATA_OF_THE_LENS" not in page
    assert page.count("</script>") == 2
    begin = page.index('id="data">') + len('id="data">')
    assert json.loads(page[begin : page.index("</script>")]) == data


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A folder with the results of a quick run of the lens, which samples with vLLM."""
    out = tmp_path_factory.mktemp("lab")
    done = run("lab/lens.py", "--quick", "--out", out, "--cache", out / "cache")
    return out, done


def test_a_quick_run_writes_page_picture_and_json(quick):
    out, done = quick
    result = json.loads((out / "lens.json").read_text())
    assert list(result["scripts"]) == lens.SCRIPTS
    assert {"command", "commit", "machine", "versions", "date", "settings"} <= set(result)
    assert sum(result["share_of_tokens"]) == pytest.approx(1, abs=1e-4)
    assert (out / "lens.png").stat().st_size > 20_000
    assert (out / "lens.html").stat().st_size > 20_000
    assert done.stdout.count("TOO FEW RUNS TO TELL: ") == 4  # of one batch


@pytest.mark.parametrize(
    ("module", "flags", "words"),
    [
        ("lens", "--updates 5", "--updates is 5; it must be at least 1 and divide --prompts, which is 12"),
        ("right_direction", "--updates 5", "--updates is 5; it must be at least 2 and divide"),
        ("lens", "--prompts 0", "--prompts is 0; it must be greater than 0"),
        ("lens", "--model models/nowhere", "--model models/nowhere is not a model folder"),
        ("reversal", "--lrs 1e-3 1e-3", "give one to 4 different learning rates"),
        ("two_tasks", "--model models/kk_tiny --tasks kk kk", "--tasks kk kk: give two different ones"),
        ("stages", "--steps 5 0", "give growing numbers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(module, flags, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module, *flags.split()])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"lab.{module}").main()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert words in error and error.count("\n") == 1


def test_what_recomputes_activations_measures_the_same(quick, monkeypatch):
    """As on a GPU: gradients, and the positions that lab.proposition looks at one by one."""
    out, _ = quick
    args = proposition.Args(model=str(KK_TINY), cache=str(out / "cache"), tokens=2, rows=1, jacobians=1)
    for name, value in common.QUICK.items():
        setattr(args, name, value)
    found = []
    for on_gpu in (False, True):
        monkeypatch.setattr(common, "ON_GPU", on_gpu)
        policy, _ = common.load_policy(args)
        [sampled] = common.load_batches(policy, args, 1)
        of_script = common.trainer_args("grpo", args)
        batch = common.with_advantages("grpo", sampled, of_script)
        gradient = common.gradient_of(policy, batch, of_script)
        assert policy.lm.model.layers[0].training == on_gpu  # it recomputes what it needs
        policy.eval()
        _, rests, norms, singular = proposition.measure(policy, sampled, args)
        found.append([common.norm(gradient), rests.tolist(), norms.tolist(), singular])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5) and found[0][0] > 0
    for plain, again in zip(found[0][1:], found[1][1:]):
        assert torch.allclose(torch.tensor(plain), torch.tensor(again), rtol=1e-5)


def test_batches_without_a_gradient_are_refused(tmp_path, monkeypatch):
    """Two groups of two: equal within each, though not between them, is nothing to learn from."""
    monkeypatch.setattr(common, "fingerprint", lambda policy: "x")
    args = common.Args(prompts=2, responses=2, cache=str(tmp_path))
    monkeypatch.setattr(common, "sample", lambda policy, args, numbers: [common.Sampled(**made)])
    made = {"batch": {}, "rewards": torch.tensor([3.0, 3.0, -1.0, -1.0])}
    made |= {"texts": [], "prompts": [], "correct": []}
    with pytest.raises(ValueError, match="every group of batch 0 has equal rewards \\(1 on average"):
        common.load_batches(None, args, 1)
    assert len(common.load_batches(None, args, 1, need_gradient=False)) == 1
    args.seed = 1  # another file of the cache
    made["rewards"] = torch.tensor([3.0, 3.0, -1.0, 3.0])
    assert len(common.load_batches(None, args, 1)) == 1


# ------------------------------------------------------------------------- two tokens and one layer


class OneLayer(nn.Module):
    """A policy of one linear layer and two words: log-probabilities of [2, D] @ state.

    In place of ids: a number for each token, which has the state `states[number]`. Each token is
    the first word.
    """

    def __init__(self, states, weight):
        super().__init__()
        self.states = torch.tensor(states, dtype=torch.float64)  # [tokens, D]
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))  # [2, D]

    def forward(self, ids, mask, temperature, with_entropy=False):
        logp = (self.states[ids] @ self.weight.T / temperature).log_softmax(-1)[..., 0]
        return logp * mask, torch.zeros_like(logp)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


A = 2 / (math.sqrt(8) + 1e-6)  # rewards 3 and −1: mean 1, deviation √8


def two_tokens(overlap=0.0):
    """A policy and a batch: a right response of a token with π 0.1, a wrong one with π 0.9.

    Their states are of length 1 and have this inner product.
    """
    ones = [math.log(0.1 / 0.9) / 2, math.log(0.9 / 0.1) / 2]  # logits of the first word
    height = math.sqrt(1 - overlap**2)
    first = [ones[0], (ones[1] - overlap * ones[0]) / height]
    states = [[1.0, 0.0], [overlap, height]]
    policy = OneLayer(states, [first, [-x for x in first]])
    batch, _ = batch_of([[{"p": 0.1}], [{"p": 0.9}]])
    batch["ids"] = torch.tensor([[0, 0], [0, 1]])
    return policy, common.Sampled(batch, torch.tensor([3.0, -1.0]), [], ["?"], [True, False])


def of_lab(module, **changes):
    sizes = {"model": str(KK_TINY), "prompts": 1, "responses": 2} | changes
    return module.Args(**sizes)


@pytest.mark.parametrize("overlap", [0.0, 0.6])
def test_who_dominates_by_hand(overlap):
    """∇ log π with respect to the layer is (1 − π) · (1, −1) ⊗ state, of length √2 · (1 − π)."""
    policy, sampled = two_tokens(overlap)
    before = common.copy_weights(policy)
    args = of_lab(who_dominates, lr=0.5)
    found, values = who_dominates.measure(policy, before, sampled, args, large_lr=2.0)
    assert torch.equal(policy.weight, before[0])
    low, high = A * math.sqrt(2) * 0.9 / 2, A * math.sqrt(2) * 0.1 / 2
    assert found["share"] == [0.5, 0, 0, 0.5]
    assert found["norm"] == pytest.approx([low, 0, 0, high], abs=1e-9)
    assert found["norm_share"] == pytest.approx([0.9, 0, 0, 0.1])
    whole = math.sqrt(low**2 + high**2 - 2 * low * high * overlap)  # the advantages differ in sign
    assert found["norm_of_all"] == pytest.approx(whole)
    tail = found["tails"]["p < 0.2"]
    assert tail["norm"] == pytest.approx(2 * low / whole)  # of its own mean: it is one of two
    cosine = (low - high * overlap) / whole
    assert tail["angle"] == pytest.approx(math.degrees(math.acos(cosine)))

    # A step changes the difference of the two logits by 2 · lr · weight · (1 − π) · inner product.
    for name, lr in (("lr", 0.5), ("large_lr", 2.0)):
        push, pull = 2 * lr * A / 2 * 0.9, -2 * lr * A / 2 * 0.1
        odds = [math.log(0.1 / 0.9), math.log(0.9 / 0.1)]
        moved = {
            "all tokens": [push + overlap * pull, pull + overlap * push],
            "only p ≤ 0.25": [push, overlap * push],
            "only p > 0.75": [overlap * pull, pull],
        }
        for updated, shifts in moved.items():
            expected = [sigmoid(z + shift) - p for z, shift, p in zip(odds, shifts, (0.1, 0.9))]
            assert values[f"{name}/{updated}"].tolist() == pytest.approx(expected, abs=1e-7)
            in_top = found["steps"][name]["mean_change_of_top_bin"][updated]
            assert in_top == pytest.approx(abs(expected[1]), abs=1e-7)


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


def test_steps_of_the_methods_by_hand():
    """With states at right angles the tokens do not interfere: AR scales, Lopti changes nothing."""
    policy, sampled = two_tokens()
    before = common.copy_weights(policy)
    args = of_lab(right_direction)

    def step(method):
        found = right_direction.step_of(method, policy, before, sampled, 0.5, 1, args)
        assert torch.equal(policy.weight, before[0])
        return found[0][0].tolist()  # of the first word's weights; the second's are their negative

    push, pull = 0.5 * A / 2 * 0.9, -0.5 * A / 2 * 0.1
    assert step("GRPO") == pytest.approx([push, pull], rel=1e-6)
    assert step("DPPO") == pytest.approx([push, pull], rel=1e-6)
    assert step("ACPO") == pytest.approx([push, pull], rel=1e-6)  # both responses have one token
    assert step("AR") == pytest.approx([0.73 * push, 0.97 * pull], rel=1e-6)
    assert step("Lopti") == pytest.approx([push, pull], rel=1e-6)
    assert step("AR + Lopti") == pytest.approx([0.73 * push, 0.97 * pull], rel=1e-6)


# ------------------------------------------------------------------------------- proposition 4.2


def test_the_gradient_at_the_logits_is_one_hot_minus_p():
    p = torch.tensor([0.5, 0.3, 0.2])
    found = proposition.gradient_at_logits(2 * p.log(), torch.tensor(1), 2.0)
    assert found.tolist() == pytest.approx([-0.5, 0.7, -0.2])
    # Its norm is √0.78 = 0.883, between √(3/2)·0.7 = 0.857 and √2·0.7 = 0.990.
    lower, upper = proposition.bounds_of([], 3)
    assert [lower[0] * 0.7, upper[0] * 0.7] == pytest.approx([0.8573, 0.9899], abs=1e-4)


def test_bounds_multiply_the_extremes_over_the_tokens():
    singular = [[(0.5, 2.0), (0.1, 3.0)], [(0.4, 1.0), (0.2, 5.0)]]  # two tokens, two functions
    lower, upper = proposition.bounds_of(singular, 2)
    root = math.sqrt(2)
    assert lower == pytest.approx([0.4 * 0.1 * root, 0.1 * root, root])
    assert upper == pytest.approx([2.0 * 5.0 * root, 5.0 * root, root])


def test_the_summary_of_the_proposition_by_hand():
    """Two tokens at 1 − π 0.5 and 0.25 with norms 1 and 0.5: a slope of 2, in bounds of 1 and 3."""
    rests = torch.tensor([0.5, 0.25, 0.1]).double()
    norms = torch.tensor([[1.0], [0.5], [0.4]]).double()
    found = proposition.summary_of(rests, norms, [1.0], [3.0], [("logits", [0])])["logits"]
    assert found["inside"] == pytest.approx(2 / 3)
    assert found["median_slope"] == pytest.approx(2)
    exact = proposition.summary_of(rests, 2 * rests[:, None], [1.0], [3.0], [("a", [0])])["a"]
    assert exact["correlation"] == pytest.approx(1) and exact["inside"] == 1


def test_the_gradient_is_the_product_of_the_jacobians(drawn):
    """And the Jacobians are those of finite differences."""
    batch, policy = drawn
    t = int(batch["mask"][0].nonzero()[3, 0])
    ids, mask = batch["ids"][:1, : t + 1], batch["mask"][:1, : t + 1]
    logp, activations = proposition.activations_of(policy, ids, mask, 0.7)
    assert len(activations) == 5 and logp[0, t] < 0
    position = t - 1
    measured = torch.autograd.grad(logp[0, t], activations, retain_graph=True)
    cache = proposition.keys_and_values(policy, ids)
    alone_logp, alone = proposition.at_position(policy, ids, cache, position, 0.7)
    assert torch.allclose(alone_logp, logp[0, t], atol=1e-5)  # the same, without the rest
    for of_position, of_all in zip(alone, activations, strict=True):
        assert torch.allclose(of_position[0, 0], of_all[0, position], atol=1e-4)
    last = activations[-1][0, position].detach()
    head = proposition.last_jacobian(policy, alone[-1], 0.7)  # [vocabulary, D]
    logits = policy.lm.lm_head(policy.lm.model.norm(last))
    gradient = head.T @ proposition.gradient_at_logits(logits.detach(), ids[0, t], 0.7)
    for i in (4, 3, 2, 1, 0):
        assert torch.allclose(gradient, measured[i][0, position], atol=1e-5)
        if i > 0:
            matrix = proposition.jacobian(alone[i][0, 0], alone[i - 1])
            gradient = matrix.T @ gradient
    direction = torch.randn(last.shape, generator=torch.Generator().manual_seed(0))

    def logits_at(step):
        return policy.lm.lm_head(policy.lm.model.norm(last + step * direction)) / 0.7

    slope = (logits_at(1e-2) - logits_at(-1e-2)) / 2e-2
    assert torch.allclose(head @ direction, slope, atol=2e-2, rtol=2e-2)


# ----------------------------------------------------------------------------- the other commands


@pytest.mark.parametrize("command", ["who_dominates", "right_direction", "proposition"])
def test_a_quick_run_of_each_command(command, quick, monkeypatch, capsys):
    """With the batch that the lens has sampled."""
    out, _ = quick
    module = importlib.import_module(f"lab.{command}")
    monkeypatch.setattr(common, "sample", None)  # it would be called otherwise
    monkeypatch.chdir(ROOT)
    flags = ["--quick", "--out", str(out), "--cache", str(out / "cache")]
    monkeypatch.setattr(sys, "argv", [command, *flags])
    module.main()
    shown = capsys.readouterr().out
    result = json.loads((out / f"{command}.json").read_text())
    assert (out / f"{command}.png").stat().st_size > 20_000
    assert result["command"].startswith(f"python -m lab.{command} --quick")
    assert shown.rstrip().splitlines()[-1] == claims.of_file(command, out)[-1]
