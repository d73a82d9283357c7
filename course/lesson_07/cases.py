"""Cases and known mistakes of lesson 7."""

import math

import torch

from course.cases import Case, Exercise, bools, floats, random_mask


def random_logits(rng):
    return {"logits": 3 * torch.randn(3, 5, 8, generator=rng)}


def random_entropies(rng):
    mask = random_mask(rng, num_rows=6)
    return {"entropy": 3 * torch.rand(mask.shape, generator=rng), "mask": mask, "share": 0.3}


def entropy(logits, dim=-1):
    log_probs = logits.log_softmax(dim)
    return -(log_probs.exp() * log_probs).sum(dim)


def through_softmax(logits):
    probabilities = logits.softmax(-1)
    return -(probabilities * probabilities.log()).sum(-1)


ENTROPY = Exercise(
    "7.1",
    "entropy",
    cases=[
        # Weights e^logit 2, 1, 1: 1/2 · log 2 + 2 · 1/4 · log 4 = 1.5 · log 2. Four equal ones: log 4.
        Case({"logits": floats([math.log(2), 0, 0])}, torch.tensor(1.5 * math.log(2))),
        Case({"logits": floats([[0, 0, 0, 0], [1, 1, 1, 1]])}, floats([math.log(4), math.log(4)])),
        # e^−1000 rounds to 0, and 0 · log 0 would be NaN: the distribution is certain, its entropy 0.
        Case({"logits": floats([[1000, 0]])}, floats([0])),
    ],
    random=random_logits,
    mistakes={
        "has the wrong sign: an entropy is never negative": lambda logits: -entropy(logits),
        "gives NaN where softmax rounds a probability to 0, because 0 · log 0 = NaN: begin with log_softmax": (
            through_softmax
        ),
        "is in bits: natural logarithms are used everywhere, so the unit is nats": (
            lambda logits: entropy(logits) / math.log(2)
        ),
        "takes the mean over the vocabulary: an entropy is a sum over it": (
            lambda logits: entropy(logits) / logits.shape[-1]
        ),
        "sums over the wrong dimension: the vocabulary is the last one": lambda logits: entropy(logits, 0),
        "weighs with the logits: the weights are the probabilities": (
            lambda logits: -(logits * logits.log_softmax(-1)).sum(-1)
        ),
        "lacks the weights: each −log p counts p times": lambda logits: -logits.log_softmax(-1).sum(-1),
        "is the most probable token's −log p: an entropy is the mean of −log p over the distribution": (
            lambda logits: -logits.log_softmax(-1).amax(-1)
        ),
        "gives one number: an entropy for each position is asked for": lambda logits: entropy(logits).mean(),
        "gives the terms of the sum: sum them over the vocabulary": (
            lambda logits: -logits.softmax(-1) * logits.log_softmax(-1)
        ),
    },
)


def top(entropy, mask, share, count=math.ceil, strict=False, lowest=False):
    of_responses = entropy[mask].sort(descending=not lowest).values
    threshold = of_responses[max(1, count(share * len(of_responses))) - 1]
    if strict:
        return mask & (entropy > threshold)
    return mask & ((entropy <= threshold) if lowest else (entropy >= threshold))


def by_row(entropy, mask, share):
    rows = [top(entropy[i : i + 1], mask[i : i + 1], share) for i in range(len(mask))]
    return torch.cat(rows)


def with_padding(entropy, mask, share):
    return mask & top(entropy, torch.ones_like(mask), share)


def without_ties(entropy, mask, share):
    number = math.ceil(share * int(mask.sum()))
    flat = entropy.masked_fill(~mask, -math.inf).flatten()
    chosen = torch.zeros(flat.shape, dtype=torch.bool)
    chosen[flat.sort(descending=True, stable=True).indices[:number]] = True
    return chosen.view(mask.shape)


def by_size(entropy, mask, share):
    return mask & (entropy >= share * entropy[mask].max())


def by_quantile(entropy, mask, share):
    return mask & (entropy >= entropy[mask].quantile(1 - share))


TOP_ENTROPY_MASK = Exercise(
    "7.2",
    "top_entropy_mask",
    cases=[
        # Half of 4 tokens: the 2 largest of 3, 1, 2, 0.5. The entropy 9 is padding's.
        Case(
            {"entropy": floats([[3, 1, 2, 0.5, 9]]), "mask": bools([[1, 1, 1, 1, 0]]), "share": 0.5},
            bools([[1, 0, 1, 0, 0]]),
        ),
        # ⌈0.4 · 3⌉ = 2: the 2 largest of 3, 1 and 2.
        Case({"entropy": floats([[3, 1, 2]]), "mask": bools([[1, 1, 1]]), "share": 0.4}, bools([[1, 0, 1]])),
        # ⌈0.6 · 3⌉ = 2, which is also the nearest number.
        Case({"entropy": floats([[3, 1, 2]]), "mask": bools([[1, 1, 1]]), "share": 0.6}, bools([[1, 0, 1]])),
        # Half of 6 tokens in two rows: 3 of them, all in the first row.
        Case(
            {
                "entropy": floats([[3, 2.5, 2], [1, 0.5, 0.2]]),
                "mask": bools([[1, 1, 1], [1, 1, 1]]),
                "share": 0.5,
            },
            bools([[1, 1, 1], [0, 0, 0]]),
        ),
        # ⌈0.2 · 4⌉ = 1, but three tokens have the largest entropy: all three enter.
        Case({"entropy": floats([[2, 2, 1, 2]]), "mask": bools([[1, 1, 1, 1]]), "share": 0.2}, bools([[1, 1, 0, 1]])),
    ],
    random=random_entropies,
    padding="entropy",
    mistakes={
        "chooses in each response: τ is one number for the whole mini-batch": by_row,
        "padding is not masked: positions where mask is False must not be among those that are counted": with_padding,
        "padding is not masked: positions where mask is False are chosen": (
            lambda entropy, mask, share: entropy >= entropy[top(entropy, mask, share)].min()
        ),
        "chooses the tokens of lowest entropy": lambda *args: top(*args, lowest=True),
        "leaves out τ itself: a token is chosen if its entropy is at least τ, the k-th largest": (
            lambda *args: top(*args, strict=True)
        ),
        "leaves out tokens that tie with τ: all of them enter": without_ties,
        "rounds down: k is ⌈share · n⌉": lambda *args: top(*args, count=math.floor),
        "rounds to the nearest: k is ⌈share · n⌉, rounded up": lambda *args: top(*args, count=round),
        "compares with a share of the largest entropy: τ is the k-th largest entropy, k = ⌈share · n⌉": by_size,
        "takes an interpolated quantile: τ is the k-th largest entropy itself, k = ⌈share · n⌉": by_quantile,
        "gives numbers, not True and False: a mask has dtype bool": lambda *args: top(*args).float(),
    },
)

EXERCISES = [ENTROPY, TOP_ENTROPY_MASK]
