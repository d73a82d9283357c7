"""DPPO and SAPO in numbers: loss, gradient and clip rate against arithmetic done by hand.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

import math

import pytest
import torch
from helpers import arguments

import dppo

divergences = pytest.mark.parametrize("divergence", ["tv", "kl"])


pytestmark = pytest.mark.usefixtures("on_the_cpu")


# --------------------------------------------------------------------------------------------------- DPPO's loss


def outside(old_logp, logp, advantage, **changes):
    """Whether a token is cut off, in the float32 that the trainer has; and that its loss and gradient are finite."""
    logp = torch.tensor([[0.0, logp]], requires_grad=True)
    batch = {"old_logp": torch.tensor([[0.0, old_logp]]), "advantages": torch.tensor([[0.0, float(advantage)]])}
    batch |= {"mask": torch.tensor([[False, True]]), "ref_logp": batch["old_logp"]}
    loss, clipped = dppo.policy_loss(logp, batch, 1, arguments(dppo, **changes))
    loss.backward()
    assert math.isfinite(loss.item()) and logp.grad.isfinite().all()
    return clipped.item() == 1


@pytest.mark.parametrize("certain", [0.0, -1e-9, 1e-7])
def test_a_probability_of_one_to_rounding_by_hand(certain):
    """1 − π counts as 10⁻⁸ then, also if it is negative by rounding.

    From 0.9 to 1 D is 0.9·log 0.9 + 0.1·log(0.1/10⁻⁸) = 1.517, from 1 to 0.9 and 0.97 −log 0.9 = 0.105 and 0.030.
    """
    near, nearer = math.log(0.9), math.log(0.97)
    assert not outside(near, certain, 1, divergence="kl", delta=1.52)
    assert outside(near, certain, 1, divergence="kl", delta=1.51)
    assert outside(near, certain, 1, divergence="kl") and not outside(near, certain, -1, divergence="kl")
    assert outside(certain, near, -1, divergence="kl") and not outside(certain, near, 1, divergence="kl")
    assert not outside(certain, nearer, -1, divergence="kl")
    assert outside(certain, nearer, -1, divergence="kl", delta=0.030)
    assert not outside(certain, nearer, -1, divergence="kl", delta=0.031)
    for advantage in (1, -1):
        assert not outside(certain, certain, advantage, divergence="kl")
        assert not outside(near, certain, advantage)  # TV: 0.1
    assert outside(math.log(0.8), certain, 1) and outside(certain, math.log(0.8), -1)


@divergences
def test_a_probability_of_zero_to_rounding(divergence):
    """e^-200 is 0 in float32. D from 0 to 1/2 is log 2; from 1/2 to 0 it is 99."""
    half = math.log(0.5)
    assert outside(-200.0, half, 1, divergence=divergence) and not outside(-200.0, half, -1, divergence=divergence)
    assert outside(half, -200.0, -1, divergence=divergence) and not outside(half, -200.0, 1, divergence=divergence)
    assert not outside(-200.0, -300.0, -1, divergence=divergence)  # 100 nats, but hardly any probability
    assert not outside(-1e6, -10.0, 1, divergence=divergence)


# --------------------------------------------------------------------------------------------------- SAPO's loss


# -------------------------------------------------------------------------------------------------------- update
