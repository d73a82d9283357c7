"""Measure stages of a run of grpo.py with the lab's other commands, and show them in one figure.

    python -m lab.stages                                     kk_tiny after 0, 5 and 10 steps of GRPO
    python -m lab.stages --smollm2                           and SmolLM2-135M, which is never right
    python -m lab.stages --steps 0 20 40 --run runs/long     other stages of another run

The run must have kept the stages' checkpoints; `make runs/lab_stages` trains the default one, in minutes. Three
commands measure each stage, with the run's seed, and print their own command lines.
"""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import tyro

from lab import common
from runtime import files, flags, settings
from runtime.settings import NonNegativeInt, PositiveInt

SMOLLM2 = "models/SmolLM2-135M-Instruct"
COMMANDS = ["who_dominates", "proposition", "forking_tokens"]
# For SmolLM2, measure less: on two cores, a pass of 135 million parameters takes seconds.
SHORT = "--prompts 4 --responses 4 --max_tokens 48".split()
FEWER = {"proposition": "--tokens 240 --rows 16 --jacobians 3", "forking_tokens": "--checked 20 --least 5"}
TITLE = "tokens and gradients over training; error bars: standard errors over the batches"


@dataclasses.dataclass
class Args:
    run: str = "runs/lab_stages"  # the run's folder
    steps: Annotated[list[NonNegativeInt], tyro.conf.arg(metavar="STEP")] = dataclasses.field(
        default_factory=lambda: [0, 5, 10]
    )  # the stages, as training steps; 0 is the model before training
    batches: PositiveInt = 3  # per stage and command
    smollm2: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # SmolLM2-135M as well
    out: str = ""  # folder of stages.png and the stages' own files; empty: lab/results, or runs/lab for another run


def measure(args):
    """Call each of COMMANDS for each stage; return the stages' names. If one fails, end with its exit code."""
    of_run = files.read_object(Path(args.run, "args.json"))
    models = {f"step {step}": (checkpoint(step, args), COMMANDS) for step in args.steps}
    if 0 in args.steps:
        models["step 0"] = (of_run["model"], COMMANDS)
    if args.smollm2:
        models["SmolLM2-135M"] = (SMOLLM2, COMMANDS[1:])  # commands that need no reward, because it is never right
    for stage, (model, names) in models.items():
        for name in names:
            words = ["-m", f"lab.{name}", "--model", model, "--out", folder(stage, args)]
            words += ["--seed", str(of_run["seed"])]
            if model == SMOLLM2:
                words += SHORT + FEWER[name].split()
            if name != "proposition":
                words += ["--batches", str(args.batches)]
            print(f"$ {shlex.join(['python', *words])}", flush=True)
            code = subprocess.run([sys.executable, *words], cwd=common.ROOT).returncode
            if code:
                sys.exit(code)
    return list(models)


def checkpoint(step, args):
    return f"{args.run}/checkpoints/step_{step:06d}"


def folder(stage, args):
    """Return the folder in which the commands write a stage's own results."""
    return str(Path(args.out, "stages", stage.lower().replace(" ", "_")))


def check(args):
    """Raise ValueError if the settings can't be right."""
    settings.check_ranges(args)
    if args.smollm2 and not Path(SMOLLM2).exists():
        raise ValueError(f"--smollm2: {SMOLLM2} is missing; `make model` makes it")
    if not Path(args.run).exists():
        raise ValueError(f"--run {args.run} is missing; `make runs/lab_stages` trains the default run")
    missing = [step for step in args.steps if step and not Path(checkpoint(step, args)).exists()]
    if missing:
        raise ValueError(
            f"--run {args.run} has no checkpoint of step {missing[0]}: name another folder, or "
            f"continue the run if it was stopped, python grpo.py --resume {args.run}"
        )


def draw(stages, args):
    """Plot the fractions of tokens and of gradient norms by bin, for each stage that has rewards."""
    averages = {}
    for stage in stages:
        path = Path(folder(stage, args), "who_dominates.json")
        if path.exists():
            result = json.loads(path.read_text())
            averages[f"{stage} ({result['tokens']:,} tokens)"] = common.over_batches(result["batches"])
    common.picture_of_shares(TITLE, averages, args, "stages")


def main():
    args = tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True)
    args.out = args.out or ("lab/results" if args.run == Args.run else "runs/lab")
    with flags.errors_in_one_line():
        check(args)
        stages = measure(args)
    draw(stages, args)


if __name__ == "__main__":
    main()
