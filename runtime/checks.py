"""Find mistakes before anything large is loaded. Each raises a ValueError that says what to do."""

import re
from importlib.util import find_spec
from pathlib import Path

from rewards import rows
from runtime import curves, folders, ranks

HUB_ID = r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?"


def check_gpus(args):
    """Choose this process's GPU. ValueError if there are too few, or they can't be used.

    Call it before anything uses a GPU: otherwise every process opens a context on GPU 0.
    """
    import torch  # here, because flags.check must find bad flags before torch is loaded

    from runtime import machine, processes

    if reason := machine.unusable_gpus(getattr(args, "has_sampler", True)):
        raise ValueError(reason)
    n_gpus = torch.cuda.device_count()
    if 0 < n_gpus < ranks.LOCAL_WORLD_SIZE:
        raise ValueError(
            f"{ranks.LOCAL_WORLD_SIZE} processes on this machine, but {n_gpus} GPU(s): one for "
            "each is needed"
        )
    if processes.ON_GPU:
        torch.cuda.set_device(processes.DEVICE)
        if torch.cuda.get_device_capability() < machine.LEAST_CAPABILITY:
            raise ValueError(
                f"{torch.cuda.get_device_name()} is too old: torch has kernels for compute "
                f"capability 7.5 and newer (T4, RTX 20); {machine.ON_A_CPU}"
            )
        if args.dtype == "bfloat16" and not machine.gpu_has_bfloat16():
            raise ValueError(
                f"{torch.cuda.get_device_name()} has no bfloat16, which came with the generation "
                "of A100 and RTX 30: give --dtype float16 and a smaller --model (docs/what_fits.md)"
                f"; {machine.ON_A_CPU}"
            )


def check_prompts_per_step(args):
    """Raise ValueError unless updates and processes divide a step's prompts equally."""
    multiple = args.updates_per_step * ranks.WORLD_SIZE
    if args.prompts_per_step % multiple:
        raise ValueError(
            f"--prompts_per_step is {args.prompts_per_step}; it must be a multiple of {multiple} "
            f"({args.updates_per_step} updates × {ranks.WORLD_SIZE} processes)"
        )


def check_without_effect(args):
    """Raise ValueError if a setting would have no effect without another."""
    if args.eval_samples > 1 and args.eval_temperature == 0:
        raise ValueError(
            f"--eval_samples is {args.eval_samples}, but greedy responses are all alike: give an "
            "--eval_temperature"
        )
    if args.lora_rank == 0 and args.lora_alpha != type(args).lora_alpha:
        raise ValueError(f"--lora_alpha is {args.lora_alpha}, but there is no LoRA (--lora_rank)")


def check_run_folders(args):
    """Raise ValueError if --resume, --run_dir or --track can't work."""
    if args.resume:
        run = folders.run_of(args.resume)
        if not folders.to_resume(args.resume) or not (run / "args.json").exists():
            raise ValueError(
                f"--resume {args.resume}: no complete checkpoint there, or no args.json"
            )
        for path in sorted(run.glob("*.jsonl")):
            curves.read_rows(path)  # ValueError if a row is damaged
    elif args.run_dir:
        check_new(args.run_dir)
    if args.track and not find_spec("wandb"):
        raise ValueError("--track needs Weights & Biases: pip install wandb")


def check_new(run_dir):
    """Raise ValueError if this folder already holds a run."""
    metrics = Path(run_dir, "metrics.jsonl")
    if folders.all_of(run_dir) or (metrics.exists() and metrics.stat().st_size > 0):
        raise ValueError(
            f"--run_dir {run_dir} holds a run: continue it with --resume {run_dir}, delete it, or "
            "name another folder"
        )


def check_model(args, head_chunk):
    """Return the tokenizer of --model, and {parameters, estimated_memory_gb, memory_gb}.

    Needed and available memory are per process, in GiB. head_chunk: the number of tokens whose
    logits exist at once. ValueError if the model can't be loaded, or does not fit the chosen sizes
    or this machine's memory.
    """
    from runtime import memory, model_files, sampler_process

    config, tokenizer = read_config(args.model)
    n_params, needed, available = memory.estimate(config, args, head_chunk)
    model_files.check_weights("--model", args.model, config)
    if args.teacher:
        its_config, its_tokenizer = read_config(args.teacher, "--teacher")
        check_tokens(args, tokenizer.get_vocab(), its_tokenizer.get_vocab())
        model_files.check_weights("--teacher", args.teacher, its_config)
    if needed > available:
        raise ValueError(
            f"{args.model} at these sizes needs about {needed:.0f} GiB of memory, and there are "
            f"{available:.0f}: a smaller --model, --micro_batch_tokens or --kv_cache_gb, more "
            "processes, --gradient_checkpointing, --kl_coef 0 or LoRA (--lora_rank 16) need less"
        )
    sampler_process.check(args, n_params)
    sizes = {
        "parameters": n_params,
        "estimated_memory_gb": needed,
        "memory_gb": available,
    }
    return tokenizer, sizes


def read_config(model, flag="--model"):
    """Return (configuration, tokenizer) of a folder or hub id, or raise ValueError if unusable."""
    from transformers import AutoConfig, AutoTokenizer

    from runtime import model_files

    check_model_folder(model)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(
            model, trust_remote_code=False, mistral_format=False
        )
    except Exception as error:  # the libraries raise many kinds
        raise ValueError(f"{flag} {model} can't be loaded: {no_folder(model)}{error}") from error
    model_files.check_trainable(flag, model, config)
    return config, tokenizer


def no_folder(model):
    """Begin a message about a missing folder: `model` may have been meant as a path."""
    if Path(model).exists():
        return ""
    return f"there is no folder {model} in {Path.cwd()}; if it is a hub id: "


def check_data_files(args):
    """Raise ValueError if --data or --test_data is a path, and nothing is there."""
    for flag, name in (("--data", args.data), ("--test_data", args.test_data)):
        if name and rows.is_written_as_path(name) and not Path(name).expanduser().exists():
            raise ValueError(f"{flag} {name}: there is no such file or folder")


def check_teacher(args):
    """Raise ValueError if opd.py's --teacher is missing or no model folder. Other scripts: None."""
    if args.teacher is None:
        return
    if not args.teacher:
        raise ValueError("--teacher is missing: it takes the folder of the model to learn from")
    for name in ("config.json", "tokenizer.json"):
        if not Path(args.teacher, name).exists():
            raise ValueError(f"--teacher {args.teacher} is not a model folder: no {name} in it")


def check_tokens(args, vocabulary, teachers):
    """Raise ValueError unless the teacher has the model's tokens. Both are {token: number}."""
    different = vocabulary.items() - teachers.items()
    if different:
        raise ValueError(
            f"--teacher {args.teacher} has other tokens than --model {args.model}: "
            f"{len(different)} of the model's {len(vocabulary)} are missing or have another number"
        )


def check_model_folder(model):
    """Raise ValueError if `model` is a path without a model."""
    if is_path(model) and not Path(model, "config.json").exists():
        raise ValueError(
            f"--model {model} is not a model folder: there is no {Path(model, 'config.json')} in "
            f"{Path.cwd()}; `make model` gets a small one"
        )


def is_path(name):
    """Return whether a model or data set's name is a path. Anything else may be a hub id."""
    path = Path(name)
    in_a_folder = len(path.parts) > 1 and path.parent.is_dir()
    is_no_id = name.startswith((".", "/", "~")) or not re.fullmatch(HUB_ID, name)
    return is_no_id or in_a_folder or path.exists()
