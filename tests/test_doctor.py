"""tools/doctor.py: that it finds what is wrong, says what to do, and that this machine passes."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT, python

from tools import doctor, prerequisites

ROWS = [
    {"step": 1, "kl": 0.0, "sampler_gap": 1e-4, "grad_norm": 0.4, "time/step": 2.0},
    {"step": 2, "kl": 1e-3, "sampler_gap": 2e-4, "grad_norm": 0.5, "time/step": 1.0},
    {"step": 3, "kl": 2e-3, "sampler_gap": 3e-4, "grad_norm": 0.6, "time/step": 1.0},
]
NAN = float("nan")


def changed(step, **values):
    """ROWS with other values in one step."""
    return [row | values if row["step"] == step else row for row in ROWS]


def is_failure(line, found, advice):
    """Whether a line is a FAIL with these words in it."""
    return line.outcome == "FAIL" and found in line.found and advice in line.advice


def test_what_must_hold_of_a_runs_metrics():
    assert not doctor.failures(doctor.check_rows(ROWS, 0.01))
    for rows, name, found, advice in [
        (changed(1, kl=0.02), "kl", "0.02", "report"),
        (changed(1, kl=NAN), "kl", "nan", "report"),
        (changed(1, sampler_gap=0.5), "sampler_gap", "0.5", "different models"),
        (changed(3, sampler_gap=NAN), "sampler_gap", "nan", "different models"),
    ]:
        (line,) = doctor.failures(doctor.check_rows(rows, 0.01))
        assert line.name == name and is_failure(line, found, advice)


def test_a_resumed_run_that_differs():
    assert doctor.check_resume(ROWS, [row | {"time/step": 0.5} for row in ROWS], on_gpu=False).outcome == "PASS"
    last_digit = changed(3, grad_norm=0.6 * (1 + 2**-52))
    assert is_failure(doctor.check_resume(ROWS, last_digit, on_gpu=False), "grad_norm 0.6", "report")
    assert doctor.check_resume(ROWS, last_digit, on_gpu=True).outcome == "PASS"
    assert is_failure(doctor.check_resume(ROWS, changed(3, kl=None), on_gpu=True), "kl 0.002 / None", "report")
    assert is_failure(doctor.check_resume(ROWS, ROWS[:2], on_gpu=True), "3 / 2 steps", "report")


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        ("platform.system", "system", "Darwin", "on a Mac or Windows: nano_grpo.py, WSL2, a container"),
        ("sys.version_info", "Python", (3, 10, 1), "3.10: make install PYTHON=python3.13"),
        ("sys.version_info", "Python", (3, 15, 0), "vLLM needs Python 3.11 to 3.14, and"),
        ("can_load", "libnuma", False, "vLLM needs libnuma: apt install libnuma1"),
        ("os.access", "shared memory", False, "mount -t tmpfs"),
        ("find_spec", "venv", None, "apt install python3-venv"),
    ],
)
def test_what_a_machine_lacks_for_an_installation(where, name, value, said, monkeypatch, capsys):
    """make says it before it downloads, and the doctor."""
    assert prerequisites.missing(on_cpu=True) == []
    stands_in = value if where == "sys.version_info" else lambda *_: value
    monkeypatch.setattr(f"tools.prerequisites.{where}", stands_in)
    monkeypatch.setattr("tools.prerequisites.sys.prefix", sys.base_prefix)
    [(found, text)] = prerequisites.missing(on_cpu=True)
    assert found == name and said in text
    if where != "can_load":
        return
    assert prerequisites.missing(on_cpu=False) == []
    assert is_failure(doctor.failures(doctor.software())[0], "missing", said)
    pins = []
    monkeypatch.setattr(doctor.prerequisites, "missing", lambda on_cpu: pins.append(on_cpu) or [])
    monkeypatch.setattr(doctor.machine, "nvidia_smi", lambda field: ["H100"])
    doctor.software()
    assert pins == [False]  # the machine counts, not torch's build


def test_make_downloads_nothing_if_something_is_missing(tmp_path):
    refuses = tmp_path / "python"
    refuses.write_text('#!/bin/sh\necho "error: $*" >&2\nexit 1\n')
    refuses.chmod(0o755)
    for command, said in (
        (refuses, "error: tools/prerequisites.py cpu"),
        ("no-python", "error: there is no no-python"),
    ):
        words = ["make", "--no-print-directory", "install", "GPU=0", f"VENV={tmp_path}/venv", f"PYTHON={command}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode and done.stderr.splitlines()[0].startswith(said), done.stderr
        assert not done.stdout and not (tmp_path / "venv").exists()


def test_the_quick_checks_pass_here(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(quick=True)
    table = capsys.readouterr().out
    assert ended.value.code == 0, table
    assert re.search(r"^PASS  memory", table, re.MULTILINE) and re.search(r"^SKIP  run", table, re.MULTILINE)


@pytest.mark.slow
def test_this_machine_runs_the_trainers():
    """The whole: a real run and its resumption, as a newcomer starts them."""
    done = python("-m", "tools.doctor", timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for name in ("run", "kl", "sampler_gap", "resume"):
        assert re.search(rf"^PASS  {name}:", done.stdout, re.MULTILINE), done.stdout
