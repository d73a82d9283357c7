"""A script's own update() on given responses: the batch it is handed, and what weight it puts on each token.

A policy gradient is a sum over tokens, Σ weight · ∇log π. The weights are read off the scripts themselves: the model is
replaced by a table with one log-probability for each token, update() runs on it, and the gradient of an entry of the
table is minus the weight of that token. Whatever the update does is included: stages, masks, clips, divisors and the KL
term.

lab/ and example.py use this module. It has no command line.
"""

import dataclasses
import importlib

import torch
from torch import nn

from runtime.processes import DEVICE
from tools import family

ALGORITHMS = [  # all scripts of reinforcement learning, which are all but sft.py, in the order to read them
    "reinforce", "rloo", "grpo", "dr_grpo", "ppo", "reinforce_pp", "dapo", "grpo_ar_lopti", "reinforce_pp_ar_lopti",
    "dapo_ar_lopti", "acpo", "cispo", "gspo", "sapo", "dppo", "entropy_top", "archer", "grpo_tis", "opd",
    "maxrl", "gdpo", "grpo_multi_turn",
]  # fmt: skip
# A script that is new comes last.
ALGORITHMS += [script for script in family.family() if script not in [*ALGORITHMS, "sft"]]


def with_advantages(script, batch, rewards, correct, args):
    """The batch as the script's main hands it to its update, a new dictionary.

    batch: ids, mask, sampler_logp, old_logp, ref_logp and entropy, [N, T]; rewards: of the task's rule, [N], and for
    gdpo.py perhaps [N, parts]; correct: a bool for each of them; args: the script's own settings. Some scripts do more
    than compute_advantages. dapo.py adds penalties to the rewards; its dynamic sampling is left out, so all groups
    stay. rloo.py takes the KL penalty from the rewards. maxrl.py has 1 for each correct response. To gdpo.py rewards
    [N] are one part. ppo.py has values, which are 0 before the critic has learned, unless the batch has some. AR scales
    the advantages. opd.py's teacher is the reference, unless the batch has the log-probabilities of another.
    """
    trainer = importlib.import_module(script)
    batch = dict(batch)
    mask = batch["mask"]
    if hasattr(trainer, "overlong_penalty"):
        penalties = [trainer.overlong_penalty(length, args) for length in mask.sum(1).tolist()]
        rewards = rewards + torch.tensor(penalties)
    if script == "rloo":
        rewards = rewards - args.kl_coef * ((batch["old_logp"] - batch["ref_logp"]) * mask).sum(1)
    if script == "maxrl":
        rewards = torch.tensor([float(one) for one in correct])
    if script == "gdpo":
        rewards = rewards.view(len(rewards), -1)  # [N, parts]
    if hasattr(trainer, "ValueModel"):
        batch.setdefault("values", torch.zeros(mask.shape))
    if script == "opd":
        batch.setdefault("teacher_logp", batch["ref_logp"])
    batch["advantages"] = trainer.compute_advantages(rewards, batch, args)  # [N, T]
    if hasattr(trainer, "ar_weight"):
        batch["advantages"] = batch["advantages"] * trainer.ar_weight(batch["old_logp"], args.alpha)
    return batch


class Recorder(torch.optim.SGD):
    """An optimizer for update() that keeps every gradient and leaves the weights alone.

    They are kept in the main memory: a GPU has no room for several gradients of a large model.
    """

    def __init__(self, policy):
        super().__init__(policy.parameters(), lr=0.0)
        self.gradients = []  # one list of tensors for each optimizer step

    def step(self):
        weights = self.param_groups[0]["params"]
        self.gradients.append([weight.grad.to("cpu", copy=True) for weight in weights])


class TablePolicy(nn.Module):
    """A policy whose log-probabilities stand in a table, so that each has a gradient of its own.

    logp, entropy: [number of tokens], in nats. A batch has in place of ids each token's place in the table.
    """

    def __init__(self, logp, entropy):
        super().__init__()
        self.logp = nn.Parameter(logp.double())
        self.entropy = entropy.double()

    def forward(self, ids, mask, temperature, with_entropy=False):
        """As in the trainers: log-probability and entropy of each response token, [N, T]."""
        return self.logp[ids] * mask, self.entropy[ids] * mask


def token_weights(script, batch, logp, entropy, args, is_first):
    """The weight that a script's update puts on ∇log π of each token, and the stage that does it.

    batch: as main hands it to update; logp, entropy [N, T]: those of the policy at the update, in nats; args: the
    script's settings. is_first: whether it is the first update of a step. If it is not, a copy of the batch takes the
    first update's place, because a script may do more at a later one: acpo.py and entropy_top.py look at the policy
    again.

    Returns weight [N, T] in float64, zero outside the mask, and stage [N, T]: 1 for tokens whose weight came with the
    first optimizer step that gave any, 2 for the next, 0 for those without.
    """
    trainer = importlib.import_module(script)
    num_rows, length = batch["mask"].shape
    copies = 1 if is_first else 2
    several = {name: torch.cat([value] * copies) for name, value in batch.items()}
    num_places = copies * num_rows * length
    several["ids"] = torch.arange(num_places).view(copies * num_rows, length)
    policy = TablePolicy(
        torch.cat([logp] * copies).flatten(),
        torch.cat([entropy] * copies).flatten(),
    ).to(DEVICE)
    policy.entropy = policy.entropy.to(DEVICE)
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
    for [gradient] in recorder.gradients:  # [num_places], one for each optimizer step
        of_last_copy = -gradient.cpu().view(copies, num_rows, length)[-1]  # [N, T]
        if (of_last_copy != 0).any():
            num_stages += 1
            weight += of_last_copy
            stage[of_last_copy != 0] = num_stages
    return weight, stage
