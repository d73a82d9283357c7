"""GRPO with a correction for the sampler, in numbers.

As in test_algorithms.py: what is expected is Python's float arithmetic, and no sampler runs here.
"""

import dataclasses
import math

import pytest
import torch
from conftest import step_of_main
from test_algorithms import E20, TOKENS, arguments, distance, eq_2, gradients, loss_batch, plain_gradient

import grpo
import grpo_tis

NAN, INF = math.nan, math.inf
both = pytest.mark.parametrize("correction", ["tis", "icepop"])


pytestmark = pytest.mark.usefixtures("on_the_cpu")


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


def test_an_update_leaves_responses_out_by_the_policy_as_it_is(tiny_model, batch):
    """Of transformers' own log-probabilities, with weights cut at 1.1; mask_rate is the share of tokens."""
    settings = {"correction_max": 1.1, "mask": "sequence", "mask_delta": 0.002}
    args = arguments(grpo_tis, model=str(tiny_model), micro_batch_tokens=300, **settings)
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
        given = 0 if out[i] else min(math.exp(old - sampler), 1.1)
        return eq_2(logp, old, ref, given * advantage, args)

    (one,), metrics = gradients(grpo_tis, batch, args)
    assert 0.05 < share < 0.5 and metrics["mask_rate"] == pytest.approx(share.item(), rel=1e-6)
    assert distance(one, plain_gradient(tiny_model, batch, args, weight)) < 1e-5


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


def test_icepops_least_weight_is_at_most_the_largest():
    with pytest.raises(ValueError, match=r"^--correction_min is 3\.0; it must be at most --correction_max, 2\.0$"):
        grpo_tis.Args(correction="icepop", correction_min=3.0).check()
    with pytest.raises(ValueError, match=r"^--correction_min is 0\.5; it must be at most --correction_max, 0\.4$"):
        grpo_tis.Args(correction="icepop", correction_max=0.4).check()
    grpo_tis.Args(correction="icepop", correction_min=1.0, correction_max=1.0).check()
    grpo_tis.Args(correction="tis", correction_max=0.4).check()  # which has no least weight
