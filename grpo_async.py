"""Pipelined GRPO, k steps off: vLLM samples in a process of its own while the trainer updates.

In grpo.py sampler and trainer take turns, and one of the two always waits. Here the sampler is
--lag steps ahead, on a GPU of its own or on CPU cores of its own:

    trainer     update 1   | update 2   | update 3   | ...
    sampler     sample 2   | sample 3   | sample 4   | ...        --lag 1
    weights of  step 0     | step 1     | step 2     | ...

So the sampler's weights are --lag steps old. The objective corrects for that, as in grpo_stale.py:
maximise, over all responses o_i of a mini-batch and all their tokens o_it,

    J = 1/Σ_i|o_i| · Σ_i Σ_t { w · min[ρ·A, clip(ρ, 1−ε_low, 1+ε_high)·A] − β·k3 }

    w  = min(π_old/π_sampler, C)         weight, without gradient: the change since sampling
    ρ  = π(o_it) / π_old(o_it)           the change by this step's updates
    A  = (r_i − mean) / (std + 1e-6)     the reward r_i, normalised in its group
    k3 = π_ref/π − log(π_ref/π) − 1      estimate of KL(π ‖ π_ref); π_ref: the initial model

π_sampler is the policy that sampled o_i, as vLLM computes it; π_old is the trainer's policy before
this step's updates. --correction selects other corrections: see sampler_correction. grpo_stale.py
samples the same stale responses in turns: with the same --lag, both runs are bitwise identical, if
trainer and sampler have as many threads as there.

What differs from grpo_stale.py: serve, the loop of the sampler's process; main requests responses
--lag steps before it needs them, and a request carries the weights that must sample it;
--sampler_gpus; the metric time/sampler, the seconds in which the sampler worked for the step
(time/sample: the seconds for which the trainer waited). Snapshots are in memory that both processes
share (timed as sync), so a request copies no weights; vLLM copies them to its own GPU.

If the sampler dies, the run ends with a checkpoint of the last complete step, and its last line
says how to resume. If the trainer dies, the sampler ends.

Where this file deviates from its sources, and why:
- The trainer waits for exactly the responses of its step, so that a run can be repeated. AReaL,
  prime-rl and others take what is ready, up to a maximum age.
- A request is sampled to its end with one version of the weights. AReaL and vLLM's own weight
  transfer also replace weights in the middle of a response.
- Each process of the trainer has a sampler of its own, on the same machine.
- All deviations of grpo_stale.py.

Command (two 80 GB GPUs; `torchrun --nproc-per-node 4 grpo_async.py` for eight):
    python grpo_async.py
"""

import dataclasses
from typing import Literal

from runtime import flags, settings
from runtime.settings import (
    Dtype,
    EvaluationTemperature,
    Fraction,
    GroupSize,
    Lag,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Temperature,
)

# ----------------------------------------------------------------------------------------- settings


@dataclasses.dataclass
class Args(settings.RunArgs):
    """Settings. The defaults train a 3B model on Knights & Knaves puzzles, as the AR-Lopti paper
    does (arXiv 2505.12929, Appendix B; docs/algorithms/grpo.md says what deviates).

    A model's folder may have a file trainer_settings.json, whose values replace these defaults. The
    model of runs without a GPU, models/kk_tiny, has one: shorter responses, a larger lr and so on.
    RunArgs adds settings of the machine and the run, such as --resume, --dry_run, --sampler_dtype.
    Types check ranges: Fraction is in [0, 1], GroupSize in [1, 16384].
    """

    # ---- objective
    clip_low: Fraction = 0.2  # ε_low: the clip range of ρ begins at 1 − ε_low
    clip_high: NonNegativeFloat = 0.24  # ε_high: the clip range ends at 1 + ε_high
    correction: Literal["none", "ppo", "tis", "icepop"] = "tis"  # see sampler_correction
    correction_max: PositiveFloat = 2.0  # C, the largest weight
    correction_min: NonNegativeFloat = 0.5  # C_min, the smallest weight with icepop
    lag: Lag = 1  # k: the sampler is k steps ahead, and its weights are k steps old
    mask: Literal["none", "sequence", "geometric"] = "none"  # which responses to drop
    mask_delta: NonNegativeFloat = 0.5  # sequence: δ, by which log π must have fallen per token
    mask_low: PositiveFloat = 0.999  # geometric: smallest mean ratio of trainer to sampler
    mask_high: PositiveFloat = 1.001  # geometric: largest mean ratio
    kl_coef: NonNegativeFloat = 0.001  # β, the weight of the KL term; 0 loads no reference model
    updates_per_step: PositiveInt = 2  # mini-batches per step; 2: near on-policy, 16: off-policy

    # ---- problems
    task: str = "kk"  # kk, math, countdown, hitab, gym (see rewards/), or your own Python file
    chat_template: Literal["auto", "none"] = "auto"  # auto: the model's template; none: plain text
    max_prompt_tokens: PositiveInt = 1024  # problems with longer prompts are dropped

    # ---- sampling
    prompts_per_step: PositiveInt = 64  # a multiple of updates_per_step × processes (one per GPU)
    responses_per_prompt: GroupSize = 8  # G, the group size: responses to each prompt
    max_response_tokens: PositiveInt = 4096  # longer responses are truncated
    temperature: Temperature = 0.7  # π is softmax(logits / temperature), in sampling and loss

    # ---- optimizer
    lr: LearningRate = 1e-6  # AdamW's learning rate, constant
    weight_decay: Fraction = 0.01  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # larger gradients are scaled down to this norm
    lora_rank: NonNegativeInt = 0  # LoRA's rank r, e.g. 16 (with lr × 10); 0: train all weights
    lora_alpha: PositiveFloat = 32.0  # LoRA: W becomes W + α/r · P·Q; only P, Q of rank r learn

    # ---- machine
    sampler_gpus: str = ""  # the samplers' GPUs, one per process: "2,3"; empty: the next ones

    # ---- run
    model: str = "Qwen/Qwen2.5-3B-Instruct"  # model to start from: a Hugging Face folder or hub id
    dtype: Dtype = "bfloat16"  # compute dtype; trained weights stay float32
    steps: PositiveInt | None = None  # number of training steps; None: computed from --epochs
    epochs: PositiveInt = 5  # passes over the training problems
    eval_every: PositiveInt = 20  # evaluate every this many steps, at the start and the end
    eval_temperature: EvaluationTemperature = 0.0  # sampling temperature in evaluations; 0: greedy
    eval_samples: GroupSize = 1  # responses per test problem; more than one also gives pass@k
    save_every: PositiveInt = 20  # write a checkpoint every this many steps and at the end
    seed: NonNegativeInt = 0  # seeds the prompt order and the sampling

    def check(self):
        """Raise ValueError if two settings do not fit each other. flags.check calls it."""
        if self.correction == "icepop" and self.correction_min > self.correction_max:
            raise ValueError(
                f"--correction_min is {self.correction_min}; it must be at most "
                f"--correction_max, {self.correction_max}"
            )
        if self.mask == "geometric" and self.mask_low > self.mask_high:
            raise ValueError(
                f"--mask_low is {self.mask_low}; it must be at most --mask_high, {self.mask_high}"
            )


# {task: {setting: value}}: a task's values in its own paper. With --task, they are the defaults.
TASKS = settings.TASKS

# Exit here on --help or a bad flag: importing torch takes seconds. main reads the flags again.
flags.check(Args, TASKS)

import sys
import time
from collections import deque
from statistics import fmean

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rewards import score
from runtime import batches, checkpoints, distributed, lora, metrics, models, records, sampler
from runtime.batches import balance, micro_batches, next_problems, own_part
from runtime.distributed import DEVICE, WORLD_SIZE, all_reduce, full_tensor
from runtime.metrics import Clock
from runtime.models import place, text_only
from runtime.sampler import decode
from runtime.sampler_process import SamplerProcess

# ----------------------------------------------------------------------- policy (log-probabilities)


class Policy(nn.Module):
    """A causal language model that returns the log-probabilities of given tokens."""

    def __init__(self, lm, args):
        super().__init__()
        self.lm = lm
        self.args = args

    def forward(self, ids, mask, temperature, with_entropy=False):
        """Compute the log-probability and entropy, in nats, of each response token.

        ids [N, T]: prompt and response, padded on the right. Causal attention needs no attention
        mask here: real tokens do not see the padding after them.
        mask [N, T]: True on response tokens.
        Returns two float32 tensors [N, T], zero outside the mask. The entropy is taken over the
        full vocabulary; without with_entropy it is zero.
        """
        dtype = getattr(torch, self.args.dtype)  # of matrix products, by autocast
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            hidden = self.hidden_states(ids, mask)  # [N, T, D]
            # The state at position t predicts token t + 1, so pair states 0 to T − 2 with the mask
            # of tokens 1 to T − 1. No response token is lost, because the prompt comes first.
            states = hidden[:, :-1][mask[:, 1:]]  # [num_tokens, D]
            targets = ids[mask]  # [num_tokens], in the same order
            # Apply self.head to one chunk of tokens at a time, and recompute its logits in the
            # backward pass (gradient checkpointing): all logits would be the largest tensor here.
            logp, entropy = models.in_chunks(self.head, states, targets, temperature, with_entropy)
        return to_rows(logp, mask), to_rows(entropy, mask)

    def hidden_states(self, ids, mask):
        """Compute the final hidden state of every token, the input of the head: [N, T, D]."""
        # Start from float32 embeddings: each layer adds its output to them, and this sum stays
        # float32, even if weights are not (LoRA). autocast rounds only inputs of matrix products.
        embedded = models.embed(self.lm, ids)  # {"inputs_embeds": [N, T, D] in float32}
        # If all rows begin with one prompt, compute it once: results and gradients are the same.
        # The length is 0 if the rows differ, or if sharing would save no time.
        length = batches.length_to_share(ids, mask, self.args)
        if length > 0:
            return models.with_shared_prompt(self.lm.model, embedded, length)
        return self.lm.model(**embedded, use_cache=False).last_hidden_state

    def head(self, states, targets, temperature, with_entropy):
        """Compute log-probability and entropy: states [n, D], targets [n] → two float32 [n]."""
        logits = models.logits(self.lm, states)  # [n, vocabulary] in float32
        all_log_probs = logits.div_(temperature).log_softmax(-1)  # in place: saves memory
        logp = all_log_probs.gather(-1, targets[:, None])[:, 0]  # of the targets: [n]
        entropy = torch.zeros_like(logp)
        if with_entropy:
            with torch.no_grad():  # a metric only
                entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return logp, entropy


def to_rows(values, mask):
    """Scatter values [num_tokens] to the response tokens of [N, T]; zero elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


def load_policy(args, trained):
    """Load the model: trainable, in float32, or frozen, in --dtype (a reference model)."""
    dtype = torch.float32 if trained else getattr(torch, args.dtype)
    # If the model also reads images, text_only leaves that part out.
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, **text_only(args.model))
    policy = Policy(lm, args)
    policy.requires_grad_(trained)
    if trained and args.lora_rank > 0:
        lora.add_adapters(policy, args)  # trains only these; casts all else to --dtype
    return place(policy, args)  # to its device; sharded if there are several processes


@torch.no_grad()
def log_probs(policy, batch, args, with_entropy=True):
    """Compute log-probability and entropy of a batch's response tokens, without gradient.

    Returns two tensors [N, T] on the CPU, zero outside the mask.
    """
    all_logp = torch.zeros(batch["ids"].shape)
    all_entropy = torch.zeros(batch["ids"].shape)
    # A micro-batch is on the policy's device and has as many rows as fit in one forward pass,
    # padded to the longest of them. Each row comes once, longest first; rows without response
    # tokens are skipped. The last argument is the progress bar's title.
    for rows, micro in micro_batches(batch, args, "log-probabilities"):
        logp, entropy = policy(micro["ids"], micro["mask"], args.temperature, with_entropy)
        length = logp.shape[1]
        # Add, don't assign. With sharded weights, all processes must run the same number of passes.
        # A process that finishes early repeats its last pass with an empty mask, which gives zeros.
        all_logp[rows, :length] += logp.cpu()
        all_entropy[rows, :length] += entropy.cpu()
    return all_logp, all_entropy


# ------------------------------------------------------------------------------------------ sampler


def load_sampler(args):
    """Start this process's vLLM engine, before the policy takes memory."""
    options = sampler.options(args)  # sets environment variables, too: call it before the import
    from vllm import LLM

    with distributed.library_notices():  # hides all of vLLM's output but errors
        return LLM(
            model=args.model,
            dtype=args.dtype,
            seed=args.seed,
            logprobs_mode="processed_logprobs",  # at the sampling temperature
            **options,
        )


def generate(llm, prompts, when, args, **sampling_params):
    """Generate responses with vLLM, in the order of the prompts, and decode them.

    prompts: problems, one per prompt.
    when: the step, or "test" in an evaluation. A request's seed is computed from --seed, `when` and
    the problem alone, so the responses do not depend on the number of processes. From it, vLLM
    derives a seed per response.
    sampling_params: further arguments for SamplingParams.
    """
    from vllm import SamplingParams

    requests = []
    params = []
    for problem in prompts:
        requests.append({"prompt_token_ids": problem["prompt_ids"]})
        params.append(
            SamplingParams(
                seed=sampler.request_seed(args.seed, when, problem["id"]),
                max_tokens=args.max_response_tokens,
                stop_token_ids=sampler.end_tokens(args.model),  # EOS tokens
                detokenize=False,  # decode() below does it for all responses at once
                **sampling_params,
            )
        )
    sampler.empty_prefix_cache(llm)  # vLLM's cached attention keys and values are of older weights
    outputs = llm.generate(requests, params, use_tqdm=sampler.progress_bar(when))
    responses = []
    for output in outputs:  # one per prompt
        responses += output.outputs
    # Decode without the EOS token and other tokens that only control the chat.
    for response, text in zip(responses, decode(llm.get_tokenizer(), responses)):
        response.text = text
    return responses


def request(server, weights, problems, step, args):
    """Ask the sampler for responses to a step's problems, from these weights (see snapshot).

    problems: one per response, so each problem is repeated G times in a row.
    """
    sampling_params = {
        "n": args.responses_per_prompt,
        "temperature": args.temperature,
        "logprobs": 0,  # return log π of each sampled token, and of 0 others
        "flat_logprobs": True,  # fast: response.logprobs.logprobs is a plain list of numbers
    }
    # One problem per prompt. The request reaches serve in the sampler's process.
    server.request(weights, problems[:: args.responses_per_prompt], step, sampling_params)


def serve(args, next_request, send):
    """Sample what is requested: the loop of the sampler's process, until the trainer's ends.

    next_request() waits for the arguments of a sampler.request(…) in the trainer, in their order.
    send(when, value) makes sampler.receive(when) return the value there.
    """
    llm = load_sampler(args)
    send("loaded", True)
    while True:
        weights, prompts, when, sampling_params = next_request()
        started = time.perf_counter()
        sync_weights(weights, llm)
        if when == "check":  # see check_sampler
            responses = [models.ten_tokens(llm, prompts[0])]
        else:
            responses = generate(llm, prompts, when, args, **sampling_params)
        seconds = time.perf_counter() - started
        send(when, (responses, seconds, sampler.fingerprint(llm)))


def to_batch(problems, responses):
    """Convert prompts and responses to tensors, one row per response.

    ids [N, T]: prompt and response, padded with zeros on the right.
    mask [N, T]: True on response tokens, the EOS token included.
    sampler_logp [N, T]: vLLM's own log-probabilities.
    """
    rows = [(problem["prompt_ids"], response) for problem, response in zip(problems, responses)]
    longest = max(len(prompt) + len(response.token_ids) for prompt, response in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    sampler_logp = torch.zeros(len(rows), longest)
    for i, (prompt, response) in enumerate(rows):
        begin = len(prompt)
        end = begin + len(response.token_ids)
        ids[i, :begin] = torch.tensor(prompt)
        ids[i, begin:end] = torch.tensor(response.token_ids)
        mask[i, begin:end] = True
        sampler_logp[i, begin:end] = torch.tensor(response.logprobs.logprobs)
    return {"ids": ids, "mask": mask, "sampler_logp": sampler_logp}


def snapshot(policy, args):
    """Copy the policy's weights to main memory, in --dtype: {name: whole tensor}."""
    weights = {}
    # remove_duplicate=False: if embedding and head share a tensor, send it under both names,
    # because vLLM may hold two copies. full_tensor gathers the shards of all processes, which
    # must go through the tensors in the same order. With LoRA, each weight includes its
    # adapter; without LoRA, these are all the weights as they are.
    for name, weight in lora.merged_weights(policy.lm, remove_duplicate=False):
        weight = full_tensor(weight.to(getattr(torch, args.dtype)))
        weight = sampler.rounded(policy.lm, name, weight, args)  # if --sampler_dtype says so
        # Both processes share this memory, so a request copies no weights.
        weights[name] = weight.to("cpu", copy=True).share_memory_()
    return weights


def sync_weights(weights, llm):
    """Copy a snapshot's weights to vLLM, one tensor at a time."""
    on_device = ((name, weight.to(DEVICE)) for name, weight in weights.items())
    sampler.load_weights(llm, on_device)  # replaces all weights; wakes vLLM up


def check_sampler(policy, server, problem, args):
    """End the run if policy, transformers and vLLM compute different models."""
    with models.changed_weights(policy):
        exact = dataclasses.replace(args, sampler_dtype="")  # --sampler_dtype is to differ
        server.request(snapshot(policy, exact), [problem], "check", {})
        answer = server.receive("check")
        if answer is not None:  # if the sampler has died, the first step says so
            [response], _, _ = answer
            models.compare(policy, problem, args, response)


# --------------------------------------------------------------------------------------- advantages


def compute_advantages(scores, batch, args):
    """Compute the advantage of every response token: the reward, normalised within its group.

    scores: one per response; the G responses to a prompt are consecutive.
    Returns [N, T], zero outside the batch's mask (response tokens). In a group of one response,
    the mean is set to 0 and the standard deviation to 1, as in the library verl.
    """
    rewards = torch.tensor([s["reward"] for s in scores])  # [N]
    groups = rewards.view(-1, args.responses_per_prompt)  # [prompts, G]
    mean, std = 0.0, 1.0
    if args.responses_per_prompt > 1:
        # If a group's rewards only differ by rounding (1e-6 of the largest), set all to the first.
        groups = groups.where(~metrics.all_equal(groups), groups[:, :1])
        # Subtract the first reward, which cancels in A: then equal rewards have A = 0 exactly,
        # although their mean may be rounded.
        groups = groups - groups[:, :1]
        mean = groups.mean(1, keepdim=True)  # [prompts, 1]
        std = groups.std(1, keepdim=True)  # divides by G − 1
    advantages = (groups - mean) / (std + 1e-6)
    advantages = advantages.reshape(-1, 1)  # [N, 1]
    # Each response token gets the advantage; all other places get 0.
    return advantages * batch["mask"]  # [N, T]


# --------------------------------------------------------------------------------------------- loss


def sampler_correction(batch, args):
    """Compute w of every response token and whether π_old/π_sampler is out of bounds, [N, T] each.

    none    w = 1. Stale responses count as fresh, so the gradient is biased: tokens that the
            sampler chose more often than π_old would count too much.
    ppo     w = 1 and ρ = π/π_sampler (in policy_loss). The clip range must hold k steps and this
            step's updates together; tokens that have left it are lost.
    tis     w = π_old/π_sampler, at most C.
    icepop  w = π_old/π_sampler if that is in [C_min, C]; otherwise 0, which drops the token.

    The batch's old_logp and sampler_logp are [N, T] and carry no gradient.
    """
    weight = (batch["old_logp"] - batch["sampler_logp"]).clamp(-20, 20).exp()
    cut = weight > args.correction_max
    if args.correction in ("none", "ppo"):
        return torch.ones_like(weight), cut
    if args.correction == "tis":
        return weight.clamp(max=args.correction_max), cut
    cut = cut | (weight < args.correction_min)
    return weight.masked_fill(cut, 0), cut


def left_out(logp, batch, args):
    """Return the tokens of responses that --mask drops: bool [N, T].

    logp [N, T]: log π under the policy that is being updated; its gradient is not used. The batch's
    old_logp, sampler_logp, advantages and mask are [N, T].
    """
    mask = batch["mask"]
    if args.mask == "none":
        return torch.zeros_like(mask)
    length = mask.sum(1, keepdim=True).clamp(min=1)  # [N, 1]
    if args.mask == "geometric":
        log_ratio = (batch["old_logp"] - batch["sampler_logp"]).masked_fill(~mask, 0)  # [N, T]
        mean_ratio = (log_ratio.sum(1, keepdim=True) / length).exp()  # geometric mean, [N, 1]
        return mask & ((mean_ratio < args.mask_low) | (mean_ratio > args.mask_high))
    fallen = (batch["sampler_logp"] - logp.detach()).masked_fill(~mask, 0)  # [N, T], in nats
    mean_fallen = fallen.sum(1, keepdim=True) / length
    return mask & (batch["advantages"] < 0) & (mean_fallen > args.mask_delta)


def policy_loss(logp, batch, divisor, args):
    """Compute one micro-batch's part of −J and the number of its clipped tokens.

    logp [N, T] carries the gradient; the batch's old_logp, ref_logp, sampler_logp, advantages and
    mask are [N, T] too. divisor: Σ|o_i| of J, the response tokens of the whole mini-batch on all
    processes, so that the losses of its micro-batches add up to −J.
    """
    dropped = left_out(logp, batch, args)  # [N, T]
    if args.correction == "ppo":  # ρ is π/π_sampler, and sampler_correction returns w = 1
        batch = {**batch, "old_logp": batch["sampler_logp"]}
    advantages = batch["advantages"]
    mask = batch["mask"]
    low = 1 - args.clip_low
    high = 1 + args.clip_high
    # The clamp changes only log-ratios beyond ±20, so that exp does not overflow.
    ratio = (logp - batch["old_logp"]).clamp(-20, 20).exp()  # ρ
    surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    # Count the clipped tokens: min gives their surrogate no gradient, since they have moved far
    # enough in the direction of A.
    too_high = (advantages > 0) & (ratio > high)
    too_low = (advantages < 0) & (ratio < low)
    clipped = (too_high | too_low) & mask

    weight, _ = sampler_correction(batch, args)
    surrogate = weight.masked_fill(dropped, 0) * surrogate
    # To minimise the loss is to maximise J.
    loss = args.kl_coef * k3(logp, batch["ref_logp"]) - surrogate  # [N, T]
    # Sum, don't average: over the micro-batches, these parts add up to −J.
    return loss[mask].sum() / divisor, clipped.sum()


def k3(logp, ref_logp):
    """Compute the KL term of each token, exp(ref − logp) − (ref − logp) − 1, in nats.

    Value: averaged over tokens sampled from π, it is KL(π ‖ π_ref). Gradient: it pulls each token's
    π to π_ref, by (1 − π_ref/π)·∇log π. Averaged, this is the gradient of KL(π_ref ‖ π) instead,
    because a loss does not differentiate the sampling; grpo_kl.py has better estimates.
    """
    difference = (ref_logp - logp).clamp(-20, 20)
    return difference.exp() - difference - 1


# ------------------------------------------------------------------------------------------- update


def minibatches(batch, count):
    """Yield `count` equal parts of the batch, in order. No group is split."""
    size = len(batch["ids"]) // count
    for first in range(0, count * size, size):
        yield {name: value[first : first + size] for name, value in batch.items()}


def update(policy, optimizer, batch, step, args):
    """Make all optimizer updates of a step, one per mini-batch.

    Returns metrics: clip_rate and mask_rate (fractions of tokens), grad_norm (mean),
    optimizer_steps (count).
    """
    num_clipped = 0
    num_left_out = 0
    grad_norms = []  # one per update
    for minibatch in minibatches(batch, args.updates_per_step):
        # For the loss, over the whole mini-batch and all processes:
        divisor = all_reduce(minibatch["mask"].sum())  # Σ|o_i|: response tokens
        minibatch = balance(minibatch, args)  # swaps rows between processes: equal work

        clipped, stale, grad_norm = update_once(policy, optimizer, minibatch, divisor, step, args)
        num_clipped += clipped
        num_left_out += stale
        grad_norms.append(grad_norm)
    return {
        "clip_rate": metrics.token_rate(num_clipped, batch["mask"]),
        "mask_rate": metrics.token_rate(num_left_out, batch["mask"]),
        **metrics.of_updates(grad_norms, args),  # grad_norm, optimizer_steps, overflows (float16)
    }


def update_once(policy, optimizer, minibatch, divisor, step, args):
    """Make one optimizer update. Returns the numbers of clipped and dropped tokens, gradient norm.

    Gradients are summed over micro-batches, each as many rows as fit in one forward pass, and over
    processes, then clipped to norm max_grad_norm.
    """
    # In float16, multiply the loss, so that small gradients do not become 0. Otherwise do nothing.
    scaler = models.scaler(optimizer, args)  # one for the whole run; it wraps torch's GradScaler
    minibatch_loss = 0.0
    num_clipped = 0
    num_left_out = 0
    # For speed, if β is 0, drop tokens with A = 0 from the mask: they have no gradient. The divisor
    # still counts them. If no token is left, one pass still runs: AdamW's momentum moves weights.
    minibatch = batches.without_idle(minibatch, args)
    for _, micro in micro_batches(minibatch, args, f"step {step}: updating"):
        logp, _ = policy(micro["ids"], micro["mask"], args.temperature)
        loss, clipped = policy_loss(logp, micro, divisor, args)
        # If there are several processes, FSDP2 averages their gradients: × WORLD_SIZE is the sum.
        scaler.scale(loss * WORLD_SIZE).backward()
        minibatch_loss += loss.detach().double()  # .item() would wait for the GPU
        num_clipped += clipped
        num_left_out += left_out(logp, micro, args).sum()
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
    grad_norm = full_tensor(grad_norm).item()  # with FSDP2, each process has a part of it
    # Exit if the loss or the norm is NaN or infinite, while the weights are still good. In float16
    # such a norm is only an overflow: scaler.step skips this update and lowers the loss's scale.
    records.check_finite(minibatch_loss, grad_norm, minibatch, step, args)
    scaler.step(optimizer)  # makes the optimizer's step, and adapts the loss's scale
    optimizer.zero_grad()
    return num_clipped, num_left_out, grad_norm


# --------------------------------------------------------------------------------------- evaluation


@records.task_may_fail  # an error of the task ends the run, with a checkpoint
def evaluate(server, weights, task, test, step, run, args):
    """Measure accuracy on the test problems, and save some of the responses.

    weights: a snapshot of the policy to test. Returns the accuracy of each category of problems and
    the mean over categories, or {} if the sampler has died. With several responses
    (--eval_samples), also pass@k: the chance that one of k is right (arXiv 2107.03374).
    """
    prompts = own_part(test)  # this process's test problems; no other process has them
    k = args.eval_samples
    sampling_params = {"n": k, "temperature": args.eval_temperature}
    server.request(weights, prompts, "test", sampling_params)
    answer = server.receive("test")
    if answer is None:  # the sampler has died: end the run, so that it can be resumed
        run.fail(f"the sampler's process {server.how_it_ended()}")
        return {}
    responses, _, _ = answer
    problems = []  # one per response
    for problem in prompts:
        problems += [problem] * k
    scores = score(task, responses, problems)  # keys: reward, correct, format …
    run.write_tests(step, prompts, responses[::k], scores[::k])  # the first response per problem
    accuracy = metrics.accuracy_by_category("eval/accuracy", problems, scores)  # over all processes
    pass_at_k = metrics.pass_at_each_k("eval/pass", problems, scores, k)  # {} if k is 1
    return {"eval/accuracy": fmean(accuracy.values()), **accuracy, **pass_at_k}


# --------------------------------------------------------------------------------------------- main


def main():
    # Read flags, tokenizer and problems, and print the header. Exits here with --dry_run, and on
    # errors that flags.check could not see, such as a missing file. run writes the run's files,
    # task makes prompts and scores responses, train and test are lists of problems.
    args, run, tokenizer, task, train, test = records.begin(Args, TASKS)

    server = SamplerProcess(serve, args)  # loads vLLM while this process continues
    policy = load_policy(args, trained=True)
    reference = None
    if args.kl_coef > 0 and args.lora_rank > 0:
        reference = lora.without_adapters(policy)  # the policy with its adapters off
    elif args.kl_coef > 0:
        reference = load_policy(args, trained=False)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True
    )
    # Steps done and training problems used so far: 0, 0 unless the run is resumed.
    step, num_used = checkpoints.load(policy, optimizer, args.resume)
    # End the run if Policy, transformers' own forward pass and vLLM disagree on log π of a few
    # tokens. The test changes the weights for a moment, to find any that do not reach vLLM.
    if not server.receive("loaded"):  # exit before run.open, so that a resumed run stays as it is
        sys.exit(f"error: the sampler's process {server.how_it_ended()} while it loaded")
    check_sampler(policy, server, train[0], args)
    # The newest --lag + 1 snapshots, oldest first: versions[0] samples the next step, versions[-1]
    # holds the policy's own weights. In the first steps there are fewer. They belong to the policy,
    # so that a checkpoint of the policy has them, too.
    versions = deque(checkpoints.load_versions(args.resume), maxlen=args.lag + 1)
    versions.append(snapshot(policy, args))
    policy.versions = versions
    run.open(step)  # opens its files; from here, Ctrl-C or SIGTERM stops after the step
    if step == 0:
        run.write({"step": 0, **evaluate(server, versions[-1], task, test, step, run, args)})

    # The steps whose responses were requested and have not been trained on: (problems, num_used).
    ahead = deque()
    requested, num_requested = step, num_used  # steps and problems
    saved = step
    while step < args.steps and not run.interrupted():
        # Remember these: if the task fails before the update, they are saved as a checkpoint.
        run.begin_step(policy, optimizer, tokenizer, step, num_used, args)
        step += 1
        clock = Clock()  # times each phase

        # Request a group of responses to each prompt, for this step and the next --lag ones.
        # Take this process's problems, each repeated G times in a row. Every epoch is shuffled
        # anew; leftover problems that do not fill a step are dropped.
        while requested < min(step + args.lag, args.steps):
            problems, num_requested = next_problems(train, num_requested, args)
            requested += 1
            # Sample with the weights after step `requested − 1 − lag`. versions[-1] has those after
            # step − 1, so go back by the difference, or to the oldest version if that is missing
            # (in a new run, or after a resume with a larger --lag).
            steps_back = step + args.lag - requested
            weights = versions[-1 - min(steps_back, len(versions) - 1)]
            request(server, weights, problems, requested, args)
            ahead.append((problems, num_requested))
        answer = server.receive(step)
        if answer is None:  # the sampler has died: end the run with a checkpoint of step − 1
            run.fail(f"the sampler's process {server.how_it_ended()}")
            step -= 1
            break
        responses, sampler_seconds, fingerprint = answer
        # End the run if vLLM computes the same as before although it should have new weights.
        run.check_sync(versions[0], fingerprint)
        problems, num_used = ahead.popleft()
        batch = to_batch(problems, responses)
        clock.lap("sample")

        # Score the responses. A score has a reward (K&K: 3 if right, −0.5 if wrong, −1 if no answer
        # can be read, −3 if tags are missing), correct (is the answer right?) and format (are the
        # required tags there?).
        scores = score(task, responses, problems)
        clock.lap("score")

        # Compute log-probabilities from before the update.
        batch["old_logp"], batch["entropy"] = log_probs(policy, batch, args)  # [N, T]
        if reference:
            batch["ref_logp"], _ = log_probs(reference, batch, args, with_entropy=False)
        else:
            batch["ref_logp"] = batch["old_logp"]  # a placeholder: β is 0
        batch["advantages"] = compute_advantages(scores, batch, args)  # [N, T]
        clock.lap("logprob")

        # Update the policy, and pass its weights on to vLLM.
        weights_before = metrics.some_weights(policy, args.dtype)  # to log how many values change
        updated = update(policy, optimizer, batch, step, args)  # metrics
        run.write_tokens(step, policy, batch, tokenizer)  # for make watch: one more pass
        clock.lap("train")
        lag = len(versions) - 1  # of this step's responses
        versions.append(snapshot(policy, args))  # drops the oldest if there are more than k + 1
        timings = clock.end("sync")  # seconds per phase, peak memory

        # Log, evaluate, save.
        kl = k3(batch["old_logp"], batch["ref_logp"])  # [N, T]
        weight, cut = sampler_correction(batch, args)  # [N, T]
        gap = (batch["old_logp"] - batch["sampler_logp"]).abs()  # [N, T]
        row = {
            "step": step,
            **metrics.of_responses(responses, problems, scores, args),  # reward, accuracy, lengths
            # Means over the response tokens of all processes:
            "entropy": metrics.token_mean(batch["entropy"], batch["mask"]),
            "sampler_gap": metrics.token_mean(gap, batch["mask"]),
            "lag": lag,
            "kl": metrics.token_mean(kl, batch["mask"]) if reference else None,
            "correction_mean": metrics.token_mean(weight, batch["mask"]),
            "correction_cut": metrics.token_mean(cut, batch["mask"]),
            **updated,
            "weights_changed": metrics.share_changed(weights_before, policy, args.dtype),
            **timings,
            "time/sampler": sampler_seconds,
        }
        if step == args.steps or (step % args.eval_every == 0 and not run.interrupted()):
            # Evaluate the newest weights. The responses already requested are sampled first.
            row.update(evaluate(server, versions[-1], task, test, step, run, args))
        run.write(row)  # to metrics.jsonl, TensorBoard and, in one line, the terminal
        run.write_samples(step, problems, responses, scores)  # saves a few of them
        if step % args.save_every == 0:
            # Even if the run is killed here, the last complete checkpoint stays intact.
            checkpoints.save(policy, optimizer, tokenizer, step, num_used, args)
            saved = step

    if saved < step:  # after the last step, or an interruption
        checkpoints.save(policy, optimizer, tokenizer, step, num_used, args)
    run.close(step)  # plots the curves; prints how the run ended and how to resume it
    server.end()
    distributed.end()


if __name__ == "__main__":
    main()
