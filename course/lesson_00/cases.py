"""Cases and known mistakes of lesson 0."""

import math

import torch

from course.cases import Case, Exercise, bools, floats, random_logp, random_mask


def random_logits(rng):
    logits = 3 * torch.randn(4, 6, 7, generator=rng)
    return {"logits": logits, "ids": torch.randint(7, (4, 6), generator=rng)}


def random_batch(rng):
    mask = random_mask(rng)
    return {"logp": random_logp(rng, mask.shape), "rewards": torch.randn(len(mask), generator=rng), "mask": mask}


def chosen(values, ids):
    return values.gather(-1, ids[:, :, None])[:, :, 0]


def objective(logp, rewards, mask):
    return rewards[:, None] * logp * mask


TOKEN_LOG_PROBS = Exercise(
    "0.1",
    "token_log_probs",
    gradient="logits",
    cases=[
        # The weights e^logit are 1, 1, 2: probabilities 1/4, 1/4, 1/2. Then 1, 3, 4: 1/8, 3/8, 1/2.
        Case(
            {"logits": floats([[[0, 0, math.log(2)], [0, math.log(3), math.log(4)]]]), "ids": torch.tensor([[2, 0]])},
            floats([[math.log(1 / 2), math.log(1 / 8)]]),
        ),
        # e^1000 is too large for a float, and e^-1000 too small: log π = 0 − 1000 and 0.
        Case(
            {"logits": floats([[[1000, 0], [1000, 0]]]), "ids": torch.tensor([[1, 0]])},
            floats([[-1000, 0]]),
        ),
    ],
    random=random_logits,
    mistakes={
        "gives probabilities: their logarithm is asked for": lambda logits, ids: chosen(logits.softmax(-1), ids),
        "gives the logits themselves: they must be normalised first, by log_softmax over the vocabulary": chosen,
        "normalises over the wrong dimension: the probabilities of the vocabulary (the last dimension) sum to 1": (
            lambda logits, ids: chosen(logits.log_softmax(1), ids)
        ),
        "takes the logarithm to base 2: natural logarithms are used everywhere": (
            lambda logits, ids: chosen(logits.log_softmax(-1), ids) / math.log(2)
        ),
        "gives −inf for a small probability: softmax rounds it to 0 before the logarithm. log_softmax does not": (
            lambda logits, ids: chosen(logits.softmax(-1).log(), ids)
        ),
        "overflows with large logits: exp(1000) is infinite. log_softmax subtracts the largest logit first": (
            lambda logits, ids: chosen(logits - logits.exp().sum(-1, keepdim=True).log(), ids)
        ),
        "is shifted by one: here logits[:, t] already is what ids[:, t] was drawn from": (
            lambda logits, ids: chosen(logits[:, :-1].log_softmax(-1), ids[:, 1:])
        ),
        "sums over the tokens: one number for each token is asked for": (
            lambda logits, ids: chosen(logits.log_softmax(-1), ids).sum(1)
        ),
        "keeps a last dimension of size 1 from gather: take it away with [..., 0]": (
            lambda logits, ids: logits.log_softmax(-1).gather(-1, ids[:, :, None])
        ),
        "has the wrong sign: a log-probability is never positive": (
            lambda logits, ids: -chosen(logits.log_softmax(-1), ids)
        ),
        "gives the most probable token's log-probability, not the chosen token's": (
            lambda logits, ids: logits.log_softmax(-1).amax(-1)
        ),
    },
)

REINFORCE_LOSS = Exercise(
    "0.2",
    "reinforce_loss",
    gradient="logp",
    cases=[
        # 2 · (−1 − 2) = −6, over 2 tokens, with the sign turned round; −8 is padding.
        Case({"logp": floats([[-1, -2, -8]]), "rewards": floats([2]), "mask": bools([[1, 1, 0]])}, 6 / 2),
        # 2 · (−1 − 2) + (−1) · (−0.5) = −5.5, over 3 tokens.
        Case(
            {
                "logp": floats([[-1, -2, -8], [-0.5, -8, -8]]),
                "rewards": floats([2, -1]),
                "mask": bools([[1, 1, 0], [1, 0, 0]]),
            },
            5.5 / 3,
        ),
    ],
    random=random_batch,
    padding="logp",
    mistakes={
        "has the wrong sign: this is the objective, which should grow; the loss is its negative": (
            lambda logp, rewards, mask: objective(logp, rewards, mask).sum() / mask.sum()
        ),
        "divides by the number of responses, as textbooks do: reinforce.py divides by the number of response tokens": (
            lambda logp, rewards, mask: -objective(logp, rewards, mask).sum(1).mean()
        ),
        "wrong denominator: takes the mean of the responses' means; all response tokens together are the divisor": (
            lambda logp, rewards, mask: -(objective(logp, rewards, mask).sum(1) / mask.sum(1)).mean()
        ),
        "wrong denominator: divides by all positions, padding included; only response tokens (mask) count": (
            lambda logp, rewards, mask: -objective(logp, rewards, mask).mean()
        ),
        "is not divided: the sum grows with the batch; divide by the number of response tokens": (
            lambda logp, rewards, mask: -objective(logp, rewards, mask).sum()
        ),
        "padding is not masked: the sum has positions where mask is False": (
            lambda logp, rewards, mask: -(rewards[:, None] * logp).sum() / mask.sum()
        ),
        "ignores mask: takes the mean over all positions": (
            lambda logp, rewards, mask: -(rewards[:, None] * logp).mean()
        ),
        "subtracts the mean reward: a good idea, and lesson 1's subject; here the rewards are used as they are": (
            lambda logp, rewards, mask: -objective(logp, rewards - rewards.mean(), mask).sum() / mask.sum()
        ),
        "multiplies probabilities, not log-probabilities: the gradient of π needs the factor 1/π to be ∇log π": (
            lambda logp, rewards, mask: -objective(logp.exp(), rewards, mask).sum() / mask.sum()
        ),
        "ignores the rewards: it makes every response more probable": (
            lambda logp, rewards, mask: -(logp * mask).sum() / mask.sum()
        ),
        "has no gradient: logp must not be detached (.detach(), .item(), .data)": (
            lambda logp, rewards, mask: (-objective(logp, rewards, mask).sum() / mask.sum()).detach()
        ),
    },
)

EXERCISES = [TOKEN_LOG_PROBS, REINFORCE_LOSS]
