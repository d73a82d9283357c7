"""Plot a run's metrics, in curves.png and in the terminal."""

import itertools
import math
from pathlib import Path

TITLES = {
    "loss": "loss [nats per token]",
    "eval/loss": "loss on held-out examples [nats per token]",
    "reward": "reward",
    "accuracy": "accuracy while training",
    "eval/accuracy": "test accuracy",
    "turns": "turns in a conversation",
    "response_tokens": "response length [tokens]",
    "format_rate": "share in the right format",
    "entropy": "entropy [nats]",
    "kl": "KL to the reference [nats]",
    "clip_rate": "clip rate",
    "low_rate": "share of low-probability tokens",
    "grad_norm": "gradient norm",
    "sampler_gap": "sampler gap [nats]",
    "tokens_per_s": "tokens/s",
}
PANELS = """eval/loss loss eval/accuracy reward turns response_tokens entropy kl clip_rate
    grad_norm""".split()
FEWEST = 5  # points of a curve in the terminal: fewer are read faster in the lines above it
GLYPHS = ("hd", "o", "x", "+")  # for curves in the terminal; hd: four dots per character
MOST_PANELS = 6
WIDTH = 12.3  # inches; a figure as wide as its page
# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #000000 #E69F00 #56B4E9 #8C6D00".split()
STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3))]
LOOK = {  # of all figures
    "font.size": 13,  # 20 pixels; 10 if a figure of WIDTH is shown in a column of 680 pixels
    "axes.titlesize": "medium",
    "lines.linewidth": 2,
    "savefig.dpi": 110,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "curves",  # the same values give the same file
}


def points(rows: list[dict], key) -> tuple:
    """Return (steps, values) of the rows that have a value for this key."""
    rows = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in rows], [row[key] for row in rows]


def with_categories(rows: list[dict], key) -> list:
    """Return the key and, of an accuracy, its categories: accuracy_2 … (kk: number of people)."""
    if "accuracy" not in key:
        return [key]
    names = sorted({name for row in rows for name in row if name.startswith(f"{key}_")})
    return [key, *names] if len(names) > 1 else [key]  # a single category equals the total


def draw(rows: list[dict], path: Path) -> None:
    """Plot a run's curves as a PNG: a panel per metric that it has, at most MOST_PANELS."""
    panels = [key for key in PANELS if points(rows, key)[0]][:MOST_PANELS]
    num_rows = max(1, math.ceil(len(panels) / 3))
    figure = new_figure(WIDTH, 3.3 * num_rows, "")
    for number, key in enumerate(panels, 1):
        axis = figure.add_subplot(num_rows, 3, number, title=TITLES[key], xlabel="step")
        marker = "o" if len(points(rows, key)[0]) < 20 else None
        axis.plot(*points(rows, key), marker=marker, ms=4, color=COLOURS[0])
        axis.xaxis.get_major_locator().set_params(integer=True)
    save(figure, [path])


def new_figure(width, height, title: str):
    """Return a matplotlib figure in the style of all figures; sizes in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(LOOK)
    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def save(figure, paths):
    """Write the figure to the paths, in the formats of their suffixes.

    Writes no date, so that the same values give the same file. A PNG has 256 colours and is a third
    as large.
    """
    from PIL import Image

    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        if path.suffix == ".png":
            Image.open(path).convert("RGB").quantize(dither=0).save(path, optimize=True)
    return figure


def in_terminal(rows: list[dict], width=100, colours=True):
    """Plot the reward and the test accuracy, or the losses, of one run over its steps, as text.

    Curves with less than FEWEST points are left out; "" if there is no other.
    """
    import plotext
    from matplotlib.ticker import MaxNLocator

    plots = []
    for key in ("reward", "eval/accuracy", "loss", "eval/loss"):
        if len(points(rows, key)[0]) < FEWEST:
            continue
        plotext.clear_figure()
        keys = with_categories(rows, key)
        for name, glyph in zip(keys, itertools.cycle(GLYPHS)):
            if points(rows, name)[0]:
                label = name.removeprefix("eval/") if len(keys) > 1 else None
                plotext.plot(*points(rows, name), label=label, marker=glyph)
        steps = points(rows, key)[0]
        ticks = MaxNLocator(6, integer=True).tick_values(steps[0], steps[-1])
        plotext.xticks([int(tick) for tick in ticks if steps[0] <= tick <= steps[-1]])
        plotext.title(TITLES[key])
        plotext.theme("clear")
        plotext.plotsize(width, 14)
        plots.append(plotext.build())
    text = "\n".join(plots)
    return text if colours else plotext.uncolorize(text)
