"""The lens: the weight that every algorithm puts on every token of one batch.

A policy gradient is a sum over tokens, Σ weight · ∇log π. The weights come from each script's own update()
(tools/maintain/updates.py), at the first update of a step, where π is still π_old, and at a later one. For the latter
the script first updates the model with this batch, --updates times with AdamW (with Lopti twice as many optimizer
steps); the table then holds the moved model's log-probabilities. The reference stays. Scripts keep their own settings.

Not shown: opd.py and sdpo.py, which have a teacher; entropy_bonus.py, whose bonus is no weight of the sampled token;
grpo_multi_turn.py, which is grpo.py if no task replies; dapo.py's choice of groups (all stay), ppo.py's critic (its
values are 0), and the scaling of gradients to --max_grad_norm.

Results: lens.html, a page with the responses and coloured tokens; lens.png, the mean weight by probability; lens.json.

    python -m lab.lens --model runs/…/checkpoints/step_000010
"""

import dataclasses
import importlib
import json
from pathlib import Path

import torch
from tqdm import tqdm

import grpo
from lab import common
from runtime import curves, files
from runtime.metrics import pieces_of
from runtime.settings import PositiveFraction, PositiveInt
from tools.maintain.updates import ALGORITHMS, token_weights

SCRIPTS = [
    script for script in ALGORITHMS if script not in ("opd", "sdpo", "entropy_bonus", "grpo_multi_turn", "gigpo")
]
PAGE = Path(__file__).parent / "page.html"
CUT = 0.01  # a token is clipped if less than this fraction of its first weight is left
TOP = 0.01  # fraction of a bin's tokens, by |weight|, excluded from means as in AR-Lopti's figure 1


@dataclasses.dataclass
class Args(common.Args):
    updates: PositiveInt = 12  # optimizer updates before the second measurement; divides --prompts
    lr: PositiveFraction | None = None  # AdamW's learning rate in these updates; None: grpo.py's for the model
    show: PositiveInt = 4  # groups of responses on the page


def measure(script, policy, sampled, args):
    """Measure everything that the page and the summary need of one script: a dictionary of tensors [N, T]."""
    trainer = importlib.import_module(script)
    of_script = common.trainer_args(script, args)
    batch = common.with_advantages(script, sampled, of_script)
    first, stage = token_weights(script, batch, batch["old_logp"], batch["entropy"], of_script, is_first=True)
    before = common.copy_weights(policy)
    lr = common.learning_rate(args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=of_script.weight_decay)
    own_norm = trainer.Args().max_grad_norm  # scale the gradient down here, as in training
    moving = dataclasses.replace(of_script, updates_per_step=args.updates, max_grad_norm=own_norm)
    trainer.update(policy, optimizer, dict(batch), 1, moving)  # a copy: reinforce.py's update adds to it
    logp, entropy = grpo.log_probs(policy, batch, of_script)
    common.set_weights(policy, before)
    later, _ = token_weights(script, batch, logp, entropy, of_script, is_first=False)
    ratio = (logp - batch["old_logp"]).double().exp()
    return {"first": first, "later": later, "stage": stage, "ratio": ratio, "advantages": batch["advantages"]}


def without_top(values, bins):
    """Return which of the values [n] remain if the top TOP of each bin, by size, is excluded."""
    kept = torch.ones(len(values), dtype=torch.bool)
    for i in range(common.BINS):
        places = (bins == i).nonzero()[:, 0]
        largest = values[places].abs().topk(int(TOP * len(places))).indices
        kept[places[largest]] = False
    return kept


def summary_of(found, batch):
    """Return a script's numbers by bin of probability at sampling. Means exclude the TOP of each bin.

    weight: mean |weight| times the batch's tokens, GRPO's is the mean |A|; relative: divided by the mean of all tokens;
    zero, cut: fractions without weight, and with less than CUT of it left; top_share: the TOP's fraction of Σ |weight|.
    """
    mask = batch["mask"]
    bins = common.bins_of(batch["old_logp"])[mask]  # [n]
    num_tokens = len(bins)
    first = found["first"][mask].abs()  # [n]
    later = found["later"][mask].abs()
    is_cut = (first > 0) & (later < CUT * first)
    result, means = {}, {}
    for when, weight in (("first", first), ("later", later)):
        kept = without_top(weight, bins)
        means[when] = weight[kept].mean().item()
        in_bins = common.means_by_bin(weight[kept], bins[kept], 0.0)
        result[when] = {
            "weight": [mean * num_tokens for mean in in_bins],
            "relative": [mean / max(means[when], 1e-300) for mean in in_bins],
            "zero": common.means_by_bin(weight[kept] == 0, bins[kept], 0.0),
            "mean_weight": means[when] * num_tokens,
            "top_share": (weight[~kept].sum() / weight.sum().clamp(min=1e-300)).item(),
        }
    result["later"]["cut"] = common.means_by_bin(is_cut[first > 0], bins[first > 0], 0.0)
    result["later"]["cut_tokens"] = int(is_cut.sum())
    result["later"]["kept"] = means["later"] / max(means["first"], 1e-300)
    place = int(later.argmax())
    result["later"]["largest"] = {
        "weight": found["later"][mask][place].item() * num_tokens,
        "probability": batch["old_logp"][mask][place].exp().item(),
        "ratio": found["ratio"][mask][place].item(),
        "advantage": found["advantages"][mask][place].item(),
    }
    return result


def draw(summary, args):
    """Plot lens.png: each script's mean weight by bin of probability, divided by its mean for all tokens."""
    from matplotlib.colors import LogNorm

    title = "mean |weight| of a token over the script's own mean, without the top 1 % of each bin\n"
    title += "(Lopti makes two optimizer steps in an update)"
    figure = curves.new_figure(curves.WIDTH, 10.5, title)
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(4, 4, 3.4))
    scripts = list(summary)
    titles = ("first update of a step", f"after {args.updates} updates")
    for axes, when, title in zip(panels, ("first", "later"), titles):
        values = [summary[script][when]["relative"] for script in scripts]
        floored = [[max(value, 0.01) for value in row] for row in values]
        axes.imshow(floored, aspect="auto", cmap="PuOr_r", norm=LogNorm(0.2, 5))
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                colour = "white" if value > 2.5 or value < 0.4 else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(common.BINS), [name.replace(" ", "\n", 1) for name in common.BIN_NAMES])
        axes.set(title=title, xlabel="probability when sampled")
    panels[0].set_yticks(range(len(scripts)), scripts)
    panels[2].imshow([[0.0, 0.0]] * len(scripts), aspect="auto", cmap="Greys", vmin=0, vmax=1)
    for y, script in enumerate(scripts):
        later = summary[script]["later"]
        panels[2].text(0, y, f"{later['kept']:.2f}", ha="center", va="center")
        panels[2].text(1, y, f"{later['top_share']:.0%}", ha="center", va="center")
    panels[2].set_xticks([0, 1], ["mean, over\nthe first\nupdate's", "share of the\n|weight| that\nthe top 1 % have"])
    panels[2].set_title(titles[1])
    for axes in panels:
        axes.tick_params(length=0)
    common.save_figure(figure, args, "lens")


def page_data(sampled, found, summary, tokenizer, args):
    """Return the page's data, for JSON. Numbers of tokens are integers: thousandths."""
    batch = sampled.batch
    num_tokens = int(batch["mask"].sum())
    shown = common.is_mixed(sampled, args).nonzero()[:, 0].tolist()[: args.show] or [0]

    def thousandths(values, row):  # [N, T] → the row's response tokens
        return (values[row][batch["mask"][row]].double() * 1000).round().long().tolist()

    responses = []
    for group in shown:
        for row in range(group * args.responses, (group + 1) * args.responses):
            ids = batch["ids"][row][batch["mask"][row]].tolist()
            weights = {}
            for script, of_it in found.items():
                weights[script] = {when: thousandths(of_it[when] * num_tokens, row) for when in ("first", "later")}
                weights[script]["ratio"] = thousandths(of_it["ratio"], row)
                weights[script]["stage"] = of_it["stage"][row][batch["mask"][row]].tolist()
            responses.append(
                {
                    "prompt": sampled.prompts[group],
                    "reward": sampled.rewards[row].item(),
                    "correct": sampled.correct[row],
                    "tokens": pieces_of(tokenizer, ids),
                    "probability": thousandths(batch["old_logp"].double().exp(), row),
                    "entropy": thousandths(batch["entropy"], row),
                    "advantage": thousandths(found["grpo"]["advantages"], row),
                    "weights": weights,
                }
            )
    about = {"model": args.model, "updates": args.updates, "num_tokens": num_tokens, "scripts": list(found)}
    return about | {"bins": common.BIN_NAMES, "summary": common.rounded(summary), "responses": responses}


def write_page(data, path):
    """Write the page with its data: one file, which needs neither other files nor a network."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # so that a response can't end the script
    files.write(path.with_name("lens_page.jsonl"), text + "\n")  # the site makes its page of it
    files.write(path, PAGE.read_text().replace("DATA_OF_THE_LENS", text))


def main():
    args, policy, tokenizer, [sampled] = common.begin(Args, __doc__, least_updates=1)
    bar = tqdm(SCRIPTS, desc="algorithms", disable=None)
    found = {script: measure(script, policy, sampled, args) for script in bar}
    summary = {script: summary_of(of_script, sampled.batch) for script, of_script in found.items()}
    draw(summary, args)
    write_page(page_data(sampled, found, summary, tokenizer, args), Path(args.out, "lens.html"))
    shares = common.shares_of(common.bins_of(sampled.batch["old_logp"])[sampled.batch["mask"]])
    common.finish(args, "lens", {"bins": common.BIN_NAMES, "share_of_tokens": shares, "scripts": summary})


if __name__ == "__main__":
    main()
