"""--kl of grpo_kl.py: which gradient each estimate has, by enumeration of all tokens that can be drawn.

A policy that writes one of three tokens, its weights the logits. The exact gradients are autograd's of the two sums.
"""

import pytest
import torch
from helpers import arguments

import grpo_kl

POLICY = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
OLD = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)  # the policy that sampled, before some updates

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def gradient_of(value_of):
    """The gradient by the logits of a function of log π, [3]; at POLICY."""
    logits = POLICY.log().requires_grad_()
    return torch.autograd.grad(value_of(logits.log_softmax(0)), logits)[0].tolist()


TO_POLICY = gradient_of(lambda logp: (logp.exp() * (logp - REFERENCE.log())).sum())  # KL(π ‖ π_ref)
TO_REFERENCE = gradient_of(lambda logp: (REFERENCE * (REFERENCE.log() - logp)).sum())  # KL(π_ref ‖ π)


def in_the_loss(kl, sampler):
    """What grpo_kl.py's loss without advantages has as its gradient, over tokens drawn from the sampler.

    A row of one token for each; its weight is the probability of drawing it, since the loss is a sum over rows.
    """
    args = arguments(grpo_kl, kl=kl, kl_coef=1.0)

    def loss(logp):
        total = 0.0
        for k in range(3):
            batch = {
                "old_logp": sampler.log()[None, k : k + 1],
                "ref_logp": REFERENCE.log()[None, k : k + 1],
                "advantages": torch.zeros(1, 1, dtype=torch.float64),
                "mask": torch.ones(1, 1, dtype=torch.bool),
            }
            of_token, _ = grpo_kl.policy_loss(logp[None, k : k + 1], batch, 1, args)
            total = total + sampler[k] * of_token
        return total

    return gradient_of(loss)


def close_to(gradient):
    return pytest.approx(gradient, rel=1e-12, abs=1e-12)


def test_on_policy_each_estimate_follows_its_own_divergence():
    assert in_the_loss("k1", POLICY) == close_to([0, 0, 0])
    assert in_the_loss("k2", POLICY) == close_to(TO_POLICY)
    assert in_the_loss("k3", POLICY) == close_to(TO_REFERENCE)
    assert in_the_loss("k3_ratio", POLICY) == close_to(TO_POLICY)


def test_off_policy_only_k3_times_the_ratio_stays_exact():
    """Its mean over the sampler's tokens is KL(π ‖ π_ref) as a function of the weights, wherever these are."""
    assert in_the_loss("k3_ratio", OLD) == close_to(TO_POLICY)
    assert in_the_loss("k2", OLD) != pytest.approx(TO_POLICY, rel=1e-2)
    assert in_the_loss("k3", OLD) != pytest.approx(TO_REFERENCE, rel=1e-2)
    assert in_the_loss("k1", OLD) != pytest.approx([0, 0, 0], abs=1e-2)
