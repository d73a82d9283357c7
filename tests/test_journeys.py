"""What users ran into: each of these went wrong once."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import KK_TINY, ROOT, metrics, python, run, small, timeless, until

import grpo
import grpo_ar_lopti
from runtime import dealing, defaults, flags, header

NEVER_MIXED = {"max_response_tokens": 8, "max_refills": 1, "save_every": 1, "dtype": "float32"}  # no answer fits


# ------------------------------------------------------------------------------------------ a step without an update


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


# ----------------------------------------------------------------------------------------------- refused at once


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("grpo.py", "--clip_low 2", "--clip_low is 2.0; it must be in [0, 1]"),
        ("grpo.py", "--run_dir {run}", "holds a run"),
        ("grpo.py", "--resume {run}/nothing", "no complete checkpoint"),
        ("grpo.py", "--prompts_per_step 3", "must be a multiple of 2"),
        ("grpo.py", "--data {run}/nothing.jsonl", "there is no such file"),
        ("grpo.py", "--model {run}", "is not a model folder"),
        (
            "grpo.py",
            "--model no/such/folder",
            f"no/such/folder is not a model folder: there is no such folder in {ROOT}",
        ),
        ("grpo.py", "--people 9", "people must be"),
        ("grpo.py", "--task nothing.py", "there is no such file"),
        ("grpo.py", "--lora_rank -1", "error: --lora_rank is -1; it must be 0 or greater"),
        ("grpo.py", "--lora_alpha 16", "error: --lora_alpha is 16.0, but there is no LoRA"),
        ("grpo.py", "--lora_rank 8 --lora_alpha 0", "error: --lora_alpha is 0.0; it must be greater than 0"),
        ("acpo.py", "--clip_base 4", "error: --clip_base is 4.0; it must be at most --clip_max, 3.0"),
        ("acpo.py", "--kl k1", "error: --kl is k1, but there is no KL term: give a --kl_coef"),
        ("grpo.py", "--gym chain_sum", "error: --gym is of --task gym, not of kk"),
        ("grpo.py", "--model tests/nothing", "one; if it is a hub id, the folder tests here hides it"),
        ("sft.py", "--data {run}/metrics.jsonl --restated", "error: --careful and --restated are of the task's own"),
        ("opd.py", "", "error: --teacher is missing: it takes the folder of the model to learn from"),
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


# ------------------------------------------------------------------------------------- signals, and two of one run


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


def kill_with_children(process):
    """torchrun's processes would outlive it, each in a session of its own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if children.exists():
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("patience", [1, 100])
def test_the_last_line_after_ctrl_c_under_torchrun_says_how_to_go_on(patience, tmp_path):
    """torchrun kills a step that takes longer than its patience, in seconds, and ends with a traceback."""
    folder, log = tmp_path / "run", tmp_path / "log"
    starter = ["-m", "torch.distributed.run", "--standalone", "--shutdown-timeout", str(patience)]
    flags = small(folder, steps=500, save_every=1, responses_per_prompt=256, max_response_tokens=200)
    with open(log, "w") as file:
        alive = subprocess.Popen(
            [sys.executable, *starter, "grpo.py", *map(str, flags)], cwd=ROOT, stdout=file, stderr=file
        )
    try:
        until(lambda: Path(folder, "checkpoints", "step_000001").exists())
        alive.send_signal(signal.SIGINT)
        until(lambda: "torchrun waits for 30 seconds" in log.read_text(), 10)
        assert alive.wait(timeout=200) != 0
    finally:
        kill_with_children(alive)
    goes_on = f"--resume {folder} goes on from step_00000" if patience == 1 else f"to go on: --resume {folder}"
    until(lambda: goes_on in log.read_text().rstrip().splitlines()[-1], 20)
    assert "Traceback" in log.read_text()


@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_one_line_that_comes_last(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "grpo.py"]
    words = [sys.executable, *launcher, *map(str, small(tmp_path, steps=500, save_every=1, dtype="float32"))]
    log = tmp_path.with_suffix(".log")
    with open(log, "w") as file:
        alive = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file)
    try:
        until(lambda: Path(tmp_path, "checkpoints", "step_000001").exists())
        children = Path(f"/proc/{alive.pid}/task/{alive.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert alive.wait(timeout=60) == 1
    finally:
        kill_with_children(alive)
    until(lambda: log.read_text().rstrip().splitlines()[-1].startswith("process 1 (pid"), 10)
    last = log.read_text().rstrip().splitlines()[-1]
    assert last.startswith(
        f"process 1 (pid {children[-1]}) has died, so the run ends: --resume {tmp_path} goes on from"
    )
    assert "[rank0]: Traceback" not in log.read_text()


# ---------------------------------------------------------------------------------------------- what a run says


@pytest.mark.parametrize("task", ["kk", "math"])
def test_the_papers_command_has_the_papers_settings(task, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo_ar_lopti.py", "--responses_per_prompt", "4", "--dry_run", "--steps", "3"])
    args_class, tasks = grpo_ar_lopti.Args, grpo_ar_lopti.TASKS
    python, script, *flags = defaults.papers_command(args_class, tasks, task)
    assert (python, script) == ("python", "grpo_ar_lopti.py")
    names = [word for word in flags if word.startswith("--")]
    assert len(names) == len(set(names)) and "None" not in flags
    found, _ = defaults.read(flags, args_class, tasks)
    assert found == args_class(**{"task": task, **tasks.get(task, {})})


def test_the_papers_command_can_be_pasted(tmp_path, monkeypatch):
    """As the header prints it, with a hub's folder of our own in place of the hub."""
    hub = tmp_path / "hub" / f"models--{grpo.Args.model.replace('/', '--')}"
    snapshot = hub / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0")
    for file in KK_TINY.iterdir():
        if file.name != "trainer_settings.json":
            (snapshot / file.name).symlink_to(file)
    config = json.loads((KK_TINY / "config.json").read_text())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}

    monkeypatch.setattr(sys, "argv", ["grpo.py", "--responses_per_prompt", "4", "--dry_run"])
    command = header.wrapped(defaults.papers_command(grpo.Args, grpo.TASKS, "kk"), 100).strip()
    assert command.startswith("python grpo.py ")
    command = f"{sys.executable} {command.removeprefix('python ')} --dry_run"
    pasted = subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True).stdout
    assert "dry run: " in pasted and "The paper's settings" not in pasted


def test_dynamic_sampling_says_how_far_it_is_and_what_helps(capsys):
    args = dataclasses.replace(grpo.Args(), prompts_per_step=4)
    args.max_refills = 3
    bar = dealing.GroupsBar(7, args)
    bar.show(0, 0)
    assert "in none" not in capsys.readouterr().out
    bar.show(0, 1)
    shown = capsys.readouterr()
    assert "step 7: in none of 8 groups do the rewards differ" in shown.out and "--max_refills is 3" in shown.out
    assert "0 of 4, round 2 of at most 4" in shown.err
    bar.show(5, 2)
    bar.close()
    assert "4 of 4, round 3 of at most 4" in capsys.readouterr().err
