"""Plot kept runs in one figure, as they were measured: for compare.py, course/ and benchmarks/.

Runs of one group are one line, their mean, with a band from the lowest to the highest. Nothing is smoothed (AR-Lopti's
figures 4 and 7 are, by an exponential average of 0.95). tools/report.py shows runs of one's own, and RUN/curves.png
(runtime/curves.py) a single one.
"""

from statistics import fmean, median

from runtime.curves import COLOURS, MOST_PANELS, STYLES, TITLES, WIDTH, new_figure, points, save

MOST_LINES = 5  # with a band each; more bands hide each other
ACCURACY = "eval/accuracy"
GREY = "0.45"  # the line to compare with
PANELS = "eval/loss loss eval/accuracy reward response_tokens entropy kl clip_rate grad_norm".split()
PANELS += "accuracy sampler_gap tokens_per_s".split()


def mean_and_range(runs, key):
    """Return (steps, mean, lowest, highest) over the runs, lists of rows, at the steps where all have a value."""
    curves = [dict(zip(*points(rows, key))) for rows in runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    columns = [[curve[step] for curve in curves] for step in steps]
    return steps, [fmean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def draw(groups, paths, panels=PANELS):
    """Plot a panel per metric that some run has, at most six; return the figure.

    groups: {label: [rows of a run, ...]}. paths: files to write, in the formats of their suffixes.
    """
    rows = [row for runs in groups.values() for rows in runs for row in rows]
    panels = [key for key in panels if points(rows, key)[0]][:MOST_PANELS]
    n_columns = min(3, max(1, len(panels)))
    n_rows = max(1, -(-len(panels) // n_columns))
    has_bands = len(groups) <= MOST_LINES
    caption = "line: mean over the seeds" + "; band: lowest to highest seed" * has_bands
    is_mean = any(len(runs) > 1 for runs in groups.values())
    figure = new_figure(WIDTH / 3 * n_columns, 3.3 * n_rows, caption if is_mean else "")
    for number, key in enumerate(panels, 1):
        axis = figure.add_subplot(n_rows, n_columns, number)
        for i, (label, runs) in enumerate(groups.items()):
            style = STYLES[(i + i // len(COLOURS)) % len(STYLES)]  # no two lines with the same colour and style
            draw_line(axis, runs, key, has_bands, color=COLOURS[i % len(COLOURS)], ls=style, label=label)
        axis.set(title=TITLES.get(key, key) + set_scale(axis, key), xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    if len(groups) > 1 and panels:
        longest = max(map(len, groups))
        columns = max(1, min(3, 120 // (longest + 8)))  # about ten characters per inch, and a label's line
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    return save(figure, paths)


def draw_differences(columns, title, paths):
    """Plot how far each entry is ahead of another: each seed's difference, their mean, its interval; return the figure.

    columns: {panel's title: Estimates of tools/inference.py}, with the same labels in all panels, from top to bottom.
    """
    labels = [estimate.label for estimate in next(iter(columns.values()))]
    figure = new_figure(WIDTH, 0.32 * len(labels) + 1.5, title)
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


def draw_line(axis, runs, key, has_band=True, **look):
    """Plot the mean over the runs, with a band from the lowest run to the highest.

    The band's ends were measured, so it can't show a negative length or a fraction above 1.
    """
    steps, mean, low, high = mean_and_range(runs, key)
    marker = "o" if key.startswith("eval/") or len(steps) == 1 else None  # a line of one point has no length
    axis.plot(steps, mean, marker=marker, ms=4, **look)
    if has_band and len(runs) > 1:
        axis.fill_between(steps, low, high, color=look["color"], alpha=0.13, lw=0)


def set_scale(axis, key):
    """Use a log axis for clip rates, and for gradient norms and KL with outliers; return the title's addition.

    Zeros have no logarithm: below the smallest positive value the axis is linear.
    """
    positive = [value for line in axis.lines for value in line.get_ydata() if value > 0]
    has_outliers = key in ("grad_norm", "kl") and positive and max(positive) > 10 * median(positive)
    if not positive or not (key == "clip_rate" or has_outliers):
        return ""
    axis.set_yscale("symlog", linthresh=min(positive))
    return ", log axis"
