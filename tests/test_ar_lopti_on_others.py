"""AR and Lopti on REINFORCE++ and DAPO. That the change is letter by letter grpo_ar_lopti.py's is in test_family.py;
what that change does by itself, in test_algorithms.py. Here: what the two together do."""

import math

import pytest
import torch
from conftest import step_of_main
from test_algorithms import adamw, arguments, distance, gradients, make_batch, weights

import dapo
import dapo_ar_lopti
import grpo
import grpo_ar_lopti
import reinforce_pp
import reinforce_pp_ar_lopti

PAIRS = [(reinforce_pp, reinforce_pp_ar_lopti), (dapo, dapo_ar_lopti)]
each_pair = pytest.mark.parametrize("parent, child", PAIRS, ids=["reinforce_pp", "dapo"])
OFF = {"alpha": 0.0, "eta": 0.0}
pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture(scope="module")
def batch(tiny_model):
    return make_batch(tiny_model)


def advantages(trainer, rewards, batch, args):
    """As in main."""
    found = trainer.compute_advantages(rewards, batch, args)
    return found * trainer.ar_weight(batch["old_logp"], args.alpha) if hasattr(trainer, "ar_weight") else found


@each_pair
def test_alpha_0_and_eta_0_are_the_parent_to_the_last_bit(tiny_model, batch, parent, child):
    rng = torch.Generator().manual_seed(3)
    all_rewards = [torch.randn(len(batch["ids"]), generator=rng) for _ in range(2)]
    reached = []
    for trainer, off in ((parent, {}), (child, OFF)):
        settings = {"updates_per_step": 2, "micro_batch_tokens": 300, "max_grad_norm": 0.1}
        args = arguments(trainer, model=str(tiny_model), **settings, **off)
        policy = trainer.load_policy(args, trained=True)
        optimizer, path = adamw(policy), []
        for step, rewards in enumerate(all_rewards):
            now = batch | {"advantages": advantages(trainer, rewards, batch, args)}
            metrics = trainer.update(policy, optimizer, now, step, args)
            path.append((weights(policy), {key: metrics[key] for key in ("clip_rate", "grad_norm", "optimizer_steps")}))
        reached.append(path)
    for (weights_a, metrics_a), (weights_b, metrics_b) in zip(*reached):
        assert torch.equal(weights_a, weights_b) and metrics_a == metrics_b
    assert not torch.equal(reached[0][0][0], reached[0][1][0])


@each_pair
def test_at_fixed_weights_the_two_stages_add_up_to_the_parent(tiny_model, batch, parent, child):
    """Two updates: low, low, high, high. The advantages are given, so α is out of it."""
    settings = {"model": str(tiny_model), "updates_per_step": 2, "micro_batch_tokens": 300}
    plain, _ = gradients(parent, batch, arguments(parent, **settings))
    staged, metrics = gradients(child, batch, arguments(child, eta=0.5, **settings))
    assert metrics["optimizer_steps"] == len(staged) == 4
    low = batch["old_logp"][batch["mask"]].exp() <= 0.5
    assert metrics["low_rate"] == pytest.approx(low.double().mean().item(), abs=1e-12)
    for i in range(2):
        assert distance(staged[i] + staged[2 + i], plain[i]) < 1e-5
        assert distance(staged[i], plain[i]) > 1e-3 and distance(staged[2 + i], plain[i]) > 1e-3


@pytest.mark.parametrize("parent, child", [(grpo, grpo_ar_lopti), *PAIRS], ids=["grpo", "reinforce_pp", "dapo"])
def test_main_multiplies_the_parents_advantages(batch, parent, child, monkeypatch):
    """By α·π_old + 1 − α, α 0.2."""
    rewards = torch.randn(len(batch["ids"]), generator=torch.Generator().manual_seed(3)).tolist()
    _, plain = step_of_main(parent, arguments(parent), batch, rewards, monkeypatch)
    _, given = step_of_main(child, arguments(child, alpha=0.2), batch, rewards, monkeypatch)
    expected = plain["advantages"] * (0.2 * batch["old_logp"].exp() + 0.8)
    assert expected[batch["mask"]].abs().max() > 1
    torch.testing.assert_close(given["advantages"], expected, atol=1e-6, rtol=0)


def test_dapo_passes_over_stages_and_updates_that_have_nothing(tiny_model, batch):
    """The second update has no groups, and of the first only high tokens are left: one optimizer step of four."""
    args = arguments(dapo_ar_lopti, model=str(tiny_model), updates_per_step=2)
    half = len(batch["ids"]) // 2
    high = batch["mask"] & (batch["old_logp"] > math.log(0.5))
    high[half:] = False
    found, metrics = gradients(dapo_ar_lopti, batch | {"mask": high}, args)
    assert metrics["optimizer_steps"] == len(found) == 1 and found[0].any() and metrics["low_rate"] == 0
    found, metrics = gradients(dapo_ar_lopti, batch | {"mask": torch.zeros_like(high)}, args)
    assert found == [] and metrics == {"clip_rate": 0, "grad_norm": 0, "optimizer_steps": 0, "low_rate": 0}
