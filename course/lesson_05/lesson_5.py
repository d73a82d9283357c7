"""Lesson 5: AR and Lopti. Write the two functions, then run `python -m course.check 5`.

N is the number of responses, T the number of positions.
"""

import torch


def ar_weight(old_logp, alpha):
    """What AR multiplies each token's advantage by, [N, T].

    old_logp [N, T]: log-probabilities before the update. alpha: α, in [0, 1].

        α·π_old + 1 − α    (AR-Lopti paper, arXiv 2505.12929, eq. 4; ar_weight in grpo_ar_lopti.py)

    Pay attention: π_old is a probability, and old_logp is its logarithm.
    """
    raise NotImplementedError


def lopti_stages(logp, mask, eta):
    """The tokens that each stage of Lopti updates: (low, high), two [N, T] of bool.

    logp [N, T]: log-probabilities before the update. mask [N, T], of bool: True on response tokens;
    no other position is in a stage. eta: η, in [0, 1].

        low: π ≤ η, updated first        high: π > η
                            (AR-Lopti paper, Algorithm 1; in_stage in grpo_ar_lopti.py)

    Pay attention to π = η, which is low, and to η = 0, with which no token may be low: compare
    logarithms, because exp(−1000) rounds to 0.
    """
    raise NotImplementedError


# 5.3 (open)  The paper finds (fig. 6b) that training collapses if the high stage comes first. Why
# should it? Here it does not (benchmarks/kk_tiny/stages.md): what is different? And is GRPO the
# right run to compare it with?
