"""Tell whether this machine runs the trainers: a table of checks, each PASS, FAIL or SKIP, with advice.

    python -m tools.doctor              everything, in about two minutes
    python -m tools.doctor --quick      versions and hardware only: no run

It trains models/kk_tiny for three steps with grpo.py, as a user does, then resumes that run. With several GPUs it makes
the same first step on all of them. The exit code is 1 if a check fails. (benchmarks/update_speed.py measures a GPU.)

torch and its dependents are imported late, so that the table also appears if torch is missing or broken.
"""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro
from rich.console import Console
from rich.table import Table

from runtime import curves, machine

ROOT = Path(__file__).parents[1]
GIB = 2**30
CHANGES = ("time/", "tokens_per_s", "peak_memory_gb")  # prefixes of metrics that differ between equal runs
REPORT = "see docs/troubleshooting.md; otherwise report this table"

SIZES = {  # flags of the real run
    "model": "models/kk_tiny",
    "steps": 3,
    "save_every": 1,
    "responses_per_prompt": 4,
    "max_response_tokens": 48,
    "eval_every": 1000,  # only before the first step and after the last
    "kv_cache_gb": 0.25,
    "micro_batch_tokens": 2000,
}
RESUMED_AFTER = 2  # steps
PATIENCE = 1800  # seconds per run, which takes about a minute

# A GPU may add sums in another order, so the numbers of two runs differ by rounding.
RESUME_TOLERANCE = 0.02  # relative; on a CPU, all numbers must be equal
# On several GPUs a request shares its batch with others. A borderline token may change, and the rest of its response
# with it. A gradient that is divided by the number of processes is off by a factor of 2 or more.
SPREAD_TOLERANCE = {"response_tokens": 0.15, "entropy": 0.15, "grad_norm": 0.45}  # relative


@dataclass
class Line:
    """One check."""

    name: str
    outcome: str  # PASS, FAIL or SKIP
    found: str  # the state here, or the result
    advice: str = ""  # what to do; every FAIL has advice


def check(name, holds, found, advice=REPORT):
    """Return a check's line. holds: None if it can't be tried here."""
    if holds is None:
        return Line(name, "SKIP", found)
    return Line(name, "PASS", found) if holds else Line(name, "FAIL", found, advice)


def failures(lines):
    return [line for line in lines if line.outcome == "FAIL"]


def last_line(text):
    """Return the last line with an error, or with any text, at most 300 characters."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1][-300:]


# ---------------------------------------------------------------------------------------------------------- software


def software():
    """Check the installed software; return the lines."""
    is_right = platform.system() == "Linux" and sys.version_info >= (3, 11)
    advice = "vLLM needs Linux (on Windows, WSL 2 is one) and Python 3.11 or newer: make install PYTHON=python3.11"
    lines = [check("system", is_right, f"{platform.system()}, Python {platform.python_version()}", advice)]
    if machine.nvidia_smi("driver_version") and machine.cuda_of_torch() and not machine.gpus_are_hidden():
        headers = Path(sysconfig.get_path("include", "posix_prefix"))
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        advice = "Triton builds a module for Python: apt install gcc python3-dev (of this version of Python), or set CC"
        is_there = bool(compiler) and (headers / "Python.h").exists()
        lines.append(check("compiler", is_there, f"{compiler}, and Python.h in {headers}", advice))
    file = "requirements.txt" if machine.cuda_of_torch() else "requirements-cpu.txt"
    lines.append(check_libraries(file))
    try:
        import torch  # a build for another CUDA or processor fails here
    except (ImportError, OSError) as error:
        return [*lines, check("torch loads", False, last_line(error), f"pip install --force-reinstall -r {file}")]
    return [*lines, check("torch loads", True, torch.__version__)]


def check_libraries(file):
    """Check that what a requirements file asks for is installed. pip compares, and downloads nothing."""
    words = ["install", "--dry-run", "--no-index", "--no-deps", "--quiet", "--disable-pip-version-check", "-r", file]
    done = subprocess.run([sys.executable, "-m", "pip", *words], cwd=ROOT, capture_output=True, text=True)
    advice = f"pip install -r {file}, best in a new virtual environment (make install does it)"
    found = last_line(done.stderr) if done.returncode else f"those of {file}"
    return check("libraries", done.returncode == 0, found, advice)


# ---------------------------------------------------------------------------------------------------------- hardware


def hardware():
    """Check the machine; return the lines. torch can be imported."""
    import torch

    from runtime import memory

    model = machine.about_processor().get("model name", platform.machine())
    total = memory.machine_bytes() / GIB
    free = min(psutil.virtual_memory().available / GIB, total)
    disk = shutil.disk_usage(ROOT).free / GIB
    lines = [
        check_gpu(machine.unusable_gpus()),
        check("fast type", True, machine.fast_dtype()),
        check("processor", True, f"{len(os.sched_getaffinity(0))} cores: {model}"),
        check("memory", free >= 3, f"{free:.1f} of {total:.1f} GiB free", "kk_tiny needs 3 GiB: end other programs"),
        check("disk", disk >= 2, f"{disk:.0f} GiB free in {ROOT}", "2 GiB are needed, or a --run_dir on another disk"),
    ]
    for i in range(torch.cuda.device_count()):
        free, total = [size / GIB for size in torch.cuda.mem_get_info(i)]
        advice = "other programs hold it: nvidia-smi names them; end them"
        is_free = free >= 0.15 * total  # vLLM asks for a tenth
        lines.append(check(f"memory of GPU {i}", is_free, f"{free:.1f} of {total:.1f} GiB free", advice))
    if torch.cuda.device_count() > 1:
        shared = shutil.disk_usage("/dev/shm").total / GIB  # containers often have 0.06
        advice = "NCCL needs more between GPUs: docker run --shm-size 16g, or --ipc host"
        lines.append(check("shared memory", shared >= 1, f"/dev/shm has {shared:.2f} GiB", advice))
    return lines


def check_gpu(reason):
    """Check the GPUs. reason: why torch can use none of them, and what to do, or ""."""
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    there = machine.nvidia_smi("name")
    if reason:
        found, _, advice = reason.partition(": ")
        return check("GPU", False, found, advice)
    if names:
        return check("GPU", True, ", ".join(names))
    if not there:
        return check("GPU", None, "none: the trainers run on the CPU, with kk_tiny as their default model")
    if machine.gpus_are_hidden():
        return check("GPU", None, f"{there[0]}, hidden by CUDA_VISIBLE_DEVICES: unset it to use the GPU")
    build = "this torch is a build for CPUs; to use it: make install VENV=.venv-gpu, which takes 9 GB of disk"
    return check("GPU", None, f"{there[0]} is there, but {build}")


# ---------------------------------------------------------------------------------------------------------- real run


def training():
    """Check a run on one device, its resumption, and the same first step on all GPUs; return the lines."""
    import torch

    n_gpus = torch.cuda.device_count()
    # A multiple of two updates × processes, so that the same step runs on one GPU and on all. As many test problems.
    prompts = max(4, 2 * n_gpus)
    sizes = SIZES | {"prompts_per_step": prompts, "eval_size": prompts}
    if n_gpus and not machine.gpu_has_bfloat16():
        sizes["dtype"] = "float32"
    with tempfile.TemporaryDirectory() as folder:
        whole, spread = Path(folder, "whole"), Path(folder, "spread")
        if problem := run_grpo("three steps of grpo.py on kk_tiny", whole, sizes | {"run_dir": whole}):
            return [check("run", False, problem)]
        rows = steps_of(whole)
        seconds = ", ".join(f"{row['time/step']:.1f}" for row in rows)
        lines = [check("run", True, f"{len(rows)} steps, seconds: {seconds}")]
        usual = usual_gap(whole)
        lines += check_rows(rows, usual)

        # It drops the steps after the checkpoint, and repeats them.
        flags = {"resume": whole / "checkpoints" / f"step_{RESUMED_AFTER:06d}"}
        problem = run_grpo(f"the same, resumed after step {RESUMED_AFTER}", whole, flags)
        lines.append(check("resume", False, problem) if problem else check_resume(rows, steps_of(whole), n_gpus > 0))

        if n_gpus < 2:
            return [*lines, check("several GPUs", None, "fewer than two GPUs")]
        flags = sizes | {"run_dir": spread, "steps": 1}
        if problem := run_grpo(f"the first step on {n_gpus} GPUs", spread, flags, n_gpus):
            advice = "NCCL_DEBUG=INFO shows what NCCL does, CUDA_VISIBLE_DEVICES=0 uses one GPU; report the table"
            return [*lines, check("several GPUs", False, problem, advice)]
        return [*lines, check_same_step(rows[0], steps_of(spread)[0], usual)]


def usual_gap(run_dir):
    """Return an upper limit of a run's sampler_gap, in nats, if sampler and trainer compute the same model."""
    from runtime.records import USUAL_GAP

    return USUAL_GAP[json.loads((run_dir / "args.json").read_text())["dtype"]]


def run_grpo(title, run_dir, flags, processes=1):
    """Run grpo.py with flags, {name: value}. Return "", or the last line that it printed if it failed.

    processes: their number, under torchrun if more than one.
    """
    print(title, flush=True)
    command = [sys.executable, "grpo.py", *(f"--{name}={value}" for name, value in flags.items())]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    log = run_dir.with_suffix(".log")
    try:
        with log.open("w") as output:
            done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return f"not finished after {PATIENCE} s"
    return last_line(log.read_text()) if done.returncode else ""


def steps_of(run_dir):
    """Return the rows of a run's steps."""
    return [row for row in curves.read_rows(run_dir / "metrics.jsonl") if row["step"] > 0]


def check_rows(rows, usual):
    """Check a run's metrics. usual: an upper limit of sampler_gap, in nats, which also fails if it is NaN.

    In the first step policy and reference have the same weights, so each token's KL is 0. sampler_gap: sampler and
    trainer must compute the same model, also after an update, and on a GPU after the sampler has slept and been woken.
    """
    first, *later = rows
    gaps = ", ".join(f"{row['sampler_gap']:.2g}" for row in later)
    shares = ", ".join(f"{row['weights_changed']:.0%}" for row in rows)
    words = f"nats; usually below {usual}"
    is_usual = all(row["sampler_gap"] <= usual for row in later)
    return [
        check(
            "kl", first["kl"] == 0, f"{first['kl']:.3g} at step 1, where it must be 0",
            "policy and reference compute different numbers from the same weights: report the table; below 1e-6 it is "
            "rounding: see if --no_compile makes it 0",
        ),
        check(
            "sampler_gap", first["sampler_gap"] <= usual, f"{first['sampler_gap']:.2g} {words}",
            "sampler and trainer compute different models: try --dtype float32, and report the table",
        ),
        check(
            "sampler_gap after updates", is_usual, f"{gaps} {words}",
            "the updated weights do not reach the sampler, or on a GPU its sleep mode loses some: another version of "
            "vLLM, and report the table",
        ),
        check("weights_changed", any(row["weights_changed"] > 0 for row in rows), shares),
    ]  # fmt: skip


def differing(row, other, tolerance):
    """Return the names of numbers that differ by more than this fraction, except seconds and memory."""
    names = []
    for name in sorted(row.keys() | other.keys()):
        a, b = row.get(name), other.get(name)
        if a == b or name.startswith(CHANGES):
            continue
        if None in (a, b) or not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance * 1e-3):
            names.append(f"{name} {a} / {b}")
    return names


def check_resume(rows, resumed_rows, on_gpu):
    """Compare the steps of an unbroken and a resumed run. On a CPU they are equal to the last digit."""
    tolerance = RESUME_TOLERANCE if on_gpu else 0
    wrong = [name for pair in zip(rows, resumed_rows) for name in differing(*pair, tolerance)]
    if len(rows) != len(resumed_rows):
        wrong = [f"{len(rows)} / {len(resumed_rows)} steps"]
    found = ", ".join(wrong[:3]) or f"equal to {tolerance:.0%}"
    return check("resume", not wrong, f"steps of the unbroken / the resumed run: {found}")


def check_same_step(alone, spread, usual):
    """Compare the first step on one GPU and on several: the same prompts, and a gradient of the same size."""
    is_same = spread["kl"] == 0 and spread["sampler_gap"] <= usual
    for name, tolerance in SPREAD_TOLERANCE.items():
        is_same = is_same and math.isclose(alone[name], spread[name], rel_tol=tolerance)
    numbers = [f"{name} {alone[name]:.3g} / {spread[name]:.3g}" for name in (*SPREAD_TOLERANCE, "kl", "sampler_gap")]
    return check("several GPUs", is_same, f"the first step on one / several: {', '.join(numbers)}")


# -------------------------------------------------------------------------------------------------------------- main


@dataclass
class Args:
    """The checks to run."""

    quick: bool = False  # only versions and hardware, in seconds: no training


def main(args):
    lines = []
    for stage in [software, hardware] if args.quick else [software, hardware, training]:
        if not failures(lines):
            lines += stage()
    if "run" not in [line.name for line in lines]:
        lines.append(check("run", None, "first mend what fails above" if failures(lines) else "--quick"))
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 150  # for output into a file or a report
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for heading, share in (("check", None), ("", None), ("found", 3), ("what to do", 2)):
        table.add_column(heading, overflow="fold", ratio=share)
    for line in lines:
        table.add_row(line.name, line.outcome, line.found, line.advice, style="bold red" if line.advice else "")
    console.print(table)
    verdict = "nothing is missing; without --quick it also trains" if args.quick else "this machine runs the trainers"
    console.print(f"{len(failures(lines))} failed" if failures(lines) else verdict)
    sys.exit(bool(failures(lines)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
