"""Faults that a run must survive, or refuse in one line."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import KK_TINY, ROOT, run, run_together, small
from helpers import SIZES, adamw, arguments, flat, learn, policy_and_optimizer
from transformers import AutoTokenizer

import grpo
from grpo import Args
from runtime import checkpoints, checks, curves, files, flags, folders, processes, records, signals


@pytest.fixture(scope="module")
def run_of_three(tmp_path_factory):
    """A run folder with the checkpoints of steps 1, 2 and 3 and their rows."""
    run_dir = tmp_path_factory.mktemp("three")
    for step in (1, 2, 3):
        save(run_dir, step)
    (run_dir / "args.json").write_text(json.dumps(dataclasses.asdict(Args(run_dir=str(run_dir), steps=3))))
    (run_dir / "run.json").write_text(json.dumps({"script": "grpo"}))
    rows = "".join(json.dumps({"step": step, "reward": 0.5}) + "\n" for step in range(4))
    (run_dir / "metrics.jsonl").write_text(rows)
    return run_dir


@pytest.fixture
def three(run_of_three, tmp_path):
    return Path(shutil.copytree(run_of_three, tmp_path / "run"))


@contextlib.contextmanager
def one_line(capsys, code=2, says=""):
    """The block ends the program with this exit code and one line on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        yield
    given = ended.value.code
    found, error = (1, given) if isinstance(given, str) else (given, capsys.readouterr().err)
    assert found == code and len(error.splitlines()) == 1 and error.startswith("error: ") and says in error, error


@cache  # loaded before a fork, which has none of torch's threads
def trained():
    """What a save takes: a policy and its optimizer after one update, and the tokenizer."""
    policy, optimizer = policy_and_optimizer()
    learn(policy, optimizer)
    return policy, optimizer, AutoTokenizer.from_pretrained(KK_TINY)


def save(run_dir, step=4):
    checkpoints.save(*trained(), step, 10 * step, Args(run_dir=str(run_dir)))


def steps_of(run_dir):
    return [checkpoints.step_of(path) for path in checkpoints.complete(run_dir)]


SHARD = "trainer/shard-00001-model-00001-of-00003.safetensors"
FILES = [SHARD, "trainer_state.json", "model.safetensors", "config.json"]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [cut, Path.unlink], ids=["cut", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(name, damage, three):
    newest = three / "checkpoints" / "step_000003"
    damage(newest / name)
    with pytest.raises(ValueError, match=re.escape(f"{newest}") + ".*" + re.escape(name)) as refused:
        checkpoints.check(three)
    assert "\n" not in str(refused.value)
    checkpoints.check(three / "checkpoints" / "step_000002")


def test_going_on_from_an_older_checkpoint_drops_the_newer(three, capsys):
    older = three / "checkpoints" / "step_000001"
    (three / "checkpoints" / "step_000003" / "trainer_state.json").unlink()
    args = Args(resume=str(older))
    checks.check_run_folders(args)
    records.choose_folder(args)
    assert args.run_dir == str(three)
    policy, optimizer = policy_and_optimizer()
    assert checkpoints.load(policy, optimizer, args.resume) == (1, 10)
    said = capsys.readouterr().out
    assert all(f"{folder} is deleted" in said for folder in ("step_000002", "step_000003"))
    assert checkpoints.all_of(three) == [older]
    records.drop_rows_after(1, three / "metrics.jsonl")
    assert [row["step"] for row in curves.read_rows(three / "metrics.jsonl")] == [0, 1]


def test_what_is_in_a_checkpoints_way_is_cleared(three):
    """A folder without its state file, which a rename would meet."""
    in_the_way = three / "checkpoints" / "step_000004"
    in_the_way.mkdir()
    (in_the_way / "config.json").write_text("{}")
    policy, optimizer = policy_and_optimizer()
    policy.lm.generation_config.update(do_sample=False, temperature=0.6)  # as vicuna-7b has it: no save_pretrained
    checkpoints.save(policy, optimizer, trained()[2], 4, 40, Args(run_dir=str(three)))
    assert json.loads((in_the_way / "generation_config.json").read_text())["temperature"] == 0.6
    checkpoints.check(in_the_way)
    assert steps_of(three) == [2, 3, 4]


def goes_on(folder):
    """Two updates, with a save and a load before them and without: the same weights."""
    processes.start()
    weights = []
    for saves in (False, True):
        args = arguments(model=str(KK_TINY), run_dir=str(folder))
        policy = grpo.load_policy(args, trained=True)
        optimizer = adamw(policy)
        if saves:
            checkpoints.save(policy, optimizer, AutoTokenizer.from_pretrained(KK_TINY), 1, 0, args)
            processes.barrier()  # process 0 gives it its name
            optimizer = adamw(policy)
            assert checkpoints.load(policy, optimizer, folder) == (1, 0)
        for _ in range(2):
            for parameter in policy.parameters():
                parameter.grad = parameter.detach() ** 2
            optimizer.step()
        weights.append(flat(processes.full_tensor(parameter) for parameter in policy.parameters()))
    assert torch.equal(*weights)


def test_a_checkpoint_before_the_first_update_resumes_to_the_last_bit(tmp_path):
    """dapo.py makes no update if no group is mixed: AdamW has no state yet. In two processes, which share it."""
    run_together(goes_on, tmp_path)


def test_resuming_runs_no_code_from_a_checkpoint(three):
    """No file in it is a pickle, which could call any function when it is loaded."""
    kinds = {path.suffix for path in three.rglob("checkpoints/**/*") if path.is_file()}
    assert kinds == {".json", ".jinja", ".safetensors"}


def test_a_models_own_code_does_not_run(tmp_path, monkeypatch):
    folder, made = tmp_path / "model", tmp_path / "made"
    shutil.copytree(KK_TINY, folder)
    (folder / "own.py").write_text(f"open({str(made)!r}, 'w')\nfrom transformers import LlamaConfig as Config\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to any question
    with pytest.raises(ValueError, match="can't be loaded"):
        checks.check_model(Args(model=str(folder)), 1024)
    assert not made.exists()


@pytest.mark.parametrize("name", ["args.json", "run.json"])
def test_a_broken_file_of_a_run_is_named(name, tmp_path):
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(Args())))
    (tmp_path / "run.json").write_text(json.dumps({"script": "grpo"}))
    for content in (b"", b'{"steps": 3, "lr', b"\xff\xfe{}"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / name))} can't be read: ") as refused:
            flags.of_resumed_run([f"--resume={tmp_path}"], Args)
        assert len(str(refused.value).splitlines()) == 1


def test_a_broken_row_is_named(three):
    rows = (three / "metrics.jsonl").read_text()
    (three / "metrics.jsonl").write_text(rows + "half\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged"):
        checks.check_run_folders(Args(resume=str(three)))


def test_a_folder_is_used_by_one_process(three, tmp_path, capsys):
    code = "import pathlib, sys, time; from runtime import files; files.lock(pathlib.Path(sys.argv[1]))"
    for args in (Args(resume=str(three)), Args(run_dir=str(tmp_path / "fresh"))):
        folder = args.resume or args.run_dir
        Path(folder).mkdir(exist_ok=True)
        command = [sys.executable, "-c", f"{code}; print('locked', flush=True); time.sleep(600)", folder]
        other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert other.stdout.readline() == b"locked\n"
        with one_line(capsys, says=f"{folder} is in use by another process"):
            records.choose_folder(args)
        other.kill()
        other.wait()
        records.choose_folder(args)  # a lock ends with its process


def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path):
    path = tmp_path / "args.json"
    code = "import sys, pathlib; from runtime import files; path = pathlib.Path(sys.argv[1]); n = 0\nwhile True:\n"
    code += "    n += 1; files.write(path, str(n % 10) * 50000)"
    for kill in range(10):
        writer = subprocess.Popen([sys.executable, "-c", code, path], cwd=ROOT)
        before = path.stat().st_mtime_ns if path.exists() else 0
        while not path.exists() or path.stat().st_mtime_ns == before:
            time.sleep(0.001)
        time.sleep(0.002 * kill)
        writer.kill()
        writer.wait()
        content = path.read_text()
        assert len(content) == 50000 and len(set(content)) == 1


@pytest.mark.parametrize("where", ["file", "file/below", "/proc", "/proc/run", "/proc/1/run", "x" * 300])
def test_a_folder_that_cannot_be_used_is_refused(where, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with one_line(capsys), flags.errors_in_one_line():
        args = Args(run_dir=where)
        checks.check_run_folders(args)
        records.choose_folder(args)


@pytest.mark.parametrize("size", [0, 10_000, 3_000_000])
def test_a_full_disk_in_a_save_leaves_the_last_checkpoint(size, three):
    """No file can grow beyond `size` bytes. The state is 11 MB, the model 2 MB, other files are small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(BaseException, match=r"too large|os error|inline_container|File"):
            save(three)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [checkpoints.step_of(path) for path in checkpoints.complete(three)] == [1, 2, 3]
    checkpoints.check(three)


FAILS = """
import os
from rewards import kk

CALLS = 0

def load(source, split, *, size=None, seed=0):
    return kk.load(None, split, people="2", size=size or 48, seed=seed)

def score(response, answer):
    global CALLS
    CALLS += 1
    if CALLS == AT and os.environ.get("RANK", "1") == "1":
        raise RuntimeError("nothing\\nmore")
    return {**kk.score(response, answer), "reward": float(len(response) % 7)}
"""


def failing_run(folder, at, script="grpo.py", processes=1, **changes):
    """A run whose task raises at its `at`-th call of score in the last process. Gives what it left."""
    task = folder / "fails.py"
    task.write_text(f"AT = {at}\n{FAILS}")
    settings = {"steps": 4, "eval_every": 2, "save_every": 9, "task": task} | changes
    ended = run(script, *small(folder / "run", **settings), processes=processes, check=False)
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1 and "Traceback" not in ended.stderr, ended.stderr[-2000:]
    assert last.startswith(f"error: {task}: score() fails in line 15 on ") and "RuntimeError: nothing more" in last
    rows = [row["step"] for row in curves.read_rows(folder / "run" / "metrics.jsonl")]
    positions = [files.read_object(path / "trainer_state.json") for path in folders.complete(folder / "run")]
    return (folder / "run" / "ended.txt").read_text(), rows, [(one["step"], one["n_used"]) for one in positions]


def test_a_task_that_raises_in_one_process_ends_all_with_the_steps_before(tmp_path):
    """The check makes two calls, each evaluation two in a process, and each step eight."""
    ended, rows, checkpoint = failing_run(tmp_path, 2 + 2 + 8 + 8 + 2 + 3, processes=2)
    assert ended.startswith("stopped by an error after step 2") and f"--resume {tmp_path}/run" in ended
    assert (rows, checkpoint) == ([0, 1, 2], [(2, 8)])


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo.py", "dapo.py", "grpo_async.py", "grpo_stale.py"])
def test_a_task_that_raises_ends_every_script_with_the_steps_before(script, tmp_path):
    """And a resumed run equals one that did not end."""
    more = {"max_refills": 0} if script == "dapo.py" else {}
    assert failing_run(tmp_path, 2 + 4 + 16 + 16 + 4 + 5, script, **more)[1:] == ([0, 1, 2], [(2, 8)])
    (tmp_path / "fails.py").write_text(f"AT = 0\n{FAILS}")
    run(script, "--resume", tmp_path / "run")
    run(script, *small(tmp_path / "whole", steps=4, eval_every=2, save_every=9, task=tmp_path / "fails.py", **more))
    ended, whole = (Path(tmp_path, name, "checkpoints", "step_000004") for name in ("run", "whole"))
    assert (ended / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_task_that_raises_in_an_evaluation_loses_no_step(tmp_path):
    """The evaluation after step 2: the row of step 2 is there, without it. At the start there is nothing to lose."""
    assert failing_run(tmp_path, 2 + 4 + 16 + 16 + 2)[1:] == ([0, 1, 2], [(2, 8)])
    (tmp_path / "start").mkdir()
    assert failing_run(tmp_path / "start", 2 + 2)[1:] == ([0], [])


CALLS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")


def end_at(n, folder):
    """Ends this process in front of its n-th call that changes the folder, by Python's audit events."""
    count = 0

    def hook(event, values):
        nonlocal count
        if event in CALLS and str(values[0]).startswith(str(folder)):
            reads = event == "open" and not values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            count += not reads
            if count == n:
                os._exit(9)

    sys.addaudithook(hook)


def in_a_fork(work):
    """(exit code, what it wrote) of work() in a forked process, which an audit hook does not outlive."""
    with tempfile.TemporaryFile("w+") as output:

        def child():
            sys.stdout = sys.stderr = output
            work()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        output.seek(0)
        return process.exitcode, output.read()


def resume(run_dir):
    """What resuming writes, and one row."""
    book = records.Records(Args(run_dir=str(run_dir)), SIZES)
    book.open(3)
    book.write({"step": 4, "reward": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("work", [save, resume])
def test_a_kill_at_any_call_to_the_file_system_loses_nothing(work, run_of_three, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py"])  # which run.json names
    folder = tmp_path / "run"
    trained()
    for n in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run_of_three, folder)
        code, said = in_a_fork(lambda n=n: (end_at(n, folder), work(folder)))
        if code == 0:  # it makes fewer calls
            break
        assert (code, said) == (9, ""), n
        assert folders.step_of(folders.to_resume(str(folder))) >= 3
        checkpoints.check(folder)
        checks.check_run_folders(Args(resume=str(folder)))
        assert flags.of_resumed_run([f"--resume={folder}"], Args)
        assert [row["step"] for row in curves.read_rows(folder / "metrics.jsonl")][:4] == [0, 1, 2, 3]
        assert in_a_fork(lambda: save(folder, 7))[0] == 0
    assert 5 < n < 999


def test_a_second_signal_ends_a_run_and_a_closed_terminal_does_not():
    """It may send SIGHUP several times. SIGTERM after it is a second request."""

    def work():
        signals.GRACE = -1  # every other signal is a second one
        asked = signals.catch()
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        if asked == ["SIGHUP"]:
            signal.raise_signal(signal.SIGTERM)

    assert in_a_fork(work)[0] == -signal.SIGTERM


def test_under_nohup_a_closed_terminal_is_nothing():
    def work():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if signals.catch() == []:
            signal.raise_signal(signal.SIGHUP)

    assert in_a_fork(work)[0] == 0
