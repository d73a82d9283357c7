"""Lesson 14: solutions."""

import math

import torch


def kept(rewards, group_size, most):
    is_right = (rewards > 0).view(-1, group_size)
    return (is_right & (is_right.cumsum(1) <= most)).flatten()


def pass_at_k(num_right, num_samples, k):
    wrong = [num_samples - right for right in num_right.tolist()]
    return torch.tensor(
        [1 - math.comb(number, k) / math.comb(num_samples, k) for number in wrong]
    ).mean()
