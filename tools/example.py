"""The worked example of docs/algorithms: one prompt and four short responses, in numbers.

The rewards and probabilities are given here. All else is computed by a script's own functions: compute_advantages, and
its update() on a table of log-probabilities in place of the model (updates.py). What is shown of an update are the
local variables of the script's policy_loss, read when it returns.

pages.py uses this module. It has no command line.
"""

import contextlib
import dataclasses
import importlib
import math
import sys
from dataclasses import dataclass, field
from statistics import fmean, stdev
from types import SimpleNamespace
from unittest import mock

import torch

from runtime.clock import Clock
from tools import updates

# ------------------------------------------------------------------------------------------------------- what is given


@dataclass(frozen=True)
class Token:
    """A token of a response, and what models say about it. Probabilities are in (0, 1], entropies in nats."""

    text: str
    old: float  # π_old, when it was sampled
    now: float  # π, at the second update of the step; a script with one update a step has no use for it
    ref: float  # π_ref, of the reference model
    sampler: float  # what the sampler took for π_old
    entropy: float  # of the policy when the token was sampled
    entropy_now: float  # of the policy at the second update
    value: float  # V_old, what the critic expects here
    value_now: float  # V, the same after an update of the critic


RESPONSES = [  # (reward, tokens)
    (
        3.0,
        [
            Token("now", 0.90, 0.92, 0.85, 0.90, 0.33, 0.30, 0.5, 0.6),
            Token("suppose", 0.05, 0.07, 0.04, 0.05, 1.90, 1.80, 0.8, 1.2),
            Token("A", 0.60, 0.66, 0.60, 0.60, 0.85, 0.80, 1.5, 1.6),
        ],
    ),
    (
        3.0,
        [
            Token("check", 0.50, 0.45, 0.50, 0.48, 0.69, 0.70, 0.4, 0.5),
            Token("B", 0.95, 0.93, 0.90, 0.95, 0.20, 0.25, 1.2, 1.3),
        ],
    ),
    (
        -1.0,
        [
            Token("so", 0.90, 0.73, 0.90, 0.90, 0.40, 0.65, 0.5, 0.4),
            Token("obviously", 0.02, 0.012, 0.03, 0.005, 1.60, 1.70, 0.1, -0.4),
            Token("B", 0.70, 0.72, 0.70, 0.70, 0.75, 0.72, -0.2, -0.3),
            Token("lies", 0.42, 0.41, 0.50, 0.42, 1.10, 1.12, -0.6, -0.7),
        ],
    ),
    (
        -3.0,
        [
            Token("guess", 0.30, 0.48, 0.30, 0.30, 1.75, 2.10, 0.6, 0.5),
            Token("A", 0.80, 0.78, 0.80, 0.80, 0.60, 0.62, -0.5, -0.6),
            Token("perhaps", 0.10, 0.09, 0.20, 0.25, 2.30, 2.20, -1.5, -1.6),
        ],
    ),
]
NUM_TOKENS = sum(len(tokens) for _, tokens in RESPONSES)
ROWS = [(i, token) for i, (_, tokens) in enumerate(RESPONSES, 1) for token in tokens]  # those of a table

# The scripts have their own settings, except for these.
SETTINGS = {"responses_per_prompt": len(RESPONSES), "prompts_per_step": 1, "max_response_tokens": 5}
KL_COEF = 0.1  # for scripts that have a KL term: their 0.001 would not show in three decimals
OVERLONG_BUFFER = 2  # dapo.py's B


def settings_of(script):
    """A script's settings for the example."""
    trainer = importlib.import_module(script)
    args = trainer.Args(**SETTINGS, max_grad_norm=math.inf)  # the gradient is shown as it is
    if getattr(args, "kl_coef", 0) > 0:
        args.kl_coef = KL_COEF
    if hasattr(args, "overlong_buffer"):
        args.overlong_buffer = OVERLONG_BUFFER
    return args


def rows_of(name):
    """One of Token's numbers as a tensor [N, T] in float64, zero outside the mask."""
    longest = max(len(tokens) for _, tokens in RESPONSES)
    values = torch.zeros(len(RESPONSES), longest, dtype=torch.float64)
    for row, (_, tokens) in zip(values, RESPONSES):
        for t, token in enumerate(tokens):
            row[t] = getattr(token, name)
    return values


def sampled():
    """(batch, rewards [N]): what is known of the responses before their advantages, in float64."""
    mask = rows_of("old") > 0

    def log(name):
        return rows_of(name).where(mask, 1.0).log()

    batch = {
        "ids": torch.zeros(mask.shape, dtype=torch.long),
        "mask": mask,
        "old_logp": log("old"),
        "ref_logp": log("ref"),
        "sampler_logp": log("sampler"),
        "entropy": rows_of("entropy"),
        "values": rows_of("value"),
    }
    rewards = torch.tensor([reward for reward, _ in RESPONSES], dtype=torch.float64)
    return batch, rewards


# ------------------------------------------------------------------------------------------------- what a script makes


@dataclass
class Call:
    """What a function had when it returned: its local variables by name, and its result."""

    local: dict
    result: object


@contextlib.contextmanager
def watched(trainer, *names):
    """Within its block every call of these functions of a trainer is kept: {name: [Call, …]}, in order.

    Names of functions that the trainer does not have are left out.
    """
    codes = {getattr(trainer, name).__code__: name for name in names if hasattr(trainer, name)}
    calls = {name: [] for name in codes.values()}

    def on_event(frame, event, result):
        if event == "return" and frame.f_code in codes:
            local = {name: dict(v) if isinstance(v, dict) else v for name, v in frame.f_locals.items()}
            calls[codes[frame.f_code]].append(Call(local, result))

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def by_token(calls, name, shape):
    """A local variable of policy_loss for each token of the second update, [N, T]; NaN where a token took no part.

    calls: those of policy_loss. The batch's ids there are places in a table, which holds the batch twice: the second
    copy is the second update. name: a local variable, or a key of its batch.
    """
    num_rows, length = shape
    values = torch.full((2 * num_rows * length,), math.nan, dtype=torch.float64)
    for call in calls:
        batch = call.local["batch"]
        value = call.local[name] if name in call.local else batch[name]
        value = torch.as_tensor(value).detach().double().expand(batch["ids"].shape)
        values[batch["ids"][batch["mask"]]] = value[batch["mask"]]
    return values.view(2, num_rows, length)[1]


@dataclass
class Example:
    """What a script makes of the responses. Tensors are [N, T] in float64, with NaN where there is nothing to tell."""

    args: object
    penalties: list  # dapo.py's, one for each response
    groups_kept: int | None  # dapo.py's, of this group and one of equal rewards
    columns: dict = field(default_factory=dict)  # {name: tensor} of the tokens
    losses: list = field(default_factory=list)  # of the passes of the second update: one, or one for each stage
    divisor: float | None = None  # what the sum of the tokens' losses is divided by, if it is one number
    bins: list = field(default_factory=list)  # acpo.py's numbers of each bin
    threshold: float | None = None  # entropy_top.py's τ
    value_loss: float | None = None  # ppo.py's, of the critic


def example(script):
    """An Example: everything that the page of a script shows."""
    trainer = importlib.import_module(script)
    args = settings_of(script)
    given, rewards = sampled()
    mask = given["mask"]
    shape = mask.shape
    one_update = args.updates_per_step == 1  # then the policy is still the one that sampled
    probability, entropy = ("old", "entropy") if one_update else ("now", "entropy_now")
    logp = rows_of(probability).where(mask, 1.0).log()

    with watched(trainer, "token_returns", "estimate_advantages", "ar_weight", "overlong_penalty") as before:
        batch = updates.with_advantages(script, given, rewards, args)
    first, _ = updates.token_weights(script, batch, batch["old_logp"], batch["entropy"], args, is_first=True)
    watch = watched(trainer, "policy_loss", "clip_ranges", "entropy_threshold")
    with watch as calls:
        now, stage = updates.token_weights(script, batch, logp, rows_of(entropy), args, is_first=False)

    passes = [call for call in calls["policy_loss"] if call.local["batch"]["ids"].min() >= mask.numel()]
    found = Example(args, [call.result for call in before.get("overlong_penalty", [])], groups_kept(trainer, args))
    for call in passes:
        result = call.result[0] if isinstance(call.result, tuple) else call.result
        found.losses.append(result.item())
    if "divisor" in passes[-1].local:
        found.divisor = float(passes[-1].local["divisor"])
    names = ["logp", "ratio", "advantages", "surrogate", "clipped", "gate", "reasoning", "loss", "clip_range", "weight"]
    everything = passes[-1].local | passes[-1].local["batch"]
    found.columns = {name: by_token(passes, name, shape) for name in names if name in everything}
    found.columns |= {
        "first": first * NUM_TOKENS,
        "now": now * NUM_TOKENS,
        "stage": stage.double(),
        "in_loss": (~found.columns["loss"].isnan()).double(),
        "difference": rows_of(probability) - rows_of("old"),
    }
    if hasattr(trainer, "k3"):
        found.columns["k3"] = trainer.k3(logp, batch["ref_logp"])
    if "token_returns" in before:
        found.columns["k1"] = before["token_returns"][-1].local["k1"]
        found.columns["return"] = before["token_returns"][-1].result[0]
    if "ar_weight" in before:
        found.columns["ar_weight"] = before["ar_weight"][-1].result
        if found.penalties:
            rewards = rewards + torch.tensor(found.penalties, dtype=torch.float64)
        found.columns["advantages_before"] = trainer.compute_advantages(rewards, given, args)
    if "clip_ranges" in calls:
        found.bins = calls["clip_ranges"][-1].result[1]
    if "entropy_threshold" in calls:
        found.threshold = calls["entropy_threshold"][-1].result
    if hasattr(trainer, "sampler_correction"):
        icepop = dataclasses.replace(args, correction="icepop")
        found.columns["icepop"], _ = trainer.sampler_correction(batch, icepop)
    if hasattr(trainer, "outside_region"):
        kl = dataclasses.replace(args, divergence="kl")
        found.columns["outside_kl"] = trainer.outside_region(logp, batch["old_logp"], batch["advantages"], kl).double()
    if hasattr(trainer, "value_loss"):
        add_critic(trainer, batch, before["estimate_advantages"][-1].local, found)
    return found


def add_critic(trainer, batch, local, found):
    """Adds ppo.py's columns of the critic: k1, estimates, returns, and the loss of its values."""
    returns = local["advantages"] + batch["values"]  # as in main
    minibatch = batch | {"returns": returns}
    with watched(trainer, "value_loss") as calls:
        loss, _ = trainer.value_loss(rows_of("value_now"), minibatch, NUM_TOKENS, found.args)
    of_tokens = calls["value_loss"][-1].local
    found.columns |= {
        "k1": local["k1"],
        "estimate": local["advantages"],
        "return": returns,
        "value_loss": of_tokens["loss"],
        "value_clipped": of_tokens["clipped"].double(),
    }
    found.value_loss = loss.item()


def groups_kept(trainer, args):
    """How many dapo.py keeps of two groups, this one and one of equal rewards; None for scripts that keep all.

    Its dynamic_sampling is called with rewards in place of texts: the second group has the first reward alone.
    """
    if not hasattr(trainer, "dynamic_sampling"):
        return None
    rewards = [reward for reward, _ in RESPONSES]
    given, _ = sampled()
    batch = {"ids": torch.cat([given["ids"]] * 2), "mask": torch.cat([given["mask"]] * 2)}
    responses = [SimpleNamespace(text=reward) for reward in [*rewards, *[rewards[0]] * len(rewards)]]
    task = SimpleNamespace(score_all=lambda texts, answers: [{"reward": text} for text in texts])
    args = dataclasses.replace(args, prompts_per_step=2, updates_per_step=1, max_refills=0)
    with mock.patch.object(trainer, "sample", lambda *_: (batch, responses)):
        *_, metrics = trainer.dynamic_sampling(None, task, [{"answer": None}] * 2, 0, 1, Clock(), args)
    return metrics["groups_kept"]


# --------------------------------------------------------------------------------------------------------------- tables


def cell(value, kind="number"):
    """A number with three decimals and a typographic minus; a dash if there is none. kind "flag": "yes" or nothing."""
    if math.isnan(value):
        return "–"
    if kind == "flag":
        return "yes" if value else ""
    if kind == "count":
        return str(int(value))
    return f"{value:z.3f}".replace("-", "−")


def table(titles, rows):
    """A Markdown table, as a list of lines. rows: lists of texts."""
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return lines + [f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows]


def token_table(columns):
    """A table with a row for each token. columns: {title: (tensor [N, T], kind of cell)}."""
    mask = rows_of("old") > 0
    texts = {title: [cell(value, kind) for value in values[mask].tolist()] for title, (values, kind) in columns.items()}
    rows = []
    for k, (i, token) in enumerate(ROWS):
        rows.append([str(i), f"`{token.text}`", *(column[k] for column in texts.values())])
    return table(["response", "token", *texts], rows)


def mean_and_std(values):
    """(mean, standard deviation with ddof 1)."""
    return fmean(values), stdev(values)
