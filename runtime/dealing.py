"""Assign training problems and groups of responses to processes.

A group is the G responses to one prompt. Which groups an update uses does not depend on the number
of processes.
"""

import random

import torch
from torch.nn.utils.rnn import pad_sequence

from runtime import passes
from runtime.processes import RANK, WORLD_SIZE, gather
from runtime.terminal import progress


def next_problems(train, num_used, args):
    """Return (the problems of this process's next responses, each G times; the new num_used).

    num_used: the number of training problems used by all steps before this one, on all processes.
    """
    indices, num_used = next_prompts(len(train), num_used, args.prompts_per_step, args.seed)
    problems = []
    for i in indices[RANK::WORLD_SIZE]:
        problems += [train[i]] * args.responses_per_prompt
    return problems, num_used


def next_prompts(num_problems, num_used, count, seed):
    """Return (indices of the next `count` problems, the new num_used).

    num_used: the position over all epochs, in problems. Each epoch has its own order and only
    complete steps.
    """
    epoch, at = divmod(num_used, num_problems)
    if at + count > num_problems:
        epoch, at = epoch + 1, 0
    order = list(range(num_problems))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[at : at + count], epoch * num_problems + at + count


def own_part(problems):
    """Return this process's part of the test problems."""
    return problems[RANK::WORLD_SIZE]


def balance(minibatch, args):
    """Swap rows between processes, so that none waits long for another in an update.

    minibatch: this process's rows, {name: [N, T]}. Together the processes keep the same rows, so
    the gradient stays the same; their numbers of rows may differ. The rows of all processes are
    sorted by length and cut into forward passes, and the passes are dealt out in turn. Passes that
    run at the same time are then about equally long: under FSDP2, every layer waits for the slowest
    process. Groups that may share the computation of their prompt are not split. All processes must
    call it.
    """
    if not passes.swaps_rows(args):
        return minibatch
    ends = passes.used_lengths(minibatch["mask"])  # [N]
    needed = passes.used_lengths(passes.without_idle(minibatch, args)["mask"])  # [N]
    mine = []
    for i, end in enumerate(ends.tolist()):
        # Clone it: sending a view would send the whole tensor behind it.
        row = {name: value[i, : max(2, end)].clone() for name, value in minibatch.items()}
        mine.append((int(needed[i]), row))
    every = sorted(gather(mine), key=lambda item: item[0], reverse=True)
    planned = passes.plan_passes(None, None, torch.tensor([length for length, _ in every]), args)
    dealt = every[RANK::WORLD_SIZE]
    if len(planned) >= WORLD_SIZE:
        dealt = [every[i] for rows in planned[RANK::WORLD_SIZE] for i in rows]
        num_planned = sum(map(len, planned))
        dealt += every[num_planned:][RANK::WORLD_SIZE]  # rows that need no pass
    balanced = {}
    for name in minibatch:
        balanced[name] = pad_sequence([row[name] for _, row in dealt], batch_first=True)
    return balanced


def gather_groups(batch, is_chosen):
    """Return the chosen groups of all processes, in the order of their prompts.

    batch: this process's rows, {name: [N, …]}, and perhaps their scores, a list; is_chosen: a bool
    for each of its groups. A group is its rows of the batch, {name: [G, …]}.
    """
    size = len(batch["ids"]) // len(is_chosen)
    mine = []
    for i, chosen in enumerate(is_chosen):
        if chosen:
            rows = slice(i * size, (i + 1) * size)
            group = {name: value[rows] for name, value in batch.items()}
            for name, value in group.items():
                if torch.is_tensor(value):
                    # Clone it: sending a view would send the whole tensor behind it.
                    group[name] = value.clone()
            mine.append((i, RANK, group))
    found = gather(mine)
    found.sort(key=lambda item: item[:2])  # prompts were assigned to the processes in turn
    return [group for _, _, group in found]


def deal_groups(groups, like, args):
    """Return this process's part of the groups, as a batch padded to its longest row.

    All processes have the same groups. They are spread over the step's updates in order, then over
    the processes; the numbers of groups differ by at most one. Groups without response tokens fill
    the batch up to prompts_per_step; their scores are equal, without turns. So all parts have the
    same number of rows, and minibatches cuts them like a full step. like: a batch with the same
    keys, for the case of no groups.
    """
    size = args.prompts_per_step // args.updates_per_step  # groups per update, on all processes
    first_group = slice(args.responses_per_prompt)
    empty = {}
    for name, rows in like.items():
        if torch.is_tensor(rows):
            empty[name] = torch.zeros_like(rows[first_group])
        else:
            empty[name] = [{**rows[0], "turns": []}] * args.responses_per_prompt
    mine = []
    for part in torch.arange(len(groups)).tensor_split(args.updates_per_step):
        of_update = [groups[i] for i in part] + [empty] * size
        mine += of_update[RANK:size:WORLD_SIZE]
    share = {}
    for name in empty:
        rows = [row for group in mine for row in group[name]]
        share[name] = pad_sequence(rows, batch_first=True) if torch.is_tensor(rows[0]) else rows
    return share


class GroupsBar:
    """Shows the progress of dynamic sampling (dapo.py): groups with different rewards so far."""

    def __init__(self, step, args):
        self.args = args
        self.bar = progress(
            title=f"step {step}: groups with different rewards",
            total=args.prompts_per_step,
            bar_format="{desc}: {n_fmt} of {total_fmt}{postfix}",
        )

    def show(self, num_mixed, refill):
        """Show progress. num_mixed: groups found so far; refill: 0 in the first sampling round."""
        self.bar.n = min(num_mixed, self.args.prompts_per_step)
        self.bar.set_postfix_str(f"round {refill + 1} of at most {self.args.max_refills + 1}")

    def close(self):
        self.bar.close()
