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
    by G − 1). In a group of equal rewards every advantage is 0, and nothing may become NaN.
    """
    raise NotImplementedError


# 1.3 (open)  In a group of 8 the policy is right with probability 2/8. How much of the gradient's
# variance does each baseline remove: none, the group's mean, leave one out, GRPO's normalisation?
