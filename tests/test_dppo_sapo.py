"""DPPO and SAPO in numbers: loss, gradient and clip rate against arithmetic done by hand.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

import math

import pytest
import torch
from test_algorithms import N, arguments, distance, gradients, make_batch, plain_gradient
from test_cispo_gspo import sequence_batch

import dppo
import sapo

divergences = pytest.mark.parametrize("divergence", ["tv", "kl"])


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def batch(tiny_model):
    """One response in five has advantage 0."""
    batch = make_batch(tiny_model)
    batch["advantages"][::5] = 0
    return batch


# --------------------------------------------------------------------------------------------------- DPPO's loss


def probability_batch(tokens):
    """log π, with gradient, and the rest of a batch of one row in float64, of (π_old, π, log π_ref − log π, A).

    Around each token lies garbage, masked.
    """
    logp = torch.full((1, 3 * len(tokens)), -1e30, dtype=torch.float64)
    rest = {"mask": torch.zeros(logp.shape, dtype=torch.bool), "old_logp": logp - 7e29, "ref_logp": -logp}
    rest["advantages"] = 1e30 + 0 * logp
    for i, (old, new, reference, advantage) in enumerate(tokens):
        at = 0, 3 * i + 1
        logp[at], rest["old_logp"][at], rest["mask"][at] = math.log(new), math.log(old), True
        rest["ref_logp"][at], rest["advantages"][at] = math.log(new) + reference, advantage
    return logp.requires_grad_(), rest


def check(token, divergence, weight, is_cut, **changes):
    """−1/7·(weight·A·log π − β·k3), and its slope −1/7·(weight·A + β·π_ref/π − β); weight 0 if the token is cut off."""
    (_, new, reference, advantage) = token
    weight = 0 if is_cut else weight
    logp, rest = probability_batch([token])
    loss, clipped = dppo.policy_loss(logp, rest, 7, arguments(dppo, divergence=divergence, **changes))
    loss.backward()
    k3 = math.exp(reference) - reference - 1
    assert clipped.item() == is_cut
    assert loss.item() == pytest.approx((0.1 * k3 - weight * advantage * math.log(new)) / 7, rel=1e-9, abs=1e-15)
    slope = -(weight * advantage + 0.1 * math.exp(reference) - 0.1) / 7
    assert logp.grad[0].tolist() == pytest.approx([0, slope, 0], rel=1e-9, abs=1e-15)


# δ 0.15, β 0.1: (π_old, π, log π_ref − log π, A) → (min(ρ, 20), whether the token is cut off)
BY_TV = {
    "on policy": ((0.5, 0.5, 0, 1.5), (1, False)),
    "up by 0.149": ((0.5, 0.649, 0, 2), (1.298, False)),
    "up by 0.151": ((0.5, 0.651, 0, 2), (1.302, True)),
    "up by 0.2, A < 0: back towards π_old": ((0.5, 0.7, 0, -2), (1.4, False)),
    "down by 0.1": ((0.5, 0.4, 0, -2), (0.8, False)),
    "down by 0.2": ((0.5, 0.3, 0, -2), (0.6, True)),
    "down by 0.2, A > 0: back towards π_old": ((0.5, 0.3, 0, 2), (0.6, False)),
    "improbable, doubled": ((0.001, 0.002, 0, 2), (2, False)),
    "improbable, ρ just below its cap": ((0.005, 0.099, 0, 2), (19.8, False)),
    "improbable, ρ above its cap": ((0.001, 0.1, 0, 2), (20, False)),
    "improbable, ρ above its cap, A < 0": ((0.001, 0.9, 0, -2), (20, False)),
    "improbable, out of the region": ((0.001, 0.2, 0, 2), (20, True)),
    "probable, down by a fifth": ((0.99, 0.8, 0, -2), (0.8 / 0.99, True)),
    "A = 0, far off": ((0.1, 0.9, 0, 0), (9, False)),
    "with KL": ((0.5, 0.6, 0.5, 2), (1.2, False)),
    "cut off, yet its KL term counts": ((0.5, 0.7, -0.7, 2), (1.4, True)),
    "60 nats up": ((1e-26, 0.1, 0, 2), (20, False)),
    "60 nats down": ((0.1, 1e-27, 0, 2), (math.exp(-20), False)),  # ρ is clamped as in grpo.py
}


@pytest.mark.parametrize("name", BY_TV)
def test_dppos_loss_and_gradient_by_hand(name):
    token, (weight, is_cut) = BY_TV[name]
    check(token, "tv", weight, is_cut)


# δ 0.05: (π_old, π, A) → whether the token is cut off. D = π_old·log(π_old/π) + (1 − π_old)·log((1 − π_old)/(1 − π)).
BY_KL = {
    "on policy": ((0.5, 0.5, 1.5), False),
    "D 0.047": ((0.5, 0.65, 2), False),
    "D 0.054": ((0.5, 0.66, 2), True),
    "D 0.054, A < 0: back towards π_old": ((0.5, 0.66, -2), False),
    "D 0.054, down": ((0.5, 0.34, -2), True),
    "D 0.054, down, A > 0: back towards π_old": ((0.5, 0.34, 2), False),
    "D 0.053, and 0.037 in the other direction": ((0.1, 0.03, -2), True),
    "D 0.038, and 0.068 in the other direction": ((0.01, 0.065, 2), False),
    "improbable, ρ above its cap": ((0.001, 0.04, 2), False),
    "improbable, out of the region": ((0.001, 0.06, 2), True),
    "probable, by less than 0.15": ((0.99, 0.9, -2), True),
    "A = 0, far off": ((0.1, 0.9, 0), False),
}


@pytest.mark.parametrize("name", BY_KL)
def test_dppos_loss_and_gradient_by_hand_with_a_kl_divergence(name):
    (old, new, advantage), is_cut = BY_KL[name]
    check((old, new, 0, advantage), "kl", min(new / old, 20), is_cut)
    check((old, new, 0.5, advantage), "kl", min(new / old, 20), is_cut)


def binary_kl(old, new):
    """KL((π_old, 1 − π_old) ‖ (π, 1 − π)) in nats."""
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


def test_a_token_at_the_very_bound_of_the_region_is_kept():
    tokens = [(0.25, 0.5, 0, 2), (0.75, 0.5, 0, -2)]
    logp, rest = probability_batch(tokens)
    moved = (logp.exp() - rest["old_logp"].exp())[0, 1::3].tolist()  # ±1/4, to rounding
    for token, delta in zip(tokens, map(abs, moved)):
        check(token, "tv", token[1] / token[0], False, delta=delta)
        check(token, "tv", token[1] / token[0], True, delta=delta - 1e-12)
        check(token, "kl", token[1] / token[0], False, delta=binary_kl(*token[:2]) + 1e-12)
        check(token, "kl", token[1] / token[0], True, delta=binary_kl(*token[:2]) - 1e-12)


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

# (log π − log π_old of each token, A) → how many of the tokens have a gate below 1/2: those with
# ρ > 1 + 2·arcosh(√2)/τ, which is 2.763 for A > 0 and 2.679 for A < 0
RESPONSES = {
    "on policy": (([0, 0, 0], 1.5), 0),
    "on policy, A < 0": (([0, 0], -1.5), 0),
    "one token, up": (([0.3], 2), 0),
    "one token, down": (([-0.3], -2), 0),
    "up to 2.75 and 2.77": (([math.log(2.75), math.log(2.77)], 2), 1),
    "up to 2.67, 2.69 and 2.75, A < 0": (([math.log(2.67), math.log(2.69), math.log(2.75)], -2), 2),
    "both sides": (([1, -1, 0.2], -1), 1),
    "far down": (([-9, -9], 2), 0),
    "far up": (([4, 0], 2), 1),
    "A = 0, far off": (([3, -3, 0], 0), 0),
}


def gate(ratio, advantage):
    """f(ρ), f'(ρ)."""
    tau = 1.0 if advantage > 0 else 1.05
    p = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 / tau * p, 4 * p * (1 - p)


@pytest.mark.parametrize("name", RESPONSES)
def test_sapos_loss_and_gradient_by_hand(name):
    """−1/n·1/|o|·Σ f(ρ)·A, n 7; a token's slope is −1/n·1/|o|·f'(ρ)·ρ·A."""
    (moved, advantage), num_clipped = RESPONSES[name]
    logp, rest = sequence_batch([(moved, advantage)])
    loss, clipped = sapo.policy_loss(logp, rest, 7, arguments(sapo, kl_coef=0.0))
    loss.backward()
    ratios = [math.exp(nats) for nats in moved]
    values = [gate(ratio, advantage)[0] * advantage for ratio in ratios]
    slopes = [gate(ratio, advantage)[1] * ratio * advantage for ratio in ratios]
    assert loss.item() == pytest.approx(-sum(values) / len(moved) / 7, rel=1e-12, abs=1e-15)
    expected = [-slope / len(moved) / 7 for slope in slopes]
    assert logp.grad[rest["mask"]].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert not logp.grad[~rest["mask"]].any()
    assert clipped.item() == num_clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [2, -2])
def test_beyond_20_nats_sapos_loss_is_finite_and_has_no_gradient(advantage, dtype):
    """f is 4/τ far above and 4/τ·sigmoid(−τ) far below."""
    tau = 1.0 if advantage > 0 else 1.05
    logp, rest = sequence_batch([([50, 30], advantage), ([-30, -1e6], advantage)])
    logp = logp.detach().to(dtype).requires_grad_()
    rest = {key: value.to(dtype) if value.is_floating_point() else value for key, value in rest.items()}
    loss, clipped = sapo.policy_loss(logp, rest, 1, arguments(sapo, kl_coef=0.0))
    loss.backward()
    assert loss.item() == pytest.approx(-4 / tau * advantage * (1 + 1 / (1 + math.exp(tau))), rel=1e-6)
    assert not logp.grad.any() and clipped.item() == 2


# -------------------------------------------------------------------------------------------------------- update


@pytest.mark.parametrize("kl_coef", [0.1, 0.0])
def test_sapos_gradient_on_transformers_own_log_probabilities(tiny_model, batch, kl_coef):
    """−1/N Σ_i 1/|o_i| Σ_t (f'(ρ)·ρ·A + β·π_ref/π − β)·∇log π, N responses, those of advantage 0 included.

    τ is so large that some gates are below 1/2.
    """
    settings = {"tau_positive": 5.0, "tau_negative": 7.0, "micro_batch_tokens": 300, "kl_coef": kl_coef}
    args = arguments(sapo, model=str(tiny_model), **settings)
    n_tokens, sizes, clipped = batch["mask"].sum().item(), batch["mask"].sum(1).tolist(), 0

    def weight(logp, *at):
        nonlocal clipped
        old, ref, advantage = (batch[key][at].item() for key in ("old_logp", "ref_logp", "advantages"))
        ratio, tau = math.exp(logp - old), 5 if advantage > 0 else 7
        gate = 1 / math.cosh(tau * (ratio - 1) / 2) ** 2
        clipped += gate < 0.5 and advantage != 0
        of_token = gate * ratio * advantage + kl_coef * math.exp(ref - logp) - kl_coef
        return of_token * n_tokens / sizes[at[0]] / N  # plain_gradient divides by n_tokens

    (one,), metrics = gradients(sapo, batch, args)
    assert distance(one, plain_gradient(tiny_model, batch, args, weight)) < 1e-5
    assert metrics["clip_rate"] == clipped / n_tokens and 0.05 < metrics["clip_rate"] < 0.95
