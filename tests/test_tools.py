"""What is drawn and compared: runtime/curves.py, tools/plot.py, tools/compare.py; the pictures of growth.py and
kk_tiny; what update_speed.py counts.
"""

import importlib
import json
import shlex
import shutil
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
from conftest import KK_TINY, ROOT, python, small
from transformers import AutoConfig

from models import make_kk_tiny
from runtime import checks, curves, defaults
from tools import compare, comparisons, family, fits, get_smollm2, kept, plot, updates


def write_run(folder, script, values, **settings):
    """A run folder as the trainers leave it, with these rewards."""
    folder.mkdir(parents=True)
    args = {"model": "m", "lr": 1e-3, "steps": len(values)} | settings
    (folder / "args.json").write_text(json.dumps(args))
    (folder / "run.json").write_text(json.dumps({"script": script}))
    rows = [{"step": step, "reward": value} for step, value in enumerate(values, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# --------------------------------------------------------------------------------------------------------------------
# curves.py


@pytest.fixture
def drawn(monkeypatch):
    """A function that gives the figure of a run's curves."""
    figures = []
    save = curves.save
    monkeypatch.setattr(curves, "save", lambda figure, paths: figures.append(save(figure, paths)))

    def draw(rows, path):
        curves.draw(rows, path)
        return figures.pop()

    return draw


def test_the_curves_of_a_run_are_what_was_measured_and_its_test_accuracy_by_category(drawn, tmp_path):
    rows = [{"step": 0, "eval/accuracy": 0.2, "eval/accuracy_2": 0.3, "eval/accuracy_3": 0.1}]
    rows += [{"step": step, "reward": step / 10, "accuracy_2": 0.5, "kl": None} for step in (1, 2)]
    rows += [{"step": 3, "reward": 1100.0, "eval/accuracy": 0.9, "eval/accuracy_2": 1.0, "eval/accuracy_3": 0.8}]
    figure = drawn(rows, tmp_path / "curves.png")
    assert titles(figure) == ["test accuracy", "reward"]  # no panel for what the run has not measured
    accuracy, reward = figure.axes
    assert lines(accuracy) == [[0.2, 0.9], [0.3, 1.0], [0.1, 0.8]] and lines(reward) == [[0.1, 0.2, 1100.0]]
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["all", "2", "3"]
    assert list(reward.lines[0].get_xdata()) == [1, 2, 3] and not reward.get_legend()
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_has_at_most_six_curves(drawn, tmp_path):
    row = {"step": 1} | {key: 0.5 for key in curves.TITLES}
    assert len(drawn([row], tmp_path / "curves.png").axes) == curves.MOST_PANELS == 6
    assert not drawn([], tmp_path / "curves.png").axes  # a run that was stopped before anything was measured


def test_the_terminals_plot_shows_reward_and_test_accuracy():
    rows = [{"step": 0, "eval/accuracy": 0.2, "eval/accuracy_2": 0.3}]
    rows += [{"step": step, "reward": step / 10, "reward_std": 0.5} for step in range(1, 9)] + [
        {"step": 9, "reward": 1, "eval/accuracy": 0.9}
    ]
    text = curves.in_terminal(rows, width=80, colours=False)
    assert "reward" in text and "test accuracy" in text and "accuracy_2" in text and "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80 and "reward_std" not in text


# --------------------------------------------------------------------------------------------------------------------
# plot.py


def test_exponential_average_by_hand():
    assert make_kk_tiny.exponential_average([], 0.95) == [] and make_kk_tiny.exponential_average([3.0], 0.95) == [3.0]
    expected = [1.0, (0.95 * 1 + 2) / 1.95, (0.95**2 * 1 + 0.95 * 2 + 6) / (0.95**2 + 0.95 + 1)]
    assert make_kk_tiny.exponential_average([1.0, 2.0, 6.0], 0.95) == pytest.approx(expected)


def runs_of(key, *runs):
    """Runs with these values of one metric, from step 1 on."""
    return [[{"step": step, key: value} for step, value in enumerate(values, 1)] for values in runs]


def lines(axis):
    return [list(line.get_ydata()) for line in axis.lines]


def titles(figure):
    return [axis.get_title() for axis in figure.axes]


def test_mean_and_range_are_over_the_steps_that_all_runs_have():
    runs = [
        [{"step": s, "eval/accuracy": v} for s, v in run]
        for run in ([(0, 0.2), (5, 0.4)], [(0, 0.4), (5, 1.0), (9, 1)])
    ]
    steps, mean, low, high = plot.mean_and_range(runs, "eval/accuracy")
    assert steps == [0, 5] and mean == pytest.approx([0.3, 0.7])
    assert low == [0.2, 0.4] and high == [0.4, 1.0]


def test_a_picture_shows_what_was_measured():
    """The values of the rows themselves, and no word of an average; a spike is one step wide."""
    norms = [0.1, 0.2, 1100.0, 0.2, 0.1]
    figure = plot.draw({"run": runs_of("grad_norm", norms)}, [])
    assert lines(figure.axes[0]) == [norms]
    assert not figure.get_suptitle()
    figure = plot.draw({"a": runs_of("reward", [1.0, 5.0], [3.0, 6.0]), "b": runs_of("reward", [0.0, 9.0])}, [])
    assert lines(figure.axes[0]) == [[2.0, 5.5], [0.0, 9.0]]
    assert "average" not in figure.get_suptitle() and "mean over the seeds" in figure.get_suptitle()


@pytest.mark.parametrize("key, least, most", [("accuracy", 0, 1), ("response_tokens", 0, 3000), ("kl", 0, 3000)])
def test_bands_end_at_what_was_measured(key, least, most):
    """A standard deviation would lead below 0 here, or above 1."""
    figure = plot.draw({"run": runs_of(key, [least, least], [least, most], [most, most])}, [])
    (band,) = figure.axes[0].collections
    ends = band.get_paths()[0].vertices[:, 1]
    assert min(ends) == least and max(ends) == most


def test_clip_rates_have_a_log_axis_that_says_where_zeros_lie():
    with_zeros = plot.draw({"run": runs_of("clip_rate", [0.0, 3e-4, 0.2])}, []).axes[0]
    assert with_zeros.get_yscale() == "symlog" and "log axis" in with_zeros.get_title()
    assert "linear below $10^{-4}$" in with_zeros.get_title() and lines(with_zeros) == [[0.0, 3e-4, 0.2]]
    assert with_zeros.get_ylim()[0] == 0
    without = plot.draw({"run": runs_of("clip_rate", [1e-5, 0.2])}, []).axes[0]
    assert without.get_yscale() == "log" and without.get_title() == "clip rate, log axis"
    nothing_clipped = plot.draw({"run": runs_of("clip_rate", [0.0, 0.0])}, []).axes[0]
    assert nothing_clipped.get_yscale() == "linear" and nothing_clipped.get_title() == "clip rate"


def test_a_spike_of_the_gradient_norm_gets_a_log_axis():
    usual = plot.draw({"run": runs_of("grad_norm", [0.1, 0.2, 0.4])}, []).axes[0]
    assert usual.get_yscale() == "linear" and usual.get_title() == "gradient norm"
    spike = plot.draw({"run": runs_of("grad_norm", [0.1, 0.2, 0.4, 1100])}, []).axes[0]
    assert spike.get_yscale() == "log" and spike.get_title() == "gradient norm, log axis"


@pytest.mark.parametrize("n_groups", [6, 14])
def test_of_more_groups_the_highest_and_the_lowest_have_names(n_groups):
    groups = {f"entry {i}": runs_of("reward", [0.0, float(i)]) for i in range(n_groups)}
    figure = plot.draw(groups, [])
    [axis], [legend] = figure.axes, figure.legends
    assert {line.get_label() for line in axis.lines} == set(groups)
    first = next(line for line in axis.lines if line.get_label() == "entry 0")
    assert first.get_linewidth() == max(line.get_linewidth() for line in axis.lines)
    assert [text.get_text() for text in legend.get_texts()] == ["entry 0", "the others"]
    assert legend.legend_handles[1].get_color() == plot.GREY
    assert [text.get_text().replace("\n", " ") for text in axis.texts] == [f"entry {n_groups - 1}", "entry 1"]
    assert len({line.get_color() for line in axis.lines}) == 3


def overlap(figure, legend, axis):
    """Whether a legend, as it is drawn, covers a part of the panel in which the data lies."""
    figure.draw_without_rendering()
    return legend.get_window_extent().overlaps(axis.get_window_extent())


def test_legends_do_not_lie_on_data():
    rows = [{"step": s} | {key: 1.0 for key in ("accuracy", "reward", "entropy", "kl")} for s in range(9)]
    for n_groups in (3, 7):
        figure = plot.draw({f"entry {i}": [rows] for i in range(n_groups)}, [])
        legends = [axis.get_legend() for axis in figure.axes if axis.get_legend()] + figure.legends
        assert legends
        assert not any(overlap(figure, legend, axis) for legend in legends for axis in figure.axes)


def test_the_same_values_give_the_same_files(tmp_path):
    for name in ("a", "b"):
        plot.draw({"run": runs_of("reward", [0.0, 1.0])}, [tmp_path / f"{name}.svg", tmp_path / f"{name}.png"])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_runs_are_grouped_by_script_and_settings_but_the_seed():
    def a_run(script, **settings):
        return {"script": script, "args": settings, "rows": [settings]}

    runs = [
        a_run("grpo", lr=1, seed=0, run_dir="a", export="x"),
        a_run("grpo", lr=1, seed=1, run_dir="b", export="y"),
        a_run("grpo", lr=1, seed=2, later=None),  # the others are from before this setting
        a_run("lopti", lr=1, eta=0.5, seed=0, run_dir="c"),
        a_run("lopti", lr=1, eta=0.3, seed=0, run_dir="d"),
    ]
    groups = plot.group(runs)
    assert list(groups) == ["grpo", "lopti eta 0.5", "lopti eta 0.3"]
    assert [len(rows) for rows in groups.values()] == [3, 1, 1]


def test_plot_draws_png_and_svg_of_several_runs(tmp_path):
    folders = [write_run(tmp_path / f"g{seed}", "grpo", [0, 1, seed], seed=seed) for seed in (0, 1)]
    folders.append(write_run(tmp_path / "l", "grpo_ar_lopti", [0, 2, 2], seed=0))
    done = python("tools/plot.py", *folders, "--out", tmp_path / "both")
    assert done.returncode == 0, done.stderr
    assert "grpo: 2 run(s)" in done.stdout and "grpo_ar_lopti: 1 run(s)" in done.stdout
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "both.svg").read_text()
    assert ">grpo<" in svg and ">grpo_ar_lopti<" in svg and ">reward<" in svg
    assert ">entropy [nats]<" not in svg  # no run has it


# --------------------------------------------------------------------------------------------------------------------
# benchmarks/update_speed.py


@pytest.fixture
def update_speed(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("update_speed")


def test_the_peak_of_a_device(update_speed):
    for name, tera in [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A4000", None),
    ]:
        assert update_speed.peak(name) == tera


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


def test_an_update_is_measured(update_speed):
    assert update_speed.seconds_of_update(AutoConfig.from_pretrained(KK_TINY), 4, 8, 16) > 0


# --------------------------------------------------------------------------------------------------------------------
# The pictures of benchmarks/growth.py and models/make_kk_tiny.py


def test_growth_draws_seconds_and_memory_apart_from_what_was_kept(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    growth = importlib.import_module("growth")
    kept = json.loads((ROOT / "benchmarks" / "results" / "growth.json").read_text())["results"]
    figure = growth.draw(kept, tmp_path / "growth.png")
    *of_seconds, memory, corner = figure.axes
    for rows, seconds, line in zip(kept.values(), of_seconds, lines(memory), strict=True):
        assert line == [row["peak_memory_gb"] for row in rows]
        assert [row["time/step"] for row in rows] in lines(seconds) and len(seconds.lines) == len(growth.PHASES) + 2
        assert "seconds" in seconds.get_title()
    assert "GiB" in memory.get_title() and not overlap(figure, corner.get_legend(), memory)
    monkeypatch.setattr(growth.common, "RESULTS", tmp_path)
    monkeypatch.setattr(growth, "measure_all", lambda: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        growth.main(growth.Args(draw_only=True))
    assert ended.value.code == 2
    (tmp_path / "growth.json").write_text(json.dumps({"results": kept}))
    (tmp_path / "growth.png").unlink()
    growth.main(growth.Args(draw_only=True))
    assert (tmp_path / "growth.png").exists()


def test_kk_tinys_learning_curve_is_drawn_from_the_values_that_are_kept(tmp_path):
    losses, shares = [5.0 - 0.004 * i for i in range(1000)], [0.00095 * i for i in range(1000)]
    make_kk_tiny.write_curves(losses, shares, [200, 400, 600, 800, 1000], tmp_path)
    figure = make_kk_tiny.draw_curves(tmp_path)
    assert (tmp_path / "loss.png").exists() and (tmp_path / "loss.json").stat().st_size < 20_000
    assert "exponential average (0.6)" in figure.get_suptitle()
    for axis, values in zip(figure.axes, (losses, shares), strict=True):
        raw, smooth, *ends = axis.lines
        assert list(raw.get_ydata()) == pytest.approx(values[::5], rel=1e-3) and raw.get_alpha() < 0.5
        assert list(raw.get_xdata()) == list(range(1, 1001, 5)) and not smooth.get_alpha()
        assert [end.get_xdata()[0] for end in ends] == [200, 400, 600, 800, 1000]
    names = figure.axes[0].texts
    assert [name.get_text() for name in names] == list(make_kk_tiny.STAGES)
    assert not any(overlap(figure, name, axis) for name in names for axis in figure.axes)


def test_kk_tiny_is_not_drawn_without_the_values(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        make_kk_tiny.main(make_kk_tiny.Args(folder=tmp_path, draw_only=True))
    assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


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


def test_evaluations_are_named_after_the_steps_at_which_they_were_made():
    four, two = a_kept_run([0.3, 0.1, 0.2, 0.3, 0.4]), a_kept_run([0.3, 0.1, 0.2])
    assert compare.names_of_evaluations([four]) == ("evaluations 10, 15, 20", "step 20")
    assert compare.names_of_evaluations([two, two]) == ("evaluations 5, 10", "step 10")
    assert compare.names_of_evaluations([a_kept_run([0.3, 0.1])]) == ("evaluation 5", "step 5")
    assert compare.names_of_evaluations([four, two]) == ("the last 3 evaluations", "the last evaluation")


def test_differences_have_a_sign():
    numbers = [0.068, -0.013, 1.2, -1.05, 10.0, 0.0, -0.0001]
    shown = ["+0.068", "−0.013", "+1.200", "−1.050", "+10.000", "+0.000", "+0.000"]
    assert [compare.signed(number) for number in numbers] == shown
    assert compare.shown_difference([-0.2]) == "−0.200"
    assert compare.shown_difference([-1.1, -1.3]) == "−1.200 ± 0.100"


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


def test_an_entry_is_compared_with_the_one_that_its_name_begins_with():
    runs = {name: {0: a_kept_run([0.3, a, a, a])} for name, a in [("2", 0.3), ("2, x", 0.4), ("4", 0.6), ("4, x", 0.5)]}
    head, _, *rows = compare.table(runs, {name: ["grpo.py"] for name in runs}, "").splitlines()[:6]
    place = [cell.strip() for cell in head.split("|")].index("difference (mean)")
    assert [row.split("|")[place].strip() for row in rows] == ["", "+0.100", "+0.300", "−0.100"]
    assert compare.base_of("high, then low", {"grpo": 0, "high, then low": 0}) == "grpo"


def test_every_entry_is_drawn_beside_the_one_it_grew_from_with_as_many_optimizer_steps():
    commands = compare.read_entries(comparisons.SUITES["control"][1])
    n_updates = {name: 4 if "lopti" in name or "low" in name or "4 updates" in name else 2 for name in commands}
    parents = compare.parents_of(commands, n_updates)
    assert {parents[name] for name in ("lopti", "ar+lopti", "high, then low")} == {"grpo 4 updates"}
    assert parents["reinforce++ ar+lopti"] == "reinforce++ 4 updates" and parents["dapo lopti"] == "dapo 4 updates"
    assert parents["reinforce++ ar"] == "reinforce++" and parents["dapo ar"] == "dapo"
    assert {parents[name] for name in ("grpo 4 updates", "ar", "reinforce++", "dapo")} == {"grpo"}
    commands = compare.read_entries(comparisons.ENTRIES)
    assert compare.parents_of(commands, dict.fromkeys(commands, 2))["dapo ar+lopti"] == "dapo"
    commands = compare.read_entries(comparisons.SUITES["updates"][1])
    parents = compare.parents_of(commands, dict.fromkeys(commands, 2))
    assert parents["4 updates, 80/20"] == "4 updates" and parents["4 updates"] == "2 updates"


def test_the_entries_are_in_the_order_of_the_family_tree():
    compared = set()
    for suite in ("comparison", "family"):
        _, entries = comparisons.SUITES[suite]
        stems = [words[0].removesuffix(".py") for words in compare.read_entries(entries).values()]
        in_order = [stem for stem in family.family() if stem in stems]
        assert list(dict.fromkeys(stems)) == in_order, f"SUITES[{suite!r}] in tools/comparisons.py: order {in_order}"
        compared |= set(stems)
    assert compared == set(updates.ALGORITHMS) - {"opd"}  # which needs a teacher


def test_the_differences_of_a_picture_by_hand():
    """0.2 and 0.4: the error is 0.1, and Student's t with one degree of freedom 12.706. Seed 2 has no parent's run."""
    accuracies = {"grpo": {0: 0.3, 1: 0.2}, "new": {0: 0.5, 1: 0.6, 2: 0.9}}
    runs = {name: {seed: a_kept_run([0.3, a]) for seed, a in seeds.items()} for name, seeds in accuracies.items()}
    found = compare.differences(runs, {"new": "grpo"}, compare.at_the_end)
    assert found == {"new minus grpo": (pytest.approx([0.2, 0.4]), pytest.approx(1.2706, rel=1e-4))}


@pytest.mark.parametrize("n_entries", [2, 6])
def test_more_than_five_entries_get_another_second_picture(n_entries, tmp_path):
    names = [f"entry {i}" for i in range(n_entries)]
    runs = {name: {0: a_kept_run([0.3, 0.4])} for name in names}
    paths = compare.draw(runs, {name: ["grpo.py"] for name in names}, tmp_path, "x")
    assert len(paths) == 2 and all(path.exists() for path in paths)
    assert (tmp_path / "x_metrics.png").exists() == (n_entries == 6)
    assert (tmp_path / "x_budget.png").exists() == (n_entries == 2)


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


@pytest.mark.parametrize("entry", ["grpo.py", "x: nowhere.py", ": grpo.py", "x:"])
def test_an_entry_must_name_a_script(entry):
    with pytest.raises(ValueError, match="NAME: SCRIPT FLAGS"):
        compare.read_entries([entry])


def test_entries_that_would_be_kept_in_the_same_files_are_refused():
    with pytest.raises(ValueError, match="'A_b' would be kept in another entry's files"):
        compare.read_entries(["a+b: grpo.py", "A_b: dapo.py"])


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


def test_suites_that_share_a_kept_run_share_its_flags():
    kept = {}
    for common, entries in comparisons.SUITES.values():
        for name, words in compare.read_entries(entries).items():
            path = compare.kept_file(ROOT, name, 0)
            command = compare.command_of(words, common, seed=0)
            assert kept.setdefault(path, command) == command


@pytest.mark.parametrize("own", ["--lr 1e-3 --no_compile", "--lr=1e-3 --no-compile", "--compile=False --lr 1e-3"])
def test_an_entrys_own_flags_take_the_place_of_those_of_all(own):
    """However they are spelled: of two the trainer would take the last."""
    command = compare.command_of(["grpo.py", *own.split()], "--lr 1e-4 --compile --people '2, 3'", 7)
    assert command == "grpo.py --lr 0.001 --no_compile --people '2, 3' --seed 7"


def test_a_table_has_all_entries_that_are_kept_however_few_are_run(tmp_path):
    kept = ROOT / "benchmarks" / "kk_tiny"
    for name in compare.read_entries(comparisons.SUITES["family"][1]):
        for seed in range(3):
            shutil.copy(compare.kept_file(kept, name, seed), tmp_path)
    compare.main(compare.Args(suite="family", only=["sapo"], folder=tmp_path, draw_only=True))
    made = [compare.without_marks((folder / "family.md").read_text()) for folder in (tmp_path, kept)]
    assert made[0] == made[1]


def test_a_dry_run_finds_the_kept_runs_of_a_suite_and_makes_no_folder(tmp_path):
    assert "12 runs are kept, 0 are missing." in python("tools/compare.py", "--suite", "llm", "--dry_run").stdout
    done = python("tools/compare.py", "--suite", "llm", "--dry_run", "--folder", str(tmp_path / "new"))
    assert "0 runs are kept, 12 are missing" in done.stdout and not (tmp_path / "new").exists()


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


def test_accuracy_over_what_was_spent_by_hand():
    """Two seeds: steps 0, 1, 2 with 2 optimizer steps each in the first, and 4 in the second."""

    def rows(n_updates, *accuracies):
        later = [{"step": s, "optimizer_steps": float(n_updates)} for s in (1, 2)]
        return [
            {**row, **({} if value is None else {"eval/accuracy": value})}
            for row, value in zip([{"step": 0}, *later], accuracies)
        ]

    figure = plot.draw_budgets({"a": [rows(2, 0.2, None, 0.6), rows(4, 0.4, None, 0.8)]}, [])
    drawn = [list(zip(axis.lines[0].get_xdata(), axis.lines[0].get_ydata())) for axis in figure.axes]
    ends = {"training steps": 2, "optimizer steps": 6}  # the mean of 4 and 8
    assert [axis.get_xlabel() for axis in figure.axes] == list(ends)
    for points, end in zip(drawn, ends.values()):
        assert points == [(0, pytest.approx(0.3)), (end, pytest.approx(0.7))]


def test_a_second_picture_is_kept_of_those_suites_alone_whose_pages_show_it():
    for suite in comparisons.SUITES:
        folder = compare.Args(suite=suite).folder
        if (folder / f"{suite}.md").exists():
            second = [folder / f"{suite}_{which}.png" for which in ("budget", "metrics")]
            assert any(path.exists() for path in second) == (suite not in comparisons.ONE_PICTURE), suite


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


def test_what_the_docs_say_of_acpos_clip_range_is_what_its_kept_runs_give():
    paths = sorted((ROOT / "benchmarks" / "kk_tiny").glob("acpo_seed_*.json"))
    rows = [row for path in paths for row in json.loads(path.read_text())["rows"][1:]]
    page = (ROOT / "docs" / "comparison.md").read_text()
    assert f"{max(row['clip_range_max'] for row in rows):.3f}" in page
    assert f"{fmean(row['clip_range_mean'] for row in rows):.3f}" in page


# --------------------------------------------------------------------------------------------------------------------
# runtime/memory.py


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


def test_the_clip_suites_numbers_are_those_of_acpos_kept_run():
    """Table 3: DAPO with ACPO's largest clip range above, GRPO with its average, of the run with seed 0."""
    kept = json.loads(compare.kept_file(ROOT / "benchmarks" / "kk_tiny", "acpo, 16 updates", 0).read_text())
    rows = kept["rows"][1:]
    tokens = [sum(row[f"bin_tokens_{i}"] for i in range(1, 6)) for row in rows]
    average = sum(n * row["clip_range_mean"] for n, row in zip(tokens, rows)) / sum(tokens)
    commands = compare.read_entries(comparisons.SUITES["clip"][1])
    largest = commands["dapo, clip-high at acpo's largest, 16 updates"]
    assert float(largest[largest.index("--clip_base_high") + 1]) == max(row["clip_range_max"] for row in rows)
    mean = commands["grpo, clip at acpo's average, 16 updates"]
    assert float(mean[mean.index("--clip_base") + 1]) == round(average, 3)
    for words in commands.values():  # the clip alone differs: all are means over responses, at 16 updates
        assert words[0] == "acpo.py" and words[-2:] == ["--updates_per_step", "16"]


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
