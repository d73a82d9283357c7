"""Cases and known mistakes of lesson 2."""

import math

import torch

from course.cases import Case, Exercise, bools, floats, random_logp, random_mask

# ----------------------------------------------------------------------------------------------------- clipped_loss


def loss_case(ratios, advantages, mask, expected, clip_low=0.2, clip_high=0.24):
    old_logp = torch.full((len(ratios), len(ratios[0])), -2.0)
    arguments = {
        "logp": old_logp + floats(ratios).log(),
        "old_logp": old_logp,
        "advantages": floats(advantages),
        "mask": bools(mask),
        "clip_low": clip_low,
        "clip_high": clip_high,
    }
    return Case(arguments, expected)


def random_loss(rng):
    mask = random_mask(rng)
    old_logp = random_logp(rng, mask.shape)
    logp = old_logp + 0.3 * torch.randn(mask.shape, generator=rng)
    advantages = torch.randn(len(mask), 1, generator=rng).expand(mask.shape).clone()
    rest = {"advantages": advantages, "mask": mask, "clip_low": 0.2, "clip_high": 0.28}
    return {"logp": logp, "old_logp": old_logp} | rest


def surrogate(logp, old_logp, advantages, clip_low, clip_high, choose=torch.min):
    ratio = (logp - old_logp).exp()
    return choose(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def tokens_mean(values, mask):
    return values[mask].sum() / mask.sum()


def clip_alone(logp, old_logp, advantages, mask, clip_low, clip_high):
    return -tokens_mean((logp - old_logp).exp().clamp(1 - clip_low, 1 + clip_high) * advantages, mask)


def without_ratio_gradient(logp, old_logp, advantages, mask, clip_low, clip_high):
    return -tokens_mean(surrogate(logp, old_logp, advantages, clip_low, clip_high), mask).detach()


def weighted_logp(logp, old_logp, advantages, mask, clip_low, clip_high):
    weights = surrogate(logp, old_logp, advantages, clip_low, clip_high).detach()
    return -tokens_mean(weights * logp, mask)


CLIPPED_LOSS = Exercise(
    "2.1",
    "clipped_loss",
    gradient="logp",
    cases=[
        # min(1.5 · 1, 1.24 · 1) = 1.24
        loss_case([[1.5]], [[1]], [[1]], -1.24),
        # min(0.5 · −1, 0.8 · −1) = −0.8
        loss_case([[0.5]], [[-1]], [[1]], 0.8),
        # min(1.5 · −1, 1.24 · −1) = −1.5: too probable and to be punished, so the clip does not hold it back
        loss_case([[1.5]], [[-1]], [[1]], 1.5),
        # Three tokens: 1.1 · 2 = 2.2, min(0.5, 0.8) · 2 = 1, and 0.9 · −1 = −0.9; the others are padding.
        loss_case(
            [[1.1, 0.5, 3], [0.9, 3, 3]],
            [[2, 2, 2], [-1, -1, -1]],
            [[1, 1, 0], [1, 0, 0]],
            -(2.2 + 1 - 0.9) / 3,
        ),
    ],
    random=random_loss,
    padding="logp old_logp advantages",
    deep="logp old_logp",
    mistakes={
        "has the wrong sign: this is the objective, which should grow; the loss is its negative": (
            lambda logp, old_logp, advantages, mask, low, high: tokens_mean(
                surrogate(logp, old_logp, advantages, low, high), mask
            )
        ),
        "takes the larger of the two products: PPO's objective takes the smaller one (then the sign is turned)": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -tokens_mean(surrogate(logp, old_logp, advantages, low, high, torch.max), mask)
            )
        ),
        "ε is swapped: the range is 1 − clip_low to 1 + clip_high": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -tokens_mean(surrogate(logp, old_logp, advantages, high, low), mask)
            )
        ),
        "clip_high is not used: the upper bound is 1 + clip_high, not 1 + clip_low": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -tokens_mean(surrogate(logp, old_logp, advantages, low, low), mask)
            )
        ),
        "does not clip: the ratio times the advantage alone": (
            lambda logp, old_logp, advantages, mask, low, high: -tokens_mean((logp - old_logp).exp() * advantages, mask)
        ),
        "clips in both directions: without the minimum a token that moved the wrong way gets no gradient either": (
            clip_alone
        ),
        "clamps between clip_low and clip_high: the bounds are 1 − clip_low and 1 + clip_high": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -tokens_mean(surrogate(logp, old_logp, advantages, 1 - low, high - 1), mask)
            )
        ),
        "the ratio is upside down: it is exp(logp − old_logp)": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -tokens_mean(surrogate(old_logp, logp, advantages, low, high), mask)
            )
        ),
        "the ratio lacks exp: logp − old_logp is its logarithm": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -tokens_mean(surrogate((logp - old_logp).log(), 0, advantages, low, high), mask)
            )
        ),
        "divides log-probabilities: the ratio of probabilities is exp(logp − old_logp)": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -tokens_mean(surrogate((logp / old_logp).log(), 0, advantages, low, high), mask)
            )
        ),
        "wrong denominator: takes the mean of the responses' means; grpo.py divides by all response tokens together": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -((surrogate(logp, old_logp, advantages, low, high) * mask).sum(1) / mask.sum(1)).mean()
            )
        ),
        "wrong denominator: divides by all positions, padding included; only response tokens (mask) count": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -(surrogate(logp, old_logp, advantages, low, high) * mask).mean()
            )
        ),
        "wrong denominator: divides by the number of responses; grpo.py divides by the number of response tokens": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -((surrogate(logp, old_logp, advantages, low, high) * mask).sum(1).mean())
            )
        ),
        "padding is not masked: the sum has positions where mask is False": (
            lambda logp, old_logp, advantages, mask, low, high: (
                -(surrogate(logp, old_logp, advantages, low, high).sum() / mask.sum())
            )
        ),
        "ignores mask: takes the mean over all positions": (
            lambda logp, old_logp, advantages, mask, low, high: -surrogate(logp, old_logp, advantages, low, high).mean()
        ),
        "has no gradient: logp must not be detached (.detach(), .item(), .data)": without_ratio_gradient,
        "multiplies log π by the clipped product: the ratio itself carries the gradient in PPO": weighted_logp,
    },
)

# ------------------------------------------------------------------------------------------- generalized_advantages


def random_values(rng):
    mask = random_mask(rng)
    values = torch.randn(mask.shape, generator=rng) * mask  # zero elsewhere, as ppo.py has them
    return {
        "rewards": torch.randn(len(mask), generator=rng),
        "values": values,
        "mask": mask,
        "gamma": 0.9,
        "lam": 0.8,
    }


def gae(rewards, values, mask, gamma, lam, place="last", after="zero", decay=None, masked=True):
    """GAE with one thing different: where the reward is, the value after the last token, the decay, or the mask."""
    num_rows, num_places = mask.shape
    token_rewards = torch.zeros(values.shape)
    last = (mask * torch.arange(num_places)).amax(1)
    if place == "last":
        token_rewards[torch.arange(num_rows), last] = rewards
    elif place == "end":
        token_rewards[:, -1] = rewards
    else:
        token_rewards += rewards[:, None] * mask
    advantages = torch.zeros(values.shape)
    advantage = torch.zeros(num_rows)
    next_value = torch.zeros(num_rows)
    decay = gamma * lam if decay is None else decay
    for t in reversed(range(num_places)):
        coming = torch.where(last == t, values[:, t], next_value) if after == "own" else next_value
        delta = token_rewards[:, t] + gamma * coming - values[:, t]
        advantage = delta + decay * advantage
        if masked:
            advantage = advantage * mask[:, t]
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages


def forward_gae(rewards, values, mask, gamma, lam):
    deltas = gae(rewards, values, mask, gamma, lam, decay=0)
    advantage = torch.zeros(len(mask))
    advantages = torch.zeros(values.shape)
    for t in range(mask.shape[1]):
        advantage = (deltas[:, t] + gamma * lam * advantage) * mask[:, t]
        advantages[:, t] = advantage
    return advantages


def whitened(rewards, values, mask, gamma, lam):
    advantages = gae(rewards, values, mask, gamma, lam)
    of_tokens = advantages[mask]
    variance = (of_tokens - of_tokens.mean()).square().sum() / max(1, len(of_tokens) - 1)
    return (advantages - of_tokens.mean()) / (variance + 1e-8).sqrt() * mask


GENERALIZED_ADVANTAGES = Exercise(
    "2.2",
    "generalized_advantages",
    cases=[
        # One token: 1 + 0 − 0.25.
        Case(
            {"rewards": floats([1]), "values": floats([[0.25]]), "mask": bools([[1]]), "gamma": 0.9, "lam": 0.5},
            floats([[0.75]]),
        ),
        # A prompt's token, two response tokens, padding. Last: 1 − 0.25 = 0.75.
        # Before it: δ = 0.9 · 0.25 − 0.5 = −0.275, and −0.275 + 0.9 · 0.5 · 0.75 = 0.0625.
        Case(
            {
                "rewards": floats([1]),
                "values": floats([[0, 0.5, 0.25, 0]]),
                "mask": bools([[0, 1, 1, 0]]),
                "gamma": 0.9,
                "lam": 0.5,
            },
            floats([[0, 0.0625, 0.75, 0]]),
        ),
        # γ = λ = 1: the reward minus the value, whatever the other values are.
        Case(
            {
                "rewards": floats([2, -1]),
                "values": floats([[0, 0.5, 0.25, 1], [0.5, 0, 0, 0]]),
                "mask": bools([[0, 1, 1, 1], [1, 0, 0, 0]]),
                "gamma": 1.0,
                "lam": 1.0,
            },
            floats([[0, 1.5, 1.75, 1], [-1.5, 0, 0, 0]]),
        ),
    ],
    random=random_values,
    mistakes={
        "has the wrong sign: a reward above the value is a positive surprise": lambda *args: -gae(*args),
        "λ is missing: the surprises to come decay by γ·λ for each token, not by γ": (
            lambda rewards, values, mask, gamma, lam: gae(rewards, values, mask, gamma, lam, decay=gamma)
        ),
        "γ is missing from the decay: the surprises to come decay by γ·λ for each token, not by λ": (
            lambda rewards, values, mask, gamma, lam: gae(rewards, values, mask, gamma, lam, decay=lam)
        ),
        "γ is missing from δ: the next value counts γ times": (
            lambda rewards, values, mask, gamma, lam: gae(rewards, values, mask, 1, lam, decay=gamma * lam)
        ),
        "gives δ alone: the surprises to come belong to the advantage, each γ·λ times the one before": (
            lambda *args: gae(*args, decay=0)
        ),
        "gives the returns: the advantage is what is left of them after subtracting the values": (
            lambda rewards, values, mask, gamma, lam: gae(rewards, values, mask, gamma, lam) + values * mask
        ),
        "adds up from the front: an advantage holds the surprises to come, so begin with the last token": forward_gae,
        "is not masked: positions outside the response must be 0 (a prompt's tokens get the response's here)": (
            lambda *args: gae(*args, masked=False)
        ),
        "puts the reward on every token: it comes once, with the response's last token": (
            lambda *args: gae(*args, place="every")
        ),
        "puts the reward at the end of the row: it belongs to the response's last token, before the padding": (
            lambda *args: gae(*args, place="end")
        ),
        "puts the reward at the end of the row, from where it decays through the padding: it belongs to the response's "
        "last token": lambda *args: gae(*args, place="end", masked=False) * args[2],
        "puts the reward at the end of the row and masks nothing: it belongs to the response's last token, and "
        "positions outside the response are 0": lambda *args: gae(*args, place="end", masked=False),
        "takes a token's own value as the next one at the end: after the last token nothing is to come, V = 0": (
            lambda *args: gae(*args, after="own")
        ),
        "whitens: ppo.py does that as well, but afterwards, in compute_advantages": whitened,
    },
)

# ------------------------------------------------------------------------------------------------------------ k3_kl


def random_policies(rng):
    logp = random_logp(rng, (4, 6))
    return {"logp": logp, "ref_logp": logp + 0.5 * torch.randn(4, 6, generator=rng)}


def k3(difference):
    return difference.exp() - difference - 1


K3_KL = Exercise(
    "2.3",
    "k3_kl",
    gradient="logp",
    cases=[
        # π_ref/π = 1/2: 1/2 − log(1/2) − 1 = log 2 − 1/2
        Case(
            {"logp": floats([[math.log(0.5)]]), "ref_logp": floats([[math.log(0.25)]])}, floats([[math.log(2) - 0.5]])
        ),
        # π_ref/π = 1: 1 − 0 − 1 = 0. π_ref/π = 2: 2 − log 2 − 1 = 1 − log 2
        Case(
            {"logp": floats([[-1, math.log(0.25)]]), "ref_logp": floats([[-1, math.log(0.5)]])},
            floats([[0, 1 - math.log(2)]]),
        ),
    ],
    random=random_policies,
    deep="logp ref_logp",
    mistakes={
        "wrong sign in k3: the difference is ref_logp − logp (π_ref/π), not logp − ref_logp": (
            lambda logp, ref_logp: k3(logp - ref_logp)
        ),
        "has the wrong sign: k3 is never negative": lambda logp, ref_logp: -k3(ref_logp - logp),
        "adds the difference: it is exp(d) − d − 1": (
            lambda logp, ref_logp: (ref_logp - logp).exp() + (ref_logp - logp) - 1
        ),
        "lacks the − 1: k3 is 0 where the two policies agree": (
            lambda logp, ref_logp: (ref_logp - logp).exp() - (ref_logp - logp)
        ),
        "is k1, logp − ref_logp: right in the mean, but it can be negative": lambda logp, ref_logp: logp - ref_logp,
        "is k1 with the wrong sign, ref_logp − logp": lambda logp, ref_logp: ref_logp - logp,
        "is k2, half the square of the difference": lambda logp, ref_logp: (ref_logp - logp).square() / 2,
        "is the ratio π_ref/π alone, or less 1": lambda logp, ref_logp: (ref_logp - logp).exp() - 1,
        "takes the mean: one number for each token is asked for": lambda logp, ref_logp: k3(ref_logp - logp).mean(),
        "has no gradient: logp must not be detached (.detach(), .item(), .data)": (
            lambda logp, ref_logp: k3(ref_logp - logp).detach()
        ),
    },
)

EXERCISES = [CLIPPED_LOSS, GENERALIZED_ADVANTAGES, K3_KL]
