"""Which model trains on which GPUs: writes docs/what_fits.md, with a command for each model and machine.

    python -m tools.fits

No GPU is needed. The models are shapes without weights, the memory is the estimate that every run makes before it
starts (runtime/memory.py), and every command has gone through the checks of grpo.py.
"""

import contextlib
import dataclasses
import functools
import textwrap
from dataclasses import dataclass

import tyro
from transformers import LlamaConfig, Qwen2Config

import grpo
from runtime import checks, defaults, launch, memory, processes
from tools import family, generated

FILE = family.ROOT / "docs" / "what_fits.md"
CARDS = (16, 24, 40, 48, 80)  # GB of one GPU
COUNTS = (1, 4, 8)  # GPUs of one machine

# What is left of a card's nominal memory. The CUDA context of the trainer and of vLLM takes 0.5 to 1 GiB; error
# correction takes up to 6 % on cards such as L4 and A10. Pieces that the allocator can't use take some too.
CONTEXT = 1.0  # GiB
RESERVE = 0.08  # share of the card
HEAD_CHUNK = 4096  # what passes.HEAD_CHUNK is on a GPU
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
# The first that fits is taken: each needs less memory than the one before it, and costs more.
SETTINGS = (
    Setting("default", "nothing: the paper's settings", ""),
    Setting(
        "recompute",
        "time: activations are computed again in the backward pass (with fewer than 4 GPUs this is the default)",
        "--gradient_checkpointing",
    ),
    Setting(
        "short passes",
        "time: smaller forward passes, and a cache for fewer requests; the results stay",
        f"{SHORT_PASSES} --kv_cache_gb 8",
    ),
    Setting(
        "small cache",
        "more time: the sampler answers few requests at once; the results stay",
        f"{SHORT_PASSES} --kv_cache_gb 2",
    ),
    Setting(
        "2048 tokens",
        "responses are cut off at 2048 tokens (the paper's at 4096)",
        "--gradient_checkpointing --micro_batch_tokens 3072 --kv_cache_gb 2 --max_response_tokens 2048",
    ),
    Setting(
        "1024 tokens",
        "responses are cut off at 1024 tokens",
        "--gradient_checkpointing --micro_batch_tokens 2048 --kv_cache_gb 2 --max_response_tokens 1024",
    ),
    Setting(
        "no reference",
        "the same, and the loss has no KL term",
        "--gradient_checkpointing --micro_batch_tokens 2048 --kv_cache_gb 2 --max_response_tokens 1024 --kl_coef 0",
    ),
)


# -------------------------------------------------------------------------------------------------------------- fits


@dataclass(frozen=True)
class Fit:
    """The setting with which a model trains on a number of GPUs."""

    setting: Setting
    command: str
    needed: float  # GiB of each GPU, estimated


def usable(card):
    """GiB that a run can count on, of a GPU with `card` GB."""
    return card * (1 - RESERVE) - CONTEXT


def machine_with(card, count):
    """One machine with `count` GPUs of `card` GB."""
    return memory.Machine(on_gpu=True, processes=count, local_processes=count, gib=usable(card))


@contextlib.contextmanager
def on_gpus(count):
    """Within its block defaults and checks are those of a machine with `count` GPUs."""
    before = defaults.ON_GPU, launch.WORLD_SIZE, launch.LOCAL_WORLD_SIZE, processes.WORLD_SIZE
    defaults.ON_GPU = True
    launch.WORLD_SIZE = launch.LOCAL_WORLD_SIZE = processes.WORLD_SIZE = count
    try:
        yield
    finally:
        defaults.ON_GPU, launch.WORLD_SIZE, launch.LOCAL_WORLD_SIZE, processes.WORLD_SIZE = before


@functools.cache
def args_of(setting, count, lora):
    """grpo.py's Args with these flags, and LORA's, on `count` GPUs. They are the same for every model here."""
    with on_gpus(count):
        args, _ = defaults.read(flags_of(setting, lora).split(), grpo.Args, grpo.TASKS)
        checks.check_prompts_per_step(args)
    return args


def flags_of(setting, lora):
    return f"{LORA} {setting.flags}".strip() if lora else setting.flags


def fits_on(model, config, count, lora):
    """{card: the first of SETTINGS with which the model trains on `count` GPUs of it, or None}."""
    fits = dict.fromkeys(CARDS)
    for setting in SETTINGS:
        if all(fits.values()):
            break
        args = dataclasses.replace(args_of(setting, count, lora), model=model)
        for card in CARDS:
            if fits[card] is None:
                # vLLM takes larger batches on a card of 80 GB, which need more.
                _, needed, _ = memory.estimate(config, args, HEAD_CHUNK, machine_with(card, count))
                if needed <= usable(card):
                    fits[card] = Fit(setting, command(model, setting, count, lora), needed)
    return fits


def command(model, setting, count, lora):
    """grpo.py with the setting's flags, started for `count` GPUs."""
    start = "python" if count == 1 else f"torchrun --nproc-per-node {count}"
    return f"{start} grpo.py --model {model} {flags_of(setting, lora)}".strip()


def all_fits(lora=False):
    """{model: {count: {card: Fit or None}}}; lora: with LoRA."""
    fits = {}
    for model, config in MODELS.items():
        fits[model] = {count: fits_on(model, config, count, lora) for count in COUNTS}
    return fits


# ------------------------------------------------------------------------------------------------------------ tables


def page(fits, with_lora):
    """docs/what_fits.md: what was estimated, the settings, tables of all models, each model's commands."""
    sizes = ", ".join(f"{usable(card):.1f} GiB of {card} GB" for card in CARDS)
    most = max(COUNTS)
    largest = list(MODELS)[-1]
    main_memory = memory.main_memory(parameters(MODELS[largest]), "bfloat16", machine_with(80, most)) * 2**30 / 1e9
    paragraphs = [
        "# What fits where",
        "Which model trains on which GPUs with `grpo.py`, in bfloat16. `python -m tools.fits` writes this file. All "
        "numbers are estimates: none of these commands has been run on these cards. `--dry_run` behind a command makes "
        "the estimate for your machine, with any script, and loads no weights.",
        f"**Memory of a card.** {1 - RESERVE:.0%} of its nominal memory minus {CONTEXT:.0f} GiB count as usable: "
        f"{sizes}. The rest is for CUDA itself and for pieces that the allocator can't use. Other programs on the "
        "card, such as a desktop, need some too.",
        "**Older cards.** V100 and P100 are refused: PyTorch has no kernels for them. T4 (16 GB) has no bfloat16 and "
        "trains with `--dtype float16`. The column of 16 GB is for newer cards, such as RTX 4080 and RTX A4000.",
        "**Main memory.** Each process loads the whole model in float32, 4 bytes a parameter, before the processes "
        f"share it, and its libraries take {memory.LIBRARIES} GiB: {most} processes with {short(largest)} need "
        f"{main_memory:.0f} GB.",
        "## Overview",
        "A cell has the first of these settings that fits; – stands for none.",
    ]
    lines = []
    for paragraph in paragraphs:
        lines += [*textwrap.wrap(paragraph, 120, break_on_hyphens=False), ""]
    lines += ["| setting | what it costs |", "|---|---|"]
    for setting in SETTINGS:
        lines.append(f"| {setting.name} | {setting.cost} |")
    lines += ["", *overview(fits), "", "## With LoRA", ""]
    about_lora = (
        f"With `{LORA}` the weights are frozen, in bfloat16, and adapters of rank 16 on all linear layers except the "
        "head are trained: 1% as many parameters as Qwen2.5-3B has. Gradients and AdamW's state are those of the "
        "adapters. The reference is the same model with its adapters off, so it needs no memory. "
        "[More GPUs, less memory](scaling.md) says what LoRA computes."
    )
    lines += [*textwrap.wrap(about_lora, 120, break_on_hyphens=False), "", *overview(with_lora), ""]
    about_gib = "GiB: what each GPU needs, estimated. vLLM takes larger batches on a card of 80 GB, which needs more."
    lines += ["## Commands", "", about_gib]
    for model, counts in fits.items():
        lines += ["", f"### {short(model)}", "", "| GPUs | setting | GiB | command |", "|---|---|---|---|"]
        lines += [*commands(counts), *commands(with_lora[model], "LoRA, ")]
    return "\n".join(lines) + "\n"


def overview(fits):
    """A table with a row for each model and number of GPUs, and a column for each card."""
    cards = " | ".join(f"{card} GB" for card in CARDS)
    lines = [f"| model | GPUs | {cards} |", "|---|---|" + "---|" * len(CARDS)]
    for model, counts in fits.items():
        for count, found in counts.items():
            names = [fit.setting.name if fit else "–" for fit in found.values()]
            lines.append(f"| {short(model)} | {count} | {' | '.join(names)} |")
    return lines


def commands(counts, label=""):
    """Rows of a model's table of commands: cards that take the same command share one."""
    lines = []
    for count, found in counts.items():
        fits_of = {}  # command: {card: Fit}
        for card, fit in found.items():
            if fit:
                fits_of.setdefault(fit.command, {})[card] = fit
        for of_command, fits in fits_of.items():
            cards = ", ".join(map(str, fits))
            name = next(iter(fits.values())).setting.name
            needed = " to ".join(dict.fromkeys(f"{fit.needed:.1f}" for fit in fits.values()))
            lines.append(f"| {count} × {cards} GB | {label}{name} | {needed} | `{of_command}` |")
    return lines


def short(model):
    """Qwen/Qwen2.5-3B-Instruct → Qwen2.5-3B."""
    return model.split("/")[1].removesuffix("-Instruct")


def parameters(config):
    """How many parameters a model of this shape has."""
    return memory.shapes_of(config).num_parameters()


# -------------------------------------------------------------------------------------------------------------- main


def main():
    generated.write({FILE: page(all_fits(), all_fits(lora=True))})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])
