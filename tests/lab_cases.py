"""What the tests of the lab share: batches and a policy worked by hand, and a command run in this process."""

import importlib
import json
import math
import sys

import torch
from conftest import KK_TINY, ROOT
from torch import nn

import grpo
from lab import common
from tools.maintain import claims

A = 2 / (math.sqrt(8) + 1e-6)  # rewards 3 and −1: mean 1, deviation √8


def script_args(script, model=KK_TINY, rows=2, **changes):
    """A script's settings for `rows` responses to as many prompts; no KL term unless asked for."""
    sizes = common.Args(model=str(model), prompts=rows, responses=1, max_tokens=100)
    if script not in ("reinforce", "opd", "maxrl"):
        changes = {"kl_coef": 0.0} | changes
    return common.trainer_args(script, sizes, **changes)


def of_lab(module, **changes):
    sizes = {"model": str(KK_TINY), "prompts": 1, "responses": 2} | changes
    return module.Args(**sizes)


def batch_of(rows):
    """(batch, log-probabilities now) of responses, each a list of tokens, behind one token of the prompt.

    A token: {p: π_old, ratio: ρ, A, entropy}, all but p with defaults. The shorter responses end with padding.
    """
    shape = (len(rows), max(len(row) for row in rows) + 1)
    batch = {"ids": torch.zeros(shape, dtype=torch.long), "mask": torch.zeros(shape, dtype=torch.bool)}
    for name in ("old_logp", "advantages", "entropy"):
        batch[name] = torch.zeros(shape, dtype=torch.float64)
    logp = torch.zeros(shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        for t, token in enumerate(row, 1):
            batch["mask"][i, t] = True
            batch["old_logp"][i, t] = math.log(token["p"])
            batch["advantages"][i, t] = token.get("A", 1.0)
            batch["entropy"][i, t] = token.get("entropy", 0.5)
            logp[i, t] = math.log(token["p"]) + math.log(token.get("ratio", 1.0))
    batch["ref_logp"] = batch["sampler_logp"] = batch["old_logp"]
    return batch, logp


class OneLayer(nn.Module):
    """A policy of one linear layer and two words: log-probabilities of [2, D] @ state.

    In place of ids: a number for each token, which has the state `states[number]`. Each token is the first word.
    """

    def __init__(self, states, weight):
        super().__init__()
        self.states = torch.tensor(states, dtype=torch.float64)  # [tokens, D]
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))  # [2, D]

    def forward(self, ids, mask, temperature, with_entropy=False):
        logp = (self.states[ids] @ self.weight.T / temperature).log_softmax(-1)[..., 0]
        return logp * mask, torch.zeros_like(logp)


def two_tokens(overlap=0.0):
    """A policy and a batch: a right response of a token with π 0.1, a wrong one with π 0.9.

    Their states are of length 1 and have this inner product.
    """
    ones = [math.log(0.1 / 0.9) / 2, math.log(0.9 / 0.1) / 2]  # logits of the first word
    height = math.sqrt(1 - overlap**2)
    first = [ones[0], (ones[1] - overlap * ones[0]) / height]
    policy = OneLayer([[1.0, 0.0], [overlap, height]], [first, [-x for x in first]])
    batch, _ = batch_of([[{"p": 0.1}], [{"p": 0.9}]])
    batch["ids"] = torch.tensor([[0, 0], [0, 1]])
    return policy, common.Sampled(batch, torch.tensor([3.0, -1.0]), [], ["?"], [True, False])


def sampled_of(drawn, rewards):
    """The batch of kk_tiny's tokens as vLLM would have sampled it, with these rewards in turn."""
    batch, policy = drawn
    rows = len(batch["ids"])
    logp, entropy = grpo.log_probs(policy, batch, script_args("grpo", rows=rows))
    batch = batch | {"old_logp": logp, "ref_logp": logp, "entropy": entropy}
    return common.Sampled(batch, torch.tensor(rewards * (rows // len(rewards))), [], [], [])


def run_main(command, out, flags, monkeypatch, capsys):
    """What lab.COMMAND writes with these flags: its JSON. It has drawn a picture, and its last line is the verdict."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [command, *flags.split(), "--out", str(out), "--cache", str(out / "cache")])
    importlib.import_module(f"lab.{command}").main()
    shown = capsys.readouterr().out
    result = json.loads((out / f"{command}.json").read_text())
    assert (out / f"{command}.png").stat().st_size > 20_000
    assert result["command"].startswith(f"python -m lab.{command} {flags}".strip())
    verdicts = claims.of_file(command, out)
    assert not verdicts or shown.rstrip().splitlines()[-1] == verdicts[-1]
    return result
