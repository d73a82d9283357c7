"""What fits where: the estimate for machines that are not here, docs/what_fits.md, and --dry_run."""

import dataclasses
import importlib
import json
import re
import shlex

import pytest
from conftest import KK_TINY, ROOT, parse, python, small

import grpo
import sft
from runtime import memory
from tools import family
from tools.maintain import fits

BILLIONS = {  # of parameters, as the model cards say
    "SmolLM2-135M": 0.1345, "SmolLM2-360M": 0.362, "SmolLM2-1.7B": 1.71, "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.62, "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21,
}  # fmt: skip
CARD = memory.Machine(on_gpu=True, processes=1, gib=fits.usable("80 GB"))


@pytest.fixture(scope="module", autouse=True)
def shapes_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "shapes_of", fits.once_each(memory.shapes_of))
        yield


def estimate(gib=80, count=1, on_gpu=True, **changes):
    """Of kk_tiny, in GiB."""
    args = grpo.Args(model=str(KK_TINY), max_response_tokens=640, steps=10)
    for name, value in changes.items():
        setattr(args, name, value)
    machine = memory.Machine(on_gpu=on_gpu, processes=count, gib=gib)
    config = fits.MODELS["HuggingFaceTB/SmolLM2-135M-Instruct"]
    return memory.estimate(config, args, 4096, machine)


def test_the_estimate_is_for_the_machine_that_it_is_given():
    parameters, needed, available = estimate(gib=3)
    assert parameters == pytest.approx(134.5e6, rel=0.01)
    assert available == 3 < needed  # it judges nothing: check_model compares the two
    assert estimate(count=8)[1] < needed  # FSDP2 divides what is always held
    # On a CPU sampler and trainer hold their memory at the same time, and the libraries count.
    assert estimate(on_gpu=False)[1] > needed + memory.LIBRARIES


def test_numbers_worked_out_by_hand():
    """1000 M parameters' worth of state on 4 GPUs: 12 bytes each for weight and moments, 2 for the reference."""
    args = grpo.Args(kl_coef=0.001)
    machine = memory.Machine(on_gpu=True, processes=4, gib=80)
    assert memory.always_bytes(1e9, 0, 2, args, machine) == 14e9 / 4
    # With LoRA 2 bytes for a weight and 12 for a parameter of an adapter. The reference has the same weights.
    assert memory.always_bytes(1e9, 1e7, 2, args, machine) == (2e9 + 12e7) / 4
    args.kl_coef = 0
    assert memory.always_bytes(1e9, 0, 2, args, machine) == 12e9 / 4


@pytest.mark.parametrize("model", fits.MODELS)
def test_the_shapes_have_the_published_numbers_of_parameters(model):
    assert memory.shapes_of(fits.MODELS[model]).num_parameters() == pytest.approx(
        BILLIONS[fits.short(model)] * 1e9, rel=0.005
    )


@pytest.mark.slow
def test_larger_cards_never_cost_more():
    assert fits.first_that_fits("Qwen/Qwen2.5-3B-Instruct", "80 GB", 1, False) == "A"  # the paper's settings
    lines = fits.page().partition("| GiB that count |")[2].splitlines()[1:]
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    assert len(rows) == 2 * len(fits.MODELS)
    for _, *cells in rows:
        for of_count in zip(*map(str.split, cells)):
            places = ["ABCDEFG–".index(name) for name in of_count]
            assert places == sorted(places, reverse=True)


@pytest.mark.parametrize("script", family.family())
def test_a_scripts_own_command_fits_its_gpus_of_80_gb(script, monkeypatch):
    """The first command of its docstring: python, or torchrun for several GPUs. A teacher is of 7 billion."""
    trainer = importlib.import_module(script)
    command = re.search(r"^Command.*\n(?:.*\n)??    ((?:python|torchrun) .*)$", trainer.__doc__, re.MULTILINE)[1]
    start, _, flags = command.partition(f"{script}.py")
    count = int(start.split()[-1]) if start.startswith("torchrun") else 1
    teacher = fits.MODELS["Qwen/Qwen2.5-7B-Instruct"]
    monkeypatch.setattr(memory.AutoConfig, "from_pretrained", lambda *_, **__: teacher)
    monkeypatch.setattr("runtime.flags.ON_GPU", True)
    for name in ("machine.WORLD_SIZE", "machine.LOCAL_WORLD_SIZE", "distributed.WORLD_SIZE"):
        monkeypatch.setattr(f"runtime.{name}", count)
    args = parse(trainer, *shlex.split(flags.rstrip("\\")))  # sft.py's goes on in the next line
    machine = dataclasses.replace(CARD, processes=count)
    needed = memory.estimate(fits.MODELS["Qwen/Qwen2.5-3B-Instruct"], args, fits.HEAD_CHUNK, machine)[1]
    assert needed <= machine.gib, command


def test_the_command_of_the_notebook_for_a_t4_fits_it(monkeypatch):
    """examples/gpu.ipynb, which says what the run takes."""
    monkeypatch.setattr("runtime.flags.ON_GPU", True)
    cells = json.loads((ROOT / "examples" / "gpu.ipynb").read_text())["cells"]
    first, *sources = ["".join(cell["source"]) for cell in cells]
    [command] = [source for source in sources if source.startswith("!.venv/bin/python grpo.py")]
    args = parse(grpo, *shlex.split(command.replace("\\\n", ""))[2:])
    assert (args.dtype, args.gradient_checkpointing, args.lora_rank) == ("float16", True, 16)
    machine = dataclasses.replace(CARD, gib=fits.usable("16 GB"))
    needed = memory.estimate(fits.MODELS[args.model], args, fits.HEAD_CHUNK, machine)[1]
    assert f"{needed:.0f} of the T4's 15 GB" in first and needed < machine.gib


def test_a_script_without_a_sampler_needs_no_room_for_its_cache():
    config, machine = fits.MODELS["Qwen/Qwen2.5-3B-Instruct"], CARD
    sizes = {"max_prompt_tokens": 8000, "max_response_tokens": 8000}
    memory.estimate(config, sft.Args(**sizes), 4096, machine)
    with pytest.raises(ValueError, match=r"--kv_cache_gb is 0\.1; one sequence of 16000 tokens"):
        memory.estimate(config, grpo.Args(**sizes, kv_cache_gb=0.1), 4096, machine)


def test_a_dry_run_checks_everything_and_loads_nothing(tmp_path):
    code = [
        "import atexit, runpy, sys",
        "atexit.register(lambda: print('vllm' in sys.modules))",
        f"sys.argv = ['grpo.py', *{small(tmp_path / 'run')}, '--dry_run']",
        "runpy.run_path('grpo.py', run_name='__main__')",
    ]
    done = python("-c", "\n".join(code))
    assert done.returncode == 0, done.stderr
    assert "2 steps would fit" in done.stdout and done.stdout.splitlines()[-1] == "False"
    prompt = done.stdout.partition("the first training prompt, ")[2].partition(":\n")[2]
    assert prompt.startswith("<|im_start|>user\n") and "<|im_start|>assistant\n" in prompt
    assert not list(tmp_path.iterdir())
