"""Whole runs, as a user starts them: real vLLM, real torch, on the CPU."""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import prepared
import psutil
import pytest
import torch
from conftest import DATA, ROOT, SMOLLM, metrics, parse, python, run, small, until

import grpo
from evaluation.settings import read_settings
from runtime import checks, flags
from tools import family

PACE = {"lr": 5e-4, "prompts_per_step": 8}  # of the runs that are compared: fast enough to see the tiny model learn


@pytest.fixture(scope="session")
def four_steps(tmp_path_factory):
    """A run of grpo.py over four steps, without interruption."""
    run_dir = tmp_path_factory.mktemp("four_steps") / "run"
    finished = run("grpo.py", *small(run_dir, steps=4, save_every=2, **PACE))
    return run_dir, finished


def test_a_run_leaves_everything_it_promises(four_steps):
    run_dir, finished = four_steps
    everything = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["step"] for row in everything if {"eval/accuracy", "eval/accuracy_2"} <= row.keys()]
    assert evaluated == [0, 4]  # before the first step and after the last
    for row in metrics(run_dir):
        parts = sorted(row[key] for key in ("accuracy_2", "accuracy_3") if key in row)  # by number of people
        assert parts[0] <= row["accuracy"] <= parts[-1]
    args = json.loads((run_dir / "args.json").read_text())
    config = json.loads((run_dir / "checkpoints/step_000004/config.json").read_text())
    assert args["lr"] == PACE["lr"] and args["dtype"] == config["dtype"]
    assert list((run_dir / "tensorboard").glob("events*"))
    assert (run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "test accuracy" in finished.stdout and "0.9 M parameters" in finished.stdout
    there = run("grpo.py", "--resume", run_dir, "--dry_run").stdout
    assert "after step 4 of 4: nothing is left to do without --steps above 4" in there


def test_training_raises_the_reward(four_steps):
    """Only hasty solutions are done within 48 tokens, and what is done earns more than −3: it learns to be hasty."""
    first, *rewards = [row["reward"] for row in metrics(four_steps[0])]
    assert sum(rewards) / len(rewards) > first + 0.2, (first, rewards)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes need two GPUs, or none")
@pytest.mark.slow
def test_two_processes_do_the_same_first_step_and_go_on_as_one(four_steps, tmp_path):
    """Same prompts and seeds. The sampler's rounding depends on its batch, so that a token may rarely differ."""
    run("grpo.py", *small(tmp_path / "run", steps=2, **PACE), processes=2)
    one, two = metrics(four_steps[0])[0], metrics(tmp_path / "run")[0]
    for key in ("reward", "reward_std", "format_rate", "zero_std_rate", "truncated_rate"):
        assert two[key] == pytest.approx(one[key], abs=0.2), key
    for key in ("entropy", "response_tokens", "tokens", "grad_norm"):
        assert two[key] == pytest.approx(one[key], rel=0.1), key
    assert two["kl"] == 0 and two["weights_changed"] > 0
    first = [(folder / "samples.jsonl").read_text().splitlines()[0] for folder in (tmp_path / "run", four_steps[0])]
    assert json.loads(first[0])["prompt"] == json.loads(first[1])["prompt"]
    tested = [(folder / "test_samples.jsonl").read_text() for folder in (tmp_path / "run", four_steps[0])]
    ids = [[json.loads(line)["id"] for line in text.splitlines()] for text in tested]
    assert ids[0] == ids[1][: len(ids[0])] and {0, 1} <= {*ids[0]}  # of all processes, in order


def wait_for(condition, process, log, seconds=600):
    deadline = time.time() + seconds
    while not condition():
        assert process.exitcode is None and time.time() < deadline, log.read_text()[-3000:]
        time.sleep(0.005)


def test_ctrl_c_in_a_pipeline_ends_a_run_after_its_step_with_a_checkpoint(tmp_path):
    """`grpo.py … 2>&1 | tee log`: the terminal sends SIGINT to both, so that all output loses its reader."""
    pipe, run_dir = tmp_path / "pipe", tmp_path / "run"
    os.mkfifo(pipe)
    process = prepared.start(["grpo.py", *small(run_dir, steps=100_000, save_every=100_000)], pipe, pipe)
    with open(pipe) as reader:
        assert any("tok/s" in line for line in reader)
    os.kill(process.pid, signal.SIGINT)
    process.join(300)
    last = metrics(run_dir)[-1]["step"]
    assert process.exitcode == 0 and last < 100
    assert (run_dir / f"checkpoints/step_{last:06d}/trainer_state.json").exists()
    assert (run_dir / "ended.txt").read_text().startswith(f"stopped by SIGINT after step {last}: {run_dir}\n")


@pytest.mark.slow
def test_a_run_that_is_ended_goes_on_from_its_last_good_checkpoint(tmp_path):
    """It is killed in a save; its next process gets Ctrl-C in a save, twice at once, as if someone pressed it twice."""
    log, run_dir = tmp_path / "log", tmp_path / "run"
    folder = run_dir / "checkpoints"
    flags = small(run_dir, steps=100_000, save_every=1, keep_checkpoints=1000)
    process = prepared.start(["grpo.py", *flags], log, log)
    wait_for((folder / "step_000002.tmp").exists, process, log)
    process.kill()
    process.join()
    (folder / "step_000002.tmp").rename(folder / "step_999999.tmp")  # not that of the next process

    process = prepared.start(["grpo.py", "--resume", run_dir], log, log, {"TQDM_DISABLE": "1"})  # vLLM's bars, too
    wait_for((folder / "step_000002").exists, process, log)
    other = run("grpo.py", "--resume", run_dir, check=False)
    assert other.returncode == 2 and "is in use by another process" in other.stderr
    wait_for(lambda: list(folder.glob("*.tmp")), process, log)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
    process.join(300)
    last = int(max(folder.iterdir()).name[-6:])
    output = log.read_text()
    assert process.exitcode == 0 and not list(folder.glob("*.tmp")), output[-3000:]
    assert "SIGINT: the run ends after this step, with a checkpoint. A second one" in output
    assert f"stopped by SIGINT after step {last}:" in output
    assert f"\nto go on: --resume {run_dir}\nnext: {run_dir}/curves.png; python evaluate.py {run_dir}; make" in output
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, last + 1))


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_torchrun_says_which(tmp_path):
    log, folder = tmp_path / "log", tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launcher, "grpo.py", *small(folder, steps=500, save_every=1, dtype="float32")]
    with open(log, "w") as file:
        alive = subprocess.Popen(list(map(str, words)), cwd=ROOT, stdout=file, stderr=file)
    try:
        until(lambda: (folder / "checkpoints" / "step_000001").exists())
        killed = psutil.Process(alive.pid).children()[-1]
        killed.kill()
        assert alive.wait(timeout=60) == 1
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(alive.pid).children():  # each in a session of its own
                child.kill()
        alive.kill()
    assert f"Signal 9 (SIGKILL) received by PID {killed.pid}" in log.read_text()
    assert "the run ends after this step" not in log.read_text()


BAD = [  # (flags, of which the first word may be a script; what is said)
    ("--alpha 1.5", "--alpha is 1.5"),
    ("--steps three", "--steps"),
    ("--no_such_flag 1", "--no_such_flag"),
    ("--responses_per_prompt 100000000", "--responses_per_prompt is 100000000; it must be"),
    ("--resume nowhere", "does not go with --resume"),  # small() has a --run_dir
    ("--resume=", "--resume is empty"),
    ("--task nothing.py", "there is no such file"),
    ("--task countdown --numbers 1e400", "numbers must be like 3-4"),
    ("--kv_cache_gb 5000", "GiB of memory"),
    ("--kv_cache_gb 0.0001", "--kv_cache_gb is 0.0001; one sequence of 304 tokens"),
    ("--max_response_tokens 4000", "takes only 2048 tokens"),
    ("--prompts_per_step 62", "there are 60 training problems"),
    ("--prompts_per_step 3", "must be a multiple of 2"),
    ("--max_prompt_tokens 10", "--max_prompt_tokens is 10"),
    ("--model models/nowhere", "models/nowhere is not a model folder"),
    ("--data nothing.jsonl", "nothing.jsonl does not exist"),
    ("--people 9", "people must be"),
    ("--lopti_stages high,high", "invalid choice"),
    ("--task chess", "--task is 'chess'; it must be one of kk, math, countdown"),
    ("--gym chain_sum", "--gym is of --task gym, not of kk"),
    ("--eval_samples 4 --eval_temperature 0", "--eval_samples is 4, but greedy responses are all alike"),
    ("--lora_rank -1", "--lora_rank is -1; it must be greater than or equal to 0"),
    ("--lora_rank 8 --lora_alpha 0", "--lora_alpha is 0.0; it must be greater than 0"),
    ("grpo_kl --kl_coef 0", "--kl_coef is 0.0; it must be greater than 0"),
    ("acpo --clip_base 4", "--clip_base is 4.0; it must be at most --clip_max, 3.0"),
    ("opd --teacher models/nowhere", "--teacher models/nowhere is not a model folder"),
    ("opd", "--teacher is missing: it takes the folder of the model to learn from"),
]


@pytest.fixture
def refused(monkeypatch, capsys):
    """A function that runs a script's main, which ends with exit code 2 before vLLM is loaded: (its one message)."""

    def start(script, *flags):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have loaded it in this process
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(script).main()
        assert ended.value.code == 2 and "vllm" not in sys.modules
        return re.sub(r"[\s│]+", " ", capsys.readouterr().err)

    return start


@pytest.mark.parametrize(("flags", "says"), BAD)
def test_bad_input_ends_with_one_message_before_anything_loads(flags, says, refused, tmp_path):
    words = flags.split()
    script = "grpo_ar_lopti" if words[0].startswith("--") else words.pop(0)
    assert says in refused(script, *small(tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--clip_low 2", "--clip_low is 2.0; it must be less than or equal to 1"),
        ("--run_dir {run}", "holds a run"),
        ("--track", "--track needs Weights & Biases: pip install wandb"),
        ("--help", ""),
    ],
)
def test_what_needs_no_model_is_refused_before_torch_is_imported(flags, words, tmp_path):
    Path(tmp_path, "metrics.jsonl").write_text('{"step": 1}\n')
    flags = flags.format(run=tmp_path).split()
    code = (
        "import runpy, sys\n"
        f"sys.argv = {['grpo.py', *flags]}\n"
        "sys.modules['wandb'] = None\n"
        "try:\n"
        "    runpy.run_path('grpo.py', run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "False False"
    assert done.returncode == (0 if flags == ["--help"] else 2)
    assert words in done.stderr and done.stderr.count("\n") <= 1


WITHOUT_PACKAGES = [
    "grpo.py --help", "dapo.py --dry_run", "evaluate.py models/kk_tiny", "-m tools.doctor", "tools/watch.py runs",
    "tools/compare.py", "-m course.check_page nano_grpo.py grpo",
]  # fmt: skip


@pytest.mark.parametrize("command", WITHOUT_PACKAGES)
def test_a_python_without_the_packages_says_what_to_do(command):
    done = python("-S", *command.split())
    assert done.returncode == 1 and done.stderr.startswith("error: runs need vLLM: make install (Linux); on a Mac")
    assert "lacks tyro, pydantic, psutil" in done.stderr and done.stderr.count("\n") == 1


def test_without_vllm_only_runs_are_refused(refused, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "error: runs need vLLM: make install (Linux); on a Mac" in refused("grpo", *small(tmp_path / "run"))
    with pytest.raises(ValueError, match="runs need vLLM"):
        read_settings(["models/kk_tiny"])
    with pytest.raises(SystemExit) as ended:
        read_settings(["--help"])
    assert ended.value.code == 0 and "evaluate.py" in capsys.readouterr().out
    flags.check_settings(parse(importlib.import_module("sft")))  # it samples nothing
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")  # a vLLM for a Mac counts as none: no run was tried with it
    with pytest.raises(ValueError, match="runs need vLLM"):
        checks.check_vllm()


def test_importing_a_script_checks_nothing(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest", "--clip_low", "2"])
    flags.check(grpo.Args, grpo.TASKS)


def test_a_model_that_the_hub_does_not_hand_out(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    flags = [*small(tmp_path / "run"), "--model", "nobody/nothing"]
    assert "error: --model nobody/nothing can't be loaded: " in refused("grpo", *flags)


def test_help_explains_every_flag():
    for script in family.family():
        trainer = importlib.import_module(script)
        _, helps = flags.read_sources(trainer.Args)
        assert all(helps[name] for name in trainer.Args.__dataclass_fields__), script


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM.exists(), reason="no models/SmolLM2-135M-Instruct: make model gets it")
def test_end_to_end_on_a_real_model(tmp_path):
    """SmolLM2-135M-Instruct; on the papers' puzzles where they are at hand."""
    data = ["--data", str(DATA / "kk" / "train_3to7.parquet")] if (DATA / "kk").exists() else []
    sizes = {"prompts_per_step": 2, "responses_per_prompt": 2, "eval_size": 2, "max_response_tokens": 16}
    flags = small(tmp_path / "run", model=SMOLLM, steps=1, kv_cache_gb=0.5, **sizes)
    run("grpo_ar_lopti.py", *flags, *data)
    (row,) = metrics(tmp_path / "run")
    assert row["kl"] == 0 and 0 < row["sampler_gap"] < 0.1 and 0 < row["entropy"] < 5
    coarse = json.loads((tmp_path / "run" / "args.json").read_text())["dtype"] == "bfloat16"  # hides small changes
    assert 0 < row["weights_changed"] < (0.1 if coarse else 1) and row["peak_memory_gb"] < 12
    assert (tmp_path / "run/checkpoints/step_000001/model.safetensors").stat().st_size > 250e6
