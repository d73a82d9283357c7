"""What is drawn and compared: tools/plot.py and tools/compare.py."""

import importlib
import json
import shlex
import subprocess
import sys
from math import sqrt

import pytest
from conftest import ROOT, small

from tools import compare, plot


def write_run(folder, script, values, **settings):
    """A run folder as the trainers leave it, with these rewards."""
    folder.mkdir(parents=True)
    args = {"model": "m", "lr": 1e-3, "steps": len(values)} | settings
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "run.json").write_text(json.dumps({"script": script}))
    rows = [{"step": step, "reward": value} for step, value in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def call(*words):
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)


# --------------------------------------------------------------------------------------------------------------------
# plot.py


def test_exponential_average_by_hand():
    assert plot.exponential_average([]) == [] and plot.exponential_average([3.0]) == [3.0]
    expected = [1.0, (0.95 * 1 + 2) / 1.95, (0.95**2 * 1 + 0.95 * 2 + 6) / (0.95**2 + 0.95 + 1)]
    assert plot.exponential_average([1.0, 2.0, 6.0]) == pytest.approx(expected)


def test_mean_and_spread_are_over_the_steps_that_all_runs_have():
    runs = [
        [{"step": s, "eval/accuracy": v} for s, v in run]
        for run in ([(0, 0.2), (5, 0.4)], [(0, 0.4), (5, 1.0), (9, 1)])
    ]
    steps, mean, spread = plot.mean_and_spread(runs, "eval/accuracy")
    assert steps == [0, 5] and mean == pytest.approx([0.3, 0.7])
    assert spread == pytest.approx([0.1 * sqrt(2), 0.3 * sqrt(2)])  # ddof 1 of two: half their distance times √2
    assert plot.mean_and_spread(runs[:1], "eval/accuracy")[2] == [0, 0]


def test_curves_are_smoothed_before_they_are_averaged_and_evaluations_are_not():
    runs = [[{"step": 1, "reward": 0.0, "eval/accuracy": 0.0}, {"step": 2, "reward": 1.0, "eval/accuracy": 1.0}]]
    assert plot.mean_and_spread(runs, "reward")[1] == pytest.approx([0, 1 / 1.95])
    assert plot.mean_and_spread(runs, "eval/accuracy")[1] == [0, 1]


def test_runs_are_grouped_by_script_and_settings_but_the_seed():
    def a_run(script, **settings):
        return {"script": script, "args": settings, "rows": [settings]}

    runs = [
        a_run("grpo", lr=1, seed=0, run_dir="a"),
        a_run("grpo", lr=1, seed=1, run_dir="b"),
        a_run("lopti", lr=1, eta=0.5, seed=0, run_dir="c"),
        a_run("lopti", lr=1, eta=0.3, seed=0, run_dir="d"),
    ]
    groups = plot.group(runs)
    assert list(groups) == ["grpo", "lopti eta 0.5", "lopti eta 0.3"]
    assert [len(rows) for rows in groups.values()] == [2, 1, 1]


def test_plot_draws_png_and_svg_of_several_runs(tmp_path):
    folders = [write_run(tmp_path / f"g{seed}", "grpo", [0, 1, seed], seed=seed) for seed in (0, 1)]
    folders.append(write_run(tmp_path / "l", "grpo_ar_lopti", [0, 2, 2], seed=0))
    done = call("tools/plot.py", *folders, "--out", tmp_path / "both")
    assert done.returncode == 0, done.stderr
    assert "grpo: 2 run(s)" in done.stdout and "grpo_ar_lopti: 1 run(s)" in done.stdout
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "both.svg").read_text()
    assert ">grpo<" in svg and ">grpo_ar_lopti<" in svg and ">reward<" in svg
    assert ">entropy [nats]<" not in svg  # no run has it


@pytest.mark.parametrize("what", ["nothing there", "an empty folder"])
def test_plot_says_which_folder_is_no_run(what, tmp_path):
    if what == "an empty folder":
        (tmp_path / "run").mkdir()
    done = call("tools/plot.py", tmp_path / "run")
    assert done.returncode == 1 and f"error: {tmp_path / 'run'} is not the folder of a run" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_terminals_plot_shows_reward_and_test_accuracy():
    rows = [{"step": 0, "eval/accuracy": 0.2, "eval/accuracy_2": 0.3}]
    rows += [{"step": step, "reward": step / 10} for step in range(1, 9)] + [
        {"step": 9, "reward": 1, "eval/accuracy": 0.9}
    ]
    text = plot.in_terminal(rows, width=80, colours=False)
    assert "reward" in text and "test accuracy" in text and "accuracy_2" in text and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


# --------------------------------------------------------------------------------------------------------------------
# compare.py


def a_kept_run(accuracies, command="grpo.py --seed 0", seconds=2.0):
    """A kept run with these test accuracies, the first before training."""
    rows = [{"step": 5 * i, "eval/accuracy": a, "eval/accuracy_2": a + 0.1} for i, a in enumerate(accuracies)]
    rows[1:] = [row | {"reward": 1.0, "response_tokens": 50.0, "time/step": seconds} for row in rows[1:]]
    about = {"commit": "abc", "machine": "here", "versions": {"torch": "2"}, "date": "2026-01-02"}
    return {"command": command, "rows": rows} | about


def test_the_final_accuracy_is_the_mean_of_the_last_three_evaluations():
    assert compare.final(a_kept_run([0.9, 0.1, 0.2, 0.3, 0.7]), "eval/accuracy") == pytest.approx(0.4)
    assert compare.final(a_kept_run([0.9, 0.1, 0.2]), "eval/accuracy") == pytest.approx(0.15)


def test_mean_and_standard_error_by_hand():
    assert compare.mean_and_error([0.1, 0.2, 0.6]) == pytest.approx((0.3, sqrt((0.04 + 0.01 + 0.09) / 2) / sqrt(3)))
    assert compare.shown([0.5]) == "0.500"


def test_the_table_by_hand():
    """Differences are taken seed by seed: 0.2 and 0.4 here, whatever the seeds have in common."""
    runs = {
        "grpo": {0: a_kept_run([0.3, 0.4, 0.4, 0.4]), 1: a_kept_run([0.3, 0.2, 0.2, 0.2])},
        "new": {0: a_kept_run([0.3, 0.6, 0.6, 0.6], seconds=4.0), 1: a_kept_run([0.3, 0.6, 0.6, 0.6], seconds=5.0)},
        "worse": {0: a_kept_run([0.3, 0.1, 0.1, 0.1])},
    }
    commands = {"grpo": ["grpo.py"], "new": ["grpo.py", "--lr", "1"], "worse": ["grpo.py"]}
    head, _, grpo, new, worse, *_ = compare.table(runs, commands, "--steps 15").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head, grpo, new, worse)]
    table = [dict(zip(cells[0], row)) for row in cells[1:]]
    assert [row["test accuracy"] for row in table] == ["0.300 ± 0.100", "0.600 ± 0.000", "0.100"]
    assert table[0]["2 people"] == "0.400 ± 0.100"
    assert [row["minus grpo"] for row in table] == ["", "+0.300 ± 0.100", "−0.300"]
    assert [row["runs"] for row in table] == ["2", "2", "1"]
    assert [row["s/step"] for row in table] == ["2.0", "4.5", "2.0"]
    assert table[0]["paper"] == "0.30" and table[1]["paper"] == ""


def test_an_entry_is_compared_with_the_one_that_its_name_begins_with():
    runs = {name: {0: a_kept_run([0.3, a, a, a])} for name, a in [("2", 0.3), ("2, x", 0.4), ("4", 0.6), ("4, x", 0.5)]}
    head, _, *rows = compare.table(runs, {name: ["grpo.py"] for name in runs}, "").splitlines()[:6]
    place = [cell.strip() for cell in head.split("|")].index("difference")
    assert [row.split("|")[place].strip() for row in rows] == ["", "+0.100", "+0.300", "−0.100"]
    assert compare.base_of("high, then low", {"grpo": 0, "high, then low": 0}) == "grpo"


def test_a_kept_run_is_not_run_again_and_other_flags_are_refused(tmp_path):
    command = "grpo.py --steps 15 --seed 0"
    path = compare.kept_file(tmp_path, "grpo", 0)
    path.write_text(json.dumps(a_kept_run([0.3, 0.4, 0.5, 0.6], command)))
    flags = ["tools/compare.py", "--entries", "grpo: grpo.py", "--seeds", "0", "--folder", tmp_path]
    done = call(*flags, "--common=--steps 15", "--limit", "0.0001")  # a run would not end in that time
    assert done.returncode == 0, done.stderr
    assert "0.500" in (tmp_path / "comparison.md").read_text() and (tmp_path / "comparison.png").exists()
    done = call(*flags, "--common=--steps 16")
    assert done.returncode == 1 and "--steps 16" in done.stderr and "Traceback" not in done.stderr


def test_a_run_that_takes_too_long_or_fails_is_not_kept(tmp_path):
    flags = ["tools/compare.py", "--entries", "x: grpo.py", "--seeds", "0", "--folder", tmp_path]
    done = call(*flags, "--limit", "0.005")
    assert done.returncode == 1 and "more than 0.005 minutes" in done.stderr
    done = call(*flags, "--common=--lr 7")
    assert done.returncode == 1 and "--lr is 7" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("entry", ["grpo.py", "x: nowhere.py", ": grpo.py", "x:"])
def test_an_entry_must_name_a_script(entry):
    with pytest.raises(ValueError, match="NAME: SCRIPT FLAGS"):
        compare.read_entries([entry])


@pytest.mark.parametrize("suite", compare.SUITES)
def test_every_entry_of_a_suite_is_a_command_that_its_script_takes(suite):
    common, entries = compare.SUITES[suite]
    for name, (script, *flags) in compare.read_entries(entries).items():
        trainer = importlib.import_module(script.removesuffix(".py"))
        args = trainer.parse_args([*flags, *shlex.split(common)])
        trainer.check_args(args)
        assert args.eval_size == 300, name


def test_suites_that_share_a_kept_run_share_its_flags():
    kept = {}
    for common, entries in compare.SUITES.values():
        for name, words in compare.read_entries(entries).items():
            path = compare.kept_file(ROOT, name, 0)
            assert kept.setdefault(path, [*words, *shlex.split(common)]) == [*words, *shlex.split(common)]


def test_compare_runs_and_keeps_what_is_missing(tmp_path):
    words = small(tmp_path / "run", steps=1)
    common = " ".join(words[:2] + words[4:])  # the run's folder is compare's to choose
    flags = ["--entries", "a: grpo.py", "b: grpo_ar_lopti.py --eta 0", "--seeds", "7", "--folder", tmp_path]
    done = call("tools/compare.py", *flags, "--only", "b", f"--common={common}")
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "b_seed_7.json").read_text())
    assert kept["command"] == f"grpo_ar_lopti.py --eta 0 {common} --seed 7" and kept["script"] == "grpo_ar_lopti"
    assert [row["step"] for row in kept["rows"]] == [0, 1] and kept["versions"]["torch"]
    assert "eval/accuracy" in kept["rows"][0] and "time/step" in kept["rows"][1]
    assert not (tmp_path / "a_seed_7.json").exists()


def test_the_comparison_in_the_readme_is_what_its_kept_runs_give():
    """Every entry as it stands in tools/compare.py, at least three seeds, no run that these flags don't give."""
    folder, commands, runs = ROOT / "benchmarks" / "kk_tiny", compare.read_entries(compare.ENTRIES), {}
    for name, words in commands.items():
        paths = sorted(folder.glob(compare.kept_file(folder, name, "*").name))
        seeds = [int(path.stem.rpartition("_")[2]) for path in paths]
        assert len(seeds) >= 3, name
        command = shlex.join([*words, *shlex.split(compare.COMMON)])
        runs[name] = {s: compare.read_kept(path, f"{command} --seed {s}") for s, path in zip(seeds, paths)}
        assert all(run["rows"][-1]["step"] == 12 and not run["commit"].endswith("+") for run in runs[name].values())
    table = compare.table(runs, commands, compare.COMMON)
    assert table == (folder / "comparison.md").read_text()
    readme = (ROOT / "README.md").read_text()
    assert table in readme and "benchmarks/kk_tiny/comparison.png" in readme
    assert (folder / "comparison.png").exists() and (folder / "comparison.svg").exists()


# --------------------------------------------------------------------------------------------------------------------
# bookkeeping.py


@pytest.mark.parametrize("keep", [True, False])
def test_freed_memory_is_used_again(keep):
    """20 tensors of 64 MB, one after the other: each takes its 16384 pages anew, or most use those of one before.

    Two or three are new even then: what is allocated in between may lie in a place that was just freed.
    """
    lines = ["import resource, torch", "from tools import bookkeeping", "bookkeeping.keep_freed_memory()" * keep]
    lines += ["faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt", "before = faults()"]
    lines += ["for _ in range(20): torch.ones(2**24)", "print((faults() - before) / 2**14)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 10 if keep else float(done.stdout) > 19
