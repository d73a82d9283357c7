"""Settings: their types with ranges, where their values come from, and whether they are in range.

A trainer's Args is a dataclass whose source is also its documentation, a line for each field:

    # ---- objective
    clip_low: Fraction = 0.2  # ε_low
    clip_high: NonNegativeFloat = 0.24  # ε_high

The line with dashes opens a group of the help and of the header. The comment behind a field is its
help. The range stands in its type: the help shows it, and check_ranges holds values to it.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import re
import sys
import time
import typing
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import pydantic
import tyro
from pydantic.fields import FieldInfo

from runtime import files, folders
from runtime.ranks import RANK, WORLD_SIZE

FOR_PROCESS_0 = 3  # seconds in which torchrun ends the other processes, if process 0 has an error

# ------------------------------------------------------------------------------- types with a range


def number(kind, words, **bounds):
    """int or float with a range. words: as help and errors say it; bounds: as pydantic takes it."""
    field = pydantic.Field(description=words, **bounds)
    return Annotated[kind, field, tyro.conf.arg(metavar=f"{kind.__name__.upper()} {words}")]


def zero_or_at_least(least):
    """A check for pydantic: what vLLM takes as a temperature, where 0 means greedy."""

    def check(value):
        if value != 0 and value < least:
            raise ValueError
        return value

    return pydantic.AfterValidator(check)


# NaN and infinity are refused everywhere: nothing that a trainer computes with them makes sense.
FINITE = {"allow_inf_nan": False}
Fraction = number(float, "in [0, 1]", ge=0, le=1, **FINITE)
PositiveFraction = number(float, "in (0, 1]", gt=0, le=1, **FINITE)
LearningRate = PositiveFraction
PositiveInt = number(int, "greater than 0", gt=0)
# Below 2**32 because seeds have this type, and numpy, which vLLM seeds, takes no larger one.
NonNegativeInt = number(int, "0 or greater, below 2**32", ge=0, le=2**32 - 1)
GroupSize = number(int, "in [1, 16384]", ge=1, le=16384)  # vLLM's limit for one prompt
PositiveFloat = number(float, "greater than 0", gt=0, **FINITE)
NonNegativeFloat = number(float, "0 or greater", ge=0, **FINITE)
Temperature = number(float, "0.01 or greater", ge=0.01, **FINITE)  # the least that vLLM takes
EvaluationTemperature = Annotated[
    number(float, "0 or at least 0.01", ge=0, **FINITE),
    zero_or_at_least(0.01),
]

Dtype = Literal["bfloat16", "float16", "float32"]


def check_ranges(args):
    """ValueError for the first setting that is out of its type's range. Changes nothing."""
    try:
        pydantic.TypeAdapter(type(args)).validate_python(dataclasses.asdict(args))
    except pydantic.ValidationError as error:
        name, words = first_mistake(error, type(args))
        raise ValueError(f"--{name} is {getattr(args, name)}; it must be {words}") from None


def first_mistake(error, args_class):
    """(name of the setting, what it must be, in words) from pydantic's error."""
    first = error.errors()[0]
    name = first["loc"][0]
    types = typing.get_type_hints(args_class, include_extras=True)
    words = range_of(types[name])
    if not words:  # a type without a range
        words = first["msg"].removeprefix("Input should be ")
    return name, words


def range_of(type_):
    """The range of a type in words, "" if it has none. PositiveInt | None has PositiveInt's."""
    for member in (type_, *typing.get_args(type_)):
        for metadata in getattr(member, "__metadata__", ()):
            if isinstance(metadata, FieldInfo) and metadata.description:
                return metadata.description
    return ""


# ----------------------------------------------------------------------------- what no paper sets


@dataclasses.dataclass
class CommonArgs:
    """The settings of every run that no algorithm reads. A trainer's Args adds its own."""

    # ---- problems
    data: str = ""  # training problems: a file, a folder or a hub id; empty: the task's
    test_data: str = ""  # test problems, given in the same ways
    people: str = "3-7"  # kk: numbers of people in a puzzle, within 2-8: "3-7" or "2,3"
    template_options: str = "{}"  # chat template's keywords, JSON: '{"enable_thinking": false}'

    # ---- machine
    micro_batch_tokens: PositiveInt = 16384  # of one forward pass; changes memory, not results
    gradient_checkpointing: bool = True  # recompute in the backward pass: slower, smaller
    compile: bool = True  # let torch.compile fuse the operations of a layer

    # ---- run
    eval_size: PositiveInt = 500  # number of test problems
    keep_checkpoints: PositiveInt = 3  # how many of the newest checkpoints stay on disk
    run_dir: str = ""  # where everything is written; empty: runs/SCRIPT_TASK_SEED_TIME
    resume: str = ""  # a run to continue, or one of its checkpoints; its settings are the defaults
    export: str = ""  # a new folder for the final model, without the training state
    track: bool = False  # also log to Weights & Biases (pip install wandb)
    dry_run: bool = False  # check everything, estimate the memory, load nothing and end

    # What holds in a script that has no such setting. Without a type, so these are not settings.
    responses_per_prompt = 1
    eval_samples = 1
    kl_coef = 0.0
    teacher = None

    @property
    def has_sampler(self):
        return hasattr(self, "temperature")  # sft.py samples nothing

    @property
    def has_critic(self):
        return hasattr(self, "value_lr")  # ppo.py has one

    def check(self):
        """ValueError if two settings contradict each other; some scripts have such settings."""


@dataclasses.dataclass
class RunArgs(CommonArgs):
    """CommonArgs, and what only a script with a sampler reads: all but sft.py."""

    # ---- problems
    numbers: str = "3-4"  # countdown: how many numbers in a puzzle, within 3-6: "3-4" or "5"
    gym: str = "letter_counting"  # gym: generators of reasoning-gym: "letter_counting,chain_sum"
    gym_options: str = "{}"  # gym: their parameters as JSON: '{"max_words": 3}'

    # ---- machine
    kv_cache_gb: PositiveFloat = 16.0  # GiB for the sampler's key-value cache, beside its weights

    # ---- run
    stop_at_gap: bool = True  # end the run if sampler_gap jumps at the sampler's first update


# ------------------------------------------------------------------------------------ command line


def parse(argv, args_class, default, description):
    """The command line as an args_class, with --help in the groups of its source.

    argv: the words after the script's name; default: an args_class, for all that argv does not set;
    description: what stands on top of the help. Ends the program with exit code 2, and tyro's
    message, at a flag that does not exist or a value of the wrong type. Ranges are checked by
    check_ranges.
    """
    groups, helps = read_sources(args_class)
    types = typing.get_type_hints(args_class, include_extras=True)
    titled = {}  # tyro's help has a group for each dataclass in a dictionary
    defaults = {}
    for title, names in groups.items():
        fields = []
        for name in names:
            type_ = types[name]
            if is_number_or_none(type_):
                type_ = Annotated[type_, number_or_none(type_)]
            shown = tyro.conf.arg(help=helps[name])
            fields.append((name, Annotated[type_, shown], getattr(default, name)))
        group = dataclasses.make_dataclass("Group", fields)
        group.__doc__ = ""  # or the help would show the signature that dataclasses give it
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


def is_number_or_none(type_):
    """Whether the type is a number with a range, or None: PositiveInt | None."""
    return type(None) in typing.get_args(type_) and bool(range_of(type_))


def number_or_none(type_):
    """How tyro reads such a value. Its own way shows these types' inner parts at a mistake."""
    [number] = [one for one in typing.get_args(type_) if one is not type(None)]
    kind = typing.get_args(number)[0]  # int or float
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{kind.__name__.upper()} {range_of(type_)}, or None",
        instance_from_str=lambda words: None if words == ["None"] else kind(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def groups_of(args_class):
    """{title: [names of its settings]}, both in the order of the source."""
    return read_sources(args_class)[0]


@functools.cache
def read_sources(args_class):
    """({group title: [field names]}, {field name: help}) from the comments in a dataclass's source.

    The line with dashes above fields is their title, the comment behind a field is its help. Its
    own fields come before those that it inherits.
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


def as_flags(name, value):
    """The words with which a command line sets this value."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    return [f"--{name}", str(value)]


def given(argv, names=("task", "model", "resume", "run_dir", "steps", "epochs")):
    """What the command line says of these settings: those on which the defaults of others depend.

    {"task": "math"}, as strings; what argv does not say is missing. Everything else in it is
    skipped: parse reads it, and finds its mistakes.
    """
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name in names:
        spellings = (f"--{name}", f"--{name.replace('_', '-')}")
        parser.add_argument(*spellings, nargs="?")  # a flag without a value is for parse to refuse
    known, _ = parser.parse_known_args(argv)
    return {name: value for name, value in vars(known).items() if value is not None}


@contextlib.contextmanager
def errors_in_one_line():
    """Shows a mistake of the user's (ValueError, OSError) in one line; exit code 2.

    Of several processes the first one shows it, and torchrun ends the others. What another one
    finds alone, such as a GPU in use, it shows itself, later.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        process = ""
        if RANK > 0:
            process = f" process {RANK}:"
            time.sleep(FOR_PROCESS_0)
        print(f"error:{process}", " ".join(str(error).split()), file=sys.stderr)
        # With several processes the connection is ours to close. With one it is vLLM's.
        if WORLD_SIZE > 1 and "torch" in sys.modules:
            from runtime import processes

            processes.end()
        sys.exit(2)


# -------------------------------------------------------------------------- where values come from


# Defaults come in layers, [(reason, {name: value}), …], of which a later one overrides those before
# it. The first one is the paper's: what it sets for this task.


def merged(layers):
    """{name: value} of all layers."""
    values = {}
    for _, layer in layers:
        values.update(layer)
    return values


def differences(args, layers):
    """{name: (the paper's value, why it differs here)} for each setting that differs.

    A layer that only repeats a value is not the reason for it.
    """
    papers = {field.name: field.default for field in dataclasses.fields(args)}
    papers.update(layers[0][1])
    values = dict(papers)
    reasons = {}
    for reason, layer in layers[1:]:
        for name, value in layer.items():
            if value != values[name]:
                values[name] = value
                reasons[name] = reason
    found = {}
    for name, of_paper in papers.items():
        value = getattr(args, name)
        if value != of_paper:
            reason = reasons[name] if value == values[name] else "command line"
            found[name] = (of_paper, reason)
    return found


def of_resumed_run(argv, args_class):
    """The settings of the run that --resume names, {name: value}; {} without that flag or run.

    ValueError if another script made the run, or if args.json or run.json is damaged. Two scripts
    may have the same settings and be different algorithms, so run.json says which it was.
    """
    said = given(argv)
    if "resume" not in said:
        return {}
    if not said["resume"]:
        raise ValueError("--resume is empty: it takes the folder of a run")
    folder = folders.run_of(said["resume"])
    if said.get("run_dir") and Path(said["run_dir"]).resolve() != folder.resolve():
        raise ValueError(
            f"--run_dir {said['run_dir']} does not go with --resume: the run goes on in {folder}. "
            "For a branch copy the run's folder, and resume the copy"
        )
    if not (folder / "args.json").exists():
        return {}
    settings = files.read_object(folder / "args.json")

    this_script = args_class.__module__
    if this_script == "__main__":
        this_script = Path(sys.argv[0]).stem
    about = folder / "run.json"
    if about.exists():
        made_by = files.read_object(about).get("script")
        if not isinstance(made_by, str):
            raise ValueError(f"{about} can't be read: it does not say which script made the run")
        if made_by != this_script:
            raise ValueError(
                f"--resume {folder}: made by another script, {made_by}.py, not by {this_script}.py"
            )
    fields = {field.name for field in dataclasses.fields(args_class)}
    if "template_options" in fields:  # runs of versions without this setting go on without it
        settings.setdefault("template_options", "{}")
    foreign = settings.keys() - fields
    if foreign:
        names = ", ".join(sorted(foreign))
        maker = f"another version of {this_script}.py" if about.exists() else "another script"
        raise ValueError(f"--resume {folder}: made by {maker}, which has {names}{at_commit(about)}")
    if not about.exists():
        raise ValueError(f"{about} is missing: it says which script made the run")
    check_file(folder / "args.json", settings, args_class)

    if "steps" not in said and epochs_give_others(argv, settings, files.read_object(about)):
        settings["steps"] = None  # to be worked out anew
    return settings


def epochs_give_others(argv, settings, about):
    """Whether a resumed run has other steps by what argv says: of epochs, or of what an epoch is.

    The latter only if the run's steps came from its epochs. about: what is in its run.json.
    """
    if given(argv, ["epochs"]):
        return True
    num_problems = about.get("sizes", {}).get("training_problems", 0)
    of_epochs = settings["epochs"] * (num_problems // settings["prompts_per_step"])
    return settings["steps"] == of_epochs and bool(given(argv, ["data", "prompts_per_step"]))


def at_commit(about):
    """Where the version that made a run is found, in words; "" if run.json does not say."""
    commit = files.read_object(about).get("commit") if about.exists() else None
    return f"; it was made at commit {commit}" if commit else ""


def check_file(path, settings, args_class):
    """ValueError, with the file's name, unless it has all of args_class's settings, in range."""
    missing = {field.name for field in dataclasses.fields(args_class)} - settings.keys()
    if missing:
        names = ", ".join(sorted(missing))
        where = at_commit(path.with_name("run.json"))
        raise ValueError(
            f"{path} is damaged or of another version of the script: it lacks {names}{where}"
        )
    try:
        # strict: true is no number, and "5" is none
        pydantic.TypeAdapter(args_class).validate_json(json.dumps(settings), strict=True)
    except pydantic.ValidationError as error:
        if not error.errors()[0]["loc"]:  # not one setting: half of a surrogate pair in a text
            raise ValueError(f"{path} can't be read: {error.errors()[0]['msg']}") from None
        name, words = first_mistake(error, args_class)
        raise ValueError(f"{path}: {name} is {settings[name]!r}; it must be {words}") from None
