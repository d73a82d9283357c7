"""Lesson 15: credit for turns. Write two functions, then run `python -m course.check 15`.

N is the number of conversations, K the number of turns of the longest, M of all turns together.
"""

import torch


def turn_returns(rewards, mask, gamma):
    """The return of every turn: its reward plus gamma times the return of the next turn, [N, K].

    rewards [N, K]: the reward of each turn; outside the mask they may be anything. mask [N, K], of
    bool: True for the turns that a conversation has, which are its first ones. The result is 0
    outside the mask.                         (discounted_returns in gigpo.py)
    """
    raise NotImplementedError


def state_advantages(returns, states):
    """A_turn of every turn, [M]: its return, normalised over all turns with an equal state.

        (R − mean) / (std + 1e-6)                 (turn_advantages in gigpo.py)

    returns [M], states [M] (int64, equal numbers are equal states). std divides by the number of
    turns minus 1. A turn that is alone in its state gets exactly 0.
    """
    raise NotImplementedError


# 15.3 (open)  A task's states can be too fine (no two turns are ever in the same one) or too coarse
# (turns that need different moves share one). What does GiGPO become in each case? For guess, take
# the last reply alone ("higher", "lower") as the state: which turns does it compare wrongly? Which
# metric of a run shows the first case, and can any show the second?
