"""The right direction: which tokens an update moves as their advantage says.

AR-Lopti (arXiv 2505.12929), figure 3: the share of positive tokens (A > 0) whose probability rises
in an update, by the probability they had when they were sampled; and here the share of negative
ones whose probability falls. Probable tokens are moved by what the update does to improbable ones,
often the wrong way. Advantage reweighting and Lopti are meant to help.

Methods: GRPO, AR, Lopti, both, and DPPO and ACPO, which differ from GRPO once the policy has moved.
So every method makes a step of one update on the whole batch, and a step of --updates updates on
parts of it, with its script's own update(). The optimizer is SGD, as in the paper; --lr is the
paper's 1e-3 for a model of 7B, and kk_tiny hardly moves with it. Left open, it is found as in
lab.who_dominates. The KL term is left out, since it is zero at the start of a run.

A method that makes a larger step moves more tokens. So the step is measured twice: with equal
learning rates, and shortened or lengthened to the length ‖Δθ‖ of GRPO's step.

Results: right_direction.json and right_direction.png; points are means, bars standard errors over
batches.

    python -m lab.right_direction
"""

import dataclasses
import importlib

import torch
from tqdm import tqdm

from lab import common, who_dominates
from runtime.settings import PositiveFloat, PositiveInt, PositiveShare
from tools import plot

METHODS = {  # name: script and what it sets besides its defaults
    "GRPO": ("grpo", {}),
    "AR": ("grpo_ar_lopti", {"alpha": 0.3, "eta": 0.0}),
    "Lopti": ("grpo_ar_lopti", {"alpha": 0.0, "eta": 0.5}),
    "AR + Lopti": ("grpo_ar_lopti", {"alpha": 0.3, "eta": 0.5}),
    "DPPO": ("dppo", {}),
    "ACPO": ("acpo", {}),
}
SIGNS = ("positive", "negative")
STEPS = ("equal lr", "equal ‖Δθ‖")

# ----------------------------------------------------------------------------------------- settings


@dataclasses.dataclass
class Args(common.Args):
    """Which tokens an update moves as their advantage says."""

    batches: PositiveInt = 10  # batches to average over
    updates: PositiveInt = 4  # optimizer updates of the second kind of step; divides --prompts
    lr: PositiveFloat | None = None  # of SGD; None: found on the first batch
    adamw_lr: PositiveShare | None = None  # of the AdamW update it is found with; None: grpo.py's


QUICK = {"batches": 1, "updates": 2}


def check(args):
    """ValueError if the batch can't be divided into so many updates."""
    common.check_updates(args, at_least=2)


# ------------------------------------------------------------------------------------------ measure


def learning_rate(policy, before, sampled, args):
    """The lr at which an SGD step changes probabilities as much as a run's first update."""
    of_script = common.trainer_args("grpo", args, kl_coef=0.0)
    batch = common.with_advantages("grpo", sampled, of_script)
    batch["fine_logp"] = common.fine_log_probs(policy, batch, of_script)
    gradient = common.gradient_of(policy, batch, of_script)
    small = who_dominates.changes(policy, before, gradient, 1e-3, batch, of_script)
    adamw_lr = args.adamw_lr or of_script.lr
    wanted = who_dominates.adamw_change(policy, before, batch, of_script, adamw_lr)
    return float(f"{1e-3 * wanted / max(small.abs().mean().item(), 1e-12):.2g}")


def step_of(method, policy, before, sampled, lr, updates, args):
    """Δθ, a list of tensors, of a method's step with so many updates. The policy stays as it is."""
    script, changes = METHODS[method]
    of_script = common.trainer_args(script, args, kl_coef=0.0, updates_per_step=updates, **changes)
    batch = common.with_advantages(script, sampled, of_script)
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    importlib.import_module(script).update(policy, optimizer, batch, 1, of_script)
    step = [new - old for new, old in zip(common.copy_weights(policy), before)]
    common.set_weights(policy, before)
    return step


def shares_right(change, advantages, bins):
    """Share of tokens moved as their advantage says, {sign: [share in each bin]}; None if no token.

    change: of the probability, advantages, bins: [n]. A token whose probability stays the same is
    not counted as moved.
    """
    result = {}
    for sign, direction in zip(SIGNS, (1, -1)):
        right = change * direction > 0
        shares = []
        for i in range(common.BINS):
            inside = right[(bins == i) & (advantages * direction > 0)]
            shares.append(inside.double().mean().item() if len(inside) else None)
        result[sign] = shares
    return result


def measure(policy, before, sampled, lr, args):
    """One batch: {number of updates: {kind of step: {method: shares_right and ‖Δθ‖}}}."""
    of_script = common.trainer_args("grpo", args)
    batch = common.with_advantages("grpo", sampled, of_script)
    batch["fine_logp"] = common.fine_log_probs(policy, batch, of_script)
    mask = batch["mask"]
    bins = common.bins_of(batch["old_logp"])[mask]
    advantages = batch["advantages"][mask]
    result = {}
    for updates in (1, args.updates):
        found = {kind: {} for kind in STEPS}
        length_of_grpo = None
        for method in METHODS:
            step = step_of(method, policy, before, sampled, lr, updates, args)
            length = common.norm(step)
            length_of_grpo = length_of_grpo or length  # GRPO comes first
            for kind in STEPS:
                scale = 1.0 if kind == "equal lr" else length_of_grpo / max(length, 1e-300)
                if method == "GRPO" and kind != "equal lr":
                    found[kind][method] = found["equal lr"][method]
                    continue
                # θ − lr · gradient with lr −1 is θ + step.
                scaled = [scale * part for part in step]
                change = who_dominates.changes(policy, before, scaled, -1.0, batch, of_script)
                found[kind][method] = shares_right(change, advantages, bins)
                found[kind][method]["step"] = scale * length
        result[updates] = found
    return result


def average(rows, updates, kind, method, sign, i):
    """(mean, standard error) over the batches that have such tokens; None if none has."""
    values = [row[updates][kind][method][sign][i] for row in rows]
    values = [value for value in values if value is not None]
    return common.mean_and_error(values) if values else None


def gain(rows, updates, kind, method, sign="positive", i=-1):
    """(mean, standard error) over batches of a method's share minus GRPO's, of tokens in bin i."""
    differences = []
    for row in rows:
        found = row[updates][kind]
        own, of_grpo = found[method][sign][i], found["GRPO"][sign][i]
        if own is not None and of_grpo is not None:
            differences.append(own - of_grpo)
    return common.mean_and_error(differences) if differences else (0.0, 0.0)


def verdicts_of(rows, args):
    """What the batches' shares say about figure 3; a gain counts from two standard errors on."""
    enough = len(rows) >= 3
    verdicts = []
    lowest = [row[1]["equal lr"]["GRPO"]["positive"][0] for row in rows]
    highest = [row[1]["equal lr"]["GRPO"]["positive"][-1] for row in rows]
    gaps = [a - b for a, b in zip(lowest, highest) if a is not None and b is not None]
    mean, error = common.mean_and_error(gaps) if gaps else (0.0, 0.0)
    verdicts.append(
        (
            "GRPO moves positive improbable tokens (p ≤ 0.25) the right way more often than "
            "probable ones (p > 0.75)",
            common.verdict(mean > 2 * error, enough and bool(gaps)),
            f"the shares differ by {mean:+.3f} ± {error:.3f}",
        )
    )
    for kind in STEPS:
        for method, updates in compared(args):
            mean, error = gain(rows, updates, kind, method)
            verdicts.append(
                (
                    f"{method} moves more of the positive tokens with p > 0.75 the right way than "
                    f"GRPO ({kind}, {updates} update{'s' if updates > 1 else ''})",
                    common.verdict(mean > 2 * error, enough),
                    f"share {mean:+.3f} ± {error:.3f}",
                )
            )
    return verdicts


def compared(args):
    """[(method, number of updates)] that are judged; at one update DPPO's loss is GRPO's."""
    pairs = [(method, 1) for method in ("AR", "Lopti", "AR + Lopti")]
    return pairs + [(method, args.updates) for method in METHODS if method != "GRPO"]


# ------------------------------------------------------------------------------------------ picture


def draw(rows, lr, args):
    title = (
        f"share of tokens moved as their advantage says: {args.model.rstrip('/').split('/')[-1]}, "
        f"SGD, lr {lr:g}, {len(rows)} batches; bars: standard error"
    )
    figure = common.new_figure(17, 9.5, title)
    panels = figure.subplots(2, 4, sharex=True, sharey=True)
    columns = [(updates, kind) for updates in (1, args.updates) for kind in STEPS]
    markers = "o s D ^ v P".split()
    for y, sign in enumerate(SIGNS):
        for x, (updates, kind) in enumerate(columns):
            axes = panels[y, x]
            for number, method in enumerate(METHODS):
                points = [average(rows, updates, kind, method, sign, i) for i in range(common.BINS)]
                places = [i for i, point in enumerate(points) if point]
                axes.errorbar(
                    [i + 0.12 * (number - 2.5) for i in places],
                    [points[i][0] for i in places],
                    yerr=[points[i][1] for i in places],
                    fmt=markers[number],
                    color=plot.COLOURS[number],
                    markersize=8,
                    label=method,
                )
            axes.axhline(0.5, color="0.5", linewidth=1, zorder=0)
            axes.set_xticks(range(common.BINS), common.BIN_NAMES, fontsize="small")
            if y == 1:
                axes.set_xlabel("probability when sampled")
            if y == 0:
                axes.set_title(f"{updates} update{'s' if updates > 1 else ''}, {kind}")
            if x == 0:
                rises = "rises" if sign == "positive" else "falls"
                axes.set_ylabel(f"{sign} tokens: share\nwhose probability {rises}")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    common.save_figure(figure, args, "right_direction")


# --------------------------------------------------------------------------------------------- main


def main():
    args, policy, _, batches = common.begin(Args, __doc__, QUICK, also_check=check)
    before = common.copy_weights(policy)
    lr = args.lr or learning_rate(policy, before, batches[0], args)
    rows = []
    for sampled in tqdm(batches, desc="batches"):
        rows.append(measure(policy, before, sampled, lr, args))
    averages = {}
    for updates in (1, args.updates):
        averages[updates] = {kind: {} for kind in STEPS}
        for kind in STEPS:
            for method in METHODS:
                steps = [row[updates][kind][method]["step"] for row in rows]
                shares = {"step": common.mean_and_error(steps)[0]}
                for sign in SIGNS:
                    shares[sign] = [
                        average(rows, updates, kind, method, sign, i) for i in range(common.BINS)
                    ]
                averages[updates][kind][method] = shares
    verdicts = verdicts_of(rows, args)
    draw(rows, lr, args)
    result = {"bins": common.BIN_NAMES, "lr": lr, "average": averages, "verdicts": verdicts}
    common.write(args, "right_direction", result)  # average: [mean, standard error]
    common.show_verdicts(verdicts)


if __name__ == "__main__":
    main()
