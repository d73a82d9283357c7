"""Estimate memory before a run, measure its peak, and make the CPU keep freed memory.

The activation memory per layer and token was counted on tensors without data
(tests/test_gpu_path.py). The constants were measured on a CPU.
"""

import contextlib
import ctypes
import dataclasses
import os
import resource
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from runtime import distributed, models

GIB = 2**30
LIBRARIES = 1.8  # GiB on a CPU: torch, transformers, vLLM, and 0.6 that the first steps add
IN_MAIN = 3  # GiB of main memory with a GPU: torch, CUDA and vLLM, in each process
GRAPHS = 1.0  # GiB of vLLM's CUDA graphs


@dataclasses.dataclass
class Machine:
    """The machine of an estimate: this one (this_machine), or one that somebody asks about."""

    on_gpu: bool
    processes: int  # of the run on this machine; each machine holds all shards
    gib: float  # memory that one process may use, in GiB


def this_machine():
    """Describe the machine that runs this process. A GPU's memory is the part that is free now."""
    available = machine_bytes() / distributed.LOCAL_WORLD_SIZE
    if distributed.ON_GPU:
        available, _ = torch.cuda.mem_get_info(distributed.DEVICE)
    return Machine(distributed.ON_GPU, distributed.LOCAL_WORLD_SIZE, gib=available / GIB)


def estimate(config, args, head_chunk: int, machine=None) -> tuple:
    """Return (number of parameters, GiB needed, GiB available) for one process.

    Everything except the sampler is divided among a machine's processes (FSDP2). On a GPU, sampling
    and training take turns, and the larger one counts; on a CPU, both stay in memory. config: the
    model's; head_chunk: the number of tokens whose logits exist at once; machine: a Machine, or
    None for this one. ValueError if the trainers can't use the model or the teacher, or if the
    longest sequence is longer than the key-value cache.
    """
    machine = machine or this_machine()
    context = args.max_prompt_tokens + args.max_response_tokens
    width = getattr(torch, args.dtype).itemsize  # bytes per number
    model = usable_shapes("--model", args.model, config, context, args.lora_rank)
    longest = key_value_bytes(config, width) * context / GIB
    if args.has_sampler and longest > args.kv_cache_gb:
        raise ValueError(
            f"--kv_cache_gb is {args.kv_cache_gb}; one sequence of {context} tokens "
            f"(--max_prompt_tokens + --max_response_tokens) already needs {longest:.3f}"
        )
    n_params = model.num_parameters()
    n_adapter = adapter_size(model, args.lora_rank)
    always = always_bytes(n_params, n_adapter, width, args, machine)
    if args.teacher:
        its_config = AutoConfig.from_pretrained(args.teacher, trust_remote_code=False)
        its_config = models.language_config(its_config)
        teacher = usable_shapes("--teacher", args.teacher, its_config, context)
        always += width * teacher.num_parameters() / machine.processes
    training = training_bytes(config, n_params, n_adapter, width, args, head_chunk, machine)
    sampling = 0
    if args.has_sampler:
        sampling = width * n_params + args.kv_cache_gb * GIB
    if not machine.on_gpu:
        libraries = LIBRARIES * (2 if hasattr(args, "sampler_gpus") else 1)  # the sampler's process
        versions = (args.lag + 1) * width * n_params if args.lag else 0  # snapshots of the weights
        needed = libraries + (always + training + sampling + versions) / GIB
        return n_params, needed, machine.gib
    if args.has_sampler:
        sampling += sampler_work_bytes(config, width, machine)
    return n_params, (always + max(training, sampling)) / GIB, machine.gib


def check_main(args, n_params: int, n_teacher) -> None:
    """Raise ValueError if this machine has less main memory than its processes load with GPUs.

    Each process loads a whole model, the trained ones in float32, before its GPU gets it. Later,
    vLLM's weights and the snapshots of --lag wait there, in --dtype.
    """
    width = getattr(torch, args.dtype).itemsize
    waiting = (args.lag + 2 if args.lag else 1) * width * n_params
    loaded = max(4 * n_params, width * n_teacher, waiting)
    needed = distributed.LOCAL_WORLD_SIZE * (IN_MAIN + loaded / GIB)
    there = machine_bytes() / GIB
    if needed > there:
        raise ValueError(
            f"{args.model} needs about {needed:.1f} GiB of main memory, and there are {there:.1f}: "
            f"each of {distributed.LOCAL_WORLD_SIZE} processes loads the model there before its "
            "GPU gets it. A smaller --model or fewer processes need less"
        )


def shapes_of(config):
    """Build a configuration's model without weights: only the shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def usable_shapes(flag: str, name, config, context: int, lora_rank: int = 0):
    """Return shapes_of a model that the trainers can use; ValueError for another model.

    flag, name: identify the model in errors; context: the most tokens of a sequence.
    """
    try:
        model = shapes_of(config)
    except Exception as error:  # transformers has no language model for it
        raise ValueError(f"{flag} {name} is a {config.model_type}: {error}") from error
    models.check_family(flag, name, config, model, lora_rank)
    most = getattr(config, "max_position_embeddings", None) or context
    if context > most:
        raise ValueError(
            f"--max_prompt_tokens + --max_response_tokens is {context}, and {flag} {name} takes "
            f"only {most} tokens"
        )
    return model


def key_value_bytes(config, width):
    """Return the bytes that the key-value cache needs per token. width: bytes per number."""
    numbers = 0
    for layer, keeps_state in zip(layers_of(config), models.recurrent_layers(config)):
        if keeps_state:
            continue
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        numbers += 2 * heads * head_width(layer)
    return width * numbers


def layers_of(config):
    """Return a configuration per layer. Gemma 4's layers have heads of two widths."""
    return getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers


def head_width(config):
    own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def feed_forward_width(config):
    """Return the width of a layer's feed-forward parts that one token goes through."""
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if not models.num_experts(config):
        return dense
    of_expert = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return config.num_experts_per_tok * of_expert + shared


def is_guess(config):
    """Return whether the estimate was not measured for such a model."""
    is_tried = config.model_type in models.TRIED
    return not is_tried or models.is_recurrent(config) or models.num_experts(config) > 0


def adapter_size(model, rank):
    """Return the number of parameters of LoRA's adapters: on all linear layers but the head."""
    layers = [module for module in model.model.modules() if isinstance(module, nn.Linear)]
    return sum(rank * (layer.in_features + layer.out_features) for layer in layers)


def always_bytes(n_params: int, n_adapter: int, width, args, machine):
    """Return the bytes a process always holds: its share of weights, AdamW, reference, critic.

    n_adapter: the number of parameters of LoRA's adapters; 0: all weights are trained. width: bytes
    per number.
    """
    trained = 12  # bytes per trained weight: itself and two moments, in float32
    total = trained * (n_adapter or n_params)
    if n_adapter or args.kl_coef > 0:  # frozen weights: LoRA's base, which is also its reference
        total += width * n_params
    if args.has_critic:
        total += trained * n_params  # the critic's gradients are freed before the policy's exist
    return total / machine.processes


def training_bytes(config, n_params: int, n_adapter: int, width, args, head_chunk: int, machine):
    """Return the bytes that a process holds only in training: gradients, activations and logits.

    sdpo.py's rows with hints have up to twice as many tokens, and no gradient. That needs less: a
    row of twice the length took 0.20 GiB where training took 0.32 with gradient_checkpointing
    (kk_tiny, 8000 tokens, on a CPU), and 0.33 where training took 1.5 (SmolLM2-135M, 2048 tokens).
    """
    tokens = max(args.micro_batch_tokens, args.max_prompt_tokens + args.max_response_tokens)
    only_adapters = n_adapter and not args.has_critic  # the critic has no adapters
    gradients = 4 * (n_adapter if only_adapters else n_params) / machine.processes
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
    copies_of_logits = 4 if getattr(config, "final_logit_softcapping", None) else 3
    if hasattr(args, "entropy_coef"):
        copies_of_logits += 2  # probabilities, and the gradient of the entropy (entropy_bonus.py)
    head = copies_of_logits * logits + 20 * tokens * config.hidden_size
    if tokens > head_chunk and not only_adapters:
        head += 6 * embedding
    # Bytes per token that a layer keeps for its backward pass, if not compiled: the residual stream
    # in the norms and rounded for the products; queries, output, and keys and values, which may be
    # repeated per head; gate, its SiLU, up and their product.
    forward_width = feed_forward_width(config)
    queries = max(layer.num_attention_heads * head_width(layer) for layer in layers_of(config))
    of_layer = 26 * config.hidden_size + 4 * width * (queries + forward_width)
    if not machine.on_gpu:
        of_layer *= 1.4  # measured on a CPU (kk_tiny and SmolLM2-135M)
    if not args.gradient_checkpointing:
        return gradients + tokens * of_layer * config.num_hidden_layers + copies + head
    inputs = 4 * tokens * config.hidden_size * config.num_hidden_layers  # of the layers, float32
    # Other peaks: the end of the forward pass, with autocast's copies; a layer's backward pass.
    forward = copies + 2.5 * logits
    layer = tokens * (of_layer + 3 * width * forward_width)
    return gradients + inputs + max(forward, head, layer)


def sampler_work_bytes(config, width, machine):
    """Return vLLM's working memory on a GPU, besides weights and cache, at default batch sizes.

    Not measured on a GPU. CUDA graphs; per token, the numbers of a feed-forward layer and of the
    residual stream; per request, its logits, in --dtype and three times in float32.
    """
    tokens, requests = batch_sizes(machine.gib)
    of_token = 3 * feed_forward_width(config) + 4 * config.hidden_size
    logits = requests * config.vocab_size * (width + 12)
    return GRAPHS * GIB + tokens * of_token * width + logits


def batch_sizes(gib) -> tuple:
    """Return the most tokens and requests in vLLM's batches on a GPU with this much free memory.

    As in vLLM's EngineArgs.get_batch_defaults, which takes the smaller ones on an A100, too.
    """
    return (16384, 1024) if gib >= 60 else (8192, 256)


def machine_bytes():
    """Return the memory of this machine, or of this container if it may use less."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        there = min(there, int(limit.read_text()))
    return there


def keep_freed_memory() -> None:
    """Make this process keep memory that it has freed, for its next tensors. On a CPU only.

    By default, glibc returns every freed tensor of 32 MB or more to the system and gets it back
    zeroed, which takes a third of an update's time (SmolLM2-135M). oneDNN and torch keep a kernel
    for each of the last 1024 shapes. Few lengths recur, so they are told to keep 64 and 16: kk_tiny
    takes 1.6 GiB instead of 2.6 after 40 steps.
    """
    if distributed.ON_GPU:
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
