"""Check before training that the policy, transformers and vLLM compute the same model.

The policy calls the layers and the head of a transformers model, and passes.logits; a family may do
more. vLLM has code of its own, which may lose a weight on the way. So each run begins with ten
tokens, whose log-probabilities all three compute, after the policy's weights were changed and
copied to vLLM. Afterwards the policy has its own weights again.
"""

import contextlib
import sys

import torch
from torch.distributed.fsdp import FSDPModule

from runtime import engine, families, lora, passes, processes

TOKENS = 10
PROMPT = 256  # the most tokens of the prompt
# nats: the mean |difference| of a token's log-probability, at most. Rounding alone gives a tenth.
LIMITS = {"bfloat16": 0.3, "float16": 0.05, "float32": 0.002}


def check(policy, llm, sync_weights, problem, args):
    """End the run with one line, exit code 1, if the three compute different models.

    problem: its prompt is used. All processes must call it. It costs a sync, ten tokens and a few
    forward passes, and leaves torch's random state as it was.
    """
    with changed_weights(policy):
        sync_weights(policy, llm, args)
        compare(policy, problem, ten_tokens(llm, problem), args)


def check_policy(policy, problem, args):
    """As check, of the policy and transformers alone: for a run without vLLM, or a teacher."""
    compare(policy, problem, None, args)


@contextlib.contextmanager
def changed_weights(policy):
    """Multiply every second number of each weight by 1.1; afterwards all are the same bit for bit.

    Not every number, because a norm after a weight would cancel its factor. LoRA's matrices B,
    which are zero, get 0.01 added. The weights' own numbers wait in main memory.
    """
    kept = []
    with torch.no_grad():
        for name, weight in lora.all_tensors(policy):
            weight = getattr(weight, "_local_tensor", weight)  # this process's shard
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
    devices = [processes.DEVICE] if processes.ON_GPU else []
    with torch.random.fork_rng(devices=devices):
        engine.empty_prefix_cache(llm)
        prompts = [{"prompt_token_ids": problem["prompt_ids"][:PROMPT]}]
        [output] = llm.generate(prompts, params, use_tqdm=False)
        engine.empty_prefix_cache(llm)
    return output.outputs[0]


@torch.no_grad()
def compare(policy, problem, response, args):
    """End the run if the log-probabilities of a response differ. response: None: of the prompt."""
    ids = problem["prompt_ids"][:PROMPT]
    if response:
        ids = [*ids, *response.token_ids]
    # So many equal rows that it pays to share their prompt, as the rows of a group do.
    num_rows = 2 + passes.PASS_COST // max(1, len(ids) - TOKENS)
    ids = torch.tensor([ids] * num_rows, device=processes.DEVICE)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, max(1, ids.shape[1] - TOKENS) :] = True
    with torch.compiler.set_stance("force_eager"):  # a program for these shapes would take seconds
        logp = policy(ids, mask, 1.0)[0][mask].view(num_rows, -1)
        of_transformers = own_log_probs(policy, ids[:1], args)[mask[0, 1:]]
    gaps = {"transformers": (logp - of_transformers).abs().mean().item()}
    if response:
        of_vllm = torch.tensor(response.logprobs.logprobs, device=logp.device)
        gaps["vLLM"] = (logp - of_vllm).abs().mean().item()
    report(gaps, policy.lm.config.model_type, args)


def own_log_probs(policy, ids, args):
    """Return transformers' own log-probabilities of ids [1, T] without the first: [T − 1]."""
    if isinstance(policy, FSDPModule):
        policy.unshard()  # embedding and head, which no layer gathers
    dtype = getattr(torch, args.dtype)
    with torch.autocast(processes.DEVICE.type, dtype, enabled=dtype != torch.float32):
        logits = policy.lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
    if isinstance(policy, FSDPModule):
        policy.reshard()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def report(gaps, kind, args):
    """End the run if a gap is too large; say so if the model's family was not tried before."""
    limit = LIMITS[args.dtype]
    shown = ", ".join(f"{gap:.2g} nats from {name}" for name, gap in gaps.items())
    is_wrong = any(not gap <= limit for gap in gaps.values())  # also if it is NaN
    ends = processes.all_reduce(is_wrong) and getattr(args, "stop_at_gap", True)
    if is_wrong:
        print(
            f"{'error' if ends else 'warning'}: {args.model} ({kind}): the policy's "
            f"log-probabilities of ten tokens differ by {shown}, and by at most {limit} if they "
            "compute the same model (--no_stop_at_gap trains it nevertheless); "
            f"`python tests/families.py {args.model}` shows more",
            file=sys.stderr,
        )
    elif kind not in families.TRIED and processes.RANK == 0:
        print(f"{args.model} is a {kind}, a family not tried before; the policy differs by {shown}")
    if ends:
        sys.exit(1)
