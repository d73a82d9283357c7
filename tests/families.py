"""Test families of models with tiny random weights, for the table of benchmarks/results/families.md.

    python tests/families.py qwen2 phi      prints their rows; one to two minutes each
    python tests/families.py FOLDER         a model's own row, after the check at the start of a run

Each goes through grpo.py's own functions, in float32 (Qwen3.5: in bfloat16). Columns, in nats:

policy         the policy's log-probabilities against transformers' own, as runtime/models.py compares them
gap            policy against sampler: its weights are changed and copied to the sampler, which samples
LoRA           the same with adapters
two processes  the same, sharded over two processes
reload         the same, of a checkpoint that vLLM itself has read from its files
resume         not in nats: how many of a resumed run's weights differ from those of the run that was saved
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import grpo
from runtime import checkpoints, checks, distributed, models

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 48, "bos_token_id": 0,
}  # fmt: skip
SCALES = {"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 4.0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SIGLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_chunk_size": 32,
}  # fmt: skip
QWEN3_5 = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "head_dim": 64, "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4 = {  # as E2B: two layers share the keys and values of the first two
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 636, "global_head_dim": 64,
}  # fmt: skip
CHANGES = {  # what a family has beside SIZES
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma4_text": GEMMA4,
    "granite": SCALES,
    "granitemoe": SCALES | EXPERTS,
    "granitemoehybrid": SCALES | MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 128, "position_embedding_type": "nope"},
    "olmoe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": QWEN3_5,
}  # fmt: skip
WITH_IMAGES = {  # family: (its language model's, what the image part has)
    "gemma3": ("gemma3_text", SIGLIP | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14}),
    "gemma4": ("gemma4_text", SIGLIP | {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16}),
    "mistral3": ("ministral3", SIGLIP | {"model_type": "pixtral", "head_dim": 16, "image_size": 56, "patch_size": 14}),
    "qwen3_5": ("qwen3_5_text", {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 16}),
}  # fmt: skip


def settings_of(family, tokenizer, **changes):
    """Return the arguments of a family's configuration class."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    wanted = SIZES | ends | {"vocab_size": len(tokenizer)}
    return {name: value for name, value in wanted.items() if name in known} | CHANGES.get(family, {}) | changes


def make(family, folder, **changes):
    """Write a model of a family with random weights and buffers, and kk_tiny's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "kk_tiny")
    if family in WITH_IMAGES:
        text, vision = WITH_IMAGES[family]
        text = settings_of(text, tokenizer, **changes) | {"model_type": text}
        parts = {"text_config": text, "vision_config": vision, "tie_word_embeddings": True}
        if family == "gemma3":
            parts["mm_tokens_per_image"] = 4
        model_class, config = AutoModelForImageTextToText, CONFIG_MAPPING[family](**parts)
    else:
        model_class = AutoModelForCausalLM
        config = CONFIG_MAPPING[family](**settings_of(family, tokenizer, **changes))
    torch.manual_seed(0)
    model = model_class.from_config(config).float()
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


def gap(llm, args, tokenizer, name, change, sync=True):
    """Return the gap in nats after change(parameter) of each parameter with this in its name."""
    policy = grpo.load_policy(args, trained=True)
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if name in parameter_name:
                change(parameter)
    prompts = [f"Zoey says {i}: Oliver is a knave, and so am I. " * 12 for i in range(3)]
    problems = [{"prompt_ids": tokenizer.encode(text)[:300], "id": i} for i, text in enumerate(prompts)]
    if sync:
        grpo.sync_weights(policy, llm, args)
    batch, _ = grpo.sample(llm, [problem for problem in problems for _ in range(4)], 1, args)
    logp, _ = grpo.log_probs(policy, batch, args)
    return (logp - batch["sampler_logp"])[batch["mask"]].abs().mean().item()


def dtype_of(folder):
    """Return float32, or bfloat16 for Qwen3.5: vLLM's kernel for CPUs takes no other type."""
    return "bfloat16" if "qwen3_5" in (folder / "config.json").read_text() else "float32"


def start(folder, **changes):
    """Return (settings, tokenizer, engine) of a model. ValueError if it is refused."""
    args = arguments(folder, **{"dtype": dtype_of(folder)} | changes)
    tokenizer, _ = checks.check_model(args, models.HEAD_CHUNK)
    distributed.start()
    return args, tokenizer, grpo.load_sampler(args)


def policy_gap(policy, args):
    """Return the policy's gap in nats to transformers' own log-probabilities."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "report_gaps", lambda gaps, kind, args: found.update(gaps))
        with models.changed_weights(policy):
            models.compare(policy, {"prompt_ids": list(range(3, 203))}, args)
    return found["transformers"]


def measure(folder):
    """Return {column: the gap in nats} of a model, in this process or these processes."""
    args, tokenizer, llm = start(folder)
    found = {
        "policy": policy_gap(grpo.load_policy(args, trained=True), args),
        "gap": gap(llm, args, tokenizer, "", lambda parameter: parameter.mul_(1.1)),
    }
    if not models.num_experts(AutoConfig.from_pretrained(folder)):
        with_lora = arguments(folder, dtype=args.dtype, lora_rank=4)
        found["LoRA"] = gap(llm, with_lora, tokenizer, "lora_", lambda parameter: parameter.add_(0.03))
    return found


def save_and_resume(folder):
    """Write a checkpoint of changed weights; return (its folder, how many of a resumed run's tensors differ)."""
    args = arguments(folder, dtype=dtype_of(folder))
    runs = []
    for resume in ("", str(args.run_dir)):
        policy = grpo.load_policy(args, trained=True)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
        if not resume:
            for parameter in policy.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            checkpoints.save(policy, optimizer, AutoTokenizer.from_pretrained(folder), 1, 0, args)
        checkpoints.load(policy, optimizer, resume)
        runs.append(policy.lm.state_dict())
    different = sum(not torch.equal(weight, runs[1][name]) for name, weight in runs[0].items())
    return Path(args.run_dir, "checkpoints", "step_000001"), different


def reload(folder):
    """Return the gap in nats of a checkpoint that vLLM has read."""
    args, tokenizer, llm = start(folder)
    return gap(llm, args, tokenizer, "", lambda parameter: None, sync=False)


def row(name, folder):
    """Print a model's row, each column in a process of its own, because a process has one sampler."""
    columns = {"gap": "measure", "two processes": "measure", "resume": "save_and_resume", "reload": "reload"}
    found = {}
    for column, function in columns.items():
        of = found["resume"][0] if column == "reload" else str(folder)
        call = f"import families, json; print(json.dumps(families.{function}(families.Path({of!r})), default=str))"
        words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable, "-c", call]
        words = words if column == "two processes" else ["-c", call]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            return print(f"- {name}, {column}: {done.stderr.strip().splitlines()[-1]}", flush=True)
        found[column] = json.loads(done.stdout.strip().splitlines()[-1])
    one, two = found["gap"], found["two processes"]
    lora = f"{one['LoRA']:.0e}" if "LoRA" in one else "refused"
    numbers = [one["policy"], one["gap"], lora, max(two.values()), found["reload"], str(found["resume"][1])]
    print("|", " | ".join([name, *(x if isinstance(x, str) else f"{x:.0e}" for x in numbers)]), "|", flush=True)


def main(names):
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if Path(name).is_dir():
                copy = shutil.copytree(name, Path(folder, "model"))  # its run folder is not in the user's
                row(name, copy)
            else:
                row(name, make(name, Path(folder, name)))


if __name__ == "__main__":
    main(sys.argv[1:])
