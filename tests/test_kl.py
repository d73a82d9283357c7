"""--kl of grpo_kl.py: which gradient each estimate has, by enumeration of all tokens that can be drawn.

A policy that writes one of three tokens, its weights the logits. The exact gradients are autograd's of the two sums.
That an update has these terms in it is in test_token_weights.py.
"""

import pytest
import torch
from helpers import arguments

import grpo_kl

POLICY = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
OLD = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)  # the policy that sampled, before some updates


def gradient_of(value_of):
    """The gradient by the logits of a function of log π, [3]; at POLICY."""
    logits = POLICY.log().requires_grad_()
    return torch.autograd.grad(value_of(logits.log_softmax(0)), logits)[0].tolist()


def mean_gradient(kl, sampler):
    """That of grpo_kl.py's KL term, over tokens drawn from the sampler."""
    batch = {"old_logp": sampler.log(), "ref_logp": REFERENCE.log()}
    return gradient_of(lambda logp: (sampler * grpo_kl.kl_term(logp, batch, arguments(grpo_kl, kl=kl))).sum())


TO_POLICY = gradient_of(lambda logp: (logp.exp() * (logp - REFERENCE.log())).sum())  # KL(π ‖ π_ref)
TO_REFERENCE = gradient_of(lambda logp: (REFERENCE * (REFERENCE.log() - logp)).sum())  # KL(π_ref ‖ π)
GRADIENTS = {"k1": [0, 0, 0], "k2": TO_POLICY, "k3": TO_REFERENCE, "k3_ratio": TO_POLICY}


@pytest.mark.parametrize("kl", GRADIENTS)
def test_each_estimate_follows_its_own_divergence_and_off_policy_k3_times_the_ratio_alone(kl):
    """Its mean over the sampler's tokens is KL(π ‖ π_ref) as a function of the weights, wherever these are."""
    assert mean_gradient(kl, POLICY) == pytest.approx(GRADIENTS[kl], rel=1e-12, abs=1e-12)
    off_policy = mean_gradient(kl, OLD)
    assert (off_policy == pytest.approx(GRADIENTS[kl], rel=1e-2, abs=1e-2)) == (kl == "k3_ratio")
