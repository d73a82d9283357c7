"""Lesson 4: length and truncation. Write the three functions, then run `python -m course.check 4`.

N is the number of responses, T the number of positions. mask [N, T], of bool, is True on response
tokens. What loss [N, T] holds elsewhere must not matter.
"""

import torch


def token_mean(loss, mask):
    """The mean of loss [N, T] over all response tokens, a number: every token counts alike.

    1/Σ_i|o_i| · Σ_i Σ_t loss_it        (DAPO, Yu et al. 2025; policy_loss in grpo.py)
    """
    raise NotImplementedError


def mean_of_means(loss, mask):
    """The mean over responses of the means over their tokens, a number: each response counts alike.

        1/N · Σ_i 1/|o_i| · Σ_t loss_it     (GRPO as first published; acpo.py and sapo.py)

    Pay attention to a row without response tokens: it counts with mean 0, and must not give NaN.
    """
    raise NotImplementedError


def overlong_penalty(length, max_tokens, buffer):
    """What DAPO adds to the reward of a response of `length` tokens: 0 to −1, a float.

    length: tokens of the response, an int up to max_tokens. max_tokens: L. buffer: B, an int.

        0 if length ≤ L − B, otherwise (L − B − length) / B
                                            (Yu et al. 2025; overlong_penalty in dapo.py)

    Pay attention to the sign, and to B = 0: then there is no penalty, and no division by zero.
    """
    raise NotImplementedError


# 4.3 (open)  A group has responses of 10, 100 and 1000 tokens. The shortest is wrong and the others
# are right: A is −2/√3, 1/√3 and 1/√3 in grpo.py. What is A times the weight of one token of each,
# and of each response as a whole, with both aggregations? What does each of them teach most, and
# what would it be if the longest were the wrong one?
