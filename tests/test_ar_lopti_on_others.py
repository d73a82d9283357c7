"""AR and Lopti on REINFORCE++ and DAPO. That the change is letter by letter grpo_ar_lopti.py's is in test_family.py;
what that change does by itself, in test_algorithms.py. Here: what the two together do."""

import math

import pytest
import torch
from conftest import step_of_main
from helpers import arguments, gradients

import dapo
import dapo_ar_lopti
import grpo
import grpo_ar_lopti
import reinforce_pp
import reinforce_pp_ar_lopti

PAIRS = [(reinforce_pp, reinforce_pp_ar_lopti), (dapo, dapo_ar_lopti)]
pytestmark = pytest.mark.usefixtures("on_the_cpu")


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
