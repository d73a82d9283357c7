"""tools/compare.py and tools/kept.py: which runs are kept, what is made of them, and whose digits have moved."""

import importlib
import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, python, small
from PIL import Image

from runtime import checks, flags
from tools import compare, kept, plot


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


def test_a_picture_is_small_and_looks_as_it_did(tmp_path):
    groups = {name: [a_kept_run([0.1, x, 0.5])["rows"] for x in (0.2, 0.9)] for name in "abcd"}
    plot.draw(groups, [tmp_path / "small.png"]).savefig(tmp_path / "large.png")
    small, large = (np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"), int) for name in ("small", "large"))
    assert abs(small - large).mean() < 0.3 and (small[0, 0] == 255).all()
    assert (tmp_path / "small.png").stat().st_size < (tmp_path / "large.png").stat().st_size / 2


def test_an_entry_is_compared_with_the_one_that_its_name_begins_with():
    names = ["grpo", "dapo", "dapo ar", "dapo ar+lopti", "4 updates", "4 updates, 80/20", "dapo ar, twice", "lopti"]
    bases = [compare.base_of(name, names) for name in names[2:]]
    assert bases == ["dapo", "dapo", "grpo", "4 updates", "dapo ar", "grpo"]


@pytest.mark.slow
def test_a_kept_run_is_not_run_again_and_other_flags_are_refused(tmp_path):
    run = a_kept_run([0.3, 0.4, 0.5, 0.6], "grpo.py --steps 15")
    kept.add(tmp_path / "any.jsonl", "grpo_seed_0", run)
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


def test_another_programs_file_is_not_written_over(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit):
        compare.main(compare.Args(entries=["x: grpo.py"], folder=tmp_path, name="metrics"))
    assert "metrics.jsonl is no file of saved runs: give another --name" in capsys.readouterr().err


@pytest.mark.parametrize("suite", compare.SUITES)
def test_every_entry_of_a_suite_is_a_command_that_its_script_takes(suite, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    common, commands, _ = compare.read_suite(suite)
    assert compare.read_entries(f"{name}: {shlex.join(words)}" for name, words in commands.items()) == commands
    for name, words in commands.items():
        asked = compare.asked_for(words, common, seed=0)
        trainer = importlib.import_module(compare.file_of(asked["script"], tmp_path).removesuffix(".py"))
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
    flags = ["--entries", "a: grpo.py", "b: grpo_ar_lopti+grpo_tis.py --eta 0", "--seeds", "7", "--folder", tmp_path]
    done = python("tools/compare.py", *flags, "--only", "b", f"--common={common}")
    assert done.returncode == 0, done.stderr
    [found] = kept.read_file(tmp_path / "comparison.jsonl", 0).values()
    assert found["run"] == "b_seed_7"
    assert found["settings"] == kept.settings_of(words[:2] + words[4:]) | {"eta": 0, "seed": 7}
    (ROOT / "combined_grpo_ar_lopti_grpo_tis.py").unlink()
    assert found["script"] == "grpo_ar_lopti+grpo_tis" and not kept.differs(found)
    assert [row["step"] for row in found["rows"]] == [0, 1] and found["versions"]["torch"]
    assert "eval/accuracy" in found["rows"][0] and "time/step" in found["rows"][1]


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--lr 1e-4 --steps 8", {"lr": 0.0001, "steps": 8}),
        ("--gated --no_compile --people '2, 3'", {"gated": True, "compile": False, "people": "2, 3"}),
        ("--task a.py", {"task": "a.py"}),
        ("--lr 1 --lr 2", {"lr": 2}),  # the last one counts, as for the trainer
    ],
)
def test_settings_by_hand(flags, settings):
    assert kept.settings_of(shlex.split(flags)) == settings
    assert kept.settings_of(kept.command_of("grpo", settings)[1:]) == settings


A_TREE = {  # no git in it
    "toy.py": "def f(a):\n    return 2 * a\n",
    "other.py": "",
    "lab/toy.py": "",
    "lab/x.py": "",
    "lab/common.py": "",
    "runtime/x.py": "def f(a):\n    return 2 * a\n",
    "tests/digits.txt": "A head.\n2026-01-02 toy.py: moved\n",
}
OTHER_COMMENT, OTHER_CODE = "def f(a):\n    return (2  # twice\n * a)", "def f(a): return 3 * a"
LINE = A_TREE["tests/digits.txt"]


@pytest.mark.parametrize(
    ("script", "changed", "commit", "verdict"),
    [
        ("toy", {}, "abc", ""),
        ("toy", {"toy.py": OTHER_COMMENT, "runtime/x.py": OTHER_COMMENT}, "abc+", ""),
        ("toy", {"toy.py": OTHER_CODE, "runtime/x.py": OTHER_CODE}, "abc", ""),  # no digit moved
        ("toy", {"toy.py": OTHER_CODE}, "abc+", "not known: its code had changes that no commit has"),
        ("toy", {"runtime/x.py": OTHER_CODE}, "abc+", "not known: its code had changes that no commit has"),
        ("toy", {"toy.py": None}, "abc", "not known: there is no script toy"),
        ("toy+other", {}, "abc", ""),
        ("toy+other", {"other.py": OTHER_CODE}, "abc+", "not known: its code had changes that no commit has"),
        ("toy+other", {"other.py": None}, "abc", "not known: there is no script toy+other"),
        ("lab.x", {"runtime/x.py": OTHER_CODE}, "abc", ""),
        ("lab.x", {"lab/common.py": OTHER_CODE}, "abc", "not known: lab/x.py or its common.py has changed"),
        *[
            (
                script,
                {f"{script.partition('+')[0].replace('.', '/')}.py": OTHER_CODE, "tests/digits.txt": f"{LINE}{line}\n"},
                "abc",
                verdict,
            )
            for script, line, verdict in [
                ("toy", "2026-01-03 other.py toy.py: why", "moved: 2026-01-03 other.py toy.py: why"),
                ("toy", "2026-01-03: toy.py and all the others", "moved: 2026-01-03: toy.py and all the others"),
                ("toy", "2026-01-03 other.py, lab/toy.py: not toy.py", ""),
                ("toy", "2026-01-03 tyo.py: misspelt", "moved: 2026-01-03 tyo.py: misspelt"),
                ("toy", "Not a date toy.py: why", ""),
                ("lab.x", "2026-01-03 lab/x.py: why", "moved: 2026-01-03 lab/x.py: why"),
                ("toy+other", "2026-01-03 other.py: why", "moved: 2026-01-03 other.py: why"),
                ("toy+other", "2026-01-03 lab/x.py: why", ""),
            ]
        ],
    ],
)
def test_a_result_knows_whether_todays_code_has_its_digits(tmp_path, script, changed, commit, verdict):
    """The result is made in a tree, which then changes. Its own code, comments aside, decides without digits.txt."""
    found = []
    for name, files in (("then", A_TREE), ("now", A_TREE | changed)):
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            if text is not None:
                (tmp_path / name / path).write_text(text)
        found.append(kept.code_of(script, tmp_path / name))
    result = {"script": script, "commit": commit, "code": found[0]}
    assert kept.differs(result, tmp_path / "now") == verdict


def test_results_of_other_digits_are_listed_and_marked(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(kept, "FOLDERS", (".",))
    monkeypatch.setattr(kept, "moves", lambda script, root: ["1", "2"])
    now, other = kept.code_of("grpo"), {"script": "0", "runtime": "0"}
    codes = {"a": now, "b": other | {"digits": 2}, "c": other | {"digits": 1}, "d": None, "e": other}
    runs = {name: {0: a_kept_run([0.5, 0.5]) | {"code": code}} for name, code in codes.items()}
    for name, by_seed in runs.items():
        kept.add(tmp_path / "x.jsonl", kept.name_of(name, 0), by_seed[0])
    unknown = "not known: nothing tells which commits came after it"
    assert compare.stale() == [
        "./c_seed_0 (commit abc): moved: 2",
        *(f"./{name}_seed_0 (commit abc): {unknown}" for name in "de"),
        "5 saved results: 2 have the digits of today's code, those of 1 have moved, and of 2 it is not known",
    ]
    table = compare.table(runs, {name: ["grpo.py"] for name in runs}, "--steps 1")
    assert [row.split(" | ")[0] for row in table.splitlines()[2:7]] == ["| a", "| b", "| c †", "| d ‡", "| e ‡"]


def test_each_move_of_digits_names_its_scripts_before_the_first_colon():
    """With a colon behind the date, a line would be about all scripts."""
    lines = (ROOT / "tests/digits.txt").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if re.match(r"[-\d]+: [\w/]+\.py\b", line)]


def test_all_kept_results_have_their_settings_and_code():
    """The code is null if the commit that a result names is not in this history."""
    for folder in kept.FOLDERS:
        for name, result in kept.read(ROOT / folder).items():
            assert isinstance(result["settings"], dict) and "code" in result and "command" not in result, name


def test_saved_runs_are_a_line_each_sorted_and_none_is_lost(tmp_path):
    """Two processes add to a file at once. A run that is there stays, and files from before are read as well."""
    words = "import sys; from pathlib import Path; from tools import kept\n"
    words += (
        "for i in range(30): kept.add(Path(sys.argv[1]), f'{sys.argv[2]}_seed_{i}', {'rows': [], 'by': sys.argv[2]})"
    )
    both = [subprocess.Popen([sys.executable, "-c", words, tmp_path / "x.jsonl", who], cwd=ROOT) for who in "ab"]
    assert [process.wait() for process in both] == [0, 0]
    kept.add(tmp_path / "x.jsonl", "a_seed_7", {"rows": [], "by": "c"})
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    names = [json.loads(line)["run"] for line in lines]
    assert names == sorted(f"{who}_seed_{i}" for who in "ab" for i in range(30)) and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "old_seed_0.json").write_text('{"by": "d"}')
    found = kept.read(tmp_path)
    assert len(found) == 61 and found["a_seed_7"]["by"] == "a" and found["old_seed_0"]["by"] == "d"
    for text, said in [
        (lines[0][:-5], "y.jsonl, line 1 can't be read"),
        (lines[0].replace('"a"', '"e"'), "another run named a_seed_0"),
        (f"{lines[0]}\n{lines[0].replace('[]', '[1]')}", "y.jsonl, line 2 is a second run named a_seed_0"),
    ]:
        (tmp_path / "y.jsonl").write_text(f"{text}\n")
        with pytest.raises(ValueError, match=said):
            kept.read(tmp_path)
    with pytest.raises(ValueError, match=r"no file benchmarks/llm/\*.jsonl has a run named grpo_seed_99"):
        kept.run("benchmarks/llm/grpo_seed_99")
