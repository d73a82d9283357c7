"""Lesson 13: stale responses. Write the two functions, then run `python -m course.check 13`.

N is the number of responses, T the number of positions.
"""

import torch


def versions(num_steps, lag):
    """Which weights sample each step, [num_steps], of int64.

    Entry i is for step i + 1: the number of the step after which its weights were made, 0 for the
    weights before training. With lag 0 a step is sampled by the weights after the step before.

    Pay attention to the first steps: there are no weights from before the start.
    """
    raise NotImplementedError


def decoupled_loss(logp, old_logp, sampler_logp, advantages, mask, low, high, cap):
    """The loss of the decoupled objective, a number: −J.

    logp, old_logp, sampler_logp: [N, T], of the policy that is updated, of the trainer's weights
    before the step's updates, and of the weights that sampled. advantages [N]. mask [N, T], bool.

        J = 1/Σ|o_i| · Σ_i Σ_t w · min[ρ·A, clip(ρ, 1 − low, 1 + high)·A]
        ρ = π/π_old        w = min(π_old/π_sampler, cap)

    (AReaL, arXiv 2505.24298; policy_loss in grpo_stale.py with --correction tis)

    Pay attention to what ρ divides by, and to the mask, outside of which anything may stand.
    """
    raise NotImplementedError


# 13.3 (open)  A step takes 200 GPU-seconds of sampling and 200 of updates, and the longest response
# 20 s on any number of GPUs. Switching between sampling and training takes 0 s. From how many GPUs
# on is a sampler of its own always faster than taking turns? What is the speedup with 64 GPUs, and
# what does the lag of 1 cost in your opinion? The formula is in docs/scaling.md; runs with a lag of
# 2, 4 and 8 are in benchmarks/kk_tiny/lag.md.

# 13.4 (open)  Build asynchronous GSPO with AR and Lopti:
#     python -m tools.combine grpo_async gspo grpo_ar_lopti --out mine.py
# Read `python -m tools.diff grpo_async mine.py`. Which two parts shrink the same tokens? Over which
# tokens is GSPO's ratio s now? Which flags turn each part off? Then name dapo in place of gspo: the
# conflict is in main. What does dapo.py know there that an asynchronous sampler can't wait for?
