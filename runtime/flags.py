"""Find each setting's value, and check all settings before torch is imported.

The command line has the last word. The settings that it leaves open come in layers, where a later
layer overrides those before it: the script's Args, the paper's settings for the task, the
machine's, the model folder's. A resumed run uses its own settings instead of the last two.

Nothing that this module imports may import torch, which takes seconds.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import signal
import sys
import time
import typing
from pathlib import Path
from typing import Annotated, TypedDict

import tyro

from rewards import OPTIONS, check_options, find_task
from rewards import TASKS as REWARD_TASKS
from runtime import checks, files, machine
from runtime.chats import read_template_options
from runtime.machine import RANK
from runtime.settings import check_ranges

ON_GPU = machine.has_gpu()
READ = []  # what check has read, for read_once

# For a machine without a GPU: a model of a million parameters, which learns while you watch. Its
# folder has settings of its own.
ON_CPU = {
    "model": os.path.relpath(Path(__file__).parents[1] / "models/kk_tiny"),
    "compile": False,  # lengths differ from pass to pass, and compiling takes minutes
    "eval_size": 20,
    "gradient_checkpointing": False,
    "kv_cache_gb": 0.5,
    "micro_batch_tokens": 2048,
}

# With many GPUs, each holds little of the weights and of AdamW's state. There is room for the
# activations of the longest sequence, so recomputing them would waste time.
MANY_GPUS = {"gradient_checkpointing": False, "micro_batch_tokens": 5120}
FROM_GPUS = {"math": 8}  # 80 GB each, for a model of 7 billion parameters; other tasks: 4, for 3

# TRL's, verl's and others' names for our settings.
OTHER_NAMES = {
    "learning_rate": "lr", "beta": "kl_coef", "epsilon": "clip_low", "epsilon_high": "clip_high",
    "num_generations": "responses_per_prompt", "max_completion_length": "max_response_tokens",
    "max_new_tokens": "max_response_tokens", "max_prompt_length": "max_prompt_tokens",
    "max_lag": "lag", "max_steps": "steps", "num_train_epochs": "epochs", "output_dir": "run_dir",
    "model_name_or_path": "model", "dataset": "data", "batch_size": "prompts_per_step",
}  # fmt: skip

# ------------------------------------------------------------------------------ before torch


def check(args_class, tasks) -> None:
    """End the program with one line (exit code 2) if a setting, a folder or a task can't be right.

    With --help it ends with the help. args_class, tasks: a script's Args and TASKS. Nothing happens
    if another program imports the script.
    """
    if args_class.__module__ != "__main__":
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while loading Ctrl-C ends it, without traceback
    with errors_in_one_line():
        READ.append(read(sys.argv[1:], args_class, tasks))
        args, _ = READ[0]
        check_settings(args)
        machine.choose_waiting(args.model)
    if RANK == 0:
        what = "torch; no model" if args.dry_run else "torch and the model; this takes a while"
        print(f"{Path(sys.argv[0]).name}: loading {what}", flush=True)


def check_settings(args) -> None:
    """Raise ValueError, saying what is allowed, if a setting, folder or task can't be right."""
    args.check()
    if reason := machine.unsupported_build():
        raise ValueError(reason)
    if args.has_sampler:
        checks.check_vllm()
    find_task(args.task)
    check_options(args)
    read_template_options(args)
    checks.check_prompts_per_step(args)
    checks.check_eval_samples(args)
    checks.check_run_folders(args)
    checks.check_model_folder(args.model)
    checks.check_teacher(args)


@contextlib.contextmanager
def errors_in_one_line():
    """Show a user's mistake (ValueError, OSError) in one line; exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        if RANK > 0:
            time.sleep(3)  # if process 0 finds it, too, torchrun ends this one before it says so
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)


# -------------------------------------------------------------------------------------- layers


def read_once(args_class, tasks, on_gpu):
    """Return what check has read. Read it now if it has not: another program imports the script.

    on_gpu: whether torch finds a GPU. Read it again if the driver said otherwise (a container
    without nvidia-smi), because defaults depend on it.
    """
    global ON_GPU
    if READ and on_gpu == ON_GPU:
        return READ.pop()
    ON_GPU = on_gpu
    return read(sys.argv[1:], args_class, tasks)


def read(argv: list[str], args_class, tasks) -> tuple:
    """Return (the settings of a run, the layers that their defaults come from).

    argv: the command line. Other settings come from args_class and, on top of it, from `layers`.
    ValueError if a value is out of its range, or the command line has a setting of another task.
    """
    for name in (word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv):
        if not hasattr(args_class, name) and hasattr(args_class, OTHER_NAMES.get(name, "")):
            raise ValueError(f"--{name} is called --{OTHER_NAMES[name]} here")
    below = layers(argv, args_class, tasks)
    about = sys.modules[args_class.__module__].__doc__.split("\n\n")[0]
    args = parse(argv, args_class, args_class(**merged(below)), about)
    check_ranges(args)
    check_options_given(argv, args)
    return args, below


def layers(argv: list[str], args_class, tasks):
    """Return [(where from, {name: value}), …]: defaults that differ from args_class, given argv.

    Later ones override earlier ones: the task's, from `tasks`; the machine's; the model's, from
    trainer_settings.json in its folder. A resumed run uses its own settings, not the last two.
    """
    said = given(argv)  # --task, --model, --resume … from the command line
    resumed = of_resumed_run(argv, args_class)
    task = said.get("task", resumed.get("task", args_class.task))
    of_task = tasks.get(task, {})
    if "max_turns" in args_class.__dataclass_fields__ and hasattr(find_task(task), "TURNS"):
        of_task = {**of_task, "max_turns": find_task(task).TURNS}
    found = [(f"task {task}", of_task)]
    if resumed:
        return [*found, ("the resumed run", resumed)]
    model = said.get("model")
    if not ON_GPU:
        found.append(("no GPU", of_script(ON_CPU, args_class)))
        model = said.get("model", ON_CPU["model"])
        if not machine.has_fast_bfloat16():
            found.append(("bfloat16 is slow here", {"dtype": "float32"}))
    elif FROM_GPUS.get(task, 4) <= machine.LOCAL_WORLD_SIZE:  # each machine holds all shards
        found.append((f"{machine.LOCAL_WORLD_SIZE} GPUs", MANY_GPUS))
    if ON_GPU and machine.driver_says_no_bfloat16():
        found.append(("this GPU has no bfloat16", {"dtype": "float16"}))
    if model:
        found.append((Path(model).name, of_model(model, args_class)))
    return found


def of_model(model, args_class):
    """Return the settings in a model's folder that this script has; {} without the file."""
    path = Path(model, "trainer_settings.json")
    return of_script(files.read_object(path), args_class) if path.is_file() else {}


def of_script(values, args_class) -> dict:
    """Return the settings {name: value} that this script has: sft.py has none for a sampler."""
    own = {field.name for field in dataclasses.fields(args_class)}
    return {name: value for name, value in values.items() if name in own}


def check_options_given(argv: list[str], args) -> None:
    """Raise ValueError if the command line has a setting of another task: it would do nothing."""
    for task, names in OPTIONS.items():
        if task != args.task:
            for name in given(argv, names):
                raise ValueError(f"--{name} is of --task {task}, not of {args.task}")
    if args.task in REWARD_TASKS and given(argv, ["score_timeout"]):
        raise ValueError(f"--score_timeout is of tasks in files of one's own, not of {args.task}")


def merged(layers):
    """Merge all layers into {name: value}."""
    values = {}
    for _, layer in layers:
        values.update(layer)
    return values


def differences(args, layers):
    """Return {name: (the paper's value, why it differs here)} for each setting that differs.

    A layer that only repeats a value is not counted as the reason.
    """
    papers = {field.name: field.default for field in dataclasses.fields(args)} | layers[0][1]
    last = papers | merged(layers)
    found = {}
    for name, of_paper in papers.items():
        value = getattr(args, name)
        if value != of_paper:
            reasons = [where for where, layer in layers[1:] if layer.get(name, of_paper) == value]
            found[name] = (of_paper, reasons[0] if value == last[name] else "command line")
    return found


# --------------------------------------------------------------------------------- resumed run


def of_resumed_run(argv: list[str], args_class):
    """Return the settings of the run that --resume names, {name: value}; {} without a flag or run.

    ValueError if the flag is empty (an unset variable in a shell), if another script or version
    made the run, or if args.json or run.json is damaged.
    Two scripts may share all settings and still be different algorithms: run.json names the script.
    """
    said = given(argv)
    if "resume" not in said:
        return {}
    if not said["resume"].strip():
        raise ValueError("--resume is empty: it takes the folder of a run, or of a checkpoint")
    folder = files.run_of(said["resume"])
    if "run_dir" in said:
        raise ValueError(f"--run_dir does not go with --resume: the run goes on in {folder}")
    path = folder / "args.json"
    if not path.exists():
        return {}
    settings = files.read_object(path)
    about = files.read_object(folder / "run.json")
    script = args_class.__module__
    if script == "__main__":
        script = Path(sys.argv[0]).stem
    if about.get("script") != script:
        raise ValueError(f"{folder} is a run of {about.get('script')}.py, not of {script}.py")
    differing = settings.keys() ^ {field.name for field in dataclasses.fields(args_class)}
    if differing:
        raise ValueError(
            f"{path} is of another version of {script}.py (commit {about.get('commit')}): only one "
            f"has {', '.join(sorted(differing))}"
        )
    if "epochs" in said and "steps" not in said:
        settings["steps"] = None  # recompute them
    return settings


# -------------------------------------------------------------------------------- command line


def given(argv: list[str], names=("task", "model", "resume", "run_dir", "steps", "epochs")):
    """Return the command line's values of these settings, on which the defaults of others depend.

    The result is like {"task": "math"}, with strings; settings that argv lacks are missing.
    Everything else is skipped here: parse reads it, and finds its mistakes.
    """
    found = {}
    for word, next_word in zip(argv, [*argv[1:], ""]):
        flag, is_joined, value = word.partition("=")  # --task=math or --task math
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in names:
            found[name] = value if is_joined else next_word
    return found


def parse(argv: list[str], args_class, default, description):
    """Parse the command line into an args_class; --help shows the groups of its source.

    argv: the words after the script's name; default: an args_class with all other values;
    description: the text on top of the help. An unknown flag or a value of the wrong type ends the
    program with exit code 2 and tyro's message. check_ranges checks the ranges.
    """
    groups, helps = read_sources(args_class)
    types = typing.get_type_hints(args_class, include_extras=True)
    titled = {}  # tyro's help has a group per dataclass in a dictionary
    defaults = {}
    for title, names in groups.items():
        fields = []
        for name in names:
            type_ = Annotated[types[name], tyro.conf.arg(help=helps[name])]
            fields.append((name, type_, getattr(default, name)))
        group = dataclasses.make_dataclass("Group", fields)
        group.__doc__ = ""  # otherwise the help shows the signature that dataclasses give it
        titled[title] = tyro.conf.OmitArgPrefixes[group]  # --lr, not --objective.lr
        defaults[title] = group()
    settings = TypedDict("settings", titled)
    parsed = tyro.cli(
        settings,
        args=argv,
        default=defaults,
        use_underscores=True,
        description=description,
        config=(tyro.conf.HelptextFromCommentsOff,),  # read_sources has them
    )
    values = {}
    for group in parsed.values():
        values.update(vars(group))
    return args_class(**values)


@functools.cache
def read_sources(args_class) -> tuple:
    """Return ({group title: [field names]}, {field name: help}), from comments in the source.

    The line with dashes above fields is their title; the comment behind a field is its help. The
    class's own fields come before inherited fields.
    """
    groups = {}
    helps = {}
    for cls in args_class.__mro__[:-1]:  # the last is object
        title = "settings"
        for line in inspect.getsource(cls).splitlines():
            if heading := re.fullmatch(r"\s*# -{2,} (.+)", line):
                title = heading[1]
            name = line.partition(":")[0].strip()
            if name in cls.__annotations__:
                groups.setdefault(title, []).append(name)
                helps[name] = line.partition("  # ")[2]
    return groups, helps
