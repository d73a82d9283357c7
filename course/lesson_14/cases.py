"""Cases and known mistakes of lesson 14."""

import math

import torch

from course.cases import Case, Exercise, bools, floats


def random_rewards(rng):
    group_size, most = torch.randint(3, 7, (1,), generator=rng).item(), torch.randint(1, 3, (1,), generator=rng).item()
    rewards = (torch.rand(5 * group_size, generator=rng) < 0.6).float()
    return {"rewards": rewards, "group_size": group_size, "most": most}


def first_right(rewards, group_size, most, flip=False):
    groups = (rewards > 0).view(-1, group_size)
    groups = groups.flip(1) if flip else groups
    chosen = groups & (groups.cumsum(1) <= most)
    return (chosen.flip(1) if flip else chosen).flatten()


KEPT = Exercise(
    "14.1",
    "kept",
    cases=[
        # The first puzzle has three right answers, of which two are kept; the second has none.
        Case(
            {"rewards": floats([1, 0, 1, 1, 0, 0, 0, 0]), "group_size": 4, "most": 2}, bools([1, 0, 1, 0, 0, 0, 0, 0])
        ),
        Case({"rewards": floats([0, 1, 1, 1, 1, 0]), "group_size": 3, "most": 1}, bools([0, 1, 0, 1, 0, 0])),
    ],
    random=random_rewards,
    mistakes={
        "keeps all right answers: the limit `most` is missing": lambda rewards, group_size, most: rewards > 0,
        "keeps wrong answers, too": lambda rewards, group_size, most: torch.ones_like(rewards).bool(),
        "keeps the wrong answers": lambda rewards, group_size, most: rewards <= 0,
        "has one limit for all puzzles together": (
            lambda rewards, group_size, most: (rewards > 0) & ((rewards > 0).cumsum(0) <= most)
        ),
        "keeps the last right answers of a puzzle, not the first": (
            lambda rewards, group_size, most: first_right(rewards, group_size, most, flip=True)
        ),
        "keeps one answer more per puzzle than `most`": (
            lambda rewards, group_size, most: first_right(rewards, group_size, most + 1)
        ),
        "keeps the right ones among the first `most` answers of a puzzle": (
            lambda rewards, group_size, most: (rewards > 0) & (torch.arange(len(rewards)) % group_size < most)
        ),
        "takes the puzzles for columns: the answers to a puzzle follow each other": (
            lambda rewards, group_size, most: (
                (rewards > 0).view(group_size, -1) & ((rewards > 0).view(group_size, -1).cumsum(0) <= most)
            ).flatten()
        ),
    },
)


def random_counts(rng):
    num_samples = torch.randint(6, 17, (1,), generator=rng).item()
    k = torch.randint(2, 5, (1,), generator=rng).item()
    return {
        "num_right": torch.randint(0, num_samples, (6,), generator=rng),
        "num_samples": num_samples,
        "k": k,
    }


def estimate(num_right, num_samples, k):
    return [1 - math.comb(num_samples - right, k) / math.comb(num_samples, k) for right in num_right]


PASS_AT_K = Exercise(
    "14.2",
    "pass_at_k",
    cases=[
        # 1 − C(3, 2)/C(4, 2) = 1 − 3/6 for the first puzzle, and 0 for the second.
        Case({"num_right": torch.tensor([1, 0]), "num_samples": 4, "k": 2}, 0.25),
        # Of 4 answers 3 are right: among any two is a right one.
        Case({"num_right": torch.tensor([3]), "num_samples": 4, "k": 2}, 1.0),
    ],
    random=random_counts,
    mistakes={
        "is 1 − (1 − p)^k: with p from the same few answers, that is biased": (
            lambda num_right, num_samples, k: (1 - (1 - num_right / num_samples) ** k).mean()
        ),
        "is pass@1: k is not used": lambda num_right, num_samples, k: (num_right / num_samples).mean(),
        "takes the mean of num_right first: pass@k is not linear in it": (
            lambda num_right, num_samples, k: 1 - (1 - (num_right / num_samples).mean()) ** k
        ),
        "is the probability that all k are right": (
            lambda num_right, num_samples, k: (
                sum(math.comb(right, k) for right in num_right.tolist()) / (len(num_right) * math.comb(num_samples, k))
            )
        ),
        "is the probability that none of the k is right": (
            lambda num_right, num_samples, k: 1 - sum(estimate(num_right.tolist(), num_samples, k)) / len(num_right)
        ),
        "is the sum over the puzzles, not the mean": (
            lambda num_right, num_samples, k: sum(estimate(num_right.tolist(), num_samples, k))
        ),
        "is the fraction of puzzles with a right answer among all num_samples": (
            lambda num_right, num_samples, k: (num_right > 0).float().mean()
        ),
    },
)

EXERCISES = [KEPT, PASS_AT_K]
