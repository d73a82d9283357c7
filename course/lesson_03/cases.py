"""Cases and known mistakes of lesson 3."""

import math

import torch

from course.cases import Case, Exercise, bools, floats, random_logp, random_mask


def two_policies(rng, *names):
    mask = random_mask(rng)
    first = random_logp(rng, mask.shape)
    second = first + 0.5 * torch.randn(mask.shape, generator=rng)
    return dict(zip(names, (first, second))), mask


def random_gap(rng):
    arguments, mask = two_policies(rng, "sampler_logp", "trainer_logp")
    return arguments | {"mask": mask}


def random_weights(rng):
    arguments, _ = two_policies(rng, "trainer_logp", "sampler_logp")
    return arguments | {"cap": 1.5}


def mean(values, mask):
    return values[mask].sum() / mask.sum()


SAMPLER_GAP = Exercise(
    "3.1",
    "sampler_gap",
    cases=[
        # |−1 + 1.5| and |−2 + 1| = 0.5 and 1; the third is padding. 1.5 over 2 tokens.
        Case(
            {
                "sampler_logp": floats([[-1, -2, 0]]),
                "trainer_logp": floats([[-1.5, -1, -9]]),
                "mask": bools([[1, 1, 0]]),
            },
            0.75,
        ),
        # 0.5, 1 and 0.25 over 3 tokens of two responses.
        Case(
            {
                "sampler_logp": floats([[-1, -2, 0], [-1, 0, 0]]),
                "trainer_logp": floats([[-1.5, -1, -9], [-0.75, -9, -9]]),
                "mask": bools([[1, 1, 0], [1, 0, 0]]),
            },
            1.75 / 3,
        ),
    ],
    random=random_gap,
    padding="sampler_logp trainer_logp",
    mistakes={
        "lacks the absolute value: differences of both signs cancel, and a large gap may look small": (
            lambda sampler, trainer, mask: mean(sampler - trainer, mask)
        ),
        "lacks the absolute value: differences of both signs cancel, and a large gap may look small (it is also the "
        "trainer's minus the sampler's)": lambda sampler, trainer, mask: mean(trainer - sampler, mask),
        "takes the absolute value of the mean: it belongs to each token's difference, before the mean": (
            lambda sampler, trainer, mask: mean(sampler - trainer, mask).abs()
        ),
        "wrong denominator: takes the mean of the responses' means; the mean is over all response tokens together": (
            lambda sampler, trainer, mask: (((sampler - trainer).abs() * mask).sum(1) / mask.sum(1)).mean()
        ),
        "wrong denominator: divides by all positions, padding included; only response tokens (mask) count": (
            lambda sampler, trainer, mask: ((sampler - trainer).abs() * mask).mean()
        ),
        "padding is not masked: the sum has positions where mask is False": (
            lambda sampler, trainer, mask: (sampler - trainer).abs().sum() / mask.sum()
        ),
        "ignores mask: takes the mean over all positions": (
            lambda sampler, trainer, mask: (sampler - trainer).abs().mean()
        ),
        "compares probabilities: the gap is between log-probabilities, in nats": (
            lambda sampler, trainer, mask: mean((sampler.exp() - trainer.exp()).abs(), mask)
        ),
        "takes the root of the mean square: the trainers' metric is the mean absolute difference": (
            lambda sampler, trainer, mask: mean((sampler - trainer).square(), mask).sqrt()
        ),
        "takes the largest gap: the trainers' metric is the mean": (
            lambda sampler, trainer, mask: (sampler - trainer).abs()[mask].max()
        ),
        "gives a gap for each token: one number is asked for": (
            lambda sampler, trainer, mask: (sampler - trainer).abs() * mask
        ),
    },
)

TRUNCATED_WEIGHTS = Exercise(
    "3.2",
    "truncated_weights",
    gradient="trainer_logp",
    cases=[
        # 0.8/0.08 = 10, more than 2. 0.2/0.4 = 0.5. 0.3/0.2 = 1.5.
        Case(
            {
                "trainer_logp": floats([[math.log(0.8), math.log(0.2), math.log(0.3)]]),
                "sampler_logp": floats([[math.log(0.08), math.log(0.4), math.log(0.2)]]),
                "cap": 2.0,
            },
            floats([[2, 0.5, 1.5]]),
        ),
        # Far below 1/cap: no lower bound.
        Case({"trainer_logp": floats([[-4]]), "sampler_logp": floats([[-1]]), "cap": 2.0}, floats([[math.exp(-3)]])),
    ],
    random=random_weights,
    deep="trainer_logp sampler_logp",
    mistakes={
        "a gradient flows through the weights: they are constants, detach them": (
            lambda trainer, sampler, cap: (trainer - sampler).exp().clamp(max=cap)
        ),
        "the ratio is upside down: it is π_old/π_sampler, the trainer's probability over the sampler's": (
            lambda trainer, sampler, cap: (sampler - trainer).exp().clamp(max=cap).detach()
        ),
        "is not truncated: the weights are at most cap": (
            lambda trainer, sampler, cap: (trainer - sampler).exp().detach()
        ),
        "bounds the weights from below: cap is the largest weight": (
            lambda trainer, sampler, cap: (trainer - sampler).exp().clamp(min=cap).detach()
        ),
        "bounds the weights from both sides: there is no lower bound 1/cap": (
            lambda trainer, sampler, cap: (trainer - sampler).exp().clamp(1 / cap, cap).detach()
        ),
        "sets weights above cap to 0: that is IcePop; truncated importance sampling bounds them": (
            lambda trainer, sampler, cap: (trainer - sampler).exp().where((trainer - sampler).exp() <= cap, 0).detach()
        ),
        "lacks exp: trainer_logp − sampler_logp is the ratio's logarithm": (
            lambda trainer, sampler, cap: (trainer - sampler).clamp(max=cap).detach()
        ),
        "bounds the logarithm: cap is the bound of the ratio itself": (
            lambda trainer, sampler, cap: (trainer - sampler).clamp(max=cap).exp().detach()
        ),
        "multiplies the ratios of a response: each token has a weight of its own": (
            lambda trainer, sampler, cap: (trainer - sampler)
            .sum(1, keepdim=True).exp().clamp(max=cap).expand(trainer.shape).detach()
        ),
    },
)  # fmt: skip

EXERCISES = [SAMPLER_GAP, TRUNCATED_WEIGHTS]
