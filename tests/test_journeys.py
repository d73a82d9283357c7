"""What users ran into: each of these went wrong once."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, metrics, python, run, small, timeless, until

import grpo
from runtime import flags

NEVER_MIXED = {"max_response_tokens": 8, "max_refills": 1, "save_every": 1, "dtype": "float32"}  # no answer fits


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_checkpoint_before_the_first_update_resumes_to_the_last_bit(processes, tmp_path):
    """dapo.py makes no update if no group is mixed: AdamW has no state yet."""
    run("dapo.py", *small(tmp_path, **NEVER_MIXED), processes=processes)
    rows = metrics(tmp_path)
    assert [row["optimizer_steps"] for row in rows] == [0, 0]
    run("dapo.py", "--resume", tmp_path / "checkpoints" / "step_000001", processes=processes)
    assert [timeless(row) for row in metrics(tmp_path)] == [timeless(row) for row in rows]


def test_adamws_first_update_is_the_same_with_the_state_that_a_checkpoint_makes():
    from runtime import checkpoints

    weights = []
    for prepared in (False, True):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.01, fused=True)
        if prepared:
            checkpoints.of_adamw(parameter, optimizer)
        for _ in range(3):
            parameter.grad = parameter.detach() ** 2
            optimizer.step()
        weights.append(parameter.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("grpo.py", "--clip_low 2", "--clip_low is 2.0; it must be in [0, 1]"),
        ("grpo.py", "--run_dir {run}", "holds a run"),
        ("grpo.py", "--model {run}", "is not a model folder"),
        ("grpo.py", "--task nothing.py", "there is no such file"),
        ("acpo.py", "--clip_base 4", "error: --clip_base is 4.0; it must be at most --clip_max, 3.0"),
        ("opd.py", "--teacher nowhere", "error: --teacher nowhere is not a model folder: no config.json in it"),
        ("grpo.py", "--help", ""),
    ],
)
def test_what_needs_no_model_is_refused_before_torch_is_imported(script, flags, words, tmp_path):
    Path(tmp_path, "metrics.jsonl").write_text('{"step": 1}\n')
    flags = flags.format(run=tmp_path).split()
    code = (
        "import runpy, sys\n"
        f"sys.argv = {[script, *flags]}\n"
        "try:\n"
        f"    runpy.run_path('{script}', run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "False False"
    assert done.returncode == (0 if flags == ["--help"] else 2)
    assert words in done.stderr and done.stderr.count("\n") <= 1


def test_a_python_without_the_packages_says_which_one_has_them():
    done = python("-S", "grpo.py", "--help")
    assert done.returncode == 1 and done.stderr.startswith("error: this Python lacks") and ".venv" in done.stderr


def test_importing_a_script_checks_nothing(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest", "--clip_low", "2"])
    flags.check(grpo.Args, grpo.TASKS)


def test_a_run_that_goes_on_can_be_asked_to_stop_but_not_be_taken_over(tmp_path):
    """The first Ctrl-C says at once what happens now; a second run of the same folder is refused within seconds.

    It runs without progress bars: vLLM divided by the seconds of a disabled one.
    """
    flags = [sys.executable, "grpo.py", *map(str, small(tmp_path, steps=500, save_every=1))]
    log = tmp_path.with_suffix(".log")
    with open(log, "w") as file:
        env = os.environ | {"TQDM_DISABLE": "1"}
        alive = subprocess.Popen(flags, cwd=ROOT, stdout=file, stderr=file, env=env)
    try:
        until(lambda: Path(tmp_path, "checkpoints", "step_000001").exists())
        began = time.monotonic()
        other = python("grpo.py", "--resume", tmp_path)
        assert other.returncode == 2 and f"is in use by process {alive.pid}" in other.stderr
        assert time.monotonic() - began < 5
        alive.send_signal(signal.SIGINT)
        until(lambda: "SIGINT: the run ends after this step, with a checkpoint. A second one" in log.read_text(), 10)
        assert alive.wait(timeout=120) == 0
        stopped = re.search(r"stopped by SIGINT after step (\d+): ", log.read_text())
        assert log.read_text().endswith(f"\nto go on: --resume {tmp_path}\n")
    finally:
        alive.kill()
    there = run("grpo.py", "--resume", tmp_path, "--steps", stopped[1], "--dry_run").stdout
    assert f"goes on after step {stopped[1]} of {stopped[1]}: nothing is left to do without --steps above" in there


@contextlib.contextmanager
def under_torchrun(folder, starter, **flags):
    """(torchrun, the file of its output) of a run of grpo.py after its first checkpoint; the block's end kills all."""
    log = folder.with_suffix(".log")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *starter]
    words = [*launcher, "grpo.py", *small(folder, steps=500, save_every=1, **flags)]
    with open(log, "w") as file:
        alive = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=file, stderr=file)
    try:
        until(lambda: Path(folder, "checkpoints", "step_000001").exists())
        yield alive, log
    finally:
        for child in children_of(alive):  # each in a session of its own
            os.kill(child, signal.SIGKILL)
        alive.kill()


def children_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return list(map(int, children.read_text().split())) if children.exists() else []


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_torchrun_says_which(tmp_path):
    folder = tmp_path / "run"
    with under_torchrun(folder, ["--nproc-per-node", "2"], dtype="float32") as (alive, log):
        killed = children_of(alive)[-1]
        os.kill(killed, signal.SIGKILL)
        assert alive.wait(timeout=60) == 1
    assert f"Signal 9 (SIGKILL) received by PID {killed}" in log.read_text()
