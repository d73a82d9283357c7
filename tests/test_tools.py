"""tools/compare.py and tools/kept.py: which runs are kept, what is made of them, and which other code made."""

import importlib
import json
import shlex

import pytest
from conftest import ROOT, python, small

from runtime import checks, flags
from tools import compare, kept


def a_kept_run(accuracies, command="grpo.py"):
    """A kept run with these test accuracies, the first before training."""
    rows = [{"step": 5 * i, "eval/accuracy": a, "eval/accuracy_2": a + 0.1} for i, a in enumerate(accuracies)]
    rows[1:] = [row | {"reward": 1.0, "response_tokens": 50.0, "time/step": 2.0} for row in rows[1:]]
    about = {"commit": "abc", "machine": "here", "versions": {"torch": "2"}, "date": "2026-01-02"}
    return compare.asked_for(shlex.split(command), "", seed=0) | {"rows": rows} | about


def test_the_mean_is_of_the_last_three_evaluations_and_never_of_the_one_before_training():
    for accuracies, mean, at_the_end in (([0.9, 0.1, 0.2, 0.3, 0.7], 0.4, 0.7), ([0.9, 0.1, 0.2], 0.15, 0.2)):
        rows = compare.rows_of({"a": {7: a_kept_run(accuracies)}})
        assert compare.late(rows, "eval/accuracy", compare.LAST["mean"])["a"][7] == pytest.approx(mean)
        assert compare.late(rows, "eval/accuracy", compare.LAST["last"])["a"][7] == at_the_end


def test_the_table_by_hand():
    """Differences are taken seed by seed: 0.2 and 0.4 here, whatever the seeds have in common."""
    runs = {
        "grpo": {0: a_kept_run([0.3, 0.3, 0.4, 0.5]), 1: a_kept_run([0.3, 0.2, 0.2, 0.2])},
        "new": {0: a_kept_run([0.3, 0.6, 0.6, 0.6]), 1: a_kept_run([0.3, 0.6, 0.6, 0.6])},
    }
    commands = {"grpo": ["grpo.py"], "new": ["grpo.py", "--lr", "1"]}
    head, _, *rows = compare.table(runs, commands, "--steps 15").splitlines()[:4]
    grpo, new = (dict(zip(head.split(" | "), row.split(" | "))) for row in rows)
    assert grpo["mean accuracy"] == "0.300 ± 0.100" and grpo["last accuracy"] == "0.350 ± 0.150"
    assert new["mean difference"] == "+0.300 ± 0.100" and new["last difference"] == "+0.250 ± 0.150"


def test_an_entry_is_compared_with_the_one_that_its_name_begins_with():
    names = ["grpo", "dapo", "dapo ar", "dapo ar+lopti", "4 updates", "4 updates, 80/20", "dapo ar, twice", "lopti"]
    bases = [compare.base_of(name, names) for name in names[2:]]
    assert bases == ["dapo", "dapo", "grpo", "4 updates", "dapo ar", "grpo"]


@pytest.mark.slow
def test_a_kept_run_is_not_run_again_and_other_flags_are_refused(tmp_path):
    run = a_kept_run([0.3, 0.4, 0.5, 0.6], "grpo.py --steps 15")
    compare.file_of(tmp_path, "grpo", 0).write_text(json.dumps(run))
    flags = ["tools/compare.py", "--entries", "grpo: grpo.py", "--seeds", "0", "--folder", tmp_path]
    done = python(*flags, "--common=--steps 15")
    assert done.returncode == 0 and "0 are missing" in done.stdout, done.stderr
    assert "0.500" in (tmp_path / "comparison.md").read_text() and (tmp_path / "comparison.png").exists()
    done = python(*flags, "--common=--steps 16")
    assert done.returncode == 2 and "--steps 16" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_that_fails_is_not_kept(tmp_path):
    flags = ["tools/compare.py", "--entries", "x: grpo.py", "--seeds", "0", "--folder", tmp_path]
    done = python(*flags, "--common=--lr 7")
    assert done.returncode == 1 and "--lr is 7" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suite", compare.SUITES)
def test_every_entry_of_a_suite_is_a_command_that_its_script_takes(suite):
    common, commands, _ = compare.read_suite(suite)
    assert compare.read_entries(f"{name}: {shlex.join(words)}" for name, words in commands.items()) == commands
    for name, words in commands.items():
        asked = compare.asked_for(words, common, seed=0)
        trainer = importlib.import_module(asked["script"])
        args, _ = flags.read(kept.command_of(**asked)[1:], trainer.Args, trainer.TASKS)
        checks.check_prompts_per_step(args)
        args.check()
        assert args.eval_size == asked["settings"]["eval_size"], name


def test_an_entrys_own_flags_take_the_place_of_those_of_all():
    asked = compare.asked_for(
        "grpo.py --eval_size 3 --lr 1e-3".split(), "--lr 1e-4 --eval_size 9 --gated --people '2, 3'", 7
    )
    command = shlex.join(kept.command_of(**asked))
    assert command == "grpo.py --lr 0.001 --eval_size 3 --gated --people '2, 3' --seed 7"


@pytest.mark.slow
def test_compare_runs_and_keeps_what_is_missing(tmp_path):
    words = small(tmp_path / "run", steps=1)
    common = " ".join(words[:2] + words[4:])  # the run's folder is compare's to choose
    flags = ["--entries", "a: grpo.py", "b: grpo_ar_lopti.py --eta 0", "--seeds", "7", "--folder", tmp_path]
    done = python("tools/compare.py", *flags, "--only", "b", f"--common={common}")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "b_seed_7.json").read_text())
    assert found["settings"] == kept.settings_of(words[:2] + words[4:]) | {"eta": 0, "seed": 7}
    assert found["script"] == "grpo_ar_lopti" and not kept.differs(found)
    assert [row["step"] for row in found["rows"]] == [0, 1] and found["versions"]["torch"]
    assert "eval/accuracy" in found["rows"][0] and "time/step" in found["rows"][1]
    assert not (tmp_path / "a_seed_7.json").exists()


@pytest.mark.parametrize("place", ["toy.py", "runtime/x.py"])
def test_code_is_that_of_script_and_runtime_without_comments(tmp_path, place):
    (tmp_path / "runtime").mkdir()
    found = []
    for text in ("def f(a):\n    return 2 * a\n", "def f(a):\n    return (2  # twice\n * a)", "def f(a): return 3 * a"):
        for path in ("toy.py", "runtime/x.py"):
            (tmp_path / path).write_text(text if path == place else "")
        found.append(kept.code_of.__wrapped__("toy", tmp_path))
    first, other_comment, other_code = found
    assert first == other_comment
    part = "script" if place == "toy.py" else "runtime"
    assert [name for name in first if first[name] != other_code[name]] == [part]


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--lr 1e-4 --steps 8", {"lr": 0.0001, "steps": 8}),
        ("--gated --no_compile --people '2, 3'", {"gated": True, "no_compile": True, "people": "2, 3"}),
        ("--task a.py", {"task": "a.py"}),
        ("--lr 1 --lr 2", {"lr": 2}),  # the last one counts, as for the trainer
    ],
)
def test_settings_by_hand(flags, settings):
    assert kept.settings_of(shlex.split(flags)) == settings
    assert kept.settings_of(kept.command_of("grpo", settings)[1:]) == settings


def test_results_of_another_code_are_listed_and_marked(tmp_path, monkeypatch):
    """Kept runs by the code of today, by other code, and by a script that is gone."""
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(kept, "FOLDERS", (".",))
    now = kept.code_of("grpo")
    cases = {
        "a": ("grpo", now, ""),
        "b": ("grpo", now | {"runtime": "0"}, "runtime"),
        "c": ("grpo", {"script": "0", "runtime": "0"}, "script and runtime"),
        "d": ("grpo", None, "unknown"),
        "e": ("nowhere", now, "script"),
    }
    runs = {
        name: {0: a_kept_run([0.5, 0.5]) | {"script": script, "code": code}}
        for name, (script, code, _) in cases.items()
    }
    for name in runs:
        compare.file_of(tmp_path, name, 0).write_text(json.dumps(runs[name][0]))
    expected = [f"{name}_seed_0.json: {what} (commit abc)" for name, (_, _, what) in cases.items() if what]
    assert compare.stale() == [*expected, "4 of 5 kept results were made by another code"]
    table = compare.table(runs, {name: ["grpo.py"] for name in runs}, "--steps 1")
    marked = [row.split(" | ")[0] for row in table.splitlines()[2:7]]
    assert marked == ["| a", "| b †", "| c †", "| d †", "| e †"]


def test_all_kept_results_have_their_settings_and_code():
    """The code is null if the commit that a result names is not in this history."""
    for path in sorted(path for folder in kept.FOLDERS for path in (ROOT / folder).rglob("*_seed_?.json")):
        result = json.loads(path.read_text())
        assert isinstance(result["settings"], dict) and "code" in result and "command" not in result, path
