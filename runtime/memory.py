"""Estimate memory before a run, measure its peak, and make the CPU keep freed memory.

The activation memory per layer and token was counted on tensors without data
(tests/test_gpu_path.py). The constants were measured on a CPU.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import resource
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from runtime import processes

GIB = 2**30
LIBRARIES = 1.2  # GiB on a CPU: torch, transformers, vLLM
# On a CPU, each of the first GROWING_STEPS steps adds GROWTH GiB: memory kept by allocators, and
# kernels for new lengths.
GROWTH = 0.05
GROWING_STEPS = 12
GRAPHS = 1.0  # GiB of vLLM's CUDA graphs; in main memory while it sleeps
# A model with these settings caps or scales its logits; 1 and None do nothing. A trainer's Policy
# uses the head's output unchanged.
CHANGED_LOGITS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "logits_mup_width_multiplier",
)
# Families that vLLM computes with other attention masks or not at all, or that are untested.
NOT_SAMPLED = ("diffllama", "doge", "lfm2", "moshi", "phi4_multimodal", "xglm", "youtu")


@dataclasses.dataclass
class Machine:
    """The machine of an estimate: this one (this_machine), or one that somebody asks about."""

    on_gpu: bool
    processes: int  # all of the run's
    local_processes: int  # processes on one machine
    gib: float  # memory that one process may use, in GiB
    large_batches: bool = False  # whether vLLM uses its larger batches on this GPU


def this_machine():
    """Describe the machine that runs this process. A GPU's memory is the part that is free now."""
    large_batches = False
    if processes.ON_GPU:
        available, total = torch.cuda.mem_get_info(processes.DEVICE)
        large_batches = takes_large_batches(torch.cuda.get_device_name(), total)
    else:
        available = machine_bytes() / processes.LOCAL_WORLD_SIZE
    return Machine(
        on_gpu=processes.ON_GPU,
        processes=processes.WORLD_SIZE,
        local_processes=processes.LOCAL_WORLD_SIZE,
        gib=available / GIB,
        large_batches=large_batches,
    )


def takes_large_batches(name, total):
    """Return whether vLLM's batches on a GPU are up to 16,384 tokens and 1024 requests.

    Otherwise: 8192 and 256. As in vLLM's EngineArgs.get_batch_defaults. total: bytes of memory.
    """
    return total >= 160 * GIB or (total >= 70 * GIB and "a100" not in name.lower())


def estimate(config, args, head_chunk, machine=None):
    """Return (number of parameters, GiB needed, GiB available) for one process.

    Everything except the sampler is divided among a machine's processes (FSDP2). On a GPU, sampling
    and training take turns, and the larger one counts; on a CPU, both stay in memory. config: the
    model's; head_chunk: the number of tokens whose logits exist at once; machine: a Machine, or
    None for this one. ValueError if the trainers can't use the model or the teacher, or if the
    longest sequence is longer than the key-value cache.
    """
    if machine is None:
        machine = this_machine()
    context = args.max_prompt_tokens + args.max_response_tokens
    model = checked_shapes("--model", args.model, config, context)
    if args.has_sampler and is_recurrent(model.model):
        raise ValueError(
            f"--model {args.model} has recurrent layers or convolutions beside attention "
            f"({config.model_type}): only sft.py trains it"
        )
    if args.has_sampler and config.model_type in NOT_SAMPLED:
        raise ValueError(
            f"--model {args.model} is a {config.model_type}, which vLLM was not seen to compute as "
            "transformers does: only sft.py trains it"
        )
    if experts := stacked_weights(model):
        raise ValueError(
            f"--model {args.model} has weights that are stacks of matrices ({experts}): a mixture "
            "of experts is not supported"
        )
    width = width_of(args.dtype)
    longest = key_value_bytes(config, width) * context / GIB
    if args.has_sampler and longest > args.kv_cache_gb:
        raise ValueError(
            f"--kv_cache_gb is {args.kv_cache_gb}; one sequence of {context} tokens "
            f"(--max_prompt_tokens + --max_response_tokens) already needs {longest:.3f}"
        )
    n_params = sum(parameter.numel() for parameter in model.parameters())
    n_adapter = adapter_size(model, args.lora_rank)
    always = always_bytes(n_params, n_adapter, width, args, machine)
    if args.teacher:
        its_config = AutoConfig.from_pretrained(args.teacher, trust_remote_code=False)
        teacher = checked_shapes("--teacher", args.teacher, its_config, context)
        n_teacher = sum(parameter.numel() for parameter in teacher.parameters())
        always += width * n_teacher / machine.local_processes
    training = training_bytes(config, n_params, n_adapter, width, args, head_chunk, machine)
    sampling = 0
    if args.has_sampler:
        sampling = width * n_params + args.kv_cache_gb * GIB
        if machine.on_gpu:
            sampling += sampler_work_bytes(config, width, machine)
    if machine.on_gpu:
        needed = (always + max(training, sampling)) / GIB
    else:
        grown = GROWTH * min(args.steps or GROWING_STEPS, GROWING_STEPS)
        libraries = LIBRARIES * (2 if hasattr(args, "sampler_gpus") else 1)  # the sampler's process
        versions = version_bytes(n_params, args)
        needed = libraries + grown + (always + training + sampling + versions) / GIB
    return n_params, needed, machine.gib


def version_bytes(n_params, args):
    """Return the bytes of main memory that a process needs for --lag's snapshots of weights."""
    if "lag" not in args.__dataclass_fields__:
        return 0
    return (args.lag + 1) * width_of(args.dtype) * n_params


def main_memory(n_params, machine, args):
    """Return the GiB of main memory that all processes on a machine with GPUs need, at least.

    At the start, each process loads the whole model there, in float32.
    """
    each = LIBRARIES + GRAPHS + (4 * n_params + version_bytes(n_params, args)) / GIB
    return machine.local_processes * each


def width_of(dtype):
    """Return the bytes per number. dtype: its name."""
    return getattr(torch, dtype).itemsize


def shapes_of(config):
    """Build a configuration's model without weights: only the shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def checked_shapes(flag, name, config, context):
    """Return shapes_of a model that the trainers can use; ValueError for another model.

    flag, name: identify the model in errors; context: the most tokens of a sequence.
    """
    of_text = config.get_text_config()
    most = getattr(of_text, "max_position_embeddings", None) or math.inf
    if context > most:
        raise ValueError(
            f"--max_prompt_tokens + --max_response_tokens is {context}, and {name} takes only "
            f"{most} tokens"
        )
    if of_text is not config:
        raise ValueError(
            f"{flag} {name} keeps its language model in a part of its configuration, as models do "
            "that also take images: take a model of text alone"
        )
    check_rope(flag, name, config, context)
    try:
        model = shapes_of(config)
    except Exception as error:  # such as a missing library or an impossible value
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{flag} {name} can't be built by transformers: {reason}") from error
    has_parts = isinstance(getattr(model, "lm_head", None), nn.Linear) and hasattr(
        getattr(model, "model", None), "layers"
    )
    if not has_parts or getattr(config, "hidden_size_per_layer_input", None):
        raise ValueError(
            f"{flag} {name} is a {type(model).__name__}; the trainers need .model.layers and "
            ".lm_head in it, and layers that see no token but through the embedding"
        )
    for setting in CHANGED_LOGITS:
        value = getattr(config, setting, None)
        if value not in (None, 1):
            raise ValueError(
                f"{flag} {name} caps or scales its logits ({setting} is {value}), and the trainers "
                "don't: take a model such as Qwen2.5, Llama or SmolLM2"
            )
    try:
        key_value_bytes(config, 1)
    except Exception as error:  # transformers' own kind
        reason = str(error).partition(".")[0]
        raise ValueError(f"{flag} {name} has layers of different shapes: {reason}") from error
    return model


def check_rope(flag, name, config, context):
    """Raise ValueError if a token's RoPE angles depend on the length of the sequences next to it.

    Beyond the pretraining length, longrope changes angles, and in vLLM not for the same tokens.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # some have one per kind of layer
        is_long = isinstance(rope, dict) and rope.get("rope_type") == "longrope"
        if is_long and context > rope["original_max_position_embeddings"]:
            most = rope["original_max_position_embeddings"]
            raise ValueError(
                f"--max_prompt_tokens + --max_response_tokens is {context}, and {flag} {name} has "
                f"other angles beyond {most} tokens (longrope): the trainers need at most {most}"
            )


def is_recurrent(model):
    """Return whether layers pass on a state of their own, which no key-value cache holds."""
    layers = model.layers.modules()
    return model._is_stateful or any(isinstance(module, nn.Conv1d) for module in layers)


def stacked_weights(model):
    """Return the name of a weight that holds several matrices, as experts do; "" without one."""
    for name, module in model.model.layers.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
                return f"layers.{name}.{own_name}"
    return ""


def key_value_bytes(config, width):
    """Return the bytes that the key-value cache needs per token."""
    return 2 * width * config.num_hidden_layers * key_value_heads(config) * head_width(config)


def key_value_heads(config):
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_width(config):
    own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def intermediate_size(config):
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def adapter_size(model, rank):
    """Return the number of parameters of LoRA's adapters: on all linear layers but the head."""
    layers = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def always_bytes(n_params, n_adapter, width, args, machine):
    """Return the bytes a process always holds: its share of weights, AdamW, reference, critic.

    n_adapter: the number of parameters of LoRA's adapters; 0: all weights are trained.
    """
    trained = 12  # bytes per trained weight: itself and two moments, in float32
    if n_adapter:
        total = width * n_params + trained * n_adapter
    elif args.kl_coef > 0:
        total = (trained + width) * n_params
    else:
        total = trained * n_params
    if args.has_critic:
        total += trained * n_params  # the critic's gradients are freed before the policy's exist
    return total / machine.local_processes


def training_bytes(config, n_params, n_adapter, width, args, head_chunk, machine):
    """Return the bytes that a process holds only in training: gradients, activations and logits."""
    tokens = max(args.micro_batch_tokens, args.max_prompt_tokens + args.max_response_tokens)
    only_adapters = n_adapter and not args.has_critic  # the critic has no adapters
    gradients = 4 * (n_adapter if only_adapters else n_params) / machine.local_processes
    embedding = config.vocab_size * config.hidden_size
    copies = 0  # bytes of weight copies in --dtype
    if machine.processes > 1:
        # FSDP2 has gathered at once: embedding and head, and two layers.
        gradients += width * (2 * embedding + 2 * n_params / config.num_hidden_layers)
    elif width == 2 and not only_adapters:
        copies = 2 * n_params  # autocast's
    # The head's backward pass. Logits, log-probabilities and their gradient, in float32; the head's
    # input and the state of the last norm; the head's gradient, plus a copy if several chunks add
    # to it.
    logits = 4 * min(tokens, head_chunk) * config.vocab_size
    head = 3 * logits + 20 * tokens * config.hidden_size
    if tokens > head_chunk and not only_adapters:
        head += 6 * embedding
    of_layer = layer_bytes(config, width, args)
    if not machine.on_gpu:
        of_layer *= 1.4 if width == 2 else 1.15  # measured on a CPU (kk_tiny and SmolLM2-135M)
    if not args.gradient_checkpointing:
        return gradients + tokens * of_layer * config.num_hidden_layers + copies + head
    inputs = 4 * tokens * config.hidden_size * config.num_hidden_layers  # of the layers, float32
    # Other peaks: the end of the forward pass, with autocast's copies; a layer's backward pass.
    forward = copies + 2.5 * logits
    layer = tokens * (of_layer + 3 * width * intermediate_size(config))
    return gradients + inputs + max(forward, head, layer)


def layer_bytes(config, width, args):
    """Return the bytes per token that a layer keeps for its backward pass, if not compiled."""
    heads = config.num_attention_heads
    queries = heads * head_width(config)
    keys = queries * key_value_heads(config) // heads
    if args.dtype != "bfloat16":
        keys = queries  # repeated per head: see placement.py
    # In float32, each of the two norms keeps its input and its normalised input. Then the inputs of
    # the products q, k, v, gate and up: a rounded copy for each, or one per norm in float32.
    copies = 5 if width == 2 else 2
    residual = (16 + copies * width) * config.hidden_size
    attention = 2 * width * (queries + keys) + 4 * heads
    # gate, SiLU of the gate, up, and the product of the last two
    feed_forward = 4 * width * intermediate_size(config)
    return residual + attention + feed_forward


def sampler_work_bytes(config, width, machine):
    """Return vLLM's working memory on a GPU, besides weights and cache, at default batch sizes.

    Not measured on a GPU. CUDA graphs; per token, the numbers of a feed-forward layer and of the
    residual stream; per request, its logits, in --dtype and three times in float32.
    """
    tokens, requests = (16384, 1024) if machine.large_batches else (8192, 256)
    of_token = 3 * intermediate_size(config) + 4 * config.hidden_size
    logits = requests * config.vocab_size * (width + 12)
    return GRAPHS * GIB + tokens * of_token * width + logits


def machine_bytes():
    """Return the memory of this machine, or of this container if it may use less."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        there = min(there, int(limit.read_text()))
    return there


def keep_freed_memory():
    """Make this process keep memory that it has freed, for its next tensors. On a CPU only.

    By default, glibc returns every freed tensor of 32 MB or more to the system and gets it back
    zeroed, which takes a third of an update's time (SmolLM2-135M). oneDNN and torch keep a kernel
    for each of the last 1024 shapes. Few lengths recur, so they are told to keep 64 and 16: kk_tiny
    takes 1.6 GiB instead of 2.6 after 40 steps.
    """
    if processes.ON_GPU:
        return
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no allocation gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def peak_gb():
    """Return GiB: on a GPU, in use now with caches; on a CPU, this process's peak so far."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from KiB
