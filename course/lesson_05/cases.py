"""Cases and known mistakes of lesson 5."""

import math

import torch

from course.cases import Case, Exercise, bools, floats, random_logp, random_mask


def random_weights(rng):
    return {"old_logp": random_logp(rng, (5, 9)), "alpha": 0.1}


def random_stages(rng):
    mask = random_mask(rng)
    return {"logp": random_logp(rng, mask.shape), "mask": mask, "eta": 0.3}


def stages_case(probabilities, mask, eta, low, high):
    arguments = {"logp": floats(probabilities).log(), "mask": bools(mask), "eta": eta}
    return Case(arguments, (bools(low), bools(high)))


def stages(logp, mask, eta):
    is_low = logp <= (math.log(eta) if eta > 0 else -math.inf)
    return mask & is_low, mask & ~is_low


def compared_as_probabilities(logp, mask, eta):
    is_low = logp.exp() <= eta
    return mask & is_low, mask & ~is_low


def without_tie(logp, mask, eta):
    is_low = logp < (math.log(eta) if eta > 0 else -math.inf)
    return mask & is_low, mask & ~is_low


def logp_against_eta(logp, mask, eta):
    return mask & (logp <= eta), mask & (logp > eta)


def unmasked(logp, mask, eta):
    return stages(logp, torch.ones_like(mask), eta)


def half_masked(logp, mask, eta):
    low, _ = stages(logp, mask, eta)
    return low, ~low


AR_WEIGHT = Exercise(
    "5.1",
    "ar_weight",
    cases=[
        # 0.3 · 0.5 + 0.7. 0.3 · 0.1 + 0.7. 0.3 · 1 + 0.7: a certain token keeps its advantage.
        Case({"old_logp": floats([[0.5, 0.1, 1]]).log(), "alpha": 0.3}, floats([[0.85, 0.73, 1]])),
        Case({"old_logp": floats([[0.5, 0.1, 1]]).log(), "alpha": 0.0}, floats([[1, 1, 1]])),
    ],
    random=random_weights,
    mistakes={
        "uses the log-probability: eq. 4 has the probability, exp(old_logp)": (
            lambda old_logp, alpha: alpha * old_logp + 1 - alpha
        ),
        "is turned round: probable tokens must weigh more than low-probability ones": (
            lambda old_logp, alpha: alpha * (1 - old_logp.exp()) + 1 - alpha
        ),
        "lacks the 1 − α: with α 0 all weights must be 1": lambda old_logp, alpha: alpha * old_logp.exp(),
        "α and 1 − α are swapped: with α 0 all weights must be 1": (
            lambda old_logp, alpha: (1 - alpha) * old_logp.exp() + alpha
        ),
        "adds 1 without taking α away: at probability 1 the weight is 1": (
            lambda old_logp, alpha: alpha * old_logp.exp() + 1
        ),
        "is π to the power of α: eq. 4 is linear, α·π + 1 − α": lambda old_logp, alpha: old_logp.exp() ** alpha,
        "is scaled to mean 1: eq. 4 does not renormalise": (
            lambda old_logp, alpha: (alpha * old_logp.exp() + 1 - alpha) / (alpha * old_logp.exp() + 1 - alpha).mean()
        ),
    },
)  # fmt: skip

LOPTI_STAGES = Exercise(
    "5.2",
    "lopti_stages",
    cases=[
        stages_case([[0.1, 0.9]], [[1, 1]], 0.5, [[1, 0]], [[0, 1]]),
        # A token with π = η is low (Algorithm 1 has ≤); padding is in no stage.
        stages_case([[0.5, 0.9, 0.1, 0.9]], [[1, 1, 0, 0]], 0.5, [[1, 0, 0, 0]], [[0, 1, 0, 0]]),
        # η 0: one stage with all tokens, also those whose probability rounds to 0.
        Case(
            {"logp": floats([[-1000, -1]]), "mask": bools([[1, 1]]), "eta": 0.0},
            (bools([[0, 0]]), bools([[1, 1]])),
        ),
    ],
    random=random_stages,
    padding="logp",
    mistakes={
        "the order is wrong: the stage of the low-probability tokens comes first": lambda *args: stages(*args)[::-1],
        "a token with π = η is low: Algorithm 1 has ≤, not <": without_tie,
        "padding is not masked: positions where mask is False are in no stage": unmasked,
        "padding is not masked in the second stage: ~low has it; take mask & ~low": half_masked,
        "compares log-probabilities with η: compare logp with log η": logp_against_eta,
        "fails for a tiny probability: exp(−1000) rounds to 0, which is ≤ η 0. Compare logp with log η": (
            compared_as_probabilities
        ),
        "gives numbers, not True and False: a mask has dtype bool": (
            lambda *args: tuple(stage.float() for stage in stages(*args))
        ),
        "gives one mask: two are asked for, (low, high)": lambda *args: stages(*args)[0],
    },
)

EXERCISES = [AR_WEIGHT, LOPTI_STAGES]
