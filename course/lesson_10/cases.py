"""Cases and known mistakes of lesson 10."""

import math

import torch

from course.cases import Case, Exercise, bools, floats, random_logp, random_mask


def random_policies(rng):
    logp = random_logp(rng, (4, 6))
    return {"logp": logp, "ref_logp": logp + 0.5 * torch.randn(4, 6, generator=rng)}


def random_responses(rng):
    mask = random_mask(rng)
    logp = random_logp(rng, mask.shape)
    ref_logp = logp + 0.5 * torch.randn(mask.shape, generator=rng)
    rewards = torch.randn(len(mask), generator=rng)
    return {"rewards": rewards, "logp": logp, "ref_logp": ref_logp, "mask": mask, "beta": 0.1}


def estimates(d):
    return d, d.square() / 2, (-d).exp() + d - 1


KL_ESTIMATES = Exercise(
    "10.1",
    "kl_estimates",
    gradient="logp",
    cases=[
        # π/π_ref = 2: d = log 2; k3 = 1/2 + log 2 − 1.
        Case(
            {"logp": floats([[math.log(0.5)]]), "ref_logp": floats([[math.log(0.25)]])},
            (
                floats([[math.log(2)]]),
                floats([[math.log(2) ** 2 / 2]]),
                floats([[math.log(2) - 0.5]]),
            ),
        ),
        # d = 6: not clamped.
        Case(
            {"logp": floats([[-1]]), "ref_logp": floats([[-7]])},
            (floats([[6]]), floats([[18]]), floats([[math.exp(-6) + 5]])),
        ),
        # d = 0 and −1: k1 0 and −1, k2 0 and 1/2, k3 0 and e − 2.
        Case(
            {"logp": floats([[-1, -3]]), "ref_logp": floats([[-1, -2]])},
            (floats([[0, -1]]), floats([[0, 0.5]]), floats([[0, math.e - 2]])),
        ),
    ],
    random=random_policies,
    mistakes={
        "the difference is turned round: d = log π − log π_ref": lambda logp, ref: estimates(ref - logp),
        "k1 has the wrong sign: it is log π − log π_ref": (lambda logp, ref: (ref - logp, *estimates(logp - ref)[1:])),
        "k2 lacks the half: it is d²/2": (
            lambda logp, ref: (logp - ref, (logp - ref).square(), estimates(logp - ref)[2])
        ),
        "k3 is turned round: it is e^−d + d − 1": (
            lambda logp, ref: (*estimates(logp - ref)[:2], estimates(ref - logp)[2])
        ),
        "k3 lacks the − 1: it is 0 where the two policies agree": (
            lambda logp, ref: (*estimates(logp - ref)[:2], estimates(logp - ref)[2] + 1)
        ),
        "k3 lacks the d: e^−d − 1 alone has mean 0": (
            lambda logp, ref: (*estimates(logp - ref)[:2], (ref - logp).exp() - 1)
        ),
        "the order is wrong: (k1, k2, k3)": lambda logp, ref: estimates(logp - ref)[::-1],
        "takes means: one number for each token is asked for": (
            lambda logp, ref: tuple(part.mean() for part in estimates(logp - ref))
        ),
        "has no gradient: logp must not be detached (.detach(), .item(), .data)": (
            lambda logp, ref: estimates((logp - ref).detach())
        ),
    },
)


def penalised(rewards, k, mask, beta):
    return rewards - beta * (k * mask).sum(1)


REWARDS_WITH_KL = Exercise(
    "10.2",
    "rewards_with_kl",
    gradient="logp",
    cases=[
        # Σ k1 = 1 + 0.5 on two tokens; the third is padding: 3 − 0.1 · 1.5.
        Case(
            {
                "rewards": floats([3]),
                "logp": floats([[-1, -1, -5]]),
                "ref_logp": floats([[-2, -1.5, 0]]),
                "mask": bools([[1, 1, 0]]),
                "beta": 0.1,
            },
            floats([2.85]),
        ),
        # Σ k1 = −1 for the second response: −0.5 + 0.5 · 1. The first has Σ k1 = 1: 3 − 0.5.
        Case(
            {
                "rewards": floats([3, -0.5]),
                "logp": floats([[-1, -1], [-2, -7]]),
                "ref_logp": floats([[-1.5, -1.5], [-1, 0]]),
                "mask": bools([[1, 1], [1, 0]]),
                "beta": 0.5,
            },
            floats([2.5, 0]),
        ),
    ],
    random=random_responses,
    padding="logp ref_logp",
    mistakes={
        "adds the penalty: it is subtracted": (
            lambda rewards, logp, ref, mask, beta: penalised(rewards, (ref - logp).detach(), mask, beta)
        ),
        "a gradient flows through the penalty: a reward is a number, detach it": (
            lambda rewards, logp, ref, mask, beta: penalised(rewards, logp - ref, mask, beta)
        ),
        "takes the mean over the response: the KL of a whole response is the sum over its tokens": (
            lambda rewards, logp, ref, mask, beta: penalised(
                rewards, (logp - ref).detach() / mask.sum(1, keepdim=True), mask, beta
            )
        ),
        "padding is not masked: the sum has positions where mask is False": (
            lambda rewards, logp, ref, mask, beta: penalised(
                rewards, (logp - ref).detach(), torch.ones_like(mask), beta
            )
        ),
        "is k3: in the reward only k1 gives the gradient of KL(π ‖ π_ref)": (
            lambda rewards, logp, ref, mask, beta: penalised(rewards, estimates((logp - ref).detach())[2], mask, beta)
        ),
        "is k2: in the reward only k1 gives the gradient of KL(π ‖ π_ref)": (
            lambda rewards, logp, ref, mask, beta: penalised(rewards, estimates((logp - ref).detach())[1], mask, beta)
        ),
        "takes the absolute value: k1 of a single token may be negative": (
            lambda rewards, logp, ref, mask, beta: penalised(rewards, (logp - ref).detach().abs(), mask, beta)
        ),
        "lacks beta": lambda rewards, logp, ref, mask, beta: penalised(rewards, (logp - ref).detach(), mask, 1.0),
        "gives the penalty alone: it is subtracted from the reward": (
            lambda rewards, logp, ref, mask, beta: beta * ((logp - ref).detach() * mask).sum(1)
        ),
        "adds up over all responses: each has a penalty of its own": (
            lambda rewards, logp, ref, mask, beta: rewards - beta * ((logp - ref).detach() * mask).sum()
        ),
    },
)

EXERCISES = [KL_ESTIMATES, REWARDS_WITH_KL]
