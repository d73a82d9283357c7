"""Test families of models with tiny random weights, and write the table of benchmarks/results/families.md.

    python -m tools.maintain.families                about ten minutes on two cores
    python -m tools.maintain.families qwen2 phi      only these; prints the rows

Each goes through grpo.py's own functions, in float32: the policy's weights are changed and copied to the sampler, which
samples, and the trainer computes the same tokens' log-probabilities. gap: their mean absolute difference, in nats.
"""

import json
import multiprocessing
import os
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools import texts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "benchmarks" / "results" / "families.md"
LIBRARIES = ["datasets", "peft", "pydantic", "torch.distributed.fsdp", "transformers", "tyro", "vllm.entrypoints.llm"]
LIBRARIES += ["vllm.v1.worker.cpu_worker"]
QUIET = {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
QUIET |= {"VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
TRAINED = """arcee bitnet cwm ernie4_5 exaone4 gemma gemma3_text glm glm4 helium hunyuan_v1_dense jais2 llama ministral
    ministral3 mistral nemotron olmo olmo2 olmo3 persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm
    starcoder2""".split()
REFUSED = """apertus cohere diffllama doge falcon_h1 gemma2 gemma4_text gpt2 granite granite_swa hyperclovax lfm2
    modernbert-decoder nanochat olmo_hybrid opt qwen3_5_text qwen3_moe vaultgemma""".split()
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 48, "bos_token_id": 0,
}  # fmt: skip


def make(family, folder, **changes):
    """Write a model of a family with random weights and buffers, and kk_tiny's tokenizer."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

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
    import grpo

    flags = {"max_prompt_tokens": 320, "max_response_tokens": 24, "kv_cache_gb": 0.05, "micro_batch_tokens": 8192}
    flags |= {"responses_per_prompt": 4, "temperature": 1.0, "compile": False, "gradient_checkpointing": False}
    return grpo.Args(**flags | {"model": str(folder), "dtype": "float32", "run_dir": str(folder / "run")} | changes)


def gap(llm, policy, args, tokenizer):
    """Return (the gap in nats, the sampled batch, the trainer's log-probabilities) with the policy's weights."""
    import grpo

    prompts = [f"Zoey says {i}: Oliver is a knave, and so am I. " * 12 for i in range(3)]
    problems = [{"prompt_ids": tokenizer.encode(text)[:300], "id": i} for i, text in enumerate(prompts)]
    grpo.sync_weights(policy, llm, args)
    batch, _ = grpo.sample(llm, [problem for problem in problems for _ in range(4)], 1, args)
    logp, _ = grpo.log_probs(policy, batch, args)
    return (logp - batch["sampler_logp"])[batch["mask"]].abs().mean().item(), batch, logp


def measure(folder, processes):
    """Return {column: nats} of a model, or {"refused": the reason}."""
    import torch

    import grpo
    from runtime import checkpoints, checks, passes
    from runtime import processes as connected

    args = arguments(folder)
    try:
        tokenizer, _ = checks.check_model(args, passes.HEAD_CHUNK)
    except ValueError as error:
        return {"refused": str(error).replace(f"--model {folder} ", "")}
    assert processes == connected.WORLD_SIZE
    connected.start()
    llm = grpo.load_sampler(args)
    policy = grpo.load_policy(args, trained=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    found, batch, logp = gap(llm, policy, args, tokenizer)
    if processes > 1:
        return {"two processes": found}
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    checkpoints.save(policy, optimizer, tokenizer, 1, 0, args)
    again = grpo.load_policy(arguments(folder / "run/checkpoints/step_000001"), trained=True)
    reloaded, _ = grpo.log_probs(again, batch, args)
    adapted = grpo.load_policy(arguments(folder, lora_rank=4), trained=True)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(0.03 * parameter.requires_grad)
    of_lora, _, _ = gap(llm, adapted, args, tokenizer)
    return {"gap": found, "LoRA": of_lora, "reload": (reloaded - logp).abs().max().item()}


def process(family, folder, place):
    """Run in a process: measure, and write the result next to the folder."""
    os.environ.update(place)
    sys.path[:0] = [str(ROOT)]
    sys.argv = ["families"]
    try:
        found = measure(folder, int(place.get("WORLD_SIZE", 1)))
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"}
    Path(f"{folder}_{place.get('RANK', 0)}.json").write_text(json.dumps(found))
    os._exit(0)  # otherwise it waits for vLLM's threads


def run(context, folder, target, *places):
    """Start a process per place, and wait for them. Return the first one's result."""
    started = [context.Process(target=target, args=(folder.name, folder, *place)) for place in places]
    for one in started:
        one.start()
    for one in started:
        one.join(150)
        one.kill()
    found = Path(f"{folder}_0.json")
    return json.loads(found.read_text()) if found.exists() else {}


def try_family(context, family, parent):
    """Return {column: nats} of a family."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    folder = Path(parent, family)
    run(context, folder, make, ())
    found = run(context, folder, process, ({},)) or {"failed": "no answer"}
    if "gap" in found:
        found |= run(context, folder, process, *[(shared | {"RANK": r, "LOCAL_RANK": r},) for r in "01"])
    print(family, found, flush=True)
    return found


def main(families):
    os.environ.update(QUIET)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    with tempfile.TemporaryDirectory() as parent, ThreadPoolExecutor(2) as pool:
        found = dict(zip(families, pool.map(lambda family: try_family(context, family, parent), families)))
    return table(found)


def table(found):
    """Return the rows of benchmarks/results/families.md. found: {family: try_family's result}."""
    columns = ["gap", "LoRA", "two processes", "reload"]
    rows, others = [], []
    for family, values in found.items():
        if "gap" in values:
            cells = [f"{values[name]:.0e}" if name in values else "failed" for name in columns]
            rows.append([family, *cells])
        else:
            others.append(f"- {family}: {' '.join(values.values())}")
    trained = texts.table(["family", *columns], rows)
    return "\n".join([trained, "", "Not trained:", "", *others] if others else [trained])


if __name__ == "__main__":
    text = main(sys.argv[1:] or TRAINED + REFUSED)
    if sys.argv[1:]:
        print(text)
    else:
        texts.write({DOCS: texts.between(DOCS.read_text(encoding="utf-8"), "families", text)})
