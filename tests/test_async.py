"""grpo_stale.py and grpo_async.py: the same run in turns and at once, and what happens when a process dies."""

import json
import os
import signal
import time

import psutil
import pytest
import torch
from conftest import ROOT, metrics, run, small, timeless
from prepared import start
from safetensors.torch import load_file

from runtime import checkpoints

FLAGS = {"steps": 4, "save_every": 1, "keep_checkpoints": 9, "eval_every": 2, "dtype": "float32", "lr": 1e-3}


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory):
    """{lag: the folder of a run of four steps of grpo_stale.py}."""
    folders = {lag: tmp_path_factory.mktemp("in_turns") / str(lag) for lag in (1, 2)}
    for lag, folder in folders.items():
        run("grpo_stale.py", *small(folder, lag=lag, **FLAGS))
    return folders


def all_of(folder):
    """Every metric of a run and every number of its last checkpoint, older weights included."""
    rows = [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted((folder / "checkpoints/step_000004").rglob("*.safetensors"))
    return rows, {str(path.relative_to(folder)): load_file(path) for path in files}


def assert_same(folder, other):
    rows, weights = all_of(folder)
    other_rows, other_weights = all_of(other)
    assert rows == other_rows and weights.keys() == other_weights.keys()
    for name in weights:
        assert all(torch.equal(weights[name][key], other_weights[name][key]) for key in weights[name]), name


def test_the_sampler_has_the_weights_of_so_many_steps_ago(in_turns):
    """A lag of 1 differs from one of 2 from the third step on. What a checkpoint keeps are the checkpoints before."""
    one, two = (metrics(in_turns[lag]) for lag in (1, 2))
    assert [row["lag"] for row in one] == [0, 1, 1, 1] and [row["lag"] for row in two] == [0, 1, 2, 2]
    same = [timeless(a) == timeless(b) for a, b in zip(one, two)]
    assert same == [True, True, False, False]
    assert one[0]["sampler_gap"] < 1e-4 < min(row["sampler_gap"] for row in one[1:])
    saved = in_turns[2] / "checkpoints"
    versions = checkpoints.load_versions(str(saved / "step_000004"))
    for step, older in zip((2, 3), versions, strict=True):
        weights = load_file(saved / f"step_{step:06d}" / "model.safetensors")
        assert all(torch.equal(older[name], weights[name]) for name in weights)


@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_at_once_is_in_turns_to_the_last_bit_and_so_is_a_resumed_run(in_turns, lag, tmp_path):
    """The resumed run of a lag of 1 is in test_every_script.py."""
    run("grpo_async.py", *small(tmp_path / "run", lag=lag, **FLAGS))
    assert_same(tmp_path / "run", in_turns[lag])
    assert all(row["time/sampler"] > 0 for row in metrics(tmp_path / "run"))
    if lag == 2:
        run("grpo_async.py", "--resume", tmp_path / "run/checkpoints/step_000002")
        assert_same(tmp_path / "run", in_turns[lag])


def wait_for(condition, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def begin(folder, out):
    """(the trainer's process, its sampler's) after the first step of a long run."""
    flags = small(folder, **FLAGS | {"steps": 60, "eval_every": 60})
    trainer = start([ROOT / "grpo_async.py", *flags], out, out)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder))
    [sampler] = [child for child in psutil.Process(trainer.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    return trainer, sampler


def test_if_the_sampler_is_killed_the_run_ends_with_a_checkpoint_and_says_how_to_go_on(tmp_path):
    trainer, sampler = begin(tmp_path / "run", tmp_path / "out")
    sampler.kill()
    trainer.join(400)
    last = metrics(tmp_path / "run")[-1]["step"]
    text = (tmp_path / "out").read_text()
    assert trainer.exitcode == 1 and "error: the sampler's process ended by SIGKILL" in text
    assert f"to go on: --resume {tmp_path / 'run'}" in text
    assert max((tmp_path / "run/checkpoints").iterdir()).name == f"step_{last:06d}"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_if_the_trainer_is_killed_or_asked_to_end_no_process_is_left(number, tmp_path):
    trainer, sampler = begin(tmp_path / "run", tmp_path / "out")
    if number == signal.SIGTERM:  # a batch system sends it to all processes
        sampler.terminate()
    os.kill(trainer.pid, number)
    trainer.join(400)
    wait_for(lambda: not sampler.is_running())
    last = metrics(tmp_path / "run")[-1]["step"]
    assert (f"stopped by SIGTERM after step {last}" in (tmp_path / "out").read_text()) == (number == signal.SIGTERM)
