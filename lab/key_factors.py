"""Key factors: size and direction of the gradients of some tokens, and of off-policy losses.

ACPO (arXiv 2606.22570), figure 4 and appendix D. Two gradients are compared by the ratio of their norms and by
principal angles. For each weight matrix, V and W are the first k right singular vectors of the two gradients. The
arccosines of the singular values of VᵀW are the angles between the two subspaces. Results show their mean over the k
angles and all matrices. Equal subspaces have 0°. Unrelated subspaces don't have 90°, but `chance`. The paper's k is
128, which is all of kk_tiny's directions in most matrices. So here k is a sixteenth of the model's width.

Some tokens (D.1, D.2): p < 0.2, p > 0.8, the highest entropies (by entropy_top.py), A > 0, A < 0; at the weights that
sampled the batch, compared with the gradient of all tokens. Norms belong to the mean over these tokens alone.

Importance sampling (D.3): GRPO makes all but the last of --updates updates on a batch. At these weights every method's
own update() gives its gradient on the whole batch. The reference is GRPO's gradient, as in the paper. "on-policy" is
the gradient of the whole batch in one update, at the weights that sampled it. "on-policy, moved" has the moved weights
and every ρ at 1. "other batch" is on-policy, with other prompts: angles up to its angle are sampling noise.

GRPO has a symmetric clip, ε 0.2. DAPO differs only by ε_high 0.28, as in the ACPO paper. "no clip" has a range that
no ρ leaves. "ACPO, α 0" has ACPO's mean over responses and a fixed clip. There is no KL term.

Results: key_factors.json and key_factors.png; bars are means, error bars standard errors over batches.

    python -m lab.key_factors
"""

import dataclasses
import importlib
from statistics import fmean

import torch
from tqdm import tqdm

import entropy_top
import grpo
from lab import common, who_dominates
from runtime import curves
from runtime.distributed import DEVICE
from runtime.settings import PositiveFraction, PositiveInt
from tools.maintain import updates

PAPERS_K = 128
SUBSETS = {  # name: the paper's norm in per cent of the whole's, and angle in degrees
    "p < 0.2": (409, 27.8),
    "p > 0.8": (50, 42.8),
    "top entropy": (340, 44.2),
    "A > 0": (122, 40.5),
    "A < 0": (92, 28.0),
}
TOP_ENTROPY = 0.2  # fraction of the tokens, by highest entropy
METHODS = {  # name: script, and its settings besides the defaults
    "GRPO": ("grpo", {"clip_low": 0.2, "clip_high": 0.2}),
    "no clip": ("grpo", {"clip_low": 1.0, "clip_high": 1e9}),  # ρ is at most exp(20), 4.9e8
    "DAPO": ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "overlong_buffer": 0}),
    "CISPO": ("cispo", {}),
    "ACPO": ("acpo", {}),
    "ACPO, α 0": ("acpo", {"clip_alpha": 0.0}),
    "DPPO": ("dppo", {}),
}
REFERENCES = ["GRPO", "on-policy", "on-policy, moved"]
PAPER = {  # norm in per cent of GRPO's, angle to GRPO's in degrees; None: not in the text
    "on-policy": (98, 47.4),
    "no clip": (20177, 50.7),
    "DAPO": (None, 1.3),
    "CISPO": (3268, 49.7),
}


@dataclasses.dataclass
class Args(common.Args):
    prompts: PositiveInt = 16  # prompts per batch; a multiple of --updates
    batches: PositiveInt = 4  # batches to average over
    k: PositiveInt | None = None  # directions per subspace; None: width/16, at most 128
    updates: PositiveInt = 16  # per step; all but the last are made before the gradients are computed
    lr: PositiveFraction | None = None  # AdamW's learning rate in these updates; None: grpo.py's for the model


def right_vectors(matrix):
    """Return a matrix's right singular vectors, [columns, rank] in float64, without those within float32's rounding."""
    _, sizes, vectors = torch.linalg.svd(matrix.to(DEVICE).double(), full_matrices=False)
    rounding = max(matrix.shape) * torch.finfo(torch.float32).eps
    rank = int((sizes > rounding * sizes[:1]).sum())
    return vectors[:rank].T.cpu()


def principal_angles(some, others, k):
    """Return the angles between the spans of both first k orthonormal vectors [columns, any], in degrees, ascending."""
    k = min(k, some.shape[1], others.shape[1])
    if k == 0:
        return torch.full((1,), 90.0, dtype=torch.float64)
    cosines = torch.linalg.svdvals(some[:, :k].T @ others[:, :k])  # [k]
    return cosines.clamp(0, 1).arccos().rad2deg()


class Gradient:
    """A gradient, a list of tensors, with the first k right singular vectors of its matrices."""

    def __init__(self, tensors, k):
        self.tensors, self.k = tensors, k
        self.vectors = [right_vectors(tensor)[:, :k].clone() for tensor in tensors if tensor.dim() == 2]

    def compare(self, reference):
        """Return the norm relative to the reference's, and the two angles to it, one of them per matrix, too."""
        pairs = zip(self.vectors, reference.vectors)
        by_matrix = [principal_angles(mine, its, self.k).mean().item() for mine, its in pairs]
        return {
            "norm": common.norm(self.tensors) / max(common.norm(reference.tensors), 1e-300),
            "angle": fmean(by_matrix),
            "angle_by_matrix": by_matrix,
            "angle_of_vectors": common.angle(self.tensors, reference.tensors),
        }


def chance(policy, k):
    """Return the mean principal angle between random matrices of the gradients' shapes, in degrees."""
    rng = torch.Generator().manual_seed(0)
    noise = [[torch.randn(weight.shape, generator=rng) for weight in policy.parameters()] for _ in range(2)]
    return Gradient(noise[0], k).compare(Gradient(noise[1], k))["angle"]


def prepared(method, sampled, args):
    """Return (script, its settings, the batch as its main passes it to its update) of a method."""
    script, changes = METHODS[method]
    of_script = common.trainer_args(script, args, kl_coef=0.0, **changes)
    return script, of_script, common.with_advantages(script, sampled, of_script)


def subsets_of(policy, sampled, args):
    """Return (the whole gradient, {subset: its part of the gradient, its fraction of the tokens}), at every ρ = 1."""
    _, of_script, batch = prepared("GRPO", sampled, args)
    cells = common.bins_of(batch["old_logp"], who_dominates.EDGES)
    chosen = {name: cells == cell for name, cell in who_dominates.TAILS.items()}
    chosen["A > 0"] = batch["advantages"] > 0
    chosen["A < 0"] = batch["advantages"] < 0
    of_top = common.trainer_args("entropy_top", args, kl_coef=0.0, entropy_top=TOP_ENTROPY)
    recorder = updates.Recorder(policy)
    metrics = entropy_top.update(policy, recorder, common.with_advantages("entropy_top", sampled, of_top), 1, of_top)
    parts = {"top entropy": (common.add(recorder.gradients), metrics["top_rate"])}
    for name, tokens in chosen.items():
        share = tokens[batch["mask"]].double().mean().item()
        parts[name] = (common.gradient_of_tokens(policy, batch, tokens, of_script), share)
    return common.gradient_of(policy, batch, of_script), {name: parts[name] for name in SUBSETS}


def compare_subsets(whole, parts, k):
    """Compare each subset with the whole, a Gradient: {subset: comparison; norm: of the mean over its tokens alone}."""
    result = {}
    for name, (part, share) in parts.items():
        found = Gradient(part, k).compare(whole)
        own_norm = found["norm"] / share if share else 0.0
        result[name] = found | {"norm_of_part": found["norm"], "norm": own_norm, "share": share}
    return result


def move(policy, sampled, args):
    """Give the policy the weights after all but the last of GRPO's updates on this batch."""
    _, of_script, batch = prepared("GRPO", sampled, args)
    num_rows = len(batch["ids"])
    seen = {name: value[: num_rows - num_rows // args.updates] for name, value in batch.items()}
    lr = common.learning_rate(args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=of_script.weight_decay)
    own_norm = grpo.Args().max_grad_norm  # scale the gradient down here, as in training
    of_script = dataclasses.replace(of_script, updates_per_step=args.updates - 1, max_grad_norm=own_norm)
    grpo.update(policy, optimizer, seen, 1, of_script)


def off_policy_gradient(method, policy, sampled, args):
    """Return (gradient of a method's loss, a list of tensors; metrics) at the second of two updates with all tokens."""
    script, of_script, batch = prepared(method, sampled, args)
    twice = {name: torch.cat([value, value]) for name, value in batch.items()}
    recorder = updates.Recorder(policy)
    of_script = dataclasses.replace(of_script, updates_per_step=2)
    metrics = importlib.import_module(script).update(policy, recorder, twice, 1, of_script)
    return recorder.gradients[-1], metrics


def measure(policy, before, sampled, other, k, args):
    """Return one batch's numbers for JSON. other: another batch, or None. The policy stays as it is."""
    whole, parts = subsets_of(policy, sampled, args)
    whole = Gradient(whole, k)
    result = {"subsets": compare_subsets(whole, parts, k)}
    found = {"on-policy": whole}
    if other is not None:
        _, of_script, batch = prepared("GRPO", other, args)
        found["other batch"] = Gradient(common.gradient_of(policy, batch, of_script), k)

    move(policy, sampled, args)
    _, of_script, batch = prepared("GRPO", sampled, args)
    now, _ = grpo.log_probs(policy, batch, of_script, with_entropy=False)
    at_one = common.gradient_of(policy, batch | {"old_logp": now}, of_script)
    found["on-policy, moved"] = Gradient(at_one, k)
    for method in METHODS:
        gradient, metrics = off_policy_gradient(method, policy, sampled, args)
        found[method] = Gradient(gradient, k)
        if method == "GRPO":  # both copies of the batch are clipped equally
            result["clip_rate"] = metrics["clip_rate"]
    common.set_weights(policy, before)

    def compared(reference):
        return {name: gradient.compare(found[reference]) for name, gradient in found.items()}

    return result | {"off_policy": {reference: compared(reference) for reference in REFERENCES}}


OURS, OTHER, PAPERS = curves.COLOURS[0], curves.COLOURS[6], curves.COLOURS[1]
GREY = "0.45"  # lines to compare with
NORMS = "0.6"  # also of angles of another kind than the two in the legend


def draw_paper(axes, places, values, decimals):
    """Draw a diamond, with its number above, for each value in the paper."""
    shown = [(place, value) for place, value in zip(places, values) if value is not None]
    axes.scatter(*zip(*shown), label="the paper", color=PAPERS, s=90, marker="D", zorder=3, edgecolor="white")
    look = {"xytext": (0, 8), "textcoords": "offset points", "fontsize": "small", "ha": "center", "va": "bottom"}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # because lines cross it
    for place, value in shown:
        axes.annotate(f"{value:,.{decimals}f}", (place, value), color=PAPERS, **look)


def draw(average, by_chance, args):
    title = f"gradients of {common.name_of(args.model)}: {args.batches} batches, subspaces of {args.k} directions\n"
    title += "error bars: standard error"
    figure = curves.new_figure(curves.WIDTH, 16, title)
    mosaic = figure.subplot_mosaic([["norm", "angle"], ["norms"] * 2, ["angles"] * 2])
    # First the panels of some tokens, then the off-policy ones.
    panels = [[mosaic[name] for name in names] for names in (("norm", "angle"), ("norms", "angles"))]
    to_grpo, to_on_policy = (average["off_policy"][name] for name in ("GRPO", "on-policy"))
    methods = ["on-policy", "on-policy, moved", *[name for name in METHODS if name != "GRPO"]]
    columns = ((list(SUBSETS), average["subsets"], SUBSETS), (methods, to_grpo, PAPER))
    for x, (names, averages, paper) in enumerate(columns):
        found = [averages[name] for name in names]
        of_paper = [paper.get(name, (None, None)) for name in names]
        places = list(range(len(names)))
        axes = panels[x][0]
        norms = common.percent(row["norm"] for row in found)
        common.bars(axes, [place - 0.15 for place in places], norms, 0.5, color=NORMS, label="ours")
        beside = [place + (0.3, 0.36)[x] for place in places]
        draw_paper(axes, beside, [norm for norm, _ in of_paper], 0)
        axes.axhline(100, color=GREY, linewidth=1, zorder=0)
        axes.set_yscale("log")
        axes.set_ylim(min(30, min(norm[0] for norm in norms) / 2), 2 * axes.get_ylim()[1])

        axes = panels[x][1]
        angles = [row["angle"] for row in found]
        if x == 0:
            common.bars(axes, [place - 0.15 for place in places], angles, 0.5, 1, color=NORMS)
        else:
            left, middle = ([place + shift for place in places] for shift in (-0.28, 0.04))
            common.bars(axes, left, angles, 0.3, 1, color=OURS, label="angle to GRPO's")
            others = [to_on_policy[name]["angle"] for name in names[1:]]
            common.bars(axes, middle[1:], others, 0.3, 1, color=OTHER, label="angle to the one on-policy")
        draw_paper(axes, beside, [angle for _, angle in of_paper], 1)
        axes.axhline(by_chance, color=GREY, linestyle="--", label="random matrices")
        if "other batch" in to_on_policy:
            noise = to_on_policy["other batch"]["angle"][0]
            axes.axhline(noise, color=GREY, linestyle=":", label="another batch's gradient")
        axes.set(ylim=(0, 95), yticks=range(0, 91, 15))
        for axes in panels[x]:
            axes.set_xticks(places, [name.replace(", ", ",\n").replace("top ", "top\n") for name in names])
            axes.set_xlim(-0.6, len(names) - 0.3)
    panels[0][0].set(title="some tokens' own mean gradient", ylabel="norm [% of all tokens' gradient]")
    panels[0][1].set(title="its angle to all tokens' gradient", ylabel="mean principal angle [°]")
    off_policy = f"off-policy gradients, after {args.updates - 1} of {args.updates} updates"
    panels[1][0].set(title=f"{off_policy}, and those on-policy", ylabel="norm [% of GRPO's off-policy]")
    panels[1][1].set_ylabel("mean principal angle [°]")
    handles, labels = panels[1][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    common.save_figure(figure, args, "key_factors")


def main():
    args, policy, _, batches = common.begin(Args, __doc__, least_updates=2)
    args.k = args.k or max(1, min(PAPERS_K, policy.lm.config.hidden_size // 16))
    before = common.copy_weights(policy)
    others = batches[1:] + batches[:1] if len(batches) > 1 else [None]
    pairs = tqdm(list(zip(batches, others)), desc="batches", disable=None)
    rows = [measure(policy, before, *pair, args.k, args) for pair in pairs]
    by_chance = chance(policy, args.k)
    draw(common.over_batches(rows), by_chance, args)
    result = {
        "paper": {"subsets": SUBSETS, "off_policy": PAPER},  # [norm in %, angle in degrees]
        "random_matrices": by_chance,
        "matrices": [name for name, weight in policy.named_parameters() if weight.dim() == 2],
        "batches": rows,  # off_policy: by reference
    }
    common.finish(args, "key_factors", result)


if __name__ == "__main__":
    main()
