"""grpo_stale.py and grpo_async.py: the same run in turns and at once, and what happens when a process dies."""

import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import KK_TINY, ROOT, metrics, python, run, small, timeless, until
from helpers import SIZES, arguments, refused
from prepared import start
from safetensors.torch import load_file
from transformers import AutoConfig

import grpo_async
import grpo_stale
from runtime import checkpoints, checks, memory, records, sampler_process
from runtime.sampler_process import SamplerProcess

FLAGS = {"save_every": 1, "keep_checkpoints": 9, "eval_every": 1, "eval_size": 2, "dtype": "float32", "lr": 1e-3}


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory):
    """{lag: the folder of a run of three steps of grpo_stale.py}."""
    folders = {lag: tmp_path_factory.mktemp("in_turns") / str(lag) for lag in (1, 2)}
    for lag, folder in folders.items():
        run("grpo_stale.py", *small(folder, lag=lag, steps=3, **FLAGS))
    return folders


def all_of(folder):
    """Every metric of three steps, their responses to the test problems, and every number of their last checkpoint,
    older weights and the problems used included.

    But not torch's random state, which no step reads.
    """
    rows = [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()[:4]]
    rows += [test for test in evaluated(folder) if test["step"] <= 3]
    saved = folder / "checkpoints/step_000003"
    rows.append(json.loads((saved / "trainer_state.json").read_text())["n_used"])
    files = sorted(saved.rglob("*.safetensors"))
    numbers = {str(path.relative_to(folder)): load_file(path) for path in files}
    for of_file in numbers.values():
        of_file.pop("rng", None)
    return rows, numbers


def evaluated(folder, step=None):
    """The responses to test problems, of all steps or one."""
    rows = [json.loads(line) for line in (folder / "test_samples.jsonl").read_text().splitlines()]
    return [row for row in rows if step in (None, row["step"])]


def assert_same(folder, other):
    rows, weights = all_of(folder)
    other_rows, other_weights = all_of(other)
    assert rows == other_rows and weights.keys() == other_weights.keys()
    for name in weights:
        assert all(torch.equal(weights[name][key], other_weights[name][key]) for key in weights[name]), name


def test_the_sampler_has_the_weights_of_so_many_steps_ago(in_turns):
    """A lag of 1 differs from one of 2 from the third step on. What a checkpoint keeps are the checkpoints before."""
    one, two = (metrics(in_turns[lag]) for lag in (1, 2))
    assert [row["lag"] for row in one] == [0, 1, 1] and [row["lag"] for row in two] == [0, 1, 2]
    same = [timeless(a) == timeless(b) for a, b in zip(one, two)]
    assert same == [True, True, False]
    assert one[0]["sampler_gap"] < 1e-4 < min(row["sampler_gap"] for row in one[1:])
    # After two steps the lags have the same weights, and different older ones.
    assert evaluated(in_turns[1], 2) == evaluated(in_turns[2], 2)
    texts = [[row["response"] for row in evaluated(in_turns[1], step)] for step in (0, 1, 2)]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    saved = in_turns[2] / "checkpoints"
    versions = checkpoints.load_versions(str(saved / "step_000003"))
    for step, older in zip((1, 2), versions, strict=True):
        weights = load_file(saved / f"step_{step:06d}" / "model.safetensors")
        assert all(torch.equal(older[name], weights[name]) for name in weights)


def three_steps(folder, out, *flags):
    """(the trainer's process, its sampler's) of a long run after the checkpoint of its third step."""
    trainer = start([ROOT / "grpo_async.py", *flags], out, out)
    until((folder / "checkpoints/step_000003").exists, seconds=400)
    [sampler] = [child for child in psutil.Process(trainer.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    return trainer, sampler


def sampler_killed(folder, in_turns, lag):
    """A run at once is that in turns; if its sampler is killed, it ends with a checkpoint. Gives its checkpoints."""
    out = folder.with_name("out")
    trainer, sampler = three_steps(folder, out, *small(folder, lag=lag, steps=60, **FLAGS))
    sampler.kill()
    trainer.join(400)
    assert trainer.exitcode == 1 and "error: the sampler's process ended with exit code -9" in out.read_text()
    assert f"to go on: --resume {folder}" in out.read_text()
    saved = sorted((folder / "checkpoints").iterdir())
    assert saved[-1].name == f"step_{metrics(folder)[-1]['step']:06d}"
    assert_same(folder, in_turns[lag])
    assert all(row["time/sampler"] > 0 for row in metrics(folder))
    return saved


def test_at_once_is_in_turns_to_the_last_bit(in_turns, tmp_path):
    sampler_killed(tmp_path / "run", in_turns, 1)


def test_a_run_that_is_resumed_with_a_larger_lag_takes_the_oldest_weights_that_it_has(in_turns, tmp_path):
    """At --lag 1, step 3 is sampled from the weights of step 1. No older ones are in the checkpoint of step 2.

    So it is the same step at --lag 3, with the same problems.
    """
    folder = shutil.copytree(in_turns[1], tmp_path / "run")
    for name, values in (("run.json", {"script": "grpo_async"}), ("args.json", {"sampler_gpus": ""})):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    run("grpo_async.py", "--resume", folder / "checkpoints/step_000002", "--lag", 3)
    rows, weights = all_of(folder)
    expected_rows, expected_weights = all_of(in_turns[1])
    assert rows == expected_rows
    [saved] = [name for name in weights if name.endswith("step_000003/model.safetensors")]
    assert all(torch.equal(weights[saved][name], expected_weights[saved][name]) for name in weights[saved])


def test_a_sampler_that_dies_in_an_evaluation_ends_the_run(tmp_path):
    """Also in the last one. Its function is called in a process that ends with an error."""
    args = grpo_async.Args(run_dir=str(tmp_path), model=str(KK_TINY))
    book = records.Records(args, SIZES)
    book.asked_to_stop = []
    sampler = SamplerProcess(divmod, args)
    assert grpo_async.evaluate(sampler, {}, None, [], 5, book, args) == {}
    sampler.end()
    assert book.problem == "error: the sampler's process ended with exit code 1" and book.interrupted()
    assert book.last_line(5).startswith("stopped by an error after step 5")


@pytest.mark.parametrize("script", [grpo_stale, grpo_async], ids=["stale", "async"])
def test_a_snapshot_has_loras_adapters(script):
    args = arguments(script, model=str(KK_TINY), lora_rank=3)
    policy = script.load_policy(args, trained=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)  # B was 0
    layer = policy.lm.model.layers[0].self_attn.q_proj
    by_hand = layer.base_layer.weight + 32 / 3 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(script.snapshot(policy, args)["model.layers.0.self_attn.q_proj.weight"], by_hand.data)


def test_shared_memory_that_is_too_small_is_refused(monkeypatch):
    """A snapshot has the weights that kk_tiny's embedding and head share twice."""
    args = grpo_async.Args(model=str(KK_TINY), lag=2, dtype="float32", max_response_tokens=256)
    model = memory.shapes_of(AutoConfig.from_pretrained(KK_TINY))
    needed = 3 * 4 * (model.num_parameters() + model.lm_head.weight.numel())
    for free, says in ((needed, ""), (needed - 1, "--shm-size")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with refused(says):
            checks.check_model(args, 1024)
    checks.check_model(grpo_stale.Args(model=str(KK_TINY), dtype="float32", max_response_tokens=256), 1024)


GPUS = {"": ["5", "7"], "3,2": ["7", "5"], "1,1": ["4", "4"], "4,1": "", "2": "", "-1,2": "", "2,x": "", "2,": ""}


@pytest.mark.parametrize(("given", "found"), GPUS.items())
def test_the_samplers_gpus(given, found, monkeypatch):
    """Of two trainers on four GPUs, which the system numbers otherwise."""
    monkeypatch.setattr(sampler_process, "LOCAL_WORLD_SIZE", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4,5,7")
    with refused("" if found else rf"--sampler_gpus '{given}': 2 sampler\(s\) need one of 4 GPUs each"):
        assert sampler_process.gpus(SimpleNamespace(sampler_gpus=given)) == found


LOST = {
    "grpo_stale": ("        sync_weights(versions[0], llm)\n        # End", "step < 2", 2),
    "grpo_async": ("        sync_weights(weights, llm)\n        if when", 'when in ("check", "test", 1, 2)', 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", LOST)
def test_a_run_whose_later_syncs_are_lost_ends(script, tmp_path):
    """At --lag 1 step 3 is the first one that new weights should sample. grpo_stale.py syncs them after step 2."""
    changed = tmp_path / f"{script}.py"
    line, only_if, last = LOST[script]
    text = (ROOT / f"{script}.py").read_text()
    assert text.count(line) == 1
    changed.write_text(text.replace(line, line.replace("sync", f"if {only_if}: sync", 1)))
    flags = small(tmp_path / "run", lag=1, steps=9, dtype="float32", lr=1e-3)
    ended = python(changed, *flags, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: the sampler did not get new weights: ")
    assert metrics(tmp_path / "run")[-1]["step"] == last
    assert (tmp_path / f"run/checkpoints/step_{last:06d}").exists()


def answers(args, next_request, answer):
    """A sampler whose answers are 1 MiB large. Each says how long the one before took to be sent."""
    seconds = 0.0
    while True:
        (when,) = next_request()
        began = time.perf_counter()
        answer(when, (seconds, bytes(2**20)))
        seconds = time.perf_counter() - began


def test_answers_do_not_wait_for_the_trainer_nor_the_trainer_for_ever(monkeypatch):
    """A pipe holds 256 KiB. The trainer asks for four steps and is busy for a second, and the sampler goes on."""
    sampler = SamplerProcess(answers, SimpleNamespace(model="models/kk_tiny", sampler_gpus=""))
    sampler.request(0)
    assert sampler.receive(0)[0] == 0
    for step in range(1, 5):
        sampler.request(step)
    time.sleep(1)
    assert all(sampler.receive(step)[0] < 0.5 for step in range(1, 5))
    monkeypatch.setattr(sampler_process, "LONGEST_WAIT", 0.2)
    monkeypatch.setattr(sampler_process, "PATIENCE", 0.2)
    assert sampler.receive(5) is None and "gave no answer for" in sampler.how_it_ended()
    monkeypatch.undo()
    sampler.process.kill()
    assert sampler.receive(5) is None and sampler.receive(6) is None
    assert sampler.how_it_ended() == "ended with exit code -9"
    began = time.perf_counter()
    sampler.end()
    assert time.perf_counter() - began < 5


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "number"), [(1, signal.SIGKILL), (2, signal.SIGTERM)])
def test_a_run_that_is_resumed_after_a_death_is_it_too(in_turns, lag, number, tmp_path):
    """If the trainer dies, no process is left."""
    folder, again = tmp_path / "run", tmp_path / "again"
    for path in sampler_killed(folder, in_turns, lag)[2:]:
        shutil.rmtree(path)
    trainer, sampler = three_steps(folder, again, "--resume", folder)
    if number == signal.SIGTERM:  # a batch system sends it to all processes
        sampler.terminate()
    os.kill(trainer.pid, number)
    trainer.join(400)
    until(lambda: not sampler.is_running())
    assert_same(folder, in_turns[lag])
    last = metrics(folder)[-1]["step"]
    assert (f"stopped by SIGTERM after step {last}" in again.read_text()) == (number == signal.SIGTERM)
