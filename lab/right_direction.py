"""The right direction: which tokens an update moves in the direction of their advantage.

AR-Lopti (arXiv 2505.12929), figure 3: the fraction of positive tokens (A > 0) whose probability rises in an update, by
their probability when they were sampled. A method that raises all high-probability tokens would look good in that
figure. So this also shows the fraction of negative tokens whose probability falls, and the fraction for both signs.

Every method makes a step of one update on the whole batch, and one of --updates updates on parts of it, with its own
update() and SGD, as in the paper, without a KL term. The default --lr is found as in lab.who_dominates: with the
paper's 1e-3 kk_tiny hardly moves. Steps have equal learning rates, or GRPO's length ‖Δθ‖: longer steps move more.

Results: right_direction.json and right_direction.png; points are means, bars standard errors over batches. The
figure's last row has the gains: a method's fraction minus GRPO's on the same batch.

    python -m lab.right_direction
"""

import dataclasses
import importlib

import torch
from tqdm import tqdm

from lab import common, who_dominates
from runtime import curves
from runtime.settings import PositiveFloat, PositiveFraction, PositiveInt

METHODS = {  # name: script, and its settings besides the defaults
    "GRPO": ("grpo", {}),
    "AR": ("grpo_ar_lopti", {"alpha": 0.3, "eta": 0.0}),
    "Lopti": ("grpo_ar_lopti", {"alpha": 0.0, "eta": 0.5}),
    "AR + Lopti": ("grpo_ar_lopti", {"alpha": 0.3, "eta": 0.5}),
    "DPPO": ("dppo", {}),
    "ACPO": ("acpo", {}),
}
SIGNS = ("positive", "negative", "both signs")  # a token's advantage
STEPS = ("equal lr", "equal ‖Δθ‖")
MARKERS = "o s D ^ v P".split()  # one per method


@dataclasses.dataclass
class Args(common.Args):
    batches: PositiveInt = 10  # batches to average over
    updates: PositiveInt = 4  # optimizer updates of the second kind of step; divides --prompts
    lr: PositiveFloat | None = None  # SGD's learning rate; None: found on the first batch
    adamw_lr: PositiveFraction | None = None  # learning rate of the AdamW update that finds it; None: grpo.py's


def step_of(method, policy, before, sampled, lr, updates, args):
    """Return Δθ, a list of tensors, of a method's step with this many updates. The policy stays as it is."""
    script, changes = METHODS[method]
    of_script = common.trainer_args(script, args, kl_coef=0.0, updates_per_step=updates, **changes)
    batch = common.with_advantages(script, sampled, of_script)
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    importlib.import_module(script).update(policy, optimizer, batch, 1, of_script)
    step = [new - old for new, old in zip(common.copy_weights(policy), before)]
    common.set_weights(policy, before)
    return step


def shares_right(change, advantages, bins):
    """Return {sign: fraction per bin of the tokens [n] that moved as their advantage says}; None if there is none."""
    right = change * advantages.sign() > 0
    tokens = dict(zip(SIGNS, (advantages > 0, advantages < 0, advantages != 0)))
    return {sign: common.means_by_bin(right[inside], bins[inside]) for sign, inside in tokens.items()}


def name_of(updates, kind):
    return f"{kind}, {updates} update{'s' if updates > 1 else ''}"


def measure(policy, before, sampled, lr, args):
    """Return one batch's {name_of a step: {method: shares_right and the step's length ‖Δθ‖}}."""
    of_script, batch = who_dominates.for_steps(policy, sampled, args)
    mask = batch["mask"]
    bins = common.bins_of(batch["old_logp"])[mask]
    advantages = batch["advantages"][mask]
    found = {}
    for updates in (1, args.updates):
        length_of_grpo = None
        for method in METHODS:
            step = step_of(method, policy, before, sampled, lr, updates, args)
            length = common.norm(step)
            length_of_grpo = length_of_grpo or length  # GRPO comes first
            for kind, scale in zip(STEPS, (1.0, length_of_grpo / max(length, 1e-300))):
                # θ − lr · gradient with lr −1 is θ + step.
                scaled = [scale * part for part in step]
                change = who_dominates.changes(policy, before, scaled, -1.0, batch, of_script)
                shares = shares_right(change, advantages, bins)
                found.setdefault(name_of(updates, kind), {})[method] = shares | {"step": scale * length}
    return found


def draw_shares(axes, rows, step, sign):
    """Plot each method's fraction by bin, with its standard error."""
    for number, method in enumerate(METHODS):
        pairs = common.over_batches([row[step][method][sign] for row in rows])
        places = [i + 0.12 * (number - 2.5) for i in range(common.BINS)]
        common.points(axes, places, pairs, MARKERS[number], color=curves.COLOURS[number], label=method)
    axes.axhline(0.5, color="0.5", linewidth=1, zorder=0)
    axes.set_xticks(range(common.BINS), common.BIN_NAMES)


def draw_gains(axes, rows, step):
    """Plot, for tokens of p > 0.75, each method's fraction minus GRPO's, for both signs and for each."""
    others = [method for method in METHODS if method != "GRPO"]

    def gains(found, sign):  # {method: its fraction minus GRPO's}, None without such tokens
        of_grpo = found["GRPO"][sign][-1]
        return {method: None if of_grpo is None else found[method][sign][-1] - of_grpo for method in others}

    for number, (sign, colour) in enumerate(zip(SIGNS, ("0.6", "0.6", "black"))):
        places = [place + 0.2 * (number - 1) for place in range(len(others))]
        means = common.over_batches([gains(row[step], sign) for row in rows])
        pairs = [means[method] for method in others]
        common.points(axes, places, pairs, "^vo"[number], color=colour, label=sign)
    axes.axhline(0, color="0.5", linewidth=1, zorder=0)
    axes.set_xticks(range(len(others)), [name.replace(" + ", " +\n") for name in others])


def draw(rows, lr, args):
    title = f"share of tokens moved as their advantage says: {common.name_of(args.model)}, SGD, lr {lr:g}\n"
    title += f"{len(rows)} batches; bars: standard error"
    figure = curves.new_figure(curves.WIDTH, 14, title)
    panels = figure.subplots(3, 2, sharex="row", sharey="row")
    for x, updates in enumerate((1, args.updates)):
        step = name_of(updates, "equal lr")
        draw_shares(panels[0, x], rows, step, "positive")
        draw_shares(panels[1, x], rows, step, "negative")
        draw_gains(panels[2, x], rows, step)
        panels[0, x].set_title(step)
        panels[1, x].set_xlabel("probability when sampled")
    limits = [limit for axes in panels[:2, 0] for limit in axes.get_ylim()]
    for axes in panels[:2, 0]:  # both signs on one scale; each row shares its own
        axes.set_ylim(min(limits), max(limits))
    labels = ("positive tokens: share\nwhose probability rises", "negative tokens: share\nwhose probability falls")
    for axes, label in zip(panels[:, 0], (*labels, "p > 0.75: share moved the\nright way, minus GRPO's")):
        axes.set_ylabel(label)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS))
    panels[2, 0].legend(title="advantage", loc="lower left")
    common.save_figure(figure, args, "right_direction")


def main():
    args, policy, _, batches = common.begin(Args, __doc__, least_updates=2)
    before = common.copy_weights(policy)
    lr = args.lr or who_dominates.learning_rate(policy, before, batches[0], args)
    rows = [measure(policy, before, sampled, lr, args) for sampled in tqdm(batches, desc="batches", disable=None)]
    draw(rows, lr, args)
    common.finish(args, "right_direction", {"bins": common.BIN_NAMES, "lr": lr, "batches": rows})


if __name__ == "__main__":
    main()
