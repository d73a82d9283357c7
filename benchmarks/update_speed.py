"""Measure the speed of grpo.py's update on a GPU, for a model's shape with random weights: nothing is downloaded.

    python benchmarks/update_speed.py

Floating-point operations are counted by hand (update_flops), without recomputation. The MFU is their rate as a fraction
of the GPU's nominal speed. limit.py measures a CPU. Results: benchmarks/results/update_speed.json.
"""

import sys
from dataclasses import asdict, dataclass
from typing import Literal

import common
import torch
import tyro
from transformers import AutoModelForCausalLM

import grpo
from runtime import distributed, memory
from runtime.models import place
from tools.maintain import fits

PEAKS = {  # TFLOP/s in bfloat16 with float32 sums, dense, by words in the device's name; the first match counts
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "L4": 121,
}


@dataclass
class Sizes:
    """The sizes of the measurement."""

    model: Literal["0.5B", "1.5B", "3B"] = "3B"  # the size of Qwen2.5; 3B: 64 GiB by estimate
    responses: int = 32  # of the update
    prompt_tokens: int = 256  # in each prompt
    response_tokens: int = 768  # in each response
    name: str = "update_speed"  # the name of the results file


def peak(device_name):
    """Return the device's nominal TFLOP/s, from its maker, or None."""
    words = device_name.replace("-", " ").split()
    return next((tera for name, tera in PEAKS.items() if all(part in words for part in name.split())), None)


def update_flops(config, n_params, rows, prompt, response):
    """Count the floating-point operations of one update, forward and backward, without recomputation.

    6 per weight and token; the head's weights count only for response tokens, the embedding's for none. Attention has
    two products, for scores and for sums: 12 × layers × width per pair of a token and an earlier token.
    """
    length = prompt + response
    head = config.vocab_size * config.hidden_size
    body = n_params - head * (1 if config.tie_word_embeddings else 2)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs = length / 2  # earlier tokens per token, averaged over a sequence
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_width * pairs
    return rows * (length * (6 * body + attention) + response * 6 * head)


def seconds_of_update(config, rows, prompt, response):
    """Time grpo.update on a model of this shape, in seconds after a warm-up that compiles it. Responses are random."""
    args = grpo.Args(updates_per_step=1, kl_coef=0, dtype="bfloat16" if distributed.ON_GPU else "float32")
    args.compile = distributed.ON_GPU
    with torch.device(distributed.DEVICE):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = place(grpo.Policy(lm, args), args)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    shape = (rows, prompt + response)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, prompt:] = True
    batch = {"ids": torch.randint(config.vocab_size, shape), "mask": mask, "advantages": torch.randn(shape)}
    batch["old_logp"], _ = grpo.log_probs(policy, batch, args)
    batch["ref_logp"] = batch["old_logp"]
    took = [common.seconds(grpo.update, policy, optimizer, batch, 0, args)[0] for _ in range(3)]
    return min(took[1:])


def main(sizes):
    common.check_sizes(sizes)
    if not distributed.ON_GPU:
        sys.exit("error: no GPU; benchmarks/limit.py measures a CPU")
    distributed.start()
    config = fits.MODELS[f"Qwen/Qwen2.5-{sizes.model}-Instruct"]
    shape = sizes.responses, sizes.prompt_tokens, sizes.response_tokens
    seconds = seconds_of_update(config, *shape)
    tokens = sizes.responses * (sizes.prompt_tokens + sizes.response_tokens)
    tera = update_flops(config, memory.shapes_of(config).num_parameters(), *shape) / seconds / 1e12
    device = torch.cuda.get_device_name()
    mfu = tera / peak(device) if peak(device) else None
    common.write(sizes.name, {"sizes": asdict(sizes), "seconds": seconds, "tflops": tera, "mfu": mfu})
    of_peak = f"MFU {mfu:.0%} of {peak(device)}" if mfu else "its peak is not known here"
    print(f"Qwen2.5-{sizes.model}: {seconds:.2f} s, {tokens / seconds:.0f} tokens/s, {tera:.0f} TFLOP/s, {of_peak}")


if __name__ == "__main__":
    main(tyro.cli(Sizes, use_underscores=True, description=__doc__.split("\n\n")[0]))
