"""Who dominates: how much of a GRPO update comes from low-probability tokens, and which tokens it moves.

AR-Lopti (arXiv 2505.12929), figure 1: four bins of tokens by their probability when sampled. For each: its fraction of
the tokens, the advantages, and the norm of its part of the loss's gradient (the parts add up to the gradient). Then
every token's change of probability in an SGD step with all tokens, with only the lowest bin, and with only the highest,
at the paper's lr 1e-3 and at --large_lr. By default, the latter changes probabilities as much on average as a run's
first AdamW update (--adamw_lr). ACPO (arXiv 2606.22570), appendix D.1: for p < 0.2 and p > 0.8 the gradient norm of the
mean loss over these tokens alone, relative to the norm over all tokens, and the angle between the two gradients.

Results: who_dominates.json and who_dominates.png. Boxes hold the middle half of the tokens of all batches, whiskers
nine tenths; the top 1 % by size is excluded, as in the paper, and from every mean of the changes. The distance of two
steps is between the distributions of their changes (Kolmogorov and Smirnov's distance), averaged over the bins. Error
bars: standard errors over batches.

    python -m lab.who_dominates
"""

import dataclasses
import math
from statistics import fmean

import torch
from scipy import stats
from tqdm import tqdm

import grpo
from lab import common
from runtime import curves
from runtime.settings import PositiveFloat, PositiveFraction, PositiveInt

EDGES = [0.2, 0.25, 0.5, 0.75, 0.8]  # edges of both papers: six cells, and both papers' bins are unions of cells
FIGURE_1 = [[0, 1], [2], [3], [4, 5]]  # the figure's four bins, as cells
TAILS = {"p < 0.2": 0, "p > 0.8": 5}  # ACPO's two groups, as cells
UPDATED = ["all tokens", "only p ≤ 0.25", "only p > 0.75"]
LINEAR = 1e-3  # fraction of the largest change below which the figure's scale is linear
BOXES = "boxes: half of the tokens, whiskers: nine tenths, without the top 1 % by size"
SMALL_CHANGES = "linear to about 1/1000 of\nthe largest, then logarithmic"


@dataclasses.dataclass
class Args(common.Args):
    batches: PositiveInt = 10  # batches to average over
    lr: PositiveFloat = 1e-3  # the SGD step's learning rate, the paper's
    large_lr: PositiveFloat | None = None  # of a larger step; None: found on the first batch
    adamw_lr: PositiveFraction | None = None  # learning rate of the AdamW update that finds it; None: grpo.py's


def changes(policy, before, gradient, lr, batch, args):
    """Return each response token's change of probability, [n], after θ ← before − lr · gradient, and undo the step."""
    common.set_weights(policy, [weight - lr * part for weight, part in zip(before, gradient)])
    logp = common.fine_log_probs(policy, batch, args)
    common.set_weights(policy, before)
    return (logp.exp() - batch["fine_logp"].exp())[batch["mask"]]


def for_steps(policy, sampled, args):
    """Return (grpo.py's settings, the batch as its main passes it to its update, with fine_logp)."""
    of_script, batch = common.for_grpo(sampled, args)
    return of_script, batch | {"fine_logp": common.fine_log_probs(policy, batch, of_script)}


def learning_rate(policy, before, sampled, args):
    """Return the lr at which an SGD step changes probabilities as much as a run's first AdamW update. Undo both."""
    of_script, batch = for_steps(policy, sampled, args)
    gradient = common.gradient_of(policy, batch, of_script)
    small = changes(policy, before, gradient, 1e-3, batch, of_script).abs().mean().item()
    lr = args.adamw_lr or of_script.lr
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=of_script.weight_decay)
    grpo.update(policy, optimizer, batch, 1, of_script)
    step = [new - old for new, old in zip(common.copy_weights(policy), before)]
    # θ − lr · gradient with lr −1 is θ + step.
    wanted = changes(policy, before, step, -1.0, batch, of_script).abs().mean().item()
    return float(f"{1e-3 * wanted / max(small, 1e-12):.2g}")


def of_gradients(gradients, num_tokens):
    """Return one batch's numbers. gradients: one per cell; num_tokens: the cells' numbers of tokens."""
    whole = common.add(gradients)
    size = common.norm(whole)
    norms = [common.norm(common.add([gradients[c] for c in cells])) for cells in FIGURE_1]
    tails = {}
    for name, cell in TAILS.items():
        own_norm = common.norm(gradients[cell]) * sum(num_tokens) / max(1, num_tokens[cell])
        tails[name] = {"norm": own_norm / size, "angle": common.angle(gradients[cell], whole)}
    return {"norm": norms, "norm_share": [norm / sum(norms) for norm in norms], "norm_of_all": size, "tails": tails}


def without_top(values):
    """Return the values [n] without the top 1 % by size, as in the paper's figure 1."""
    return values[values.abs() <= values.abs().quantile(0.99)]


def of_step(moved, bins):
    """Return the effect of steps on p. moved: {updated tokens: changes of probability [n]}; bins: [n].

    Means and distances (from 0, equal, to 1, disjoint) exclude the top 1 % of their tokens; the ranks include all.
    """
    whole = moved["all tokens"]
    found = {"mean_change": {}, "mean_change_of_top_bin": {}, "distance": {}, "ranks": {}}
    filled = [i for i in range(common.BINS) if (bins == i).any()]
    for updated, change in moved.items():
        found["mean_change"][updated] = without_top(change).abs().mean().item()
        of_top = change[bins == common.BINS - 1]
        if len(of_top):
            found["mean_change_of_top_bin"][updated] = without_top(of_top).abs().mean().item()
        pairs = [(without_top(change[bins == i]), without_top(whole[bins == i])) for i in filled]
        distances = [stats.ks_2samp(some.cpu(), others.cpu()).statistic for some, others in pairs]
        found["distance"][updated] = fmean(map(float, distances))
        found["ranks"][updated] = common.rank_correlation(change, whole)
    return found


def measure(policy, before, sampled, args, large_lr):
    """Return one batch's numbers for JSON, and for the boxes {name: tokens' values}, [n] each."""
    of_script, batch = for_steps(policy, sampled, args)
    mask = batch["mask"]
    bins = common.bins_of(batch["old_logp"])[mask]
    cells = [common.bins_of(batch["old_logp"], EDGES) == i for i in range(len(EDGES) + 1)]  # [N, T] each
    gradients = [common.gradient_of_tokens(policy, batch, cell, of_script) for cell in cells]
    numbers = of_gradients(gradients, [int(cell[mask].sum()) for cell in cells])
    numbers["share"] = common.shares_of(bins)

    of_updated = (range(len(EDGES) + 1), FIGURE_1[0], FIGURE_1[-1])  # the cells of each of UPDATED
    updates = {name: common.add([gradients[c] for c in chosen]) for name, chosen in zip(UPDATED, of_updated)}
    values = {"bins": bins, "advantages": batch["advantages"][mask].double()}
    numbers["steps"] = {}
    for name, lr in (("lr", args.lr), ("large_lr", large_lr)):
        moved = {of: changes(policy, before, gradient, lr, batch, of_script) for of, gradient in updates.items()}
        values |= {f"{name}/{updated}": change for updated, change in moved.items()}
        numbers["steps"][name] = of_step(moved, bins)
    return numbers, values


def draw_boxes(axes, values, bins, title):
    """Draw a box per bin that has values, without the top 1 % by size; return the largest size drawn."""
    filled = [i for i in range(common.BINS) if (bins == i).any()]
    kept = [without_top(values[bins == i]) for i in filled]
    look = {"patch_artist": True, "boxprops": {"facecolor": "#9ecae1"}, "widths": 0.55}
    look["medianprops"] = {"color": "#D55E00", "linewidth": 2.5}
    axes.boxplot(kept, whis=(5, 95), positions=filled, showfliers=False, manage_ticks=False, **look)
    axes.axhline(0, color="0.5", linewidth=1, zorder=0)
    axes.set_xticks(range(common.BINS), common.BIN_NAMES)
    axes.set_title(title)
    levels = torch.tensor([0.05, 0.95], dtype=values.dtype)
    return max(inside.quantile(levels).abs().max().item() for inside in kept)


def show_small_changes(axes, limit):
    """Scale an axis from -limit to limit, linear near 0, logarithmic beyond: high-probability tokens move far less."""
    linear = 10.0 ** round(math.log10(LINEAR * limit)) if limit else 1.0
    axes.set_yscale("symlog", linthresh=linear)
    axes.set_yticks([sign * linear * 10**i for i in (1, 2, 3) for sign in (-1, 1)] + [0])
    axes.set_ylim(-limit or -1, limit or 1)


def draw(result, values, bins, args):
    model = common.name_of(args.model)
    title = f"one GRPO update of {model} by the tokens' probability, {args.batches} batches\n"
    title += f"error bars: standard error; {BOXES}"
    figure = curves.new_figure(curves.WIDTH, 12, title)
    figure.get_layout_engine().set(h_pad=0.15)
    panels = figure.subplots(3, 2)
    common.draw_shares(panels[0], {model: common.over_batches(result["batches"])})
    draw_boxes(panels[1, 0], values["advantages"], bins, "advantage")
    limits = []
    for axes, updated in zip(panels.flat[3:], UPDATED):
        title = f"change of p, {updated} updated (SGD, lr {result['large_lr']:g})"
        limits.append(draw_boxes(axes, values[f"large_lr/{updated}"], bins, title))
    for axes in panels.flat[3:]:
        show_small_changes(axes, 1.5 * max(limits))
        axes.set_ylabel(SMALL_CHANGES)
    for axes in panels[-1]:
        axes.set_xlabel("probability of the token when it was sampled")
    common.save_figure(figure, args, "who_dominates")


def main():
    args, policy, _, batches = common.begin(Args, __doc__)
    before = common.copy_weights(policy)
    large_lr = args.large_lr or learning_rate(policy, before, batches[0], args)
    bar = tqdm(batches, desc="batches", disable=None)
    found = [measure(policy, before, sampled, args, large_lr) for sampled in bar]
    rows, of_tokens = zip(*found)
    pooled = common.pooled(of_tokens)
    bins = pooled.pop("bins")
    result = {"bins": common.BIN_NAMES, "lr": args.lr, "large_lr": large_lr, "tokens": len(bins), "batches": rows}
    draw(result, pooled, bins, args)
    common.finish(args, "who_dominates", result)


if __name__ == "__main__":
    main()
