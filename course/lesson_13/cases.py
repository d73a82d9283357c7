"""Cases and known mistakes of lesson 13."""

import math

import torch

from course.cases import Case, Exercise, bools, floats, random_logp, random_mask


def random_steps(rng):
    numbers = torch.randint(2, 9, (2,), generator=rng).tolist()
    return {"num_steps": sum(numbers), "lag": numbers[0]}


VERSIONS = Exercise(
    "13.1",
    "versions",
    cases=[
        # In turns: step 1 has the first weights, step 2 those after step 1.
        Case({"num_steps": 4, "lag": 0}, torch.tensor([0, 1, 2, 3])),
        # Two behind: steps 1, 2 and 3 have the first weights.
        Case({"num_steps": 5, "lag": 2}, torch.tensor([0, 0, 0, 1, 2])),
    ],
    random=random_steps,
    mistakes={
        "has weights from before the start, with negative numbers": (
            lambda num_steps, lag: torch.arange(num_steps) - lag
        ),
        "has for each step the weights that the step itself makes": (
            lambda num_steps, lag: (torch.arange(num_steps) + 1 - lag).clamp(min=0)
        ),
        "is one step too old": lambda num_steps, lag: (torch.arange(num_steps) - 1 - lag).clamp(min=0),
        "ignores the lag": lambda num_steps, lag: torch.arange(num_steps),
        "counts down: the first entry is for step 1": (
            lambda num_steps, lag: (torch.arange(num_steps) - lag).clamp(min=0).flip(0)
        ),
        "is the age of the responses, not the step of the weights": (
            lambda num_steps, lag: torch.arange(num_steps).clamp(max=lag)
        ),
    },
)


def random_batch(rng):
    mask = random_mask(rng)
    old = random_logp(rng, mask.shape)
    return {
        "logp": old + 0.4 * torch.randn(mask.shape, generator=rng),
        "old_logp": old,
        "sampler_logp": old + 0.7 * torch.randn(mask.shape, generator=rng),
        "advantages": torch.randn(len(mask), generator=rng),
        "mask": mask,
        "low": 0.2,
        "high": 0.3,
        "cap": 1.5,
    }


def loss(logp, old_logp, sampler_logp, advantages, mask, low, high, cap, **wrong):
    """wrong: what a mistake does in another way."""
    given = {"weight": (old_logp - sampler_logp).exp().clamp(max=cap), "ratio": (logp - old_logp).exp()} | wrong
    a, ratio = advantages[:, None], given["ratio"]
    surrogate = given.get("surrogate", torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a))
    divisor = given.get("divisor", mask.sum())
    return -(given["weight"] * surrogate)[mask].sum() / divisor


def with_mistake(change):
    """The loss with what change(logp, old, sampler, advantages, mask, low, high, cap) does in another way."""
    return lambda *given: loss(*given, **change(*given))


DECOUPLED_LOSS = Exercise(
    "13.2",
    "decoupled_loss",
    gradient="logp",
    cases=[
        # ρ is 1. w: 0.4/0.2 = 2, bounded by 1.5; 0.1/0.2 = 0.5. −(1.5 · 2 + 0.5 · 2)/2.
        Case(
            {
                "logp": floats([[math.log(0.4), math.log(0.1), -9]]),
                "old_logp": floats([[math.log(0.4), math.log(0.1), -1]]),
                "sampler_logp": floats([[math.log(0.2), math.log(0.2), -5]]),
                "advantages": floats([2]),
                "mask": bools([[1, 1, 0]]),
                "low": 0.2,
                "high": 0.3,
                "cap": 1.5,
            },
            -2.0,
        ),
        # ρ = 2, A > 0: clipped at 1.3, w = 1. ρ = 0.5, A < 0: clipped at 0.8, w = 0.5. −(1.3 · 1 − 0.5 · 0.8 · 1)/2.
        Case(
            {
                "logp": floats([[math.log(0.4)], [math.log(0.1)]]),
                "old_logp": floats([[math.log(0.2)], [math.log(0.2)]]),
                "sampler_logp": floats([[math.log(0.2)], [math.log(0.4)]]),
                "advantages": floats([1, -1]),
                "mask": bools([[1], [1]]),
                "low": 0.2,
                "high": 0.3,
                "cap": 1.5,
            },
            -0.45,
        ),
    ],
    random=random_batch,
    padding="logp old_logp sampler_logp",
    deep="logp old_logp sampler_logp",
    mistakes={
        "lacks w: stale responses count as fresh ones (--correction none)": with_mistake(lambda *_: {"weight": 1.0}),
        "ρ divides by π_sampler: that is --correction ppo; w carries that part of the way": with_mistake(
            lambda logp, old, sampler, *_: {"ratio": (logp - sampler).exp()}
        ),
        "ρ divides by π_sampler and w is 1: the clip range then has to hold the lag as well": with_mistake(
            lambda logp, old, sampler, *_: {"ratio": (logp - sampler).exp(), "weight": 1.0}
        ),
        "w is the current policy's, π/π_sampler, and not π_old/π_sampler": with_mistake(
            lambda logp, old, sampler, a, mask, low, high, cap: {
                "weight": (logp - sampler).exp().clamp(max=cap).detach()
            }
        ),
        "w is upside down: π_old/π_sampler": with_mistake(
            lambda logp, old, sampler, a, mask, low, high, cap: {"weight": (sampler - old).exp().clamp(max=cap)}
        ),
        "w has no bound": with_mistake(lambda logp, old, sampler, *_: {"weight": (old - sampler).exp()}),
        "sets w above cap to 0: that is AReaL's release; here it is bounded": with_mistake(
            lambda logp, old, sampler, a, mask, low, high, cap: {
                "weight": (old - sampler).exp().where((old - sampler).exp() <= cap, 0)
            }
        ),
        "lacks the clip": with_mistake(
            lambda logp, old, sampler, a, *_: {"surrogate": (logp - old).exp() * a[:, None]}
        ),
        "lacks the min: takes the clipped ratio alone": with_mistake(
            lambda logp, old, sampler, a, mask, low, high, cap: {
                "surrogate": (logp - old).exp().clamp(1 - low, 1 + high) * a[:, None]
            }
        ),
        "divides by the number of responses": with_mistake(lambda *given: {"divisor": len(given[4])}),
        "divides by all positions, padding among them": with_mistake(lambda *given: {"divisor": given[4].numel()}),
        "has the wrong sign: the loss is −J": lambda *given: -loss(*given),
    },
)

EXERCISES = [VERSIONS, DECOUPLED_LOSS]
