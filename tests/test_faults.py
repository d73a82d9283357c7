"""Faults that a run must survive, or refuse in one line."""

import contextlib
import dataclasses
import datetime
import errno
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
import threading
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, ROOT, run, run_together, small, write_rows
from helpers import SIZES, adamw, arguments, flat, learn, policy_and_optimizer, refused, requests_of
from transformers import AutoTokenizer

import grpo
import opd
import rewards
import sft
from grpo import Args
from rewards import examples
from runtime import chats, checkpoints, checks, distributed, files, flags, records, tools  # fmt: skip


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
    return [files.step_of(path) for path in files.complete_checkpoints(run_dir)]


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
    assert len(files.all_checkpoints(three)) == 3  # the run may still fail to go on
    records.Records(args, SIZES).open(1)
    said = capsys.readouterr().out
    assert all(f"{folder} is deleted" in said for folder in ("step_000002", "step_000003"))
    assert files.all_checkpoints(three) == [older]
    assert [row["step"] for row in files.read_rows(three / "metrics.jsonl")] == [0, 1]


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
    distributed.start()
    weights = []
    for saves in (False, True):
        args = arguments(model=str(KK_TINY), run_dir=str(folder))
        policy = grpo.load_policy(args, trained=True)
        optimizer = adamw(policy)
        if saves:
            checkpoints.save(policy, optimizer, AutoTokenizer.from_pretrained(KK_TINY), 1, 0, args)
            distributed.barrier()  # process 0 gives it its name
            optimizer = adamw(policy)
            assert checkpoints.load(policy, optimizer, folder) == (1, 0)
        for _ in range(2):
            for parameter in policy.parameters():
                parameter.grad = parameter.detach() ** 2
            optimizer.step()
        weights.append(flat(distributed.full_tensor(parameter) for parameter in policy.parameters()))
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
def test_a_full_disk_in_a_save_leaves_the_last_checkpoint_and_is_one_line(size, three, monkeypatch, capsys):
    """No file can grow beyond `size` bytes. The state is 11 MB, the model 2 MB, other files are small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(BaseException, match="File too large") as found:
            save(three)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [files.step_of(path) for path in files.complete_checkpoints(three)] == [1, 2, 3]
    checkpoints.check(three)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    records.show_full_disk(three)
    sys.excepthook(type(found.value), found.value, None)  # what Python does with an error that nobody catches
    says = r"error: \S+ can't be written: File too large. Make room; --resume \S+ goes on from step_000003\n"
    assert re.fullmatch(says, capsys.readouterr().err)


def test_an_error_in_a_thread_is_silent_only_if_the_disk_is_full(tmp_path, monkeypatch, capsys):
    """TensorBoard writes in a thread, and raises the same error again when the run writes next."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    records.show_full_disk(tmp_path)
    for error in (OSError(errno.ENOSPC, "full"), ValueError("other")):
        threading.excepthook(threading.ExceptHookArgs([type(error), error, None, None]))
        assert ("ValueError: other" in capsys.readouterr().err) == (type(error) is ValueError)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    forced, missing, rename = set(), {}, Path.rename

    def looked_at(old, new):
        missing[Path(new).name] = {str(path) for path in [old, *old.rglob("*")] if path.is_file()} - forced
        return rename(old, new)

    monkeypatch.setattr(files.os, "fsync", lambda number: forced.add(os.readlink(f"/proc/self/fd/{number}")))
    monkeypatch.setattr(Path, "rename", looked_at)
    save(tmp_path)
    files.write(tmp_path / "args.json", "{}")
    assert missing == {"step_000004": set(), "args.json": set()}


@pytest.fixture
def in_use(monkeypatch):
    """A function that makes a file in a folder which can't be deleted, as NFS has it while another program reads it."""
    unlink = os.unlink

    def refuse(path, **options):
        if str(path).endswith(".nfs1"):
            raise OSError(errno.EBUSY, "busy")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(checkpoints, "UNDELETABLE", [])
    return lambda folder: (folder / ".nfs1").write_text("")


def test_a_checkpoint_that_cannot_be_deleted_is_one_warning(three, in_use, capsys):
    in_use(three / "checkpoints/step_000001")
    in_use(three / "checkpoints/step_000002")
    for step in (4, 5, 6):
        save(three, step)
    assert steps_of(three) == [4, 5, 6]
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 and "step_000001.tmp can't be deleted now" in said
    left = {path.name: [file.name for file in path.iterdir()] for path in (three / "checkpoints").glob("*.tmp")}
    assert left == {"step_000001.tmp": [".nfs1"], "step_000002.tmp": [".nfs1"]}  # all else is gone


def test_what_is_left_of_a_checkpoint_ends_no_resume(three, in_use):
    """Going on from step 2, the rest of step 3 is in the way of the new step 3, twice."""
    for _ in range(2):
        in_use(three / "checkpoints/step_000003")
        assert checkpoints.load(*policy_and_optimizer(), three / "checkpoints/step_000002") == (2, 20)
        save(three, 3)
        checkpoints.check(three)
        assert steps_of(three) == [1, 2, 3]


def test_a_newer_checkpoint_that_cannot_be_moved_ends_a_resume_from_an_older(three, monkeypatch, capsys):
    """The next resume would go on from it: a folder where something is mounted."""
    monkeypatch.setattr(checkpoints, "UNDELETABLE", [])
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
    with one_line(capsys, code=1, says="step_000003 can't be deleted: start a new run with --model"):
        checkpoints.delete_newer(three / "checkpoints/step_000002")


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    times, slept = iter(["20260101-000000", "20260101-000000", "20260101-000001"]), []
    monkeypatch.setattr(time, "strftime", lambda _: next(times))
    monkeypatch.setattr(time, "sleep", slept.append)
    chosen = [Args(), Args()]
    for args in chosen:
        records.take_folder(args)
    assert [args.run_dir[-2:] for args in chosen] == ["00", "01"] and slept == [1]


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
    rows = [row["step"] for row in files.read_rows(folder / "run" / "metrics.jsonl")]
    positions = [files.read_object(path / "trainer_state.json") for path in files.complete_checkpoints(folder / "run")]
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
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's is ignored
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
        assert files.step_of(files.to_resume(str(folder))) >= 3
        checkpoints.check(folder)
        checks.check_run_folders(Args(resume=str(folder)))
        assert flags.of_resumed_run([f"--resume={folder}"], Args)
        assert [row["step"] for row in files.read_rows(folder / "metrics.jsonl")][:4] == [0, 1, 2, 3]
        assert in_a_fork(lambda: save(folder, 7))[0] == 0
    assert 5 < n < 999


def no_reader():
    """The descriptor of a pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    return write


def test_a_second_signal_ends_a_run_and_a_closed_terminal_does_not():
    """It may send SIGHUP several times. SIGTERM after it is a second request."""

    def work():
        os.dup2(no_reader(), 2)  # a closed terminal's output is an error
        records.GRACE = -1  # every other signal is a second one
        asked = records.catch_signals()
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        if asked == ["SIGHUP"]:
            signal.raise_signal(signal.SIGTERM)

    assert in_a_fork(work)[0] == -signal.SIGTERM


def test_under_nohup_a_closed_terminal_is_nothing():
    def work():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if records.catch_signals() == []:
            signal.raise_signal(signal.SIGHUP)

    assert in_a_fork(work)[0] == 0


PRINTS = """
import logging, os, pty, sys, time, warnings
from tqdm import tqdm
from runtime import terminal
assert open("/dev/null").fileno() > 2  # no file gets the number of a closed output
if sys.argv[1] == "terminal":  # whose window is closed
    window, program = pty.openpty()
    os.dup2(program, 1), os.dup2(program, 2), os.close(program), os.close(window)
time.sleep(float(sys.argv[2]))
for _ in range(2):
    print("–≤", "[/b]", flush=True)
    terminal.console().print("–≤")
    for output in (sys.stdout, sys.stderr):
        list(tqdm([1], file=output))
    logging.warning("warning"), warnings.warn("other warning")
os.write(9, b"done")
"""
OUTPUTS = [  # how a shell starts the program, and the beginning of what is shown
    ("{} pipe 0 >&- 2>&-", ""),
    ("{} pipe 0 <&- >&-", ""),
    ("{} pipe 0 2>&-", "–≤ [/b]\n–≤\n"),
    ("{} pipe 0 > /dev/full", ""),
    ("{} pipe 0 > /dev/full 2>&1", ""),
    ("PYTHONIOENCODING=ascii {} pipe 0", "?? [/b]\n??\n"),
    ("{} pipe 0.2 | true", ""),
    ("{} pipe 0.2 2>&1 | true", ""),
    ("{} terminal 0", ""),
]


@pytest.mark.parametrize(("shell", "shown"), OUTPUTS)
def test_no_output_ends_a_program(shell, shown, tmp_path):
    Path(tmp_path, "prints.py").write_text(PRINTS)
    command = f"set -o pipefail; exec 9> {tmp_path}/end; " + shell.format(f"{sys.executable} {tmp_path}/prints.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=environment)
    assert done.returncode == 0 and Path(tmp_path, "end").read_text() == "done", done.stderr
    assert done.stdout.decode().startswith(shown) and b"Traceback" not in done.stderr
    assert (b"prints.py goes on without standard output: " in done.stderr) == (shell.endswith(("full", "0.2 | true")))


def test_weights_and_biases_begins_before_tensorboards_writer_and_keeps_its_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.chdir(tmp_path)
    began, ended = [], []
    fake = SimpleNamespace(Error=RuntimeError, run=SimpleNamespace(id="a1"), finish=lambda: ended.append(True))

    def init(**options):
        assert not list(Path("run").rglob("events*"))
        began.append(options)

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    args = Args(run_dir="run", track=True)
    records.choose_folder(args)
    book = records.Records(args, SIZES)
    book.open(0)
    book.write({"step": 0, "reward": 0.5})
    book.close(0)
    assert began[0]["sync_tensorboard"] and began[0]["config"]["track"] and began[0]["id"] is None and ended
    shutil.copytree(save(tmp_path / "run", 1) or "run", "again")
    with monkeypatch.context() as patch:
        patch.setattr(fake, "init", lambda **options: began.append(options))
        records.choose_folder(Args(resume="again", track=True))
    assert began[1]["id"] == "a1"

    def refuse(**_):
        raise RuntimeError("no key")

    fake.init = refuse
    with one_line(capsys, says="--track: no key"):
        records.choose_folder(Args(run_dir="other", track=True))


# ---------------------------------------------------------------------------------------------- a run's problems, date

OWN = """
def load(source, split, *, size=None, seed=0):
    return [{"messages": [{"role": "user", "content": f"{split} {i}"}], "answer": {"is": i}} for i in range(5)]

def score(response, answer):
    return {"reward": 0.0, "correct": False, "format": True}
"""


def problems_file(folder, last=9):
    rows = [{"problem": f"What is {i} + 1?", "answer": i + 1} for i in [*range(9), last]]
    return write_rows(folder / "ten.jsonl", rows)


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """A function that prepares a run of a script on ten problems, and gives what records.prepare gives.

    With resume: the run that has done a step and has this in run.json goes on.
    """
    monkeypatch.setattr(chats, "FIXED", {})
    small = {"dtype": "float32", "steps": 2, "prompts_per_step": 2, "eval_size": 3, "kv_cache_gb": 0.1}
    small |= {"max_prompt_tokens": 100, "max_response_tokens": 20, "model": str(KK_TINY), "task": "math"}
    small["data"] = str(problems_file(tmp_path))

    def prepared(trainer=grpo, resume=None, **changes):
        values = small | changes
        if resume is not None:
            (tmp_path / "run/checkpoints/step_000001").mkdir(parents=True, exist_ok=True)
            about = {"script": trainer.__name__, "date": "2020-02-29"}
            (tmp_path / "run/args.json").write_text("{}")
            (tmp_path / "run/run.json").write_text(json.dumps(about | resume))
            values["resume"] = str(tmp_path / "run")
        args = trainer.Args(**{k: v for k, v in values.items() if k in trainer.Args.__dataclass_fields__})
        return records.prepare(args, examples if trainer is sft else rewards)

    return prepared


FILES_OF_TWO = {"data": "long.jsonl", "test_data": "ten.jsonl", "max_prompt_tokens": 120}
OTHERS = [  # the settings of the run, those that its resume changes, and what is no longer the same
    ({}, {"eval_size": 2}, "training and test"),
    ({}, {"seed": 1}, "training and test"),
    ({}, {"chat_template": "none"}, "training and test"),
    ({}, {"data": "long.jsonl"}, "training and test"),
    (FILES_OF_TWO, {"max_prompt_tokens": 99}, "training"),
    (FILES_OF_TWO, {"eval_size": 4}, "test"),
    ({}, {"steps": 9, "max_prompt_tokens": 101, "prompts_per_step": 4}, ""),
]


@pytest.mark.parametrize(("before", "changes", "splits"), OTHERS)
def test_a_resume_with_other_problems_is_refused(before, changes, splits, prepare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": "What is 7 " + "+ 1 " * i + "?", "answer": 7 + i} for i in range(30)]
    write_rows(tmp_path / "long.jsonl", rows)
    sizes = prepare(**before)[-1]
    says = f"^--resume .*: the {splits} problems are not those .*--model .*run/checkpoints/step_000001$"
    with refused(splits and says):
        prepare(**before | changes, resume={"sizes": sizes})


def test_a_file_or_a_task_that_changes_is_other_problems(prepare, tmp_path, capsys):
    """Prompts, answers, and their numbers, on which seeds depend. And a run of an older commit has no digest."""
    sizes = prepare()[-1]
    problems_file(tmp_path, last=11)
    with refused("problems are not those"):
        prepare(data=str(tmp_path / "ten.jsonl"), resume={"sizes": sizes})
    worked = "\ndef worked(problem, careful, seed):\n    return 'so'"
    for trainer, text in ((grpo, OWN), (opd, OWN), (sft, OWN + worked)):
        task, changed = tmp_path / f"{trainer.__name__}.py", tmp_path / f"{trainer.__name__}_changed.py"
        task.write_text(text)
        changed.write_text(text.replace('{"is": i}', '{"is": i + (split == "test")}'))  # Python reads a file once
        more = {"data": "", "teacher": str(KK_TINY)}
        sizes = prepare(trainer, task=str(task), **more)[-1]
        prepare(trainer, task=str(task), **more, resume={"sizes": sizes})
        with refused("the test problems are not those"):
            prepare(trainer, task=str(changed), **more, resume={"sizes": sizes})
    assert "not checked" not in capsys.readouterr().out
    prepare(resume={"sizes": SIZES})
    assert "whether its problems have changed is not checked" in capsys.readouterr().out
    problem = {"id": 3, "prompt_ids": [1, 2], "answer": "x"}
    assert checks.digest([problem]) != checks.digest([problem | {"id": 4}])


def test_a_template_that_writes_the_date_writes_the_runs(prepare, tmp_path, capsys):
    """Today's in a new run; after a resume still that; in a run of an older commit, which noted when it began, too."""
    folder = shutil.copytree(KK_TINY, tmp_path / "dated")
    dated = "{{ strftime_now('%d %b %Y') }} " + (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        dated.replace("<|im_start|>{{", "{{ strftime_now('%Y') }}<|im_start|>{{")
    )
    today = datetime.date.today()

    def begun(**changes):
        tokenizer, _, train, _, sizes = prepare(
            model=str(folder), chat_template="auto", max_prompt_tokens=99, **changes
        )
        reply = tools.encode_reply(AutoTokenizer.from_pretrained(folder), "so")  # as vLLM has a tokenizer of its own
        return tokenizer.decode(train[0]["prompt_ids"])[:11], tokenizer.decode(reply), sizes

    prompt, _, sizes = begun()
    assert (prompt, sizes["template_date"]) == (f"{today:%d %b %Y}", str(today))
    assert f"the chat template writes the date: {today} in all of the run" in capsys.readouterr().out
    for resume, date in (({"sizes": SIZES | {"template_date": "2019-03-01"}}, "01 Mar 2019"), ({}, "29 Feb 2020")):
        prompt, reply, sizes = begun(resume=resume)
        assert prompt == date and date[-4:] in reply and sizes["template_date"][:4] == date[-4:]
    assert prepare()[-1]["template_date"] is None and "the date" not in capsys.readouterr().out.split("2020")[-1]
    saved = shutil.copytree(folder, tmp_path / "old/checkpoints/step_000001")
    (tmp_path / "old/run.json").write_text('{"sizes": {"template_date": "2018-03-01"}}')
    for model, date in ((saved, "01 Mar 2018"), (folder, f"{today:%d %b %Y}")):
        (request,), _ = requests_of(model)
        assert AutoTokenizer.from_pretrained(folder).decode(request["prompt_ids"]).startswith(date)
