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

from runtime import processes

GIB = 2**30
LIBRARIES = 1.2  # GiB on a CPU: torch, transformers, vLLM
# On a CPU, each of the first GROWING_STEPS steps adds GROWTH GiB: memory kept by allocators, and
# kernels for new lengths.
GROWTH = 0.05
GROWING_STEPS = 12
GRAPHS = 1.0  # GiB of vLLM's CUDA graphs; in main memory while it sleeps
# Text models without experts whose head is a plain linear layer. vLLM and transformers were seen to
# compute the same for the first ones: benchmarks/results/families.md.
FAMILIES = """apertus arcee bitnet cwm ernie4_5 exaone4 gemma gemma3_text glm glm4 granite
    granite_swa helium hunyuan_v1_dense hyperclovax jais2 llama ministral ministral3 mistral
    nemotron olmo olmo2 olmo3 persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm
    starcoder2""".split()
ONLY_SFT = "diffllama doge falcon_h1 lfm2 olmo_hybrid qwen3_5_text youtu".split()
# A model with these settings caps or scales its logits; 1 and None do nothing. A trainer's Policy
# uses the head's output unchanged.
CHANGED_LOGITS = ("final_logit_softcapping", "logits_scaling", "lm_head_multiplier")


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
    machine = machine or this_machine()
    context = args.max_prompt_tokens + args.max_response_tokens
    model = checked_shapes("--model", args.model, config, context, args.has_sampler)
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
        teacher = checked_shapes("--teacher", args.teacher, its_config, context, False)
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


def checked_shapes(flag, name, config, context, for_sampler):
    """Return shapes_of a model that the trainers can use; ValueError for another model.

    flag, name: identify the model in errors; context: the most tokens of a sequence; for_sampler:
    whether vLLM computes the model, too.
    """
    kind = config.model_type
    if kind not in FAMILIES and (for_sampler or kind not in ONLY_SFT):
        only = "only sft.py trains it" if kind in ONLY_SFT else "docs/data.md says which models are"
        raise ValueError(f"{flag} {name} is a {kind}, which is not supported here: {only}")
    for setting in CHANGED_LOGITS:
        value = getattr(config, setting, None)
        if value not in (None, 1):
            raise ValueError(
                f"{flag} {name} caps or scales its logits ({setting} is {value}), and the trainers "
                "don't: take a model such as Qwen2.5, Llama or SmolLM2"
            )
    most = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this length, it changes all angles, and in vLLM not for the same tokens.
        most = rope["original_max_position_embeddings"]
    if context > most:
        raise ValueError(
            f"--max_prompt_tokens + --max_response_tokens is {context}, and {flag} {name} takes "
            f"only {most} tokens here"
        )
    try:
        return shapes_of(config)
    except Exception as error:  # such as a missing library or an impossible value
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{flag} {name} can't be built by transformers: {reason}") from error


def is_recurrent(model):
    """Return whether layers pass on a state of their own, which no key-value cache holds."""
    layers = model.layers.modules()
    return model._is_stateful or any(isinstance(module, nn.Conv1d) for module in layers)


def key_value_bytes(config, width):
    """Return the bytes that the key-value cache needs per token."""
    return 2 * width * config.num_hidden_layers * key_value_heads(config) * head_width(config)


def key_value_heads(config):
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_width(config):
    own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


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
    layer = tokens * (of_layer + 3 * width * config.intermediate_size)
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
    feed_forward = 4 * width * config.intermediate_size
    return residual + attention + feed_forward


def sampler_work_bytes(config, width, machine):
    """Return vLLM's working memory on a GPU, besides weights and cache, at default batch sizes.

    Not measured on a GPU. CUDA graphs; per token, the numbers of a feed-forward layer and of the
    residual stream; per request, its logits, in --dtype and three times in float32.
    """
    tokens, requests = (16384, 1024) if machine.large_batches else (8192, 256)
    of_token = 3 * config.intermediate_size + 4 * config.hidden_size
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
