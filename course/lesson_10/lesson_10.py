"""Lesson 10: KL. Write the two functions, then run `python -m course.check 10`.

N is the number of responses, T the number of positions.
"""

import torch


def kl_estimates(logp, ref_logp):
    """Schulman's estimates of KL(π ‖ π_ref) for each token: (k1, k2, k3), each [N, T], in nats.

    logp, ref_logp: [N, T], log-probabilities of tokens that π drew. logp carries the gradient.

        d = log π − log π_ref
        k1 = d        k2 = d²/2        k3 = e^−d + d − 1        (Schulman 2020; k3 in grpo.py)

    Pay attention to the sign of d: lesson 2 has it the other way round.
    """
    raise NotImplementedError


def rewards_with_kl(rewards, logp, ref_logp, mask, beta):
    """Rewards with the KL penalty in them, [N], without gradient: r − β·Σ_t k1 over the response.

    rewards [N]. logp, ref_logp: [N, T]; what they hold outside the mask must not matter. mask
    [N, T], of bool: True on response tokens. beta: β.

        r_i − β·Σ_t (log π(o_it) − log π_ref(o_it))        (Ziegler et al. 2019; ppo.py, per token)

    Pay attention to the gradient: a reward is a number. The gradient comes from log π, which the
    loss multiplies with the advantage.
    """
    raise NotImplementedError


# 10.3 (open)  Put k1, k2 and k3 into the loss, and into the reward. Whose gradient does the policy
# follow in each of the six cases? Enumerate a policy of three tokens before you read the lesson's
# table, or one of four tokens after it.
