"""Write one HTML file about runs, to send to somebody: settings, curves, responses, and how sure a difference is.

    python -m tools.report RUN                       writes RUN/report.html
    python -m tools.report RUN RUN2 … --out my.html  compares runs; those that differ in --seed alone are one group

The file needs no network and no other file. tools/watch.py shows runs that are still going.
"""

import itertools
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Annotated

import runtime  # noqa: F401  # first: it says in one line which packages are missing

# isort: split
import tyro
from scipy import stats

from rewards import OPTIONS
from runtime import curves, files, flags, terminal
from tools import inference, runs

# {metric: (its name, whether more is better, steps to average)}: the first that all runs have is compared.
SCORES = {"eval/accuracy": ("test accuracy", True, 1), "eval/loss": ("loss on held-out examples", False, 1)}
SCORES |= {"reward": ("reward while training", True, 5), "loss": ("loss", False, 5)}
MOST_STEPS = 12  # with samples
MOST_TOKENS = 800  # of a response


def groups_of(found):
    """Return lists of runs that differ in their seeds alone. The runs get labels and colours."""
    groups = {}
    for run in found:
        settings = {name: value for name, value in run.settings.items() if name not in runs.NO_MATTER}
        key = json.dumps([run.script, settings], sort_keys=True)
        seeds = [other.settings.get("seed") for other in groups.get(key, [])]
        # The same seed twice is no second sample.
        groups.setdefault(str(run.folder) if run.settings.get("seed") in seeds else key, []).append(run)
    groups = list(groups.values())
    names = labels_of([group[0] for group in groups])
    for name, colour, group in zip(names, itertools.cycle(curves.COLOURS), groups):
        for run in group:
            run.label, run.colour = name + f" ({len(group)} seeds)" * (len(group) > 1), colour
    return groups


def labels_of(found):
    """Name runs by script, then by up to two settings in which they differ; by their folders if that is not enough."""
    labels = [run.script for run in found]
    for name in found[0].settings:
        values = [str(run.settings.get(name, "")) for run in found]
        if len(set(labels)) == len(labels) or max(label.count(", ") for label in labels) == 2:
            break
        if name not in runs.NO_MATTER and len(set(values)) > 1:
            labels = [f"{label}, {name} {Path(value).name}" for label, value in zip(labels, values)]
    return labels if len(set(labels)) == len(labels) else [run.folder.name for run in found]


def differences(groups):
    """Return {name: [value in each group]} of the settings, and of script, commit and machine, that differ."""
    columns = []
    for group in groups:
        facts = [
            {key: run.about.get(key) or "unknown" for key in ("script", "commit", "machine")} | run.settings
            for run in group
        ]
        names = dict.fromkeys(itertools.chain(*facts))
        columns.append({name: ", ".join(dict.fromkeys(str(one.get(name)) for one in facts)) for name in names})
    names = [
        name for name in dict.fromkeys(itertools.chain(*columns)) if name not in runs.NO_MATTER - {"seed", "steps"}
    ]
    found = {name: [column.get(name, "–") for column in columns] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def verdicts(groups):
    """Return a sentence per group but the first: how far it is from the first, and how sure that is."""
    if len(groups) == 1:
        return []
    everything = list(itertools.chain(*groups))
    of_tests = ["task", "test_data", "eval_temperature", *OPTIONS.get(everything[0].settings.get("task"), [])]
    for name in of_tests:
        if len({run.settings[name] for run in everything if name in run.settings}) > 1:
            return [f"The runs are tested with different values of {name}, so their results are not compared."]
    common = {key: set.intersection(*(set(run.points(key)) for run in everything)) - {0} for key in SCORES}
    key = next((key for key in SCORES if common[key]), None)
    if not key:
        return ["The runs have no step in common yet, so their results are not compared."]
    name, more_is_better, count = SCORES[key]
    steps = sorted(common[key])[-count:]
    sides, tested = [], []
    for group in groups:
        sides.append({run.settings.get("seed"): fmean(run.points(key)[step] for step in steps) for run in group})
        tested.append(group[0].about.get("sizes", {}).get("test_problems", 0) if key == "eval/accuracy" else 0)
    base = groups[0][0].label
    sentences = []
    for group in groups:
        if len(commits := {run.about.get("commit") or "unknown" for run in group}) > 1:
            sentences.append(f"{group[0].label}: commits {', '.join(sorted(commits))}, counted as the same code.")
    for group, side, n in zip(groups[1:], sides[1:], tested[1:]):
        mean, low, high, how = interval(side, sides[0], n, tested[0])
        text = f"{name.capitalize()} at step {steps[-1]}: {group[0].label} minus {base} is {mean:+.3f}"
        ahead = group[0].label if (mean > 0) == more_is_better else base
        if not how:
            text += "; without three seeds each there is no interval, and chance may explain a difference."
        elif low <= 0 <= high:
            text += f" (95 % interval {low:+.3f} to {high:+.3f}, {how}). Which one learned better can't be told."
        else:
            text += f" (95 % interval {low:+.3f} to {high:+.3f}, {how}). {ahead} learned better"
            text += " here; whether it does with other seeds takes three seeds each." if "test problems" in how else "."
        sentences.append(text.replace("-0.", "−0."))
    return sentences


def interval(a, b, n_a, n_b):
    """Return (mean of a minus mean of b, the ends of its 95 % interval, what the interval is of; "" without one).

    a, b: {seed: value}. Three seeds each give Student's or Welch's interval. Fewer give Newcombe's, for the choice of
    n_a and n_b test problems alone: from Wilson's intervals (Statistics in Medicine 17, 1998, method 10).
    """
    common = sorted(a.keys() & b.keys(), key=str)
    mean = fmean(a.values()) - fmean(b.values())
    if not math.isfinite(mean):
        return mean, 0, 0, ""
    if len(common) >= inference.LEAST:
        found = inference.of_values("", [(a[seed], b[seed]) for seed in common])
        return found.mean, *found.interval(0.05), f"{len(common)} seeds, each compared with itself"
    if min(len(a), len(b)) >= inference.LEAST:
        found = stats.ttest_ind(list(a.values()), list(b.values()), equal_var=False).confidence_interval()
        return mean, found.low, found.high, f"{len(a)} and {len(b)} seeds"
    if not n_a or not n_b:
        return mean, 0, 0, ""
    p, q = fmean(a.values()), fmean(b.values())
    of_p, of_q = (stats.binomtest(round(s * n), n).proportion_ci(method="wilson") for s, n in ((p, n_a), (q, n_b)))
    low, high = mean - math.hypot(p - of_p.low, of_q.high - q), mean + math.hypot(of_p.high - p, q - of_q.low)
    return (
        mean,
        low,
        high,
        f"for the choice of {n_a} test problems, as if each run had its own; chance in training is not in it",
    )


def tests(folder):
    """Return {"learned": [(row before, row after), …], "lost": …, "wrong": …, "right": …} of the kept test problems."""
    before, after, _ = terminal.pairs_of_rows(files.read_rows(folder / "test_samples.jsonl"))
    kinds = {(False, True): "learned", (True, False): "lost", (False, False): "wrong", (True, True): "right"}
    found = {kind: [] for kind in kinds.values()} if before else {}
    for i, row in before.items():
        found[kinds[row["correct"], after[i]["correct"]]].append((row, after[i]))
    return found


def page(found):
    """Return the report on these runs as HTML."""
    groups, shown = groups_of(found), []
    for run in found:
        samples = runs.samples(run.folder)
        steps = list(samples)[:: -math.ceil(len(samples) / MOST_STEPS) or -1][::-1]  # the last one is among them
        tokens = runs.newest_tokens(run.folder, MOST_TOKENS)
        shown.append((run, {"samples": samples, "steps": steps, "tests": tests(run.folder), "tokens": tokens}))
    return runs.template("report.html").render(
        runs=shown,
        row=runs.for_page,
        labels={group[0].label: group[0].colour for group in groups},
        panels=runs.panels(groups),
        differences=differences(groups),
        verdicts=verdicts(groups),
    )


def main(
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help="folders of runs")] = (),
    out: Annotated[Path | None, tyro.conf.arg(help="an HTML file; None: report.html in the first folder")] = None,
):
    with flags.errors_in_one_line():
        if not folders:
            raise ValueError("name the folder of a run, or of several: python -m tools.report RUN RUN2")
        found = {run.folder.resolve(): run for run in map(runs.read, folders)}  # a folder may be named twice
        path = out or next(iter(found.values())).folder / "report.html"
        if path.suffix != ".html":
            raise ValueError(f"--out is {path}; it must end with .html")
        path.write_text(page(list(found.values())), encoding="utf-8")
    print(f"wrote {path}, {path.stat().st_size / 1000:.0f} kB: open it in a browser, or send it")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])
