"""Off-policy: how ρ spreads while one batch is used for many updates, and which tokens dominate then.

ACPO (arXiv 2606.22570), figure 2, Lemma 1 and Remark 1. A step makes --updates updates, one on each part of its batch.
Measured before the first and after 1, 2, 4, … updates, over all tokens, in bins of the probability π at sampling:

- The spread σ of ρ in each bin (ddof 0, as in acpo.py). Lemma 1 says σ² = κ²(1 − π)⁴. Two fits to the bins' logarithms,
  with equal weights: κ with the exponent 4, and a free exponent. A bin's 1 − π is the fourth root of its mean
  (1 − π)⁴: if the lemma holds for tokens, it holds for bins.
- The fraction of tokens clipped by GRPO, among tokens with an advantage; each bin's fraction of the gradient norms.
- Remark 1: near on-policy, low-probability tokens have the larger mean gradient; from some κ on, high-probability ones.
  Tokens with p ≤ 0.25 and with p > 0.75 (our thresholds) are compared by the norm of the gradient of the mean loss
  over these tokens alone; and by the mean |G| and the |mean G| of eq. 3, G = (1 − π)·ρ·A, or 0 if clipped. The Remark
  is about |mean G|, the noisiest of the three, because advantages of both signs cancel.

For Appendix C: the entropy of each token's distribution against its probability, with its bounds, and with the tokens
clipped after the last update. Updates are grpo.py's own, with its settings for the model, including --max_grad_norm,
and a fresh AdamW. There is no KL term, as in the paper.

Results: off_policy.json and off_policy.png. Boxes as in lab.who_dominates. Error bars: standard errors over batches.

    python -m lab.off_policy
"""

import dataclasses
import math

import numpy
import torch
from tqdm import tqdm

import grpo
from lab import common, forking_tokens, who_dominates
from runtime import curves
from runtime.settings import PositiveFraction, PositiveInt
from tools.maintain.updates import token_weights

EDGES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99]  # edges of the bins whose σ is fitted
EXPONENT = 4  # exponent of 1 − π in Lemma 1
FEW = 20  # a bin with fewer tokens is not fitted
UNSURE = 0.75  # tokens up to this probability get a second correlation with entropy
MOST_SHOWN = 300  # clipped tokens in the figure; more would hide the others
SIGNALS = {  # comparisons of low- and high-probability tokens; G is the paper's eq. 3
    "gradient": "norm of the mean gradient",
    "mean_signal": "mean |G|",
    "signed_signal": "|mean G|",
}


@dataclasses.dataclass
class Args(common.Args):
    prompts: PositiveInt = 16  # prompts per batch
    batches: PositiveInt = 4  # batches to average over
    updates: PositiveInt = 16  # optimizer updates per step; divides --prompts
    lr: PositiveFraction | None = None  # AdamW's learning rate; None: grpo.py's for the model


def counts_of(updates):
    """Return the numbers of updates to measure after: 0, the powers of two below `updates`, and `updates`."""
    return [0, *(2**i for i in range(updates.bit_length()) if 2**i < updates), updates]


def positions(policy, batch, args, lr):
    """Make the updates of a step by AdamW with this lr; yield their number so far whenever it is time to measure."""
    own_norm = grpo.Args().max_grad_norm
    of_script = common.trainer_args("grpo", args, kl_coef=0.0, max_grad_norm=own_norm)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=of_script.weight_decay, fused=True)
    counts = counts_of(args.updates)
    yield 0
    for number, minibatch in enumerate(grpo.minibatches(batch, args.updates), 1):
        grpo.update(policy, optimizer, minibatch, 1, of_script)
        if number in counts:
            yield number


def spread_of(ratio, logp, edges=EDGES):
    """Return tokens, σ of ρ and 1 − π by bin, None in an empty one; Lemma 1 fitted. ratio, logp when sampled: [n].

    The last bin, of nearly certain tokens, has the greatest influence on the fit, so a second fit excludes it.
    """
    bins = common.bins_of(logp, edges)
    rests = -logp.double().expm1()  # 1 − π, exact near π = 1
    found = {"tokens": [], "sigma": [], "rest": []}
    for i in range(len(edges) + 1):
        inside, of_rest = ratio[bins == i].double(), rests[bins == i]
        found["tokens"].append(len(inside))
        found["sigma"].append(inside.std(correction=0).item() if len(inside) else None)
        found["rest"].append(of_rest.pow(EXPONENT).mean().item() ** (1 / EXPONENT) if len(inside) else None)
    fitted = [i for i, tokens in enumerate(found["tokens"]) if tokens >= FEW]
    for name, chosen in (("fit", fitted), ("fit_without_last", [i for i in fitted if i < len(edges)])):
        found[name] = fit([found["sigma"][i] for i in chosen], [found["rest"][i] for i in chosen])
    return found


def fit(sigmas, rests):
    """Fit Lemma 1 to bins with these σ and 1 − π, by least squares of the logarithms.

    kappa: in σ = κ(1 − π)², 0 if ρ spreads in no bin; factor: the worst bin's deviation from it; exponent: of
    1 − π in σ², if it is free; bins: number of bins used, those with a σ. The others are None for fewer than two.
    """
    points = [(math.log(r), math.log(s)) for s, r in zip(sigmas, rests) if s > 0 and r > 0]
    if len(points) < 2:
        kappa = 0.0 if sigmas and max(sigmas) == 0 else None
        return {"kappa": kappa, "factor": None, "exponent": None, "bins": len(points)}
    rest, sigma = numpy.array(points).T
    offsets = sigma - EXPONENT / 2 * rest
    found = {"kappa": math.exp(offsets.mean()), "factor": math.exp(abs(offsets - offsets.mean()).max())}
    exponent = 2 * float(numpy.polyfit(rest, sigma, 1)[0]) if numpy.ptp(rest) else None
    return found | {"exponent": exponent, "bins": len(points)}


def cut_off(weight, batch):
    """Return which tokens [N, T] are clipped: tokens with an advantage, and no weight."""
    return (weight == 0) & (batch["advantages"] != 0) & batch["mask"]


def of_clip(is_cut, batch):
    """Return the clipped fraction of tokens with an advantage; for p ≤ 0.25 below and above its median entropy."""
    mask = batch["mask"]
    is_cut = is_cut[mask]
    bins = common.bins_of(batch["old_logp"])[mask]
    entropy = batch["entropy"][mask]
    counted = batch["advantages"][mask] != 0
    improbable = counted & (bins == 0)
    median = entropy[improbable].double().quantile(0.5) if improbable.any() else 0.0
    halves = {"low": improbable & (entropy < median), "high": improbable & (entropy >= median)}
    return {
        "tokens": int(is_cut.sum()),
        "share": common.means_by_bin(is_cut[counted], bins[counted], 0.0),
        "share_of_all": common.mean_of(is_cut, counted, 0.0),
        "by_entropy": {name: common.mean_of(is_cut, half, 0.0) for name, half in halves.items()},
        "improbable": common.mean_of(bins == 0, is_cut),  # fraction of the clipped tokens
    }


def mean_signals(weight, logp, batch):
    """Return (mean size, mean) in each bin of G, eq. 3. weight: of ∇log π, ρ·A over the number of tokens; [N, T]."""
    mask = batch["mask"]
    signals = (-logp.double().expm1() * weight * mask.sum())[mask]
    bins = common.bins_of(batch["old_logp"])[mask]
    return common.means_by_bin(signals.abs(), bins), common.means_by_bin(signals, bins)


def log_ratio(values):
    """Return the log of the lowest bin's number over the highest bin's; None if one is empty, so None."""
    if values[0] is None or values[-1] is None:
        return None
    return math.log(max(values[0], 1e-300) / max(values[-1], 1e-300))


def of_the_policy(policy, batch, args):
    """Return (log-probability, ρ, GRPO's weight of ∇log π, is it clipped?) of each token, [N, T]. args: grpo.py's."""
    logp, _ = grpo.log_probs(policy, batch, args, with_entropy=False)
    ratio = (logp.double() - batch["old_logp"].double()).exp()
    weight, _ = token_weights("grpo", batch, logp, batch["entropy"], args, is_first=True)
    return logp, ratio, weight, cut_off(weight, batch)


def measure_at(policy, batch, args):
    """Return all numbers at the policy's present weights; and ρ and which tokens are clipped, both [N, T]."""
    of_script = common.trainer_args("grpo", args, kl_coef=0.0)
    mask = batch["mask"]
    logp, ratio, weight, is_cut = of_the_policy(policy, batch, of_script)
    shares = common.shares_of(common.bins_of(batch["old_logp"])[mask])
    norms = common.norms_by_bin(policy, batch, of_script)
    # Norms of the mean over a bin's tokens alone, so divide by the bin's number of tokens.
    own_norms = [norm / share if share else None for norm, share in zip(norms["norm"], shares)]
    sizes, means = mean_signals(weight, logp, batch)
    signals = (own_norms, sizes, [None if mean is None else abs(mean) for mean in means])
    numbers = {
        "spread": {"all": spread_of(ratio[mask], batch["old_logp"][mask])},
        "sigma": spread_of(ratio[mask], batch["old_logp"][mask], [0.25, 0.5, 0.75])["sigma"],
        "clip": of_clip(is_cut, batch),
        **norms,
        "own_norm": own_norms,
        "mean_signal": sizes,
        "signed_signal": signals[-1],
        "log_ratio": dict(zip(SIGNALS, map(log_ratio, signals))),
    }
    return numbers, ratio, is_cut


def measure(policy, before, sampled, args):
    """Return one batch's numbers for JSON, and {name: tokens' values [n]}. Restores the policy's weights, `before`."""
    _, batch = common.for_grpo(sampled, args)
    after = {}
    for number in positions(policy, batch, args, common.learning_rate(args)):
        after[number], ratio, is_cut = measure_at(policy, batch, args)
    common.set_weights(policy, before)
    values = {"logp": batch["old_logp"], "entropy": batch["entropy"], "ratio": ratio, "is_cut": is_cut}
    values = {name: value[batch["mask"]] for name, value in values.items()}
    p, entropy = values["logp"].double().exp(), values["entropy"].double()
    unsure = p <= UNSURE
    of_entropy = {"all": common.correlation(p, entropy), "unsure": common.correlation(p[unsure], entropy[unsure])}
    return {"share": common.shares_of(common.bins_of(values["logp"])), "after": after, "entropy": of_entropy}, values


def draw_spread(axes, average, counts, colours):
    """Plot σ of ρ against 1 − π, both logarithmic, and Lemma 1 fitted after each number of updates."""
    for number, colour in zip(counts[1:], colours):
        found = average["after"][number]["spread"]["all"]
        points = [(rest[0], sigma[0]) for rest, sigma in zip(found["rest"], found["sigma"]) if sigma and sigma[0] > 0]
        if not (points and found["fit"]["exponent"]):
            continue
        rests, sigmas = zip(*points)
        kappa = found["fit"]["kappa"][0]
        name = f"{number}: κ {kappa:.2g}, σ² as power {found['fit']['exponent'][0]:.1f}"
        axes.loglog(rests, sigmas, "o-", color=colour, markersize=6, label=name)
        axes.loglog(rests, [kappa * rest**2 for rest in rests], ":", color=colour, linewidth=1.5)
    axes.set(xlabel="1 − π (dotted: Lemma 1, σ = κ(1 − π)², power 4)", title="mean σ of ρ after so many updates")
    axes.legend(fontsize="small", frameon=False, loc="upper left", handlelength=1.2)
    axes.set_ylim(top=axes.get_ylim()[1] * 40)  # space for the legend


def draw_lines(axes, counts, lines, title):
    """Plot lines: {name: [mean, standard error] after each count, or None}."""
    for place, (name, pairs) in enumerate(lines.items()):
        look = {"color": curves.COLOURS[place], "label": name}
        common.points(axes, range(len(counts)), pairs, "osD^"[place] + "-", **look)
    axes.set_xticks(range(len(counts)), counts)
    axes.set(xlabel="updates", title=title)


def draw_entropy(axes, values, vocabulary):
    """Plot probability and entropy of the tokens, the bounds of Appendix C, and the clipped tokens."""
    from matplotlib.colors import LogNorm

    p = values["logp"].double().exp()
    entropy = values["entropy"].double()
    axes.hist2d(p, entropy, bins=(40, 40), norm=LogNorm(), cmap="Blues")
    is_cut = values["is_cut"].nonzero()[:, 0]
    shown = is_cut[:: max(1, -(-len(is_cut) // MOST_SHOWN))]  # evenly spread over the batches
    name = f"cut off ({len(shown)} of {len(is_cut)})"
    axes.plot(p[shown], entropy[shown], "x", color=curves.COLOURS[1], markersize=5, label=name)
    q = torch.linspace(0.001, 0.999, 200, dtype=torch.float64)
    least, greatest = forking_tokens.entropy_bounds(q, vocabulary)
    axes.plot(q, least, "k-", linewidth=1.5, label="least")
    axes.plot(q, greatest, "k--", linewidth=1.5, label="greatest")
    axes.set_ylim(0, 1.35 * entropy.max().item())  # space for the legend
    axes.set(xlabel="probability when sampled", title="entropy [nats] (colour: tokens)")
    look = {"fontsize": "small", "edgecolor": "white", "framealpha": 1, "handlelength": 1.2}
    axes.legend(loc="upper right", ncols=3, **look)


def show_ratios(axes):
    """Label an axis of logarithms with ratios; on logarithms, error bars are right."""
    axes.axhline(0, color="0.5", linewidth=1.5, linestyle="--", zorder=0)
    least, most = axes.get_ylim()
    shown = [power for power in (0.25, 1, 4, 16, 64, 256, 1024) if least - 1.5 < math.log(power) < most + 1.5]
    axes.set_yticks([math.log(power) for power in shown], [f"{power:g}" for power in shown])
    axes.text(0.02, 0.05, "below 1: reversed", transform=axes.transAxes, color="0.3")


def draw(average, values, counts, lr, vocabulary, args):
    from matplotlib import colormaps

    title = f"{args.updates} updates on one batch by {common.name_of(args.model)}, AdamW, lr {lr:g}\n"
    title += f"{args.batches} batches; bars: standard error; {who_dominates.BOXES}"
    figure = curves.new_figure(curves.WIDTH, 16, title)
    panels = figure.subplots(3, 2)
    colours = colormaps["viridis_r"](torch.linspace(0.15, 1, len(counts) - 1).tolist())
    bins, title = common.bins_of(values["logp"]), f"ρ − 1 after {counts[-1]} updates"
    limit = who_dominates.draw_boxes(panels[0, 0], values["ratio"] - 1, bins, title)
    who_dominates.show_small_changes(panels[0, 0], 1.08 * limit)
    panels[0, 0].set_ylabel(who_dominates.SMALL_CHANGES, fontsize="small")
    draw_spread(panels[0, 1], average, counts, colours)

    def by_bin(of):  # {bin: values after each count, in percent}
        names = enumerate(common.BIN_NAMES)
        return {name: common.percent([of(average["after"][n])[i] for n in counts]) for i, name in names}

    draw_lines(panels[1, 0], counts, by_bin(lambda at: at["clip"]["share"]), "share cut off by the clip [%]")
    panels[1, 0].legend(fontsize="small", frameon=False)
    draw_lines(panels[1, 1], counts, by_bin(lambda at: at["norm_share"]), "share of the gradient norms [%]")
    panels[1, 1].set_ylim(0, 1.3 * panels[1, 1].get_ylim()[1])  # space for the legend
    panels[1, 1].legend(fontsize="small", frameon=False, loc="upper left", ncols=2)
    ratios = {name: [average["after"][n]["log_ratio"][kind] for n in counts] for kind, name in SIGNALS.items()}
    draw_lines(panels[2, 0], counts, ratios, "value at p ≤ 0.25 over value at p > 0.75")
    show_ratios(panels[2, 0])
    panels[2, 0].legend(fontsize="small", frameon=False, loc="best")
    draw_entropy(panels[2, 1], values, vocabulary)
    common.save_figure(figure, args, "off_policy")


def main():
    args, policy, _, batches = common.begin(Args, __doc__, least_updates=1)
    before = common.copy_weights(policy)
    found = [measure(policy, before, sampled, args) for sampled in tqdm(batches, desc="batches", disable=None)]
    rows, of_tokens = zip(*found)
    pooled = common.pooled(of_tokens)
    lr = common.learning_rate(args)
    draw(common.over_batches(rows), pooled, counts_of(args.updates), lr, policy.lm.config.vocab_size, args)
    result = {"bins": common.BIN_NAMES, "edges": EDGES, "lr": lr, "tokens": len(pooled["logp"])}  # edges: for "spread"
    common.finish(args, "off_policy", result | {"batches": rows})


if __name__ == "__main__":
    main()
