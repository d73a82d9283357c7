"""Two tasks: how many tokens are unlikely in each, and how much of the gradient they have.

AR-Lopti (arXiv 2505.12929), figure 11 and appendix C.3: with Knights & Knaves AR and Lopti together are better than
either alone, with mathematics they are not. The paper's reason: mathematics has fewer low-probability tokens, so both
together weaken them too much. The figure shows, for both tasks, the share of the tokens and the norm of the gradient in
four bins of probability.

The gradient of a bin is that of its part of GRPO's loss, as in who_dominates. A model that is never right on a task, as
SmolLM2-135M is on Knights & Knaves, has no advantages there. Then every token of both tasks gets an advantage of 1, so
that both can be compared; it is the gradient of the tokens' mean log-probability. The title and the JSON say which of
the two it was.

Without a hub, mathematics is Countdown, whose problems are generated: to reach a number by arithmetic. The paper's
tasks are --tasks kk math.

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
from runtime import curves, flags
from runtime.settings import GroupSize, PositiveInt


@dataclasses.dataclass
class Args(common.Args):
    """How many tokens are unlikely in two tasks, and how much of the gradient they have."""

    model: str = "models/SmolLM2-135M-Instruct"  # a model that can read both tasks
    tasks: Annotated[tuple[str, str], tyro.conf.arg(metavar="TASK TASK")] = ("kk", "countdown")
    task: tyro.conf.Suppress[str] = "kk"  # --tasks instead
    data: str = ""  # of the second task, as in a trainer; empty: generated, or from the hub
    batches: PositiveInt = 3  # batches of each task
    prompts: PositiveInt = 4  # prompts of a batch
    responses: GroupSize = 2  # G, responses to each prompt
    max_tokens: PositiveInt = 64  # longer responses are cut off


QUICK = {"batches": 1}


def by_task(args):
    """[the settings for each of the two tasks]. ValueError if these are not two tasks."""
    if args.tasks[0] == args.tasks[1]:
        raise ValueError(f"--tasks {' '.join(args.tasks)}: give two different ones")
    made = []
    for task, data in zip(args.tasks, ("", args.data)):
        of_task = dataclasses.replace(args, task=task, data=data)
        common.check(of_task)
        made.append(of_task)
    return made


def measure(policy, sampled, args, with_rewards):
    """The numbers of one batch, for JSON.

    with_rewards: the advantages are GRPO's; otherwise each is 1.
    """
    of_script = common.trainer_args("grpo", args, kl_coef=0.0)
    if with_rewards:
        batch = common.with_advantages("grpo", sampled, of_script)
    else:
        batch = sampled.batch | {"advantages": sampled.batch["mask"].float()}
    mask = batch["mask"]
    bins = common.bins_of(batch["old_logp"])[mask]
    norms = common.norms_by_bin(policy, batch, of_script)
    counts = [int((bins == i).sum()) for i in range(common.BINS)]
    return {
        "tokens": sum(counts),
        "share": [count / sum(counts) for count in counts],
        "norm": norms,
        "norm_share": [norm / max(sum(norms), 1e-300) for norm in norms],
        "entropy": batch["entropy"][mask].mean().item(),
        "right": fmean(sampled.correct),
    }


def draw(averages, with_rewards, args):
    advantages = "GRPO's advantages" if with_rewards else "every advantage 1"
    name = common.name_of(args.model)
    title = f"two tasks, {name}, {advantages}, {args.batches} batches; bars: standard error"
    figure = curves.new_figure(curves.WIDTH, 5.5, title)
    common.draw_shares(figure.subplots(1, 2), averages)
    common.save_figure(figure, args, "two_tasks")


def has_gradient(sampled, args):
    """Whether some group of the batch has rewards that differ."""
    groups = sampled.rewards.view(-1, args.responses)
    return bool((groups != groups[:, :1]).any())


def main():
    args = common.parse(Args, __doc__, QUICK)
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
        # A model that is never right on a task has no batch with a gradient. If others have one, a batch without is bad
        # luck: ValueError.
        with_rewards = all(any(has_gradient(sampled, args) for sampled in several) for several in batches.values())
        for of_task in tasks:
            common.load_batches(policy, of_task, args.batches, need_gradient=with_rewards)
    found = {}
    for task, several in batches.items():
        bar = tqdm(several, desc=task, disable=None)
        found[task] = [measure(policy, sampled, args, with_rewards) for sampled in bar]
    rows = [dict(zip(found, of_both)) for of_both in zip(*found.values())]
    draw(common.over_batches(rows), with_rewards, args)
    result = {"bins": common.BIN_NAMES, "tasks": list(found), "advantages": "GRPO" if with_rewards else "1"}
    common.finish(args, "two_tasks", result | {"batches": rows})


if __name__ == "__main__":
    main()
