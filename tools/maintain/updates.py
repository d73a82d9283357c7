"""Run a script's own update() on given responses: the batch that it gets, and the weight that it puts on each token.

A policy gradient is a sum over tokens, Σ weight · ∇log π. The weights come from the scripts themselves. A table with
one log-probability per token replaces the model, update() runs on it, and the gradient of an entry of the table is
minus the weight of that token. So everything that the update does is included: stages, masks, clips, divisors and the
KL term.

lab/ and example.py use this module. It has no command line.
"""

import contextlib
import dataclasses
import importlib
import itertools

import torch
from torch import nn

from rewards import with_part
from runtime.distributed import DEVICE
from tools import family

ALGORITHMS = [  # all RL scripts, which are all but sft.py, in reading order
    "reinforce", "rloo", "grpo", "dr_grpo", "ppo", "reinforce_pp", "dapo", "grpo_ar_lopti", "reinforce_pp_ar_lopti",
    "dapo_ar_lopti", "acpo", "cispo", "gspo", "sapo", "dppo", "entropy_top", "archer",
    "entropy_bonus", "grpo_tis", "opd", "sdpo", "maxrl", "gdpo", "grpo_multi_turn", "gigpo",
]  # fmt: skip
# A new script comes last.
ALGORITHMS += [script for script in family.family() if script not in [*ALGORITHMS, "sft"]]


def with_advantages(script, batch, rewards, correct, args):
    """Return the batch as the script's main passes it to its update, a new dictionary.

    batch: ids, mask, sampler_logp, old_logp, ref_logp and entropy, [N, T]; rewards: from the task, [N], or in parts,
    [N, parts]; correct: a bool per response, or None; args: the script's own settings. dapo.py adds penalties to the
    rewards; its dynamic sampling is skipped, so all groups stay. If the batch has no values, they are 0, as before the
    critic has learned; if it has no teacher_logp, the teacher is the reference.
    """
    trainer = importlib.import_module(script)
    batch = dict(batch)
    mask = batch["mask"]
    scores = scores_of(rewards, correct, mask, args)
    if hasattr(trainer, "overlong_penalty"):
        penalties = [trainer.overlong_penalty(length, args) for length in mask.sum(1).tolist()]
        scores = [with_part(found, "overlong_penalty", penalty) for found, penalty in zip(scores, penalties)]
    batch.setdefault("old_values", torch.zeros(mask.shape))
    if "ref_logp" in batch:
        batch.setdefault("teacher_logp", batch["ref_logp"])
    with numbers_as(rewards.dtype):
        batch["advantages"] = trainer.compute_advantages(scores, batch, args)  # [N, T]
    return batch


def scores_of(rewards, correct, mask, args):
    """Return the scores of responses, as rewards.score has them. rewards, correct: as in with_advantages.

    Turns are found by the gaps of the mask [N, T]. The first turns of a group have equal states; every other turn is
    alone in its state.
    """
    scores = []
    for i, (reward, row) in enumerate(zip(rewards.tolist(), mask.tolist())):
        parts = dict(enumerate(reward)) if isinstance(reward, list) else {}
        lengths = [len(list(run)) for is_own, run in itertools.groupby(row) if is_own]
        states = ["start", *((i, k) for k in range(1, len(lengths)))]
        problem = i // args.responses_per_prompt
        turns = [(problem, state, length) for state, length in zip(states, lengths)]
        about = {"correct": bool(correct[i]) if correct is not None else False, "format": True, "response": ""}
        scores.append({"reward": sum(reward) if parts else reward, "parts": parts, "turns": turns, **about})
    return scores


@contextlib.contextmanager
def numbers_as(dtype):
    """Make tensors of Python's numbers in this dtype: scripts have float32, and numbers by hand need float64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


class Recorder(torch.optim.SGD):
    """An optimizer for update() that keeps every gradient and leaves the weights alone.

    The gradients are in main memory: a GPU has no room for several gradients of a large model.
    """

    def __init__(self, policy):
        super().__init__(policy.parameters(), lr=0.0)
        self.gradients = []  # one list of tensors per optimizer step

    def step(self):
        weights = self.param_groups[0]["params"]
        self.gradients.append([weight.grad.to("cpu", copy=True) for weight in weights])


class TablePolicy(nn.Module):
    """A policy whose log-probabilities are in a table, so that each has a gradient of its own.

    logp, entropy: [number of tokens], in nats. Instead of ids, a batch has each token's place in the table.
    """

    def __init__(self, logp, entropy):
        super().__init__()
        self.logp = nn.Parameter(logp.double())
        self.register_buffer("entropy", entropy.double())

    def forward(self, ids, mask, temperature, with_entropy=False):
        """Return log-probability and entropy of each response token, [N, T], as in the trainers."""
        return self.logp[ids] * mask, self.entropy[ids] * mask


def token_weights(script, batch, logp, entropy, args, is_first):
    """Return the weight that a script's update puts on each token's ∇log π, and the stage that puts it.

    batch: as main passes it to update; logp, entropy [N, T]: the policy's at the update, in nats; args: the
    script's settings. is_first: whether it is the first update of a step. If not, a copy of the batch serves as the
    first update's, because a script may do more at later updates: acpo.py and entropy_top.py look at the policy
    again.

    Returns weight [N, T] in float64, zero outside the mask, and stage [N, T]: 1 for tokens whose weight came with the
    first optimizer step that gave any, 2 for the next, 0 for tokens without weight.
    """
    trainer = importlib.import_module(script)
    num_rows, length = batch["mask"].shape
    copies = 1 if is_first else 2
    several = {name: torch.cat([value] * copies) for name, value in batch.items()}
    num_places = copies * num_rows * length
    several["ids"] = torch.arange(num_places).view(copies * num_rows, length)
    policy = TablePolicy(*(torch.cat([values] * copies).flatten() for values in (logp, entropy))).to(DEVICE)
    recorder = Recorder(policy)
    args = dataclasses.replace(args, updates_per_step=copies)
    try:
        trainer.update(policy, recorder, several, 1, args)
    except KeyError as error:
        raise ValueError(
            f"{script}.py, update: nothing has put {error} into the batch; updates.py, with_advantages, should"
        ) from None

    weight = torch.zeros(num_rows, length, dtype=torch.float64)
    stage = torch.zeros(num_rows, length, dtype=torch.long)
    num_stages = 0
    for [gradient] in recorder.gradients:  # [num_places], one per optimizer step
        of_last_copy = -gradient.cpu().view(copies, num_rows, length)[-1]  # [N, T]
        if (of_last_copy != 0).any():
            num_stages += 1
            weight += of_last_copy
            stage[of_last_copy != 0] = num_stages
    return weight, stage
