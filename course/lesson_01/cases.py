"""Cases and known mistakes of lesson 1."""

import math

import torch

from course.cases import Case, Exercise, floats


def random_rewards(rng):
    return {"rewards": torch.randn(12, generator=rng), "group_size": 4}


def leave_one_out(rewards, group_size, divisor=None):
    groups = rewards.view(-1, group_size)
    others = groups.sum(1, keepdim=True) - groups
    return groups - others / (divisor or group_size - 1)


def of_whole_batch(rewards, group_size):
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def interleaved(function):
    """A function of rewards and group_size on groups of every k-th response, k the number of prompts."""

    def wrong(rewards, group_size):
        groups = rewards.view(group_size, -1).t()
        advantages = function(groups.reshape(-1), group_size)
        return advantages.reshape(-1, group_size).t().reshape(-1)

    return wrong


def normalised(rewards, group_size, epsilon=1e-6, correction=1):
    groups = rewards.view(-1, group_size)
    groups = groups - groups[:, :1]  # so that equal rewards have exactly the mean 0
    std = groups.std(1, keepdim=True, correction=correction)
    return ((groups - groups.mean(1, keepdim=True)) / (std + epsilon)).reshape(-1)


def divided_by_variance(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.var(1, keepdim=True) + 1e-6)).reshape(-1)


def plainly_normalised(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).reshape(-1)


def less_mean(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return (groups - groups.mean(1, keepdim=True)).reshape(-1)


LEAVE_ONE_OUT = Exercise(
    "1.1",
    "leave_one_out",
    cases=[
        # Each is the other's baseline: 1 − 0 and 0 − 1.
        Case({"rewards": floats([1, 0]), "group_size": 2}, floats([1, -1])),
        # Baselines (1 + 2)/2, (3 + 2)/2, (3 + 1)/2; then (0 + 6)/2, (0 + 6)/2, (0 + 0)/2.
        Case({"rewards": floats([3, 1, 2, 0, 0, 6]), "group_size": 3}, floats([1.5, -1.5, 0, -3, -3, 6])),
    ],
    random=random_rewards,
    mistakes={
        "the baseline contains the response's own reward: that is dr_grpo.py's; leave it out": less_mean,
        "wrong denominator: the sum of the others has group_size − 1 rewards, not group_size": (
            lambda rewards, group_size: leave_one_out(rewards, group_size, group_size).reshape(-1)
        ),
        "gives the baseline: the advantage is the reward minus the baseline": (
            lambda rewards, group_size: rewards - leave_one_out(rewards, group_size).reshape(-1)
        ),
        "has the wrong sign: this is the baseline minus the reward": (
            lambda rewards, group_size: -leave_one_out(rewards, group_size).reshape(-1)
        ),
        "compares with all responses of the batch: only those of the same group (to the same prompt) count": (
            of_whole_batch
        ),
        "wrong groups: the responses to one prompt follow each other, so group i is rewards[i·G : (i + 1)·G]": (
            interleaved(lambda rewards, group_size: leave_one_out(rewards, group_size).reshape(-1))
        ),
        "divides by the standard deviation: that is GRPO's; RLOO's advantages are in units of the reward": normalised,
        "wrong shape: give one advantage for each response, [N], in the order of rewards": leave_one_out,
    },
)

GROUP_ADVANTAGES = Exercise(
    "1.2",
    "group_advantages",
    cases=[
        # Mean 1/2; variance (1/4 + 1/4)/(2 − 1) = 1/2: ±(1/2)/√(1/2).
        Case({"rewards": floats([1, 0]), "group_size": 2}, floats([0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)])),
        # A group of equal rewards: 0 / (0 + 1e-6).
        Case({"rewards": floats([3, 3]), "group_size": 2}, floats([0, 0])),
        # The same of a number that float32 rounds: the mean of eight is not exactly the number.
        Case({"rewards": floats([0.7] * 8), "group_size": 8}, floats([0] * 8)),
        # Mean 2, variance (1 + 0 + 1)/2 = 1. Mean 2, variance (4 + 4 + 16)/2 = 12.
        Case(
            {"rewards": floats([1, 2, 3, 0, 0, 6]), "group_size": 3},
            floats([-1, 0, 1, -2 / math.sqrt(12), -2 / math.sqrt(12), 4 / math.sqrt(12)]),
        ),
    ],
    random=random_rewards,
    mistakes={
        "equal rewards do not give exactly 0: their mean is rounded, and 1e-6 makes the error large. Subtract the "
        "group's first reward before you take the mean": plainly_normalised,
        "wrong standard deviation: ddof 0 (the population's); grpo.py has ddof 1, which divides by G − 1": (
            lambda rewards, group_size: normalised(rewards, group_size, correction=0)
        ),
        "division by zero in a group of equal rewards: 0/0 gives NaN; add 1e-6 to the standard deviation": (
            lambda rewards, group_size: normalised(rewards, group_size, epsilon=0)
        ),
        "ddof 0, and division by zero in a group of equal rewards": (
            lambda rewards, group_size: normalised(rewards, group_size, epsilon=0, correction=0)
        ),
        "is not divided by the group's standard deviation: that is dr_grpo.py's advantage": less_mean,
        "divides by the variance: take its square root": divided_by_variance,
        "normalises over the whole batch: mean and standard deviation are those of a group": (
            lambda rewards, group_size: normalised(rewards, len(rewards))
        ),
        "has the wrong sign: this is the mean minus the reward": (
            lambda rewards, group_size: -normalised(rewards, group_size)
        ),
        "wrong groups: the responses to one prompt follow each other, so group i is rewards[i·G : (i + 1)·G]": (
            interleaved(normalised)
        ),
        "divides the rewards without subtracting the group's mean": (
            lambda rewards, group_size: (
                normalised(rewards, group_size)
                + (rewards - less_mean(rewards, group_size))
                / (rewards.view(-1, group_size).std(1).repeat_interleave(group_size) + 1e-6)
            )
        ),
        "wrong shape: give one advantage for each response, [N], in the order of rewards": (
            lambda rewards, group_size: normalised(rewards, group_size).view(-1, group_size)
        ),
    },
)

EXERCISES = [LEAVE_ONE_OUT, GROUP_ADVANTAGES]
