"""Compares a step of your own, course/exercises/step.py, with one of reinforce.py on the same responses.

    python -m course.check_step                checks course/exercises/step.py
    python -m course.check_step --solutions    checks course/solutions/step.py

Both get the same responses to two puzzles, with the same rewards. What each of your functions gives is compared with
what reinforce.py's gives, and after two updates all 934,528 weights are. Your file runs in a process of its own with a
time limit (course/sandbox.py). The exit code is 0 if all functions pass, and 1 otherwise.
"""

import contextlib
import io
import linecache
import sys
from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import tyro
from rich.console import Console
from torch.nn.utils.rnn import pad_sequence

from course import check
from course.sandbox import ROOT, Sandbox

MODEL = ROOT / "models" / "kk_tiny"
SECONDS = 90
PARTS = ("log_probs", "advantages", "loss", "update", "sample")  # in the order in which they are looked at
Part = namedtuple("Part", "number function")
PUZZLES = ("2", "3")  # numbers of people

# -------------------------------------------------------------------------------------------------- what must come back


@cache
def problems_and_tokenizer():
    from transformers import AutoTokenizer

    from rewards import kk

    problems = [kk.generate(1, people, seed=1)[0] for people in PUZZLES]
    return problems, AutoTokenizer.from_pretrained(MODEL)


@cache
def given():
    """The batch: guesses at the puzzles as ids, mask and rewards, and some logp and advantages for `loss`."""
    from rewards import encode, kk

    problems, tokenizer = problems_and_tokenizer()
    rows, masks, rewards = [], [], []
    for problem in problems:
        prompt = encode(tokenizer, problem)
        for i in range(4):
            people = list(problem["answer"])
            knights = [problem["answer"][name] == (i > 0) for name in people] if i < 2 else [i == 2] * len(people)
            answer = "\n".join(
                f"({k + 1}) {name} is a {'knight' if knight else 'knave'}"
                for k, (name, knight) in enumerate(zip(people, knights))
            )
            text = f" I guess so.{' Hmm.' * i}</think><answer> {answer}</answer>"
            response = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            rows.append(torch.tensor(prompt + response))
            masks.append(torch.tensor([False] * len(prompt) + [True] * len(response)))
            rewards.append(kk.score(text, problem["answer"])["reward"])
    mask = pad_sequence(masks, batch_first=True)
    rng = torch.Generator().manual_seed(0)
    return {
        "model": str(MODEL),
        "ids": pad_sequence(rows, batch_first=True),
        "mask": mask,
        "rewards": torch.tensor(rewards),
        "logp": -4 * torch.rand(mask.shape, generator=rng),
        "advantages": torch.randn(mask.shape, generator=rng) * mask,
        "texts": [problem["quiz"] + "\n" for problem in problems],
    }


@cache
def reinforces():
    """What reinforce.py computes: logp, advantages, loss and its gradient, and the weights after two updates."""
    import reinforce

    batch = {name: given()[name] for name in ("ids", "mask", "logp", "advantages")}  # [N, T]
    rewards = given()["rewards"]
    args = reinforce.Args(model=str(MODEL), dtype="float32", temperature=1.0, lr=1e-4, micro_batch_tokens=8192)
    args.compile = args.gradient_checkpointing = False  # compiling takes longer than all the rest
    policy = reinforce.load_policy(args, trained=True)
    with torch.no_grad():
        logp, _ = policy(batch["ids"], batch["mask"], args.temperature)
    expected = {"logp": logp, "advantages": reinforce.compute_advantages(rewards, batch, args)}
    leaf = batch["logp"].clone().requires_grad_()
    expected["loss"] = reinforce.policy_loss(leaf, batch, batch["mask"].sum(), args)
    (expected["gradient"],) = torch.autograd.grad(expected["loss"], leaf)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    batch["advantages"] = expected["advantages"]
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        for _ in range(2):
            reinforce.update(policy, optimizer, batch, 1, args)
    expected["weights"] = torch.cat([weight.detach().flatten() for weight in policy.parameters()])
    return {name: value.detach() for name, value in expected.items()}


# ------------------------------------------------------------------------------------------------------------- verdicts


def check_file(file, box):
    """A list of (part, verdict, what to say, what it printed), in the order of PARTS."""
    file = Path(file).resolve()
    if not file.exists():
        return [(Part("step", name), check.WRONG, f"there is no {file}", "") for name in PARTS]
    linecache.checkcache(str(file))
    harness = check.COURSE / "step.py"
    done = box.attempt(file, "", [given()], seconds=SECONDS, harness=harness)
    lines = []
    for name in PARTS:
        lines.append((Part("step", name), *verdict(name, done, file), "" if lines else done["printed"]))
    return lines


def verdict(name, done, file):
    """(PASS, NOT YET or WRONG, what to say) of a function."""
    if "gave" in done and name in done["gave"]:
        try:
            text = globals()[f"wrong_{name}"](done["gave"][name])
        except Exception as error:
            text = f"gives something else than what is asked for: {type(error).__name__}: {error}"
        return (check.WRONG, text) if text else (check.PASS, "")
    if "unreadable" in done:
        return check.WRONG, check.unreadable(done["unreadable"], file)
    if "ended" in done:
        return check.WRONG, "takes too long" if done["ended"] == "time" else "ends the program"
    error = done.get("error")
    if error is None or name != next(part for part in PARTS if part not in done.get("gave", {})):
        return check.NOT_YET, "comes after one that is not right"
    if error["type"] == "NotImplementedError":
        return check.NOT_YET, "not written yet"
    line = linecache.getline(str(file), error["line"]).strip() if error["line"] else ""
    return check.WRONG, f"raises {error['type']}: {error['text']}\nin line {error['line']} of {file.name}: {line}"


def differs(mine, name, tolerance=1e-4):
    """What is wrong with a tensor, or ""."""
    right = reinforces()[name]
    if mine.shape != right.shape:
        return f"wrong shape: expected {list(right.shape)}, got {list(mine.shape)}"
    if torch.allclose(mine.float(), right.float(), rtol=tolerance, atol=tolerance):
        return ""
    return f"{name}: up to {(mine.float() - right.float()).abs().max():.4g} away from reinforce.py's"


def wrong_log_probs(gave):
    mine, mask = gave["logp"], given()["mask"]
    if not gave["has_gradient"]:
        return "has no gradient: the policy's weights must not be detached"
    text = differs(mine, "logp")
    if text and mine.shape == mask.shape and not torch.equal(mine * ~mask, torch.zeros_like(mine)):
        return "is not 0 outside the mask"
    if text and mine.shape == mask.shape and torch.allclose(mine[:, :-1], reinforces()["logp"][:, 1:], atol=1e-4):
        return "stands one place too early: the logits at a position are of the next token"
    return text


def wrong_advantages(gave):
    return differs(gave["advantages"], "advantages")


def wrong_loss(gave):
    mine, right = gave["loss"], reinforces()["loss"]
    if mine.shape == right.shape and torch.allclose(mine, -right):
        return "has the wrong sign: the optimizer makes a loss small"
    return differs(mine, "loss") or differs(gave["gradient"], "gradient", 1e-6)


def wrong_update(gave):
    right, mine = reinforces()["weights"], gave["weights"]
    if mine.shape != right.shape:
        return "the policy has other weights than before"
    # AdamW moves a weight by up to 1e-4, its lr, in each step. Of a gradient near 0 rounding decides the direction.
    apart = (mine - right).abs().mean()
    if apart < 1e-6:
        return ""
    return f"after two updates the weights are {apart:.1g} away from reinforce.py's, in the mean (zero_grad? backward?)"


def wrong_sample(gave):
    ids, mask, texts = gave["ids"], gave["mask"], gave["texts"]
    from rewards import encode

    problems, tokenizer = problems_and_tokenizer()
    prompts = [encode(tokenizer, {**problem, "messages": problem["messages"][-1:]}) for problem in problems]
    num_rows = len(ids) // len(prompts)
    if ids.shape != mask.shape or mask.dtype != torch.bool or len(texts) != len(ids) or len(ids) % len(prompts):
        return "ids and mask must be [N, T], mask of bool, and there are N texts"
    if num_rows < 2:
        return "one response is no group"
    for i, (row, where, text) in enumerate(zip(ids, mask, texts)):
        prompt = prompts[i // num_rows]
        begin, length = len(prompt), int(where.sum())
        if row[:begin].tolist() != prompt:
            return f"row {i} does not begin with its prompt: the responses to a problem follow each other"
        if not where[begin : begin + length].all() or not length:
            return f"row {i}: the mask must be True from the first to the last token of the response, and nowhere else"
        response = row[begin : begin + length].tolist()
        end = tokenizer.eos_token_id
        if end in response[:-1]:
            return f"row {i}: the mask goes on after the end token"
        if response[-1] != end and begin + length < ids.shape[1] and row[begin + length] == end:
            return f"row {i}: the mask lacks the end token, which the policy also chose"
        if text != tokenizer.decode(response, skip_special_tokens=True):
            return f"row {i}: the text is not that of the response's tokens"
    if all(len({tuple(row.tolist()) for row in ids[i : i + num_rows]}) == 1 for i in range(0, len(ids), num_rows)):
        return "all responses to a problem are equal: sample them (do_sample=True)"
    return ""


# ----------------------------------------------------------------------------------------------------------------- main


@dataclass
class Args:
    """Whose step."""

    file: Path = check.COURSE / "exercises" / "step.py"
    solutions: tyro.conf.FlagCreatePairsOff[bool] = False  # course/solutions/step.py


def main(args):
    file = check.COURSE / "solutions" / "step.py" if args.solutions else args.file
    with Sandbox() as box:
        lines = check_file(file, box)
    check.show(lines, Console(highlight=False, emoji=False, markup=False))
    sys.exit(int(any(verdict != check.PASS for _, verdict, *_ in lines)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
