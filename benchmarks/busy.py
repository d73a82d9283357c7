"""Measure how another program, or a second run, slows down a run on a CPU: seconds per step of grpo.py, by phase.

    python benchmarks/busy.py

Each model trains for four steps alone, next to a Python program that never stops, and next to a second run that starts
at the same moment. The first step, which loads and compiles, is excluded. runtime/machine.py chooses how threads wait;
OMP_WAIT_POLICY and VLLM_CPU_OMP_THREADS_BIND in the environment override it. Nothing else should run meanwhile.
Results: benchmarks/results/busy.json.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import common
import tyro
from tqdm import tqdm

from runtime import files

COMMANDS = {
    "kk_tiny": "--prompts_per_step 6 --max_response_tokens 256",
    "SmolLM2-135M-Instruct": "--task rewards/largest.py --temperature 1 --prompts_per_step 4 --responses_per_prompt 8 "
    "--max_response_tokens 32 --updates_per_step 1 --kl_coef 0",
}
PHASES = ("sample", "logprob", "train", "step")


def seconds(folder):
    """Return {phase: mean seconds over steps 2 to 4} of the run in this folder."""
    steps = [row for row in files.read_rows(folder / "metrics.jsonl") if row["step"] > 1]
    return {phase: round(fmean(row[f"time/{phase}"] for row in steps), 2) for phase in PHASES}


def measure(model, beside):
    """Return [{phase: seconds}, …], one per run. beside: "nothing", "program" or "run"."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, str(i)) for i in range(2 if beside == "run" else 1)]
        flags = f"{COMMANDS[model]} --steps 4 --eval_every 4 --eval_size 2".split()
        commands = [
            [sys.executable, "grpo.py", "--model", f"models/{model}", *flags, "--run_dir", str(one)] for one in folders
        ]
        started = []
        try:
            if beside == "program":
                started.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            runs = [subprocess.Popen(command, cwd=common.ROOT, stdout=subprocess.DEVNULL) for command in commands]
            started += runs
            failed = [run.wait() for run in runs]
        finally:
            for process in started:
                process.terminate()
        if any(failed):
            raise RuntimeError(f"{model} beside {beside}: a run ended with {failed}")
        return [seconds(one) for one in folders]


def main():
    """Measure everything and write the results."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the started programs end, too
    jobs = [(model, beside) for model in COMMANDS for beside in ("nothing", "program", "run")]
    results = [
        {"model": model, "beside": beside, "runs": measure(model, beside)}
        for model, beside in tqdm(jobs, desc="busy", unit="case")
    ]
    common.write("busy", {"commands": COMMANDS, "results": results})


if __name__ == "__main__":
    tyro.cli(main)
