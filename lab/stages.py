"""Measure three stages of kk_tiny's training with the lab's other commands, in one table and one figure.

    python -m lab.stages                                     kk_tiny after 0, 5 and 10 steps of GRPO
    python -m lab.stages --smollm2                           and SmolLM2-135M, which is never right
    python -m lab.stages --steps 0 20 40 --run runs/long     other stages of another run
    python -m lab.stages --steps 0 100 200 --model Qwen/Qwen2.5-3B-Instruct --run runs/3b --dry_run
                                                             another model's run, trained if it is missing

This trains a run of grpo.py that saves its stages (minutes; an existing run is reused), calls three commands per
stage, and shows their results side by side.
"""

import dataclasses
import json
import math
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
    steps: Annotated[list[NonNegativeInt], tyro.conf.arg(metavar="STEP")] = dataclasses.field(
        default_factory=lambda: [0, 5, 10]
    )  # the stages, as training steps
    model: str = "models/kk_tiny"  # the model before training
    run: str = "runs/lab_stages"  # the run's folder; trained if it is not there
    batches: PositiveInt = 3  # per stage and command
    smollm2: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # SmolLM2-135M as well
    out: str = ""  # folder of stages.png and the stages' own files; as in the other commands
    seed: NonNegativeInt = 0  # seeds the run and the batches
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # show the commands and end


def training(args):
    """Return the command that trains the run whose checkpoints are the stages."""
    last = max(args.steps)
    every = math.gcd(*args.steps)  # save a checkpoint at each stage
    words = f"--task kk --steps {last} --save_every {every} --eval_every {last} --seed {args.seed}".split()
    words += ["--keep_checkpoints", str(last)]  # all of them
    return [sys.executable, "grpo.py", "--model", args.model, *words, "--run_dir", args.run]


def model_of(step, args):
    """Return the folder of a stage: the model before training, or the run's checkpoint."""
    return args.model if step == 0 else f"{args.run}/checkpoints/step_{step:06d}"


def measurements(args):
    """Return {stage: [a command for each of COMMANDS]}: the measurements, as words for subprocess."""
    models = {f"step {step}": (model_of(step, args), COMMANDS) for step in args.steps}
    if args.smollm2:
        models["SmolLM2-135M"] = (SMOLLM2, COMMANDS[1:])  # commands that need no reward, because it is never right
    made = {}
    for stage, (model, names) in models.items():
        made[stage] = []
        for name in names:
            words = [sys.executable, "-m", f"lab.{name}", "--model", model, "--out", folder(stage, args)]
            words += ["--seed", str(args.seed)]
            if model == SMOLLM2:
                words += SHORT + FEWER[name].split()
            if name != "proposition":
                words += ["--batches", str(args.batches)]
            made[stage].append(words)
    return made


def folder(stage, args):
    """Return the folder in which the commands write a stage's own results."""
    return str(Path(args.out, "stages", stage.lower().replace(" ", "_")))


def check(args):
    """Raise ValueError if the settings can't be right."""
    settings.check_ranges(args)
    if not args.steps or sorted(set(args.steps)) != args.steps:
        raise ValueError(f"--steps {args.steps}: give growing numbers, such as 0 5 10")
    if args.smollm2 and not Path(SMOLLM2).exists():
        raise ValueError(f"--smollm2: {SMOLLM2} is missing; `make model` makes it")
    if max(args.steps) == 0 or not Path(args.run).exists():
        return
    # The run must be of this model and seed, with these checkpoints.
    of_run = files.read_object(Path(args.run, "args.json"))
    for name in ("model", "seed"):
        of_stages = getattr(args, name)
        if of_run.get(name) != of_stages:
            its = f"--run {args.run} has a run with --{name} {of_run.get(name)}"
            raise ValueError(f"{its}, not {of_stages}: name another folder")
    missing = [step for step in args.steps if not Path(model_of(step, args)).exists()]
    if missing:
        raise ValueError(
            f"--run {args.run} has no checkpoint of step {missing[0]}: name another folder, or "
            f"continue the run if it was stopped, python grpo.py --resume {args.run}"
        )


def call(words):
    """Run a command; end the program with its exit code if it fails."""
    print(f"$ {shlex.join(['python', *words[1:]])}", flush=True)
    code = subprocess.run(words, cwd=common.ROOT).returncode
    if code:
        sys.exit(code)


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
    args.out = args.out or common.place(args)
    with flags.errors_in_one_line():
        check(args)
    commands = measurements(args)
    train = max(args.steps) > 0 and not Path(args.run).exists()
    todo = [training(args)] * train + [words for several in commands.values() for words in several]
    for words in todo:
        if args.dry_run:
            print(shlex.join(["python", *words[1:]]))
        else:
            call(words)
    if not args.dry_run:
        draw(commands, args)


if __name__ == "__main__":
    main()
