"""Compute accuracies and their standard errors for evaluate.py.

avg@n is the fraction of right responses among n responses to a problem, averaged over the problems. If c of a problem's
n responses are right, its pass@k is 1 − C(n−c, k) / C(n, k), which is unbiased (Chen et al. 2021).

The standard error of a figure is the standard deviation over problems (ddof 1) of their contributions, divided by
√problems. Equal problems, as in files that repeat each problem, are one cluster: with the sum e of the deviations from
the mean in each of C clusters, the error is √(C/(C−1) · Σ e²) / problems. It covers the choice of problems and the
sampling of responses. For avg@n with n > 1, the sampling part is √(mean of p(1−p)/(n−1) / problems), where p is a
problem's fraction of right responses. The rest is the problem part. The error of a mean over sets is √(Σ error²) /
number of columns. Columns of one set (AIME24 has two) share its problems, and each problem contributes the sum of its
columns.
"""

import math
from statistics import fmean
from typing import NamedTuple

from evaluation import suites
from rewards import identity
from runtime import metrics

UNITS = {"kk": " people", "countdown": " numbers"}  # units of the categories


class Column(NamedTuple):
    """A column of the results table."""

    title: str
    category: str | None = None  # its problems' category; None: all problems
    k: int | None = None  # pass@k; None: the fraction of right responses


def columns_of(problems, args):
    """Return {key: Column} of the table. If none has the key "all", the table also has the mean of its columns."""
    samples = {problem["category"]: problem["samples"] for problem in problems}
    if args.suite == "math":
        return columns_of_sets(samples)
    columns = {}
    for category in sorted(samples, key=lambda category: (isinstance(category, str), category)):  # numbers first
        if category != "all":  # "all" belongs to tasks without categories
            columns[category] = Column(f"{category}{UNITS.get(args.suite, '')}", category)
    if args.suite != "kk":
        columns["all"] = Column(f"accuracy avg@{args.samples}" if args.samples > 1 else "accuracy")
    if args.pass_at_k:
        for k in metrics.numbers_of_draws(args.samples):
            columns[f"pass@{k}"] = Column(f"pass@{k}", k=k)
    return columns


def columns_of_sets(samples):
    """Return {key: Column} for sets of mathematics. samples: {set: responses per problem}."""
    columns = {}
    for name, n in samples.items():
        title = suites.TITLES[name]
        if name == "aime" and n > 1:
            k = min(n, 16)
            columns[f"aime pass@{k}"] = Column(f"{title} pass@{k}", name, k)
        columns[name] = Column(f"{title} avg@{n}" if n > 1 else title, name)
    return columns


def contributions(column, problems, scored) -> tuple:
    """Return (contributions of a column's problems, the variances that sampling adds to them, [] if unknown).

    scored: per checkpoint, per problem, the scores of its responses. A problem contributes its fraction of right
    responses, or its pass@k, averaged over the checkpoints.
    """
    values = []
    noise = []
    for problem, *of_checkpoints in zip(problems, *scored):
        if column.category not in (None, problem["category"]):
            continue
        of_problem = []
        variances = []
        for scores in of_checkpoints:
            n = len(scores)
            c = sum(score["correct"] for score in scores)
            of_problem.append(metrics.pass_at_k(n, c, column.k) if column.k else c / n)
            if n > 1:
                variances.append(c / n * (1 - c / n) / (n - 1))
        values.append(fmean(of_problem))
        if variances and column.k is None:
            noise.append(fmean(variances) / len(variances))
    return values, noise


def names_of(columns, problems) -> dict:
    """Return {column: a name per problem}, which equal problems share."""
    names = [(identity(problem), problem["category"]) for problem in problems]
    return {key: [name for name in names if column.category in (None, name[1])] for key, column in columns.items()}


def error_of(values, names=None):
    """Return the standard error of the mean over problems (ddof 1), or None for a single problem.

    names: one per value; values of the same name are of equal problems, one cluster. None: all differ.
    """
    mean = fmean(values)
    deviations = {}  # per cluster, the sum of its values' deviations from the mean
    for name, value in zip(names or range(len(values)), values, strict=True):
        deviations[name] = deviations.get(name, 0.0) + value - mean
    count = len(deviations)
    if count < 2:
        return None
    return math.sqrt(count / (count - 1) * math.fsum(d**2 for d in deviations.values())) / len(values)


def figure(values, noise=(), names=None):
    """Return the mean over problems with its standard error. With noise, also the error's two parts."""
    found = {"value": fmean(values), "error": error_of(values, names), "problems": len(values)}
    if noise and found["error"] is not None:
        of_samples = math.sqrt(math.fsum(noise)) / len(values)
        found["error_samples"] = of_samples
        found["error_problems"] = math.sqrt(max(0.0, found["error"] ** 2 - of_samples**2))
    return found


def mean_figure(columns, values, names=None) -> dict:
    """Return the mean over columns. Columns of a category share problems; a problem contributes its columns' sum.

    values, names: per column, a number and a name per problem (names_of). Columns over all problems (pass@k) are
    excluded.
    """
    names = names or {}
    by_category = {}
    names_by_category = {}
    for key, column in columns.items():
        if column.category is not None:
            by_category.setdefault(column.category, []).append(values[key])
            names_by_category[column.category] = names.get(key)
    num_columns = sum(map(len, by_category.values()))
    sums = []  # per category, its problems' contributions
    for lists in by_category.values():
        sums.append([math.fsum(of_problem) for of_problem in zip(*lists)])
    errors = list(map(error_of, sums, names_by_category.values()))
    error = None
    if None not in errors:
        error = math.sqrt(math.fsum(e**2 for e in errors)) / num_columns
    value = math.fsum(map(fmean, sums)) / num_columns
    return {"value": value, "error": error, "problems": sum(map(len, sums))}


def paired(columns, mine, theirs, names=None):
    """Return differences of two models on the same problems: {key: figure, with counts of problems up, down and same}.

    mine, theirs: {key: the problems' contributions}; names: as in mean_figure. The counts of "mean" include each
    problem once, without pass@k. Equal problems count as one.
    """
    names = names or {}
    differences = {}
    once = []
    moves = {}
    for key, column in columns.items():
        differences[key] = [a - b for a, b in zip(mine[key], theirs[key], strict=True)]
        of_clusters = {}
        for name, value in zip(names.get(key) or range(len(differences[key])), differences[key]):
            of_clusters.setdefault(name, []).append(value)
        means = list(map(fmean, of_clusters.values()))
        moves[key] = moved(means)
        if column.k is None:
            once += means
    found = {key: figure(values, names=names.get(key)) | moves[key] for key, values in differences.items()}
    if "all" not in columns:
        found["mean"] = mean_figure(columns, differences, names) | moved(once)
    return found


def moved(differences) -> dict:
    """Count the problems that went up, went down, or stayed the same."""
    rounding = 1e-9  # a mean over checkpoints may differ in its last digits
    up = sum(value > rounding for value in differences)
    down = sum(value < -rounding for value in differences)
    return {"up": up, "down": down, "ties": len(differences) - up - down}


def rates(scores) -> dict:
    """Return format rate, mean length in tokens, fraction truncated, number of responses, number timed out."""
    return {
        "format_rate": fmean(score["format"] for score in scores),
        "mean_tokens": fmean(score["tokens"] for score in scores),
        "truncated_rate": fmean(score["truncated"] for score in scores),
        "responses": len(scores),
        "timed_out": sum(score.get("timed_out", False) for score in scores),
    }
