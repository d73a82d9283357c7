"""Tell whether this machine runs the trainers: a list of checks, each PASS, FAIL or SKIP, with advice.

    python -m tools.doctor              everything, in about two minutes
    python -m tools.doctor --quick      versions and hardware only: no run

It trains models/kk_tiny for three steps with grpo.py on one GPU or the CPU, as a user does, then resumes that run. The
exit code is 1 if a check fails. (benchmarks/update_speed.py measures a GPU.)

torch and its dependents are imported late, so that the list also appears if torch is missing or broken.
"""

import json
import math
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Annotated

import runtime  # noqa: F401  # first: it says in one line which packages are missing

# isort: split
import psutil
import tyro

from runtime import files, machine
from tools import prerequisites

ROOT = Path(__file__).parents[1]
GIB = 2**30
CHANGES = ("time/", "tokens_per_s", "peak_memory_gb")  # prefixes of metrics that differ between equal runs
REPORT = "see docs/troubleshooting.md; otherwise report this list"
RUN = (
    "--model models/kk_tiny --steps 3 --save_every 1 --prompts_per_step 4 --responses_per_prompt 4 --eval_every 1000 "
    "--eval_size 4 --max_response_tokens 48 --kv_cache_gb 0.25 --micro_batch_tokens 2000 --run_dir"
)
# A GPU may add sums in another order, so the numbers of two runs differ by rounding.
RESUME_TOLERANCE = 0.02  # relative; on a CPU, all numbers must be equal
# A check: outcome PASS, FAIL or SKIP; the state that was found; what to do, which every FAIL has.
Line = namedtuple("Line", "name outcome found advice", defaults=("",))


def check(name, holds, found, advice=REPORT):
    """Return a check's line. holds: None if it can't be tried here."""
    if holds is None:
        return Line(name, "SKIP", found)
    return Line(name, "PASS", found) if holds else Line(name, "FAIL", found, advice)


def failures(lines):
    return [line for line in lines if line.outcome == "FAIL"]


def last_line(text):
    return (str(text).strip() or "no message").splitlines()[-1][-300:]


def software():
    """Check the installed software; return the lines."""
    on_cpu = not machine.nvidia_smi("name")
    lines = [check("system", True, f"{platform.system()}, Python {platform.python_version()}")]
    lines += [check(name, False, "missing or unsuitable", advice) for name, advice in prerequisites.missing(on_cpu)]
    if failures(lines):
        return lines
    file = "requirements-cpu.txt" if on_cpu else "requirements.txt"
    try:
        import torch  # a build for another CUDA or processor fails here
        import transformers
        import vllm
    except (ImportError, OSError) as error:
        advice = f"pip install -r {file}, best in a new virtual environment (make install does it)"
        return [*lines, check("libraries", False, last_line(error), advice)]
    libraries = torch, transformers, vllm
    found = ", ".join(f"{library.__name__} {library.__version__}" for library in libraries)
    return [*lines, check("libraries", True, found)]


def hardware():
    """Check the machine; return the lines. torch can be imported."""
    import torch

    from runtime import memory

    total = memory.machine_bytes() / GIB
    free = min(psutil.virtual_memory().available / GIB, total)
    disk = shutil.disk_usage(ROOT).free / GIB
    lines = [
        check_gpu(machine.unusable_gpus()),
        check("memory", free >= 3, f"{free:.1f} of {total:.1f} GiB free", "kk_tiny needs 3 GiB: end other programs"),
        check("disk", disk >= 2, f"{disk:.0f} GiB free in {ROOT}", "2 GiB are needed, or a --run_dir on another disk"),
    ]
    for i in range(torch.cuda.device_count()):
        free, total = [size / GIB for size in torch.cuda.mem_get_info(i)]
        advice = "other programs hold it: nvidia-smi names them; end them"
        is_free = free >= 0.15 * total  # vLLM asks for a tenth
        lines.append(check(f"memory of GPU {i}", is_free, f"{free:.1f} of {total:.1f} GiB free", advice))
    if torch.cuda.device_count() > 1:
        command = "torchrun --nproc-per-node=gpu grpo.py --model models/kk_tiny --steps 3"
        lines.append(check("several GPUs", None, f"try {command}; NCCL_DEBUG=INFO shows what goes wrong"))
    return lines


def check_gpu(reason):
    """Check the GPUs. reason: why torch can use none of them, and what to do, or ""."""
    import torch

    if reason:
        found, _, advice = reason.partition(": ")
        return check("GPU", False, found, advice)
    if names := [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]:
        return check("GPU", True, ", ".join(names))
    if there := machine.nvidia_smi("name"):
        return check("GPU", None, f"{there[0]}: CUDA_VISIBLE_DEVICES hides it, or torch is a build for CPUs")
    return check("GPU", None, "none: the trainers run on the CPU, with kk_tiny as their default model")


def training():
    """Check a run on one device, and its resumption; return the lines."""
    from runtime.records import USUAL_GAP

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        problem, rows = run_grpo("three steps of grpo.py on kk_tiny", run_dir, *RUN.split(), run_dir)
        if problem:
            return [check("run", False, problem)]
        seconds = ", ".join(f"{row['time/step']:.1f}" for row in rows)
        lines = [check("run", True, f"{len(rows)} steps, seconds: {seconds}")]
        dtype = json.loads((run_dir / "args.json").read_text())["dtype"]
        lines += check_rows(rows, USUAL_GAP[dtype])

        # It drops the steps after the checkpoint, and repeats them.
        checkpoint = run_dir / "checkpoints" / "step_000002"
        problem, resumed_rows = run_grpo("the same, resumed after step 2", run_dir, "--resume", checkpoint)
        if problem:
            return [*lines, check("resume", False, problem)]
        return [*lines, check_resume(rows, resumed_rows, machine.has_gpu())]


def run_grpo(title, run_dir, *flags):
    """Run grpo.py. Return ("", the rows of the run's steps), or (the last line that it printed, []) if it failed."""
    print(title, flush=True)
    command = [sys.executable, "grpo.py", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        return last_line(done.stdout), []
    return "", [row for row in files.read_rows(run_dir / "metrics.jsonl") if row["step"] > 0]


def check_rows(rows, usual):
    """Check a run's metrics. usual: an upper limit of sampler_gap, in nats, which also fails if it is NaN.

    In the first step policy and reference have the same weights, so each token's KL is 0. sampler_gap: sampler and
    trainer must compute the same model, also after an update, and on a GPU after the sampler has slept and been woken.
    """
    kl, gaps = rows[0]["kl"], [row["sampler_gap"] for row in rows]
    advice = "policy and reference differ, with the same weights: see if --no_compile helps, and report this list"
    of_kl = check("kl", kl == 0, f"{kl:.3g} at step 1, where it must be 0", advice)
    found = f"{', '.join(f'{gap:.2g}' for gap in gaps)} nats; usually below {usual}"
    advice = "sampler and trainer compute different models: try --dtype float32, and report this list"
    return [of_kl, check("sampler_gap", all(gap <= usual for gap in gaps), found, advice)]


def check_resume(rows, resumed_rows, on_gpu):
    """Compare the steps of an unbroken and a resumed run. On a CPU they are equal to the last digit."""
    tolerance = RESUME_TOLERANCE if on_gpu else 0
    wrong = [] if len(rows) == len(resumed_rows) else [f"{len(rows)} / {len(resumed_rows)} steps"]
    for row, other in zip(rows, resumed_rows):
        for name in sorted(row.keys() | other.keys()):
            a, b = row.get(name), other.get(name)
            if a == b or name.startswith(CHANGES):
                continue
            if None in (a, b) or not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance * 1e-3):
                wrong.append(f"{name} {a} / {b}")
    found = ", ".join(wrong[:3]) or f"equal to {tolerance:.0%}"
    return check("resume", not wrong, f"steps of the unbroken / the resumed run: {found}")


def main(
    quick: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="versions and hardware only")] = False,
):
    lines = []
    for stage in [software, hardware] if quick else [software, hardware, training]:
        if not failures(lines):
            lines += stage()
    if "run" not in [line.name for line in lines]:
        lines.append(check("run", None, "first mend what fails above" if failures(lines) else "--quick"))
    for line in lines:
        print(f"{line.outcome}  {line.name}: {line.found}")
        if line.advice:
            print(f"      {line.advice}")
    print(f"{len(failures(lines))} failed")
    sys.exit(bool(failures(lines)))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])
