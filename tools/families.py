"""prototype"""

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = [
    "datasets", "pydantic", "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "transformers", "tyro", "peft",
    "transformers.models.llama.modeling_llama", "vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker",
]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "vocab_size": 640}
# what some need
CHANGES = {}


def make(family, folder, changes=()):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, CONFIG_MAPPING
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/kk_tiny")
    cls = CONFIG_MAPPING[family]
    default = cls()
    names = set(default.to_dict()) | set(getattr(cls, "attribute_map", {}))
    wanted = {**SIZES, "vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id,
              "pad_token_id": tokenizer.pad_token_id, "layer_types": None}
    kept = {k: v for k, v in wanted.items() if k in names and k != "layer_types"}
    config = cls(**{**kept, **CHANGES.get(family, {}), **dict(changes)})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for t in model.state_dict().values():
            if not t.is_floating_point(): continue
            if t.ndim > 1: t.normal_(0, 0.15)
            else: t.add_(0.1 * torch.randn(t.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(family, folder, changes, environment, out, skip_checks=False):
    os.environ.update(environment)
    sys.path.insert(0, str(ROOT)); sys.argv = ["x"]
    import contextlib
    import torch
    result = {}
    stage = "make"
    from runtime import processes
    torch.set_num_threads(1)
    try:
        if not (folder / "config.json").exists():
            make(family, folder, changes)
        stage = "import"
        import grpo
        from runtime import checks, checkpoints, engine, lora, passes, processes
        from rewards import load_task
        processes.start()
        args = grpo.Args(model=str(folder), task="kk", dtype="float32", max_prompt_tokens=256, max_response_tokens=24,
            kv_cache_gb=0.05, steps=2, prompts_per_step=4, responses_per_prompt=4, lora_rank=0, compile=False,
            gradient_checkpointing=False, micro_batch_tokens=4096, temperature=1.0, kl_coef=0.001, run_dir=str(folder / f"run{os.environ.get('RANK')}"))
        stage = "check"
        tokenizer, _ = checks.check_model(args, passes.HEAD_CHUNK)
        problems = [{"prompt_ids": tokenizer.encode(f"Zoey says {i}: Oliver is a knave, and it is so."), "id": i} for i in range(3)]
        asked = [p for p in problems for _ in range(4)]
        stage = "sampler"
        llm = grpo.load_sampler(args)
        def gap(policy):
            grpo.sync_weights(policy, llm, args)
            batch, _ = grpo.sample(llm, asked, 1, args)
            logp, _ = grpo.log_probs(policy, batch, args)
            return (logp - batch["sampler_logp"])[batch["mask"]].abs().mean().item(), batch, logp
        stage = "policy"
        policy = grpo.load_policy(args, trained=True)
        stage = "gap"
        result["gap"] = gap(policy)[0]
        with torch.no_grad():
            for p in policy.parameters(): p.mul_(1.1)
        stage = "gap2"
        result["gap2"], batch, logp = gap(policy)
        stage = "save"
        opt = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)
        logp_, _ = policy(batch["ids"], batch["mask"], 1.0)
        logp_.sum().backward(); 
        result["nograd"] = [n for n, p in policy.lm.named_parameters() if p.grad is None or p.grad.abs().max() == 0][:3]
        if processes.WORLD_SIZE == 1:
            checkpoints.save(policy, opt, tokenizer, 1, 0, args)
            stage = "reload"
            import dataclasses
            again = grpo.load_policy(dataclasses.replace(args, model=f"{args.run_dir}/checkpoints/step_000001"), trained=True)
            l2, _ = grpo.log_probs(again, batch, args)
            result["reload"] = (l2 - logp).abs().max().item()
        stage = "lora"
        args.lora_rank = 4
        policy = grpo.load_policy(args, trained=True)
        with torch.no_grad():
            for p in policy.parameters():
                if p.requires_grad: p.add_(0.03)
        result["lora"] = gap(policy)[0]
        stage = ""
        del llm
        processes.end()
    except BaseException as e:
        import traceback
        tb = traceback.extract_tb(e.__traceback__)
        where = [f"{Path(f.filename).name}:{f.lineno}" for f in tb if "wt/models" in f.filename or True][-3:]
        result["error"] = f"{type(e).__name__}: {' '.join(str(e).split())[:300]} @ {where}"
    result["stage"] = stage
    rank = os.environ.get("RANK", "0")
    Path(f"{out}.{rank}").write_text(json.dumps(result))
    os._exit(0)


def places(n):
    if n == 1: return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0)); port = free.getsockname()[1]
    return [{k: str(v) for k, v in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "RANK": r, "LOCAL_RANK": r}.items()} for r in range(n)]


if __name__ == "__main__":
    os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"})
    ctx = multiprocessing.get_context("forkserver"); ctx.set_forkserver_preload(LIBRARIES)
    n = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as tmp:
        for family in sys.argv[2:]:
            family, _, ch = family.partition(":")
            ch = json.loads(ch) if ch else {}
            begin = time.time()
            out = Path(tmp, family + "out")
            if n > 1:
                p = ctx.Process(target=make, args=(family, Path(tmp, family), ch)); p.start(); p.join()
            ps = [ctx.Process(target=measure, args=(family, Path(tmp, family), ch, e, str(out))) for e in places(n)]
            log = open(f"/tmp/fam/{family}.log", "w")
            for p in ps: p.start()
            for p in ps: p.join(120); p.kill()
            f = Path(f"{out}.0")
            print(family, n, f"{time.time()-begin:.1f}s", f.read_text() if f.exists() else f"died {ps[0].exitcode}", flush=True)
