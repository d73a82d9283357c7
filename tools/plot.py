"""Draws runs: several over each other, mean and band over the seeds of the same script and settings; PNG and SVG.

    python tools/plot.py runs/grpo_kk_0_… runs/grpo_kk_1_… runs/grpo_ar_lopti_kk_0_…

One run alone gets the curves.png that a trainer draws: raw values pale behind their exponential average (0.95, as in
AR-Lopti, fig. 4 and 7).
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import tyro

SMOOTHING = 0.95
# Okabe and Ito's colours, told apart by colour-blind readers too; line styles tell them apart on a grey print.
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #000000 #E69F00 #56B4E9 #8C6D00".split()
STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3))]
TITLES = {
    "reward": "reward",
    "accuracy": "accuracy while training",
    "eval/accuracy": "test accuracy",
    "response_tokens": "response length [tokens]",
    "entropy": "entropy [nats]",
    "kl": "KL to the reference [nats]",
    "clip_rate": "clip rate",
    "low_rate": "share of low-probability tokens",
    "grad_norm": "gradient norm",
    "sampler_gap": "sampler gap [nats]",
    "tokens_per_s": "tokens/s",
}
PANELS = "reward accuracy eval/accuracy response_tokens entropy kl clip_rate grad_norm".split()
ALONE = [*PANELS, "sampler_gap", "tokens_per_s"]  # of one run


def read_rows(path):
    """The objects of a JSON-lines file ([] where there is none). A last line that a kill cut short is left out."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def points(rows, key):
    """(steps, values) of the rows that have a value for this key."""
    rows = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in rows], [row[key] for row in rows]


def exponential_average(values, keep=SMOOTHING):
    """Each value's average with those before it, a value's weight shrinking by `keep` with every step; unbiased."""
    total, weight, averages = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        averages.append(total / weight)
    return averages


def smooth(values, key):
    """The exponential average; evaluations, which are few and far apart, stay as they are."""
    return values if key.startswith("eval/") else exponential_average(values)


def mean_and_spread(runs, key):
    """Steps that all runs have a value for, and over the runs the smoothed values' mean and standard deviation.

    runs: lists of rows. The standard deviation has ddof 1; of a single run it is 0.
    """
    curves = []
    for rows in runs:
        steps, values = points(rows, key)
        curves.append(dict(zip(steps, smooth(values, key))))
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    return steps, [fmean(c) for c in columns], [stdev(c) if len(c) > 1 else 0.0 for c in columns]


def parts_of(rows, key):
    """The key with those of its categories: accuracy_2, accuracy_3 … (kk: by number of people)."""
    return sorted({name for row in rows for name in row if name.startswith(f"{key}_")})


def draw(groups, paths, panels=PANELS):
    """One panel for each metric that some run has.

    groups: {label: [rows of a run, ...]}; of several groups each gets a colour, the mean over its runs and, where the
    groups are no more than the colours, a band of one standard deviation; a group that is alone is shown by category
    too. paths: files to write, by their suffixes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"  # text stays text
    everything = [row for runs in groups.values() for rows in runs for row in rows]
    panels = [key for key in panels if points(everything, key)[0]]
    n_columns = min(5, max(1, -(-len(panels) // 2)))
    n_rows = max(1, -(-len(panels) // n_columns))
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=(4 * n_columns, 3.2 * n_rows), layout="constrained", squeeze=False
    )
    for axis, key in zip(axes.flat, panels):
        lines = {label: (runs, key) for label, runs in groups.items()}
        if len(groups) == 1 and key in ("accuracy", "eval/accuracy"):
            (runs,) = groups.values()
            lines = {"mean" if key == "eval/accuracy" else "all": (runs, key)}
            lines |= {part.removeprefix(f"{key}_"): (runs, part) for part in parts_of(everything, key)}
        for i, (label, (runs, name)) in enumerate(lines.items()):
            # After the last colour they begin again, each with another line style than before.
            colour, style = COLOURS[i % len(COLOURS)], STYLES[(i + i // len(COLOURS)) % len(STYLES)]
            marker = "o" if key.startswith("eval/") else None
            steps, mean, spread = mean_and_spread(runs, name)
            axis.plot(steps, mean, color=colour, ls=style, marker=marker, ms=3, label=label)
            if len(runs) > 1 and len(groups) <= len(COLOURS):
                low, high = ([m + sign * s for m, s in zip(mean, spread)] for sign in (-1, 1))
                axis.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)
            elif len(runs) == 1 and not marker:
                axis.plot(*points(runs[0], name), color=colour, alpha=0.25, lw=1)
        axis.set(title=TITLES.get(key, key), xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        if len(lines) > 1 and len(groups) == 1:
            axis.legend(fontsize="small", title="category")
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    if len(groups) > 1:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    for path in paths:
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def in_terminal(rows, width=100, colours=True):
    """The reward and the test accuracy of one run over its steps, as text."""
    import plotext

    plots = []
    for title, lines in {
        "reward (dots: each step; line: exponential average)": {"reward": "reward"},
        "test accuracy": {
            key.removeprefix("eval/"): key for key in ["eval/accuracy", *parts_of(rows, "eval/accuracy")]
        },
    }.items():
        plotext.clear_figure()
        for label, key in lines.items():
            steps, values = points(rows, key)
            if not steps:
                continue
            if key == "reward":
                plotext.scatter(steps, values, marker="dot")
            plotext.plot(steps, smooth(values, key), label=label if len(lines) > 1 else None)
        plotext.title(title)
        plotext.theme("clear")
        plotext.plotsize(width, 14)
        plots.append(plotext.build())
    text = "\n".join(plots)
    return text if colours else plotext.uncolorize(text)


# --------------------------------------------------------------------------------------------------------------------
# Command line


@dataclass
class Args:
    """Which runs to draw."""

    runs: tyro.conf.Positional[list[Path]]  # run folders
    out: Path = Path("comparison")  # where to write: this name with .png and .svg


def read_run(folder):
    """{"script", "args", "rows"} of a run folder. ValueError where it is none."""
    if not (folder / "args.json").exists() or not read_rows(folder / "metrics.jsonl"):
        raise ValueError(f"{folder} is not the folder of a run: args.json or metrics.jsonl is missing or empty")
    about = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
    return {
        "script": about.get("script", folder.name.split("_kk_")[0]),
        "args": json.loads((folder / "args.json").read_text()),
        "rows": read_rows(folder / "metrics.jsonl"),
    }


def group(runs):
    """{label: [rows, ...]}: runs of one script whose settings differ in nothing but the seed are one group.

    The label is the script with the settings in which its groups differ: "grpo_ar_lopti alpha 0.3 eta 0.0".
    """
    own = {"seed", "run_dir", "resume", "track", "steps", "epochs"}  # what does not make another experiment
    by_settings = {}
    for run in runs:
        settings = {key: value for key, value in run["args"].items() if key not in own}
        by_settings.setdefault((run["script"], json.dumps(settings, sort_keys=True)), []).append(run["rows"])
    groups = {}
    for (script, settings), rows in by_settings.items():
        siblings = [json.loads(other) for name, other in by_settings if name == script]
        mine = json.loads(settings)
        telling = [f"{key} {mine[key]}" for key in mine if len({str(other.get(key)) for other in siblings}) > 1]
        groups[" ".join([script, *telling])] = rows
    return groups


def main(args):
    try:
        runs = [read_run(folder) for folder in args.runs]
    except ValueError as error:
        sys.exit(f"error: {error}")
    groups = group(runs)
    paths = [args.out.with_name(args.out.name + suffix) for suffix in (".png", ".svg")]
    draw(groups, paths, ALONE if len(groups) == 1 else PANELS)
    for label, rows in groups.items():
        print(f"{label}: {len(rows)} run(s)")
    print(f"wrote {' and '.join(map(str, paths))}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0]))
