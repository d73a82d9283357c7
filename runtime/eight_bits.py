"""Round the sampler's weights to 8 bits (--sampler_dtype), as large runs do to sample faster.

The trainer's own weights stay as they are, so sampler and trainer differ, and sampler_gap shows by
how much. vLLM still computes in --dtype: it gets the numbers of a sampler with 8-bit weights, but
not its speed. Many such samplers also round activations, keys and values. FP8-RL (arXiv 2601.18150)
describes one; Jet-RL (arXiv 2601.14243) shows runs that collapse with one.
"""

import torch
from torch import nn

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
