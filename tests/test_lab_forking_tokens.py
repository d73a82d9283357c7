"""lab.forking_tokens on cases worked by hand, and its gradients against a real model's Jacobian."""

import json
import sys

import pytest
import torch
from conftest import KK_TINY, ROOT

import grpo
from lab import common, forking_tokens, proposition
from tools.maintain import claims

pytestmark = pytest.mark.usefixtures("on_the_cpu")

TEXTS = [  # (prompt, response); every word of the responses is a token of kk_tiny
    (" You meet Zoey and Rafael.", " Well, Zoey is honest, so Rafael is a knave.\n Suppose"),
    (" Who is a knight?", " Hence Zoey says so. If Rafael is honest, Zoey is"),
]


def of_lab(**changes):
    return forking_tokens.Args(model=str(KK_TINY), prompts=1, responses=2, **changes)


@pytest.fixture(scope="module")
def known():
    """(policy, tokenizer, Sampled): kk_tiny and two responses that it has not sampled itself."""
    args = of_lab()
    policy, tokenizer = common.load_policy(args)
    rows = [[tokenizer.encode(text) for text in pair] for pair in TEXTS]
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    batch = {"ids": torch.zeros(2, longest, dtype=torch.long)}
    batch["mask"] = torch.zeros(2, longest, dtype=torch.bool)
    for i, (prompt, response) in enumerate(rows):
        batch["ids"][i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        batch["mask"][i, len(prompt) : len(prompt) + len(response)] = True
    of_script = common.trainer_args("grpo", args)
    batch["old_logp"], batch["entropy"] = grpo.log_probs(policy, batch, of_script)
    texts = [response for _, response in TEXTS]
    return policy, tokenizer, common.Sampled(batch, torch.ones(2), texts, ["?"], [True, False])


# --------------------------------------------------------------------------------------- gradients


def test_a_tokens_gradient_is_the_heads_jacobian_times_one_hot_minus_p(known):
    policy, _, sampled = known
    batch = sampled.batch
    for temperature in (1.0, 0.7):
        norms = forking_tokens.gradient_norms(policy, batch, of_lab(temperature=temperature))
        assert (norms[~batch["mask"]] == 0).all()
        first, last_but_one = batch["mask"][0].nonzero()[0], batch["mask"][1].nonzero()[-2]
        for row, t in [(0, int(first)), (1, int(last_but_one))]:
            ids, mask = batch["ids"][row : row + 1, : t + 1], batch["mask"][row : row + 1, : t + 1]
            _, activations = proposition.activations_of(policy, ids, mask, temperature)
            last = activations[-1][:, t - 1 : t].detach()  # [1, 1, D]
            p = (policy.lm.lm_head(policy.lm.model.norm(last))[0, 0] / temperature).softmax(-1)
            one_hot = torch.zeros_like(p)
            one_hot[ids[0, t]] = 1
            matrix = proposition.last_jacobian(policy, last, temperature)  # [vocabulary, D]
            expected = (matrix.T @ (one_hot - p)).norm().item()
            assert norms[row, t].item() == pytest.approx(expected, rel=1e-4)


def test_norms_at_all_weights_are_those_of_the_tokens_they_are_said_to_be_of(known):
    policy, _, sampled = known
    batch = sampled.batch
    rows, positions, norms = forking_tokens.norms_at_all_weights(policy, batch, of_lab(checked=3))
    assert len(norms) == 3 and batch["mask"][rows, positions].all()
    logp, _ = policy(batch["ids"], batch["mask"], 1.0)
    for row, t, norm in zip(rows, positions, norms):
        gradients = torch.autograd.grad(logp[row, t], policy.parameters(), retain_graph=True)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-3)
    everything = forking_tokens.norms_at_all_weights(policy, batch, of_lab(checked=1000))
    assert len(everything[2]) == batch["mask"].sum()


# ------------------------------------------------------------------------------------------ numbers


def test_a_batchs_numbers_by_hand():
    found = {
        "entropy": torch.tensor([1.0, 0.005, 0.61, 0.385]).double(),
        "probability": torch.tensor([0.4, 0.9995, 0.6, 0.9]).double(),
        "gradient": torch.tensor([6.0, 0.0, 3.0, 1.0]).double(),
        "in entropy": torch.tensor([True, False, False, False]),
        "in probability": torch.tensor([True, False, False, False]),
        "in gradient": torch.tensor([False, False, True, False]),
        "connects": torch.tensor([True, False, True, False]),
        "begins": torch.tensor([False, False, False, False]),
    }
    numbers = forking_tokens.numbers_of(found, 630)
    assert numbers["tokens"] == 4 and numbers["nearly_certain"] == 0.25
    assert numbers["mean_entropy"] == pytest.approx(0.5)
    assert numbers["tokens_with_most_of_the_entropy"] == 0.5  # 1.61 of 2 nats
    assert numbers["entropy_of_top"] == pytest.approx(0.5)
    assert numbers["gradient_of_top"] == pytest.approx(0.6)
    shared = {"entropy, probability": 1, "entropy, gradient": 0, "probability, gradient": 0}
    assert numbers["overlap"] == shared
    # The ranks of entropy are 4 1 3 2, those of probability 1 4 2 3, those of gradient 4 1 3 2.
    assert numbers["rank_correlation"]["entropy, gradient"] == pytest.approx(1)
    assert numbers["rank_correlation"]["entropy, probability"] == pytest.approx(-1)
    assert numbers["connects"]["entropy"] == pytest.approx(0.805)
    assert numbers["connects"]["entropy_of_others"] == pytest.approx(0.195)
    assert numbers["connects"]["share"] == 0.5 and numbers["connects"]["share_of_top"] == 1
    assert numbers["begins"]["entropy"] is None
    # p 0.6 allows no less than 0.673 nats, so the third token's 0.61 is outside.
    assert numbers["within_bounds"] == 0.75


# ---------------------------------------------------------------------------------------- the whole


def test_a_run_writes_json_and_picture(known, tmp_path, monkeypatch, capsys):
    policy, tokenizer, sampled = known
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(common, "load_policy", lambda args: (policy, tokenizer))
    monkeypatch.setattr(common, "load_batches", lambda policy, args, count, need_gradient: [sampled] * count)
    flags = ["--batches", "3", "--least", "1", "--checked", "4", "--out", str(tmp_path)]
    flags += ["--cache", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["forking_tokens", *flags])
    forking_tokens.main()
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "forking_tokens.json").read_text())
    assert (tmp_path / "forking_tokens.png").stat().st_size > 20_000
    assert result["command"].startswith("python -m lab.forking_tokens --batches 3")
    assert result["tokens"] == 3 * int(sampled.batch["mask"].sum())
    assert [row["within_bounds"] for row in result["batches"]] == [1, 1, 1]
    assert sum(len(of["all_weights"]) for of in result["responses"]) == 4
    highest = result["lists"]["highest entropy"]
    assert [row["entropy"] for row in highest] == sorted(r["entropy"] for r in highest)[::-1]
    assert all(row["count"] % 3 == 0 for row in highest)
    assert shown.rstrip().splitlines()[-1] == claims.of_file("forking_tokens", tmp_path)[-1]
