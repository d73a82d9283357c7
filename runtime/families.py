"""Tell what a family of models needs, by its configuration.

Every model with .model.layers and a linear .lm_head is tried: the check at the start (same_model)
decides. A family in REFUSED would pass that check and fail later, or fail without a reason.
"""

import copy

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

# Tried with tiny random models: benchmarks/results/families.md.
TRIED = """arcee bitnet cwm ernie4_5 exaone4 gemma gemma2 gemma3_text gemma4_text glm glm4 granite
    granitemoe granitemoehybrid helium hunyuan_v1_dense jais2 llama ministral ministral3 mistral
    nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 qwen2 qwen3 qwen3_5_text qwen3_moe
    seed_oss smollm3 stablelm starcoder2""".split()
REFUSED = {
    "apertus": "vLLM's build for CPUs computes it wrongly",
    "cohere2": "passes.logits does not know its logit_scale",
    "falcon_h1": "passes.logits does not know its lm_head_multiplier",
    "gpt2": "its layers are not in .model.layers",
    "gpt_oss": "its experts' weights are in MXFP4, 4 bits each, which can't be trained",
    "lfm2": "vLLM's build for CPUs computes it wrongly",
    "nemotron_h": "vLLM's build for CPUs computes it wrongly",
    "olmo_hybrid": "vLLM can't start it on a CPU",
}
# Names of the language model's weights in folders with images, old and new, and its own names.
OWN_NAMES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
}


def text_only(model):
    """Return options of from_pretrained that load a folder's or hub id's language model alone.

    Without them, transformers would load the image part, too, or random weights.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    options = {"trust_remote_code": False}
    if reads_images(config):
        options |= {"config": language_config(config), "key_mapping": OWN_NAMES}
    return options


def reads_images(config):
    """Return whether a configuration has, beside that of a language model, others."""
    return config.get_text_config(decoder=True) is not config


def language_config(config):
    """Return the configuration of the language model alone; of a text model, the same object."""
    if not reads_images(config):
        return config
    text = copy.deepcopy(config.get_text_config(decoder=True))
    text.tie_word_embeddings = config.tie_word_embeddings
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    if type(text) in AutoModelForCausalLM._model_mapping:
        text.architectures = [AutoModelForCausalLM._model_mapping[type(text)].__name__]
    return text


def is_recurrent(config):
    """Return whether some layers keep a state (Mamba, convolutions) instead of keys and values."""
    return any(recurrent_layers(config))


def recurrent_layers(config):
    """Return for each layer with a cache of its own whether it keeps a state."""
    layers = DynamicCache(config=config).layers
    return [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers]


def num_experts(config):
    """Return the number of experts in a layer; 0 if the model is dense."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(getattr(config, name, None) or 0 for name in names)


def check(flag, name, config, model, lora_rank=0):
    """Raise ValueError if a model can't be trained. model: its shapes (memory.shapes_of)."""
    kind = config.model_type
    if kind in REFUSED:
        raise ValueError(f"{flag} {name} is a {kind}, which can't be trained here: {REFUSED[kind]}")
    if not hasattr(getattr(model, "model", None), "layers"):
        raise ValueError(f"{flag} {name} is a {kind}, whose layers are not in .model.layers")
    if not isinstance(getattr(model, "lm_head", None), nn.Linear):
        raise ValueError(f"{flag} {name} is a {kind}, whose head is not a linear .lm_head")
    for needed in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        if not hasattr(config, needed):
            raise ValueError(f"{flag} {name} is a {kind}, whose config.json has no {needed}")
    if lora_rank and num_experts(config):
        raise ValueError(
            f"--lora_rank {lora_rank}: {name} has experts, which LoRA can't train here: leave out "
            "--lora_rank, or take a dense model"
        )
