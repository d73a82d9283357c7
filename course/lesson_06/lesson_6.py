"""Lesson 6: off policy. Write the two functions, then run `python -m course.check 6`.

N is the number of responses, T the number of positions.
"""

import torch


def sequence_ratio(logp, old_logp, mask):
    """GSPO's ratio of each response, [N]. It carries the gradient of logp.

    logp, old_logp: [N, T]. mask [N, T], of bool: True on response tokens, at least one in a row.
    What the others hold elsewhere must not matter.

        s = exp( 1/|o| · Σ_t (log π − log π_old) )      (Zheng et al. 2025; policy_loss in gspo.py)

    Pay attention to the length |o|: the number of response tokens, not of positions.
    """
    raise NotImplementedError


def token_weights(ratio, advantages, clip_low, clip_high, method):
    """What multiplies each token's ∇log π in the gradient of J (times Σ|o_i|): [N, T], no gradient.

    ratio, advantages: [N, T], ρ and A. clip_low, clip_high: ε_low and ε_high.
    method: "grpo" or "cispo".

        grpo   J has min[ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A]; note that ∇ρ = ρ·∇log π
        cispo  J has sg[clip(ρ, 1 − ε_low, 1 + ε_high)]·A·log π; sg: a constant

    (policy_loss in grpo.py; Chen et al. 2025, policy_loss in cispo.py.) Work out the derivative on
    paper. Pay attention to grpo's tokens outside the range: some have weight 0 and some do not,
    depending on the sign of A.
    """
    raise NotImplementedError


# 6.3 (open)  The lesson's table has the tokens that grpo, acpo, dppo, cispo, sapo and gspo cut off.
# Why these? Explain each row from the method's rule: why does dppo cut off most between 0.5 and
# 0.75, gspo as many in all bins, and cispo any at all? The page of `python -m lab.lens --quick
# --out runs/lens` shows the tokens.
