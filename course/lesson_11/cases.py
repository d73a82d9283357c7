"""Cases and known mistakes of lesson 11."""

import math

import torch

from course.cases import Case, Exercise, floats


def first_true(found, start=1):
    """The step of the first True, [S]; 0 without one."""
    return int(found.float().argmax()) + start if found.any() else 0


# ----------------------------------------------------------------------------------------------------------- entropy


def random_entropies(rng):
    """A walk downwards, which now and then collapses and now and then recovers."""
    steps = 12
    entropy = 0.3 * torch.exp(-torch.rand(steps, generator=rng).cumsum(0) / 3)
    entropy += 0.05 * torch.rand(steps, generator=rng)
    if torch.rand(1, generator=rng) < 0.5:
        entropy[torch.randint(3, steps - 2, (1,), generator=rng)] = 0.3
    return {"entropy": entropy, "share": 0.5}


def low_from(low):
    """The first step from which on all are low."""
    return first_true(low.flip(0).long().cumprod(0).flip(0))


COLLAPSED_AT = Exercise(
    "11.1",
    "collapsed_at",
    cases=[
        # Below 0.15 from step 3 on.
        Case({"entropy": floats([0.3, 0.2, 0.1, 0.12, 0.05]), "share": 0.5}, 3),
        # Step 2 is low, and step 3 no longer: from step 4 on.
        Case({"entropy": floats([0.3, 0.1, 0.2, 0.1, 0.05]), "share": 0.5}, 4),
        # The last step is above.
        Case({"entropy": floats([0.3, 0.1, 0.05, 0.2]), "share": 0.5}, 0),
        # It rises first: what counts is 0.2, and 0.12 is above half of it.
        Case({"entropy": floats([0.2, 0.3, 0.12, 0.05]), "share": 0.5}, 4),
        # Half is not below half.
        Case({"entropy": floats([0.5, 0.25, 0.125]), "share": 0.5}, 3),
        Case({"entropy": floats([0.3, 0.29, 0.28]), "share": 0.5}, 0),
    ],
    random=random_entropies,
    mistakes={
        "takes the first low step, although a higher one comes after it": (
            lambda entropy, share: first_true(entropy < share * entropy[0])
        ),
        "takes the last step that is not low: it is the one after it": (
            lambda entropy, share: max(low_from(entropy < share * entropy[0]) - 1, 0)
        ),
        "counts the steps from 0: they count from 1": (
            lambda entropy, share: low_from(entropy < share * entropy[0]) - 1
        ),
        "takes `share` for an entropy in nats: it is a share of step 1's": (
            lambda entropy, share: low_from(entropy < share)
        ),
        "compares with the step before: what counts is step 1": (
            lambda entropy, share: first_true(entropy[1:] < share * entropy[:-1], 2)
        ),
        "compares with the highest entropy: what counts is step 1": (
            lambda entropy, share: low_from(entropy < share * entropy.max())
        ),
        "counts an entropy of exactly that share as collapsed: it must be below": (
            lambda entropy, share: low_from(entropy <= share * entropy[0])
        ),
        "looks at the last step alone, and gives its number": (
            lambda entropy, share: len(entropy) * int(entropy[-1] < share * entropy[0])
        ),
    },
)


# --------------------------------------------------------------------------------------------------------------- gap


def random_gaps(rng):
    """Rounding in step 1, then a drift across both bounds; in half of them a NaN."""
    steps = 10
    first = 0.002 + 0.01 * torch.rand(1, generator=rng)
    gap = first * (1 + torch.rand(steps, generator=rng).cumsum(0) - 0.5).clamp(min=0.5)
    gap[0] = first
    if torch.rand(1, generator=rng) < 0.5:
        gap[torch.randint(1, steps, (1,), generator=rng)] = math.nan
    return {"gap": gap, "usual": 0.01, "factor": 3.0}


def leaves(gap, limit):
    return first_true(~(gap[1:] <= limit), 2)


GAP_JUMPS_AT = Exercise(
    "11.2",
    "gap_jumps_at",
    cases=[
        # No sync, in float32: rounding in step 1, another model in step 2.
        Case({"gap": floats([4e-7, 0.02, 0.05]), "usual": 0.01, "factor": 3.0}, 2),
        # Five times step 1's, and still rounding.
        Case({"gap": floats([4e-7, 2e-6, 4e-7]), "usual": 0.01, "factor": 3.0}, 0),
        # Large from the beginning, and at step 4 more than three times that.
        Case({"gap": floats([0.1, 0.2, 0.29, 0.4]), "usual": 0.01, "factor": 3.0}, 4),
        # A large first step is no jump.
        Case({"gap": floats([0.5, 0.4, 0.5]), "usual": 0.01, "factor": 3.0}, 0),
        Case({"gap": floats([4e-7, 4e-7, math.nan, 0.5]), "usual": 0.01, "factor": 3.0}, 3),
        # Step 1 is unknown: the usual gap alone is the limit.
        Case({"gap": floats([math.nan, 0.005, 0.02]), "usual": 0.01, "factor": 3.0}, 3),
    ],
    random=random_gaps,
    mistakes={
        "lets NaN pass: gap > limit is False for it, and not (gap <= limit) is True": (
            lambda gap, usual, factor: first_true(gap[1:] > max(usual, factor * gap[0].item()), 2)
        ),
        "takes the smaller of the two bounds: within either of them the gap is all right": (
            lambda gap, usual, factor: leaves(gap, min(usual, factor * gap[0].item()))
        ),
        "leaves `usual` out: a gap of rounding may well become five times as large": (
            lambda gap, usual, factor: leaves(gap, factor * gap[0].item())
        ),
        "leaves step 1 out: a gap that was large from the beginning has not jumped": (
            lambda gap, usual, factor: leaves(gap, usual)
        ),
        "compares with the step before: a gap that grows slowly comes apart, too": (
            lambda gap, usual, factor: first_true(~(gap[1:] <= (factor * gap[:-1]).clamp(min=usual)), 2)
        ),
        "judges step 1 too: it says what the gap is before the sampler's first update": (
            lambda gap, usual, factor: first_true(~(gap <= usual))
        ),
        "counts the steps from 0: they count from 1": (
            lambda gap, usual, factor: max(leaves(gap, max(usual, factor * gap[0].item())) - 1, 0)
        ),
    },
)


# ------------------------------------------------------------------------------------------------------- first sign


def random_runs(rng):
    """Three healthy runs and one that leaves their range here and there. The metrics have different units."""
    units = floats([1.0, 100.0, 0.01, 1e-4])
    healthy = torch.rand(3, 8, 4, generator=rng) * units
    run = (torch.rand(8, 4, generator=rng) + 0.3 * torch.randn(8, 4, generator=rng)) * units
    run[5] = 5 * units * torch.rand(4, generator=rng)
    return {"run": run, "healthy": healthy, "margin": 1.0}


def range_of(healthy):
    """(lowest, highest, width): two [S, M] and a [M]."""
    low, high = healthy.amin(0), healthy.amax(0)
    return low, high, (high - low).amax(0).clamp(min=1e-6)


def excess_of(run, healthy):
    """How far the run is outside, in widths, [S, M]."""
    low, high, width = range_of(healthy)
    return torch.maximum(low - run, run - high) / width


def sign_of(excess, margin, measure=None):
    """(step, metric). measure: what decides between metrics of one step; None: the excess."""
    steps = (excess > margin).any(1)
    if not steps.any():
        return 0, -1
    at = int(steps.float().argmax())
    measure = excess if measure is None else measure
    return at + 1, int(measure[at].masked_fill(excess[at] <= margin, -math.inf).argmax())


def of_all_steps(run, healthy, margin):
    low, high = healthy.amin((0, 1)), healthy.amax((0, 1))
    return sign_of(torch.maximum(low - run, run - high) / (high - low).clamp(min=1e-6), margin)


def in_own_units(run, healthy, margin):
    low, high, _ = range_of(healthy)
    return sign_of(torch.maximum(low - run, run - high), margin)


def largest_in_own_units(run, healthy, margin):
    low, high, _ = range_of(healthy)
    return sign_of(excess_of(run, healthy), margin, torch.maximum(low - run, run - high))


def first_of_the_metrics(run, healthy, margin):
    excess = excess_of(run, healthy)
    return sign_of(excess, margin, -torch.arange(excess.shape[1]).expand_as(excess).float())


def above_alone(run, healthy, margin):
    _, high, width = range_of(healthy)
    return sign_of((run - high) / width, margin)


def from_the_mean(run, healthy, margin):
    return sign_of((run - healthy.mean(0)).abs() / range_of(healthy)[2], margin)


def width_of_a_step(run, healthy, margin):
    low, high, _ = range_of(healthy)
    return sign_of(torch.maximum(low - run, run - high) / (high - low).clamp(min=1e-6), margin)


def largest_of_all(run, healthy, margin):
    excess = excess_of(run, healthy)
    if not (excess > margin).any():
        return 0, -1
    at, metric = divmod(int(excess.argmax()), excess.shape[1])
    return at + 1, metric


def from_zero(run, healthy, margin):
    step, metric = sign_of(excess_of(run, healthy), margin)
    return max(step - 1, 0), metric


# Two metrics, two healthy runs, three steps: entropy from 0.2 to 0.3, length from 80 to 100 tokens.
HEALTHY = floats([[[0.2, 80], [0.2, 80], [0.2, 80]], [[0.3, 100], [0.3, 100], [0.3, 100]]])

FIRST_SIGN = Exercise(
    "11.3",
    "first_sign",
    cases=[
        # Step 2: 130 tokens are 30 above the highest, 1.5 widths.
        Case({"run": floats([[0.25, 90], [0.25, 130], [0.25, 150]]), "healthy": HEALTHY, "margin": 1.0}, (2, 1)),
        # Step 3: an entropy of 0.05 is 0.15 below the lowest, 1.5 widths; 0.15 at step 2 is half a width.
        Case({"run": floats([[0.25, 90], [0.15, 90], [0.05, 90]]), "healthy": HEALTHY, "margin": 1.0}, (3, 0)),
        # Both at step 2: 0.3 above are 3 widths, 30 tokens above are 1.5.
        Case({"run": floats([[0.25, 90], [0.6, 130], [0.25, 90]]), "healthy": HEALTHY, "margin": 1.0}, (2, 0)),
        # Both at step 2: 0.15 above are 1.5 widths, 60 tokens above are 3.
        Case({"run": floats([[0.25, 90], [0.45, 160], [0.25, 90]]), "healthy": HEALTHY, "margin": 1.0}, (2, 1)),
        # Outside at each step, by less than a width.
        Case({"run": floats([[0.35, 110], [0.15, 70], [0.35, 110]]), "healthy": HEALTHY, "margin": 1.0}, (0, -1)),
        # At step 1 the healthy runs are 10 tokens apart, at step 2 40: 60 above is 1.5 widths, at step 1 30 is 0.75.
        Case(
            {"run": floats([[120], [180]]), "healthy": floats([[[80], [80]], [[90], [120]]]), "margin": 1.0},
            (2, 0),
        ),
        # One width above the highest, and not more than that.
        Case({"run": floats([[2]]), "healthy": floats([[[0]], [[1]]]), "margin": 1.0}, (0, -1)),
        # The healthy runs are equal: their width is taken as 1e-6.
        Case({"run": floats([[0.0], [0.1]]), "healthy": floats([[[0], [0]], [[0], [0]]]), "margin": 1.0}, (2, 0)),
    ],
    random=random_runs,
    mistakes={
        "takes one range for all steps: a metric that rises in healthy runs has another one at each": of_all_steps,
        "takes the width of each step: with few healthy runs it is near 0 at some step by chance": width_of_a_step,
        "does not divide by the width: then the margin means something else in each metric": in_own_units,
        "compares the metrics of one step in their own units: in widths, or tokens always win": largest_in_own_units,
        "takes the first metric of the step: it is the one with the largest excess": first_of_the_metrics,
        "sees only what is above the healthy runs: an entropy that falls is a sign, too": above_alone,
        "measures from the mean of the healthy runs: it is from their highest, or lowest": from_the_mean,
        "takes the largest excess of all steps: it is the first step that counts": largest_of_all,
        "counts the steps from 0: they count from 1": from_zero,
    },
)

EXERCISES = [COLLAPSED_AT, GAP_JUMPS_AT, FIRST_SIGN]
