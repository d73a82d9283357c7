"""The lab's measurements, on cases worked by hand in Python's floats, and against gradients of a real model."""

import importlib
import json
import math
import sys

import pytest
import torch
from conftest import KK_TINY, ROOT, run
from helpers import flat
from lab_cases import A, of_lab, run_main, script_args, two_tokens

import grpo
from lab import common, lens, proposition, right_direction, two_tasks, who_dominates
from tools.maintain import updates

for script in updates.ALGORITHMS:
    importlib.import_module(script)  # now: on_the_cpu patches what is loaded
pytestmark = pytest.mark.usefixtures("on_the_cpu")


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


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A folder with the results of a quick run of the lens, which samples with vLLM."""
    out = tmp_path_factory.mktemp("lab")
    done = run("lab/lens.py", "--quick", "--out", out, "--cache", out / "cache")
    return out, done


def test_a_quick_run_writes_page_picture_and_json(quick):
    """The page holds all it needs, and no response can break it."""
    out, done = quick
    result = json.loads((out / "lens.json").read_text())
    assert list(result["scripts"]) == lens.SCRIPTS
    assert {"command", "commit", "machine", "versions", "date", "settings"} <= set(result)
    assert sum(result["share_of_tokens"]) == pytest.approx(1, abs=1e-4)
    assert (out / "lens.png").stat().st_size > 20_000
    assert done.stdout.count("TOO FEW RUNS TO TELL: ") == 4  # of one batch
    data = {"responses": [{"tokens": ["a </script><script>alert(1)</script>"]}], "scripts": ["grpo"]}
    lens.write_page(data, out / "page.html")
    page = (out / "page.html").read_text()
    assert "http" not in page and page.count("</script>") == 2
    begin = page.index('id="data">') + len('id="data">')
    assert json.loads(page[begin : page.index("</script>")]) == data


@pytest.mark.parametrize("command", ["who_dominates", "right_direction", "proposition"])
def test_a_quick_run_of_each_command(command, quick, monkeypatch, capsys):
    """With the batch that the lens has sampled."""
    monkeypatch.setattr(common, "sample", None)  # it would be called otherwise
    run_main(command, quick[0], "--quick", monkeypatch, capsys)


def test_a_quick_run_of_two_tasks(tmp_path):
    """kk_tiny can't read Countdown's prompts, but its tokens have probabilities all the same."""
    done = run("lab/two_tasks.py", "--quick", "--model", KK_TINY, "--out", tmp_path, "--cache", tmp_path / "cache")
    result = json.loads((tmp_path / "two_tasks.json").read_text())
    [batch] = result["batches"]
    assert list(batch) == result["tasks"] == ["kk", "countdown"]
    for found in batch.values():
        assert sum(found["share"]) == pytest.approx(1, abs=1e-4)
        assert all(norm > 0 for norm in found["norm"])
    assert result["advantages"] == "1"  # it is never right on Countdown
    assert (tmp_path / "two_tasks.png").stat().st_size > 20_000
    assert done.stdout.count("TOO FEW RUNS TO TELL: ") == 2


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
        ("stages", "--run {run} --model other", "with --model models/kk_tiny, not other: name another folder"),
        ("stages", "--run {run} --seed 1", "has a run with --seed 0, not 1: name another folder"),
        ("stages", "--run {run}", "has no checkpoint of step 5: name another folder, or continue"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(module, flags, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "args.json").write_text('{"model": "models/kk_tiny", "seed": 0}')
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
    monkeypatch.setattr(common, "fingerprint", lambda policy: "x")
    made = common.Sampled({}, torch.tensor([3.0, 3.0, -1.0, -1.0]), [], [], [])
    monkeypatch.setattr(common, "sample", lambda policy, args, numbers: [made])
    args = common.Args(prompts=2, responses=2, cache=str(tmp_path))
    with pytest.raises(ValueError, match="every group of batch 0 has equal rewards"):
        common.load_batches(None, args, 1)
    assert len(common.load_batches(None, args, 1, need_gradient=False)) == 1


# ------------------------------------------------------------------------- two tokens and one layer


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


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


@pytest.mark.parametrize("with_rewards", [True, False])
def test_two_tasks_by_hand(with_rewards):
    policy, sampled = two_tokens(overlap=0.6)
    found = two_tasks.measure(policy, sampled, of_lab(two_tasks), with_rewards)
    size = math.sqrt(2) / 2 * (A if with_rewards else 1.0)  # a mean over two tokens
    assert found["tokens"] == 2 and found["share"] == [0.5, 0, 0, 0.5] and found["right"] == 0.5
    assert found["norm"] == pytest.approx([0.9 * size, 0, 0, 0.1 * size], abs=1e-9)
    assert found["norm_share"] == pytest.approx([0.9, 0, 0, 0.1])


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
    for method in ("GRPO", "DPPO", "ACPO", "Lopti"):  # ACPO: both responses have one token
        assert step(method) == pytest.approx([push, pull], rel=1e-6), method
    for method in ("AR", "AR + Lopti"):
        assert step(method) == pytest.approx([0.73 * push, 0.97 * pull], rel=1e-6), method


# ------------------------------------------------------------------------------- proposition 4.2


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


def test_the_gradient_is_the_product_of_the_jacobians(drawn):
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
