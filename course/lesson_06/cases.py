"""Cases and known mistakes of lesson 6."""

import math

import torch

from course.cases import Case, Exercise, bools, floats, generator, random_logp, random_mask


def random_responses(rng):
    mask = random_mask(rng)
    old_logp = random_logp(rng, mask.shape)
    return {"logp": old_logp + 0.3 * torch.randn(mask.shape, generator=rng), "old_logp": old_logp, "mask": mask}


def random_ratios(rng):
    method = ("grpo", "cispo")[int(torch.randint(2, (), generator=rng))]
    ratio = (0.4 * torch.randn(4, 8, generator=rng)).exp()
    advantages = torch.randn(4, 1, generator=rng).expand(4, 8).clone()
    return {"ratio": ratio, "advantages": advantages, "clip_low": 0.2, "clip_high": 0.28, "method": method}


def mean_log_ratio(logp, old_logp, mask):
    return ((logp - old_logp) * mask).sum(1) / mask.sum(1)


SEQUENCE_RATIO = Exercise(
    "6.1",
    "sequence_ratio",
    gradient="logp",
    cases=[
        # Ratios 4 and 1: √(4 · 1) = 2. The third is padding.
        Case(
            {
                "logp": floats([[math.log(0.8), -1, -5]]),
                "old_logp": floats([[math.log(0.2), -1, -1]]),
                "mask": bools([[1, 1, 0]]),
            },
            floats([2]),
        ),
        # The same, and one token of ratio 1/2.
        Case(
            {
                "logp": floats([[math.log(0.8), -1, -5], [math.log(0.2), -3, -3]]),
                "old_logp": floats([[math.log(0.2), -1, -1], [math.log(0.4), 0, 0]]),
                "mask": bools([[1, 1, 0], [1, 0, 0]]),
            },
            floats([2, 0.5]),
        ),
        # 2,000 tokens of the same ratio: their product is more than float32 holds, their mean is not.
        Case(
            {"logp": floats([[-1] * 2000]), "old_logp": floats([[-1.1] * 2000]), "mask": bools([[1] * 2000])},
            floats([math.exp(0.1)]),
        ),
    ],
    random=random_responses,
    padding="logp old_logp",
    deep="logp old_logp",
    mistakes={
        "is the product of the ratios: GSPO takes the root of it, exp of the mean of the log-ratios": (
            lambda logp, old_logp, mask: ((logp - old_logp) * mask).sum(1).exp()
        ),
        "is the arithmetic mean of the ratios: GSPO's is the geometric one, exp of the mean of the log-ratios": (
            lambda logp, old_logp, mask: ((logp - old_logp).exp() * mask).sum(1) / mask.sum(1)
        ),
        "wrong denominator: divides by all positions, padding included; |o| counts response tokens (mask)": (
            lambda logp, old_logp, mask: ((logp - old_logp) * mask).mean(1).exp()
        ),
        "padding is not masked: the sum has positions where mask is False": (
            lambda logp, old_logp, mask: ((logp - old_logp).sum(1) / mask.sum(1)).exp()
        ),
        "ignores mask: takes the mean over all positions": lambda logp, old_logp, mask: (logp - old_logp).mean(1).exp(),
        "the ratio is upside down: it is π/π_old": (
            lambda logp, old_logp, mask: mean_log_ratio(old_logp, logp, mask).exp()
        ),
        "lacks exp: this is the ratio's logarithm": mean_log_ratio,
        "mixes the responses: each has a ratio of its own": (
            lambda logp, old_logp, mask: ((logp - old_logp)[mask].mean().exp()).expand(len(mask))
        ),
        "wrong shape: give one ratio for each response, [N] (here it is [N, 1])": (
            lambda logp, old_logp, mask: mean_log_ratio(logp, old_logp, mask).exp()[:, None]
        ),
        "wrong shape: give one ratio for each response, [N] (here it is repeated for each token)": (
            lambda logp, old_logp, mask: mean_log_ratio(logp, old_logp, mask).exp()[:, None].expand(mask.shape)
        ),
        "has no gradient: logp must not be detached (.detach(), .item(), .data)": (
            lambda logp, old_logp, mask: mean_log_ratio(logp, old_logp, mask).exp().detach()
        ),
    },
)  # fmt: skip


def weights_case(method, expected, clip_low, clip_high, ratio=(1.1, 1.5, 1.5, 0.5, 0.5), advantages=(1, 1, -1, 1, -1)):
    arguments = {
        "ratio": floats([ratio]),
        "advantages": floats([advantages]),
        "clip_low": clip_low,
        "clip_high": clip_high,
        "method": method,
    }
    return Case(arguments, floats([expected]))


def right(ratio, advantages, clip_low, clip_high, method):
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if method == "cispo":
        return (bounded * advantages).detach()
    cut = (advantages > 0) & (ratio > 1 + clip_high) | (advantages < 0) & (ratio < 1 - clip_low)
    return (ratio * advantages).masked_fill(cut, 0).detach()


def mistake_of(method, wrong):
    """The right function, except for a method."""

    def function(ratio, advantages, clip_low, clip_high, called):
        if called != method:
            return right(ratio, advantages, clip_low, clip_high, called)
        return wrong(ratio, advantages, clip_low, clip_high).detach()

    return function


def outside(ratio, clip_low, clip_high):
    return (ratio > 1 + clip_high) | (ratio < 1 - clip_low)


def attached(ratio, advantages, clip_low, clip_high, method):
    if method == "cispo":
        return ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return ratio * right(ratio, advantages, clip_low, clip_high, method) / ratio.detach()


TOKEN_WEIGHTS = Exercise(
    "6.2",
    "token_weights",
    gradient="ratio",
    cases=[
        # Within 0.8 to 1.24: ρ·A. Above it with A > 0, and below it with A < 0: cut off. The others keep ρ·A.
        weights_case("grpo", (1.1, 0, -1.5, 0.5, 0), 0.2, 0.24),
        # ρ kept within 0 and 1.45, times A: no token is cut off.
        weights_case("cispo", (1.1, 1.45, -1.45, 0.5, -0.5), 1.0, 0.45),
        # The same within 0.8 and 1.24, with A 2.
        weights_case("cispo", (2.48, 1.6), 0.2, 0.24, (1.5, 0.5), (2, 2)),
        Case(random_ratios(generator(0)) | {"method": "grpo"}),
        Case(random_ratios(generator(1)) | {"method": "cispo"}),
    ],
    random=random_ratios,
    mistakes={
        "a gradient flows through the weights: what multiplies ∇log π is a constant (sg in CISPO's J), detach it": (
            attached
        ),
        "grpo: a cut-off token keeps the bound as weight; a clipped token has no gradient, so its weight is 0": (
            mistake_of("grpo", lambda ratio, a, low, high: torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a))
        ),
        "grpo: bounds the weight of all tokens, as CISPO does; a clipped token has no gradient, so its weight is 0": (
            mistake_of("grpo", lambda ratio, a, low, high: ratio.clamp(1 - low, 1 + high) * a)
        ),
        "grpo: cuts off tokens outside the range whatever their advantage: one that moved against A keeps ρ·A": (
            mistake_of("grpo", lambda ratio, a, low, high: (ratio * a).masked_fill(outside(ratio, low, high), 0))
        ),
        "grpo: no token is cut off: above 1 + clip_high with A > 0, and below 1 − clip_low with A < 0, it is 0": (
            mistake_of("grpo", lambda ratio, a, low, high: ratio * a)
        ),
        "grpo: cuts off the wrong tokens: those that moved in A's direction have gone far enough": (
            mistake_of(
                "grpo",
                lambda ratio, a, low, high: (ratio * a).masked_fill(
                    (a < 0) & (ratio > 1 + high) | (a > 0) & (ratio < 1 - low), 0
                ),
            )
        ),
        "grpo: lacks the ratio: the gradient of ρ is ρ·∇log π": (
            mistake_of("grpo", lambda ratio, a, low, high: right(ratio, a, low, high, "grpo") / ratio)
        ),
        "grpo: ε is swapped: the range is 1 − clip_low to 1 + clip_high": (
            mistake_of("grpo", lambda ratio, a, low, high: right(ratio, a, high, low, "grpo"))
        ),
        "cispo: ε is swapped: the range is 1 − clip_low to 1 + clip_high": (
            mistake_of("cispo", lambda ratio, a, low, high: right(ratio, a, high, low, "cispo"))
        ),
        "cispo: cuts off tokens as GRPO does: CISPO bounds the weight and cuts off none": (
            mistake_of("cispo", lambda ratio, a, low, high: right(ratio, a, low, high, "grpo"))
        ),
        "cispo: cuts off all tokens outside the range: CISPO bounds the weight and cuts off none": (
            mistake_of("cispo", lambda ratio, a, low, high: (ratio * a).masked_fill(outside(ratio, low, high), 0))
        ),
        "cispo: takes PPO's minimum: CISPO bounds the weight whichever sign A has": (
            mistake_of("cispo", lambda ratio, a, low, high: torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a))
        ),
        "cispo: does not bound the ratio": mistake_of("cispo", lambda ratio, a, low, high: ratio * a),
        "lacks the advantage: the weight is the ratio's part times A": (
            lambda ratio, a, low, high, method: right(ratio, a, low, high, method) / a
        ),
        "lost the advantage's sign: negative tokens must become less probable": (
            lambda ratio, a, low, high, method: right(ratio, a, low, high, method).abs()
        ),
        "has the wrong sign: the weight is of J, which grows, not of the loss": (
            lambda ratio, a, low, high, method: -right(ratio, a, low, high, method)
        ),
    },
)

EXERCISES = [SEQUENCE_RATIO, TOKEN_WEIGHTS]
