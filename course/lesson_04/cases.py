"""Cases and known mistakes of lesson 4."""

import torch

from course.cases import Case, Exercise, bools, floats, random_mask


def random_loss(rng):
    mask = random_mask(rng)
    return {"loss": torch.randn(mask.shape, generator=rng), "mask": mask}


TWO = {"loss": floats([[1, 1, 9], [4, 9, 9]]), "mask": bools([[1, 1, 0], [1, 0, 0]])}
TWO_AND_NONE = {"loss": floats([[1, 2], [4, 9], [9, 9]]), "mask": bools([[1, 1], [1, 0], [0, 0]])}


def by_tokens(loss, mask):
    return loss[mask].sum() / mask.sum()


def by_responses(loss, mask):
    return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


BOTH = {  # mistakes that can be made in both
    "wrong denominator: divides by all positions, padding included; only response tokens (mask) count": (
        lambda loss, mask: (loss * mask).mean()
    ),
    "ignores mask: takes the mean over all positions": lambda loss, mask: loss.mean(),
    "divides the responses' sums by the number of responses alone: the lengths are missing": (
        lambda loss, mask: (loss * mask).sum(1).mean()
    ),
    "is not divided: this is the sum over the response tokens": lambda loss, mask: (loss * mask).sum(),
}

TOKEN_MEAN = Exercise(
    "4.1a",
    "token_mean",
    gradient="loss",
    # (1 + 1 + 4) / 3. (1 + 2 + 4) / 3: a row without response tokens changes nothing.
    cases=[Case(TWO, 6 / 3), Case(TWO_AND_NONE, 7 / 3)],
    random=random_loss,
    padding="loss",
    mistakes=BOTH
    | {
        "wrong denominator: takes the mean of the responses' means (that is mean_of_means); all response tokens "
        "together are the divisor": by_responses,
        "padding is not masked: the sum has positions where mask is False": lambda loss, mask: loss.sum() / mask.sum(),
        "has no gradient: loss must not be detached (.detach(), .item(), .data)": (
            lambda loss, mask: by_tokens(loss, mask).detach()
        ),
    },
)

MEAN_OF_MEANS = Exercise(
    "4.1b",
    "mean_of_means",
    gradient="loss",
    # Means (1 + 1)/2 = 1 and 4, so 5/2. Means 1.5 and 4, and 0 for the row without response tokens, so 5.5/3.
    cases=[Case(TWO, 5 / 2), Case(TWO_AND_NONE, 5.5 / 3)],
    random=random_loss,
    padding="loss",
    mistakes=BOTH
    | {
        "is the mean over all tokens (that is token_mean): each response's mean counts alike here": by_tokens,
        "padding is not masked: the responses' sums have positions where mask is False": (
            lambda loss, mask: (loss.sum(1) / mask.sum(1).clamp(min=1)).mean()
        ),
        "division by zero in a row without response tokens: 0/0 gives NaN; let such a row's length be 1": (
            lambda loss, mask: ((loss * mask).sum(1) / mask.sum(1)).mean()
        ),
        "leaves out a row without response tokens: it counts, with mean 0": (
            lambda loss, mask: by_responses(loss, mask) * len(mask) / mask.any(1).sum()
        ),
        "gives a mean for each response: take their mean, too": (
            lambda loss, mask: (loss * mask).sum(1) / mask.sum(1).clamp(min=1)
        ),
        "has no gradient: loss must not be detached (.detach(), .item(), .data)": (
            lambda loss, mask: by_responses(loss, mask).detach()
        ),
    },
)


def penalty_case(length, max_tokens, buffer, expected):
    return Case({"length": length, "max_tokens": max_tokens, "buffer": buffer}, expected)


def random_length(rng):
    max_tokens = int(torch.randint(100, 1000, (), generator=rng))
    buffer = int(torch.randint(10, max_tokens // 2, (), generator=rng))
    past_the_edge = int(torch.randint(1, buffer, (), generator=rng))
    return {"length": max_tokens - buffer + past_the_edge, "max_tokens": max_tokens, "buffer": buffer}


def penalty(length, max_tokens, buffer):
    return min(0, max_tokens - buffer - length) / max(1, buffer)


OVERLONG_PENALTY = Exercise(
    "4.2",
    "overlong_penalty",
    cases=[
        penalty_case(50, 100, 20, 0.0),  # at most 100 − 20 = 80
        penalty_case(80, 100, 20, 0.0),
        penalty_case(85, 100, 20, -0.25),  # 5 of the buffer's 20
        penalty_case(100, 100, 20, -1.0),  # all of them
        penalty_case(100, 100, 0, 0.0),  # no buffer, no penalty
    ],
    random=random_length,
    mistakes={
        "has the wrong sign: a penalty is added to the reward, so it is never positive": lambda *args: -penalty(*args),
        "rewards short responses: up to max_tokens − buffer the penalty is 0": (
            lambda length, max_tokens, buffer: (max_tokens - buffer - length) / max(1, buffer)
        ),
        "wrong denominator: divides by max_tokens; the penalty falls to −1 over the buffer": (
            lambda length, max_tokens, buffer: min(0, max_tokens - buffer - length) / max_tokens
        ),
        "is −1 in the whole buffer: the penalty falls evenly from 0 to −1 (divide with /, not with //)": (
            lambda length, max_tokens, buffer: -1.0 if length > max_tokens - buffer else 0.0
        ),
        "is −1 only at max_tokens: the penalty falls evenly within the buffer": (
            lambda length, max_tokens, buffer: -1.0 if length >= max_tokens and buffer else 0.0
        ),
        "begins too late: the penalty begins at max_tokens − buffer, not at max_tokens": (
            lambda length, max_tokens, buffer: min(0, max_tokens - length) / max(1, buffer)
        ),
        "is the share of the buffer that is left, with a minus: at its beginning the penalty is 0, at its end −1": (
            lambda length, max_tokens, buffer: (
                -(max_tokens - length) / buffer if buffer and length > max_tokens - buffer else 0.0
            )
        ),
        "is not divided by the buffer: at max_tokens the penalty is −1": (
            lambda length, max_tokens, buffer: float(min(0, max_tokens - buffer - length))
        ),
    },
)

EXERCISES = [TOKEN_MEAN, MEAN_OF_MEANS, OVERLONG_PENALTY]
