"""The entropy bonus: its gradient against torch in float64, and the rule that holds the entropy at a target."""

from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY
from helpers import adamw, arguments, distance, gradients, make_batch, refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import entropy_bonus
import grpo
from runtime import checkpoints, memory, models
from runtime.settings import check_ranges

pytestmark = pytest.mark.usefixtures("on_the_cpu")

FREE = {"model": str(KK_TINY), "temperature": 0.8, "max_grad_norm": 1e9, "updates_per_step": 1, "kl_coef": 0.0}


@pytest.fixture(scope="module")
def batch():
    return make_batch(KK_TINY)


@pytest.mark.parametrize("tokens", [10**6, 300, 1])
def test_the_gradient_of_the_bonus_against_float64(batch, tokens, monkeypatch):
    """Without advantages and KL term J is α times the mean entropy. The head computes 7 tokens at a time."""
    monkeypatch.setattr(models, "HEAD_CHUNK", 7)
    args = arguments(entropy_bonus, **FREE, entropy_coef=0.3, micro_batch_tokens=tokens)
    policy = entropy_bonus.load_policy(args, trained=True)
    given = batch | {"advantages": 0 * batch["advantages"]}
    [found], _ = gradients(entropy_bonus, given, args, policy)

    lm = AutoModelForCausalLM.from_pretrained(KK_TINY, dtype=torch.float64)
    total = 0
    for ids, mask in zip(batch["ids"], batch["mask"], strict=True):
        length = int(mask.nonzero().max()) + 1
        p = (lm(ids[None, :length]).logits[0][:-1][mask[1:length]] / 0.8).softmax(-1)
        total = total + torch.special.entr(p).sum()
    (-0.3 * total / batch["mask"].sum()).backward()
    expected = torch.cat([dict(lm.named_parameters())[name].grad.flatten() for name, _ in policy.lm.named_parameters()])
    assert distance(found, expected) < 1e-5 and expected.norm() > 1e-3


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_model_without_bonus_has_grpos_gradient_to_the_last_bit(batch, kl_coef):
    """Also if some responses have no advantage."""
    given = batch | {"advantages": batch["advantages"] * (torch.arange(len(batch["ids"])) % 3 > 0)[:, None]}
    settings = FREE | {"kl_coef": kl_coef, "micro_batch_tokens": 300}
    bonus = gradients(entropy_bonus, given, arguments(entropy_bonus, **settings, entropy_coef=0.0))
    [expected], metrics = gradients(grpo, given, arguments(grpo, **settings))
    assert torch.equal(bonus[0][0], expected) and bonus[1] == metrics


@pytest.mark.parametrize(
    ("target", "entropies", "alphas", "last"),
    [
        (None, [0.1, 0.9], [0.25, 0.25], 0.25),
        (0.5, [0.9, 0.4, 0.5, 0.6, 0.2], [0, 0.125, 0.25, 0, 0.25], 0.375),
        (0.5, [0.9, 0.9, 0.9, 0.9, 0.1, 0.1], [0, 0, 0, 0, 0, 0.125], 0.25),  # c is 0 at the least
    ],
)
def test_the_controller_by_hand(target, entropies, alphas, last):
    args = arguments(entropy_bonus, entropy_coef=0.25, entropy_target=target, entropy_step=0.125)
    policy = SimpleNamespace(entropy_coef=torch.tensor(0.25, dtype=torch.float64))
    found = [entropy_bonus.adapt_entropy_coef(policy, entropy, args) for entropy in entropies]
    assert found == alphas and policy.entropy_coef.item() == last


def test_the_memory_of_the_bonus_is_in_the_estimate():
    """Two tensors of the size of a chunk's logits; measured with 1024 × 100,000 logits: 5.02 of them, without 3.02."""
    config = AutoConfig.from_pretrained(KK_TINY)
    machine = memory.Machine(on_gpu=False, processes=1, gib=8)
    settings = {"model": str(KK_TINY), "max_prompt_tokens": 1000, "max_response_tokens": 1000}
    both = [arguments(trainer, **settings) for trainer in (entropy_bonus, grpo)]
    needed = [memory.estimate(config, args, 1024, machine)[1] for args in both]
    assert (needed[0] - needed[1]) * 2**30 == pytest.approx(2 * 4 * 1024 * config.vocab_size, rel=1e-6)


def test_a_checkpoint_restores_the_coefficient(tmp_path):
    args = arguments(entropy_bonus, model=str(KK_TINY), entropy_target=9.0, run_dir=str(tmp_path))
    policy, again = (entropy_bonus.load_policy(args, trained=True) for _ in range(2))
    for _ in range(3):
        entropy_bonus.adapt_entropy_coef(policy, 0.1, args)
    checkpoints.save(policy, adamw(policy), AutoTokenizer.from_pretrained(KK_TINY), 3, 16, args)
    checkpoints.load(again, adamw(again), str(tmp_path))
    assert again.entropy_coef.item() == policy.entropy_coef.item() == pytest.approx(0.0013, rel=1e-12)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("entropy_coef", -0.1), ("entropy_coef", float("nan")), ("entropy_target", 0.0), ("entropy_step", 0.0)],
)
def test_values_out_of_range_are_refused(flag, value):
    with refused(f"--{flag}"):
        check_ranges(entropy_bonus.Args(**{flag: value}))
