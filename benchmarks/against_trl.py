"""Compare grpo.py with TRL's GRPOTrainer: seconds per rollout step and peak memory, in turns on the same machine.

    python benchmarks/against_trl.py                     TRL is installed into a separate environment, .venv-trl

Both have the same model, prompts (with an exact number of tokens), group size, response length (the EOS token is
ignored), temperature 1, β 0.001, clip 0.2/0.24, AdamW, 2 optimizer updates per step, no gradient checkpointing, and a
reward that takes no time. On a GPU, TRL samples with vLLM in the same process, which sleeps during training, as in
grpo.py. On a CPU, TRL can't pass weights to vLLM and samples with transformers. Each measurement is a separate process:
one step of grpo.py, one of TRL, and one of grpo.py again.
Results: benchmarks/results/trl.json.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from runtime import machine

TRL = "trl==1.16.0"


@dataclass
class Sizes:
    """The sizes of the measurement."""

    model: str = "models/SmolLM2-135M-Instruct"  # a folder or hub id
    prompts: int = 8  # per step
    responses: int = 8  # per prompt
    prompt_tokens: int = 250  # in each prompt
    response_tokens: int = 128  # in each response
    # Of both; in TRL bfloat16 is autocast (its default), and float32 is none. By default what this machine does fast.
    dtype: str = "bfloat16" if machine.has_fast_bfloat16() else "float32"
    micro_batch: int = 4  # sequences per pass of TRL; grpo.py uses --micro_batch_tokens
    venv: Path = ROOT / ".venv-trl"  # TRL's environment; it is created if it is missing
    turns: str = "grpo trl grpo"  # the measurements, in this order
    name: str = "trl"  # the name of the results file
    inside: str = ""  # the folder for results; set only for the processes that this one starts


def measure_grpo(sizes):
    """Measure one step of grpo.py by phase, and the peak memory of this process. Write result.json into `inside`."""
    import common

    flags = [f"--dtype={sizes.dtype}", "--no_gradient_checkpointing"]
    step = common.Step(
        "grpo", sizes.model, sizes.prompts, sizes.responses, sizes.prompt_tokens, sizes.response_tokens, flags
    )
    took = {"sample": common.seconds(step.sample, 1)[0]}
    for phase in (step.score, step.log_probs, step.update, step.sync):
        took[phase.__name__] = common.seconds(phase)[0]
    tokens = int(step.batch["mask"].sum())
    assert tokens == sizes.prompts * sizes.responses * sizes.response_tokens
    result = {"seconds": sum(took.values()), "phases": took, "peak_memory_gb": common.memory.peak_gb()}
    Path(sizes.inside, "result.json").write_text(json.dumps(result))


def main(sizes):
    if sizes.inside:
        return measure_grpo(sizes)
    import tempfile

    import common
    from transformers import AutoTokenizer

    common.check_sizes(sizes)
    with common.flags.errors_in_one_line():  # before TRL is installed
        if set(sizes.turns.split()) != {"grpo", "trl"}:
            raise ValueError(f"--turns is {sizes.turns!r}; it takes grpo and trl, each at least once")
        tokenizer = AutoTokenizer.from_pretrained(sizes.model, trust_remote_code=False)
    installed = sizes.venv / "installed"  # written last, so that an interrupted installation is completed
    if not installed.exists():
        print(f"installing {TRL} into {sizes.venv}")
        subprocess.run([sys.executable, "-m", "venv", sizes.venv], check=True)
        pip = [sizes.venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if common.torch.cuda.is_available():
            subprocess.run([*pip, TRL.replace("trl", "trl[vllm]")], check=True)  # vLLM determines the version of torch
        else:
            subprocess.run([*pip, f"torch=={common.torch.__version__.split('+')[0]}"], check=True)
            subprocess.run([*pip, TRL], check=True)
        installed.touch()
    results = {"grpo": [], "trl": []}
    texts = common.prompts(tokenizer, sizes.prompts, sizes.prompt_tokens)
    for turn in sizes.turns.split():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "prompts.json").write_text(json.dumps(texts))
            settings = {name: str(value) for name, value in (asdict(sizes) | {"inside": folder}).items()}
            if turn == "trl":
                command = [sizes.venv / "bin" / "python", Path(__file__).with_name("trl_step.py"), json.dumps(settings)]
            else:
                command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in settings.items())]
            subprocess.run(command, check=True, cwd=ROOT)
            results[turn].append(json.loads(Path(folder, "result.json").read_text()))
            print(turn, results[turn][-1], flush=True)
    ours, theirs = (fmean(run["seconds"] for run in results[name]) for name in ("grpo", "trl"))
    settings = {name: value for name, value in asdict(sizes).items() if name not in ("inside", "venv")}
    common.write(sizes.name, {"sizes": settings, "runs": results, "times_as_fast": theirs / ours})
    print(f"grpo.py {ours:.0f} s a step, TRL {theirs:.0f} s: {theirs / ours:.1f} times as fast")


if __name__ == "__main__":
    main(tyro.cli(Sizes, use_underscores=True, description=__doc__.split("\n\n")[0]))
