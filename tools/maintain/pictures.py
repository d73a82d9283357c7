"""Draw a picture for each script's page: what its update does to a token, and how its kept runs learned.

    python -m tools.maintain.pictures           all of docs/algorithms/pictures/
    python -m tools.maintain.pictures acpo      one of them

The left panel is computed with the script's own functions: the weight of a token's ∇log π in its update (updates.py),
or the advantages of a group. The right panel has the accuracy of the sampled responses in the kept runs
(benchmarks/kk_tiny), mean and range over the seeds. Both show the script beside its parent.
"""

import dataclasses
import importlib
import json
from statistics import fmean
from typing import Annotated

import matplotlib
import torch
import tyro
from matplotlib import pyplot
from matplotlib.lines import Line2D

from tools import family
from tools.maintain import example, updates

matplotlib.use("svg")
FOLDER = family.ROOT / "docs" / "algorithms" / "pictures"
RUNS = family.ROOT / "benchmarks" / "kk_tiny"
COLOURS = {"script": "#d95f02", "parent": "#7570b3"}  # of the script, and of its parent
KINDS = {  # what the left panel is over
    "group": ["reinforce", "rloo", "maxrl", "dr_grpo", "reinforce_pp"],
    "ratio": ["grpo", "cispo", "gspo", "sapo"],
    "square": ["acpo", "dppo"],
    "probability": ["grpo_ar_lopti", "reinforce_pp_ar_lopti", "dapo_ar_lopti"],
    "entropy": ["entropy_top"],
    "sampler": ["grpo_tis"],
    "reference": ["grpo_kl"],
    "length": ["dapo"],
}
NAMES = {  # of the kept runs, where it is not the script's
    "grpo_ar_lopti": "ar_lopti",
    "reinforce_pp": "reinforce_",
    "reinforce_pp_ar_lopti": "reinforce_ar_lopti",
    "dr_grpo": "dr._grpo",
    "entropy_top": "80_20",
}
SETTINGS = {"grpo_ar_lopti": {"alpha": 0.3, "eta": 0.5}}
SIGNS = [
    Line2D([], [], color="black", linestyle=style, label=f"A {sign} 0") for style, sign in (("-", ">"), ("--", "<"))
]
NUM_TOKENS = 241  # on an axis
GROUP = 8


def settings_of(script, with_kl=False):
    """Return a script's settings, without a KL term unless the picture is about it."""
    args = dataclasses.replace(example.settings_of(script), **SETTINGS.get(script, {}))
    if hasattr(args, "kl_coef") and not with_kl:
        args.kl_coef = 0.0
    return args


def weights(script, old, new, advantage, **others):
    """Return the weight of ∇log π of tokens at the second update of a step, [n], as a multiple of |A|.

    old, new: [n], π_old and π; advantage: A of all of them. others: ref and sampler, probabilities [n]; entropy, [n].
    Each token is a response of its own.
    """
    trainer = importlib.import_module(script)
    args = settings_of(script, with_kl="ref" in others)
    column = {"old": old, "new": new, "ref": new, "sampler": old, "entropy": torch.ones_like(old)} | others
    column = {name: values.double()[:, None] for name, values in column.items()}  # [n, 1]
    logs = {f"{name}_logp": column[name].log() for name in ("old", "ref", "sampler")}
    mask = torch.ones(column["old"].shape, dtype=torch.bool)
    batch = {"ids": torch.zeros(mask.shape, dtype=torch.long), "mask": mask, "entropy": column["entropy"], **logs}
    batch["advantages"] = torch.full(mask.shape, float(advantage), dtype=torch.float64)
    if hasattr(trainer, "ar_weight"):
        batch["advantages"] = batch["advantages"] * trainer.ar_weight(batch["old_logp"], args.alpha)
    weight, _ = updates.token_weights(script, batch, column["new"].log(), column["entropy"], args, is_first=False)
    return weight[:, 0] * len(mask)


def group_panel(axes, scripts):
    """Advantages of right and wrong responses, over the number of right ones among eight."""
    counts = range(1, GROUP)  # one batch with a group of each kind: reinforce_pp.py's mean is over all of them
    rewards = torch.tensor([[float(i < count) for i in range(GROUP)] for count in counts], dtype=torch.float64)
    ones = torch.ones(rewards.numel(), 1, dtype=torch.float64)
    batch = {"ids": ones.long(), "mask": ones > 0, "entropy": ones}
    batch |= {f"{name}_logp": ones.log() for name in ("old", "ref", "sampler")}
    for role, script in scripts.items():
        args = dataclasses.replace(settings_of(script), responses_per_prompt=GROUP, prompts_per_step=len(counts))
        flat = rewards.flatten()
        found = updates.with_advantages(script, batch, flat, (flat > 0).tolist(), args)["advantages"]
        found = found.view(len(counts), GROUP)  # the first response of a group is right, the last one wrong
        for place, style in ((0, "-"), (-1, "--")):
            axes.plot(counts, found[:, place], style, color=COLOURS[role], marker=".")
    axes.set(
        xlabel=f"right responses in a group of {GROUP} (reward 1; others 0)",
        ylabel="advantage A (right: solid, wrong: dashed)",
    )


def length_panel(axes, scripts):
    """The penalty that dapo.py adds to the reward of a long response."""
    args = importlib.import_module("dapo").Args()
    lengths = torch.linspace(0, args.max_response_tokens, NUM_TOKENS).tolist()
    penalties = [importlib.import_module("dapo").overlong_penalty(length, args) for length in lengths]
    axes.plot(lengths, penalties, color=COLOURS["script"])
    axes.plot(lengths, [0.0] * len(lengths), color=COLOURS["parent"])
    axes.set(xlabel="tokens of a response", ylabel="added to the reward")


def line_panel(axes, scripts, kind):
    """Weight of a token over one of its numbers, for A = 1 and A = −1."""
    even = torch.linspace(0, 1, NUM_TOKENS)
    ratio = (3 ** (2 * even - 1)).double()  # 1/3 to 3
    p = torch.full_like(ratio, 0.3)
    x, old, new, others, label = {
        "ratio": (ratio, p, p * ratio, {}, r"ρ = π / π_old, at π_old = 0.3"),
        "sampler": (ratio, p, p, {"sampler": p / ratio}, r"π_old / π_sampler, at ρ = 1"),
        "reference": (ratio, p, p, {"ref": p / ratio}, r"π / π_ref, at ρ = 1"),
        "probability": (even, even.clamp(0.002, 0.998), even.clamp(0.002, 0.998), {}, r"π_old, at ρ = 1"),
        "entropy": (100 * even, p, p, {"entropy": even}, "percentile of the token's entropy, at ρ = 1"),
    }[kind]
    for role, script in scripts.items():
        for advantage, style in ((1, "-"), (-1, "--")):
            axes.plot(x, weights(script, old, new, advantage, **others), style, color=COLOURS[role])
    if kind in ("ratio", "sampler", "reference"):
        axes.set_xscale("log")
        axes.set_xticks([0.33, 0.5, 0.8, 1, 1.25, 2, 3], ["⅓", "½", "0.8", "1", "1.25", "2", "3"])
        axes.minorticks_off()
    axes.set(xlabel=label, ylabel="weight of ∇log π")
    axes.legend(handles=SIGNS, frameon=False, fontsize=8)


def square_panel(axes, scripts):
    """Where a token of positive advantage keeps its gradient: π over π_old."""
    side = torch.linspace(0.01, 0.99, 80).double()
    rng = torch.Generator().manual_seed(0)
    crowd_old = torch.rand(4000, generator=rng).double().clamp(0.01, 0.99)  # acpo.py's ranges are of a population
    crowd_new = (crowd_old * torch.exp(0.15 * torch.randn(4000, generator=rng).double())).clamp(max=0.999)
    for role, script in scripts.items():
        kept = []
        for old in side:
            column = weights(
                script,
                torch.cat([old.expand(len(side)), crowd_old]),
                torch.cat([side, crowd_new]),
                1,
            )[: len(side)]
            kept.append((column.abs() > 1e-12).double())
        edge = torch.stack(kept, 1)  # [π, π_old]
        style = {"script": "solid", "parent": "dashed"}[role]
        axes.contour(side, side, edge, levels=[0.5], colors=COLOURS[role], linestyles=style)
        if role == "script":
            axes.contourf(side, side, edge, levels=[0.5, 1.5], colors=COLOURS[role], alpha=0.15)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.6)
    axes.set(xlabel="π_old", ylabel="π", xlim=(0, 1), ylim=(0, 1))
    axes.text(0.97, 0.06, "A > 0: the gradient stays", ha="right", fontsize=8)


def runs_of(script):
    """Return the accuracies of the sampled responses in a script's kept runs: a list per seed, [] if there is none."""
    name = NAMES.get(script, script)
    found = [json.loads(path.read_text()) for path in sorted(RUNS.glob(f"{name}_seed_*.json"))]
    return [[row["accuracy"] for row in run["rows"] if "accuracy" in row] for run in found if run["script"] == script]


def curve_panel(axes, scripts):
    """Accuracy of the sampled responses over the steps: the mean over the seeds, and their range."""
    for role, script in scripts.items():
        runs = runs_of(script)
        columns = list(zip(*runs))
        steps = range(1, len(columns) + 1)
        axes.plot(
            steps, [fmean(column) for column in columns], color=COLOURS[role], label=f"{script}, {len(runs)} seeds"
        )
        axes.fill_between(
            steps, *zip(*((min(c), max(c)) for c in columns)), color=COLOURS[role], alpha=0.15, linewidth=0
        )
    axes.set(xlabel="step", ylabel="accuracy of the sampled responses", ylim=(0, 1))
    axes.legend(frameon=False, loc="upper left")


PANELS = {"group": group_panel, "square": square_panel, "length": length_panel}


def draw(script):
    """Write a script's picture."""
    kind = next((kind for kind, of in KINDS.items() if script in of), None)
    parent = (family.PARENT | family.new_scripts()).get(script)
    scripts = ({"parent": parent} if parent else {}) | {"script": script}
    learned = {role: name for role, name in scripts.items() if runs_of(name)}
    panels = [kind] * bool(kind) + ["curve"] * ("script" in learned)
    if not panels:
        return None
    with pyplot.rc_context(
        {"svg.hashsalt": script, "font.size": 9, "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        figure, row = pyplot.subplots(
            1, len(panels), figsize=(4.6 * len(panels), 3.2), squeeze=False, layout="constrained"
        )
        for axes, panel in zip(row[0], panels):
            if panel == "curve":
                curve_panel(axes, learned)
            elif panel in PANELS:
                PANELS[panel](axes, scripts)
            else:
                line_panel(axes, scripts, panel)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.2)
        FOLDER.mkdir(exist_ok=True)
        figure.savefig(FOLDER / f"{script}.svg", metadata={"Date": None})
        pyplot.close(figure)
    return FOLDER / f"{script}.svg"


def main(scripts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()):
    """Draw the pictures of these scripts, or of all."""
    for script in scripts or updates.ALGORITHMS:
        print(draw(script) or f"{script}: nothing to draw")


if __name__ == "__main__":
    tyro.cli(main)
