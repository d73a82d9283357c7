"""On-policy distillation in numbers: the advantage by hand, the mean gradient against that of the exact KL divergence,
and a teacher that can't be one. No sampler runs here: test_every_script.py has a whole run.
"""

import dataclasses
import shutil

import pytest
import torch
from conftest import KK_TINY, step_of_main
from helpers import N, arguments
from transformers import AutoConfig, AutoTokenizer

import opd
from runtime import checks, memory

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def test_rewards_change_nothing_but_their_metrics(batch, monkeypatch):
    """And kl is the mean over the response tokens of log π − log π_teacher."""
    found = {}
    for rewards in ([0.0] * N, [float(i % 4) for i in range(N)]):
        metrics, given = step_of_main(opd, arguments(opd), batch, rewards, monkeypatch)
        found[metrics["reward"]] = given["advantages"]
        assert given["teacher_logp"] is batch["ref_logp"]  # those of the second model that main loads
        tokens = batch["mask"].nonzero().tolist()
        by_hand = [batch["old_logp"][i, t].item() - batch["ref_logp"][i, t].item() for i, t in tokens]
        assert metrics["kl"] == pytest.approx(sum(by_hand) / len(tokens), rel=1e-6)
    assert len(found) == 2 and torch.equal(*found.values())


def test_the_teacher_comes_from_its_own_folder_and_is_not_trained(monkeypatch):
    loaded = []

    def load_policy(args, trained):
        loaded.append((args.model, trained))
        if len(loaded) == 2:
            raise InterruptedError

    monkeypatch.setattr(opd, "load_policy", load_policy)
    monkeypatch.setattr(opd, "load_sampler", lambda args: None)
    begun = (arguments(opd, model="student", teacher="a teacher"), None, None, None, [], [])
    monkeypatch.setattr(opd.records, "begin", lambda *_: begun)
    with pytest.raises(InterruptedError):
        opd.main()
    assert loaded == [("student", True), ("a teacher", False)]


def test_the_mean_gradient_of_one_token_is_that_of_the_exact_reverse_kl():
    """Six tokens after a fixed text, each as often as it is drawn. By hand the slope of −KL in logit k is

    −π_k·(log(π_k/π_teacher_k) − KL).
    """
    rng = torch.Generator().manual_seed(1)
    logits, of_teacher = (2 * torch.randn(50, 6, generator=rng, dtype=torch.float64) for _ in range(2))  # 50 cases
    logp, teacher_logp = logits.requires_grad_().log_softmax(-1), of_teacher.log_softmax(-1)
    batch = {"mask": logp < 1, "old_logp": logp.detach(), "teacher_logp": teacher_logp}
    advantages = opd.compute_advantages([], batch, arguments(opd))
    batch["advantages"] = logp.detach().exp() * advantages
    opd.policy_loss(logp, batch, 1, arguments(opd)).backward()
    student, ratio = logp.detach().exp(), logp.detach() - teacher_logp
    kl = (student * ratio).sum(-1, keepdim=True)
    torch.testing.assert_close(-logits.grad, -student * (ratio - kl), rtol=1e-9, atol=1e-12)


def test_a_teacher_with_other_tokens_is_refused_and_one_with_more_is_not(tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(KK_TINY, teacher)
    args = opd.Args(model=str(KK_TINY), teacher=str(teacher))
    checks.check_teacher(args)
    tokens = AutoTokenizer.from_pretrained(KK_TINY).get_vocab()
    more = tokens | {"<|more|>": 636}
    checks.check_tokens(args, tokens, more)
    with pytest.raises(ValueError, match=f"^--teacher {teacher} has other tokens .* 1 of the model's 637 are missing"):
        checks.check_tokens(args, more, tokens)
    a, b = sorted(tokens, key=tokens.get)[100:102]
    with pytest.raises(ValueError, match="2 of the model's 636 are missing or have another number"):
        checks.check_tokens(args, tokens, tokens | {a: tokens[b], b: tokens[a]})
    (teacher / "config.json").unlink()
    with pytest.raises(ValueError, match=f"^--teacher {teacher} is not a model folder"):
        checks.check_teacher(args)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("llama", {"max_position_embeddings": 800}, "is 896, and .* takes only 800 tokens"),
        ("gpt2", {}, "^--teacher .* is a gpt2, which can't be trained here"),
    ],
)
def test_a_teacher_that_computes_otherwise_is_refused(kind, changes, says, tmp_path):
    AutoConfig.for_model(kind, num_hidden_layers=2, **changes).save_pretrained(tmp_path)
    args = opd.Args(model=str(KK_TINY), teacher=str(tmp_path), max_prompt_tokens=256, max_response_tokens=640)
    with pytest.raises(ValueError, match=says):
        memory.estimate(AutoConfig.from_pretrained(KK_TINY), args, 4096)


def test_the_teacher_is_in_the_estimate_of_the_memory():
    """Its weights in --dtype, beside what reinforce.py needs."""
    machine = memory.Machine(on_gpu=True, processes=2, gib=80)
    args = opd.Args(model=str(KK_TINY), teacher=str(KK_TINY), max_prompt_tokens=256, max_response_tokens=640)
    config = AutoConfig.from_pretrained(KK_TINY)
    num_params, needed, _ = memory.estimate(config, args, 4096, machine)
    _, without, _ = memory.estimate(config, dataclasses.replace(args, teacher=""), 4096, machine)
    assert (needed - without) * 2**30 == pytest.approx(2 * num_params / 2, rel=1e-6)
