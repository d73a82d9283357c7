"""Compute a step's metrics over the responses and tokens of all processes, and its seconds."""

import math
import time
from collections import Counter
from statistics import fmean

import torch
import torch.distributed as dist
from tokenizers.decoders import DecodeStream
from torch import Tensor
from torch.distributed.tensor import DTensor

from rewards import total
from runtime import lora, memory
from runtime.batches import micro_batches
from runtime.distributed import all_reduce, gather


def of_responses(responses, problems: list[dict], scores: list[dict], args) -> dict:
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


def of_turns(conversations) -> dict:
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


def parts_of_rewards(scores: list[dict]):
    """Return {reward/PART: mean} for the parts of a task's rewards; {} without parts."""
    parts = [part for score in scores for part in score.get("parts", {}).items()]
    return means([(f"reward/{name}", total(value)) for name, value in parts])


def means(pairs) -> dict:
    """Return {name: mean of its values} from the (name, value) of all processes."""
    values = {}
    for name, value in gather(pairs):  # the processes' lists, concatenated
        values.setdefault(name, []).append(value)
    return {name: fmean(of_name) for name, of_name in values.items()}


def of_lengths(batch: dict[str, Tensor]) -> dict:
    """Return lengths of given responses: mean response_tokens, and tokens. batch: mask [N, T]."""
    num_tokens = all_reduce(batch["mask"].sum())
    return {
        "response_tokens": num_tokens / all_reduce(len(batch["mask"])),
        "tokens": int(num_tokens),
    }


def accuracy_by_category(name, problems: list[dict], scores: list[dict]) -> dict:
    """Return {name_CATEGORY: accuracy, over all processes}; kk: by number of people."""
    pairs = zip(problems, scores)
    found = means([(f"{name}_{problem['category']}", score["correct"]) for problem, score in pairs])
    return dict(sorted(found.items()))


def pass_at_each_k(name, problems: list[dict], scores: list[dict], num_samples: int):
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


def numbers_of_draws(num_samples: int) -> list:
    """Return the k of pass@k: 1, 2, 4, … and the number of responses to a problem."""
    powers = [2**i for i in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def pass_at_k(n, c, k):
    """Return the probability that k of n responses include one of the c right ones.

    The k responses are sampled without replacement. This is the unbiased estimate of pass@k
    (Chen et al. 2021, arXiv 2107.03374).
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def token_mean(values, mask: Tensor):
    """Return the mean over the response tokens of all processes. values, mask: [N, T].

    None if there are no values or no tokens.
    """
    if values is None:
        return None
    total = all_reduce(values[mask].double().sum())
    num_tokens = all_reduce(mask.sum())
    return total / num_tokens if num_tokens else None


def token_rate(count, mask: Tensor):
    """Divide a count of tokens by the number of response tokens, both over all processes."""
    return all_reduce(count) / max(1, all_reduce(mask.sum()))


def mean_of_all(values):
    """Return the mean of the processes' lists of numbers, concatenated."""
    return fmean(gather(values))


def of_updates(grad_norms: list[float], args):
    """Return mean grad_norm, optimizer_steps and, with --dtype float16, overflows of a step.

    grad_norms: one per update. An update whose norm is not finite was skipped (models.py).
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


def kl_share(scores: list[dict], returns, mask: Tensor):
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


# -------------------------------------------------------------------------------- tokens to look at

KEPT_GROUPS = 2  # two responses are saved per group


def few_rows(batch: dict[str, Tensor], args):
    """Return the rows of two responses to each of two problems, a list: a group's best and worst.

    Best and worst by the sum of their advantages. Groups with an advantage come first, because the
    others teach nothing.
    """
    size = args.responses_per_prompt
    of_rows = batch["advantages"].sum(1)  # [N]
    has_advantage = (batch["advantages"] != 0).any(1).view(-1, size).any(1)  # [groups]
    groups = has_advantage.int().argsort(descending=True, stable=True)[:KEPT_GROUPS]
    rows = []
    for group in groups.tolist():
        order = of_rows[group * size : (group + 1) * size].argsort(descending=True, stable=True)
        rows += [group * size + int(i) for i in order[[0, -1][:size]]]
    return rows


@torch.no_grad()
def new_log_probs(policy, batch: dict[str, Tensor], args):
    """Return log-probabilities of a batch's response tokens under the current policy, [N, T]."""
    all_logp = torch.zeros(batch["ids"].shape)
    for rows, micro in micro_batches(batch, args, "what the update did"):
        logp, _ = policy(micro["ids"], micro["mask"], args.temperature)
        all_logp[rows, : logp.shape[1]] += logp.cpu()
    return all_logp


def pieces_of(tokenizer, ids):
    """Return the text that each token adds, a list of strings; together they are the whole text.

    If a character spans several tokens, the last token adds it and the others add nothing.
    """
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(tokenizer.backend_tokenizer, token) or "" for token in ids]
    if pieces:  # the last character may be incomplete
        pieces[-1] += text_of(tokenizer, ids)[len("".join(pieces)) :]
    return pieces


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def watched_tokens(batch: dict[str, Tensor], tokenizer):
    """Return a dictionary per row of a batch: its prompt, and values of each token after it.

    batch: ids, mask, old_logp, new_logp and advantages, [N, T]. A conversation's replies are among
    the tokens; is_own is False there, and the other values are 0.
    """
    found = []
    for i, mask in enumerate(batch["mask"]):
        if not mask.any():
            continue
        places = mask.nonzero()[:, 0]
        begin, end = int(places[0]), int(places[-1]) + 1
        response = {
            "prompt": text_of(tokenizer, batch["ids"][i][:begin].tolist()),
            "tokens": pieces_of(tokenizer, batch["ids"][i][begin:end].tolist()),
            "is_own": mask[begin:end].tolist(),
        }
        for name in ("old_logp", "new_logp", "advantages"):
            values = (batch[name][i] * mask)[begin:end]
            response[name] = [round(value, 5) for value in values.tolist()]
        found.append(response)
    return found


# -------------------------------------------------------------------------------------------- clock


class Clock:
    """Times one step. Each lap is a phase: sampling, scoring, log-probabilities, updating."""

    def __init__(self):
        self.seconds = {}  # by phase
        self.peak_gb = 0.0
        self.started = time.perf_counter()
        self.last = self.started

    def lap(self, phase, records_memory=True) -> None:
        """Add the seconds since the last lap to time/PHASE, and record the memory in use now.

        A GPU keeps working after Python has moved on, so the lap waits for the GPU to finish.
        """
        if records_memory:
            self.peak_gb = max(self.peak_gb, memory.peak_gb())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        key = f"time/{phase}"
        self.seconds[key] = self.seconds.get(key, 0) + now - self.last
        self.last = now

    def end(self, phase="") -> dict:
        """End the step. Return the seconds, and the peak of the memory recorded at the laps.

        phase: the last one, in which the sampler wakes up and takes its own memory; "" if all
        phases had their laps.
        """
        if phase:
            self.lap(phase, records_memory=False)
        return {
            **self.seconds,
            "time/step": self.last - self.started,
            "peak_memory_gb": all_reduce(self.peak_gb, dist.ReduceOp.MAX),
        }
