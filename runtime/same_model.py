"""Check before training that policy, transformers and vLLM compute the same model.

The policy calls a transformers model's layers and head (passes.logits), and a family may do more.
vLLM has code of its own, and may lose a weight on the way. So all three compute ten tokens'
log-probabilities, after the policy's weights were changed and copied to vLLM.
"""

import contextlib
import dataclasses
import math
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from runtime import engine, families, lora, passes, processes

TOKENS = 10
PROMPT = 256  # the most tokens of the prompt
# nats: the mean |difference| of log-probabilities is below, if only rounding differs
LIMITS = {"bfloat16": 0.3, "float16": 0.05, "float32": 0.002}


def check(policy, llm, sync_weights, problem, args):
    """End the run with one line, exit code 1, if the three compute different models.

    problem: its prompt is used. All processes must call it. It costs a sync, ten tokens and a few
    forward passes. Then the policy has its own weights again, and torch its random state.
    """
    exact = dataclasses.replace(args, sampler_dtype="")  # --sampler_dtype is to differ
    with changed_weights(policy):
        sync_weights(policy, llm, exact)
        compare(policy, problem, args, ten_tokens(llm, problem))


@contextlib.contextmanager
def changed_weights(policy):
    """Multiply every second number of each weight by 1.1; afterwards all are the same bit for bit.

    Not every number, because a norm after the weight would cancel the factor. LoRA's matrices B,
    which are zero, get 0.01 added. Copies of the weights wait in main memory.
    """
    kept = []
    with torch.no_grad():
        for name, weight in lora.all_tensors(policy):
            weight = processes.own_shard(weight)
            kept.append((weight, weight.to("cpu", copy=True)))
            part = weight[..., ::2] if weight.dim() else weight
            part.mul_(1.1).add_(0.01 if ".lora_B." in name else 0)
        try:
            yield
        finally:
            for weight, own in kept:
                weight.copy_(own)


def ten_tokens(llm, problem):
    """Return vLLM's response of ten tokens to a problem, with their log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(
        seed=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, flat_logprobs=True
    )
    prompts = [{"prompt_token_ids": problem["prompt_ids"][:PROMPT]}]
    with torch.random.fork_rng(devices=[processes.DEVICE] if processes.ON_GPU else []):
        engine.empty_prefix_cache(llm)
        [output] = llm.generate(prompts, params, use_tqdm=False)
        engine.empty_prefix_cache(llm)
    return output.outputs[0]


@torch.no_grad()
def compare(policy, problem, args, response=None):
    """End the run if log-probabilities of a response differ; without vLLM, of prompt tokens."""
    row = problem["prompt_ids"][:PROMPT]
    # Backwards, because a model is so sure of a template's end that a wrong scale changes nothing.
    row = [*row, *response.token_ids] if response else row[::-1]
    # So many equal rows that it pays to share their prompt, as the rows of a group do.
    num_rows = 2 + passes.PASS_COST // max(1, len(row) - TOKENS)
    ids = torch.tensor([row] * num_rows, device=processes.DEVICE)  # [N, T]
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, max(1, len(row) - TOKENS) :] = True
    with torch.compiler.set_stance("force_eager"):  # compiling for these shapes would take seconds
        logp = policy(ids, mask, 1.0)[0][mask].view(num_rows, -1)
        expected = {"transformers": own_log_probs(policy, ids[:1], args)[mask[0, 1:]]}
    if response:
        expected["vLLM"] = torch.tensor(response.logprobs.logprobs, device=logp.device)
    gaps = {name: (logp - other).abs().mean().item() for name, other in expected.items()}
    report(gaps, policy.lm.config.model_type, args)


def own_log_probs(policy, ids, args):
    """Return transformers' own log-probabilities of ids [1, T] without the first: [T − 1]."""
    dtype = getattr(torch, args.dtype)
    if isinstance(policy, FSDPModule):
        policy.unshard()  # embedding and head, which no layer gathers
    with torch.autocast(processes.DEVICE.type, dtype, enabled=dtype != torch.float32):
        logits = policy.lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
    if isinstance(policy, FSDPModule):
        policy.reshard()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def report(gaps, kind, args):
    """End the run if a gap is too large; say so if the model's family was not tried before."""
    for name, gap in gaps.items():
        gaps[name] = processes.all_reduce(math.inf if math.isnan(gap) else gap, dist.ReduceOp.MAX)
    shown = ", ".join(f"{gap:.2g} nats from {name}" for name, gap in gaps.items())
    is_wrong = max(gaps.values()) > LIMITS[args.dtype]
    ends = is_wrong and getattr(args, "stop_at_gap", True)
    nevertheless = hasattr(args, "stop_at_gap") and ", and --no_stop_at_gap trains it nevertheless"
    if is_wrong and processes.RANK == 0:
        print(
            f"{'error' if ends else 'warning'}: {args.model} ({kind}): the policy's "
            f"log-probabilities of ten tokens differ by {shown}; rounding gives less than "
            f"{LIMITS[args.dtype]}: `python tests/families.py {args.model}` shows more"
            f"{nevertheless or ''}",
            file=sys.stderr,
        )
    elif kind not in families.TRIED and processes.RANK == 0:
        print(f"{args.model} is a {kind}, a family not tried before; the policy differs by {shown}")
    if ends:
        sys.exit(1)
