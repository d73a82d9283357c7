"""Two tasks: how many tokens have a low probability in each, and their part of the gradient.

AR-Lopti (arXiv 2505.12929), figure 11 and appendix C.3: AR and Lopti together help with Knights & Knaves, not with
mathematics, which, says the paper, has fewer low-probability tokens. For both tasks: the fraction of the tokens, and
the norm of their part of GRPO's gradient, in four bins of probability. If all rewards of a batch are equal, as of a
model that is never right on a task, every token of both tasks gets an advantage of 1: it is the gradient of the tokens'
mean log-probability, and title and JSON say so. Without a hub, mathematics is Countdown, whose problems are generated.
The paper's tasks are --tasks kk math.

Results: two_tasks.json and two_tasks.png. Error bars: standard error over batches.

    python -m lab.two_tasks
"""

import dataclasses
import sys
from statistics import fmean
from typing import Annotated

import tyro
from tqdm import tqdm

from lab import common
from runtime import flags
from runtime.settings import GroupSize, PositiveInt


@dataclasses.dataclass
class Args(common.Args):
    model: str = "models/SmolLM2-135M-Instruct"  # a model that can read both tasks
    tasks: Annotated[tuple[str, str], tyro.conf.arg(metavar="TASK TASK")] = ("kk", "countdown")
    task: tyro.conf.Suppress[str] = "kk"  # replaced by --tasks
    data: str = ""  # the second task's problems, as in a trainer; empty: generated, or from the hub
    batches: PositiveInt = 3  # batches per task
    prompts: PositiveInt = 4  # prompts per batch
    responses: GroupSize = 2  # G, responses to each prompt
    max_tokens: PositiveInt = 64  # longer responses are truncated


def by_task(args):
    """Return [the settings for each of the two tasks]. ValueError if these are not two tasks."""
    if args.tasks[0] == args.tasks[1]:
        raise ValueError(f"--tasks {' '.join(args.tasks)}: give two different ones")
    made = [dataclasses.replace(args, task=task, data=data) for task, data in zip(args.tasks, ("", args.data))]
    for of_task in made:
        common.check(of_task)
    return made


def measure(policy, sampled, args, with_rewards):
    """Return the numbers of one batch, for JSON. with_rewards: the advantages are GRPO's; otherwise each is 1."""
    of_script, batch = common.for_grpo(sampled, args)
    mask = batch["mask"]
    if not with_rewards:
        batch["advantages"] = mask.float()
    bins = common.bins_of(batch["old_logp"])[mask]
    numbers = {"tokens": len(bins), "share": common.shares_of(bins)} | common.norms_by_bin(policy, batch, of_script)
    return numbers | {"entropy": batch["entropy"][mask].mean().item(), "right": fmean(sampled.correct)}


def main():
    args = common.parse(Args, __doc__)
    with flags.errors_in_one_line():
        tasks = by_task(args)
        if args.dry_run:
            for of_task in tasks:
                common.dry_run(of_task)
            sys.exit()
        policy, _ = common.load_policy(args)
        batches = {}
        for of_task in tasks:
            batches[of_task.task] = common.load_batches(policy, of_task, args.batches, need_gradient=False)
    with_rewards = all(common.is_mixed(one, args).any() for several in batches.values() for one in several)
    found = {}
    for task, several in batches.items():
        bar = tqdm(several, desc=task, disable=None)
        found[task] = [measure(policy, sampled, args, with_rewards) for sampled in bar]
    rows = [dict(zip(found, of_both)) for of_both in zip(*found.values())]
    advantages = "GRPO's advantages" if with_rewards else "every advantage 1"
    title = f"two tasks, {common.name_of(args.model)}, {advantages}, {args.batches} batches; bars: standard error"
    common.picture_of_shares(title, common.over_batches(rows), args, "two_tasks")
    result = {"bins": common.BIN_NAMES, "tasks": list(found), "advantages": "GRPO" if with_rewards else "1"}
    common.finish(args, "two_tasks", result | {"batches": rows})


if __name__ == "__main__":
    main()
