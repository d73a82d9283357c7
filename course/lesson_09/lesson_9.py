"""Lesson 9: reward hacking. Write the two functions, then run `python -m course.check 9`.

N is the number of responses.
"""

import torch


def closed_rewards(format, parsed, correct):
    """The rewards of Knights & Knaves by a rule that fails closed, [N], of float.

    format, parsed, correct: [N], of bool. The tags are in place; the answer could be read; what was
    read is right. parsed means nothing where format is False, and correct means nothing where
    parsed is False.

        +1 for the format, otherwise −1
        +2 for a right answer, −1.5 for a wrong one that was read in the right format, otherwise −2
                                          (AR-Lopti paper, Table 4; score in rewards/kk.py)

    Pay attention to what is not known: nothing is right that was not read.
    """
    raise NotImplementedError


def paid_wrongly(rewards, correct, full):
    """How much a rule leaks: the share of wrong responses among those that it paid in full.

    rewards [N], of float. correct [N], of bool: by another rule, stricter than the one that paid.
    full: what a right response is paid; a response with at least that much was paid in full.

    The share is one number: a Python float, or a tensor without dimensions.

    Pay attention to the case that no response was paid in full: then nothing leaked, and it is 0.
    """
    raise NotImplementedError


# 9.3 (open)  Which holes has kk.score, the papers' own rule, that the lesson's table lacks? Find
# two texts that get +3 although no teacher would accept them. Does `strict` refuse them? And is
# there one that `strict` accepts? "Mary Ann", in the docstring of score, does not count.
#
#     from rewards import kk
#     kk.score(text, {"Ann": True, "Ben": False}, strict=True)
