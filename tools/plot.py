"""Plot runs in one figure, as they were measured: for compare.py, demo_picture.py, course/ and benchmarks/.

Runs of one group are one line, their mean, with a band from the lowest to the highest. Nothing is smoothed (AR-Lopti's
figures 4 and 7 are, by an exponential average of 0.95). RUN/curves.png (runtime/curves.py) shows a single run, and
`tensorboard --logdir runs` several.
"""

import math
import textwrap
from itertools import accumulate
from statistics import fmean, median

from runtime.curves import COLOURS, MOST_PANELS, STYLES, TITLES, WIDTH, new_figure, points, save

MOST_LINES = 5  # per panel; more are hard to tell apart
CHARACTERS_PER_INCH = 10  # in a legend, about
ACCURACY = "eval/accuracy"
GREY = "0.45"  # the line to compare with
CROWD = (
    "a line for each entry, the mean over its seeds; by name: what ends highest and lowest\n"
    "band of the first: lowest to highest seed"
)
PANELS = "eval/loss loss eval/accuracy reward response_tokens entropy kl clip_rate grad_norm".split()
PANELS += "accuracy sampler_gap tokens_per_s".split()


# --------------------------------------------------------------------------------------------------------------------
# Values


def mean_and_range(runs, key):
    """Return (steps, mean, lowest, highest) over the runs, lists of rows, at the steps where all have a value."""
    curves = [dict(zip(*points(rows, key))) for rows in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    return steps, [fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def rows_of(groups):
    return [row for runs in groups.values() for rows in runs for row in rows]


# --------------------------------------------------------------------------------------------------------------------
# Pictures


def draw(groups, paths, panels=PANELS):
    """Plot a panel per metric that some run has, at most six; return the figure.

    groups: {label: [rows of a run, ...]}. draw_crowd shows more than five.
    paths: files to write, in the formats of their suffixes.
    """
    panels = [key for key in panels if points(rows_of(groups), key)[0]][:MOST_PANELS]
    n_columns = min(3, max(1, len(panels)))
    n_rows = max(1, -(-len(panels) // n_columns))
    crowded = len(groups) > MOST_LINES
    figure = new_figure(WIDTH / 3 * n_columns, 3.3 * n_rows, CROWD if crowded else caption(groups))
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    for axis, key in zip(axes.flat, panels):
        if crowded:
            draw_crowd(axis, groups, key)
        else:
            for i, (label, runs) in enumerate(groups.items()):
                draw_line(axis, runs, key, color=COLOURS[i], ls=STYLES[i], label=label)
        axis.set(title=TITLES.get(key, key) + set_scale(axis, key), xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    if len(groups) > 1 and panels:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        by_label = dict(zip(labels, handles))
        add_legend(figure, by_label.values(), by_label)
    return save(figure, paths)


def add_legend(figure, handles, labels):
    """Put the legend below the panels, in as many columns as fit; labels that are too long are wrapped."""
    room = int(CHARACTERS_PER_INCH * figure.get_figwidth())
    beside = 8  # a label's line and the space around both, in characters
    labels = [textwrap.fill(label, room - beside) for label in labels]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, min(3, room // (longest + beside)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def draw_crowd(axis, groups, key):
    """Plot the means of many groups: the first one's line is thick; of the others, the highest and lowest are named."""
    first, *others = groups
    draw_line(axis, groups[first], key, color=COLOURS[0], lw=3.5, label=first, zorder=2.5)
    ends = []  # (last mean, last step, label, line)
    for label in others:
        steps, mean, _, _ = mean_and_range(groups[label], key)
        if steps:
            ends.append((mean[-1], steps[-1], label, *axis.plot(steps, mean, color=GREY, lw=1, label="the others")))
    ends.sort(key=lambda end: end[0])
    for value, step, label, line in ends[-1:] + ends[:-1][:1]:
        line.set(color=COLOURS[1], lw=2, label="_")
        beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axis.annotate(label.replace(" ", "\n", 1), (step, value), color=COLOURS[1], **beside)


def draw_differences(columns, title, paths):
    """Plot how far each entry is ahead of another: each seed's difference, their mean, its interval; return the figure.

    columns: {panel's title: Estimates of tools/inference.py}, with the same labels in all panels, from top to bottom.
    """
    labels = [estimate.label for estimate in next(iter(columns.values()))]
    figure = new_figure(WIDTH, 0.32 * len(labels) + 1.3, title)
    axes = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axis, (name, estimates) in zip(axes, columns.items()):
        axis.axvline(0, color=GREY, lw=1, ls="--")
        for y, one in enumerate(estimates):
            axis.errorbar(one.mean, y, xerr=one.half(0.05), fmt="o", ms=6, color=COLOURS[0], capsize=3)
            axis.plot(one.values, [y + 0.25] * one.n, "o", ms=4, color=GREY, mec="none")  # below the line
        axis.set(title=name, xlabel=f"difference in {TITLES[ACCURACY]}")
        axis.grid(axis="x", alpha=0.25)
        axis.locator_params(axis="x", nbins=5)
    axes[0].set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    return save(figure, paths)


def draw_budgets(groups, paths):
    """Plot the accuracy by training steps and by optimizer steps, of which some entries make more; return the figure.

    groups: {label: [rows of a run, ...]}. A group's line and band are at the mean of its runs' steps.
    """
    figure = new_figure(WIDTH, 4, caption(groups))
    axes = figure.subplots(1, 2, sharey=True)
    axes[0].set(ylabel=TITLES[ACCURACY], xlabel="training steps")
    axes[1].set(xlabel="optimizer steps")
    for i, (label, runs) in enumerate(groups.items()):
        steps, mean, low, high = mean_and_range(runs, ACCURACY)
        all_steps, totals, _, _ = mean_and_range(map(with_total, runs), "total")
        for axis, xs in zip(axes, (steps, [totals[all_steps.index(step)] for step in steps])):
            axis.plot(xs, mean, marker="o", ms=4, color=COLOURS[i], ls=STYLES[i], label=label)
            axis.fill_between(xs, low, high, color=COLOURS[i], alpha=0.13, lw=0)
    add_legend(figure, *axes[0].get_legend_handles_labels())
    return save(figure, paths)


def with_total(rows):
    """Return the rows with `total`, the number of optimizer steps up to the end of each."""
    totals = accumulate(row.get("optimizer_steps", 0.0) for row in rows)
    return [row | {"total": total} for row, total in zip(rows, totals)]


def draw_line(axis, runs, key, **look):
    """Plot the mean over the runs, with a band from the lowest run to the highest.

    The band's ends were measured, so it can't show a negative length or a fraction above 1.
    """
    steps, mean, low, high = mean_and_range(runs, key)
    marker = "o" if key.startswith("eval/") else None
    axis.plot(steps, mean, marker=marker, ms=4, **look)
    if len(runs) > 1:
        axis.fill_between(steps, low, high, color=look["color"], alpha=0.13, lw=0)


def set_scale(axis, key):
    """Use a log axis for clip rates, and for gradient norms and KL with outliers; return the title's addition.

    Zeros have no logarithm: if there are any, the axis is linear below the smallest plotted power of ten.
    """
    values = [float(value) for line in axis.lines for value in line.get_ydata()]
    positive = [value for value in values if value > 0]
    if not positive:
        return ""
    outliers = max(positive) > 10 * median(positive)
    if key != "clip_rate" and not (key in ("grad_norm", "kl") and outliers):
        return ""
    if min(values) > 0:
        axis.set_yscale("log")
        return ", log axis"
    exponent = math.floor(math.log10(min(positive)))
    axis.set_yscale("symlog", linthresh=10.0**exponent, linscale=0.5)
    axis.set_ylim(bottom=0)
    return f", log axis\n(linear below $10^{{{exponent}}}$)"


def caption(groups):
    """Explain the lines and bands, in the figure."""
    has_bands = any(len(runs) > 1 for runs in groups.values())
    return "line: mean over the seeds; band: lowest to highest seed" if has_bands else ""
