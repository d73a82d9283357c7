"""Lesson 2: ratio, clip, critic. Write the three functions, then run `python -m course.check 2`.

N is the number of responses, T the number of positions. mask [N, T], of bool, is True on response
tokens.
"""

import torch


def clipped_loss(logp, old_logp, advantages, mask, clip_low, clip_high):
    """PPO's clipped loss as in grpo.py, without the KL term: a number that carries logp's gradient.

    logp, old_logp, advantages: [N, T]. What they hold outside the mask must not matter. old_logp
    carries no gradient. clip_low, clip_high: ε_low and ε_high, such as 0.2 and 0.24.

        ρ = exp(logp − old_logp)
        J = 1/Σ_i|o_i| · Σ_i Σ_t min[ρ·A, clip(ρ, 1 − ε_low, 1 + ε_high)·A]

    (Schulman et al. 2017; policy_loss in grpo.py, which also keeps log ρ within ±20.)

    Pay attention to the sign (the loss is −J), to the minimum (without it a token that moved in the
    wrong direction could not come back) and to the divisor: all response tokens together.
    """
    raise NotImplementedError


def generalized_advantages(rewards, values, mask, gamma, lam):
    """Generalised advantages (GAE) of the response tokens, [N, T], zero outside the mask.

    rewards [N]: a response's reward comes with its last token, the others get none. values [N, T]:
    V_t, what the critic expects before token t; zero outside the mask. gamma, lam: γ and λ.

        δ_t = r_t + γ·V_{t+1} − V_t         V is 0 after the last token
        A_t = δ_t + γλ·A_{t+1}              A is 0 after the last token

    (Schulman et al. 2015; estimate_advantages in ppo.py, here without its KL term.)

    Pay attention to the order (begin with the last position) and to the last token of a response,
    which is not the last position of its row: padding follows. A prompt comes before.
    """
    raise NotImplementedError


def k3_kl(logp, ref_logp):
    """Schulman's estimate k3 of KL(π ‖ π_ref) for each token, [N, T], in nats.

    logp, ref_logp: [N, T], log-probabilities of the same tokens. logp carries the gradient.

        k3 = π_ref/π − log(π_ref/π) − 1        (Schulman 2020; k3 in grpo.py)

    Pay attention to the direction: it is π_ref/π, not π/π_ref. k3 is never negative, and 0 where
    the two agree.
    """
    raise NotImplementedError


# 2.4 (open)  At the first update of a step the loss is 0, though the gradient is not. Show it with
# clipped_loss and a group of four responses. When is the loss not 0?
