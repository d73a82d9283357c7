"""Compare your own training step, course/lesson_02/step.py, with reinforce.py's on the same responses.

    python -m course.check_step                check course/lesson_02/step.py
    python -m course.check_step --solutions    check course/lesson_02/solution_step.py

Both get the same responses to two puzzles, with the same rewards. The result of each of your functions is compared with
reinforce.py's, and after two updates so are all 934,528 weights. For the tokens from `sample`, the check asks whether
another way to sample explains them better (best_explanation). Your file runs in a separate process with a time limit
(course/sandbox.py). The exit code is 0 if all functions pass, and 1 otherwise.
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
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from course import check
from course.sandbox import ROOT, attempt_file

MODEL = ROOT / "models" / "kk_tiny"
SECONDS = 90
PARTS = ("log_probs", "advantages", "loss", "update", "sample")  # in the order of the checks
Part = namedtuple("Part", "number function")
PUZZLES = ("2", "3")  # puzzle sizes
ASKED = (("2", 14), ("3", 50))  # people and seed of the puzzles for `sample`: a short prompt and a long one
NOT_SHIFTED = "is not shifted: the logits at a position are of the next token, so logits[:, :-1] belong to ids[:, 1:]"
SURE = 15  # nats by which another way to sample must explain the tokens better than the right one
TEMPERATURES = [tenths / 10 for tenths in range(1, 31)]


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@cache
def asked():
    """Return the puzzles for `sample`: their texts, and their prompts as ids."""
    from rewards import kk
    from runtime.chats import encode

    problems = [kk.generate(1, people, seed)[0] for people, seed in ASKED]
    prompts = [encode(tokenizer(), {**problem, "messages": problem["messages"][-1:]}) for problem in problems]
    return [problem["quiz"] + "\n" for problem in problems], prompts


@cache
def given():
    """Return the batch: guesses at the puzzles as ids, mask and rewards, and random logp and advantages for `loss`."""
    from rewards import kk
    from runtime.chats import encode

    rows, masks, rewards = [], [], []
    for problem in [kk.generate(1, people, seed=1)[0] for people in PUZZLES]:
        prompt = encode(tokenizer(), problem)
        for i in range(4):
            people = list(problem["answer"])
            knights = [problem["answer"][name] == (i > 0) for name in people] if i < 2 else [i == 2] * len(people)
            answer = "\n".join(
                f"({k + 1}) {name} is a {'knight' if knight else 'knave'}"
                for k, (name, knight) in enumerate(zip(people, knights))
            )
            text = f" I guess so.{' Hmm.' * i}</think><answer> {answer}</answer>"
            response = [*tokenizer().encode(text, add_special_tokens=False), tokenizer().eos_token_id]
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
        "texts": asked()[0],
    }


def reinforces_policy():
    """Return reinforce.py, its arguments for kk_tiny, and a policy to train."""
    import reinforce

    args = reinforce.Args(model=str(MODEL), dtype="float32", temperature=1.0, lr=1e-4, micro_batch_tokens=8192)
    args.compile = args.gradient_checkpointing = False  # compiling takes longer than the whole check
    return reinforce, args, reinforce.load_policy(args, trained=True)


@cache
def reinforces():
    """Compute reinforce.py's results: logp, advantages, loss and its gradient, and the weights after two updates."""
    batch = {name: given()[name] for name in ("ids", "mask", "logp", "advantages")}  # [N, T]
    reinforce, args, policy = reinforces_policy()
    with torch.no_grad():
        logp, _ = policy(batch["ids"], batch["mask"], args.temperature)
    scores = [{"reward": reward} for reward in given()["rewards"].tolist()]
    advantages = reinforce.compute_advantages(scores, batch, args)
    leaf = batch["logp"].clone().requires_grad_()
    loss = reinforce.policy_loss(leaf, batch, batch["mask"].sum(), args)
    (gradient,) = torch.autograd.grad(loss, leaf)
    weights = after_updates(advantages)
    return {"logp": logp, "advantages": advantages, "loss": loss.detach(), "gradient": gradient, "weights": weights}


def after_updates(advantages, count=2, **missing):
    """Return all weights after reinforce.py's updates. missing: omits "clip", "zero_grad" or both."""
    reinforce, args, policy = reinforces_policy()
    if missing.get("clip"):
        args.max_grad_norm = 1e9
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    if missing.get("zero_grad"):
        optimizer.zero_grad = lambda: None
    batch = {"ids": given()["ids"], "mask": given()["mask"], "advantages": advantages}
    with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bar
        for _ in range(count):
            reinforce.update(policy, optimizer, batch, 1, args)
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


def check_file(file, jail=None):
    """Return a list of (part, verdict, message, printed text), in the order of PARTS. jail: as in attempt_file."""
    file = Path(file).resolve()
    if not file.exists():
        return [(Part("step", name), check.WRONG, f"there is no {file}", "") for name in PARTS]
    linecache.checkcache(str(file))
    done = attempt_file(file, "", [given()], seconds=SECONDS, harness="course.step", jail=jail)
    lines = []
    for name in PARTS:
        lines.append((Part("step", name), *verdict(name, done, file), "" if lines else done["printed"]))
    return lines


def verdict(name, done, file):
    """Return (PASS, NOT YET or WRONG, message) for a function."""
    if "gave" in done and name in done["gave"]:
        try:
            gave = done["gave"][name]
            text = differs(gave[name], name) if name == "advantages" else globals()[f"wrong_{name}"](gave)
        except Exception as error:
            text = f"gives something else than what is asked for: {type(error).__name__}: {error}"
        return (check.WRONG, text) if text else (check.PASS, "")
    if stopped := check.without_result(done, file):
        return check.WRONG, stopped
    error = done.get("error")
    if error is None or name != next(part for part in PARTS if part not in done.get("gave", {})):
        return check.NOT_YET, "comes after one that is not right"
    if error["type"] == "NotImplementedError":
        return check.NOT_YET, "not written yet"
    return check.WRONG, check.raised(error, file)


def differs(mine, name, tolerance=1e-4):
    """Describe what is wrong with a tensor, or return ""."""
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
    if not text or mine.shape != mask.shape:
        return text
    for message, wrong in mistakes_of_log_probs().items():
        if torch.allclose(mine.masked_fill(~mask, 0), wrong, rtol=1e-4, atol=1e-4):
            return message
    if not torch.equal(mine * ~mask, torch.zeros_like(mine)):
        return "is not 0 outside the mask"
    return text


@cache
def mistakes_of_log_probs():
    """Return {message: the log-probabilities with this mistake}."""
    ids, mask = given()["ids"], given()["mask"]
    logits = checkers_policy(flat=False)(ids).logits  # [N, T, V]
    before, after = logits[:, :-1], ids[:, 1:]  # the logits that a token was sampled from, and the token

    def chosen(values, ids):
        return values.gather(-1, ids[:, :, None])[:, :, 0]

    right = chosen(before.log_softmax(-1), after)  # [N, T - 1]
    late, early = (1, 0), (0, 1)  # positions added at the start, at the end
    wrong = {
        NOT_SHIFTED: chosen(logits.log_softmax(-1), ids),
        f"{NOT_SHIFTED}. And it stands one place too late": pad(chosen(before.log_softmax(-1), ids[:, :-1]), late),
        "stands one place too early: the logits at a position are of the next token": pad(right, early),
        "gives logits: log_softmax over the vocabulary makes log-probabilities of them": pad(
            chosen(before, after), late
        ),
        "gives probabilities: their logarithm is asked for": pad(right.exp(), late),
        "has the wrong sign: a log-probability is never positive": pad(-right, late),
    }
    return {message: values.masked_fill(~mask, 0) for message, values in wrong.items()}


def wrong_loss(gave):
    mine, right = gave["loss"], reinforces()["loss"]
    if mine.shape == right.shape and torch.allclose(mine, -right):
        return "has the wrong sign: the optimizer makes a loss small"
    return differs(mine, "loss") or differs(gave["gradient"], "gradient", 1e-6)


MISTAKES_OF_UPDATE = {  # message: arguments for after_updates
    "the gradient is not scaled down: clip_grad_norm_ to LARGEST_NORM belongs between backward and step": {"clip": 1},
    "the second gradient has the first in it: optimizer.zero_grad() is missing": {"zero_grad": 1},
    "clip_grad_norm_ and zero_grad are missing": {"clip": 1, "zero_grad": 1},
    "the weights have not moved: backward, then optimizer.step(), then zero_grad": {"count": 0},
    "the weights have moved once in two updates": {"count": 1},
}


def wrong_update(gave):
    right, mine = reinforces()["weights"], gave["weights"]
    if mine.shape != right.shape:
        return "the policy has other weights than before"

    def apart(weights):
        # AdamW moves a weight by up to 1e-4, its lr, per step. If a gradient is near 0, rounding decides the direction.
        return (mine - weights).abs().mean().item()

    if apart(right) < 1e-6:
        return ""
    for message, missing in MISTAKES_OF_UPDATE.items():
        if apart(after_updates(reinforces()["advantages"], **missing)) < 1e-6:
            return message
    return f"after two updates the weights are {apart(right):.1g} away from reinforce.py's, in the mean"


def wrong_sample(gave):
    drawn, flatly_drawn = gave["drawn"]
    return wrong_rows(*drawn) or wrong_draws(*drawn[:2], flat=False) or wrong_draws(*flatly_drawn[:2], flat=True)


def wrong_rows(ids, mask, texts):
    """Describe what is wrong with the position of prompt, response, mask and text, or return ""."""
    prompts, end = asked()[1], tokenizer().eos_token_id
    num_rows = len(ids) // len(prompts)
    if ids.shape != mask.shape or mask.dtype != torch.bool or len(texts) != len(ids) or len(ids) % len(prompts):
        return "ids and mask must be [N, T], mask of bool, and there are N texts"
    if num_rows < 2:
        return "one response is no group"
    longest = mask.sum(1).max()  # the length of a truncated response, if there is one
    for i, (row, where, text) in enumerate(zip(ids, mask, texts)):
        prompt = prompts[i // num_rows]
        begin, length = len(prompt), int(where.sum())
        if row[:begin].tolist() != prompt:
            return f"row {i} does not begin with its prompt: the responses to a problem follow each other"
        if not where[begin : begin + length].all() or not length:
            return f"row {i}: the mask must be True from the first to the last token of the response, and nowhere else"
        response = row[begin : begin + length].tolist()
        if end in response[:-1]:
            return f"row {i}: the mask goes on after the end token"
        is_behind = begin + length < ids.shape[1] and row[begin + length] == end
        if response[-1] != end and is_behind and length < longest:  # in the longest response it may be padding
            return f"row {i}: the mask lacks the end token, which the policy also chose"
        if response[-1] != end and length < longest:
            return f"row {i}: the end token is cut off: leave it in ids and mask, or the policy does not learn to end"
        if text != tokenizer().decode(response, skip_special_tokens=True):
            return f"row {i}: the text is not the text of the response's tokens"
    groups = [{tuple(row.tolist()) for row in ids[i : i + num_rows]} for i in range(0, len(ids), num_rows)]
    if any(len(group) == 1 for group in groups):
        return "all responses to a problem are equal: sample them (do_sample=True)"
    return ""


def wrong_draws(ids, mask, flat):
    """Explain how the tokens were sampled if not from softmax(logits), or return "". flat: selects the policy."""
    all_logp, drawn = log_probs_of_all(ids, mask, flat)  # [n, V] and [n]
    text, gain = best_explanation(all_logp, drawn)
    if gain < SURE:
        return ""
    of_long = torch.arange(len(mask))[:, None].expand(mask.shape)[mask] >= len(mask) / 2  # [n]
    if best_explanation(all_logp[of_long], drawn[of_long])[1] < SURE / 3:
        return (
            "the responses to the shorter prompt are not drawn from the policy, those to the longer one are: with "
            "padding on the left, generate needs an attention_mask that is 0 there"
        )
    return f"{text}. The policy of log_probs is softmax(logits) over all tokens, at temperature 1"


def log_probs_of_all(ids, mask, flat):
    """Return, per response token, the log-probabilities of the vocabulary, [n, V], and the sampled token, [n]."""
    logits = checkers_policy(flat)(ids).logits[:, :-1]  # [N, T - 1, V]
    return logits[mask[:, 1:]].double().log_softmax(-1), ids[mask]


@cache
def checkers_policy(flat):
    from course import step

    return step.load(str(MODEL), flat).requires_grad_(False)


def best_explanation(all_logp, drawn):
    """Find the best explanation of the sampled tokens, and by how many nats it is better than softmax(logits).

    top_k and top_p are the smallest values that allow all sampled tokens; the tokens that they exclude make the others
    more probable.
    """
    shares = all_logp.exp()  # [n, V]
    ordered, places = shares.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # [n, V]: the total probability of the more probable tokens
    rank = (places == drawn[:, None]).int().argmax(-1)  # [n]
    top_k = int(rank.max()) + 1
    top_p = before.gather(-1, rank[:, None]).max().item()
    allowed = (ordered * (before <= top_p)).sum(-1)
    right = all_logp.gather(-1, drawn[:, None]).sum().item()
    by_k = f"draws no token but the {top_k} most probable: top_k=0 takes all (generate's default is 50)"
    by_p = f"draws no low-probability token, as with top_p = {top_p:.2f}: top_p=1.0 takes all"
    found = {by_k: -ordered[:, :top_k].sum(-1).log().sum().item(), by_p: -allowed.log().sum().item()}
    for temperature in TEMPERATURES:
        scaled = (all_logp / temperature).log_softmax(-1).gather(-1, drawn[:, None]).sum().item()
        found[f"draws as with temperature {temperature:g}"] = scaled - right
    text = max(found, key=found.get)
    return text, found[text]


@dataclass
class Args:
    """The step to check."""

    file: Path = check.COURSE / "lesson_02" / "step.py"
    solutions: tyro.conf.FlagCreatePairsOff[bool] = False  # course/lesson_02/solution_step.py


def main(args):
    file = check.COURSE / "lesson_02" / "solution_step.py" if args.solutions else args.file
    lines = check_file(file)
    check.show(lines, Console(highlight=False, emoji=False, markup=False))
    sys.exit(int(any(verdict != check.PASS for _, verdict, *_ in lines)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
