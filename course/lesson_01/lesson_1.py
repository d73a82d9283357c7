"""Lesson 1: baselines and groups. Write the two functions, then run `python -m course.check 1`.

N is the number of responses, G the size of a group. The G responses to a prompt follow each other
in rewards [N]: group i is rewards[i·G : (i + 1)·G].
"""

import torch


def leave_one_out(rewards, group_size):
    """RLOO's advantages, [N]: each reward minus the mean of its group's other rewards.

    rewards [N], of float. group_size: G, at least 2.

        A_i = r_i − 1/(G − 1) · Σ_{j≠i} r_j    (Ahmadian et al. 2024; compute_advantages in rloo.py)

    Pay attention to the number of others. No loop is needed: the sum of the others is the group's
    sum minus the response's own reward.
    """
    raise NotImplementedError


def group_advantages(rewards, group_size):
    """GRPO's advantages, [N]: rewards normalised in their group.

    rewards [N], of float. group_size: G, at least 2.

        A_i = (r_i − mean) / (std + 1e-6)        (Shao et al. 2024; compute_advantages in grpo.py)

    Pay attention to the standard deviation: in grpo.py it has ddof 1 (the sum of squares is divided
    by G − 1). In a group of equal rewards every advantage is exactly 0. But the mean of eight times
    0.7 is rounded, and divided by 1e-6 the error is large: see how grpo.py avoids it.
    """
    raise NotImplementedError


# 1.3 (open)  Each response of a group of 8 is right with probability 2/8, independently: the number
# of right ones differs from group to group. The policy's only weight is the logit of being right,
# and rewards are 1 and 0. What mean and variance has the group's gradient, 1/8 · Σ A·∇log π, with
# no baseline, the group's mean, leave one out, and GRPO's normalisation? Also divide each variance
# by its squared mean, which a learning rate does not change.
