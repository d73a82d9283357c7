"""Compute the worked example of docs/algorithms: one prompt, four short responses and twelve tokens, in numbers.

Rewards and probabilities are given here. Advantages and an algorithm's own quantities come from the script's
functions, and the weights of the tokens from its update() on a table of log-probabilities (updates.py).

pages.py uses this module. It has no command line.
"""

import dataclasses
import functools
import importlib
import math
from typing import NamedTuple

import torch

from tools.maintain import updates


class Token(NamedTuple):
    """A token of a response, and the models' numbers about it. Probabilities are in (0, 1], entropies in nats."""

    response: int  # from 1
    text: str
    old: float  # π_old, when it was sampled
    new: float  # π, at the second update of the step; unused by a script with one update per step
    ref: float  # π_ref, of the reference model
    sampler: float  # the sampler's value of π_old
    entropy: float  # the policy's when the token was sampled
    entropy_new: float  # the policy's at the second update
    value: float  # V_old, the critic's expectation here


REWARDS = [3.0, 3.0, -1.0, -3.0]
TOKENS = [
    Token(1, "now", 0.90, 0.92, 0.85, 0.90, 0.33, 0.30, 0.5),
    Token(1, "suppose", 0.05, 0.07, 0.04, 0.05, 1.90, 1.80, 0.8),
    Token(1, "A", 0.60, 0.66, 0.60, 0.60, 0.85, 0.80, 1.5),
    Token(2, "check", 0.50, 0.45, 0.50, 0.48, 0.69, 0.70, 0.4),
    Token(2, "B", 0.95, 0.93, 0.90, 0.95, 0.20, 0.25, 1.2),
    Token(3, "so", 0.90, 0.73, 0.90, 0.90, 0.40, 0.65, 0.5),
    Token(3, "obviously", 0.02, 0.012, 0.03, 0.005, 1.60, 1.70, 0.1),
    Token(3, "B", 0.70, 0.72, 0.70, 0.70, 0.75, 0.72, -0.2),
    Token(3, "lies", 0.42, 0.41, 0.50, 0.42, 1.10, 1.12, -0.6),
    Token(4, "guess", 0.30, 0.48, 0.30, 0.30, 1.75, 2.10, 0.6),
    Token(4, "A", 0.80, 0.78, 0.80, 0.80, 0.60, 0.62, -0.5),
    Token(4, "perhaps", 0.10, 0.09, 0.20, 0.25, 2.30, 2.20, -1.5),
]
REPLY = Token(1, "higher", *[math.nan] * 7)  # the task's reply to `suppose`, only in CONVERSE
CONVERSE = ("grpo_multi_turn", "gigpo")
PARTS = {"format": [1.0, 1.0, 1.0, -1.0], "answer": [2.0, 2.0, -2.0, -2.0]}  # parts of the rewards, for gdpo.py

# The scripts have their own settings, except for these.
SETTINGS = {"responses_per_prompt": len(REWARDS), "prompts_per_step": 1, "max_response_tokens": 5}
KL_COEF = 0.1  # for scripts with a KL term: their 0.001 would not show in three decimals
OVERLONG_BUFFER = 2  # dapo.py's B


def settings_of(script):
    """Return a script's settings for the example."""
    args = importlib.import_module(script).Args(**SETTINGS, max_grad_norm=math.inf)  # show the gradient unclipped
    if args.__dict__.get("kl_coef", 0) > 0:
        args.kl_coef = KL_COEF
    if hasattr(args, "overlong_buffer"):
        args.overlong_buffer = OVERLONG_BUFFER
    return args


def tokens_of(script):
    """Return the twelve tokens; in a conversation also its reply, which is outside the mask."""
    return [*TOKENS[:2], REPLY, *TOKENS[2:]] if script in CONVERSE else TOKENS


def places_of(tokens):
    """Return the place of each token in a tensor [N, T]."""
    found = []
    for k, token in enumerate(tokens):
        found.append((token.response - 1, sum(other.response == token.response for other in tokens[:k])))
    return found


def rows_of(name, tokens, padding=0.0):
    """Return one of Token's numbers as a tensor [N, T] in float64, with this padding outside the mask."""
    places = places_of(tokens)
    longest = max(place for _, place in places) + 1
    values = torch.full((len(REWARDS), longest), padding, dtype=torch.float64)
    for place, token in zip(places, tokens):
        if token is not REPLY:
            values[place] = getattr(token, name)
    return values


def sampled(script):
    """Return (batch, rewards, [N] or [N, parts]): the responses' data before their advantages, in float64."""
    tokens = tokens_of(script)
    mask = rows_of("old", tokens) > 0
    batch = {"ids": torch.zeros(mask.shape, dtype=torch.long), "mask": mask}
    for name in ("old", "ref", "sampler"):
        batch[f"{name}_logp"] = rows_of(name, tokens, padding=1.0).log()
    batch |= {"entropy": rows_of("entropy", tokens), "old_values": rows_of("value", tokens)}
    rewards = list(zip(*PARTS.values())) if script == "gdpo" else REWARDS
    return batch, torch.tensor(rewards, dtype=torch.float64)


@dataclasses.dataclass
class Example:
    """The numbers that a script computes from the responses."""

    args: object
    tokens: list
    columns: dict  # {name: the numbers of the tokens; NaN for no value}
    rewards: list  # of the responses, with dapo.py's penalties
    penalties: list  # dapo.py's; [] in other scripts
    advantages: list  # of the responses; [] if they differ within a response
    bins: list  # acpo.py's numbers per bin


@functools.cache
def example(script, **settings):
    """Return the Example of a script. settings: differences from settings_of()."""
    trainer = importlib.import_module(script)
    args = dataclasses.replace(settings_of(script), **settings)
    tokens = tokens_of(script)
    given, rewards = sampled(script)
    several = args.updates_per_step > 1  # otherwise the policy of the update is still the one that sampled
    logp = rows_of("new" if several else "old", tokens, padding=1.0).log()
    entropy = rows_of("entropy_new", tokens) if several else given["entropy"]
    correct = [reward > 0 for reward in REWARDS]
    batch = updates.with_advantages(script, given, rewards, correct, args)

    def weights(of_batch, is_first, **changes):
        policy = (batch["old_logp"], batch["entropy"]) if is_first else (logp, entropy)
        changed = dataclasses.replace(args, **changes)
        weight, stage = updates.token_weights(script, of_batch, *policy, changed, is_first)
        return weight * len(TOKENS), stage

    columns = {name: rows_of(name, tokens) for name in Token._fields[2:]}
    columns["first"], columns["stage"] = weights(batch, is_first=True)
    columns["second"], _ = weights(batch, is_first=False)
    ratio = (logp - batch["old_logp"]).exp()
    if script == "gspo":  # the response's: the geometric mean
        mean = (logp - batch["old_logp"]).sum(1, keepdim=True) / batch["mask"].sum(1, keepdim=True)
        ratio = mean.exp().expand(ratio.shape)
    # If the reference is the policy itself, the KL term has no gradient.
    first_without_kl, _ = weights(batch | {"ref_logp": batch["old_logp"]}, is_first=True)
    second_without_kl, _ = weights(batch | {"ref_logp": logp}, is_first=False)
    columns |= {
        "logp": logp,
        "ratio": ratio,
        "difference": logp.exp() - batch["old_logp"].exp(),
        "advantages": batch["advantages"],
        "left": second_without_kl / (ratio * first_without_kl),
        "k1": batch["old_logp"] - batch["ref_logp"],
    }
    if "lag" in trainer.Args.__dataclass_fields__:  # the second update with each --correction
        for correction in ("none", "ppo", "icepop"):
            columns[f"second_{correction}"], _ = weights(batch, is_first=False, correction=correction)
    found = Example(args, tokens, columns, REWARDS, [], [], [])
    if hasattr(trainer, "overlong_penalty"):
        lengths = batch["mask"].sum(1).tolist()
        found.penalties = [trainer.overlong_penalty(length, args) for length in lengths]
        found.rewards = [reward + penalty for reward, penalty in zip(REWARDS, found.penalties)]
    if script == "maxrl":
        found.rewards = list(map(float, correct))
    add_own(trainer, batch, logp, entropy, found)
    if hasattr(trainer, "ar_weight"):
        batch = updates.with_advantages(script, given, rewards, correct, dataclasses.replace(args, alpha=0))
    of_first = batch["advantages"][:, :1]
    if ((batch["advantages"] == of_first) | ~batch["mask"]).all():  # one advantage per response
        found.advantages = of_first[:, 0].tolist()
    found.columns = {name: numbers_of(values, name, tokens) for name, values in columns.items()}
    return found


def numbers_of(values, name, tokens):
    """Return a column: the numbers of the tokens, from values [N, T]. A reply has only weights, which are 0."""
    numbers = [values[place].item() for place in places_of(tokens)]
    if name in ("first", "second"):
        return numbers
    return [math.nan if token is REPLY else number for token, number in zip(tokens, numbers)]


def add_own(trainer, batch, logp, entropy, found):
    """Add the numbers that only some scripts have, from their own functions."""
    args, columns = found.args, found.columns
    scores = [{"reward": reward} for reward in found.rewards]
    if hasattr(trainer, "k3"):
        columns["k3"] = trainer.k3(logp, batch["ref_logp"])
    if hasattr(trainer, "token_returns"):
        columns["return"], _, _ = trainer.token_returns(scores, batch, args)
    if hasattr(trainer, "ar_weight"):
        columns["ar_weight"] = trainer.ar_weight(batch["old_logp"], args.alpha)
    if hasattr(trainer, "clip_ranges"):
        columns["clip_range"], found.bins = trainer.clip_ranges(logp, batch, args)
    if hasattr(trainer, "entropy_threshold"):
        columns["in_loss"] = entropy >= trainer.entropy_threshold(batch | {"entropy": entropy}, args)
    if hasattr(trainer, "reasoning_tokens"):
        columns["reasoning"] = trainer.reasoning_tokens(batch, args)
    if hasattr(trainer, "sampler_correction"):
        columns["correction"], _ = trainer.sampler_correction(batch, args)
        columns["icepop"], _ = trainer.sampler_correction(batch, dataclasses.replace(args, correction="icepop"))
    if hasattr(trainer, "value_loss"):
        columns["estimate"] = trainer.estimate_advantages(scores, batch, args)
        columns["return"] = columns["estimate"] + batch["old_values"]  # as in main
