"""What is whose if there are several processes: training problems, and groups of responses.

A group is the G responses to one prompt. Which groups an update has does not depend on the number
of processes.
"""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from runtime.processes import RANK, WORLD_SIZE, gather
from runtime.terminal import progress


def next_problems(train, num_used, args):
    """(the problems of this process's next responses: each problem G times; the new num_used).

    num_used: how many training problems all steps before this one have used, on all processes.
    """
    indices, num_used = next_prompts(len(train), num_used, args.prompts_per_step, args.seed)
    problems = []
    for i in indices[RANK::WORLD_SIZE]:
        problems += [train[i]] * args.responses_per_prompt
    return problems, num_used


def next_prompts(num_problems, num_used, count, seed):
    """Returns (indices of the next `count` problems, the new num_used).

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
    """This process's part of the test problems."""
    return problems[RANK::WORLD_SIZE]


def gather_groups(batch, is_chosen):
    """The chosen groups of all processes, in the order of their prompts.

    batch: this process's rows, {name: [N, …]}; is_chosen: a bool for each of its groups. A group is
    its rows of the batch, {name: [G, …]}.
    """
    size = len(batch["ids"]) // len(is_chosen)
    mine = []
    for i, chosen in enumerate(is_chosen):
        if chosen:
            rows = slice(i * size, (i + 1) * size)
            # Cloned, since a view would be sent with all that it is a view of.
            group = {name: value[rows].clone() for name, value in batch.items()}
            mine.append((i, RANK, group))
    found = gather(mine)
    found.sort(key=lambda item: item[:2])  # prompts were dealt out to the processes one by one
    return [group for _, _, group in found]


def deal_groups(groups, like, args):
    """This process's share of the groups, as a batch padded to its longest row.

    The groups, which all processes have, are spread over the step's updates in order, then over the
    processes; the numbers of groups differ by at most one. What is missing to prompts_per_step is
    filled up with groups without response tokens: so all shares have as many rows, and minibatches
    cuts them as it cuts a full step's. like: a batch with the same keys, if there are no groups.
    """
    size = args.prompts_per_step // args.updates_per_step  # groups of an update, on all processes
    first_group = slice(args.responses_per_prompt)
    empty = {name: torch.zeros_like(rows[first_group]) for name, rows in like.items()}
    mine = []
    for part in torch.arange(len(groups)).tensor_split(args.updates_per_step):
        of_update = [groups[i] for i in part] + [empty] * size
        mine += of_update[RANK:size:WORLD_SIZE]
    share = {}
    for name in empty:
        rows = [row for group in mine for row in group[name]]
        share[name] = pad_sequence(rows, batch_first=True)
    return share


class GroupsBar:
    """How far dynamic sampling is (dapo.py): groups with something to teach, and how many lack."""

    def __init__(self, step, args):
        self.args = args
        self.step = step
        self.bar = progress(
            title=f"step {step}: groups with different rewards",
            total=args.prompts_per_step,
            bar_format="{desc}: {n_fmt} of {total_fmt}{postfix}",
        )

    def show(self, num_mixed, refill):
        """num_mixed: groups found so far; refill: 0 after the first round of sampling."""
        self.bar.n = min(num_mixed, self.args.prompts_per_step)
        self.bar.set_postfix_str(f"round {refill + 1} of at most {self.args.max_refills + 1}")
        if num_mixed == 0 and refill == 1 and RANK == 0:
            num_groups = 2 * self.args.prompts_per_step
            tqdm.write(
                f"step {self.step}: in none of {num_groups} groups do the rewards differ. "
                f"What helps: easier problems, longer responses (--max_response_tokens is "
                f"{self.args.max_response_tokens}), or fewer rounds (--max_refills is "
                f"{self.args.max_refills})"
            )

    def close(self):
        self.bar.close()
