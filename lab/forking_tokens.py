"""Forking tokens: words of the highest entropy, the lowest probability, the largest gradient.

*Beyond the 80/20 Rule* (Wang et al. 2025, arXiv 2506.01939) and Archer (arXiv 2507.15778): the few tokens with a high
entropy are the words at which a solution forks. AR-Lopti (arXiv 2505.12929) looks at the low-probability tokens, which
have large gradients. ACPO (arXiv 2606.22570), figure 2c and appendix C: the two are related, but not the same.

It measures for every response token of --batches batches: entropy, log-probability, and the norm of ∇ log π at the last
layer's output; for --checked of the tokens, also the norm at all weights. The set of highest entropy is the one that
entropy_top.py trains on (--share 0.2). The two other sets, lowest probability and largest gradient, are equally large.

A word is the text of a token without the spaces around it; words that occur --least times are listed. A connecting word
is a complete entry of AR-Lopti's Table 5 (evaluation/words.py). A token begins a step if it is the first, or follows a
line break or the end of a sentence.

Results: forking_tokens.json and forking_tokens.png.

    python -m lab.forking_tokens
"""

import dataclasses
import math

import torch
from tqdm import tqdm

import entropy_top
from evaluation import words
from lab import common, proposition
from runtime import curves
from runtime.distributed import DEVICE
from runtime.settings import NonNegativeInt, PositiveFraction, PositiveInt

NEARLY_CERTAIN = 0.01  # nats; a token with less entropy counts as having none
MOST = 0.8  # fraction of the entropy: the 80 in 80/20
MEASURES = ("entropy", "probability", "gradient")
PAIRS = [("entropy", "probability"), ("entropy", "gradient"), ("probability", "gradient")]
LISTS = ("highest entropy", "lowest probability", "largest gradient", "lowest entropy")
SENTENCE_ENDS = (".", "?", "!", ":")
SHOWN = 12  # words per panel of the figure


@dataclasses.dataclass
class Args(common.Args):
    batches: PositiveInt = 4  # batches to look at
    share: PositiveFraction = 0.2  # fraction of the tokens in each of the three sets
    least: PositiveInt = 20  # a word that occurs less often is not listed
    listed: PositiveInt = 30  # words per list in the JSON
    checked: NonNegativeInt = 1500  # tokens whose gradient at all weights is measured


def gradient_norms(policy, batch, args):
    """Return ‖∇ log π‖ of each response token at the last layer's output, [N, T]: no later step mixes positions."""
    norms = torch.zeros(batch["mask"].shape)
    for row in tqdm(range(len(norms)), desc="gradients", disable=None, leave=False):
        end = int(batch["mask"][row].nonzero()[-1]) + 1
        ids = batch["ids"][row : row + 1, :end].to(DEVICE)
        mask = batch["mask"][row : row + 1, :end].to(DEVICE)
        logp, activations = proposition.activations_of(policy, ids, mask, args.temperature)
        [gradient] = torch.autograd.grad(logp.sum(), activations[-1])  # [1, end, D]
        of_state = gradient[0].norm(dim=-1).cpu()  # [end]
        norms[row, 1:end] = of_state[:-1] * batch["mask"][row, 1:end]  # predicted from the previous state
    return norms


def is_connecting(word):
    """Return whether the word is a complete entry of AR-Lopti's Table 5."""
    patterns = (pattern for family in words.PATTERNS.values() for pattern in family)
    return any(pattern.fullmatch(word) for pattern in patterns)


def step_beginnings(texts):
    """Return which tokens of a response begin a step, a list of bools. texts: the tokens' texts."""
    before = ["\n", *texts[:-1]]
    return ["\n" in text or text.rstrip(" \"'”’)").endswith(SENTENCE_ENDS) for text in before]


def top_tokens(values, count):
    """Return which of the values [n] are the `count` largest, as bools; of equal ones, the first."""
    chosen = torch.zeros(len(values), dtype=torch.bool)
    chosen[values.sort(descending=True, stable=True).indices[:count]] = True
    return chosen


def measure(policy, tokenizer, sampled, args):
    """Measure one batch: {name: values of its n tokens}. The words are a list, the others tensors [n]."""
    batch = sampled.batch
    mask = batch["mask"]
    rows = [ids[inside].tolist() for ids, inside in zip(batch["ids"], mask)]
    texts = [[tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids] for ids in rows]
    found = {
        "entropy": batch["entropy"][mask].double(),
        "probability": batch["old_logp"][mask].double().exp(),
        "gradient": gradient_norms(policy, batch, args)[mask].double(),
    }
    of_script = common.trainer_args("entropy_top", args, entropy_top=args.share)
    found["in entropy"] = found["entropy"] >= entropy_top.entropy_threshold(batch, of_script)
    count = int(found["in entropy"].sum())
    found["in probability"] = top_tokens(-found["probability"], count)
    found["in gradient"] = top_tokens(found["gradient"], count)
    # Show a token that has only spaces by its repr().
    found["words"] = [text.strip() or repr(text)[1:-1] for row in texts for text in row]
    found["begins"] = torch.tensor([begin for row in texts for begin in step_beginnings(row)])
    found["connects"] = torch.tensor([is_connecting(word) for word in found["words"]])
    return found


def share_carrying(values, part):
    """Return the smallest fraction of the values [n] whose sum is `part` of all, taking the largest values first."""
    sums = values.sort(descending=True).values.cumsum(0)
    count = int((sums < part * sums[-1] * (1 - 1e-12)).sum()) + 1
    return min(count, len(values)) / len(values)


def entropy_bounds(probability, vocabulary):
    """Return (least, greatest) entropy for p, [n], in nats: 1 − p on one other token, or on all others evenly."""
    rest = 1 - probability
    least = -torch.xlogy(probability, probability) - torch.xlogy(rest, rest)
    return least, least + rest * math.log(vocabulary - 1)


def numbers_of(found, vocabulary):
    """Return the numbers of one batch, for JSON. found: from measure()."""
    entropy, probability = found["entropy"], found["probability"]
    low, high = entropy_bounds(probability, vocabulary)
    slack = 1e-4  # nats, because both come from float32 log-probabilities
    is_within = (entropy > low - slack) & (entropy < high + slack)
    top = found["in entropy"]
    count = math.ceil(top.double().mean().item() * len(entropy))  # tokens per set
    gradients = found["gradient"].sort(descending=True).values
    numbers = {
        "tokens": len(entropy),
        "nearly_certain": (entropy < NEARLY_CERTAIN).double().mean().item(),
        "mean_entropy": entropy.mean().item(),
        "tokens_with_most_of_the_entropy": share_carrying(entropy, MOST),
        "entropy_of_top": entropy[top].sum().item() / entropy.sum().item(),
        "gradient_of_top": (gradients[:count].sum() / gradients.sum()).item(),
        "rank_correlation": {},
        "overlap": {},
        "within_bounds": is_within.double().mean().item(),
    }
    for some, others in PAIRS:
        pair = f"{some}, {others}"
        numbers["overlap"][pair] = common.mean_of(found[f"in {others}"], found[f"in {some}"], 0.0)
        numbers["rank_correlation"][pair] = common.rank_correlation(found[some], found[others])
    for name in ("connects", "begins"):
        inside = found[name]
        numbers[name] = {
            "share": inside.double().mean().item(),
            "share_of_top": inside[top].double().mean().item(),
            "entropy": common.mean_of(entropy, inside),
            "entropy_of_others": common.mean_of(entropy, ~inside),
        }
    return numbers


def word_table(words_of_tokens, pooled, least):
    """Return [{word, count, means of its tokens}] of all words that occur `least` times. pooled: {name: values [n]}."""
    places = {}  # word: its places among all tokens
    for place, word in enumerate(words_of_tokens):
        places.setdefault(word, []).append(place)
    in_top = pooled["in entropy"].double()
    rows = []
    for word, where in places.items():
        if len(where) >= least:
            means = {name: pooled[name][where].mean().item() for name in MEASURES}
            rows.append({"word": word, "count": len(where)} | means | {"in_top": in_top[where].mean().item()})
    return rows


def lists_of(rows, listed):
    """Return {list: its words' rows}, the four lists: at most `listed` words each, the most extreme first."""
    lists = {}
    for name in LISTS:
        order, measured = name.split()
        ascending = sorted(rows, key=lambda row, measured=measured: (row[measured], row["word"]))
        lists[name] = (ascending if order == "lowest" else ascending[::-1])[:listed]
    return lists


def draw(pooled, lists, args):
    tokens = f"{len(pooled['entropy'])} response tokens of {common.name_of(args.model)}"
    figure = curves.new_figure(curves.WIDTH, 16, f"{tokens}, temperature {args.temperature:g}")
    panels = figure.subplots(3, 2)
    draw_shares(panels[0, 0], pooled)
    draw_scatter(panels[0, 1], pooled, args)
    draw_words([*panels[1], *panels[2]], lists)
    common.save_figure(figure, args, "forking_tokens")


def draw_shares(axes, pooled):
    """Plot the part of the entropy and of the gradients against the fraction of the tokens that has it."""
    for key, colour in (("entropy", "#0072B2"), ("gradient", "#D55E00")):
        sums = pooled[key].sort(descending=True).values.cumsum(0)
        shares = torch.arange(1, len(sums) + 1) / len(sums)
        every = max(1, len(sums) // 1000)
        axes.plot(100 * shares[::every], 100 * (sums / sums[-1])[::every], color=colour, label=key)
    needed = 100 * share_carrying(pooled["entropy"], MOST)
    axes.plot([0, needed, needed], [100 * MOST, 100 * MOST, 0], ":", color="0.4", linewidth=1.5)
    axes.text(needed + 2, 100 * MOST - 8, f"{needed:.0f} % have {MOST:.0%} of the entropy")
    axes.set(xlabel="tokens, largest first [%]", ylabel="part of the sum [%]", title="how few tokens have how much")
    axes.legend(frameon=False, loc="lower right")


def draw_scatter(axes, pooled, args):
    """Plot entropy over probability, with its lower bound; only some tokens, so that points can be distinguished."""
    generator = torch.Generator().manual_seed(args.seed)
    some = torch.randperm(len(pooled["entropy"]), generator=generator)[:4000]
    look = {"markersize": 3, "alpha": 0.35, "color": "#0072B2", "rasterized": True}
    axes.plot(pooled["probability"][some], pooled["entropy"][some], ".", **look)
    p = torch.linspace(0, 1, 201, dtype=torch.float64)
    low, _ = entropy_bounds(p, 2)
    axes.plot(p, low, color="#D55E00", label="least possible")
    title = f"entropy and probability of {len(some)} tokens"
    axes.set(xlabel="probability of the token", ylabel="entropy [nats]", title=title)
    axes.legend(frameon=False, loc="upper right")


def draw_words(panels, lists):
    """Plot a panel per list: its words, with their means as bars."""
    units = {"entropy": "mean entropy [nats]", "probability": "mean probability", "gradient": "mean ‖∇ log π‖"}
    for axes, (name, rows) in zip(panels, lists.items()):
        key = name.split()[1]
        rows = rows[:SHOWN]
        colour = "#009E73" if name == "lowest entropy" else "#0072B2"
        axes.barh(range(len(rows)), [row[key] for row in rows], color=colour)
        labels = [f"{row['word']}  ({row['count']})".replace("$", r"\$") for row in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.invert_yaxis()
        axes.set(xlabel=units[key], title=f"words of {name} (how often)")


def check_gradients(policy, batch, found, args):
    """Return [{"rest": 1 − π, "all_weights", "last_layer": ‖∇ log π‖}] of --checked random tokens, by response."""
    places = batch["mask"].nonzero()  # [tokens, 2]
    generator = torch.Generator().manual_seed(args.seed)
    chosen = torch.randperm(len(places), generator=generator)[: args.checked]
    weights = list(policy.parameters())
    of_rows = {}  # row: its numbers
    for token in tqdm(chosen[places[chosen, 0].argsort()].tolist(), desc="all weights", disable=None, leave=False):
        row, t = places[token].tolist()
        ids = batch["ids"][row : row + 1, : t + 1].to(DEVICE)
        mask = batch["mask"][row : row + 1, : t + 1].to(DEVICE)
        logp, _ = policy(ids, mask, args.temperature)
        of_row = of_rows.setdefault(row, {"rest": [], "all_weights": [], "last_layer": []})
        of_row["rest"].append(1 - found["probability"][token].item())
        of_row["all_weights"].append(common.norm(torch.autograd.grad(logp[0, t], weights)))
        of_row["last_layer"].append(found["gradient"][token].item())
    return list(of_rows.values())


def main():
    args, policy, tokenizer, batches = common.begin(Args, __doc__, need_gradient=False)
    policy.eval()  # recompute nothing: the activations are read
    found = [measure(policy, tokenizer, sampled, args) for sampled in tqdm(batches, desc="batches", disable=None)]
    rows = [numbers_of(of_batch, policy.lm.config.vocab_size) for of_batch in found]
    pooled = {name: torch.cat([of_batch[name] for of_batch in found]) for name in (*MEASURES, "in entropy")}
    table = word_table((word for of_batch in found for word in of_batch["words"]), pooled, args.least)
    lists = lists_of(table, args.listed)
    draw(pooled, lists, args)
    responses = check_gradients(policy, batches[0].batch, found[0], args)
    result = {"tokens": sum(row["tokens"] for row in rows), "batches": rows, "responses": responses}
    common.finish(args, "forking_tokens", result | {"words": len(table), "lists": lists})


if __name__ == "__main__":
    main()
