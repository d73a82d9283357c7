"""Which model trains on which GPUs: writes docs/what_fits.md, one table of models and cards.

    python -m tools.maintain.fits

No GPU is needed. The models are shapes without weights, and the memory is the estimate that every run makes before it
starts (runtime/memory.py).
"""

import contextlib
import dataclasses
import functools
import textwrap
from dataclasses import dataclass

import tyro
from transformers import LlamaConfig, Qwen2Config

import grpo
from runtime import checks, defaults, memory, processes, ranks
from tools import family
from tools.maintain import generated

FILE = family.ROOT / "docs" / "what_fits.md"
CARDS = {"T4": 16, "16 GB": 16, "24 GB": 24, "40 GB": 40, "48 GB": 48, "80 GB": 80}  # GB of one GPU
COUNTS = (1, 4, 8)  # GPUs of one machine

# What is left of a card's nominal memory. The CUDA context of the trainer and of vLLM takes 0.5 to 1 GiB; error
# correction takes up to 6 % on cards such as L4 and A10. Pieces that the allocator can't use take some too.
CONTEXT = 1.0  # GiB
RESERVE = 0.08  # share of the card
HEAD_CHUNK = 4096  # what batching.HEAD_CHUNK is on a GPU
LORA = "--lora_rank 16 --lr 1e-5"  # ten times the paper's learning rate


# ------------------------------------------------------------------------------------------------------------ models


def qwen(hidden_size, intermediate_size, layers, heads, vocab_size=151936, tied=True):
    """The shape of a Qwen2.5 model: 2 key-value heads up to 3B, 4 in the 7B model."""
    return Qwen2Config(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2 if tied else 4,
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
    )


def llama(hidden_size, intermediate_size, layers, heads, key_value_heads, vocab_size, max_position_embeddings):
    """The shape of a Llama-3.2 or SmolLM2 model. All of them use one matrix as embedding and head."""
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=hidden_size // heads,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        max_position_embeddings=max_position_embeddings,
        architectures=["LlamaForCausalLM"],
    )


# As in the models' published configurations.
MODELS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": llama(576, 1536, 30, 9, 3, 49152, 8192),
    "HuggingFaceTB/SmolLM2-360M-Instruct": llama(960, 2560, 32, 15, 5, 49152, 8192),
    "Qwen/Qwen2.5-0.5B-Instruct": qwen(896, 4864, 24, 14),
    "meta-llama/Llama-3.2-1B-Instruct": llama(2048, 8192, 16, 32, 8, 128256, 131072),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen(1536, 8960, 28, 12),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": llama(2048, 8192, 24, 32, 32, 49152, 8192),
    "Qwen/Qwen2.5-3B-Instruct": qwen(2048, 11008, 36, 16),
    "meta-llama/Llama-3.2-3B-Instruct": llama(3072, 8192, 28, 24, 8, 128256, 131072),
    "Qwen/Qwen2.5-7B-Instruct": qwen(3584, 18944, 28, 28, vocab_size=152064, tied=False),
}


# ---------------------------------------------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Setting:
    """Flags that need less memory, and what they cost."""

    name: str
    cost: str
    flags: str


SHORT_PASSES = "--gradient_checkpointing --micro_batch_tokens 5120"  # 5120: one longest prompt and response
CUT_OFF = "--gradient_checkpointing --micro_batch_tokens 2048 --kv_cache_gb 2 --max_response_tokens 1024"
# The first that fits is taken: each needs less memory than the one before it, and costs more.
SETTINGS = (
    Setting("A", "nothing: the paper's settings", ""),
    Setting(
        "B",
        "time: activations are computed again in the backward pass (the default with fewer than 4 GPUs)",
        "--gradient_checkpointing",
    ),
    Setting(
        "C",
        "time: smaller forward passes, and a cache for fewer requests; the results stay",
        f"{SHORT_PASSES} --kv_cache_gb 8",
    ),
    Setting(
        "D",
        "more time: the sampler answers few requests at once; the results stay",
        f"{SHORT_PASSES} --kv_cache_gb 2",
    ),
    Setting(
        "E",
        "responses are cut off at 2048 tokens (the paper's at 4096)",
        "--gradient_checkpointing --micro_batch_tokens 3072 --kv_cache_gb 2 --max_response_tokens 2048",
    ),
    Setting("F", "responses are cut off at 1024 tokens", CUT_OFF),
    Setting("G", "the same, and the loss has no KL term", f"{CUT_OFF} --kl_coef 0"),
)


# -------------------------------------------------------------------------------------------------------------- fits


def usable(card):
    """GiB that a run can count on, of a GPU of this name."""
    return CARDS[card] * (1 - RESERVE) - CONTEXT


def machine_with(card, count):
    """One machine with `count` GPUs of this name. One of 80 GB may be an H100."""
    return memory.Machine(
        on_gpu=True, processes=count, local_processes=count, gib=usable(card), large_batches=card == "80 GB"
    )


@contextlib.contextmanager
def on_gpus(count):
    """Within its block defaults and checks are those of a machine with `count` GPUs."""
    before = defaults.ON_GPU, ranks.WORLD_SIZE, ranks.LOCAL_WORLD_SIZE, processes.WORLD_SIZE
    defaults.ON_GPU = True
    ranks.WORLD_SIZE = ranks.LOCAL_WORLD_SIZE = processes.WORLD_SIZE = count
    try:
        yield
    finally:
        defaults.ON_GPU, ranks.WORLD_SIZE, ranks.LOCAL_WORLD_SIZE, processes.WORLD_SIZE = before


@functools.cache
def args_of(setting, count, lora):
    """grpo.py's Args with these flags, and LORA's, on `count` GPUs. They are the same for every model here."""
    with on_gpus(count):
        args, _ = defaults.read(f"{LORA if lora else ''} {setting.flags}".split(), grpo.Args, grpo.TASKS)
        checks.check_prompts_per_step(args)
    return args


def first_that_fits(model, card, count, lora=False):
    """The first of SETTINGS with which the model trains on `count` GPUs of this name, or None."""
    for setting in SETTINGS:
        args = dataclasses.replace(args_of(setting, count, lora), model=model)
        if card == "T4":
            args.dtype = "float16"
        _, needed, _ = memory.estimate(MODELS[model], args, HEAD_CHUNK, machine_with(card, count))
        if needed <= usable(card):
            return setting
    return None


# -------------------------------------------------------------------------------------------------------------- page


def page():
    """docs/what_fits.md: what was estimated, the settings, and a table of all models."""
    sizes = ", ".join(f"{usable(card):.1f} GiB of {card}" for card in CARDS if card != "T4")
    most = max(COUNTS)
    largest = list(MODELS)[-1]
    main_memory = memory.main_memory(parameters(MODELS[largest]), machine_with("80 GB", most)) * 2**30 / 1e9
    before = [
        "# What fits where",
        "Which model trains on which GPUs with `grpo.py`. `make docs` writes this file. All numbers are "
        "estimates: none of these commands has been run on these cards. `--dry_run` behind a command makes the "
        "estimate for your machine, with any script, and loads no weights.",
        f"**Memory of a card.** {1 - RESERVE:.0%} of its nominal memory minus {CONTEXT:.0f} GiB count as usable: "
        f"{sizes}. The rest is for CUDA itself and for pieces that the allocator can't use. Other programs on the "
        "card, such as a desktop, need some too. On H100 vLLM takes larger batches than on A100, which needs 1 to "
        "3 GiB less than the column of 80 GB says.",
        "**T4** (16 GB, as in Colab) has no bfloat16: add `--dtype float16`. V100 and P100 are too old for torch.",
        f"**Main memory.** Each process loads the whole model in float32, 4 bytes a parameter. Its libraries and CUDA "
        f"graphs take {memory.LIBRARIES + memory.GRAPHS:.1f} GiB: {most} processes with {short(largest)} need "
        f"{main_memory:.0f} GB.",
        "## Settings",
        "Each needs less memory than the one before it. A command is `python grpo.py --model MODEL FLAGS`; for several "
        "GPUs it begins with `torchrun --nproc-per-node 4` in place of `python`.",
    ]
    after = [
        "## Models",
        "A cell has the first setting that fits on 1, on 4 and on 8 GPUs; – stands for none. Rows with LoRA add "
        f"`{LORA}`: the weights are frozen, in bfloat16, and adapters of rank 16 on all linear layers except the head "
        "are trained. The reference is the same model with its adapters off, so it needs no memory. "
        "[More GPUs, less memory](scaling.md) says what LoRA computes.",
    ]
    lines = [*wrapped(before), "| | what it costs | flags |", "|---|---|---|"]
    for setting in SETTINGS:
        lines.append(f"| {setting.name} | {setting.cost} | {f'`{setting.flags}`' if setting.flags else ''} |")
    lines += ["", *wrapped(after), f"| model | {' | '.join(CARDS)} |", "|---|" + "---|" * len(CARDS)]
    for model in MODELS:
        for lora in (False, True):
            cells = [short(model) + ", LoRA" * lora]
            for card in CARDS:
                found = [first_that_fits(model, card, count, lora) for count in COUNTS]
                cells.append(" ".join(setting.name if setting else "–" for setting in found))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def wrapped(paragraphs):
    lines = []
    for paragraph in paragraphs:
        lines += [*textwrap.wrap(paragraph, 120, break_on_hyphens=False), ""]
    return lines


def short(model):
    """Qwen/Qwen2.5-3B-Instruct → Qwen2.5-3B."""
    return model.split("/")[1].removesuffix("-Instruct")


def parameters(config):
    """How many parameters a model of this shape has."""
    return memory.shapes_of(config).num_parameters()


# -------------------------------------------------------------------------------------------------------------- main


def once_each(shapes_of):
    """The same function, which makes a model once: the table needs each hundreds of times."""
    made = {}

    def once(config):
        key = config.to_json_string()
        if key not in made:
            made[key] = shapes_of(config)
        return made[key]

    return once


def main():
    memory.shapes_of = once_each(memory.shapes_of)
    generated.write({FILE: page()})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])
