"""Write the two tables of docs/what_fits.md: which settings and which models train on which GPUs.

    python -m tools.maintain.fits

It needs no GPU. The models are shapes without weights, and the memory is the estimate that every run makes before it
starts (runtime/memory.py).
"""

import functools

import tyro
from transformers import LlamaConfig, Qwen2Config

import grpo
from runtime import flags, memory
from tools import family, texts

FILE = family.ROOT / "docs" / "what_fits.md"
CARDS = {f"{gb} GB": gb for gb in (16, 24, 40, 48, 80)}  # GB of one GPU
COUNTS = (1, 4, 8)  # GPUs of one machine
# The parts of a card's nominal memory that no run gets. The CUDA context of the trainer and of vLLM takes 0.5 to 1 GiB.
# Error correction takes up to 6 % on cards such as L4 and A10. Pieces that the allocator can't use take some too.
CONTEXT = 1.0  # GiB
RESERVE = 0.08  # fraction of the card
HEAD_CHUNK = 4096  # models.HEAD_CHUNK on a GPU
LORA = {"lora_rank": 16, "lr": 1e-5}  # ten times the paper's learning rate

# From the models' published configurations: width, inner width, layers, heads, key-value heads, vocabulary, longest.
SHAPES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (LlamaConfig, 576, 1536, 30, 9, 3, 49152, 8192),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (LlamaConfig, 960, 2560, 32, 15, 5, 49152, 8192),
    "Qwen/Qwen2.5-0.5B-Instruct": (Qwen2Config, 896, 4864, 24, 14, 2, 151936, 32768),
    "meta-llama/Llama-3.2-1B-Instruct": (LlamaConfig, 2048, 8192, 16, 32, 8, 128256, 131072),
    "Qwen/Qwen2.5-1.5B-Instruct": (Qwen2Config, 1536, 8960, 28, 12, 2, 151936, 32768),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (LlamaConfig, 2048, 8192, 24, 32, 32, 49152, 8192),
    "Qwen/Qwen2.5-3B-Instruct": (Qwen2Config, 2048, 11008, 36, 16, 2, 151936, 32768),
    "meta-llama/Llama-3.2-3B-Instruct": (LlamaConfig, 3072, 8192, 28, 24, 8, 128256, 131072),
    "Qwen/Qwen2.5-7B-Instruct": (Qwen2Config, 3584, 18944, 28, 28, 4, 152064, 32768),
}
NAMES = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size
    max_position_embeddings""".split()
MODELS = {}
for name, (kind, *numbers) in SHAPES.items():
    architecture = kind.__name__.replace("Config", "ForCausalLM")
    MODELS[name] = kind(
        **dict(zip(NAMES, numbers)), tie_word_embeddings="-7B-" not in name, architectures=[architecture]
    )

CHECKPOINTS = {"gradient_checkpointing": True}
SHORT = CHECKPOINTS | {"micro_batch_tokens": 5120}  # one longest prompt and response
CUT_OFF = CHECKPOINTS | {"micro_batch_tokens": 2048, "kv_cache_gb": 2, "max_response_tokens": 1024}
SETTINGS = {  # name: flags, their cost; the first that fits is used: each needs less memory and costs more
    "A": ({}, "nothing: the paper's settings"),
    "B": (
        CHECKPOINTS,
        "time: activations are computed again in the backward pass (the default with fewer than 4 GPUs)",
    ),
    "C": (SHORT | {"kv_cache_gb": 8}, "time: smaller forward passes, and a cache for fewer requests; the results stay"),
    "D": (SHORT | {"kv_cache_gb": 2}, "more time: the sampler answers few requests at once; the results stay"),
    "E": (
        CUT_OFF | {"micro_batch_tokens": 3072, "max_response_tokens": 2048},
        "responses are cut off at 2048 tokens (the paper's at 4096)",
    ),
    "F": (CUT_OFF, "responses are cut off at 1024 tokens"),
    "G": (CUT_OFF | {"kl_coef": 0}, "the same, and the loss has no KL term"),
}


def usable(card):
    """Return the GiB that a run can count on, on a GPU of this name."""
    return CARDS[card] * (1 - RESERVE) - CONTEXT


def words(values):
    """Return the flags {name: value} as they are typed, in backquotes; "" without any."""
    typed = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in values.items())
    return typed and f"`{typed}`"


@functools.cache
def needed(model, setting, card, count, lora):
    """Return the GiB that grpo.py needs with these settings on each of `count` GPUs of this name."""
    defaults = flags.MANY_GPUS if count >= 4 else {}
    args = grpo.Args(model=model, **defaults | SETTINGS[setting][0] | (LORA if lora else {}))
    machine = memory.Machine(on_gpu=True, processes=count, gib=usable(card))
    return memory.estimate(MODELS[model], args, HEAD_CHUNK, machine)[1]


def first_that_fits(model, card, count, lora=False):
    """Name the first of SETTINGS with which the model trains on `count` GPUs of this name; – if none does."""
    for name in SETTINGS:
        if needed(model, name, card, count, lora) <= usable(card):
            return name
    return "–"


def short(model):
    """Shorten Qwen/Qwen2.5-3B-Instruct to Qwen2.5-3B."""
    return model.split("/")[1].removesuffix("-Instruct")


def once_each(shapes_of):
    """Cache a function that makes models: the table needs each model hundreds of times."""
    made = {}

    def once(config):
        key = config.to_json_string()
        if key not in made:
            made[key] = shapes_of(config)
        return made[key]

    return once


def page():
    """Return docs/what_fits.md with its tables."""
    settings = [[name, cost, words(values)] for name, (values, cost) in SETTINGS.items()]
    models = [["GiB that count", *(f"{usable(card):.1f}" for card in CARDS)]]
    for model in MODELS:
        for lora in (False, True):
            cells = [" ".join(first_that_fits(model, card, count, lora) for count in COUNTS) for card in CARDS]
            models.append([short(model) + ", LoRA" * lora, *cells])
    text = FILE.read_text(encoding="utf-8")
    text = texts.between(text, "settings", texts.table(["", "what it costs", "flags"], settings))
    return texts.between(text, "models", texts.table(["model", *CARDS], models))


def main():
    memory.shapes_of = once_each(memory.shapes_of)
    texts.write({FILE: page()})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])
