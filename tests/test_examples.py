"""examples/: what can be checked without Slurm, Docker, Colab and a GPU."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, metrics, python, small, until, write_rows

EXAMPLES = ROOT / "examples"
PROGRAMS = Path(sys.executable).parent  # where pip puts shellcheck and hadolint


def quiet(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stdout + done.stderr


def test_shell_and_dockerfile_are_as_their_linters_want_them():
    quiet("bash", "-n", EXAMPLES / "slurm.sh")
    quiet(PROGRAMS / "shellcheck", EXAMPLES / "slurm.sh")
    quiet(PROGRAMS / "hadolint", EXAMPLES / "Dockerfile")
    for name in re.findall(r"requirements\S*\.txt", (EXAMPLES / "Dockerfile").read_text()):
        assert (ROOT / name).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_run", "gpu"])
def test_the_notebook_trains_and_shows_its_curves(name, tmp_path, monkeypatch, capfd):
    """Its cells in order; with two small steps, and without what it installs. gpu.ipynb is for a T4; this is a CPU."""
    (tmp_path / "examples").mkdir()
    for part in (".venv", "grpo.py", "grpo_ar_lopti.py", "models", "tools", "runtime", "rewards"):
        (tmp_path / part).symlink_to(ROOT / part)
    (tmp_path / "examples" / f"{name}.ipynb").touch()
    rows = [{"question": f"What is {i} + 1?", "answer": f"It is\n#### {i + 1}"} for i in range(20)]
    questions = write_rows(tmp_path / "gsm8k.jsonl", rows)
    instead = {"first_run": small("x")[4:], "gpu": small("x", task="math", data=questions, dtype="float32")}[name]
    if name == "gpu":
        del instead[2:4]  # --run_dir: the notebook reads its own
    monkeypatch.chdir(tmp_path / "examples")
    shown = []
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=shown.append))  # a notebook's own
    names = {}
    for cell in json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]:
        lines = []
        source = "".join(cell["source"]).replace("\\\n", "")
        for line in source.splitlines() * (cell["cell_type"] == "code"):
            if line.startswith("!.venv/bin/python"):
                words = [sys.executable, *line.split()[1:], *(instead if "grpo" in line else [])]
                subprocess.run(words, check=True, timeout=600, capture_output=True)
            elif not re.match(r"\s*!(\[|make|git)", line):
                lines.append(line)
        code = "\n".join(lines).replace('    os.chdir("repository")', "    raise AssertionError")
        exec(compile(code, cell["id"], "exec"), names)
    assert [Path(picture).read_bytes()[:4] for picture in shown] == [b"\x89PNG"] and len(names["samples"]) > 0
    if name == "gpu":
        assert list(names["accuracy"]) == [0, 2] and "test accuracy" in capfd.readouterr().out
        assert list(Path("runs/t4/checkpoints").glob("step_*/adapter/*.safetensors"))


@pytest.mark.slow
def test_the_notebook_of_exercises_shows_a_lesson_and_checks_it(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {}
    for cell in json.loads((EXAMPLES / "exercises.ipynb").read_text())["cells"]:
        source = "".join(cell["source"])
        if source.startswith("!$PYTHON "):
            words = source.replace("$LESSON", str(names["LESSON"])).split()
            assert python(*words[1:]).stdout.count("NOT YET") == 2
        elif cell["cell_type"] == "code" and not source.startswith("%"):
            exec(re.sub("!git .*", "raise AssertionError", source), names)
    assert "raise NotImplementedError" in capsys.readouterr().out


STAND_INS = {  # for Slurm's commands, with all nodes on this machine
    "scontrol": 'if [ "$1" = requeue ]; then touch "$FAKE/requeued"; else echo localhost; fi',
    "scancel": 'xargs kill -TERM < "$FAKE/pids"',
    "srun": """\
shift 3  # --cpus-per-task N --kill-on-bad-exit=1
for _ in $(seq "$SLURM_NNODES"); do
    "$@" &
    echo $! >> "$FAKE/pids"
done
wait
""",
}


@pytest.fixture
def slurm(tmp_path):
    """A function that starts examples/slurm.sh with two nodes, as Slurm would, and what a job of it writes: a log."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in (".venv", "grpo.py", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
    environment = os.environ | job | {"FAKE": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    started = []

    def start(*words):
        (tmp_path / "pids").unlink(missing_ok=True)
        with open(tmp_path / "log", "a") as log:
            command = ["bash", str(EXAMPLES / "slurm.sh"), *map(str, words)]
            started.append(
                subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, process_group=0)
            )
        return started[-1]

    yield start, tmp_path / "runs" / f"slurm_{os.getpid()}", tmp_path
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv/bin/torchrun").exists(), reason="the script calls .venv/bin/torchrun")
def test_a_job_of_two_nodes_goes_on_after_it_was_queued_again(slurm):
    start, run, folder = slurm
    flags = small(run, steps=4, save_every=1, updates_per_step=1)
    flags = [word for i, word in enumerate(flags) if "--run_dir" not in (word, flags[i - 1])]
    of_a_kill = run / "checkpoints/step_000001.tmp"  # during the first save: the run begins anew
    of_a_kill.mkdir(parents=True)
    (of_a_kill / "trainer_state.json").touch()
    first = start("grpo.py", *flags)
    until(lambda: list(run.glob("checkpoints/step_000001")), 300)
    first.send_signal(signal.SIGTERM)
    first.wait(timeout=300)
    log = (folder / "log").read_text()
    assert "stopped by SIGTERM after step" in log and "queued again" in log, log[-3000:]
    assert (folder / "requeued").exists()
    (folder / "requeued").unlink()
    reached = len(metrics(run))
    assert 1 <= reached < 4

    assert start("grpo.py", *flags).wait(timeout=600) == 0, (folder / "log").read_text()[-3000:]
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4] and not (folder / "requeued").exists()
    assert "2 on CPU" in (folder / "log").read_text()  # processes: one of each node
