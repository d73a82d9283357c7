"""Lesson 0: the policy gradient. Write the two functions, then run `python -m course.check 0`.

N is the number of responses, T the number of positions, V the size of the vocabulary.
"""

import torch


def token_log_probs(logits, ids):
    """The log-probability of each chosen token, [N, T], in nats.

    logits [N, T, V]: logits[:, t] is what ids[:, t] was drawn from, so nothing is to be shifted.
    ids [N, T], of int64.

        log π(id) = logit_id − log Σ_v e^logit_v          (softmax; Policy.head in grpo.py)

    Pay attention to large logits: e^1000 is infinite in float32, and a probability of e^−1000
    rounds to 0. torch has a function for the logarithm of a softmax that avoids both.
    """
    raise NotImplementedError


def reinforce_loss(logp, rewards, mask):
    """The loss of reinforce.py without its baseline: a number that carries the gradient of logp.

    logp [N, T]: log-probabilities of the tokens. rewards [N]: one for each response. mask [N, T],
    of bool: True on response tokens. What logp holds elsewhere (prompt, padding) must not matter.

        J = 1/Σ_i|o_i| · Σ_i Σ_t r_i · log π(o_it)      (Williams 1992; policy_loss in reinforce.py)

    Pay attention to the sign (an optimizer makes a loss small, and J is to grow) and to the
    divisor: the number of response tokens of all responses together, Σ_i|o_i|.
    """
    raise NotImplementedError


# 0.3 (open)  If every response gets the reward +1, nothing is better than anything else. Why do
# the weights still move? Why not in expectation, if Σ_i ∇log π(o_i) is divided by the number of
# responses? Compute it for a policy that writes one of three tokens. Then divide by the number of
# response tokens, as in 0.2: take a policy that ends after one token or after two, with probability
# 1/2 each, and 1 or 8 responses. Which way does the mean gradient push?
