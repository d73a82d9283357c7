"""Defaults for the machine and the model, for what neither Args nor the command line says."""

import dataclasses
import sys
from pathlib import Path

from rewards import OPTIONS
from runtime import files, machine, ranks, settings

ON_GPU = machine.has_gpu()
KK_TINY = "models/kk_tiny"  # below this project's folder, from which most start a script
if not Path(KK_TINY).exists():
    KK_TINY = str(Path(__file__).parents[1] / KK_TINY)

# For a machine without a GPU: a model of a million parameters, which learns while you watch. Its
# folder has its own settings.
ON_CPU = {
    "model": KK_TINY,
    "compile": False,  # lengths differ from pass to pass, and compiling takes minutes
    "eval_size": 20,
    "gradient_checkpointing": False,
    "kv_cache_gb": 0.5,
    "micro_batch_tokens": 2048,
}

# With many GPUs each holds little of the weights and of AdamW's state, and has room for the
# activations of one longest sequence. Recomputing them would be work for nothing.
MANY_GPUS = {"gradient_checkpointing": False, "micro_batch_tokens": 5120}
FROM_GPUS = {"math": 8}  # of 80 GB, for a model of 7 billion parameters; other tasks: 4, for 3


def read(argv, args_class, tasks):
    """(the settings of a run, the layers that their defaults come from).

    argv: the command line. What it leaves open is as in args_class, except for what `layers` gives.
    ValueError if a value is out of its range, or the command line has a setting of another task.
    """
    below = layers(argv, args_class, tasks)
    about = sys.modules[args_class.__module__].__doc__.split("\n\n")[0]
    args = settings.parse(argv, args_class, args_class(**settings.merged(below)), about)
    settings.check_ranges(args)
    check_options_given(argv, args)
    return args, below


def check_options_given(argv, args):
    """ValueError if the command line has a setting of another task, which would do nothing."""
    for task, names in OPTIONS.items():
        if task != args.task:
            for name in settings.given(argv, names):
                raise ValueError(f"--{name} is of --task {task}, not of {args.task}")


def layers(argv, args_class, tasks):
    """[(where from, {name: value}), …]: defaults that differ from args_class, by what argv says.

    Later ones override earlier ones: the task's, of `tasks`; the machine's; the model's, of its
    folder's trainer_settings.json. A resumed run has its own settings in place of the last two.
    """
    given = settings.given(argv)  # what the command line says of --task, --model, --resume …
    resumed = settings.of_resumed_run(argv, args_class)
    task = given.get("task", resumed.get("task", args_class.task))
    found = [(f"task {task}", tasks.get(task, {}))]
    if resumed:
        return [*found, ("the resumed run", resumed)]
    model = given.get("model")
    if not ON_GPU:
        found.append(("no GPU", of_script(ON_CPU, args_class)))
        model = given.get("model", ON_CPU["model"])
        if not machine.has_fast_bfloat16():
            found.append(("bfloat16 is slow here", {"dtype": "float32"}))
    elif FROM_GPUS.get(task, 4) <= ranks.LOCAL_WORLD_SIZE:  # several machines hold copies
        found.append((f"{ranks.LOCAL_WORLD_SIZE} GPUs", MANY_GPUS))
    if ON_GPU and machine.driver_says_no_bfloat16():
        found.append(("this GPU has no bfloat16", {"dtype": "float16"}))
    if model:
        found.append((Path(model).name, of_model(model, args_class)))
    return found


def papers_command(args_class, tasks, task):
    """The words of a command that has the paper's settings for a task on this machine."""
    paper = {field.name: field.default for field in dataclasses.fields(args_class)}
    paper.update(tasks.get(task, {}))
    words = [] if task == args_class.task else ["--task", task]
    # The model first: then the settings of another model's folder are no longer defaults.
    for names in (["model"], [name for name in paper if name != "model"]):
        here = settings.merged(layers(words, args_class, tasks))
        for name in names:
            if here.get(name, paper[name]) != paper[name]:
                words += settings.as_flags(name, paper[name])
    if "teacher" in paper:  # of opd.py: it must be given, and no paper says which
        words += ["--teacher", "FOLDER"]
    return ["python", Path(sys.argv[0]).name, *words]


def of_model(model, args_class):
    """The settings in a model's folder that this script has; {} without the file."""
    path = Path(model, "trainer_settings.json")
    return of_script(files.read_object(path), args_class) if path.is_file() else {}


def of_script(values, args_class):
    """Those of the settings {name: value} that this script has: sft.py has no sampler's."""
    own = {field.name for field in dataclasses.fields(args_class)}
    return {name: value for name, value in values.items() if name in own}
