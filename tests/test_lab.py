"""The lab's measurements, on cases worked by hand and against gradients of a real model.

What is worked out by hand is Python's float arithmetic on the numbers written out, never the
trainers' own formula.
"""

import importlib
import json
import math
import re
import sys

import pytest
import torch
from conftest import KK_TINY, ROOT, python, run
from helpers import flat, make_batch
from torch import nn
from transformers import Qwen2Config

import grpo
from lab import common, lens, proposition, right_direction, stages, two_tasks, verdicts, who_dominates
from runtime import memory
from tools import updates

COMMANDS = [
    "lens", "who_dominates", "right_direction", "proposition", "off_policy", "reversal", "key_factors",
    "forking_tokens", "two_tasks",
]  # fmt: skip
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

# Five tokens in two responses; nothing has moved.
STILL = [
    [{"p": 0.1, "A": 2.0, "entropy": 2.0}, {"p": 0.9, "A": 2.0, "entropy": 0.1}],
    [{"p": 0.5, "A": -1.0}, {"p": 0.6, "A": -1.0}, {"p": 0.2, "A": -1.0}],
]
BY_TOKENS = [[2 / 5, 2 / 5], [-1 / 5, -1 / 5, -1 / 5]]  # A / Σ|o|


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("script", [s for s in updates.ALGORITHMS if s.endswith("ar_lopti")])
def test_lopti_gives_each_token_its_weight_in_one_stage(script, is_first):
    weights, stages = weights_of(script, STILL, is_first, eta=0.5)
    assert weights == exactly(BY_TOKENS)
    assert stages == [[1, 2], [1, 2, 1]]
    only_low, _ = weights_of(script, STILL, is_first, eta=0.5, lopti_stages="low")
    assert only_low == exactly([[2 / 5, 0], [-1 / 5, 0, -1 / 5]])


def test_rloos_penalty_is_a_part_of_the_reward():
    """Rewards 3 and −1, less 0.5 · log(π/π_ref) of the response: log 2 + log 4 in the first, log 1/2 in the second."""
    batch, _ = batch_of([[{"p": 0.8}, {"p": 0.4}], [{"p": 0.1}]])
    ref, _ = batch_of([[{"p": 0.4}, {"p": 0.1}], [{"p": 0.2}]])
    batch["ref_logp"] = ref["old_logp"]
    sampled = common.Sampled(batch, torch.tensor([3.0, -1.0]), ["", ""], ["", ""], [True, False])
    of_lab = common.Args(model=str(KK_TINY), prompts=1, responses=2)
    rewards = [3 - 0.5 * 3 * math.log(2), -1 + 0.5 * math.log(2)]
    for kl_coef, (first, second) in ((0.5, rewards), (0.0, [3, -1])):
        args = common.trainer_args("rloo", of_lab, kl_coef=kl_coef)
        advantages = common.with_advantages("rloo", sampled, args)["advantages"]
        assert advantages[0].tolist() == pytest.approx([0, first - second, first - second])
        assert advantages[1].tolist() == pytest.approx([0, second - first, 0])


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


def test_a_moved_policy_gets_its_weights_back(drawn):
    batch, policy = drawn
    args = script_args("grpo", rows=len(batch["ids"]))
    before = flat(policy.parameters())
    logp, _ = lens.moved_log_probs("grpo", policy, batch, args, updates=2, lr=1e-3)
    assert torch.equal(flat(policy.parameters()), before)
    assert (logp - grpo.log_probs(policy, batch, args)[0]).abs().max() > 1e-3


# ------------------------------------------------------------------------- the lens: what it writes


def found_of(rows, first, later):
    batch, _ = batch_of(rows)

    def placed(values):
        return torch.zeros(batch["mask"].shape, dtype=torch.float64).masked_scatter(
            batch["mask"], torch.tensor(values, dtype=torch.float64)
        )

    found = {"first": placed(first), "later": placed(later), "ratio": placed([1.5] * len(first))}
    return found | {"advantages": batch["advantages"]}, batch


def test_the_summary_by_hand():
    """Bins: 0.1 and 0.2 | 0.5 | 0.6 | 0.9. Of the four tokens that had weight one is cut off."""
    found, batch = found_of(STILL, [0.4, 0.4, -0.2, 0.0, -0.2], [0.1, 0.4, 0.0, 0.0, -0.2])
    summary = lens.summary_of(found, batch)
    assert summary["first"]["weight"] == pytest.approx([1.5, 1.0, 0.0, 2.0])  # mean · 5 tokens
    assert summary["first"]["relative"] == pytest.approx([0.3 / 0.24, 0.2 / 0.24, 0, 0.4 / 0.24])
    assert summary["first"]["zero"] == [0, 0, 1, 0]
    assert summary["later"]["weight"] == pytest.approx([0.75, 0.0, 0.0, 2.0])
    assert summary["later"]["cut"] == [0, 1, 0, 0]
    assert summary["later"]["cut_tokens"] == 1
    assert summary["later"]["kept"] == pytest.approx(0.7 / 1.2)
    assert summary["later"]["top_share"] == 0
    largest = {"weight": 2.0, "probability": 0.9, "ratio": 1.5, "advantage": 2.0}
    assert summary["later"]["largest"] == pytest.approx(largest)


def test_means_leave_out_the_top_1_percent_of_each_bin():
    """100 tokens of p 0.1 with weight 1, of which one has −901; 5 of p 0.9 with weight 4."""
    rows = [[{"p": 0.1}] * 100 + [{"p": 0.9}] * 5]
    first = [1.0] * 100 + [4.0] * 5
    found, batch = found_of(rows, first, [-901.0, *first[1:]])
    later = lens.summary_of(found, batch)["later"]
    mean = (99 + 20) / 104
    assert later["relative"] == pytest.approx([1 / mean, 0, 0, 4 / mean])
    assert later["top_share"] == pytest.approx(901 / (901 + 119))
    assert later["largest"]["weight"] == pytest.approx(-901 * 105)


def test_an_edge_belongs_to_the_bin_below():
    logp = torch.tensor([0.25, 0.2500001, 0.5, 0.75, 0.76, 1e-30], dtype=torch.float64).log()
    assert common.bins_of(logp).tolist() == [0, 1, 1, 2, 3, 0]


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
        ("off_policy", "--updates 5", "--updates is 5; it must be at least 1 and divide --prompts, which is 16"),
        ("right_direction", "--updates 5", "--updates is 5; it must be at least 2 and divide"),
        ("key_factors", "--updates 5", "--updates is 5; it must be at least 2 and divide"),
        ("key_factors", "--updates 1", "--updates is 1; it must be at least 2 and divide"),
        ("lens", "--prompts 0", "--prompts is 0; it must be greater than 0"),
        ("lens", "--model models/nowhere", "--model models/nowhere is not a model folder"),
        ("lens", "--out README.md/x", "--out README.md/x can't be written to"),
        ("reversal", "--lrs 1e-3 1e-3", "give one to 4 different learning rates"),
        ("reversal", "--lrs 1e-5 1e-4 3e-4 1e-3 3e-3", "give one to 4 different learning rates"),
        ("two_tasks", "--model models/kk_tiny --tasks kk kk", "--tasks kk kk: give two different ones"),
        ("two_tasks", "--model models/kk_tiny --tasks kk chess", "--task chess: must be one of kk, math, countdown"),
        ("two_tasks", "--model models/kk_tiny --batches 0", "--batches is 0; it must be greater than 0"),
        ("stages", "--steps 5 0", "give growing numbers"),
        ("stages", "--steps 3 3", "give growing numbers"),
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


@pytest.mark.parametrize(
    "flags, said",
    [("--people 9", "people must be"), ("--data nothing.jsonl", "--data nothing.jsonl: there is no such file")],
)
def test_a_dry_run_finds_what_is_wrong_with_the_data(flags, said, tmp_path, monkeypatch, capsys):
    argv = ["who_dominates", "--model", str(KK_TINY), *flags.split(), "--out", str(tmp_path), "--dry_run"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("lab.who_dominates").main()
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_batches_of_changed_data_have_another_name(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("1")
    first, of_folder = common.digest_of(str(file)), common.digest_of(str(tmp_path))
    assert common.digest_of(str(file)) == first != common.digest_of("mine")
    file.write_text("2")
    assert common.digest_of(str(file)) != first and common.digest_of(str(tmp_path)) != of_folder


@pytest.mark.parametrize(
    ("args_class", "flags", "sizes"),
    [
        (lens.Args, "", (2, 3, 96)),
        (lens.Args, "--prompts 4 --max-tokens=200", (4, 3, 200)),
        (two_tasks.Args, "", (2, 2, 64)),  # its own responses and tokens are fewer than those of --quick
    ],
)
def test_quick_leaves_what_is_given(args_class, flags, sizes, monkeypatch):
    monkeypatch.setattr(common, "check", lambda args: None)
    monkeypatch.setattr(sys, "argv", ["lab", "--quick", *flags.split()])
    args = common.parse(args_class, "", {})
    assert (args.prompts, args.responses, args.max_tokens) == sizes and args.out == "runs/lab"


def test_only_a_commands_own_model_in_full_writes_to_the_kept_results():
    for args_class in (lens.Args, two_tasks.Args, stages.Args):
        assert common.place(args_class()) == "lab/results"
        assert common.place(args_class(quick=True)) == "runs/lab"
        assert common.place(args_class(model="other")) == "runs/lab"
    assert common.place(two_tasks.Args(model="models/kk_tiny")) == "runs/lab"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_for_3_billion_parameters_passes_a_dry_run(name, tmp_path, monkeypatch, capsys):
    """With the configuration of Qwen2.5-3B and no weights: the dry run reads none."""
    model = tmp_path / "qwen"
    config_of_3b().save_pretrained(model)
    for part in KK_TINY.glob("*token*"):
        (model / part.name).write_bytes(part.read_bytes())
    flags = lines_for_3b()[name].replace("Qwen/Qwen2.5-3B-Instruct", str(model)).split()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *flags, "--out", str(tmp_path / "out"), "--dry_run"])
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"lab.{name}").main()
    assert not stop.value.code
    printed = capsys.readouterr().out
    assert "3.09 billion parameters" in printed
    assert "each gradient or copy of the weights that is kept: 11 GiB" in printed
    fits = memory.machine_bytes() > 200e9
    assert ("this machine has too little" in printed) != fits
    assert "--dry_run ends here" in printed and not list((tmp_path / "out").iterdir())


def config_of_3b():
    return Qwen2Config(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=32768,
    )  # fmt: skip


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


def test_a_checkpoint_has_the_settings_of_the_model_it_began_as(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000005"
    checkpoint.mkdir(parents=True)
    args = common.Args(model=str(checkpoint))
    assert common.began_with(args.model) == args.model  # nobody says what it was
    assert common.name_of(args.model) == "run, step_000005" and common.name_of("models/kk_tiny/") == "kk_tiny"
    assert common.trainer_args("grpo", args).lr == grpo.Args.lr == 1e-6
    (tmp_path / "run" / "args.json").write_text(json.dumps({"model": str(KK_TINY)}))
    assert common.began_with(args.model) == str(KK_TINY)
    of_script = common.trainer_args("grpo", args)
    assert of_script.lr == 1e-4 and of_script.model == str(checkpoint)
    assert common.learning_rate(lens.Args(model=str(checkpoint))) == 1e-4
    assert common.learning_rate(lens.Args(model=str(checkpoint), lr=1e-3)) == 1e-3


def lines_for_3b():
    """{command: its flags} of lab/README.md's commands for a model of 3 billion parameters."""
    text = (ROOT / "lab" / "README.md").read_text().split("## A larger model")[1]
    return dict(re.findall(r"^python -m lab\.(\w+) (.*Qwen2\.5-3B.*)$", text, re.M))


def test_the_lab_has_a_command_for_3_billion_parameters_for_each_measurement():
    assert set(lines_for_3b()) == set(COMMANDS)


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


def test_an_error_after_sampling_is_one_line_and_no_traceback_of_vllm(tmp_path):
    """Two responses of eight tokens are both cut off: there is no gradient."""
    flags = "--prompts 1 --responses 2 --max_tokens 8 --batches 1".split()
    done = python("-m", "lab.who_dominates", *flags, "--out", tmp_path, "--cache", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: every group of batch 0 has equal rewards")


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


def words_on(name, folder, batches):
    """What the comparisons that read NAME.json say of these batches."""
    (folder / f"{name}.json").write_text(json.dumps({"batches": batches}))
    return [line.split(":")[0].lower() for line in verdicts.of_file(name, folder)]


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


def test_the_gradients_of_the_cells_add_up_and_agree_with_finite_differences(drawn):
    batch, policy = drawn
    args = script_args("grpo", rows=len(batch["ids"]))
    logp, _ = grpo.log_probs(policy, batch, args)
    batch = batch | {"old_logp": logp, "ref_logp": logp}
    cells = who_dominates.gradients_by_cell(policy, batch, args)
    whole = common.gradient_of(policy, batch, args)
    difference = [a - b for a, b in zip(common.add(cells), whole)]
    assert common.norm(difference) < 1e-5 * common.norm(whole)
    # Along the gradient the loss −1/n Σ A·log π falls by lr · ‖g‖² in first order.
    before = common.copy_weights(policy)
    lr = 1e-3 / common.norm(whole)
    moved = []
    for sign in (1, -1):
        common.set_weights(policy, [w - sign * lr * g for w, g in zip(before, whole)])
        now, _ = grpo.log_probs(policy, batch, args)
        moved.append((now.double() * batch["advantages"])[batch["mask"]].mean().item())
    common.set_weights(policy, before)
    slope = (moved[0] - moved[1]) / 2
    assert slope == pytest.approx(lr * common.norm(whole) ** 2, rel=2e-2)


def test_boxes_leave_out_the_top_1_percent():
    values = torch.cat([torch.arange(-100.0, 100.0), torch.tensor([1e6, -1e6])]).double()
    boxes = who_dominates.boxes_of(values, torch.zeros(202, dtype=torch.long))
    assert boxes[0][2] == pytest.approx(0, abs=1) and boxes[0][4] < 100
    assert boxes[1:] == [None] * 3


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


def test_how_far_two_distributions_are_apart_by_hand():
    """Of 1, 2, 3, 4 one half lies up to 2, of 3, 4, 5, 6 nothing."""
    some = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert who_dominates.distance(some, some + 2) == 0.5 == who_dominates.distance(some + 2, some)
    assert who_dominates.distance(some, some.flip(0)) == 0 and who_dominates.distance(some, some + 9) == 1


def test_averages_over_batches():
    rows = [{"a": [1.0, 2.0], "b": {"c": 3.0}}, {"a": [3.0, 2.0], "b": {"c": 3.0}}]
    assert common.over_batches(rows) == {"a": [[2, pytest.approx(1)], [2, 0]], "b": {"c": [3, 0]}}


def test_a_stopped_command_goes_on_where_it_was(tmp_path, monkeypatch):
    policy, _ = two_tokens()
    args = of_lab(who_dominates, cache=str(tmp_path))
    monkeypatch.setattr(common.records, "commit", lambda: "abc")

    def measure(batch):
        if batch == 3:
            raise KeyboardInterrupt
        return {"batch": batch}

    with pytest.raises(KeyboardInterrupt):
        common.measured(args, "x", policy, [1, 2, 3], measure)
    assert common.measured(args, "x", policy, [1, 2, 4], lambda batch: batch) == [{"batch": 1}, {"batch": 2}, 4]
    monkeypatch.setattr(common.records, "commit", lambda: "abc+")
    assert common.measured(args, "x", policy, [5], lambda batch: batch) == [5]
    assert common.measured(args, "x", policy, [6], lambda batch: batch) == [6]  # it may be other code
    assert common.with_lists_in_lines('[\n 1,\n "a",\n [\n  2,\n  3\n ]\n]') == '[\n 1,\n "a",\n [ 2, 3 ]\n]'


def test_a_probability_near_1_keeps_its_digits():
    """Logits (30, 0): 1 − π is 1/(1 + exp(30)), 9.4e-14, and float32's log_softmax says 0."""
    policy = nn.Module()
    policy.lm = nn.Module()
    policy.lm.lm_head = nn.Identity()
    with common.head_in_float64(policy):
        logp, _ = policy.head(torch.tensor([[30.0, 0.0]]), torch.tensor([0]), 1.0, False)
        cooler, _ = policy.head(torch.tensor([[30.0, 0.0]]), torch.tensor([0]), 1.5, False)
    assert logp.item() == pytest.approx(-math.exp(-30), rel=1e-6)
    assert cooler.item() == pytest.approx(-math.exp(-20), rel=1e-6)
    assert torch.tensor([30.0, 0.0]).log_softmax(0)[0] == 0
    assert not hasattr(policy, "head")


def test_fine_log_probabilities_are_the_policys(quick):
    out, _ = quick
    args = lens.Args(model=str(KK_TINY), cache=str(out / "cache"))
    for name, value in common.QUICK.items():
        setattr(args, name, value)
    policy, _ = common.load_policy(args)
    [sampled] = common.load_batches(policy, args, 1)
    of_script = common.trainer_args("grpo", args)
    fine = common.fine_log_probs(policy, sampled.batch, of_script)
    assert torch.allclose(fine, sampled.batch["old_logp"].double(), atol=2e-6)
    of_script.temperature = 0.5  # brings many a probability nearer to 1 than float32 can tell
    rounded, _ = grpo.log_probs(policy, sampled.batch, of_script)
    fine = common.fine_log_probs(policy, sampled.batch, of_script)
    certain = sampled.batch["mask"] & (rounded == 0)
    assert certain.any() and (fine[certain] > -1e-6).all()
    assert (fine[certain] < 0).any()  # not of all: some are nearer to 1 than float64 can tell


def test_shares_that_move_in_the_right_direction_by_hand():
    change = torch.tensor([0.1, -0.1, 0.0, -0.2, 0.3, 0.1])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.0])
    bins = torch.tensor([0, 0, 0, 3, 3, 1])
    assert right_direction.shares_right(change, advantages, bins) == {
        "positive": [pytest.approx(1 / 3), None, None, None],
        "negative": [None, None, None, 0.5],
        "both signs": [pytest.approx(1 / 3), None, None, 0.5],
    }


def test_a_method_that_raises_all_probable_tokens_gains_nothing_in_both_signs():
    """Two positive and two negative tokens of p > 0.75: GRPO moves one of each right, the other method raises all."""
    advantages, bins = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([3, 3, 3, 3])
    of_grpo = right_direction.shares_right(torch.tensor([0.1, -0.1, 0.1, -0.1]), advantages, bins)
    other = right_direction.shares_right(torch.tensor([0.1, 0.1, 0.1, 0.1]), advantages, bins)
    rows = [{"equal lr, 1 update": {"GRPO": of_grpo, "AR": other}}] * 3
    gains = [right_direction.gain(rows, "equal lr, 1 update", "AR", sign)[0] for sign in right_direction.SIGNS]
    assert gains == [0.5, -0.5, 0.0]


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


def test_lopti_sees_what_the_first_stage_did():
    """The improbable token's stage raises the other's π; its own gradient then is smaller."""
    policy, sampled = two_tokens(overlap=0.6)
    before = common.copy_weights(policy)
    args = of_lab(right_direction)
    step = right_direction.step_of("Lopti", policy, before, sampled, 0.5, 1, args)
    first = 0.5 * A / 2 * 0.9  # along the improbable token's state, (1, 0)
    p = sigmoid(math.log(9) + 2 * 0.6 * first)  # of the other after the first stage
    second = -0.5 * A / 2 * (p / 0.9) * (1 - p)  # ρ · A, along (0.6, 0.8)
    expected = [first + 0.6 * second, 0.8 * second]
    assert step[0][0].tolist() == pytest.approx(expected, rel=1e-6)


def test_to_find_a_learning_rate_leaves_the_policy_as_it_was():
    """AdamW's first update moves every weight by its lr: so does the SGD step that it is found by."""
    policy, sampled = two_tokens(overlap=0.6)
    before = common.copy_weights(policy)
    args = of_lab(right_direction)
    small = who_dominates.learning_rate(policy, before, sampled, args)
    assert torch.equal(policy.weight, before[0])
    args.adamw_lr = 2e-4
    assert who_dominates.learning_rate(policy, before, sampled, args) == pytest.approx(2 * small, rel=0.05)


def test_equal_steps_have_grpos_length():
    policy, sampled = two_tokens(overlap=0.6)
    before = common.copy_weights(policy)
    args = of_lab(right_direction, prompts=1, updates=1)
    found = right_direction.measure(policy, before, sampled, 0.5, args)
    equal_lr, equal_step = (found[f"{kind}, 1 update"] for kind in right_direction.STEPS)
    lengths = [of["step"] for of in equal_lr.values()]
    assert [of["step"] for of in equal_step.values()] == pytest.approx([lengths[0]] * 6)
    assert lengths[1] < 0.8 * lengths[0]  # AR's is shorter
    assert equal_lr["DPPO"] == equal_lr["GRPO"]  # nothing has moved


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


def test_groups_have_every_layer_once():
    assert proposition.groups_of(2) == [
        ("embedding", [0]), ("layer 1", [1]), ("layer 2", [2]), ("logits", [3]),
    ]  # fmt: skip
    groups = proposition.groups_of(30)
    assert len(groups) == 6 and groups[0][0] == "layers 0 to 6"
    assert [place for _, places in groups for place in places] == list(range(32))


def test_the_summary_of_the_proposition_by_hand():
    """Two tokens at 1 − π 0.5 and 0.25 with norms 1 and 0.5: a slope of 2, in bounds of 1 and 3."""
    rests = torch.tensor([0.5, 0.25, 0.1]).double()
    norms = torch.tensor([[1.0], [0.5], [0.4]]).double()
    found = proposition.summary_of(rests, norms, [1.0], [3.0], [("logits", [0])])["logits"]
    assert found["inside"] == pytest.approx(2 / 3) and found["above"] == pytest.approx(1 / 3)
    assert found["median_slope"] == pytest.approx(2)
    exact = proposition.summary_of(rests, 2 * rests[:, None], [1.0], [3.0], [("a", [0])])["a"]
    assert exact["correlation"] == pytest.approx(1) and exact["inside"] == 1


def test_a_group_of_layers_is_inside_if_each_layer_is():
    """One token is out of bounds at one of two layers: its mean norm lies within the mean bounds."""
    rests = torch.tensor([0.5, 0.25]).double()
    slopes = torch.tensor([[2.0, 5.0], [2.9, 3.5]]).double()
    group = [("layers", [0, 1])]
    norms = slopes * rests[:, None]
    found = proposition.summary_of(rests, norms, [1.0, 4.0], [3.0, 8.0], group)["layers"]
    assert (found["inside"], found["above"], found["below"]) == (0.5, 0.0, 0.5)
    found = proposition.summary_of(rests, norms, [1.0, 1.0], [3.0, 4.0], group)["layers"]
    assert (found["inside"], found["above"], found["below"]) == (0.5, 0.5, 0.0)


def test_the_tokens_of_each_response_are_kept():
    """Slopes of 2 and 4 in bounds of 1 and 8: the upper one is 4 times the first, the second 4 times the lower one."""
    rests = torch.tensor([0.5, 0.25, 1e-9]).double()
    norms = torch.tensor([[1.0, 2.0, 0.75], [0.5, 1.0, 0.5], [0.0, 0.0, 0.0]]).double()
    groups = [("layers", [0, 1]), ("logits", [2])]
    numbers = torch.tensor([7, 9, 9])
    found = proposition.of_responses(numbers, rests, norms, [1.0] * 3, [8.0] * 3, groups)
    assert found[0] == {"rest": [0.5], "norm": {"layers": [1.5], "logits": [0.75]}, "above": 4.0, "below": 4.0}
    assert found[1]["rest"] == [0.25] and len(found) == 2


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
    assert shown.rstrip().splitlines()[-1] == verdicts.of_file(command, out)[-1]
