"""What weight each script's update puts on ∇log π of each token, against a reference in Python's floats.

Of every script whose loss or update is its own; what another one shares with its parent is the same to the letter
(test_family.py). The scripts run on a table of log-probabilities (tools/maintain/updates.py): what a model makes of
the weights is in test_algorithms.py. The reference is written from the formulas, with none of the scripts' lines.
It knows no passes: so this also shows that micro-batches, padding and what lies outside the mask change nothing.
"""

import importlib
import math
import random
from types import SimpleNamespace

import pytest
import torch
from helpers import arguments

import grpo_kl
from runtime import batches
from tools.maintain import updates

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def drawn_rows(seed, absurd=True):
    """Responses of 1 to 9 tokens, most of them near the policy that sampled them or the clip, some absurdly far away.

    A token: logp (log π), and in nats how far π has moved from π_old, how far π_ref is from π, and π_old from the
    sampler's (gap); its entropy before the step, and now. All tokens of a response have its advantage A.
    """
    rng = random.Random(seed)

    def far(spread):
        kind = rng.random()
        if kind < 0.15:
            return rng.choice([0, 30, -30]) if absurd else 0
        near_the_clip = rng.choice([1, -1]) * rng.uniform(0.16, 0.26)
        return near_the_clip if kind < 0.4 else rng.gauss(0, spread)

    rows = []
    for i in range(43):  # 208 tokens, of which no fifth is whole
        row = []
        for _ in range(1 + i % 9):
            old = -rng.expovariate(1 / rng.choice([0.1, 1, 5])) - 1e-4
            moved = max(-60, min(far(0.35), -old - 1e-4 if rng.random() < 0.9 else 60))
            if old + moved > -1e-4:
                old = -1e-4 - moved
            token = SimpleNamespace(logp=old + moved, old=old, ref=far(0.5), gap=far(0.7), entropy=rng.expovariate(2))
            token.moved, token.now = token.logp - old, rng.expovariate(2)
            row.append(token)
        row[0].entropy = rng.choice([0.0, row[-1].entropy])  # ties
        rows.append((rng.choice([0, 1.5, -2, 0.3, -0.7]), row))
    return rows


def clamped(nats):
    """exp, clamped at 20 nats, and whether it has a gradient."""
    return math.exp(max(-20, min(20, nats))), abs(nats) <= 20


def kl_part(token, args):
    """−β times the slope of the estimate of the KL term: k3, or in grpo_kl.py what --kl names."""
    if not getattr(args, "kl_coef", 0) or type(args).__module__ in ("ppo", "reinforce_pp"):  # it is in the reward
        return 0
    ratio, moves = clamped(token.ref)  # π_ref/π
    slope = (ratio - 1) * moves
    rho, rho_moves = clamped(token.moved)
    k3 = ratio - max(-20, min(20, token.ref)) - 1
    parts = {"k1": -1, "k2": token.ref, "k3": slope, "k3_ratio": rho * (slope - k3 * rho_moves)}
    return args.kl_coef * parts[getattr(args, "kl", "k3")]


def clip(token, advantage, low, high):
    """(weight, whether the clip cuts it off) of PPO's surrogate within 1 − low and 1 + high."""
    rho, moves = clamped(token.moved)
    cut = (advantage > 0 and rho > 1 + high) or (advantage < 0 and rho < 1 - low)
    return (0 if cut or not moves else rho * advantage), cut


def each(one):
    """The weights of a script in which a token's depends on no other: one(token, its advantage, args)."""
    return lambda rows, args: [[one(token, a, args) for token in row] for a, row in rows]


of_advantages = each(lambda token, a, args: (a, False))
of_grpo = each(lambda token, a, args: clip(token, a, args.clip_low, args.clip_high))


def of_acpo(rows, args, is_first):
    """Bins by π, in each the spread of ρ; a mini-batch's first update has none."""
    ratios = {}
    for token in (token for _, row in rows for token in row):
        token.bin = min(int(math.exp(token.logp) * args.n_bins), args.n_bins - 1)
        ratios.setdefault(token.bin, []).append(1.0 if is_first else clamped(token.moved)[0])
    ranges = {}
    for number, found in ratios.items():
        mean = math.fsum(found) / len(found)
        sigma = math.sqrt(math.fsum((one - mean) ** 2 for one in found) / len(found))
        ranges[number] = min(args.clip_max, args.clip_base + args.clip_alpha * sigma)
    above = 0 if args.clip_base_high is None else args.clip_base_high - args.clip_base
    return [[clip(t, a, ranges[t.bin], ranges[t.bin] + above) for t in row] for a, row in rows]


def of_gspo(rows, args):
    """One ratio for a response: the geometric mean of its tokens'."""
    found = []
    for a, row in rows:
        mean = SimpleNamespace(moved=math.fsum(token.moved for token in row) / len(row))
        found.append([clip(mean, a, args.clip_low, args.clip_high)] * len(row))
    return found


@each
def of_cispo(token, a, args):
    """A ratio that is bounded and carries no gradient; with --gated PPO's clip at 0.8 and 1.3 cuts tokens off, too."""
    rho = clamped(token.moved)[0]
    bounded = max(1 - args.clip_low, min(1 + args.clip_high, rho))
    cut = args.gated and clip(token, a, 0.2, 0.3)[1]
    return (0 if cut else bounded * a), cut or (a != 0 and bounded != rho)


@each
def of_dppo(token, a, args):
    """A ratio up to 20; no weight beyond a divergence of δ from π_old."""
    new, old = math.exp(token.logp), math.exp(token.old)
    if args.divergence == "tv":
        is_far = abs(new - old) > (args.delta or 0.15)
    else:
        others = (1 - old) * math.log(max(1e-8, 1 - old) / max(1e-8, 1 - new))
        is_far = old * (token.old - token.logp) + others > (args.delta or 0.05)
    cut = is_far and ((a > 0 and new > old) or (a < 0 and new < old))
    return (0 if cut else min(20, math.exp(max(-20, token.moved))) * a), cut


@each
def of_sapo(token, a, args):
    """A smooth gate: sech²(τ/2·(ρ − 1)) of the gradient is left. Those with less than a half are counted."""
    rho, moves = clamped(token.moved)
    half = (args.tau_positive if a > 0 else args.tau_negative) * (rho - 1) / 2
    gate = 1 / math.cosh(half) ** 2 if abs(half) < 300 else 0
    return gate * rho * a * moves, a != 0 and gate < 0.5


def of_archer(rows, args):
    """Reasoning tokens, above the quantile of their response's entropies, have a clip and a β of their own."""
    found = []
    for a, row in rows:
        entropies = sorted(token.entropy for token in row)
        place = args.entropy_quantile * (len(row) - 1)
        below, share = int(place), place % 1
        quantile = entropies[below] + share * (entropies[min(below + 1, len(row) - 1)] - entropies[below])
        for token in row:
            token.beta = args.reasoning_kl if token.entropy > quantile + 1e-7 else 1
        own = args.reasoning_clip, args.reasoning_clip
        shared = args.clip_low, args.clip_high
        found.append([clip(token, a, *(own if token.beta != 1 else shared)) for token in row])
    return found


def of_entropy_top(rows, args, is_first):
    """GRPO's weights, on the tokens of highest entropy alone, those that tie for the last place included."""
    for token in (token for _, row in rows for token in row):
        token.now = token.entropy if is_first else token.now
    entropies = sorted((token.now for _, row in rows for token in row), reverse=True)
    least = entropies[math.ceil(args.entropy_top * len(entropies)) - 1]
    for token in (token for _, row in rows for token in row):
        token.beta = token.now >= least
    found = zip(rows, of_grpo(rows, args))
    return [[(w * t.beta, cut and t.beta) for t, (w, cut) in zip(row, given)] for (_, row), given in found]


def of_grpo_tis(rows, args):
    """GRPO's surrogate times π_old/π_sampler within bounds; bad responses that have become unlikely are left out."""
    found = []
    for (a, row), given in zip(rows, of_grpo(rows, args)):
        fallen = math.fsum(-token.gap - token.moved for token in row) / len(row)
        mean = math.exp(math.fsum(token.gap for token in row) / len(row))
        out = args.mask == "sequence" and a < 0 and fallen > args.mask_delta
        out = out or (args.mask == "geometric" and not args.mask_low <= mean <= args.mask_high)
        found.append([])
        for token, (weight, cut) in zip(row, given):
            ratio = clamped(token.gap)[0]
            if args.correction == "icepop":
                ratio = ratio if args.correction_min <= ratio <= args.correction_max else 0
            ratio = 1 if args.correction == "none" else ratio
            found[-1].append((0 if out else min(ratio, args.correction_max) * weight, cut))
    return found


def of_entropy_bonus(rows, args):
    """GRPO's weights. With --cov, tokens whose covariance is large have no surrogate, or a pull back to π_old."""
    found, tokens = of_grpo(rows, args), [(a, token) for a, row in rows for token in row]
    mean_a, mean_old = (math.fsum(each) / len(tokens) for each in ((a for a, _ in tokens), (t.old for _, t in tokens)))
    place = {}
    for a, token in tokens:
        cov = (token.old - mean_old) * (a - mean_a)
        place[id(token)] = math.fmod(-1000 * token.old, 1) * (1 < cov < 5) if args.cov == "clip" else cov
    least = sorted(place.values(), reverse=True)[math.ceil(args.cov_fraction * len(tokens)) - 1]
    for (_, row), given in zip(rows, found):
        for i, token in enumerate(row):
            is_held = place[id(token)] >= max(least, 1e-300)
            if is_held and args.cov == "clip":
                given[i] = 0, False
            if is_held and args.cov == "kl":
                sign = (token.moved > 0) - (token.moved < 0)
                given[i] = given[i][0] - args.cov_kl_coef * sign, given[i][1]
    return found


def of_grpo_stale(rows, args):
    """ppo has no weight beside the surrogate, and its ratio is to the sampler's probability."""
    if args.correction != "ppo":
        return of_grpo_tis(rows, args)
    # log π_old − log π_sampler is part of the way
    moved = of_grpo([(a, [SimpleNamespace(moved=t.moved + t.gap) for t in row]) for a, row in rows], args)
    for (_, row), given in zip(rows, moved):
        mean = math.exp(math.fsum(token.gap for token in row) / len(row))
        if args.mask == "geometric" and not args.mask_low <= mean <= args.mask_high:
            given[:] = [(0, cut) for _, cut in given]
    return moved


TOKENS, RESPONSES, LONGEST = "tokens", "tokens of a response, then responses", "responses times the longest"
REFERENCES = {  # script: its weights, and what divides them
    **{script: (of_advantages, TOKENS) for script in ("reinforce", "opd", "sdpo")},
    **{script: (of_grpo, TOKENS) for script in ("ppo", "reinforce_pp", "grpo", "grpo_multi_turn", "dapo", "grpo_kl")},
    "grpo_ar_lopti": (of_grpo, TOKENS),
    "entropy_bonus": (of_entropy_bonus, TOKENS),  # a table's entropy has no gradient: see test_entropy_bonus.py
    "dr_grpo": (of_grpo, LONGEST),
    "acpo": (of_acpo, RESPONSES),
    "gspo": (of_gspo, RESPONSES),
    "cispo": (of_cispo, TOKENS),
    "dppo": (of_dppo, TOKENS),
    "sapo": (of_sapo, RESPONSES),
    "entropy_top": (of_entropy_top, TOKENS),
    "archer": (of_archer, TOKENS),
    "grpo_tis": (of_grpo_tis, TOKENS),
    "grpo_stale": (of_grpo_stale, TOKENS),
}
CASES = {script: (script, {}) for script in REFERENCES} | {
    "acpo, 20 bins": ("acpo", {"n_bins": 20, "clip_alpha": 0.3}),
    "acpo, bounded": ("acpo", {"clip_max": 0.3}),
    "acpo, dapo's clip": ("acpo", {"clip_base_high": 0.3}),
    "gspo, wide": ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    "cispo, both bounds": ("cispo", {"clip_low": 0.2, "clip_high": 0.1}),
    "cispo, gated": ("cispo", {"gated": True}),
    "dppo, kl": ("dppo", {"divergence": "kl"}),
    "dppo, narrow": ("dppo", {"delta": 0.02}),
    "sapo, steep": ("sapo", {"tau_positive": 5.0, "tau_negative": 7.0}),
    "entropy_top, half": ("entropy_top", {"entropy_top": 0.5}),
    "archer, half": ("archer", {"entropy_quantile": 0.5, "reasoning_kl": 0.25}),
    "entropy_bonus, KL-Cov": ("entropy_bonus", {"cov": "kl", "cov_fraction": 0.5, "kl_coef": 0.0, "entropy_coef": 0.0}),
    "entropy_bonus, Clip-Cov": ("entropy_bonus", {"cov": "clip", "cov_fraction": 0.1}),
    "entropy_bonus, Clip-Cov all": ("entropy_bonus", {"cov": "clip", "cov_fraction": 1.0, "entropy_coef": 0.0}),
    "grpo_tis, icepop": ("grpo_tis", {"correction": "icepop"}),
    "grpo_tis, mask": ("grpo_tis", {"mask": "sequence", "mask_delta": 0.2}),
    "grpo_tis, geometric": ("grpo_tis", {"mask": "geometric", "mask_low": 0.9, "mask_high": 1.2}),
    "grpo_stale, geometric": ("grpo_stale", {"mask": "geometric", "mask_low": 0.9, "correction": "none"}),
    "grpo_stale, none": ("grpo_stale", {"correction": "none"}),
    "grpo_stale, icepop": ("grpo_stale", {"correction": "icepop"}),
    "grpo_stale, ppo": ("grpo_stale", {"correction": "ppo"}),
    "grpo_stale, ppo and geometric": ("grpo_stale", {"correction": "ppo", "mask": "geometric", "mask_low": 0.9}),
}
# Without a KL term tokens of advantage 0 go through no pass, and count as before.
CASES |= {f"{script}, no KL": (script, {"kl_coef": 0.0}) for script in REFERENCES}
CASES |= {f"grpo_kl, {estimate}": ("grpo_kl", {"kl": estimate}) for estimate in ("k1", "k2", "k3")}


def expected(script, rows, args, is_first):
    """(the weight of each token, the share of tokens that are cut off)."""
    weights_of, divisor = REFERENCES[script]
    looks_again = script in ("acpo", "entropy_top")
    found = weights_of(rows, args, is_first) if looks_again else weights_of(rows, args)
    num_tokens = sum(len(row) for _, row in rows)
    divisor = RESPONSES if getattr(args, "gated", False) else divisor
    weights = []
    for (_, row), given in zip(rows, found):
        longest = getattr(args, "max_response_tokens", 0)
        by = {TOKENS: num_tokens, RESPONSES: len(row) * len(rows), LONGEST: longest * len(rows)}[divisor]
        for token, (weight, _) in zip(row, given):
            weights.append((weight + getattr(token, "beta", 1) * kl_part(token, args)) / by)
    return weights, sum(bool(cut) for given in found for _, cut in given) / num_tokens


def as_batch(rows, reply=0):
    """(the batch, log π, entropy now), [N, T] in float64. A response begins at place 1; around it lies garbage, with
    which a loss is infinite.

    reply: how many places of garbage stand behind every third token of a response.
    """
    longest = max(len(row) for _, row in rows)
    shape = len(rows), 2 + longest + reply * (longest // 3)
    outside = {"logp": -7, "now": 9, "entropy": 9, "old_logp": -5, "ref_logp": -1, "sampler_logp": -3}
    outside["advantages"] = 1e306
    found = {key: torch.full(shape, garbage, dtype=torch.float64) for key, garbage in outside.items()}
    found |= {"ids": torch.zeros(shape, dtype=torch.long), "mask": torch.zeros(shape, dtype=torch.bool)}
    for i, (advantage, row) in enumerate(rows):
        for k, token in enumerate(row):
            t = 1 + k + reply * (k // 3)
            numbers = token.logp, token.now, token.entropy, token.old, token.logp + token.ref, token.old - token.gap
            for key, number in zip([*outside, "mask"], (*numbers, advantage, True)):
                found[key][i, t] = number
    logp, entropy = found.pop("logp"), found.pop("now")
    return found, logp, entropy


MOST = torch.distributed.ReduceOp.MAX
# A later update of a step differs in the scripts that look at the policy again; in others it is as the first.
PAIRS = [(case, True) for case in CASES]
PAIRS += [(case, False) for case, (script, _) in CASES.items() if case == script or script in ("acpo", "entropy_top")]


@pytest.mark.parametrize(("case", "is_first"), PAIRS)
def test_an_update_gives_each_token_its_weight(case, is_first, monkeypatch):
    """In passes of all rows, of some and of one, and if other processes make three more: their masks are empty."""
    script, settings = CASES[case]
    trainer, metrics = importlib.import_module(script), []
    update = trainer.update
    monkeypatch.setattr(trainer, "update", lambda *given: metrics.append(update(*given)))
    for seed, tokens in enumerate((10**6, 100, 1, 100)):
        if seed == 3:
            monkeypatch.setattr(batches, "all_reduce", lambda value, op=None: value + 3 * (op == MOST))
        rows = drawn_rows(seed, is_first or script != "acpo")  # with absurd ratios all of its ranges are the largest
        # With checkpointing no pass is for one group alone.
        common = {"prompts_per_step": len(rows), "responses_per_prompt": 1, "gradient_checkpointing": True}
        common["micro_batch_tokens"] = tokens
        args = arguments(trainer, **common | settings)
        batch, logp, entropy = as_batch(rows, reply=2 if script == "grpo_multi_turn" else 0)
        weight, _ = updates.token_weights(script, batch, logp, entropy, args, is_first)
        by_hand, clip_rate = expected(script, rows, args, is_first)
        # acpo.py divides in float32; its later updates, and entropy_top.py's, look at the policy in float32.
        exactly = {"rel": 1e-9, "abs": 1e-15} if is_first and script != "acpo" else {"rel": 2e-5, "abs": 1e-9}
        if script == "grpo_multi_turn":
            exactly["rel"] = 1e-12
        assert weight[batch["mask"]].tolist() == pytest.approx(by_hand, **exactly), seed
        assert not weight[~batch["mask"]].any()
        if is_first and "clip_rate" in metrics[-1]:
            assert metrics[-1]["clip_rate"] == pytest.approx(clip_rate, rel=1e-12)
            assert 0 < clip_rate < 0.95  # otherwise this would show little


@pytest.mark.parametrize("script", ["grpo", "acpo", "cispo", "gspo"])
def test_a_ratio_at_the_very_bound_is_not_clipped(script):
    """The bounds are put exactly on the ratio: r − 1 and 1 − r are exact for r in [1/2, 2]. A token is a response."""
    trainer, one = importlib.import_module(script), torch.ones(1, 1, dtype=torch.float64)
    for moved, advantage in ((0.25, 2), (-0.25, -2)):
        ratio = (moved * one).exp()
        for narrower in (0, 1e-12):
            bound = abs(ratio.item() - 1) - narrower
            settings = {"clip_base": bound} if script == "acpo" else {"clip_high": bound, "clip_low": bound}
            batch = {"mask": one > 0, "old_logp": -one - moved, "ref_logp": -one, "advantages": advantage * one}
            batch |= {"clip_range": bound * one, "weight": one}
            _, clipped = trainer.policy_loss(-one, batch, 1, arguments(trainer, **settings, kl_coef=0.0))
            assert clipped.item() == (narrower > 0)


# ------------------------------------------------------------ the estimates of grpo_kl.py, by enumeration of all tokens

# A policy that writes one of three tokens, its weights the logits. The exact gradients are autograd's of the two sums.
POLICY = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
OLD = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)  # the policy that sampled, before some updates


def gradient_of(value_of):
    """The gradient by the logits of a function of log π, [3]; at POLICY."""
    logits = POLICY.log().requires_grad_()
    return torch.autograd.grad(value_of(logits.log_softmax(0)), logits)[0].tolist()


def mean_gradient(kl, sampler):
    """That of grpo_kl.py's KL term, over tokens drawn from the sampler."""
    batch = {"old_logp": sampler.log(), "ref_logp": REFERENCE.log()}
    return gradient_of(lambda logp: (sampler * grpo_kl.kl_term(logp, batch, arguments(grpo_kl, kl=kl))).sum())


TO_POLICY = gradient_of(lambda logp: (logp.exp() * (logp - REFERENCE.log())).sum())  # KL(π ‖ π_ref)
TO_REFERENCE = gradient_of(lambda logp: (REFERENCE * (REFERENCE.log() - logp)).sum())  # KL(π_ref ‖ π)
GRADIENTS = {"k1": [0, 0, 0], "k2": TO_POLICY, "k3": TO_REFERENCE, "k3_ratio": TO_POLICY}


@pytest.mark.parametrize("kl", GRADIENTS)
def test_each_estimate_follows_its_own_divergence_and_off_policy_k3_times_the_ratio_alone(kl):
    """Its mean over the sampler's tokens is KL(π ‖ π_ref) as a function of the weights, wherever these are."""
    assert mean_gradient(kl, POLICY) == pytest.approx(GRADIENTS[kl], rel=1e-12, abs=1e-12)
    off_policy = mean_gradient(kl, OLD)
    assert (off_policy == pytest.approx(GRADIENTS[kl], rel=1e-2, abs=1e-2)) == (kl == "k3_ratio")
