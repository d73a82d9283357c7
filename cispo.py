"""CISPO: REINFORCE on every token, each weighted by its clipped importance ratio (Chen et al. 2025, MiniMax-M1).

Once ρ has left GRPO's clip range in the direction of A, the token is cut off from the gradient. Here no token ever is:
ρ is a weight without gradient, and the clip bounds the weight alone.

    J = 1/Σ|o_i| · Σ_i Σ_t sg[clip(ρ, 1−ε_low, 1+ε_high)] · A · log π(o_it)          sg: taken as a constant

With ρ and A as in grpo.py. ε_low 1 means no lower bound, since ρ > 0. A token's gradient is ρ·A·∇log π as in grpo.py
where ρ is within the bounds (in the first update of a step it is 1); above them it is (1 + ε_high)·A·∇log π.

What differs from grpo.py: policy_loss, and the defaults of --clip_low, --clip_high and --kl_coef. clip_rate is here the
share of tokens whose weight was clipped, whichever sign A has: they stay in the gradient, with the bound as weight.

Where this file deviates, and why:
- The bounds 1.0 and 0.45 are those of the ACPO paper's released code, which has CISPO as a baseline.
- No KL term unless --kl_coef asks for one: the ACPO paper omits it, after CISPO's example among others (Section 2.1).
- What grpo.py deviates in: the divisor, π_old from the trainer, the clamp of log-ratios to ±20, float32 weights. The
  clamp bounds the weight too, and cuts off no gradient.

Command (one 80 GB GPU; `torchrun --nproc-per-node 4 cispo.py …` for four). It is ACPO's baseline, off-policy; without
the last two flags near on-policy:
    python cispo.py --task countdown --updates_per_step 16 --prompts_per_step 256
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rewards import load_task, next_prompts
from tools import bookkeeping

# ---------------------------------------------------------------------------------------------------------- arguments

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
LOCAL_RANK, LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
ON_GPU = DEVICE.type == "cuda"


@dataclasses.dataclass
class Args:
    """The paper's settings for Knights & Knaves (Appendix B); TASKS has what differs on other tasks."""

    model: str = "Qwen/Qwen2.5-3B-Instruct"  # model to start from: a Hugging Face folder or hub id
    task: Literal["kk", "math", "countdown"] = "kk"  # what to train on: a module in rewards/
    data: str = ""  # training problems: a parquet or JSON file, a folder of them, or a hub id; empty: generated
    test_data: str = ""  # test problems, from where --data may come too; empty: generated, also where --data is a file
    people: str = "3-7"  # kk: numbers of people in a puzzle, within 2-8: "3-7" or "2,3"
    numbers: str = "3-4"  # countdown: how many numbers in a puzzle, within 3-6: "3-4" or "5"
    chat_template: Literal["auto", "none"] = "auto"  # auto: the tokenizer's, if it has one; none: plain text
    steps: int | None = None  # sampling steps, > 0; None: as many as --epochs gives
    epochs: int = 5  # passes over the training problems, > 0
    prompts_per_step: int = 64  # M, > 0 and a multiple of updates_per_step × processes
    responses_per_prompt: int = 8  # G, the group size, > 0
    max_prompt_tokens: int = 1024  # longer prompts are left out, > 0
    max_response_tokens: int = 4096  # longer responses are cut off, > 0
    temperature: float = 0.7  # of sampling, and of every probability in the loss, >= 0.01, the least that vLLM takes
    lr: float = 1e-6  # AdamW's learning rate, constant, in (0, 1]
    weight_decay: float = 0.01  # AdamW's weight decay, in [0, 1]
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm, > 0
    kl_coef: float = 0.0  # β, weight of the KL term, >= 0; 0: no reference model is loaded
    clip_low: float = 1.0  # ε_low, in [0, 1]; 1: no lower bound
    clip_high: float = 0.45  # ε_high, >= 0
    gated: bool = False  # as in the ACPO paper's released baseline: with PPO's gate, and as a mean over responses
    updates_per_step: int = 2  # optimizer updates a step (2: near on-policy, 16: off-policy), > 0
    micro_batch_tokens: int = 16384  # tokens in one forward pass, padding included; changes memory, not results, > 0
    gradient_checkpointing: bool = True  # recompute activations in the backward pass: less memory, a third more time
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of compute, sampler and reference; the weights are float32
    kv_cache_gb: float = 16.0  # GiB for the sampler's key-value cache, beside its weights, > 0
    eval_every: int = 20  # evaluate every so many steps, before the first and after the last, > 0
    eval_size: int = 500  # number of test problems, > 0
    eval_temperature: float = 0.0  # of evaluation; 0: greedy, as in the paper; else >= 0.01
    save_every: int = 20  # write a checkpoint every so many steps, and after the last, > 0
    keep_checkpoints: int = 3  # the newest so many stay on disk, > 0
    seed: int = 0  # of the order of prompts and of sampling, >= 0
    run_dir: str = ""  # where everything is written; empty: runs/SCRIPT_TASK_SEED_TIME
    resume: str = ""  # a run folder to go on with from its newest checkpoint; its settings are the defaults then
    track: bool = False  # also log to Weights & Biases (pip install wandb)


# What the papers set otherwise than for K&K. Mathematics: AR-Lopti, Section 5.2 (a base model, which knows no chat; one
# epoch of Open-Reasoner-Zero's problems, five of DSR-uniform). Countdown: ACPO, Section 4.2 and released scripts.
TASKS = {"kk": {}}
TASKS["math"] = {"model": "Qwen/Qwen2.5-7B", "chat_template": "none", "epochs": 1, "prompts_per_step": 128}
TASKS["countdown"] = {"prompts_per_step": 128, "responses_per_prompt": 10, "max_response_tokens": 3072}
TASKS["math"]["temperature"] = TASKS["countdown"]["temperature"] = 1.0

# Sizes for a machine without a GPU; and settings for models/kk_tiny, a model of a million parameters that learns while
# one watches: without a GPU it is the default. Nothing here belongs to the algorithm.
CPU_DEFAULTS = {"eval_size": 20, "gradient_checkpointing": False, "kv_cache_gb": 0.5, "micro_batch_tokens": 2048}
KK_TINY = {"model": "models/kk_tiny", "people": "2-3", "temperature": 1.0, "prompts_per_step": 12, "lr": 1e-4}
KK_TINY |= {"steps": 10, "max_prompt_tokens": 256, "max_response_tokens": 640, "micro_batch_tokens": 8192}
KK_TINY |= {"kv_cache_gb": 0.25, "eval_every": 5, "eval_size": 200, "eval_temperature": 1.0}

POSITIVE = """steps epochs prompts_per_step responses_per_prompt max_prompt_tokens max_response_tokens
    updates_per_step micro_batch_tokens max_grad_norm kv_cache_gb eval_every eval_size save_every keep_checkpoints"""
RANGES = {
    POSITIVE: (lambda value: value is None or 0 < value < math.inf, "greater than 0"),
    "kl_coef clip_high seed": (lambda value: 0 <= value < math.inf, "0 or greater"),
    "lr": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "temperature": (lambda value: 0.01 <= value < math.inf, "0.01 or greater"),
    "eval_temperature": (lambda value: value == 0 or 0.01 <= value < math.inf, "0 or at least 0.01"),
    "clip_low weight_decay": (lambda value: 0 <= value <= 1, "in [0, 1]"),
}


def parse_args(argv):
    """Args from the command line. Defaults: the papers'; those of machine and model; or those of the run resumed."""
    given = bookkeeping.flags(argv)
    task = TASKS.get(given.get("--task", Args.task), {})
    model = given.get("--model", task.get("model", Args.model) if ON_GPU else KK_TINY["model"])
    defaults = bookkeeping.settings_to_resume(given, Args) or task | own_defaults(model)
    description = __doc__.split("\n\n")[0]
    return tyro.cli(Args, args=argv, default=Args(**defaults), use_underscores=True, description=description)


def own_defaults(model):
    """Defaults other than the papers': for a machine without a GPU, and for kk_tiny."""
    return ({} if ON_GPU else CPU_DEFAULTS) | (KK_TINY if Path(model).name == "kk_tiny" else {})


def check_args(args):
    """ValueError, saying what would be right, where a value is out of range or a folder does not fit the request."""
    bookkeeping.check_ranges(args, RANGES)
    share = args.updates_per_step * WORLD_SIZE
    if args.prompts_per_step % share:
        sizes = f"{args.updates_per_step} updates × {WORLD_SIZE} processes"
        raise ValueError(f"--prompts_per_step is {args.prompts_per_step}; it must be a multiple of {share} ({sizes})")
    bookkeeping.check_run_folders(args, checkpoints)


def prepare(args):
    """Reads what is small and checks that the rest can work, before anything large loads. ValueError where it can't.

    Returns the tokenizer; the task's module (rewards/) with its training and test problems; the sizes of it all.
    """
    tokenizer, sizes = bookkeeping.check_model(args, HEAD_CHUNK)
    task, train, test = load_task(args, tokenizer)
    if len(train) < args.prompts_per_step:
        raise ValueError(f"--prompts_per_step is {args.prompts_per_step}, but there are {len(train)} training problems")
    args.steps = args.steps or args.epochs * (len(train) // args.prompts_per_step)
    return tokenizer, task, train, test, sizes | {"training_problems": len(train), "test_problems": len(test)}


def start_processes(args):
    """One process group, one device a process, one run folder for all."""
    bookkeeping.keep_freed_memory()
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if ON_GPU else "gloo")
    name = f"runs/{Path(sys.argv[0]).stem}_{args.task}_{args.seed}_{time.strftime('%Y%m%d-%H%M%S')}"
    args.run_dir = gather([args.resume or args.run_dir or name])[0]
    Path(args.run_dir).mkdir(parents=True, exist_ok=True)


def gather(items):
    """The processes' lists, one after the other, in every process."""
    lists = [items] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def all_reduce(value, op=dist.ReduceOp.SUM):
    """A number's sum (or what op says) over all processes, as a Python float; exact for counts up to 2**53."""
    value = torch.as_tensor(value, dtype=torch.float64, device=DEVICE)
    if WORLD_SIZE > 1:
        dist.all_reduce(value, op)
    return value.item()


def full_tensor(tensor):
    """The whole of a tensor of which FSDP2 keeps a shard in every process; all processes must call it."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


# ------------------------------------------------------------------------------------- policy (log-probabilities)

HEAD_CHUNK = 1024  # tokens whose logits exist at one time: [HEAD_CHUNK, vocabulary] in float32


class Policy(nn.Module):
    """A causal language model that gives log-probabilities of the tokens it is shown, at a temperature."""

    def __init__(self, lm, autocast, share_prompt):
        super().__init__()
        self.lm, self.autocast, self.share_prompt = lm, autocast, share_prompt

    def forward(self, ids, mask, temperature):
        """Log-probability and entropy, in nats, of each response token under the policy at this temperature.

        ids [N, T]: prompt and response, padded on the right. Padding needs no attention mask: under causal attention
        no real token sees what comes after it. mask [N, T]: True on response tokens. Returns two float32 [N, T], zero
        outside the mask; the entropy, of the full distribution, is 0 where the log-probabilities carry a gradient: no
        update needs it. With share_prompt, what all rows begin with is computed once, and the rest sees its keys and
        values.
        """
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.autocast):
            # In float32, so that a policy with float32 and a reference with bfloat16 weights keep the same residual
            # stream: of the same weights they give the same log-probabilities to the last bit.
            embedded = self.lm.get_input_embeddings()(ids).float()  # [N, T, D]
            alike = (ids == ids[0]).all(0) & ~mask.any(0)  # [T]
            n = int(alike[:-1].cumprod(0).sum()) if self.share_prompt else 0
            if n:
                shared = self.lm.model(inputs_embeds=embedded[:1, :n], use_cache=True)
                shared.past_key_values.batch_repeat_interleave(len(ids))
                rest = self.lm.model(inputs_embeds=embedded[:, n:], past_key_values=shared.past_key_values)
                hidden = torch.cat([shared.last_hidden_state.expand(len(ids), -1, -1), rest.last_hidden_state], 1)
            else:
                hidden = self.lm.model(inputs_embeds=embedded, use_cache=False).last_hidden_state  # [N, T, D]
            before = hidden[:, :-1][mask[:, 1:]]  # [n, D], the state from which each response token was drawn
            chunks = zip(before.split(HEAD_CHUNK), ids[mask].split(HEAD_CHUNK))
            parts = [checkpoint(self.head, h, y, temperature, use_reentrant=False) for h, y in chunks]
        logp, entropy = (torch.cat(part) for part in zip(*parts))  # [n]
        zeros = torch.zeros(ids.shape, device=ids.device)
        return zeros.masked_scatter(mask, logp), zeros.masked_scatter(mask, entropy)

    def head(self, hidden, targets, temperature):
        """The same for one chunk: hidden [n, D], targets [n] → two [n]. Its logits are made again when going back."""
        all_logp = self.lm.lm_head(hidden).float().div_(temperature).log_softmax(-1)  # [n, V]
        logp = all_logp.gather(-1, targets[:, None])[:, 0]
        entropy = torch.zeros_like(logp) if logp.requires_grad else -(all_logp.exp() * all_logp).sum(-1)
        return logp, entropy


def load_policy(args, trained):
    """The model to train (float32 weights), or the frozen reference (weights in --dtype), on this process's device."""
    dtype = torch.float32 if trained else getattr(torch, args.dtype)
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    lm.config.dtype = args.dtype  # of the checkpoints
    if trained and args.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()  # without it transformers checkpoints nothing; there is no dropout in these models
    # No prompt is shared under checkpointing: transformers checkpoints no pass that keeps keys and values.
    policy = Policy(lm, args.dtype == "bfloat16", not args.gradient_checkpointing).requires_grad_(trained)
    if WORLD_SIZE > 1:
        for layer in lm.model.layers:
            fully_shard(layer)
        fully_shard(policy, reshard_after_forward=True)
    return policy.to(DEVICE)


def micro_batches(batch, args):
    """Cuts a batch into forward passes of at most micro_batch_tokens, padding included (or one sequence, if longer).

    A sequence ends with its last token in the mask, and one without any is left out: the rest is not needed. Longest
    first, so that sequences of like length share a pass; where passes share their prompt, one group's after another's.
    Yields (rows, micro-batch), each tensor cut to the longest sequence of its rows. FSDP2 needs as many passes in every
    process: who has fewer repeats one, masked out.
    """
    share = not args.gradient_checkpointing
    length = (batch["mask"] * torch.arange(1, batch["mask"].shape[1] + 1)).amax(1)  # [N]
    once = batch["mask"].int().argmax(1) * share  # [N], tokens that a pass computes once for all its rows
    group = torch.arange(len(length)) // args.responses_per_prompt * share  # [N]
    left = length.argsort(descending=True, stable=True)[: max(1, int((length > 0).sum()))]
    left = left[group[left].argsort(stable=True)]
    passes = []
    while len(left):
        first = left[0]
        n_rows = max(1, int((args.micro_batch_tokens - once[first]) // (length[first] - once[first]).clamp(min=1)))
        passes.append(left[: min(n_rows, int((group[left] == group[first]).sum()))])
        left = left[len(passes[-1]) :]
    for i in range(int(all_reduce(len(passes), dist.ReduceOp.MAX))):
        rows = passes[min(i, len(passes) - 1)]
        longest = length[rows].max().clamp(min=2)  # a token and what came before it
        micro = {key: value[rows, :longest].to(DEVICE) for key, value in batch.items() if value.dim() == 2}
        micro["mask"] &= i < len(passes)
        yield rows, micro


@torch.no_grad()
def log_probs(policy, batch, args):
    """Log-probability and entropy of every response token of a batch, without gradient: two [N, T] on the CPU."""
    logp, entropy = torch.zeros(batch["ids"].shape), torch.zeros(batch["ids"].shape)
    passes = micro_batches(batch, args)
    for rows, micro in tqdm(passes, desc="log-probabilities", leave=False, disable=RANK != 0):
        for all_rows, part in zip((logp, entropy), policy(micro["ids"], micro["mask"], args.temperature)):
            all_rows[rows, : part.shape[1]] += part.cpu()  # a repeated, masked pass adds zeros
    return logp, entropy


# -------------------------------------------------------------------------------------------------------- sampler


def load_sampler(args):
    """A vLLM engine in this process (one in each), made before the trainer takes its memory."""
    cores = sorted(os.sched_getaffinity(0))[LOCAL_RANK::LOCAL_WORLD_SIZE] or [0]
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, so that weights can be handed over
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM  # reads the environment, and takes seconds: so it comes after every check

    context = args.max_prompt_tokens + args.max_response_tokens
    options = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.1}  # the share that must be free to start
    if not ON_GPU:  # on the CPU seeded requests fail in chunked prefill
        options = {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": context}
    # Log-probabilities at the sampling temperature; and no top-p, top-k or temperature of the model's own.
    options |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "use_tqdm_on_load": False}
    options["kv_cache_memory_bytes"] = int(args.kv_cache_gb * 2**30)
    options["distributed_executor_backend"] = "external_launcher" if WORLD_SIZE > 1 else None
    return LLM(model=args.model, dtype=args.dtype, max_model_len=context, seed=args.seed, **options)


def request_seed(seed, step, prompt_id):
    """A seed for one prompt in one step, the same on any number of processes. vLLM adds j for response j of a group."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{prompt_id}".encode()).digest()[:6])


def generate(llm, problems, params, title):
    """vLLM's outputs for the problems, with a progress bar, from an empty prefix cache.

    Emptied so that no older weights' keys and values are used, and so that a request always gives the same: what an
    evaluation left in the cache would change the rounding.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept its prefix cache, which may hold the keys and values of older weights")

    def bar(*items, **options):
        return tqdm(*items, **options | {"desc": title, "leave": False})

    prompts = [{"prompt_token_ids": problem["prompt_ids"]} for problem in problems]
    return llm.generate(prompts, params, use_tqdm=bar if RANK == 0 else False)


def sample(llm, problems, stop_ids, step, args):
    """G responses to each problem, as a batch of N = problems × G rows, and the responses' texts.

    The batch: ids [N, T], prompt and response padded on the right; mask [N, T], True on response tokens (the end token
    included); sampler_logp [N, T], the sampler's own log-probabilities; truncated [N].
    """
    from vllm import SamplingParams

    options = {"n": args.responses_per_prompt, "temperature": args.temperature, "max_tokens": args.max_response_tokens}
    options |= {"stop_token_ids": stop_ids, "logprobs": 0}  # 0: of the sampled token alone
    params = [SamplingParams(seed=request_seed(args.seed, step, p["id"]), **options) for p in problems]
    outputs = generate(llm, problems, params, f"step {step}: sampling")
    rows = [(p["prompt_ids"], response) for p, output in zip(problems, outputs) for response in output.outputs]
    length = torch.tensor([len(prompt) + len(response.token_ids) for prompt, response in rows])  # [N]
    ids = torch.zeros(len(rows), int(length.max()), dtype=torch.long)  # [N, T]
    mask, sampler_logp = torch.zeros_like(ids, dtype=torch.bool), torch.zeros(ids.shape)  # [N, T]
    for i, (prompt, response) in enumerate(rows):
        ids[i, : length[i]] = torch.tensor(prompt + list(response.token_ids))
        mask[i, len(prompt) : length[i]] = True
        logp = [of_token[token].logprob for token, of_token in zip(response.token_ids, response.logprobs)]
        sampler_logp[i, len(prompt) : length[i]] = torch.tensor(logp)
    batch = {"ids": ids, "mask": mask, "sampler_logp": sampler_logp}
    batch["truncated"] = torch.tensor([response.finish_reason == "length" for _, response in rows])
    return batch, [response.text for _, response in rows]


def sync_weights(policy, llm, args):
    """Gives the trainer's weights to the sampler, tensor by tensor, in its dtype."""

    def tensors():
        for name, weight in policy.lm.named_parameters(remove_duplicate=False):  # twice where head and embedding are
            yield name, full_tensor(weight).to(getattr(torch, args.dtype))  # one: the CPU engine keeps two of them

    if ON_GPU:
        torch.cuda.empty_cache()
        llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
    if ON_GPU:
        llm.wake_up(tags=["kv_cache"])


# ----------------------------------------------------------------------------------------------------- advantages


def compute_advantages(rewards, batch, args):
    """Advantage of every response token, [N, T]: the reward, normalised within the group (eq. 1), on each token.

    rewards [N], the G responses to a prompt one after the other; batch: its mask [N, T] is True on response tokens.
    The standard deviation has ddof 1; a group of one response has mean 0 and standard deviation 1.
    """
    groups = rewards.view(-1, args.responses_per_prompt)  # [prompts, G]
    mean, std = torch.zeros_like(groups), torch.ones_like(groups)  # of a group of one response
    if args.responses_per_prompt > 1:
        groups = groups - groups[:, :1]  # but for rounding no result changes; equal rewards become 0 exactly
        mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    groups = (groups - mean) / (std + 1e-6)
    return groups.reshape(-1, 1) * batch["mask"]  # [N, T]


# ----------------------------------------------------------------------------------------------------------- loss


# --gated: a token whose ρ has left [1 − GATE_LOW, 1 + GATE_HIGH] in the direction of A is cut off, as in PPO.
GATE_LOW = 0.2
GATE_HIGH = 0.3


def policy_loss(logp, batch, n, args):
    """The negative of J for one micro-batch, and how many of its tokens have a clipped weight.

    logp [N, T] carries the gradient; the batch's old_logp, ref_logp, advantages and mask are [N, T] too. n: response
    tokens of the whole mini-batch, over all micro-batches and processes, so that the losses of micro-batches add up to
    the mini-batch's. With --gated it is the mini-batch's responses, each of which counts with the mean over its tokens
    (the mask has all of them or none); the second value then counts the tokens that the gate cuts off, too.
    """
    advantages, mask = batch["advantages"], batch["mask"]
    low, high = 1 - args.clip_low, 1 + args.clip_high
    ratio = (logp - batch["old_logp"]).detach().clamp(-20, 20).exp()  # ρ
    surrogate = ratio.clamp(low, high) * advantages * logp
    clipped = (advantages != 0) & ((ratio > high) | (ratio < low))
    if args.gated:
        gate = (advantages > 0) & (ratio > 1 + GATE_HIGH) | (advantages < 0) & (ratio < 1 - GATE_LOW)
        surrogate, clipped = surrogate.masked_fill(gate, 0), clipped | gate
    loss = args.kl_coef * k3(logp, batch["ref_logp"]) - surrogate  # [N, T]
    if args.gated:
        loss = loss / mask.sum(1, keepdim=True).clamp(min=1)  # |o_i|
    return loss[mask].sum() / n, (clipped & mask).sum()


def k3(logp, ref_logp):
    """exp(ref − logp) − (ref − logp) − 1, per token, in nats (Schulman 2020)."""
    difference = (ref_logp - logp).clamp(-20, 20)  # as for ρ: one absurd token must not overflow
    return difference.exp() - difference - 1


# --------------------------------------------------------------------------------------------------------- update


def minibatches(batch, n):
    """The batch in n equal shares of its rows, in order: whole groups, the same prompts on any number of processes."""
    size = len(batch["ids"]) // n
    return [{key: value[i * size : (i + 1) * size] for key, value in batch.items()} for i in range(n)]


def update(policy, optimizer, batch, step, args):
    """All optimizer updates of a step. Returns clip_rate (a share of tokens), grad_norm (a mean) and optimizer_steps.

    The gradient of a mini-batch is summed over micro-batches and processes and clipped to max_grad_norm. Where the
    loss or the gradient is not finite, the program ends before the weights are touched.
    """
    n_clipped, n_seen, grad_norms = 0, 0, []
    bar = tqdm(total=len(batch["ids"]), desc=f"step {step}: updating", leave=False, disable=RANK != 0)
    for minibatch in minibatches(batch, args.updates_per_step):
        n = all_reduce(len(minibatch["mask"]) if args.gated else minibatch["mask"].sum())
        mini_loss, n_seen = 0, n_seen + minibatch["mask"].sum()
        if not args.kl_coef:  # a token with advantage 0 teaches nothing then
            minibatch = minibatch | {"mask": minibatch["mask"] & (minibatch["advantages"] != 0)}
        for rows, micro in micro_batches(minibatch, args):
            logp, _ = policy(micro["ids"], micro["mask"], args.temperature)
            loss, clipped = policy_loss(logp, micro, n, args)
            (loss * WORLD_SIZE).backward()  # FSDP2 averages over the processes; the loss is a sum over them
            mini_loss, n_clipped = mini_loss + loss.item(), n_clipped + clipped
            bar.update(len(rows))
        grad_norm = full_tensor(nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)).item()
        mini_loss = all_reduce(mini_loss)
        if not math.isfinite(mini_loss + grad_norm):
            bookkeeping.stop_at_non_finite(batch, step, mini_loss, grad_norm, args)
        optimizer.step()
        optimizer.zero_grad()
        grad_norms.append(grad_norm)
    bar.close()
    return {
        "clip_rate": all_reduce(n_clipped) / max(1, all_reduce(n_seen)),
        "grad_norm": sum(grad_norms) / max(1, len(grad_norms)),
        "optimizer_steps": len(grad_norms),
    }


# ----------------------------------------------------------------------------------------------------- evaluation


def evaluate(llm, task, problems, stop_ids, step, args):
    """Accuracy on the test problems, one response to each: by category, and the categories' mean."""
    from vllm import SamplingParams

    mine = problems[RANK::WORLD_SIZE]
    options = {"temperature": args.eval_temperature, "max_tokens": args.max_response_tokens, "stop_token_ids": stop_ids}
    params = [SamplingParams(seed=request_seed(args.seed, "test", p["id"]), **options) for p in mine]
    outputs = generate(llm, mine, params, f"step {step}: evaluating")
    scores = task.score_all([output.outputs[0].text for output in outputs], [p["answer"] for p in mine])
    accuracy = accuracy_by_category("eval/accuracy", mine, scores)
    return {"eval/accuracy": fmean(accuracy.values())} | accuracy


def accuracy_by_category(name, problems, scores):
    """{name_CATEGORY: share of right responses, over all processes}; kk: by number of people."""
    results = {}
    for category, right in gather([(p["category"], score["correct"]) for p, score in zip(problems, scores)]):
        results.setdefault(f"{name}_{category}", []).append(right)
    return {key: fmean(results[key]) for key in sorted(results)}


def batch_metrics(batch, problems, scores, args):
    """The metrics of a step that don't need its update, over all responses of all processes; see the README."""
    n_tokens = all_reduce(batch["mask"].sum())
    rewards = torch.tensor(gather([score["reward"] for score in scores]), dtype=torch.float64)
    groups = rewards.view(-1, args.responses_per_prompt)  # [prompts, G]

    def token_mean(values):  # [N, T] → over the response tokens
        return all_reduce(values[batch["mask"]].double().sum()) / n_tokens

    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "accuracy": fmean(gather([score["correct"] for score in scores])),
        "format_rate": fmean(gather([score["format"] for score in scores])),
        "response_tokens": n_tokens / len(rewards),
        "truncated_rate": fmean(gather(batch["truncated"].tolist())),
        "zero_std_rate": (groups == groups[:, :1]).all(1).double().mean().item(),
        "entropy": token_mean(batch["entropy"]),
        "kl": token_mean(k3(batch["old_logp"], batch["ref_logp"])) if args.kl_coef else None,
        "timed_out": sum(gather([score.get("timed_out", False) for score in scores])),
        "sampler_gap": token_mean((batch["sampler_logp"] - batch["old_logp"]).abs()),
        "tokens": int(n_tokens),
    } | accuracy_by_category("accuracy", problems, scores)


# -------------------------------------------------------------------------- checkpoints (and the run's records)


def checkpoints(run_dir):
    """The complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in Path(run_dir).glob("checkpoints/step_??????/trainer_state.json"))


def trainer_state(policy, optimizer):
    """Weights and AdamW's state by parameter name, sharing memory with the originals, and the random state."""
    named = dict(policy.lm.named_parameters())
    state = {name: optimizer.state[p] | {"weight": p.detach()} for name, p in named.items()}
    return state | {"rng": torch.get_rng_state()}


def save_checkpoint(policy, optimizer, tokenizer, step, n_used, args):
    """checkpoints/step_000020: a Hugging Face folder in the sampler's dtype, with the trainer's state in it.

    Written beside its place and renamed when it is whole: killed at any moment, the last good one is still there.
    """
    path = Path(args.run_dir, "checkpoints", f"step_{step:06d}")
    beside = path.with_suffix(".tmp")
    if RANK == 0:
        for unfinished in path.parent.glob("*.tmp"):
            shutil.rmtree(unfinished)
        beside.mkdir(parents=True)
    all_reduce(0)  # the others wait for the folder
    weights = {}
    for name, p in policy.lm.named_parameters():
        weight = full_tensor(p)  # by all; kept by process 0
        if RANK == 0:
            weights[name] = weight.to(getattr(torch, args.dtype)).cpu()
    dcp.save(trainer_state(policy, optimizer), checkpoint_id=beside / "trainer", no_dist=WORLD_SIZE == 1)
    if RANK == 0:
        save_file(weights, beside / "model.safetensors", metadata={"format": "pt"})
        for part in (policy.lm.config, policy.lm.generation_config, tokenizer):
            part.save_pretrained(beside)
        (beside / "trainer_state.json").write_text(json.dumps({"step": step, "n_used": n_used}))
        beside.rename(path)
        for old in checkpoints(args.run_dir)[: -args.keep_checkpoints]:
            shutil.rmtree(old.rename(old.with_suffix(".tmp")))  # half deleted, it must not look whole
    all_reduce(0)


def load_checkpoint(policy, optimizer, path):
    """Puts a checkpoint's state in place, on any number of processes; returns its step and its place in the data."""
    for p in policy.lm.parameters():
        optimizer.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p]["step"] = torch.zeros((), device=DEVICE)
    state = trainer_state(policy, optimizer)
    dcp.load(state, checkpoint_id=path / "trainer", no_dist=WORLD_SIZE == 1)  # in place
    torch.set_rng_state(state["rng"])
    position = json.loads((path / "trainer_state.json").read_text())
    return position["step"], position["n_used"]


# ----------------------------------------------------------------------------------------------------------- main


def main():
    with bookkeeping.errors_in_one_line():  # those that are the user's to mend
        args = parse_args(sys.argv[1:])
        check_args(args)
        tokenizer, task, train, test, sizes = prepare(args)
    start_processes(args)
    if RANK == 0:
        bookkeeping.print_header(args, own_defaults(args.model), TASKS[args.task], sizes)
    llm = load_sampler(args)
    policy = load_policy(args, trained=True)
    reference = load_policy(args, trained=False) if args.kl_coef else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    step, n_used = load_checkpoint(policy, optimizer, checkpoints(args.resume)[-1]) if args.resume else (0, 0)
    sync_weights(policy, llm, args)
    end = policy.lm.generation_config.eos_token_id  # several in some models, of which vLLM would know one
    stop_ids = end if isinstance(end, list) else [] if end is None else [end]
    records = bookkeeping.Records(step, args, sizes) if RANK == 0 else None
    asked_to_stop = bookkeeping.catch_signals()
    if step == 0:
        metrics = {"step": 0} | evaluate(llm, task, test, stop_ids, step, args)
        if RANK == 0:
            records.write(metrics)

    while step < args.steps:
        step, started = step + 1, time.perf_counter()
        metrics = {"step": step}
        places, n_used = next_prompts(len(train), n_used, args.prompts_per_step, args.seed)
        problems = [train[i] for i in places[RANK::WORLD_SIZE]]
        with bookkeeping.timed(metrics, "sample"):
            batch, texts = sample(llm, problems, stop_ids, step, args)
            peak_memory_gb = bookkeeping.peak_memory_gb()
            if ON_GPU:
                llm.sleep(level=1)  # its memory is the trainer's until sync_weights
        with bookkeeping.timed(metrics, "score"):
            asked = [problem for problem in problems for _ in range(args.responses_per_prompt)]  # one for each text
            scores = task.score_all(texts, [problem["answer"] for problem in asked])
            rewards = torch.tensor([score["reward"] for score in scores])  # [N]
        with bookkeeping.timed(metrics, "logprob"):
            batch["old_logp"], batch["entropy"] = log_probs(policy, batch, args)  # [N, T]
            batch["ref_logp"] = log_probs(reference, batch, args)[0] if reference else batch["old_logp"]
        batch["advantages"] = compute_advantages(rewards, batch, args)  # [N, T]
        metrics |= batch_metrics(batch, asked, scores, args)

        before = bookkeeping.weight_sample(policy, args.dtype)
        with bookkeeping.timed(metrics, "train"):
            metrics |= update(policy, optimizer, batch, step, args)
        changed = (bookkeeping.weight_sample(policy, args.dtype) != before).sum()
        metrics["weights_changed"] = all_reduce(changed) / all_reduce(len(before))
        metrics["peak_memory_gb"] = all_reduce(max(peak_memory_gb, bookkeeping.peak_memory_gb()), dist.ReduceOp.MAX)
        with bookkeeping.timed(metrics, "sync"):
            sync_weights(policy, llm, args)
        metrics["time/step"] = time.perf_counter() - started
        metrics["tokens_per_s"] = metrics["tokens"] / metrics["time/step"]

        stop = all_reduce(len(asked_to_stop)) > 0 or step == args.steps
        if (step % args.eval_every == 0 and not stop) or step == args.steps:  # asked to stop: save without delay
            metrics |= evaluate(llm, task, test, stop_ids, step, args)
        if RANK == 0:
            records.write(metrics)
            records.write_samples(step, problems, texts, scores)
        if step % args.save_every == 0 or stop:
            save_checkpoint(policy, optimizer, tokenizer, step, n_used, args)
        if stop:
            break

    if RANK == 0:
        records.close(step, asked_to_stop)
    del llm  # before the process group, which it uses
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
