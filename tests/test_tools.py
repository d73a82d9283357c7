"""What is drawn and compared: runtime/curves.py, tools/plot.py, tools/compare.py; what update_speed.py counts."""

import importlib
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, python, small

from runtime import checks, defaults
from tools import compare, comparisons, get_smollm2, kept, plot
from tools.maintain import fits

# --------------------------------------------------------------------------------------------------------------------
# plot.py


def runs_of(key, *runs):
    """Runs with these values of one metric, from step 1 on."""
    return [[{"step": step, key: value} for step, value in enumerate(values, 1)] for values in runs]


def lines(axis):
    return [list(line.get_ydata()) for line in axis.lines]


def test_a_picture_shows_what_was_measured():
    """The values of the rows themselves, and no word of an average; a spike is one step wide."""
    norms = [0.1, 0.2, 1100.0, 0.2, 0.1]
    figure = plot.draw({"run": runs_of("grad_norm", norms)}, [])
    assert lines(figure.axes[0]) == [norms]
    assert not figure.get_suptitle()
    figure = plot.draw({"a": runs_of("reward", [1.0, 5.0], [3.0, 6.0]), "b": runs_of("reward", [0.0, 9.0])}, [])
    assert lines(figure.axes[0]) == [[2.0, 5.5], [0.0, 9.0]]
    assert "average" not in figure.get_suptitle() and "mean over the seeds" in figure.get_suptitle()


# --------------------------------------------------------------------------------------------------------------------
# benchmarks/update_speed.py


@pytest.fixture
def update_speed(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("update_speed")


def test_an_updates_operations_by_hand(update_speed):
    """A Qwen2.5-3B's weights, 3.086 billion: 0.311 of them are the head, which only response tokens use."""
    config = fits.MODELS["Qwen/Qwen2.5-3B-Instruct"]
    n_params = fits.parameters(config)
    head = 151936 * 2048
    weights = 1024 * 6 * (n_params - head) + 768 * 6 * head
    attention = 3 * 4 * 36 * 2048 * 1024 * 512  # thrice a forward pass; 4: scores and sums, a product and an addition
    assert update_speed.update_flops(config, n_params, 1, 256, 768) == weights + attention
    untied = fits.MODELS["Qwen/Qwen2.5-7B-Instruct"]  # the embedding is looked up, not multiplied
    all_but_embedding = fits.parameters(untied) - 152064 * 3584
    flops = update_speed.update_flops(untied, fits.parameters(untied), 1, 0, 1)
    assert flops == pytest.approx(6 * all_but_embedding, rel=1e-4)


# --------------------------------------------------------------------------------------------------------------------
# compare.py


def a_kept_run(accuracies, command="grpo.py --seed 0"):
    """A kept run with these test accuracies, the first before training."""
    rows = [{"step": 5 * i, "eval/accuracy": a, "eval/accuracy_2": a + 0.1} for i, a in enumerate(accuracies)]
    rows[1:] = [row | {"reward": 1.0, "response_tokens": 50.0, "time/step": 2.0} for row in rows[1:]]
    about = {"commit": "abc", "machine": "here", "versions": {"torch": "2"}, "date": "2026-01-02"}
    script, *flags = shlex.split(command)
    return {"script": Path(script).stem, "settings": kept.settings_of(flags), "rows": rows} | about


def test_the_mean_is_of_the_last_three_evaluations_and_never_of_the_one_before_training():
    assert compare.final(a_kept_run([0.9, 0.1, 0.2, 0.3, 0.7]), "eval/accuracy") == pytest.approx(0.4)
    assert compare.final(a_kept_run([0.9, 0.1, 0.2]), "eval/accuracy") == pytest.approx(0.15)
    assert compare.at_the_end(a_kept_run([0.9, 0.1, 0.2, 0.3, 0.7]), "eval/accuracy") == 0.7
    assert compare.at_the_end(a_kept_run([0.9, 0.1]), "eval/accuracy") == 0.1


def test_the_table_by_hand():
    """Differences are taken seed by seed: 0.2 and 0.4 here, whatever the seeds have in common."""
    runs = {
        "grpo": {0: a_kept_run([0.3, 0.3, 0.4, 0.5]), 1: a_kept_run([0.3, 0.2, 0.2, 0.2])},
        "new": {0: a_kept_run([0.3, 0.6, 0.6, 0.6]), 1: a_kept_run([0.3, 0.6, 0.6, 0.6])},
        "worse": {0: a_kept_run([0.3, 0.1, 0.1, 0.1])},
    }
    commands = {"grpo": ["grpo.py"], "new": ["grpo.py", "--lr", "1"], "worse": ["grpo.py"]}
    head, _, grpo, new, worse, *below = compare.table(runs, commands, "--steps 15").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (head, grpo, new, worse)]
    table = [dict(zip(cells[0], row)) for row in cells[1:]]
    means = [row["mean of evaluations 5, 10, 15"] for row in table]
    assert means == ["0.300 ± 0.100", "0.600 ± 0.000", "0.100"]
    assert [row["accuracy at step 15"] for row in table] == ["0.350 ± 0.150", "0.600 ± 0.000", "0.100"]
    assert table[0]["2 people (mean)"] == "0.400 ± 0.100"
    assert [row["minus grpo (mean)"] for row in table] == ["", "+0.300 ± 0.100", "−0.300"]
    assert [row["minus grpo (step 15)"] for row in table] == ["", "+0.250 ± 0.150", "−0.400"]
    assert [row["runs"] for row in table] == ["2", "2", "1"]
    assert table[0]["paper"] == "0.30" and table[1]["paper"] == ""
    assert "of 2 seeds is 0.100 (mean of evaluations 5, 10, 15) and 0.150 (step 15), with 1 degree" in "".join(below)


def test_a_kept_run_is_not_run_again_and_other_flags_are_refused(tmp_path):
    command = "grpo.py --steps 15 --seed 0"
    path = compare.kept_file(tmp_path, "grpo", 0)
    path.write_text(json.dumps(a_kept_run([0.3, 0.4, 0.5, 0.6], command)))
    flags = ["tools/compare.py", "--entries", "grpo: grpo.py", "--seeds", "0", "--folder", tmp_path]
    done = python(*flags, "--common=--steps 15", "--limit", "0.0001")  # a run would not end in that time
    assert done.returncode == 0, done.stderr
    assert "0.500" in (tmp_path / "comparison.md").read_text() and (tmp_path / "comparison.png").exists()
    done = python(*flags, "--common=--steps 16")
    assert done.returncode == 2 and "--steps 16" in done.stderr and "Traceback" not in done.stderr


def test_a_run_that_takes_too_long_or_fails_is_not_kept(tmp_path):
    flags = ["tools/compare.py", "--entries", "x: grpo.py", "--seeds", "0", "--folder", tmp_path]
    done = python(*flags, "--limit", "0.005")
    assert done.returncode == 1 and "more than 0.005 minutes" in done.stderr
    done = python(*flags, "--common=--lr 7")
    assert done.returncode == 1 and "--lr is 7" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suite", comparisons.SUITES)
def test_every_entry_of_a_suite_is_a_command_that_its_script_takes(suite):
    common, entries = comparisons.SUITES[suite]
    for name, words in compare.read_entries(entries).items():
        script, *flags = shlex.split(compare.command_of(words, common, seed=0))
        trainer = importlib.import_module(script.removesuffix(".py"))
        args, _ = defaults.read(flags, trainer.Args, trainer.TASKS)
        checks.check_prompts_per_step(args)
        args.check()
        sizes = {"long": 500, "learning_rate": 500, "llm": 128, "lora": 128, "puzzles": 96, "puzzles_384": 96}
        assert args.eval_size == sizes.get(suite, 300), name


@pytest.mark.parametrize("own", ["--lr 1e-3 --no_compile", "--lr=1e-3 --no-compile", "--compile=False --lr 1e-3"])
def test_an_entrys_own_flags_take_the_place_of_those_of_all(own):
    """However they are spelled: of two the trainer would take the last."""
    command = compare.command_of(["grpo.py", *own.split()], "--lr 1e-4 --compile --people '2, 3'", 7)
    assert command == "grpo.py --lr 0.001 --no_compile --people '2, 3' --seed 7"


@pytest.mark.parametrize(
    "flags", [["--seeds", "0"], ["--seeds", "0", "--folder", "benchmarks/kk_tiny"], ["--entries", "a: grpo.py"]]
)
def test_a_part_of_a_suite_does_not_overwrite_the_table_of_the_whole(flags):
    done = python("tools/compare.py", "--suite", "family", *flags, "--dry_run")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: family.md in ") and done.stderr.count("\n") == 1
    assert python("tools/compare.py", "--suite", "family", *flags, "--name", "mine", "--dry_run").returncode == 0


@pytest.mark.parametrize("named, model", [("", "models/kk_tiny"), ("--model models/other ", "models/other")])
def test_what_names_no_model_trains_kk_tiny(named, model, monkeypatch):
    """Also on a GPU, where the scripts take the paper's."""
    started = []
    done = SimpleNamespace(returncode=1, stdout="", stderr="")
    monkeypatch.setattr(compare.subprocess, "run", lambda words, **_: started.append(words) or done)
    with pytest.raises(RuntimeError):
        compare.run(f"grpo.py {named}--seed 0", 1)
    assert [started[0][i + 1] for i, word in enumerate(started[0]) if word == "--model"] == [model]


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


def test_the_comparison_in_the_docs_is_what_its_kept_runs_give():
    """Every entry as it stands in tools/comparisons.py, its three seeds, no run that these flags don't give."""
    folder, commands, runs = ROOT / "benchmarks" / "kk_tiny", compare.read_entries(comparisons.ENTRIES), {}
    seeds = compare.Args().seeds
    for name, words in commands.items():
        paths = [compare.kept_file(folder, name, seed) for seed in seeds]
        commands_of = [compare.command_of(words, comparisons.QUICK, seed) for seed in seeds]
        runs[name] = dict(zip(seeds, map(compare.read_kept, paths, commands_of)))
        assert all(run["rows"][-1]["step"] == 8 and not run["commit"].endswith("+") for run in runs[name].values())
    table = compare.table(runs, commands, comparisons.QUICK)
    table = compare.without_marks(table)
    assert table == compare.without_marks((folder / "comparison.md").read_text())
    page = (ROOT / "docs" / "comparison.md").read_text()
    assert table in compare.without_marks(page) and "benchmarks/kk_tiny/comparison.png" in page
    assert (folder / "comparison.png").exists()


# --------------------------------------------------------------------------------------------------------------------
# runtime/memory.py


# ----------------------------------------------------------------------------------------------------- get_smollm2.py


def test_another_file_than_the_published_one_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"abc")
    with pytest.raises(SystemExit, match=r"model\.gguf has the SHA-256 ba7816bf.* and should have b179c952"):
        get_smollm2.check(file)
    with pytest.raises(SystemExit, match="holds other files"):  # before anything is downloaded
        get_smollm2.main(tmp_path)
    # FIPS 180-2's own example
    monkeypatch.setattr(get_smollm2, "SHA256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    get_smollm2.check(file)


@pytest.mark.parametrize("keep", [True, False])
def test_freed_memory_is_used_again(keep):
    """20 tensors of 64 MB, one after the other: each takes its 16384 pages anew, or most use those of one before.

    Two or three are new even then: what is allocated in between may lie in a place that was just freed.
    """
    lines = ["import resource, torch", "from runtime import memory", "memory.keep_freed_memory()" * keep]
    lines += ["faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt", "before = faults()"]
    lines += ["for _ in range(20): torch.ones(2**24)", "print((faults() - before) / 2**14)"]
    done = python("-c", "\n".join(lines), check=True)
    assert float(done.stdout) < 10 if keep else float(done.stdout) > 19
