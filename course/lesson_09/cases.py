"""Cases and known mistakes of lesson 9."""

import torch

from course.cases import Case, Exercise, bools, floats


def random_scores(rng):
    return {name: torch.rand(12, generator=rng) < 0.6 for name in ("format", "parsed", "correct")}


def random_payments(rng):
    levels = floats([3, -0.5, -1, -3])
    return {
        "rewards": levels[torch.randint(4, (20,), generator=rng)],
        "correct": torch.rand(20, generator=rng) < 0.5,
        "full": 3.0,
    }


def rewards_of(format, right, wrong, no_format=-1.0, unread=-2.0):
    """right, wrong: where the answer counts as such, [N]; elsewhere it gets `unread`."""
    answer = torch.where(right, 2.0, torch.where(wrong, -1.5, unread))
    return torch.where(format, 1.0, no_format) + answer


CLOSED_REWARDS = Exercise(
    "9.1",
    "closed_rewards",
    cases=[
        # Right: 1 + 2. Wrong: 1 − 1.5. Not read: 1 − 2. No format: −1 − 2.
        Case(
            {"format": bools([1, 1, 1, 0]), "parsed": bools([1, 1, 0, 0]), "correct": bools([1, 0, 0, 0])},
            floats([3, -0.5, -1, -3]),
        ),
        # correct and parsed say nothing where nothing was read: 1 − 2, −1 − 2, −1 − 2.
        Case(
            {"format": bools([1, 0, 0]), "parsed": bools([0, 1, 1]), "correct": bools([1, 1, 0])},
            floats([-1, -3, -3]),
        ),
    ],
    random=random_scores,
    mistakes={
        "fails open: an answer that can't be read is paid like a right one": (
            lambda format, parsed, correct: rewards_of(format, ~parsed | ~format | correct, format & parsed)
        ),
        "pays what was not read: correct says nothing where parsed is False": (
            lambda format, parsed, correct: rewards_of(format, format & correct, format & parsed)
        ),
        "pays what stands in no right format: parsed says nothing where format is False": (
            lambda format, parsed, correct: rewards_of(format, parsed & correct, parsed)
        ),
        "believes correct alone: what was not read, or stands in no right format, is not right": (
            lambda format, parsed, correct: rewards_of(format, correct, format & parsed)
        ),
        "an answer that can't be read costs 2, more than a wrong one, which costs 1.5": (
            lambda format, parsed, correct: rewards_of(format, format & parsed & correct, torch.ones_like(parsed))
        ),
        "an answer that can't be read costs nothing here: then a policy that is in doubt writes none": (
            lambda format, parsed, correct: rewards_of(format, format & parsed & correct, format & parsed, unread=0.0)
        ),
        "a bad format costs nothing here: it is −1": (
            lambda format, parsed, correct: rewards_of(
                format, format & parsed & correct, format & parsed, no_format=0.0
            )
        ),
        "lacks the part for the format, +1 or −1": (
            lambda format, parsed, correct: (
                rewards_of(format, format & parsed & correct, format & parsed) - torch.where(format, 1.0, -1.0)
            )
        ),
        "lacks the part for the answer, +2, −1.5 or −2": (
            lambda format, parsed, correct: torch.where(format, 1.0, -1.0)
        ),
    },
)


def share(numerator, denominator):
    return numerator.sum() / denominator.sum().clamp(min=1)


PAID_WRONGLY = Exercise(
    "9.2",
    "paid_wrongly",
    cases=[
        # Three were paid 3, and two of them are wrong.
        Case({"rewards": floats([3, 3, -0.5, 3]), "correct": bools([1, 0, 0, 0]), "full": 3.0}, 2 / 3),
        # More than `full` counts, too: one of two.
        Case({"rewards": floats([3.5, -1, 3]), "correct": bools([1, 0, 0]), "full": 3.0}, 1 / 2),
        # Nobody was paid.
        Case({"rewards": floats([-0.5, -1]), "correct": bools([0, 0]), "full": 3.0}, 0.0),
    ],
    random=random_payments,
    mistakes={
        "divides by all responses: the share is of those that were paid in full": (
            lambda rewards, correct, full: ((rewards >= full) & ~correct).float().mean()
        ),
        "divides by the wrong responses: the share is of those that were paid in full": (
            lambda rewards, correct, full: share((rewards >= full) & ~correct, ~correct)
        ),
        "counts those that are right": (
            lambda rewards, correct, full: share((rewards >= full) & correct, rewards >= full)
        ),
        "gives NaN if none was paid in full (0/0): then the share is 0": (
            lambda rewards, correct, full: ((rewards >= full) & ~correct).sum() / (rewards >= full).sum()
        ),
        "counts only those that got more than `full`: at least `full` is enough": (
            lambda rewards, correct, full: share((rewards > full) & ~correct, rewards > full)
        ),
        "counts only those that got exactly `full`: more is also paid in full": (
            lambda rewards, correct, full: share((rewards == full) & ~correct, rewards == full)
        ),
        "counts responses that got less than `full`": (
            lambda rewards, correct, full: share((rewards > -1) & ~correct, rewards > -1)
        ),
        "is the number, not the share": lambda rewards, correct, full: ((rewards >= full) & ~correct).sum().float(),
    },
)

EXERCISES = [CLOSED_REWARDS, PAID_WRONGLY]
