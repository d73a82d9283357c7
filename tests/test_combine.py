"""combine.py: the differences of trainers add up, what contradicts is shown, and what is written runs."""

import ast
import importlib
import importlib.util
import itertools
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, metrics, puzzles, run, small, timeless
from helpers import arguments, gradients

from tools import combine, family
from tools.maintain import updates

pytestmark = pytest.mark.usefixtures("on_the_cpu")
OTHERS = "grpo_ar_lopti grpo_tis grpo_stale grpo_async grpo_multi_turn".split()
LOSSES = "dr_grpo acpo gspo cispo dppo sapo archer grpo_kl entropy_top gdpo reinforce_pp ppo".split()


def made(tmp_path, *names):
    """The module of a combination, which is written outside the repository's root."""
    path = tmp_path / "made.py"
    path.write_text(combine.combine(names))
    spec = importlib.util.spec_from_file_location("made", path)
    module = sys.modules["made"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def below_docstring(text):
    return text.splitlines(keepends=True)[ast.parse(text).body[0].end_lineno :]


@pytest.mark.parametrize("parent", ["reinforce_pp", "dapo"])
def test_the_two_kept_products_are_what_combine_gives(parent):
    """Letter by letter, below the docstring; on REINFORCE++ the paper has another default of α."""
    found = "".join(below_docstring(combine.combine([parent, "grpo_ar_lopti"])))
    product = "".join(below_docstring(family.source(f"{parent}_ar_lopti")))
    alpha = {"reinforce_pp": 0.1, "dapo": 0.3}[parent]
    assert found.replace("alpha: Fraction = 0.3", f"alpha: Fraction = {alpha}") == product


def test_ar_lopti_tis_lag_and_several_turns_go_with_every_loss_and_ruff_has_nothing_to_say(tmp_path):
    """At least 90 pairs of the family, of which these are the ones that are promised."""
    for parts in itertools.product(LOSSES, OTHERS):
        if parts != ("entropy_top", "grpo_ar_lopti"):  # both say which tokens an update trains
            (tmp_path / f"{'_'.join(parts)}.py").write_text(combine.combine(parts))
    for command in (["check"], ["format", "--check"]):
        config = f"--config={ROOT / 'pyproject.toml'}"
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, config, tmp_path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_three_scripts_and_each_ones_own_difference_are_in_the_docstring():
    text = combine.combine(["gspo", "grpo_ar_lopti", "grpo_multi_turn"], "mine.py")
    said = ast.get_docstring(ast.parse(text))
    assert said.count("What differs from grpo.py") == 3 and family.DIFFERS.search(said)[1] == "gspo"
    assert "python -m tools.combine gspo grpo_ar_lopti grpo_multi_turn --out mine.py" in said
    assert all(word in text for word in ("def in_stage", "class Conversation", "/ length)[mask].sum()", "lopti_stages"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("gspo cispo", "gspo.py and cispo.py are alternatives: both change the objective"),
        ("gdpo dr_grpo", "are alternatives"),
        ("dapo gspo grpo_tis cispo", "gspo.py and cispo.py are alternatives"),
        ("dapo grpo_async", "change the same lines:\n  main, in dapo.py:\n"),
        ("grpo dapo", "grpo.py is contained in dapo.py already"),
        ("grpo_async grpo_tis", "grpo_tis.py is contained in grpo_async.py already"),
        ("dapo dapo", "dapo.py is contained in dapo.py already"),
        ("dapo drgpo", "drgpo is no trainer: there are grpo, "),
        ("dapo", "name two scripts or more"),
        ("dapo gspo --out grpo.py", "--out grpo.py exists"),
        ("dapo gspo --out /tmp/zz_no_such.py", "must be a .py file in"),
        ("dapo gspo --out zz-no-such.py", "must be a .py file in"),
    ],
)
def test_what_can_not_be_combined_is_said_and_nothing_is_written(names, message):
    words = names.split() + ([] if "--out" in names else ["--out", "zz_no_such.py"])
    before = sorted(path.name for path in ROOT.iterdir())
    done = subprocess.run([sys.executable, "tools/combine.py", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (1, 2) and message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and sorted(path.name for path in ROOT.iterdir()) == before


def test_a_script_that_needs_what_the_other_takes_away_is_refused():
    """Both merge line by line: sapo.py has no clip_low, and cispo.py reads it elsewhere."""
    scripts = [combine.read(stem, family.source(stem)) for stem in ("grpo", "sapo")]
    text = family.source("sapo").replace("args.tau_positive", "args.clip_low")
    with pytest.raises(ValueError, match="one takes away --clip_low, which another one uses, in args"):
        combine.check(text, scripts)
    with pytest.raises(ValueError, match="takes away k3, which"):
        combine.check(family.source("sapo").replace("def k3(", "def k4("), scripts)
    with pytest.raises(ValueError, match=r"takes away update\(\) with other parameters"):
        combine.check(family.source("sapo").replace("def update(policy, ", "def update("), scripts)


# (scripts, settings that turn the second one off): the first one's gradients and metrics, to the last bit
TURNED_OFF = {
    "gspo grpo_ar_lopti": {"alpha": 0.0, "eta": 0.0},
    "sapo grpo_ar_lopti": {"alpha": 0.0, "eta": 0.0},
    "acpo grpo_tis": {"correction": "tis"},
    "cispo entropy_top": {"entropy_top": 1.0},
    "dapo grpo_ar_lopti": {"alpha": 0.0, "eta": 0.0},
    "gspo grpo_multi_turn": {"max_turns": 1},
    "gspo gigpo": {"omega": 0.0},
    "dapo gigpo": {"omega": 0.0},
    "reinforce_pp gspo grpo_ar_lopti": None,
    "gdpo grpo_stale": {"correction": "none"},
}


@pytest.mark.parametrize("case", TURNED_OFF)
def test_with_one_script_turned_off_a_combination_is_the_other_to_the_last_bit(case, tmp_path):
    *names, off = case.split()
    module = made(tmp_path, *names, off)
    settings = TURNED_OFF[case] or {"alpha": 0.0, "eta": 0.0}
    first = made(tmp_path, *names) if len(names) > 1 else importlib.import_module(names[0])
    batch = batch_of_rows()
    found = []
    for trainer, changes in ((first, {}), (module, settings)):
        args = arguments(trainer, updates_per_step=2, responses_per_prompt=4, **changes)
        sys.modules[trainer.__name__] = trainer
        given = updates.with_advantages(trainer.__name__, batch, batch["rewards"], None, args)
        policy = updates.TablePolicy(batch["logp"].flatten(), batch["entropy"].flatten())
        given.pop("rewards")
        found.append(gradients(trainer, given, args, policy))
    (expected, metrics), (steps, its_metrics) = found
    assert all(torch.equal(a, b) and a.any() for a, b in zip(steps, expected, strict=True))
    assert metrics.items() <= its_metrics.items()


def batch_of_rows():
    """Sixteen responses of up to nine tokens to four prompts, whose sampler is the trainer."""
    rng = torch.Generator().manual_seed(5)
    mask = torch.arange(12) >= 3
    mask = mask & (torch.arange(12) < torch.randint(5, 13, (16, 1), generator=rng))
    batch = {name: -torch.rand(16, 12, generator=rng) * mask for name in ("old_logp", "ref_logp", "logp")}
    batch |= {"entropy": torch.rand(16, 12, generator=rng) * mask, "sampler_logp": batch["old_logp"], "mask": mask}
    rewards = torch.randint(4, (16,), generator=rng).float()
    return batch | {"ids": torch.arange(16 * 12).view(16, 12), "rewards": rewards}


# script, what it is combined with, flags that turn that off. At a lag of 1 the first step has fresh responses.
RUNS_TURNED_OFF = [
    ("gspo", "grpo_stale", "--lag 0 --correction none --steps 2"),
    ("gspo", "grpo_async", "--lag 1 --correction none --steps 1"),
    ("gspo", "grpo_multi_turn", "--steps 2"),
    ("dapo", "grpo_multi_turn", "--steps 2 --max_refills 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "off", "flags"), RUNS_TURNED_OFF)
def test_a_run_with_one_script_turned_off_is_the_others_run_to_the_last_bit(name, off, flags, tmp_path):
    """Sampler, scores and the last weights included; puzzles are a task of one turn."""
    path = ROOT / f"zz_{name}_{off}.py"
    its_flags, common = flags.split("--correction none ")[-1].split(), {"dtype": "float32", "task": "kk"}
    try:
        path.write_text(combine.combine([name, off], path.name))
        run(f"{name}.py", *small(tmp_path / "one", data=puzzles(), **common), *its_flags)
        run(path.name, *small(tmp_path / "both", data=puzzles(), **common), *flags.split())
    finally:
        path.unlink(missing_ok=True)
    one, both = ([timeless(row) for row in metrics(tmp_path / folder)] for folder in ("one", "both"))
    assert len(one) == len(both) > 0
    for row, its_row in zip(one, both, strict=True):
        assert row["grad_norm"] > 0 and row.items() <= its_row.items()
    weights, its_weights = (sorted((tmp_path / folder).rglob("model.safetensors")) for folder in ("one", "both"))
    assert [path.read_bytes() for path in weights] == [path.read_bytes() for path in its_weights] and weights


@pytest.mark.slow
@pytest.mark.parametrize("other", ["dapo", "gspo", "grpo_ar_lopti", "grpo_tis", "grpo_async"])
def test_several_turns_run_with_each_for_a_step(other, tmp_path):
    path = ROOT / f"zz_{other}.py"
    words = "--task calculator --prompts_per_step 4 --responses_per_prompt 4 --eval_size 4 --max_response_tokens 96"
    try:
        path.write_text(combine.combine([other, "grpo_multi_turn"], path.name))
        command = [sys.executable, path.name, *words.split(), "--steps", "1", "--run_dir", tmp_path / "run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    finally:
        path.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
