"""Lesson 14: solutions."""

import math

import torch


def kept(rewards, group_size, most):
    is_right = (rewards > 0).view(-1, group_size)
    return (is_right & (is_right.cumsum(1) <= most)).flatten()


def pass_at_k(num_right, num_samples, k):
    wrong = [num_samples - right for right in num_right.tolist()]
    return torch.tensor([1 - math.comb(number, k) / math.comb(num_samples, k) for number in wrong]).mean()


# 14.3  With p = 332/960 = 0.35 of the first round: expert iteration has the weight 1 for right
# and 0 for wrong answers, reinforce.py 0.65 and −0.35. The baseline 0 becomes the mean reward p.
# Without a limit the mean gradient is the same, since the mean of ∇log π is 0, and the noise is
# smaller with the baseline. `most` leaves out right answers to easy puzzles: their weight falls,
# as it does in GRPO, where a right answer to an easy puzzle has a small advantage. More passes
# over the same answers need a ratio and a clip.
