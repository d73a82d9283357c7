"""Test families of models with tiny random weights, for the table of benchmarks/results/families.md.

    python tests/families.py qwen2 phi      prints their rows; half a minute each

Each goes through grpo.py's own functions, in float32: the policy's weights are changed and copied to the sampler, which
samples, and the trainer computes the same tokens' log-probabilities. gap: their mean absolute difference, in nats.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import grpo
from runtime import checks, passes, processes

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 48, "bos_token_id": 0,
}  # fmt: skip


def make(family, folder, **changes):
    """Write a model of a family with random weights and buffers, and kk_tiny's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "kk_tiny")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    wanted = SIZES | ends | {"vocab_size": len(tokenizer)}
    config = kind(**{name: value for name, value in wanted.items() if name in known} | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_(0, 0.15) if tensor.ndim > 1 else tensor.add_(0.1 * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def arguments(folder, **changes):
    """Return settings of grpo.py for such a model."""
    flags = {"max_prompt_tokens": 320, "max_response_tokens": 24, "kv_cache_gb": 0.05, "micro_batch_tokens": 8192}
    flags |= {"responses_per_prompt": 4, "temperature": 1.0, "compile": False, "gradient_checkpointing": False}
    return grpo.Args(**flags | {"model": str(folder), "dtype": "float32", "run_dir": str(folder / "run")} | changes)


def gap(llm, args, tokenizer, name, change):
    """Return the gap in nats after change(parameter) of each parameter with this in its name."""
    policy = grpo.load_policy(args, trained=True)
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if name in parameter_name:
                change(parameter)
    prompts = [f"Zoey says {i}: Oliver is a knave, and so am I. " * 12 for i in range(3)]
    problems = [{"prompt_ids": tokenizer.encode(text)[:300], "id": i} for i, text in enumerate(prompts)]
    grpo.sync_weights(policy, llm, args)
    batch, _ = grpo.sample(llm, [problem for problem in problems for _ in range(4)], 1, args)
    logp, _ = grpo.log_probs(policy, batch, args)
    return (logp - batch["sampler_logp"])[batch["mask"]].abs().mean().item()


def measure(folder):
    """Return {column: the gap in nats} of a model. ValueError if it is refused."""
    args = arguments(folder)
    tokenizer, _ = checks.check_model(args, passes.HEAD_CHUNK)
    processes.start()
    llm = grpo.load_sampler(args)
    with_lora = arguments(folder, lora_rank=4)
    return {
        "gap": gap(llm, args, tokenizer, "", lambda parameter: parameter.mul_(1.1)),
        "LoRA": gap(llm, with_lora, tokenizer, "lora_", lambda parameter: parameter.add_(0.03)),
    }


def main(families):
    if len(families) > 1:  # a process for each, because a process has one sampler
        for family in families:
            subprocess.run([sys.executable, __file__, family])
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(make(families[0], Path(folder, families[0])))
            print(f"| {families[0]} | {found['gap']:.0e} | {found['LoRA']:.0e} |", flush=True)
        except ValueError as error:
            print(f"- {str(error).removeprefix(f'--model {folder}/')}", flush=True)
    os._exit(0)  # otherwise it waits for vLLM's threads


if __name__ == "__main__":
    main(sys.argv[1:])
