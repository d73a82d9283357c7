"""Memory: an estimate before a run, the peak during it, and a setting that makes the CPU faster.

What a layer keeps of a token was measured on a CPU (kk_tiny and SmolLM2-135M), as were the
constants.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import resource
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from runtime import processes

GIB = 2**30
LIBRARIES = 1.2  # GiB on a CPU: torch, transformers, vLLM
GROWTH = 0.05  # GiB a step on a CPU: what allocators keep, and kernels for lengths not met before …
GROWING = 12  # … in so many first steps


@dataclasses.dataclass
class Machine:
    """What an estimate is for: this machine (this_machine), or one that somebody asks about."""

    on_gpu: bool
    processes: int  # of the run
    local_processes: int  # how many of them are on one machine
    gib: float  # memory that one process may use, in GiB


def this_machine():
    """The machine that this process runs on. On a GPU its memory is what is free now."""
    if processes.ON_GPU:
        available = torch.cuda.mem_get_info(processes.DEVICE)[0]
    else:
        available = machine_bytes() / processes.LOCAL_WORLD_SIZE
    return Machine(
        on_gpu=processes.ON_GPU,
        processes=processes.WORLD_SIZE,
        local_processes=processes.LOCAL_WORLD_SIZE,
        gib=available / GIB,
    )


def estimate(config, args, head_chunk, machine=None):
    """(number of parameters, GiB needed, GiB available) for one process.

    What is needed is an estimate.

    Everything except the sampler is divided among a machine's processes (FSDP2). On a GPU the
    sampler gives its memory back while the trainer works, and gradients and activations are gone
    while it samples: the larger of the two counts. On a CPU everything stays, and the libraries
    count too.

    config: the model's; head_chunk: the number of tokens whose logits exist at one time; machine: a
    Machine, or None for this one. ValueError if the longest sequence allowed is longer than the
    model's context or than the key-value cache, or if the model has no .model and .lm_head.
    """
    if machine is None:
        machine = this_machine()
    context = args.max_prompt_tokens + args.max_response_tokens
    most = getattr(config, "max_position_embeddings", math.inf)
    if context > most:
        raise ValueError(
            f"--max_prompt_tokens + --max_response_tokens is {context}, and {args.model} takes "
            f"only {most} tokens"
        )
    with torch.device("meta"):  # the shapes alone
        model = AutoModelForCausalLM.from_config(config)
    if not (hasattr(model, "model") and hasattr(model, "lm_head")):
        name = type(model).__name__
        raise ValueError(
            f"--model {args.model} is a {name}; the trainers need .model and .lm_head in it"
        )
    width = 2 if args.dtype == "bfloat16" else 4  # bytes of a number
    longest = key_value_bytes(config, width) * context / GIB
    if longest > args.kv_cache_gb:
        raise ValueError(
            f"--kv_cache_gb is {args.kv_cache_gb}; one sequence of {context} tokens "
            f"(--max_prompt_tokens + --max_response_tokens) already needs {longest:.3f}"
        )
    n_params = sum(parameter.numel() for parameter in model.parameters())
    always = always_bytes(n_params, width, args, machine)
    training = training_bytes(config, n_params, width, args, head_chunk, machine)
    sampling = width * n_params + args.kv_cache_gb * GIB
    if not hasattr(args, "temperature"):  # sft.py has no sampler
        sampling = 0
    if machine.on_gpu:
        needed = (always + max(training, sampling)) / GIB
    else:
        grown = GROWTH * min(args.steps or GROWING, GROWING)
        needed = LIBRARIES + grown + (always + training + sampling) / GIB
    return n_params, needed, machine.gib


def key_value_bytes(config, width):
    """Bytes that the key-value cache needs for one token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_width = getattr(config, "head_dim", None)
    if not head_width:
        head_width = config.hidden_size // config.num_attention_heads
    return 2 * width * config.num_hidden_layers * heads * head_width


def always_bytes(n_params, width, args, machine):
    """What a process always holds: its share of weights, AdamW's state, reference and critic.

    Some scripts have no reference (reinforce.py has no --kl_coef), and one has a critic (ppo.py).
    """
    of_a_weight = 12  # the weight and two moments, in float32
    if getattr(args, "kl_coef", 0):
        of_a_weight += width
    if hasattr(args, "value_lr"):
        of_a_weight += 12  # its gradients come and go before the policy's
    return of_a_weight * n_params / machine.local_processes


def training_bytes(config, n_params, width, args, head_chunk, machine):
    """What a process holds only while it trains: gradients, activations and logits."""
    tokens = max(args.micro_batch_tokens, args.max_prompt_tokens + args.max_response_tokens)
    kept = 55 + 10 * width  # bytes that a layer keeps of each of a token's numbers
    if args.gradient_checkpointing:
        kept = 2 * width
    gradients = 4 * n_params / machine.local_processes
    if machine.processes > 1:
        # What FSDP2 has gathered at one time: embedding and head, and two layers.
        num_gathered = 2 * config.vocab_size * config.hidden_size
        num_gathered += 2 * n_params / config.num_hidden_layers
        gradients += width * num_gathered
    elif args.dtype == "bfloat16":
        gradients += 2 * n_params  # autocast's copies of the weights
    activations = tokens * kept * config.hidden_size * config.num_hidden_layers
    # the logits, what they go through, and the way back
    logits = 12 * min(tokens, head_chunk) * config.vocab_size
    return gradients + activations + logits


def machine_bytes():
    """The memory of this machine, or of this container if it may use less."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        there = min(there, int(limit.read_text()))
    return there


def keep_freed_memory():
    """Makes this process keep memory that it has freed, for its next tensors. On a CPU only.

    By default glibc gives every freed tensor of 32 MB or more back to the system and gets it anew,
    zeroed: a third of an update's time (SmolLM2-135M). Nothing happens with another C library.
    oneDNN keeps a kernel for each of the last 1024 shapes it met. Lengths differ from pass to pass
    and few come again, so it is told to keep 64.
    """
    if processes.ON_GPU:
        return
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no allocation gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def peak_gb():
    """GiB. On a GPU: in use now, caches included. On a CPU: the most this process ever had."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from KiB
