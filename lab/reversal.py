"""Does the dominance reverse? Signals of low- and high-probability tokens, over a wide range of κ.

ACPO (arXiv 2606.22570), Remark 1: near on-policy, low-probability tokens have the larger mean signal; beyond some κ,
high-probability tokens do. κ, of Lemma 1's σ = κ(1 − π)², grows with the learning rate and the number of updates. So
one batch is used for --updates updates, from the same weights, at each of --lrs. After 1, 2, 4, … of them, it measures
κ and eq. 3's G as in lab.off_policy, and the fraction of the tokens that GRPO clips. The Remark is about the size of
the mean G. One batch's mean is mostly noise: hence many batches, and the mean over them before its size.

Results: reversal.json and reversal.png. Error bars: standard errors over batches. If a mean is as small as its error,
its size is too large on average, because noise has a size, too.

    python -m lab.reversal
"""

import dataclasses
from typing import Annotated

import pydantic
import tyro
from tqdm import tqdm

from lab import common, off_policy
from runtime import curves
from runtime.settings import GroupSize, PositiveFraction, PositiveInt

FEW = pydantic.Field(min_length=1, max_length=4)  # lines that look different


@dataclasses.dataclass
class Args(common.Args):
    prompts: PositiveInt = 64  # prompts per batch
    responses: GroupSize = 4  # G, responses to each prompt
    batches: PositiveInt = 30  # batches to average over
    updates: PositiveInt = 64  # optimizer updates per step; divides --prompts
    lrs: Annotated[list[PositiveFraction], FEW, tyro.conf.arg(metavar="LR")] = dataclasses.field(
        default_factory=lambda: [1e-4, 3e-4, 1e-3, 3e-3]
    )  # AdamW's learning rates


def measure_at(policy, batch, args):
    """Return κ, the signals of p ≤ 0.25 and p > 0.75, and the clipped fraction. args: grpo.py's."""
    logp, ratio, weight, is_cut = off_policy.of_the_policy(policy, batch, args)
    mask = batch["mask"]
    spread = off_policy.spread_of(ratio[mask], batch["old_logp"][mask])
    sizes, means = off_policy.mean_signals(weight, logp, batch)
    clip = off_policy.of_clip(is_cut, batch)
    return {
        "kappa": spread["fit"]["kappa"],
        "mean_signal": [sizes[0], sizes[-1]],
        "signed_signal": [means[0], means[-1]],
        "log_ratio": off_policy.log_ratio(sizes),
        "clip": {"share": clip["share"], "by_entropy": clip["by_entropy"]},
    }


def measure(policy, before, sampled, args):
    """Return one batch's {"lr …": {number of updates: its numbers}}. Restores the policy's weights, `before`."""
    of_script, batch = common.for_grpo(sampled, args)
    found = {}
    for lr in args.lrs:
        numbers = off_policy.positions(policy, batch, args, lr)
        found[f"lr {lr:g}"] = {number: measure_at(policy, batch, of_script) for number in numbers}
        common.set_weights(policy, before)
    return found


def draw(rows, counts, args):
    """Plot the results. rows: from measure, one per batch."""
    title = f"{args.updates} updates on one batch by {common.name_of(args.model)}, AdamW\n"
    title += f"{args.batches} batches of {args.prompts} × {args.responses} responses; bars: standard error"
    figure = curves.new_figure(curves.WIDTH, 12, title)
    panels = figure.subplots(3, 2)
    average = common.over_batches(rows)

    def by_lr(of):  # {"lr …": (mean, standard error) after each count}
        return {lr: [of(at[n]) for n in counts] for lr, at in average.items()}

    off_policy.draw_lines(panels[0, 0], counts, by_lr(lambda at: at["kappa"]), "κ, of σ = κ(1 − π)²")
    panels[0, 0].set_yscale("symlog", linthresh=0.1)
    panels[0, 0].set_ylim(bottom=0)
    off_policy.draw_lines(panels[0, 1], counts, by_lr(lambda at: at["log_ratio"]), "mean |G|, p ≤ 0.25 over p > 0.75")
    off_policy.show_ratios(panels[0, 1])
    for axes, place, tokens in ((panels[1, 0], 0, "p ≤ 0.25"), (panels[1, 1], 1, "p > 0.75")):
        lines = by_lr(lambda at, place=place: at["signed_signal"][place])
        sizes = {lr: [(abs(mean[0]), mean[1]) if mean else None for mean in means] for lr, means in lines.items()}
        off_policy.draw_lines(axes, counts, sizes, f"|mean G|, {tokens}")
        axes.set_ylim(bottom=0)
    for axes, half in ((panels[2, 0], "low"), (panels[2, 1], "high")):
        lines = by_lr(lambda at, half=half: [100 * value for value in at["clip"]["by_entropy"][half]])
        off_policy.draw_lines(axes, counts, lines, f"p ≤ 0.25 of {half} entropy: cut off [%]")
        axes.set_ylim(bottom=0)
    panels[0, 0].legend()
    common.save_figure(figure, args, "reversal")


def main():
    args, policy, _, batches = common.begin(Args, __doc__, least_updates=1)
    before = common.copy_weights(policy)
    rows = [measure(policy, before, sampled, args) for sampled in tqdm(batches, desc="batches", disable=None)]
    draw(rows, off_policy.counts_of(args.updates), args)
    common.finish(args, "reversal", {"batches": rows})


if __name__ == "__main__":
    main()
