"""Lesson 3: sampler and trainer. Write the two functions, then run `python -m course.check 3`.

N is the number of responses, T the number of positions.
"""

import torch


def sampler_gap(sampler_logp, trainer_logp, mask):
    """How far sampler and trainer are apart: the trainers' metric sampler_gap, a number in nats.

    sampler_logp, trainer_logp: [N, T], log-probabilities of the same tokens. mask [N, T], of bool:
    True on response tokens. What the others hold elsewhere must not matter.

        1/Σ_i|o_i| · Σ_i Σ_t |log π_sampler − log π_trainer|        (of_tokens, runtime/metrics.py)

    Pay attention to the absolute value, and to the divisor: all response tokens together.
    """
    raise NotImplementedError


def truncated_weights(trainer_logp, sampler_logp, cap):
    """The weights of truncated importance sampling, [N, T], without gradient.

    trainer_logp, sampler_logp: [N, T]. cap: C, the largest weight.

        w = min(π_old/π_sampler, C)        (Yao et al. 2025; sampler_correction in grpo_tis.py)

    π_old is the trainer's probability before the update. Pay attention to the direction of the
    ratio, and to the gradient: w is a constant, even if trainer_logp carries a gradient.
    """
    raise NotImplementedError


# 3.3 (open)  Run grpo.py with and without a sync of the weights, or let sampler and trainer have
# different temperatures. What does sampler_gap show in each case, and at which step? (On a GPU take
# out sampler.sleep, too; --no_stop_at_gap lets the run go on.)
