"""Plot benchmarks/kk_tiny/stale.png: the cost of a lag of the sampler, and the effect of corrections.

    python -m tools.compare --suite lag        make the runs; saved runs are not repeated
    python benchmarks/lag.py                   plot the saved runs

Left: test accuracy over the steps, mean of the seeds. Right: accuracy, mean of the last three evaluations, against the
lag; a line per correction, a small dot per seed.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import curves
from tools import kept

FOLDER = Path(__file__).parent / "kk_tiny"
COLOURS = {"none": "#d55e00", "tis": "#0072b2", "icepop": "#009e73", "ppo": "#cc79a7"}
LAST = 3  # evaluations per mean, as in tools/compare.py


def saved():
    """Return {(lag, correction): {seed: [(step, accuracy), …]}}; lag 0 belongs to every correction."""
    found = defaultdict(dict)
    for name, run in kept.read(FOLDER).items():
        if match := re.fullmatch(r"lag_(\d+)_?(\w*)_seed_(\d+)", name):
            lag, correction, seed = match.groups()
            curve = [(row["step"], row["eval/accuracy"]) for row in run["rows"] if "eval/accuracy" in row]
            found[int(lag), correction][int(seed)] = curve
    return found


def mean_curve(of_seeds):
    """Return [(step, mean accuracy), …] over the seeds."""
    return [(points[0][0], fmean(value for _, value in points)) for points in zip(*of_seeds.values())]


def last(curve):
    return fmean(value for _, value in curve[-LAST:])


def main():
    found = saved()
    figure = curves.new_figure(curves.WIDTH, 4.4, "")
    left, right = figure.subplots(1, 2)
    left.plot(*zip(*mean_curve(found[0, ""])), color="black", marker="o", label="lag 0")
    largest = max(lag for lag, _ in found)
    for correction, colour in COLOURS.items():
        if (largest, correction) in found:
            points = zip(*mean_curve(found[largest, correction]))
            left.plot(*points, color=colour, marker="o", label=f"lag {largest}, {correction}")
        at_zero = {(0, correction): found[0, ""]}
        lags = {lag: runs for (lag, name), runs in (found | at_zero).items() if name == correction}
        for lag, runs in lags.items():
            right.plot([lag] * len(runs), [last(curve) for curve in runs.values()], ".", color=colour, alpha=0.5)
        means = [(lag, fmean(map(last, runs.values()))) for lag, runs in sorted(lags.items())]
        right.plot(*zip(*means), color=colour, marker="o", label=correction)
    left.set(xlabel="step", ylabel="test accuracy", ylim=(0, 1), xticks=range(0, 25, 4))
    right.set(xlabel="lag [steps]", ylim=(0, 1), xticks=sorted({lag for lag, _ in found}))
    right.set_title(f"mean of the last {LAST} evaluations")
    left.set_title(f"mean of the seeds, lag 0 and {largest}")
    for axes in (left, right):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    curves.save(figure, [FOLDER / "stale.png"])
    for (lag, correction), runs in sorted(found.items()):
        values = ", ".join(f"{last(curve):.3f}" for curve in runs.values())
        print(f"lag {lag} {correction}: {values}; curve {[round(value, 2) for _, value in mean_curve(runs)]}")


if __name__ == "__main__":
    main()
