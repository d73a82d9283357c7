"""GRPO with a correction for the sampler, in numbers; and what it mends if the sampler is not the trainer.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here. Where a sampler
matters, all that it could draw is enumerated, each with its probability: nothing is left to chance.
"""

import dataclasses
import math
from statistics import median

import pytest
import torch
from conftest import step_of_main, timeless
from test_algorithms import (
    GROUP,
    PROMPTS,
    TOKENS,
    adamw,
    arguments,
    distance,
    flat,
    gradients,
    loss_batch,
    make_batch,
    plain_gradient,
    plain_log_softmax,
    weights,
)
from transformers import AutoModelForCausalLM

import grpo
import grpo_tis

N = PROMPTS * GROUP
E20 = math.exp(20)
NAN, INF = math.nan, math.inf
both = pytest.mark.parametrize("correction", ["tis", "icepop"])


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def batch(tiny_model):
    return make_batch(tiny_model)


# ------------------------------------------------------------------------------------------------------ the weight

# C 2, C_min 0.5: log π_old − log π_sampler → (w, whether it is cut) with tis, and with icepop
WEIGHTS = {
    "the same": (0, (1, False), (1, False)),
    "the trainer holds it more probable": (math.log(1.9), (1.9, False), (1.9, False)),
    "much more probable": (math.log(2.1), (2, True), (0, True)),
    "less probable": (math.log(0.6), (0.6, False), (0.6, False)),
    "much less probable": (math.log(0.4), (0.4, False), (0, True)),
    "30 nats more probable": (30, (2, True), (0, True)),
    "30 nats less probable": (-30, (1 / E20, False), (0, True)),
}


def mismatched(tokens):
    """loss_batch of (log π − log π_old, log π_ref − log π, A), with a fourth: log π_old − log π_sampler."""
    logp, rest = loss_batch([token[:3] for token in tokens])
    rest["sampler_logp"] = rest["old_logp"] + 3e29
    mismatch = torch.tensor([token[3] for token in tokens], dtype=torch.float64)
    rest["sampler_logp"][0, 1::3] = rest["old_logp"][0, 1::3] - mismatch
    return logp, rest


@pytest.mark.parametrize("name", WEIGHTS)
@both
def test_the_weight_by_hand(name, correction):
    mismatch, *expected = WEIGHTS[name]
    _, rest = mismatched([(0, 0, 1, mismatch)])
    weight, cut = grpo_tis.sampler_correction(rest, arguments(grpo_tis, correction=correction))
    expected_weight, is_cut = expected[correction == "icepop"]
    assert weight[0, 1].item() == pytest.approx(expected_weight, rel=1e-12) and cut[0, 1].item() == is_cut


@both
def test_a_weight_at_the_very_bound_is_not_cut(correction):
    high, low = (torch.tensor(x, dtype=torch.float64).exp().item() for x in (0.25, -0.25))
    batch = {"old_logp": torch.tensor([0.25, -0.25], dtype=torch.float64), "sampler_logp": torch.zeros(2)}
    args = arguments(grpo_tis, correction=correction, correction_max=high, correction_min=low)
    weight, cut = grpo_tis.sampler_correction(batch, args)
    assert weight.tolist() == [high, low] and not cut.any()
    args = dataclasses.replace(args, correction_max=high - 1e-12, correction_min=low + 1e-12)
    weight, cut = grpo_tis.sampler_correction(batch, args)
    assert cut.tolist() == [True, correction == "icepop"]
    assert weight.tolist() == ([high - 1e-12, low] if correction == "tis" else [0, 0])


@pytest.mark.parametrize("sampler_logp", [-INF, -1e30, -200.0])
@both
def test_a_token_that_the_sampler_held_impossible_has_a_finite_weight(correction, sampler_logp):
    batch = {"old_logp": torch.tensor([-3.0]), "sampler_logp": torch.tensor([sampler_logp])}
    args = arguments(grpo_tis, correction=correction, correction_max=1e12)
    weight, cut = grpo_tis.sampler_correction(batch, args)
    assert weight.item() == pytest.approx(E20) and not cut.any()


# -------------------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("name", TOKENS)
@both
def test_a_tokens_loss_by_hand(name, correction):
    """1/7·(β·k3 − w·surrogate), for each weight above: the KL term is not weighed."""
    token, (surrogate, k3, is_clipped) = TOKENS[name]
    for mismatch, *expected in WEIGHTS.values():
        logp, rest = mismatched([(*token, mismatch)])
        loss, clipped = grpo_tis.policy_loss(logp, rest, 7, arguments(grpo_tis, correction=correction))
        weight, _ = expected[correction == "icepop"]
        assert loss.item() == pytest.approx((0.1 * k3 - weight * surrogate) / 7, rel=1e-12, abs=1e-12)
        assert clipped.item() == is_clipped


def slope_by_hand(moved, reference, advantage, weight, args):
    """d J/d log π: w·ρ·A, 0 where the clip cuts off, and the KL term's β·π_ref/π − β."""
    ratio = math.exp(moved)
    lost = ratio > 1 + args.clip_high if advantage > 0 else ratio < 1 - args.clip_low and advantage < 0
    return (0 if lost else weight * ratio * advantage) + args.kl_coef * (math.exp(reference) - 1)


def weight_by_hand(mismatch, args):
    ratio = math.exp(mismatch)
    if args.correction == "tis":
        return min(ratio, args.correction_max)
    return ratio if args.correction_min <= ratio <= args.correction_max else 0


# ----------------------------------------------------------------------------------------------------- the update


@both
def test_the_gradient_on_transformers_own_log_probabilities(tiny_model, batch, correction):
    """−1/n Σ (w·ρ·A·1_trust + β·π_ref/π − β)·∇log π; nothing of the trainer is used on the other side."""
    bounds = {"correction_max": 1.1, "correction_min": 0.95}
    args = arguments(grpo_tis, model=str(tiny_model), micro_batch_tokens=300, correction=correction, **bounds)
    cut = 0

    def weight(logp, *at):
        nonlocal cut
        keys = ("old_logp", "ref_logp", "sampler_logp", "advantages")
        old, ref, sampler, advantage = (batch[key][at].item() for key in keys)
        given = weight_by_hand(old - sampler, args)
        cut += given in (0, 1.1)
        return slope_by_hand(logp - old, ref - logp, advantage, given, args)

    (one,), metrics = gradients(grpo_tis, batch, args)
    expected = plain_gradient(tiny_model, batch, args, weight)
    assert distance(one, expected) < 1e-5
    assert 0.1 < cut / batch["mask"].sum() < 0.9 and metrics["clip_rate"] > 0.05
    (uncorrected,), others = gradients(grpo, batch, arguments(model=str(tiny_model), micro_batch_tokens=300))
    assert distance(one, uncorrected) > 0.05 and others["clip_rate"] == metrics["clip_rate"]


@pytest.mark.parametrize(("correction", "dtype"), [("tis", "float32"), ("icepop", "bfloat16")])
def test_with_a_sampler_that_is_the_trainer_it_is_grpo_to_the_last_bit(tiny_model, batch, correction, dtype):
    """The loss, and two steps of two AdamW updates each: every weight and metric."""
    same = batch | {"sampler_logp": batch["old_logp"].clone()}
    settings = {"updates_per_step": 2, "micro_batch_tokens": 300, "max_grad_norm": 0.1, "dtype": dtype}
    reached = {}
    for trainer, own in ((grpo, {}), (grpo_tis, {"correction": correction})):
        args = arguments(trainer, model=str(tiny_model), **settings, **own)
        policy = trainer.load_policy(args, trained=True)
        optimizer, start = adamw(policy), weights(policy)
        logp = batch["ref_logp"].clone().requires_grad_()
        loss, clipped = trainer.policy_loss(logp, same, 7, args)
        path = [loss.detach(), clipped, *torch.autograd.grad(loss, logp)]
        for step in (1, 2):
            metrics = trainer.update(policy, optimizer, same | {"advantages": step * batch["advantages"]}, step, args)
            assert metrics.pop("mask_rate", 0) == 0
            path += [weights(policy), torch.tensor(list(metrics.values()))]
        assert not torch.equal(path[-2], start)
        reached[trainer] = path
    assert all(torch.equal(a, b) for a, b in zip(reached[grpo], reached[grpo_tis], strict=True))


# ------------------------------------------------------------------------------------ responses that are left out


# A, log π_sampler − log π of each token → whether the response is left out; δ 0.5
RESPONSES = {
    "bad, and less probable": (-1, [0.9, 0.3], True),
    "bad, less probable at first and more later": (-1, [1.5, -0.7], False),  # signed: the mean is 0.4
    "bad, one absurd token": (-1, [30.0, 0.1], True),
    "bad, one token at the very bound": (-1, [0.5], False),
    "bad, one token beyond it": (-2, [0.75], True),
    "bad, and more probable": (-1, [-3.0, -2.0], False),
    "good, and less probable": (1, [3.0, 3.0], False),
    "neither good nor bad": (0, [3.0, 3.0], False),
}


def responses_batch():
    """(logp with gradient, batch) of RESPONSES: log π_sampler is −0.5, π_old is π, and the padding is nonsense."""
    shape = len(RESPONSES), 4
    rest = {"mask": torch.zeros(shape, dtype=torch.bool)}
    rest["sampler_logp"] = torch.full(shape, -3e29, dtype=torch.float64)
    rest["advantages"] = torch.zeros(shape, dtype=torch.float64)
    logp = torch.zeros(shape, dtype=torch.float64)
    for i, (advantage, fallen, _) in enumerate(RESPONSES.values()):
        tokens = slice(1, 1 + len(fallen))
        rest["mask"][i, tokens] = True
        rest["advantages"][i, tokens] = advantage
        rest["sampler_logp"][i, tokens] = -0.5
        logp[i, tokens] = -0.5 - torch.tensor(fallen, dtype=torch.float64)
    rest |= {"old_logp": logp.clone(), "ref_logp": logp + 0.2 * rest["mask"].double()}
    return logp.requires_grad_(), rest


def test_which_responses_are_left_out_by_hand():
    logp, rest = responses_batch()
    found = grpo_tis.left_out(logp, rest, arguments(grpo_tis, mask="sequence"))
    expected = [is_out for _, _, is_out in RESPONSES.values()]
    assert (found == rest["mask"] & torch.tensor(expected)[:, None]).all() and not found.requires_grad
    assert not grpo_tis.left_out(logp, rest, arguments(grpo_tis)).any()
    assert not grpo_tis.left_out(logp, rest, arguments(grpo_tis, mask="sequence", mask_delta=100.0)).any()


def test_a_response_that_is_left_out_keeps_its_kl_term_and_its_place_in_the_divisor():
    """ρ is 1, log(π_ref/π) 0.2, β 0.1: the slope of the loss is (0.1·(1 − e^0.2) − w·A)/7, with w 0 or TIS's."""
    logp, rest = responses_batch()
    loss, _ = grpo_tis.policy_loss(logp, rest, 7, arguments(grpo_tis, mask="sequence"))
    loss.backward()
    expected_loss = 0.0
    for i, (advantage, fallen, is_out) in enumerate(RESPONSES.values()):
        for t, nats in enumerate(fallen, 1):
            weight = 0 if is_out else min(math.exp(-min(nats, 20)), 2)
            slope = (0.1 * (1 - math.exp(0.2)) - weight * advantage) / 7
            assert logp.grad[i, t].item() == pytest.approx(slope, rel=1e-12)
            expected_loss += (0.1 * (math.exp(0.2) - 0.2 - 1) - weight * advantage) / 7
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)


def test_an_update_leaves_responses_out_by_the_policy_as_it_is(tiny_model, batch):
    """Of transformers' own log-probabilities, as in the gradient above; mask_rate is the share of tokens."""
    args = arguments(grpo_tis, model=str(tiny_model), micro_batch_tokens=300, mask="sequence", mask_delta=0.002)
    logp, _ = grpo.log_probs(grpo.load_policy(args, trained=False), batch, args)
    out = []
    for i, row in enumerate(batch["mask"]):
        tokens = row.nonzero()[:, 0].tolist()
        fallen = [batch["sampler_logp"][i, t].item() - logp[i, t].item() for t in tokens]
        out.append(batch["advantages"][i, tokens[0]] < 0 and sum(fallen) / len(fallen) > 0.002)
    share = (batch["mask"] & torch.tensor(out)[:, None]).sum() / batch["mask"].sum()

    def weight(logp, i, t):
        keys = ("old_logp", "ref_logp", "sampler_logp", "advantages")
        old, ref, sampler, advantage = (batch[key][i, t].item() for key in keys)
        given = 0 if out[i] else weight_by_hand(old - sampler, args)
        return slope_by_hand(logp - old, ref - logp, advantage, given, args)

    (one,), metrics = gradients(grpo_tis, batch, args)
    assert 0.05 < share < 0.5 and metrics["mask_rate"] == pytest.approx(share.item(), rel=1e-6)
    assert distance(one, plain_gradient(tiny_model, batch, args, weight)) < 1e-5


# -------------------------------------------------------------------------------- a sampler that is not the trainer


def mean_gradient(parameters, logp, sampler_logp, advantages, args):
    """−∇ loss, flat, in the mean over all that the sampler can draw.

    logp (with gradient), sampler_logp: [rows, tokens], one row for each possible response; advantages: [rows]. Each row
    counts as often as the sampler draws it. No weight has moved: ρ is 1, and the loss is proportional to A.
    """
    probability = sampler_logp.sum(1).exp()
    batch = {"old_logp": logp.detach(), "ref_logp": logp.detach(), "sampler_logp": sampler_logp}
    batch["mask"] = torch.ones(logp.shape, dtype=torch.bool)
    batch["advantages"] = (probability * advantages)[:, None].expand_as(logp)
    trainer = grpo_tis if isinstance(args, grpo_tis.Args) else grpo
    loss, clipped = trainer.policy_loss(logp, batch, 1, args)
    assert clipped.item() == 0
    return flat(torch.autograd.grad(-loss, parameters, retain_graph=True))


def responses(logits, temperature):
    """log π of all responses of one token out of six, [6, 1], or of two, [36, 2].

    logits: those of the first token, [6]; for two tokens also those of the second after each first, [6, 6].
    """
    first = (logits[0] / temperature).log_softmax(-1)
    if len(logits) == 1:
        return first[:, None]
    second = (logits[1] / temperature).log_softmax(-1)
    return torch.stack([first[:, None].expand(6, 6), second], -1).flatten(0, 1)


def errors(slip, n_tokens, args):
    """How far the mean gradient is from that of the expected reward, relative to it, with each of 100 policies.

    The trainer's temperature is 0.8, the sampler's is `slip`. args: grpo.py's or those of a correction. Rewards are
    0 and 1.
    """
    rng, found = torch.Generator().manual_seed(1), []
    for _ in range(100):
        shapes = [(6,), (6, 6)][:n_tokens]
        logits = [2 * torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]
        rewards = torch.randint(2, (6**n_tokens,), generator=rng).double()
        rewards[:2] = torch.tensor([0.0, 1.0])  # not all the same
        for part in logits:
            part.requires_grad_()
        logp, sampler_logp = responses(logits, 0.8), responses(logits, slip).detach()
        expected_reward = (logp.sum(1).exp() * rewards).sum()
        exact = flat(torch.autograd.grad(expected_reward, logits, retain_graph=True))
        advantages = rewards - expected_reward.detach()
        found.append(distance(mean_gradient(logits, logp, sampler_logp, advantages, args), exact))
    return found


@pytest.mark.parametrize("n_tokens", [1, 2])
def test_without_a_slip_the_mean_gradient_is_that_of_the_expected_reward(n_tokens):
    for args in (arguments(), arguments(grpo_tis), arguments(grpo_tis, correction="icepop")):
        assert max(errors(0.8, n_tokens, args)) < 1e-12


def test_a_slipped_temperature_biases_the_gradient_and_the_weight_makes_it_right():
    """1.0 instead of 0.8, responses of one token: no weight reaches a bound of 2, and nothing of the error is left."""
    biased = errors(1.0, 1, arguments())
    assert min(biased) > 0.03 and median(biased) > 0.2
    assert max(errors(1.0, 1, arguments(grpo_tis))) < 1e-12


@both
def test_what_a_bound_leaves_of_the_bias(correction):
    """The sampler's temperature is 0.6: it draws improbable tokens too seldom, and their weights are large."""
    unbounded = {"correction_max": 1e9, "correction_min": 0.0}
    assert max(errors(0.6, 1, arguments(grpo_tis, correction=correction, **unbounded))) < 1e-12
    left = median(errors(0.6, 1, arguments(grpo_tis, correction=correction)))
    assert 0.01 < left < 0.7 * median(errors(0.6, 1, arguments()))


@pytest.mark.parametrize(("correction", "share"), [("tis", 0.75), ("icepop", 0.95)])
@pytest.mark.parametrize("slip", [1.0, 1.2, 0.6])
def test_in_longer_responses_less_of_the_bias_is_left(slip, correction, share):
    """Two tokens. Not all goes away: a token's weight leaves out the tokens before it, by which the sampler's prefixes
    are not the trainer's, and those after it, by which the reward came about."""
    biased = median(errors(slip, 2, arguments()))
    left = median(errors(slip, 2, arguments(grpo_tis, correction=correction)))
    assert biased > 0.1 and left < share * biased


def test_a_bfloat16_sampler_biases_the_gradient_of_a_float32_trainer_and_the_weight_makes_it_right(tiny_model, batch):
    """The next token after each of three prompts, all 640 of them: the same weights, computed in the two types."""
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    sampler = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    parameters = list(lm.parameters())
    assert all(torch.equal(a, b.float()) for a, b in zip(parameters, sampler.parameters()))
    for row in (0, 9, 18):
        prompt = batch["ids"][row, : batch["mask"][row].int().argmax()]
        logp = plain_log_softmax(lm, prompt, 0.7)[-1][:, None]  # [640, 1]
        with torch.no_grad():
            sampler_logp = plain_log_softmax(sampler, prompt, 0.7)[-1][:, None]
        weight, cut = grpo_tis.sampler_correction(
            {"old_logp": logp.detach(), "sampler_logp": sampler_logp}, arguments(grpo_tis)
        )
        assert 1e-3 < (weight - 1).abs().max() < 0.2 and not cut.any()
        assert (sampler_logp.exp() * weight).sum().item() == pytest.approx(1, abs=1e-9)  # correction_mean
        rewards = (torch.arange(len(logp)) % 3 == 0).double()
        expected_reward = (logp[:, 0].exp() * rewards).sum()
        exact = flat(torch.autograd.grad(expected_reward, parameters, retain_graph=True))
        advantages = rewards - expected_reward.detach()
        gradients = [
            mean_gradient(parameters, logp, sampler_logp, advantages, args)
            for args in (arguments(), arguments(grpo_tis), arguments(grpo_tis, correction="icepop"))
        ]
        biased, *left = [distance(gradient, exact) for gradient in gradients]
        assert biased > 1e-4 and max(left) < biased / 20


# ------------------------------------------------------------------------------------------------------ the metrics


def metrics_of(batch, args):
    """Those that main writes."""
    with pytest.MonkeyPatch.context() as patch:
        metrics, given = step_of_main(grpo_tis, args, batch, [1.0] * len(batch["mask"]), patch)
    assert given["sampler_logp"] is batch["sampler_logp"]  # of which the loss makes the weights
    return metrics


@both
def test_the_metrics_by_hand(correction):
    """Ratios of 1.5, 3, 0.25 and 1 on four response tokens. Weights 1.5, 2, 0.25, 1, or 1.5, 0, 0, 1."""
    ratios = torch.tensor([[9.0, 1.5, 3.0, 9.0], [9.0, 9.0, 0.25, 1.0]], dtype=torch.float64)
    batch = {"mask": torch.tensor([[False, True, True, False], [False, False, True, True]])}
    batch |= {"old_logp": torch.full((2, 4), -5.0), "ref_logp": torch.full((2, 4), -5.0), "entropy": torch.zeros(2, 4)}
    batch |= {"sampler_logp": -5 - ratios.log(), "ids": torch.zeros(2, 4)}
    metrics = metrics_of(batch, arguments(grpo_tis, correction=correction, responses_per_prompt=1))
    mean, cut = (4.75 / 4, 1 / 4) if correction == "tis" else (2.5 / 4, 2 / 4)
    assert metrics["correction_mean"] == pytest.approx(mean, rel=1e-12) and metrics["correction_cut"] == cut
    assert metrics["sampler_gap"] == pytest.approx((math.log(1.5) + math.log(3) + math.log(4)) / 4, rel=1e-12)


def test_the_other_metrics_and_the_advantages_are_grpos(batch, monkeypatch):
    rewards = [float(i % 4) for i in range(N)]
    grpos, expected = step_of_main(grpo, arguments(), batch, rewards, monkeypatch)
    metrics, given = step_of_main(grpo_tis, arguments(grpo_tis), batch, rewards, monkeypatch)
    assert metrics.pop("correction_mean") != 1 and metrics.pop("correction_cut") == 0
    assert timeless(metrics) == timeless(grpos)
    assert torch.equal(given["advantages"], expected["advantages"])


@both
def test_the_least_weight_is_at_most_the_largest(correction):
    with pytest.raises(ValueError, match=r"^--correction_min is 3\.0; it must be at most --correction_max, 2\.0$"):
        grpo_tis.Args(correction=correction, correction_min=3.0).check()
    with pytest.raises(ValueError, match=r"^--correction_min is 0\.5; it must be at most --correction_max, 0\.4$"):
        grpo_tis.Args(correction=correction, correction_max=0.4).check()
    grpo_tis.Args(correction=correction, correction_min=1.0, correction_max=1.0).check()
