"""Set up vLLM's engine: everything that depends on the machine, not on the task."""

import contextlib
import functools
import hashlib
import importlib
import os
import shutil
import sys
import types

import torch
from torch import (
    nn,
    set_num_threads,  # vLLM replaces torch's function by one that does nothing
)
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import is_torchvision_available

from runtime import chats, distributed, lora, machine, models, terminal
from runtime.distributed import ON_GPU, WORLD_SIZE

# At the program's start; common_options changes both for a small model.
NUM_THREADS = torch.get_num_threads()
BOUND_TO = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
# tqdm's own format without vLLM's tokens per second, which would leave the bar one column.
NARROW = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"

# Tokens per block of a CPU's key-value cache, and per forward pass. The prefix cache holds whole
# blocks. With vLLM's 128 tokens, the responses of a group would each compute up to 127 tokens of
# their prompt again. A pass of BATCH tokens takes several prompts, so that they start together.
BLOCK = 32
BATCH = 1024

FINGERPRINT_TOKENS = 32


def options(args):
    """Return vLLM's options for a trainer on this machine. Call it before importing vLLM."""
    context = args.max_prompt_tokens + args.max_response_tokens
    chosen = common_options(args.model, context, args.kv_cache_gb) | attention(args.dtype)
    if ON_GPU:
        chosen["enable_sleep_mode"] = True
        chosen["sleep_mode_offload_cudagraph"] = True  # otherwise its CUDA graphs stay on the GPU
    elif not args.compile:
        # vLLM would compile a function of its own at the first request: seconds without any gain.
        torch.compiler.set_stance("force_eager")
    if not ON_GPU and hasattr(args, "max_turns"):
        # A turn finds the earlier turns' keys and values, with a small model, too.
        chosen["block_size"] = BLOCK
    if WORLD_SIZE > 1:
        # torchrun has started the processes; each process has its own engine.
        chosen["distributed_executor_backend"] = "external_launcher"
    return chosen


def common_options(model, context: int, kv_cache_gb):
    """Return the options that a trainer and evaluate.py share, and set variables that vLLM reads.

    context: the most tokens of a sequence; kv_cache_gb: GiB of keys and values, None for all that a
    GPU has left.
    """
    # Run vLLM in this process, so that weights can be copied to it.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    cores = ",".join(map(str, distributed.own_cores()))
    if not ON_GPU and machine.is_small_model(model):
        set_num_threads(machine.THREADS_OF_SMALL_SAMPLER)
        cores = "nobind"  # given cores, vLLM would set the number of threads
    elif not ON_GPU and torch.get_num_threads() < NUM_THREADS:  # evaluate.py had a small one before
        set_num_threads(NUM_THREADS)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = BOUND_TO or cores
    # FlashInfer's sampler is for top-k and top-p, which we don't use. nvcc would compile it at the
    # start. On most machines nvcc is not on the PATH, even if pip has installed one.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # Without it, Triton's float32 products, as in vLLM's attention, are rounded to TF32.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    with_images = models.reads_images(config)
    config = models.language_config(config)
    give_own_class(type(config))
    chosen = {
        "max_model_len": context,
        "generation_config": "vllm",  # ignore the model's own top-p, top-k and temperature
        # Read the same files as transformers. Folders from Mistral hold others, too.
        "tokenizer_mode": "hf",
        "config_format": "hf",
        "load_format": "hf",
        "use_tqdm_on_load": False,
        "trust_remote_code": False,
    }
    if kv_cache_gb is not None:
        chosen["kv_cache_memory_bytes"] = int(kv_cache_gb * 2**30)
        if ON_GPU:  # vLLM requires this fraction of memory to be free, whatever the cache's size
            chosen["gpu_memory_utilization"] = 0.1
    if not ON_GPU:
        chosen["enforce_eager"] = True
        chosen["enable_chunked_prefill"] = False  # seeded requests fail with it on a CPU
        chosen["max_num_batched_tokens"] = context
        # kk_tiny keeps vLLM's sizes, because the digits of its saved runs depend on them.
        if not machine.is_small_model(model) and not models.is_recurrent(config):
            chosen["block_size"] = BLOCK
            chosen["max_num_batched_tokens"] = max(context, BATCH)
    if with_images:  # the language model alone; load_weights has to give it its weights
        chosen["hf_overrides"] = functools.partial(without_images, config)
        chosen["load_format"] = "dummy"  # vLLM would look for weights by the language model's names
    if not ON_GPU and config.model_type.startswith("qwen3_5"):
        import_without_torchvision(config.architectures)
    if models.is_recurrent(config):
        chosen["enable_prefix_caching"] = False  # it would have to keep states in the middle
    return chosen


def attention(dtype) -> dict:
    """Return the option that names vLLM's attention kernels, if vLLM's own choice would not do."""
    # On a B200 vLLM prefers FlashInfer, whose kernels nvcc would compile at the start.
    if ON_GPU and torch.cuda.get_device_capability()[0] == 10 and dtype != "float32":
        return {"attention_backend": "FLASH_ATTN"}
    return {}


def without_images(text_config, config):
    """Return the language model's configuration in place of one with images. vLLM calls it."""
    return text_config if models.reads_images(config) else config


def load_language_model(llm, model, dtype) -> None:
    """Load the weights of a folder with images (common_options); without images, vLLM has them."""
    options = models.text_only(model)
    if "config" in options:
        lm = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **options)
        load_weights(llm, lora.all_tensors(lm, remove_duplicate=False))


def import_without_torchvision(architectures) -> None:
    """Let vLLM import Qwen3.5's classes on a CPU without torchvision, which only images need.

    The torchvision that vLLM's CPU build asks for is one for CUDA, and does not load. Once vLLM
    has the classes, it does not look at them in a process of its own, without the stand-ins.
    """
    if importlib.util.find_spec("torchvision"):
        return
    is_torchvision_available()  # remembers that it is not
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    sys.modules |= {name: types.ModuleType(name) for name in names}
    sys.modules[names[-1]].functional = None
    try:
        importlib.import_module("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    finally:
        for name in names:
            del sys.modules[name]
    from vllm.model_executor.models import ModelRegistry, qwen3_5

    for name in architectures:
        ModelRegistry.register_model(name, getattr(qwen3_5, name))


@functools.cache  # once per class
def give_own_class(config_class) -> None:
    """Make vLLM use a subclass of transformers' class of a model, and the trainer the class itself.

    If vLLM has no implementation of a model, it changes the class that AutoModel names, which could
    then no longer be called without vLLM.
    """
    if config_class in AutoModel._model_mapping:
        of_transformers = AutoModel._model_mapping[config_class]
        names = {"__module__": of_transformers.__module__, "__doc__": of_transformers.__doc__}
        own = type(of_transformers.__name__, (of_transformers,), names)
        AutoModel.register(config_class, own, exist_ok=True)


@functools.cache
def end_tokens(model) -> list:
    """Return the tokens that end a response. Some models have several; vLLM would know only one.

    The chat template's end of turn is one of them, even if the configuration names another token.
    """
    end = None
    with contextlib.suppress(OSError):  # if it has no generation_config.json
        end = GenerationConfig.from_pretrained(model).eos_token_id
    if end is None:
        end = AutoConfig.from_pretrained(model, trust_remote_code=False).eos_token_id
    ends = [end] if isinstance(end, int) else list(end or [])
    with contextlib.suppress(OSError, ValueError):  # if it has no tokenizer
        ends.append(chats.end_of_turn(AutoTokenizer.from_pretrained(model, mistral_format=False)))
    return [end for end in dict.fromkeys(ends) if end is not None]


def request_seed(seed: int, when, problem_id):
    """Return a seed for one prompt at one time, the same on any number of processes.

    when: the step, or "test" for all evaluations. vLLM adds j to it for response j of a group.
    """
    digest = hashlib.sha256(f"{seed}/{when}/{problem_id}".encode()).digest()
    return int.from_bytes(digest[:6])  # 48 bits, so that vLLM's additions never overflow


def progress_bar(when):
    """Return a function that vLLM calls instead of tqdm, or False. when: as in generate."""
    is_test = str(when).startswith("test")
    return bar_with(f"evaluating{str(when)[4:]}" if is_test else f"step {when}: sampling")


def bar_with(title: str, **options):
    """Return a tqdm with this title and these options, to pass to vLLM as use_tqdm.

    False if no bars are shown, because vLLM would divide by the bar's elapsed seconds, 0.
    """
    if not terminal.shows_bars():
        return False

    def bar(*items, **of_vllm):
        fits = {"bar_format": NARROW} if shutil.get_terminal_size().columns < 120 else {}
        return tqdm(*items, **{**of_vllm, **options, **fits, "desc": title, "leave": False})

    return bar


def empty_prefix_cache(llm) -> None:
    """Make the engine forget keys and values.

    They may belong to older weights. Also, a request must always give the same result: whatever an
    evaluation leaves in the cache would change the rounding.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept its prefix cache: it may hold keys and values of old weights")


def fingerprint(llm) -> list:
    """Return vLLM's log-probabilities of a few fixed tokens; new weights change them.

    It costs one forward pass. The same weights give the same numbers to the last bit.
    """
    from vllm import SamplingParams

    ids = list(range(min(FINGERPRINT_TOKENS, llm.model_config.max_model_len - 1)))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    empty_prefix_cache(llm)
    [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return [of_token[i].logprob for i, of_token in enumerate(output.prompt_logprobs) if of_token]


def sleep(llm) -> None:
    """Leave a GPU's memory, or a CPU's cores, to the trainer until load_weights."""
    if ON_GPU:
        # Drop the weights, because load_weights replaces all of them. vLLM keeps the buffers.
        llm.sleep(level=2)
    elif machine.is_small_model(llm.model_config.model):
        set_num_threads(len(distributed.own_cores()))


def load_weights(llm, named_weights) -> None:
    """Replace the engine's weights and wake it. named_weights: yields (name, whole tensor)."""
    if ON_GPU:
        torch.cuda.empty_cache()
        llm.wake_up(tags=["weights"])  # does nothing the first time: it is awake
    if not llm.apply_model(lambda model: hasattr(model, "lm_head"))[0]:  # Gemma 2's head is tied
        named_weights = (pair for pair in named_weights if pair[0] != "lm_head.weight")
    if not ON_GPU:
        llm.apply_model(forget_experts)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights})
    if ON_GPU:
        llm.wake_up(tags=["kv_cache"])
    elif machine.is_small_model(llm.model_config.model):
        set_num_threads(machine.THREADS_OF_SMALL_SAMPLER)


def forget_experts(model) -> None:
    """Make vLLM pack its experts' weights anew for a CPU, which it does only with new kernels."""
    for module in model.modules():
        if hasattr(getattr(module, "quant_method", None), "moe_kernel"):
            module.quant_method.moe_kernel = None


# -------------------------------------------------------------------------------- weights of 8 bits

FP8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa
LARGEST = {"int8": 127.0, "fp8": torch.finfo(FP8).max}  # 448


def rounded(lm, name, weight, args):
    """Return a weight as the sampler gets it: rounded if it belongs to a linear layer or an expert.

    weight: whole, [out, in] or [experts, out, in]; it is not changed. Embedding, head and norms
    stay as they are, as in vLLM's own 8-bit modes. Without --sampler_dtype, all weights do.
    """
    if not args.sampler_dtype or not is_rounded(lm, name, weight):
        return weight
    return to_8_bits(weight.float(), args.sampler_dtype).to(weight.dtype)


def is_rounded(lm, name, weight):
    """Tell whether a tensor is the weight of a linear layer except the head, or of experts."""
    owner, _, kind = name.rpartition(".")
    if weight.dim() == 3 and owner.endswith("experts"):  # all experts of a layer in one tensor
        return True
    layer = lm.get_submodule(owner)
    layer = getattr(layer, "base_layer", layer)  # inside LoRA's
    return kind == "weight" and isinstance(layer, nn.Linear) and layer is not lm.lm_head


def to_8_bits(weight, kind):
    """Round to int8 or fp8 and back: one scale per output channel, so that its largest number fits.

    weight [..., out, in] in float32.
    """
    largest = weight.abs().amax(-1, keepdim=True)  # [..., out, 1]
    scale = (largest / LARGEST[kind]).clamp(min=1e-12)  # rows of zeros stay zero
    steps = weight / scale
    steps = steps.round() if kind == "int8" else steps.to(FP8).to(steps.dtype)
    return steps * scale


# -------------------------------------------------------------------------------------------- texts


def decode(tokenizer, responses):
    """Return the texts of vLLM's responses, a list, without control tokens and end tokens.

    Tags stay, even if they are special tokens, as </think> is in some tokenizers.
    """
    control = chats.control_tokens(tokenizer)
    kept = []
    for response in responses:
        ended = response.finish_reason == "stop"  # otherwise it was truncated, and all of it counts
        ids = response.token_ids[:-1] if ended else response.token_ids
        kept.append([token for token in ids if token not in control])
    return tokenizer.batch_decode(
        kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
