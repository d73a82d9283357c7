"""Find mistakes before anything large is loaded. Each raises a ValueError that says what to do."""

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from runtime import NEEDS_VLLM, files, machine


def check_gpus(args) -> None:
    """Choose this process's GPU. ValueError if there are too few, or they can't be used.

    Call it before anything uses a GPU: otherwise every process opens a context on GPU 0.
    """
    import torch  # here, because flags.check must find bad flags before torch is loaded

    from runtime import distributed

    if reason := machine.unusable_gpus():
        raise ValueError(reason)
    n_gpus = torch.cuda.device_count()
    if 0 < n_gpus < machine.LOCAL_WORLD_SIZE:
        raise ValueError(
            f"{machine.LOCAL_WORLD_SIZE} processes need a GPU each; there are {n_gpus}"
        )
    if distributed.ON_GPU:
        torch.cuda.set_device(distributed.DEVICE)
        if args.dtype == "bfloat16" and not machine.gpu_has_bfloat16():
            raise ValueError(
                f"{torch.cuda.get_device_name()} has no bfloat16: give --dtype float16, and a "
                "smaller --model (docs/what_fits.md)"
            )


def check_prompts_per_step(args) -> None:
    """Raise ValueError unless updates and processes divide a step's prompts equally."""
    multiple = args.updates_per_step * machine.WORLD_SIZE
    if args.prompts_per_step % multiple:
        raise ValueError(
            f"--prompts_per_step is {args.prompts_per_step}; it must be a multiple of {multiple} "
            f"({args.updates_per_step} updates × {machine.WORLD_SIZE} processes)"
        )


def check_eval_samples(args) -> None:
    """Raise ValueError if several responses to a test problem would all be the same."""
    if args.eval_samples > 1 and args.eval_temperature == 0:
        raise ValueError(
            f"--eval_samples is {args.eval_samples}, but greedy responses are all alike: give an "
            "--eval_temperature"
        )


def check_run_folders(args) -> None:
    """Raise ValueError if --resume, --run_dir or --track can't work."""
    if args.track and not find_spec("wandb"):
        raise ValueError("--track needs Weights & Biases: pip install wandb (or give --no_track)")
    if args.resume:
        run = files.run_of(args.resume)
        if not files.to_resume(args.resume) or not (run / "args.json").exists():
            raise ValueError(f"--resume {args.resume}: no checkpoint there, or no args.json")
        for path in sorted(run.glob("*.jsonl")):
            files.read_rows(path)  # ValueError if a row is damaged
    elif args.run_dir:
        check_new(args.run_dir)


def check_vllm() -> None:
    """Raise ValueError if vLLM is not installed or this is not Linux, without importing it."""
    if sys.platform != "linux" or not find_spec("vllm"):
        raise ValueError(NEEDS_VLLM)


def check_new(run_dir: str | Path) -> None:
    """Raise ValueError if this folder already holds a run."""
    metrics = Path(run_dir, "metrics.jsonl")
    if files.all_checkpoints(run_dir) or (metrics.exists() and metrics.stat().st_size > 0):
        raise ValueError(
            f"--run_dir {run_dir} holds a run: continue it with --resume {run_dir}, delete it, or "
            "name another folder"
        )


def check_model(args, head_chunk: int) -> tuple:
    """Return the tokenizer of --model, and {parameters, estimated_memory_gb, memory_gb}.

    Needed and available memory are per process, in GiB. head_chunk: the number of tokens whose
    logits exist at once. ValueError if the model can't be loaded, or does not fit the chosen sizes
    or this machine's memory.
    """
    from runtime import distributed, memory, models, sampler_process

    config, tokenizer = read_config(args.model)
    only_bfloat16 = config.model_type.startswith("qwen3_5") and not distributed.ON_GPU
    if only_bfloat16 and args.has_sampler and args.dtype != "bfloat16":
        raise ValueError(
            f"--dtype {args.dtype}: vLLM's build for CPUs computes {args.model} in bfloat16 alone: "
            "give --dtype bfloat16"
        )
    n_params, needed, available = memory.estimate(config, args, head_chunk)
    n_teacher = 0
    if args.teacher:
        its_config, its_tokenizer = read_config(args.teacher, "--teacher")
        n_teacher = memory.shapes_of(its_config).num_parameters()
        check_tokens(args, tokenizer.get_vocab(), its_tokenizer.get_vocab())
    if needed > available:
        raise ValueError(
            f"{args.model} at these sizes needs about {needed:.0f} GiB of memory, and there are "
            f"{available:.0f}: a smaller --model, --micro_batch_tokens or --kv_cache_gb, more "
            "processes, --gradient_checkpointing, --kl_coef 0 or LoRA (--lora_rank 16) need less"
        )
    if distributed.ON_GPU:
        memory.check_main(args, n_params, n_teacher)
    if hasattr(args, "sampler_gpus"):
        sampler_process.check(args, memory.shapes_of(config))
    sizes = {"parameters": n_params, "estimated_memory_gb": needed, "memory_gb": available}
    sizes["is_guess"] = memory.is_guess(config)
    sizes["without_images"] = "config" in models.text_only(args.model)
    return tokenizer, sizes


def read_config(model, flag: str = "--model") -> tuple:
    """Return (configuration, tokenizer) of a folder or hub id, or raise ValueError if unusable."""
    from transformers import AutoConfig, AutoTokenizer

    from runtime import models

    check_model_folder(model, flag)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(
            model, trust_remote_code=False, mistral_format=False
        )
    except Exception as error:  # the libraries raise many kinds
        raise ValueError(f"{flag} {model} can't be loaded: {error}") from error
    if quantisation_of(config):
        raise ValueError(
            f"{flag} {model} has quantised weights, which can't be trained: take the model that "
            "they were made from"
        )
    check_weights(flag, model, config)
    return models.language_config(config), tokenizer


def quantisation_of(config):
    """Return a configuration's entry about quantised weights; None if they are ordinary numbers."""
    found = [getattr(config, name, None) for name in ("quantization_config", "compression_config")]
    return found[0] or found[1]


def check_weights(flag: str, model, config) -> None:
    """Raise ValueError if weights in a folder are missing, unknown, unreadable or wrongly shaped.

    Reads only the headers of files. Without this check, transformers would fill missing weights
    with random numbers, different each time. ValueError also if there is a LoRA adapter beside the
    weights: transformers would add it, and vLLM would not.
    """
    from transformers.utils.peft_utils import find_adapter_config_file

    from runtime import memory, models

    if find_adapter_config_file(model):
        raise ValueError(
            f"{flag} {model} has weights and a LoRA adapter (adapter_config.json): if the weights "
            "include the adapter, move the files adapter_* elsewhere; otherwise `python -m "
            "tools.merge` adds it to them"
        )
    if not Path(model).is_dir():  # a hub id
        return
    try:
        model_class = type(memory.shapes_of(models.language_config(config)))
    except Exception:  # memory.estimate refuses it; vLLM may know it (evaluate.py)
        return
    try:
        _, found = model_class.from_pretrained(
            model,
            **{"config": config} | models.text_only(model),
            device_map="meta",
            ignore_mismatched_sizes=True,  # report them instead of raising an error
            output_loading_info=True,
        )
    except Exception as error:  # many kinds, for two formats
        pointers = [path.name for path in Path(model).glob("*") if is_pointer(path)]
        advice = " (they are git's pointers: `git lfs pull`)" if pointers else ""
        raise ValueError(f"{flag} {model}: the weights can't be read: {error}{advice}") from error
    # transformers' Gemma 3 takes the angles in old checkpoints for weights; no model needs them.
    wrong = [key for key in found["unexpected_keys"] if not key.endswith(".inv_freq")]
    if models.reads_images(config):
        wrong = [key for key in wrong if key.startswith("model.layers.")]
    wrong += [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
    if wrong:
        raise ValueError(
            f"{flag} {model}: {len(wrong)} weights are missing, unknown or of another shape than "
            f"config.json says, such as {min(wrong)}"
        )


def is_pointer(path: Path) -> bool:
    """Return whether a file is what git-lfs leaves in place of a large one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(30).startswith(b"version https://git-lfs")


def check_teacher(args) -> None:
    """Raise ValueError if opd.py's --teacher is missing or no model folder. Other scripts: None."""
    if args.teacher == "":
        raise ValueError("--teacher is missing: it takes the folder of the model to learn from")
    if args.teacher:
        check_model_folder(args.teacher, "--teacher")


def check_tokens(args, vocabulary, teachers) -> None:
    """Raise ValueError unless the teacher has the model's tokens. Both are {token: number}."""
    different = vocabulary.items() - teachers.items()
    if different:
        raise ValueError(
            f"--teacher {args.teacher} has other tokens than --model {args.model}: "
            f"{len(different)} of the model's {len(vocabulary)} are missing or have another number"
        )


def check_model_folder(model, flag: str = "--model") -> None:
    """Raise ValueError if `model` is a path without a model."""
    if is_path(model) and not Path(model, "config.json").exists():
        raise ValueError(
            f"{flag} {model} is not a model folder: there is no {Path(model, 'config.json')} in "
            f"{Path.cwd()}; `make model` gets a small one"
        )


def is_path(name):
    """Return whether a model's name is a path. Anything else may be a hub id."""
    in_a_folder = "/" in name and Path(name).parent.is_dir()
    return in_a_folder or name.startswith((".", "~")) or name.count("/") > 1 or Path(name).exists()


# -------------------------------------------------------------------------- inputs of a resumed run


def digest(problems: list[dict]):
    """Return the SHA-256 (hex) of the problems' numbers, tokens and answers, in their order."""
    found = hashlib.sha256()
    for problem in problems:
        kept = [problem.get(key) for key in ("id", "prompt_ids", "response_ids", "answer")]
        found.update(json.dumps(kept, default=str).encode() + b"\n")
    return found.hexdigest()


def check_resumed(args, digests) -> None:
    """Raise ValueError if --resume would mix two test sets, or test on problems trained on.

    digests: {"training": digest, "test": digest} of the problems now.
    """
    if not args.resume:
        return
    run = files.run_of(args.resume)
    before = files.read_object(run / "run.json").get("sizes", {}).get("digests")
    if before is None:
        print(f"{run} is of an older commit: whether its problems have changed is not checked")
        return
    differ = [split for split in digests if before[split] != digests[split]]
    if differ:
        raise ValueError(
            f"--resume {args.resume}: the {' and '.join(differ)} problems are not those that the "
            "run began with: a setting (--data, --seed, --eval_size, --max_prompt_tokens …), a "
            "file, the tokenizer or the chat template has changed. To go on with other problems, "
            f"start a new run with --model {files.to_resume(args.resume)}"
        )
