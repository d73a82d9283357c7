"""Compute a step's metrics over the responses and tokens of all processes."""

import math
from collections import Counter
from statistics import fmean

import torch
from torch.distributed.tensor import DTensor

from rewards import total
from runtime import lora
from runtime.processes import all_reduce, gather


def of_responses(responses, problems, scores, args):
    """Return metrics of the responses sampled in a step, {name: number}.

    responses: vLLM's; problems, scores: one per response. The responses to one problem are
    adjacent.
    """
    rewards = torch.tensor(gather([score["reward"] for score in scores]), dtype=torch.float64)
    groups = rewards.view(-1, args.responses_per_prompt)  # [prompts, G]
    num_tokens = all_reduce(sum(len(response.token_ids) for response in responses))
    truncated = [response.finish_reason == "length" for response in responses]
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),  # over the whole step
        "accuracy": mean_of_all([score["correct"] for score in scores]),
        "format_rate": mean_of_all([score["format"] for score in scores]),
        **accuracy_by_category("accuracy", problems, scores),
        "zero_std_rate": all_equal(groups).double().mean().item(),
        "response_tokens": num_tokens / len(rewards),
        "truncated_rate": mean_of_all(truncated),
        "tokens": int(num_tokens),
        # Scoring can take too long in mathematics.
        "timed_out": sum(gather([score.get("timed_out", False) for score in scores])),
        **parts_of_rewards(scores),
        **of_turns(responses),
    }


# float32 rounds to 6e-8 of a number, and a sum of several parts to a few times that. Without this
# threshold, the rewards 50 and 50.000004 would have advantages of about ±1.
ROUNDING = 1e-6


def all_equal(groups):
    """Return whether the rewards of each group are equal, up to rounding: bool [prompts, 1].

    groups [prompts, G]. Equal: they differ by at most ROUNDING times the largest absolute reward.
    """
    spread = groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)
    return spread <= ROUNDING * groups.abs().amax(1, keepdim=True)


def of_turns(conversations):
    """Return metrics of conversations: mean turns, and the fractions tool_rate and tool_errors.

    {} for responses, which are no conversations.
    tool_rate: of conversations that got a reply; tool_errors: of calls that failed, or took too
    long (None without a call).
    """
    if not hasattr(conversations[0], "side"):
        return {}
    calls = all_reduce(sum(conversation.side.num_calls for conversation in conversations))
    errors = all_reduce(sum(conversation.side.num_errors for conversation in conversations))
    return {
        "tool_errors": errors / calls if calls else None,
        "turns": mean_of_all([len(conversation.turns) for conversation in conversations]),
        "tool_rate": mean_of_all([len(conversation.replies) > 0 for conversation in conversations]),
    }


def parts_of_rewards(scores):
    """Return {reward/PART: mean} for the parts of a task's rewards; {} without parts."""
    parts = [part for score in scores for part in score.get("parts", {}).items()]
    return means([(f"reward/{name}", total(value)) for name, value in parts])


def means(pairs):
    """Return {name: mean of its values} from the (name, value) of all processes."""
    values = {}
    for name, value in gather(pairs):  # the processes' lists, concatenated
        values.setdefault(name, []).append(value)
    return {name: fmean(of_name) for name, of_name in values.items()}


def of_lengths(batch):
    """Return lengths of given responses: mean response_tokens, and tokens. batch: mask [N, T]."""
    num_tokens = all_reduce(batch["mask"].sum())
    return {
        "response_tokens": num_tokens / all_reduce(len(batch["mask"])),
        "tokens": int(num_tokens),
    }


def accuracy_by_category(name, problems, scores):
    """Return {name_CATEGORY: accuracy, over all processes}; kk: by number of people."""
    pairs = zip(problems, scores)
    found = means([(f"{name}_{problem['category']}", score["correct"]) for problem, score in pairs])
    return dict(sorted(found.items()))


def pass_at_each_k(name, problems, scores, num_samples):
    """Return {name@1: …, name@2: …, name@4: …, …}, up to the number of responses to a problem.

    Each is the mean over the problems of a category, then over the categories, as in accuracy.
    problems, scores: one per response; the responses to one problem are adjacent. {} if there is
    one response to each problem.
    """
    if num_samples == 1:
        return {}
    right = []  # (category, number of right responses) of each problem
    for first in range(0, len(scores), num_samples):
        num_right = sum(score["correct"] for score in scores[first : first + num_samples])
        right.append((problems[first]["category"], num_right))
    results = {}
    for k in numbers_of_draws(num_samples):
        found = means([(category, pass_at_k(num_samples, c, k)) for category, c in right])
        results[f"{name}@{k}"] = fmean(found.values())
    return results


def numbers_of_draws(num_samples):
    """Return the k of pass@k: 1, 2, 4, … and the number of responses to a problem."""
    powers = [2**i for i in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def pass_at_k(n, c, k):
    """Return the probability that k of n responses include one of the c right ones.

    The k responses are sampled without replacement. This is the unbiased estimate of pass@k
    (Chen et al. 2021, arXiv 2107.03374).
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def token_mean(values, mask):
    """Return the mean over the response tokens of all processes. values, mask: [N, T].

    None if there are no values or no tokens.
    """
    if values is None:
        return None
    total = all_reduce(values[mask].double().sum())
    num_tokens = all_reduce(mask.sum())
    return total / num_tokens if num_tokens else None


def token_rate(count, mask):
    """Divide a count of tokens by the number of response tokens, both over all processes."""
    return all_reduce(count) / max(1, all_reduce(mask.sum()))


def mean_of_all(values):
    """Return the mean of the processes' lists of numbers, concatenated."""
    return fmean(gather(values))


def of_updates(grad_norms, args):
    """Return mean grad_norm, optimizer_steps and, with --dtype float16, overflows of a step.

    grad_norms: one per update. An update whose norm is not finite was skipped (float16.py).
    """
    num_made = sum(map(math.isfinite, grad_norms))
    metrics = {"grad_norm": mean(grad_norms), "optimizer_steps": num_made}
    if args.dtype == "float16":
        metrics["overflows"] = len(grad_norms) - num_made
    return metrics


def mean(values):
    """Return the mean of the finite numbers; 0 without any, as in a step without updates."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / max(1, len(finite))


def shared(states):
    """Return the fraction of turns that begin in the same state as another one (gigpo.py).

    states: one per turn of this process.
    """
    counts = Counter(gather(states))
    return mean_of_all([counts[state] > 1 for state in states])


def kl_share(scores, returns, mask):
    """Return the KL penalty as a fraction of the returns' size, from 0 to 1 (reinforce_pp.py).

    scores: one per response; returns [N, T]: rewards minus penalties.
    """
    rewards = torch.tensor([score["reward"] for score in scores])  # [N]
    of_tokens = rewards[:, None] * mask  # [N, T]
    penalty = token_mean((of_tokens - returns).abs(), mask)
    total = penalty + token_mean(of_tokens.abs(), mask)
    if total == 0:
        return 0.0
    return penalty / total


def of_bins(updates):
    """Return a step's largest σ and clip range, and their means over tokens, per bin and over all.

    updates: per update of the step the bins' numbers, from clip_ranges of acpo.py. A mean weights
    an update by its tokens in the bin. If a bin was empty in every update, all updates count
    equally.
    """
    metrics = {}
    for i, of_bin in enumerate(zip(*updates), 1):  # one bin, in each update
        metrics[f"bin_tokens_{i}"] = sum(numbers["tokens"] for numbers in of_bin)
        metrics |= largest_and_mean("sigma", of_bin, f"_{i}")
        metrics |= largest_and_mean("clip_range", of_bin, f"_{i}")
    everything = [numbers for of_bins in updates for numbers in of_bins]
    return metrics | largest_and_mean("clip_range", everything)  # an empty bin's is the smallest


def largest_and_mean(name, bins, ending=""):
    """Return a number's largest value in the bins, and its mean over their tokens, as metrics."""
    values = [numbers[name] for numbers in bins]
    tokens = [numbers["tokens"] for numbers in bins]
    mean = fmean(values, tokens if sum(tokens) else None)
    return {f"{name}_max{ending}": max(values), f"{name}_mean{ending}": mean}


def explained_variance(batch):
    """Return the fraction of the returns' variance that the values explain (ppo.py).

    1 − variance of (return − value) / variance of the returns, over the response tokens; None if
    all returns are equal. batch: returns, values and mask, [N, T].
    """
    returns = batch["returns"][batch["mask"]].double()  # [num_tokens]
    errors = returns - batch["values"][batch["mask"]]  # [num_tokens]
    variance = token_variance(returns)
    if variance <= 1e-8:  # they differ only by rounding
        return None
    return 1 - token_variance(errors) / variance


def token_variance(values):
    """Return the variance (ddof 0) of the processes' values [n], concatenated."""
    count = all_reduce(len(values))
    mean = all_reduce(values.sum()) / count
    return all_reduce((values - mean).square().sum()) / count


# ------------------------------------------------------------------------------------------ weights


def some_weights(policy, dtype):
    """Return about a million of a policy's weights, in this dtype, as [n]: always the same ones.

    Under FSDP2, every process gives some of its own shards. LoRA's adapters are added.
    """
    stride = 1 + sum(own_shard(parameter).numel() for parameter in policy.parameters()) // 2**20
    parts = []
    for _, weight in lora.merged_weights(policy):  # one at a time
        parts.append(own_shard(weight).flatten()[::stride].to(getattr(torch, dtype)))
    return torch.cat(parts)


def own_shard(weight):
    """Return this process's shard of a weight, or all of it, without gradient."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


def share_changed(before, policy, dtype):
    """Return the fraction of the policy's weights that changed since `before`, from some_weights.

    At a small learning rate, it can be 0 in bfloat16: then the sampler sees no change.
    """
    num_changed = (some_weights(policy, dtype) != before).sum()
    return all_reduce(num_changed) / all_reduce(len(before))
