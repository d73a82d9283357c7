"""What fits where: the estimate for machines that are not here, docs/what_fits.md, and --dry_run."""

import dataclasses
import importlib
import json
import re
import shlex
import sys

import pytest
import torch
from conftest import KK_TINY, SMOLLM, parse, python, small

import grpo
import sft
from runtime import checks, defaults, memory, processes, ranks
from tools import family
from tools.maintain import fits

BILLIONS = {  # of parameters, as the model cards say
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 0.362,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1.71,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen/Qwen2.5-3B-Instruct": 3.09,
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "meta-llama/Llama-3.2-1B-Instruct": 1.24,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21,
}


@pytest.fixture(scope="module", autouse=True)
def shapes_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "shapes_of", fits.once_each(memory.shapes_of))
        yield


# --------------------------------------------------------------------------------------------------------------------
# The estimate for another machine


def estimate(gib=80, count=1, on_gpu=True, **changes):
    """Of kk_tiny, in GiB."""
    args = grpo.Args(model=str(KK_TINY), max_response_tokens=640, steps=10)
    for name, value in changes.items():
        setattr(args, name, value)
    machine = memory.Machine(on_gpu=on_gpu, processes=count, local_processes=count, gib=gib)
    config = fits.MODELS["HuggingFaceTB/SmolLM2-135M-Instruct"]
    return memory.estimate(config, args, 4096, machine)


def test_what_the_sampler_works_with_by_hand():
    config = fits.MODELS["HuggingFaceTB/SmolLM2-135M-Instruct"]  # 576 wide, 1536 between, a vocabulary of 49,152
    on_a100, on_h100 = (
        memory.sampler_work_bytes(config, 2, memory.Machine(True, 1, 1, 72, large)) for large in (False, True)
    )
    logits, tokens = 256 * 49152 * (2 + 3 * 4), 2 * 8192 * (3 * 1536 + 4 * 576)
    assert on_a100 == 2**30 + tokens + logits  # CUDA graphs: 1 GiB
    assert on_h100 == 2**30 + 2 * tokens + 4 * logits


def test_the_estimate_is_for_the_machine_that_it_is_given():
    parameters, needed, available = estimate(gib=3)
    assert parameters == pytest.approx(134.5e6, rel=0.01)
    assert available == 3 < needed  # it judges nothing: check_model compares the two
    assert estimate(count=8)[1] < needed  # FSDP2 divides what is always held
    # On a CPU sampler and trainer hold their memory at the same time, and the libraries count.
    assert estimate(on_gpu=False)[1] > needed + memory.LIBRARIES


def test_by_default_the_estimate_is_for_this_machine():
    config = fits.MODELS["HuggingFaceTB/SmolLM2-135M-Instruct"]
    args = grpo.Args(steps=10)
    machine = memory.this_machine()
    assert memory.estimate(config, args, 1024)[:2] == memory.estimate(config, args, 1024, machine)[:2]
    assert machine.on_gpu == processes.ON_GPU == torch.cuda.is_available()
    assert (machine.processes, machine.local_processes) == (1, 1)
    assert 0.5 < machine.gib < 10_000


def test_numbers_worked_out_by_hand():
    """1000 M parameters' worth of state on 4 GPUs: 12 bytes each for weight and moments, 2 for the reference."""
    args = grpo.Args(kl_coef=0.001)
    machine = memory.Machine(on_gpu=True, processes=4, local_processes=4, gib=80)
    assert memory.always_bytes(1e9, 0, 2, args, machine) == 14e9 / 4
    # With LoRA 2 bytes for a weight and 12 for a parameter of an adapter. The reference has the same weights.
    assert memory.always_bytes(1e9, 1e7, 2, args, machine) == (2e9 + 12e7) / 4
    args.kl_coef = 0
    assert memory.always_bytes(1e9, 0, 2, args, machine) == 12e9 / 4
    machine.processes = 8  # two machines of four: each holds all shards
    assert memory.always_bytes(1e9, 0, 2, args, machine) == 12e9 / 4


# --------------------------------------------------------------------------------------------------------------------
# The models


@pytest.mark.parametrize("model", fits.MODELS)
def test_the_shapes_have_the_published_numbers_of_parameters(model):
    assert fits.parameters(fits.MODELS[model]) == pytest.approx(BILLIONS[model] * 1e9, rel=0.005)


@pytest.mark.skipif(not SMOLLM.exists(), reason="`make model` has not been run")
def test_the_shape_of_smollm2_is_that_of_the_model_at_hand():
    kept = json.loads((SMOLLM / "config.json").read_text())
    shape = fits.MODELS["HuggingFaceTB/SmolLM2-135M-Instruct"].to_dict()
    for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
    ):  # fmt: skip
        assert shape[name] == kept[name], name


# --------------------------------------------------------------------------------------------------------------------
# The tables


def test_the_file_is_up_to_date_and_larger_cards_never_cost_more():
    page = fits.page()
    assert fits.FILE.read_text() == page, "python -m tools.maintain.fits"
    lines = page.partition("| model |")[2].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert len(rows) == 2 * len(fits.MODELS)
    for _, t4, *cells in rows:
        assert t4 == cells[0]  # float16 needs what bfloat16 needs
        for of_count in zip(*map(str.split, cells)):
            places = ["ABCDEFG–".index(name) for name in of_count]
            assert places == sorted(places, reverse=True)


@pytest.mark.parametrize(
    ("model", "card", "lora", "setting"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "80 GB", False, "A"),  # the paper's settings
        ("Qwen/Qwen2.5-3B-Instruct", "40 GB", False, None),
        ("Qwen/Qwen2.5-3B-Instruct", "24 GB", True, "D"),
        ("Qwen/Qwen2.5-7B-Instruct", "48 GB", True, "C"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "T4", False, "F"),
    ],
)
def test_what_fits_on_one_card(model, card, lora, setting):
    found = fits.first_that_fits(model, card, 1, lora)
    assert (found and found.name) == setting


@pytest.mark.parametrize("script", family.family())
def test_a_scripts_own_command_fits_its_gpus_of_80_gb(script, monkeypatch):
    """The first command of its docstring: python, or torchrun for several GPUs. A teacher is of 7 billion."""
    trainer = importlib.import_module(script)
    command = re.search(r"^Command.*\n(?:.*\n)??    ((?:python|torchrun) .*)$", trainer.__doc__, re.MULTILINE)[1]
    start, _, flags = command.partition(f"{script}.py")
    count = int(start.split()[-1]) if start.startswith("torchrun") else 1
    teacher = fits.MODELS["Qwen/Qwen2.5-7B-Instruct"]
    monkeypatch.setattr(memory.AutoConfig, "from_pretrained", lambda *_, **__: teacher)
    with fits.on_gpus(count):
        args = parse(trainer, *shlex.split(flags.rstrip("\\")))  # sft.py's goes on in the next line
        machine = fits.machine_with("80 GB", count)
        needed = memory.estimate(fits.MODELS["Qwen/Qwen2.5-3B-Instruct"], args, fits.HEAD_CHUNK, machine)[1]
    assert needed <= machine.gib, command


def test_a_script_without_a_sampler_needs_no_room_for_its_cache():
    config = fits.MODELS["Qwen/Qwen2.5-3B-Instruct"]
    sizes = {"max_prompt_tokens": 8000, "max_response_tokens": 8000}
    memory.estimate(config, sft.Args(**sizes), 4096, fits.machine_with("80 GB", 1))
    with pytest.raises(ValueError, match=r"--kv_cache_gb is 0\.1; one sequence of 16000 tokens"):
        memory.estimate(config, grpo.Args(**sizes, kv_cache_gb=0.1), 4096, fits.machine_with("80 GB", 1))
    assert "kl_coef" not in checks.what_needs_less(sft.Args()) and "kv_cache" not in checks.what_needs_less(sft.Args())
    advice = checks.what_needs_less(grpo.Args())
    assert "--kv_cache_gb, no reference (--kl_coef 0) or LoRA (--lora_rank 16)" in advice
    assert "a smaller --micro_batch_tokens" in advice and "--gradient_checkpointing" not in advice
    of_one_sequence = grpo.Args(micro_batch_tokens=5120, gradient_checkpointing=False)
    assert "more processes, --gradient_checkpointing, a smaller --kv" in checks.what_needs_less(of_one_sequence)


def test_a_machine_with_gpus_needs_main_memory_for_the_weights_of_every_process():
    """By hand, for 10⁹ parameters: each of 8 processes loads 4 GB. A sampler that sleeps keeps its graphs alone."""
    machine = memory.Machine(on_gpu=True, processes=16, local_processes=8, gib=80)
    assert memory.main_memory(10**9, machine) == pytest.approx(8 * (memory.LIBRARIES + 1) + 32e9 / 2**30)


def test_a_run_that_does_not_fit_into_main_memory_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "this_machine", lambda: fits.machine_with("80 GB", 1))
    checks.check_model(grpo.Args(model=str(KK_TINY), max_response_tokens=64), fits.HEAD_CHUNK)
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**30)
    with pytest.raises(ValueError, match="needs about 2 GiB of main memory, and there are 1"):
        checks.check_model(grpo.Args(model=str(KK_TINY), max_response_tokens=64), fits.HEAD_CHUNK)


def test_the_defaults_are_left_as_they_were():
    def here():
        return defaults.ON_GPU, ranks.WORLD_SIZE, ranks.LOCAL_WORLD_SIZE, processes.WORLD_SIZE

    before = here()
    with fits.on_gpus(8):
        assert here() == (True, 8, 8, 8)
        args, _ = defaults.read([], grpo.Args, grpo.TASKS)
        assert not args.gradient_checkpointing  # MANY_GPUS
        with pytest.raises(ValueError, match="a multiple of 16"):
            checks.check_prompts_per_step(dataclasses.replace(args, prompts_per_step=8))
    assert here() == before


# --------------------------------------------------------------------------------------------------------------------
# --dry_run


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """A function that runs a script's main with --dry_run, without a sampler or policy to load: what it prints."""

    def run(script):
        trainer = importlib.import_module(script)
        for name in ("load_sampler", "load_policy"):
            monkeypatch.delattr(trainer, name)  # to call one of them is an error
        flags = small(tmp_path / "run")
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags, "--dry_run"])
        with pytest.raises(SystemExit) as ended:
            trainer.main()
        assert not ended.value.code and not list(tmp_path.iterdir())
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("script", ["grpo", "dapo"])  # the others have grpo.py's lines there
def test_a_dry_run_checks_everything_and_loads_nothing(script, dry_run):
    text = dry_run(script)
    assert "dry run: 2 steps would fit; no model was loaded" in text
    assert "GiB for each process" in text and "0.9 M parameters" in text


def test_a_dry_run_ends_with_0_and_never_imports_vllm(tmp_path):
    code = [
        "import atexit, runpy, sys",
        "atexit.register(lambda: print('vllm' in sys.modules))",
        f"sys.argv = ['grpo.py', *{small(tmp_path / 'run')}, '--dry_run']",
        "runpy.run_path('grpo.py', run_name='__main__')",
    ]
    done = python("-c", "\n".join(code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert not list(tmp_path.iterdir())
