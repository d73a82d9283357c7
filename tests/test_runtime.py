"""runtime/: what every trainer calls and no algorithm changes."""

import ast
import dataclasses
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, ROOT, answer, python
from helpers import SIZES, learn, policy_and_optimizer, refused
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import grpo
import grpo_stale
from grpo import Args
from runtime import (
    checkpoints,
    checks,
    curves,
    distributed,
    files,
    flags,
    machine,
    memory,
    metrics,
    records,
    sampler,
    settings,
    terminal,
)
from runtime.terminal import before_after, heading_line

LAYERS = [
    ("the task math", {"temperature": 1.0, "model": "Qwen/Qwen2.5-7B"}),
    ("this machine has no GPU", {"kv_cache_gb": 0.25, "gradient_checkpointing": False}),
    ("kk_tiny", {"model": "models/kk_tiny", "temperature": 1.0, "kv_cache_gb": 0.25, "lr": 1e-4}),
]


def parse(*argv, **defaults):
    return flags.parse(list(argv), Args, Args(**defaults), "What it does.")


def test_the_command_line_is_read_again_only_if_torch_finds_another_device(monkeypatch):
    monkeypatch.setattr(flags, "read", lambda *_: flags.ON_GPU)
    monkeypatch.setattr(flags, "READ", ["by check", "by check"])
    monkeypatch.setattr(flags, "ON_GPU", False)
    assert [flags.read_once(Args, {}, on_gpu) for on_gpu in (False, True)] == ["by check", True]
    assert flags.READ.pop() and flags.read_once(Args, {}, True)


def test_flags_in_both_spellings():
    assert parse("--updates_per_step", "16") == Args(updates_per_step=16)
    assert parse("--updates-per-step=16", lr=0.5) == Args(updates_per_step=16, lr=0.5)
    booleans = parse("--dry_run", "--no_gradient_checkpointing", "--steps=None", steps=3)
    assert booleans == Args(dry_run=True, gradient_checkpointing=False)


def test_help_has_groups_ranges_and_defaults(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")  # with more, groups may stand side by side
    with pytest.raises(SystemExit) as ended:
        parse("--help", lr=1e-4)
    assert ended.value.code == 0
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    parts = ["What it does.", " objective options ", "--clip_low FLOAT in [0, 1] ", "--chat_template {auto,none} "]
    parts += [" optimizer options ", "--lr FLOAT in (0, 1] AdamW's learning rate, constant (default: 0.0001)"]
    parts += ["--steps {None}|INT", "--gradient_checkpointing, --no_gradient_checkpointing "]
    assert all(part in text for part in parts) and "Group" not in text
    groups = flags.read_sources(Args)[0]
    assert list(groups)[:2] == ["objective", "problems"]  # the algorithm's own come first, and first in their group
    assert groups["problems"].index("task") < groups["problems"].index("data")
    names = [name for group in groups.values() for name in group]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(Args))


NO_NUMBERS = [math.nan, math.inf]
RANGES = [  # good values of a setting, bad ones
    ("clip_low", [0, 1.0], [1.5, -0.1, *NO_NUMBERS]),
    ("clip_high", [0.0], [-0.5, *NO_NUMBERS]),
    ("lr", [1.0], [0.0, *NO_NUMBERS]),
    ("temperature", [1, 0.01], [0.0, *NO_NUMBERS]),
    ("eval_temperature", [0.0, 0.01], [-1.0, *NO_NUMBERS]),
    ("steps", [1, None], [0]),
    ("seed", [0], [-1, 5_000_000_000]),
    ("max_grad_norm", [0.1], [0.0]),
]


@pytest.mark.parametrize(("name", "good", "bad"), RANGES)
def test_values_out_of_range(name, good, bad):
    for value in good:
        args = Args(**{name: value})
        settings.check_ranges(args)
        assert repr(args) == repr(Args(**{name: value}))  # an integer stays one
    for value in bad:
        with refused(re.escape(f"--{name} is {value}; it must be ") + "(finite|a finite|greater|less)"):
            settings.check_ranges(Args(**{name: value}))


def test_layers_and_reasons():
    values = flags.merged(LAYERS)
    assert values == {
        "temperature": 1.0,
        "model": "models/kk_tiny",
        "kv_cache_gb": 0.25,
        "gradient_checkpointing": False,
        "lr": 1e-4,
    }
    args = Args(**values)
    args.lr = 0.5
    args.seed = 3
    assert flags.differences(args, LAYERS) == {
        "model": ("Qwen/Qwen2.5-7B", "kk_tiny"),  # the paper's for this task, not the one in Args
        "kv_cache_gb": (16.0, "this machine has no GPU"),  # kk_tiny only repeats it
        "gradient_checkpointing": (True, "this machine has no GPU"),
        "lr": (1e-6, "command line"),
        "seed": (0, "command line"),
    }
    # a resumed run gives all settings, and is the reason only for those it changes
    resumed = dict(dataclasses.asdict(Args(**values)), seed=7)
    layers = [*LAYERS, ("the resumed run", resumed)]
    found = flags.differences(Args(**flags.merged(layers)), layers)
    assert found["seed"] == (0, "the resumed run") and found["lr"] == (1e-6, "kk_tiny")
    assert "steps" not in found


def test_settings_of_a_resumed_run(tmp_path):
    assert flags.of_resumed_run(["--lr", "1"], Args) == {}
    assert flags.of_resumed_run(["--resume", str(tmp_path)], Args) == {}
    of_the_run = dataclasses.asdict(Args(steps=9, lr=0.5))
    (tmp_path / "args.json").write_text(json.dumps(of_the_run))
    (tmp_path / "run.json").write_text(json.dumps({"script": "grpo"}))
    resume = f"--resume={tmp_path}"
    assert flags.of_resumed_run([resume], Args) == of_the_run
    assert flags.of_resumed_run([f"{resume}/checkpoints/step_000002"], Args) == of_the_run
    assert flags.of_resumed_run([resume, "--epochs", "2"], Args)["steps"] is None
    assert flags.of_resumed_run([resume, "--epochs=2", "--steps=3"], Args)["steps"] == 9
    (tmp_path / "args.json").write_text(json.dumps({"alpha": 9}))
    for script, says in [
        ("grpo", r"args\.json is of another version of grpo\.py .* has alpha"),
        ("cispo", r"is a run of cispo\.py, not of grpo\.py"),
    ]:
        (tmp_path / "run.json").write_text(json.dumps({"script": script}))
        with pytest.raises(ValueError, match=says):
            flags.of_resumed_run([resume], Args)


def model_folder(folder, content):
    """A folder with nothing but the settings that its model asks for."""
    folder.mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "trainer_settings.json").write_text(text)
    return str(folder)


def defaults_of(script, *argv):
    trainer = importlib.import_module(script)
    return flags.read(list(argv), trainer.Args, trainer.TASKS)


@pytest.mark.parametrize("argv", [[], ["--run_dir", "runs/mine"], ["--task", "guess", "--run_dir=runs/mine"]])
def test_the_header_names_the_command_line_only_for_flags_that_were_given(argv, monkeypatch, capsys):
    """Nor does it name a paper that the task does not have, and no group of settings is an empty row."""
    args, layers = defaults_of("grpo", *argv)
    args.steps, args.run_dir = 3, "runs/mine"  # as choose_folder sets it
    sizes = dict.fromkeys(("parameters", "estimated_memory_gb", "memory_gb", "training_problems", "test_problems"), 1)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *argv])
    terminal.show_header(args, sizes, layers)
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "runs/mine" in line)
    assert row.endswith("command line") == bool(argv)
    assert ("in the paper" in lines[1]) == ("guess" not in argv) and not [
        line for line in lines if line.split() == ["machine"]
    ]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_models_folder_has_settings_of_its_own(on_gpu, tmp_path, monkeypatch):
    """Of those a script takes what it has: value_lr is ppo.py's. They override the task's, and flags override them."""
    monkeypatch.setattr(flags, "ON_GPU", on_gpu)
    own = {"lr": 5e-4, "value_lr": 2e-3, "people": "2", "kv_cache_gb": 0.125, "prompts_per_step": 6}
    model = model_folder(tmp_path / "mine", own)
    args, layers = defaults_of("grpo", "--model", model, "--task", "countdown")
    assert (args.model, args.lr, args.people, args.kv_cache_gb) == (model, 5e-4, "2", 0.125)
    assert not hasattr(args, "value_lr")
    found = flags.differences(args, layers)
    assert found["lr"] == (1e-6, "mine") and found["people"] == ("3-7", "mine")
    assert found["prompts_per_step"] == (128, "mine")  # the paper's for this task
    assert flags.of_model("Qwen/Qwen2.5-3B-Instruct", Args) == {}  # a hub id
    args, layers = defaults_of("ppo", f"--model={model}", "--lr=3e-5")
    assert (args.lr, args.value_lr) == (3e-5, 2e-3)
    assert flags.differences(args, layers)["lr"] == (1e-6, "command line")


REFUSED = [
    ("{", r"trainer_settings\.json can't be read"),
    ({"lr": 7}, "--lr is 7; it must be less than or equal to 1"),
    ({"dtype": "int8"}, "--dtype is int8; it must be 'bfloat16', 'float16' or 'float32'"),
]


@pytest.mark.parametrize(("content", "says"), REFUSED)
def test_a_models_settings_are_checked(content, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        defaults_of("grpo", "--model", model_folder(tmp_path / "mine", content))


def test_a_resumed_run_has_its_own_settings_and_not_the_models(tmp_path):
    model = model_folder(tmp_path / "mine", {"lr": 5e-4})
    of_the_run = dataclasses.asdict(Args(model=model, lr=0.25, steps=3))
    (tmp_path / "args.json").write_text(json.dumps(of_the_run))
    (tmp_path / "run.json").write_text(json.dumps({"script": "grpo"}))
    args, layers = defaults_of("grpo", f"--resume={tmp_path}", "--seed=4")
    assert dataclasses.asdict(args) == of_the_run | {"resume": str(tmp_path), "seed": 4}
    assert flags.differences(args, layers)["lr"] == (1e-6, "the resumed run")


PROCESSORS = [
    ({"vendor_id": "AuthenticAMD", "flags": "fpu avx512f avx512_bf16 clflush"}, True),
    ({"vendor_id": "AuthenticAMD", "flags": "fpu avx2 clflush"}, False),
    ({"vendor_id": "GenuineIntel", "flags": "fpu avx512_bf16 amx_bf16 amx_tile"}, True),
    ({"vendor_id": "GenuineIntel", "flags": "fpu avx512f avx512_bf16"}, False),  # measured: AMX is hidden
    ({"CPU implementer": "0x41", "Features": "fp asimd bf16"}, True),
    ({}, False),
]


@pytest.mark.parametrize(("processor", "fast"), PROCESSORS)
def test_bfloat16_is_fast_where_the_processor_has_fast_instructions_for_it(processor, fast):
    assert machine.is_fast_in_bfloat16(processor) == fast


@pytest.mark.parametrize("fast", [True, False])
def test_the_type_of_compute_is_what_the_machine_is_fast_at(fast, monkeypatch):
    monkeypatch.setattr(machine, "has_fast_bfloat16", lambda: fast)
    monkeypatch.setattr(flags, "ON_GPU", False)
    args, layers = defaults_of("grpo")
    assert args.dtype == ("bfloat16" if fast else "float32")
    found = flags.differences(args, layers)
    assert found.get("dtype") == (None if fast else ("bfloat16", "bfloat16 is slow here"))
    assert defaults_of("grpo", "--dtype", "bfloat16")[0].dtype == "bfloat16"


MACHINES = [  # --task, GPUs, their compute capabilities, --dtype, whether activations are recomputed
    ("kk", 1, "8.0", "bfloat16", True),
    ("kk", 4, "", "bfloat16", False),
    ("math", 4, "7.5\n8.6", "bfloat16", True),
    ("math", 8, "7.5\n7.0", "float16", False),
    ("kk", 1, "7.5", "float16", True),
]


@pytest.mark.parametrize("task, n_gpus, capabilities, dtype, recomputes", MACHINES)
def test_settings_that_follow_from_the_gpus(task, n_gpus, capabilities, dtype, recomputes, tmp_path, monkeypatch):
    """The driver tells, because torch is not imported yet; checks.check_gpus asks torch later."""
    has_driver(tmp_path, monkeypatch, capabilities)
    monkeypatch.setattr(flags, "ON_GPU", True)
    monkeypatch.setattr("runtime.machine.WORLD_SIZE", 8)  # of two machines
    monkeypatch.setattr("runtime.machine.LOCAL_WORLD_SIZE", n_gpus)
    args, _ = defaults_of("grpo", "--task", task)
    assert (args.gradient_checkpointing, args.compile, args.dtype) == (recomputes, True, dtype)
    assert defaults_of("grpo", "--dtype", "float32")[0].dtype == "float32"


def has_driver(folder, monkeypatch, said):
    """Puts a program nvidia-smi on the PATH that says this of its GPU, whatever it is asked."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_build_for_gpus_without_a_usable_gpu_is_refused(monkeypatch):
    """Otherwise the run would end in vLLM, with a traceback."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with refused("driver 580 or newer.*on the CPU: `make install GPU=0"):
        checks.check_gpus(SimpleNamespace(dtype="float32"))
    monkeypatch.setattr(torch.version, "cuda", None)  # torch's CPU build was chosen
    checks.check_gpus(SimpleNamespace(dtype="float32"))


@pytest.mark.parametrize(("built_for", "says"), [("hip", "AMD GPUs"), ("xpu", "Intel GPUs"), ("cuda", "")])
def test_a_build_for_gpus_of_others_is_refused_before_torch_is_imported(built_for, says, tmp_path, monkeypatch):
    """Also if torch finds a GPU: it calls AMD's "cuda". version.py is as torch writes it."""
    lines = [f"{name}: Optional[str] = {'13.0' if name == built_for else None!r}" for name in ("cuda", "hip", "xpu")]
    (tmp_path / "version.py").write_text("\n".join(["__version__ = '2.13.0'", *lines]))
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: found)
    assert machine.built_for("cuda") == ("13.0" if built_for == "cuda" else "")
    says = says and f"torch is a build for {says}.*not supported: train on the CPU: `make install GPU=0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bool(machine.unusable_gpus()) == bool(says)  # evaluate.py, the doctor and benchmarks call it
    with refused(says):
        flags.check_settings(Args())


@pytest.mark.parametrize(
    ("name", "capability", "in_bfloat16"),
    [("Tesla T4", (7, 5), "has no bfloat16: give --dtype float16"), ("NVIDIA A100-SXM4-80GB", (8, 0), "")],
)
def test_which_gpus_are_refused(name, capability, in_bfloat16, monkeypatch):
    monkeypatch.setattr(distributed, "ON_GPU", True)
    answers = {"is_available": True, "device_count": 1, "set_device": None, "get_device_name": name}
    for function, found in (answers | {"get_device_capability": capability}).items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, found=found: found)
    for dtype, says in (("bfloat16", in_bfloat16), ("float16", ""), ("float32", ""), (None, "")):
        with refused(says and f"{name} {says}"):
            checks.check_gpus(SimpleNamespace(dtype=dtype))


def test_checks_of_folders(tmp_path):
    fresh, resumed = Args(run_dir=str(tmp_path)), Args(resume=str(tmp_path))
    checks.check_run_folders(Args())
    checks.check_run_folders(fresh)
    with refused("no checkpoint there"):
        checks.check_run_folders(resumed)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with refused("holds a run: continue it .*, delete it, or name another"):
        checks.check_run_folders(fresh)
    done = tmp_path / "checkpoints" / "step_000002"
    done.mkdir(parents=True)
    (done / "trainer_state.json").write_text("{}")
    (tmp_path / "metrics.jsonl").unlink()
    with refused("holds a run"):
        checks.check_run_folders(fresh)
    (tmp_path / "args.json").write_text("{}")
    checks.check_run_folders(resumed)


KINDS = [
    ("gpt_oss", "is a gpt_oss, which can't be trained here: its experts' weights are in MXFP4"),
    ("gemma3", "is a gemma3, whose layers are not in .model.layers"),  # check_model gives its language model alone
    ("gemma3_text", ""),
]


@pytest.mark.parametrize(("kind", "says"), KINDS)
def test_a_model_that_the_trainers_compute_wrongly_is_refused(kind, says):
    config = AutoConfig.for_model(kind)
    config.num_hidden_layers = 2
    args = Args(model="m", max_prompt_tokens=64, max_response_tokens=64)
    with refused(says and f"^--model m .*{says}"):
        memory.estimate(config, args, 1024)


@pytest.mark.parametrize("kind", ["phi", "starcoder2"])
def test_recomputing_activations_brings_no_dropout(kind, tmp_path):
    """Though transformers recomputes only in layers that are in training mode."""
    config = AutoConfig.for_model(
        kind, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        resid_pdrop=0.5, embd_pdrop=0.5, residual_dropout=0.5, attention_dropout=0.5, num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    args = Args(model=str(tmp_path), gradient_checkpointing=True, compile=False, dtype="float32")
    policy = grpo.load_policy(args, trained=True)
    passes = []
    policy.lm.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))
    ids = torch.arange(24, device=distributed.DEVICE).view(2, 12)
    first, second = (policy(ids, ids % 12 > 3, 1.0)[0] for _ in range(2))
    assert torch.equal(first, second) and len(passes) == 2
    first.sum().backward()
    assert len(passes) == 3


STEP = {
    "step": 123456, "reward": -2.98437, "accuracy": 0.125, "format_rate": 0.6875,
    "response_tokens": 4096.0, "kl": 3.1234e-05, "entropy": 0.35723, "clip_rate": 0.0001234,
    "grad_norm": 1234.5678, "tokens": 4096, "tokens_per_s": 123456.7, "time/step": 12345.6,
}  # fmt: skip


def row(step, number, correct):
    told = {"correct": correct, "reward": 3.0 if correct else -1.5}
    return {"step": step, "id": number, "prompt": "Who is a [knight]?", "response": "so"} | told


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_directions_of_change_are_counted():
    rows = [row(step, i, int(right)) for step, of in ((0, "011"), (5, "101")) for i, right in enumerate(of)]
    assert before_after(rows)[0].startswith("1 of 3 kept test problems went from wrong to right, 1 from right to")


def test_records_of_a_run_and_of_its_resumption(tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "[/b]run"
    run_dir.mkdir(parents=True)
    args = Args(run_dir=str(run_dir), responses_per_prompt=3, steps=4)
    monkeypatch.setattr("runtime.records.catch_signals", lambda: ["SIGTERM"])  # as if one had come
    book = records.Records(args, SIZES)
    book.open(0)
    assert book.interrupted()
    examples = [row(0, number, False) for number in reversed(range(30))]
    tests = [{"id": e["id"], "messages": [{"content": e["prompt"]}]} for e in examples]
    answers = [SimpleNamespace(text=e["response"]) for e in examples]
    book.write({"step": 0, "eval/accuracy": 0.25})
    book.write_tests(0, tests, answers, [{"correct": False, "reward": -1.5}] * 30)
    for step in range(1, 4):
        book.write(dict(STEP, step=step, kl=None, sampler_gap=0.2 if step == 2 else 0.09))  # no jump: 0.2 < 3 × 0.09
        problems = [{"messages": [{"content": f"p{i // 3}"}], "answer": i // 3} for i in range(9)]
        responses = [SimpleNamespace(text=letter) for letter in "abcdefghi"]
        scores = [{"reward": i, "correct": False, "format": True} for i in range(9)]
        book.write_samples(step, problems, responses, scores)
        book.write_tests(step, tests, answers, [{"correct": True, "reward": 3.0}] * 30)
    checkpoint = run_dir / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    book.close(3)
    text = capsys.readouterr().out
    assert len(heading_line(STEP)) == len(heading_line(STEP | {"turns": 2.5})) == 80
    assert text.count(heading_line(STEP)) == text.count("warning: sampler_gap is 0.200 nats") == 1
    assert f"stopped by SIGTERM after step 3: {run_dir}" in text and f"--resume {run_dir}" in text
    assert text.endswith(f"\nnext: {run_dir}/curves.png; python evaluate.py {run_dir}; make watch\n")
    assert json.loads((run_dir / "args.json").read_text())["lr"] == 1e-6
    about = json.loads((run_dir / "run.json").read_text())
    assert about["sizes"] == SIZES and about["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", about["commit"]) and (run_dir / "curves.png").exists()
    samples = read_lines(run_dir / "samples.jsonl")
    assert [(s["prompt"], s["answer"], s["response"], s["reward"]) for s in samples[:4]] == [
        ("p0", 0, "a", 0), ("p0", 0, "b", 1), ("p1", 1, "d", 3), ("p1", 1, "e", 4),
    ]  # fmt: skip

    monkeypatch.setattr("runtime.records.catch_signals", lambda: [])
    book = records.Records(args, SIZES)
    book.open(2)
    assert not book.interrupted()
    book.close(2)
    names = ("metrics", "samples", "test_samples")
    steps = [[line["step"] for line in read_lines(run_dir / f"{name}.jsonl")] for name in names]
    assert steps == [[0, 1, 2], [1] * 4 + [2] * 4, [0] * 20 + [1] * 20 + [2] * 20]
    assert read_lines(run_dir / "test_samples.jsonl")[0] == dict(row(0, 0, False), step=0)


def test_the_terminal_plots_curves_of_five_points_and_more():
    rows = [{"step": step, "reward": step / 2, "eval/accuracy": step / 9 if step else None} for step in range(5)]
    assert curves.in_terminal(rows[:4], colours=False) == ""
    text = curves.in_terminal(rows, 80, colours=False)
    assert "reward" in text and "test accuracy" not in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("columns", "fits"), [("80", True), ("160", False)])
def test_vllms_bar_has_room_on_a_narrow_terminal(columns, fits, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("runtime.terminal.shows_bars", lambda: True)
    of_vllm = {"total": 4, "initial": 2, "desc": "Processed prompts", "postfix": "est. speed input: 1234.56 toks/s"}
    with sampler.bar_with("step 7: sampling")(file=io.StringIO(), ncols=int(columns), **of_vllm) as bar:
        text = str(bar)
    assert text.startswith("step 7: sampling:  50%|") and text.count("#") >= 10 and len(text) <= int(columns)
    assert ("toks/s" in text) != fits


def test_a_step_of_responses_that_are_all_cut_off_is_said_once(tmp_path, capsys):
    """Also if their rewards differ."""
    book = records.Records(Args(run_dir=str(tmp_path), max_response_tokens=77), SIZES)
    book.open(0)
    for step, rate in enumerate([0.99, 1.0, 1.0], 1):
        book.has_advantages = step < 3
        book.write(dict(STEP, step=step, truncated_rate=rate, zero_std_rate=0.5))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 2 and "step 3 teaches nothing" in warnings[1]
    assert all(words in warnings[0] for words in ("of step 2", "truncated_rate", "--max_response_tokens", "77"))


JUMPS = [  # --lag, --sampler_dtype, the gap of each step, and whether the last one ends the run
    (0, "", [0.03, 0.13], True),  # as with an old output layer in the sampler
    (0, "", [0.03, math.nan], True),
    (0, "", [0.03, 0.099], False),  # below what is usual in bfloat16
    (0, "", [0.2, 0.5], False),  # large from the start: nothing has jumped
    (0, "", [0.03, 0.04, 0.9], False),  # later the policy itself may be the reason: a warning
    (2, "", [0, 0.5], False),  # older weights are the reason
    (0, "fp8", [0.2, 0.5], False),  # 8 bits are the reason: no warning
    (0, "int8", [0.2, 0.9], True),  # but not of this
]


@pytest.mark.parametrize(("lag", "kind", "gaps", "asks"), JUMPS)
def test_a_jump_of_sampler_gap_at_the_samplers_first_update_ends_the_run(lag, kind, gaps, asks, tmp_path, capsys):
    for stop_at_gap in (True, False):
        folder = tmp_path / str(stop_at_gap)
        folder.mkdir()
        args = Args(run_dir=str(folder), stop_at_gap=stop_at_gap, sampler_dtype=kind)
        args.lag = lag
        book = records.Records(args, SIZES)
        book.open(0)
        asked = []
        for step, gap in enumerate(gaps, 1):
            book.write(dict(STEP, step=step, sampler_gap=gap))
            asked += [step] * book.interrupted()
        assert asked == [len(gaps)] * (asks and stop_at_gap)
        if asked:
            with pytest.raises(SystemExit):
                book.close(len(gaps))
        text = capsys.readouterr()
        assert bool(text.err) == bool(asked)
        warns = not lag and not kind
        assert text.out.count("warning: sampler_gap") == warns * sum(not gap <= 0.1 for gap in gaps)


def test_weights_that_the_sampler_did_not_get_end_the_run(tmp_path):
    """(fraction of the weights that are new, fingerprint) of each step. What counts is all that is new since the
    fingerprint was.
    """
    args = Args(run_dir=str(tmp_path), kl_coef=0)
    for steps, ends in (
        ([(0, 1), (0, 1), (1, 2), (1, 3)], [0, 0, 0, 0]),
        ([(0, 1), (0.5, 1)], [0, 1]),
        ([(0, 1), (0.5, 2), (0.004, 2), (0.004, 2), (0.004, 2)], [0, 0, 0, 0, 1]),
    ):
        for args.stop_at_gap in (True, False):
            book = records.Records(args, SIZES)
            book.asked_to_stop = []
            weights, first, ended = torch.zeros(1000), 0, []
            for share, fingerprint in steps:
                end = first + int(1000 * share)
                weights = weights.clone()
                weights[torch.arange(first, end) % 1000] += 1
                first = end
                book.check_sync({"a": weights[:300], "b": weights[300:].view(10, 70)}, [fingerprint])
                ended.append(int(book.interrupted()))
            assert ended == (ends if args.stop_at_gap else [0] * len(ends))


def test_a_changed_file_is_told_from_a_new_result(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    assert records.commit(tmp_path / "nowhere") is None
    (tmp_path / "lab" / "results").mkdir(parents=True)
    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = records.commit(tmp_path)
    for changed, mark in (("lab/results/more.json", ""), ("code.py", "+"), ("never_added.py", "+")):
        (tmp_path / changed).write_text("2")
        assert records.commit(tmp_path) == clean + mark
        git("stash", "-u")


def test_the_folder_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["somewhere/dapo.py"])
    for args, named in [
        (Args(seed=4), r"runs/dapo_kk_4_\d{8}-\d{6}"),
        (Args(task="my/own task.py"), r"runs/dapo_own task_0_\d{8}-\d{6}"),
        (Args(run_dir="a/[/b]x"), r"a/\[/b\]x"),
    ]:
        records.choose_folder(args)
        assert re.fullmatch(named, args.run_dir) and (tmp_path / args.run_dir / "lock").is_file()


def test_a_step_that_is_not_finite_ends_the_run(tmp_path):
    args = Args(run_dir=str(tmp_path))
    batch = {"ids": torch.ones(2)}
    records.check_finite(0.5, 1.5, batch, 6, args)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=r"step 7: loss nan, .* 1\.5\..* --lr or .* it has no checkpoint to go on"):
        records.check_finite(math.nan, 1.5, batch, 7, args)
    with pytest.raises(SystemExit, match=r"step 8: loss 0\.5, gradient norm inf\..*lower --value_lr or"):
        records.check_finite(0.5, math.inf, batch, 8, args, lr_flag="--value_lr")
    kept = torch.load(tmp_path / "non_finite_step_000007_process_0.pt")
    assert kept["args"]["lr"] == 1e-6 and kept["batch"]["ids"].tolist() == [1, 1]


def test_a_checkpoint_continues_to_the_last_bit(tmp_path):
    args = Args(run_dir=str(tmp_path), keep_checkpoints=2)
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    policy, optimizer = policy_and_optimizer()
    (tmp_path / "checkpoints" / "step_000009.tmp").mkdir(parents=True)  # a kill left it
    for step in (1, 2, 3):
        learn(policy, optimizer)
        before = metrics.some_weights(policy, "bfloat16")
        checkpoints.save(policy, optimizer, tokenizer, step, 10 * step, args)
    found = files.complete_checkpoints(tmp_path)
    assert [path.name for path in found] == ["step_000002", "step_000003"]
    assert sorted((tmp_path / "checkpoints").iterdir()) == found
    checkpoints.check(tmp_path)
    learn(policy, optimizer)
    assert 0.1 < (metrics.some_weights(policy, "bfloat16") != before).float().mean() <= 1

    torch.manual_seed(5)
    fresh, its_optimizer = policy_and_optimizer()
    assert checkpoints.load(fresh, its_optimizer, found[-1]) == (3, 30)
    learn(fresh, its_optimizer)
    pairs = zip(policy.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    ordinary = AutoModelForCausalLM.from_pretrained(found[-1], dtype="auto")
    assert sum(p.numel() for p in ordinary.parameters()) == sum(p.numel() for p in fresh.parameters())
    assert {weight.dtype for weight in load_file(found[-1] / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoTokenizer.from_pretrained(found[-1]).chat_template == tokenizer.chat_template


def test_the_clock_adds_up(monkeypatch):
    peaks = iter([1.0, 3.0, 2.0])  # a look for each lap; one more would be an error
    monkeypatch.setattr(memory, "peak_gb", lambda: next(peaks))
    watch = metrics.Clock()
    for phase in ("sample", "score", "sample"):  # dapo.py samples again
        sum(range(1000))
        watch.lap(phase)
    found = watch.end("sync")  # the sampler is awake then: its memory is not the trainer's peak
    assert list(found) == ["time/sample", "time/score", "time/sync", "time/step", "peak_memory_gb"]
    assert found["peak_memory_gb"] == 3.0
    seconds = [found[f"time/{phase}"] for phase in ("sample", "score", "sync")]
    assert all(0 < second < 1 for second in seconds) and found["time/step"] == pytest.approx(sum(seconds))


def test_the_share_of_weights_that_changed():
    policy = torch.nn.Linear(3, 2)
    before = metrics.some_weights(policy, "float32")
    assert metrics.share_changed(before, policy, "float32") == 0
    with torch.no_grad():
        policy.weight[0, :2] += 1
    assert metrics.share_changed(before, policy, "float32") == 2 / 8


def test_a_containers_limit_is_its_memory(tmp_path, monkeypatch):
    here = memory.machine_bytes()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "Path", lambda path: limit)
    for text, expected in (("max\n", here), (f"{here // 2}\n", here // 2)):
        limit.write_text(text)
        assert memory.machine_bytes() <= expected <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.machine_bytes() == here // 2


@pytest.mark.parametrize(
    ("needed", "teacher", "args"),
    [(2 * (3 + 4), 0, Args()), (2 * (3 + 6), 3, Args()), (2 * (3 + 2 * 4), 0, grpo_stale.Args(lag=2))],
)  # fmt: skip
def test_main_memory_that_is_too_small_for_gpus_is_refused(needed, teacher, args, monkeypatch):
    """Two processes with 3 GiB and 4 bytes a parameter each; with --lag 2 in bfloat16 three snapshots and vLLM's."""
    monkeypatch.setattr(distributed, "LOCAL_WORLD_SIZE", 2)
    monkeypatch.setattr(memory, "machine_bytes", lambda: needed * 2**30)
    memory.check_main(args, 2**30, teacher * 2**30)
    monkeypatch.setattr(memory, "machine_bytes", lambda: (needed - 1) * 2**30)
    with refused(rf"needs about {needed}\.0 GiB of main memory, and there are {needed - 1}\.0: "):
        memory.check_main(args, 2**30, teacher * 2**30)
    monkeypatch.setattr(distributed, "ON_GPU", True)
    monkeypatch.setattr(memory, "this_machine", lambda: memory.Machine(True, 2, 80.0))
    monkeypatch.setattr(memory, "machine_bytes", lambda: 6 * 2**30)
    with refused("of main memory"):  # as in a run, and with --dry_run
        checks.check_model(dataclasses.replace(args, model=str(KK_TINY), max_response_tokens=256), 1024)


def test_metrics_of_responses_by_hand():
    """Two groups of three; in the second only the middle one differs."""
    rewards, lengths = [1.0, 1.0, 1.0, 0.0, 3.0, 0.0], [2, 4, 6, 1, 1, 4]
    scores = [{"reward": r, "correct": r > 0, "format": i > 1} for i, r in enumerate(rewards)]
    responses = [answer(n, finish_reason="length" if n == 4 else "stop") for n in lengths]
    problems = [{"category": "2"}] * 3 + [{"category": "3"}] * 3
    found = metrics.of_responses(responses, problems, scores, Args(responses_per_prompt=3))
    assert found == pytest.approx({
        "reward": 1, "reward_std": 1, "accuracy": 4 / 6, "format_rate": 4 / 6, "accuracy_2": 1, "accuracy_3": 1 / 3,
        "zero_std_rate": 0.5, "response_tokens": 3, "truncated_rate": 2 / 6, "tokens": 18, "timed_out": 0,
    })  # fmt: skip


def test_metrics_of_tokens_by_hand():
    mask = torch.tensor([[False, True, True], [False, True, False]])
    batch = {"mask": mask, "entropy": torch.tensor([[9.0, 1, 2], [9, 6, 9]])}
    assert metrics.token_mean(batch["entropy"], mask) == 3
    assert metrics.token_mean(batch["entropy"], mask & False) is metrics.token_mean(None, mask) is None
    assert metrics.token_rate(2, mask) == 2 / 3 and metrics.token_rate(0, mask & False) == 0


def noisy(end="", **environment):
    """What comes out of a block in which Python and a C library print, and which ends so."""
    code = f"""
import ctypes, os
from runtime import distributed
print("vLLM's level is", os.environ["VLLM_LOGGING_LEVEL"])
with distributed.library_notices():
    ctypes.CDLL(None).puts(b"[Gloo] Rank 0 is connected")
    os.write(2, b"Warning: NUMA binding\\nRuntimeError of a library\\n")
    print("from Python")
    {end or "pass"}
print("after")
"""
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    inherited.update(environment)
    return python("-X", "faulthandler=0", "-c", code, env=inherited)


def test_nothing_is_hidden_if_the_user_wants_vllms_log(monkeypatch, capfd):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "info")
    with distributed.library_notices():
        os.write(2, b"NCCL INFO Bootstrap")
    assert capfd.readouterr().err == "NCCL INFO Bootstrap"


def test_notices_are_hidden_and_errors_are_not():
    for level in ("", "error"):
        done = noisy(VLLM_LOGGING_LEVEL=level)
        assert (done.returncode, done.stderr) == (0, "RuntimeError of a library\n")
        assert done.stdout == f"vLLM's level is {level or 'ERROR'}\nafter\n"
    for end in ("raise KeyError", "os.abort()"):
        done = noisy(end)
        assert done.returncode and done.stdout == "vLLM's level is ERROR\n"
        assert "RuntimeError of a library\n" in done.stderr and "NUMA" not in done.stderr


IMPORTS = [
    ("rewards/*.py", {"tools", "lab"}),  # runtime: only in functions that a run calls
    ("runtime/*.py", {"tools", "lab", "course", "benchmarks"}),
    ("tools/*.py", {"lab"}),
    ("*.py", {"tools", "lab"}),  # the trainers
]


@pytest.mark.parametrize(("files", "may_not"), IMPORTS)
def test_the_folders_import_in_one_direction(files, may_not):
    """Also inside functions."""
    paths = list(ROOT.glob(files))
    assert len(paths) > 3
    for path in paths:
        imported = set(re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
        assert not imported & may_not, path
        is_of_rewards = path.parent.name == "rewards"
        assert not (is_of_rewards and re.search(r"^(?:from|import) runtime", path.read_text(), re.MULTILINE)), path


def test_no_script_imports_more_than_twelve_modules_of_runtime():
    for path in ROOT.glob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "runtime":
                modules.update(name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module.startswith("runtime."):
                modules.add(node.module.removeprefix("runtime."))
        assert len(modules) <= 12, path
