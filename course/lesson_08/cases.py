"""Cases and known mistakes of lesson 8."""

import math

import torch

from course import sandbox
from course.cases import Case, Exercise, bools, floats


def random_runs(rng):
    seeds = torch.rand(7, generator=rng)
    return {"a": seeds + 0.1 * torch.rand(7, generator=rng), "b": seeds + 0.1 * torch.rand(7, generator=rng)}


def paired(a, b, correction=1, root=True, sign=1):
    differences = sign * (a - b)
    error = differences.std(correction=correction)
    return differences.mean(), error / math.sqrt(len(a)) if root else error


def unpaired(a, b):
    return (a - b).mean(), ((a.var() + b.var()) / len(a)).sqrt()


PAIRED_DIFFERENCE = Exercise(
    "8.1",
    "paired_difference",
    cases=[
        # Differences 0.2 and 0: mean 0.1; variance (0.01 + 0.01)/(2 − 1) = 0.02; √(0.02/2) = 0.1.
        Case({"a": floats([0.7, 0.5]), "b": floats([0.5, 0.5])}, (0.1, 0.1)),
        # Differences 1, 2, −3: mean 0; variance (1 + 4 + 9)/2 = 7; √(7/3).
        Case({"a": floats([6, 9, 1]), "b": floats([5, 7, 4])}, (0.0, math.sqrt(7 / 3))),
    ],
    random=random_runs,
    mistakes={
        "has the wrong sign: the difference is a − b": lambda a, b: paired(a, b, sign=-1),
        "wrong standard deviation: ddof 0 (the population's); with few seeds divide by their number less one": (
            lambda a, b: paired(a, b, correction=0)
        ),
        "gives the standard deviation: the standard error of the mean is that over √(number of seeds)": (
            lambda a, b: paired(a, b, root=False)
        ),
        "gives the standard deviation with ddof 0: the standard error has ddof 1 and is over √(number of seeds)": (
            lambda a, b: paired(a, b, correction=0, root=False)
        ),
        "is not paired: the error comes from the differences seed by seed, not from both variances": unpaired,
        "gives the variance of the mean: take its square root": (
            lambda a, b: (paired(a, b)[0], paired(a, b)[1].square())
        ),
        "divides by the number of seeds: the standard error is the standard deviation over its root": (
            lambda a, b: (paired(a, b)[0], paired(a, b, root=False)[1] / len(a))
        ),
        "takes absolute differences: seeds that go in opposite directions must cancel": (
            lambda a, b: paired((a - b).abs(), torch.zeros_like(a))
        ),
        "gives the difference of the means alone: (mean, standard error) is asked for": lambda a, b: (a - b).mean(),
    },
)


def resampled(correct, repeats, generator):
    drawn = torch.randint(len(correct), (repeats, len(correct)), generator=generator)
    return correct.double()[drawn].mean(1)


def interval(accuracies, share=0.95):
    low = (1 - share) / 2
    quantiles = accuracies.quantile(torch.tensor([low, 1 - low], dtype=torch.float64))
    return quantiles[0], quantiles[1]


def normal_interval(correct, errors):
    mean = correct.double().mean()
    error = correct.double().std() / math.sqrt(len(correct))
    return mean - errors * error, mean + errors * error


def of_answers(correct, seed=0):
    return {"correct": correct, "repeats": 10_000, "generator": {sandbox.GENERATOR: seed}}


def bootstrap_case(correct, expected):
    return Case(of_answers(bools(correct)), expected)


def random_answers(rng):
    share = 0.3 + 0.6 * torch.rand(1, generator=rng)
    return of_answers(torch.rand(100, generator=rng) < share, int(torch.randint(1000, (), generator=rng)))


BOOTSTRAP_INTERVAL = Exercise(
    "8.2",
    "bootstrap_interval",
    tolerance=0.011,  # of a hundred problems, one more or less: the draws may differ
    cases=[
        # Three of four. The number right in a resample is binomial (4, 3/4): at most 0 with probability 1/256 = 0.004,
        # at most 1 with 13/256 = 0.051, so the 2.5 % quantile is 1/4; 4 with 81/256 = 0.32, so the other is 1.
        bootstrap_case([1, 1, 1, 0], (0.25, 1.0)),
        bootstrap_case([1, 1, 1], (1.0, 1.0)),
        # 60 of 100: the quantiles of the binomial (100, 0.6) are 50 and 69 or 70.
        bootstrap_case([1] * 60 + [0] * 40, (0.50, 0.695)),
    ],
    random=random_answers,
    mistakes={
        "is an interval of 90 %: the quantiles are 0.025 and 0.975": (
            lambda *args: interval(resampled(*args), share=0.9)
        ),
        "is one standard error to both sides, not an interval of 95 %": lambda correct, *_: normal_interval(correct, 1),
        "is the smallest and the largest resample: the quantiles are 0.025 and 0.975": (
            lambda *args: interval(resampled(*args), share=1.0)
        ),
        "draws without replacement: every resample is then the whole set, and all accuracies are equal": (
            lambda correct, repeats, generator: (correct.double().mean(), correct.double().mean())
        ),
        "is turned round: give (low, high)": lambda *args: interval(resampled(*args))[::-1],
        "gives the accuracies' mean and standard error: (low, high) is asked for": (
            lambda *args: (resampled(*args).mean(), resampled(*args).std())
        ),
        "takes the quantiles of single answers: each resample's accuracy comes first": (
            lambda correct, *_: interval(correct.double())
        ),
        "counts right answers: the accuracy is their share": (
            lambda correct, *args: tuple(value * len(correct) for value in interval(resampled(correct, *args)))
        ),
    },
)

EXERCISES = [PAIRED_DIFFERENCE, BOOTSTRAP_INTERVAL]
