"""Define what to evaluate, and how: the flags of evaluate.py. Imports no torch, so bad flags fail at once."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from evaluation import suites
from rewards import find_task
from runtime import checks, files, flags, settings
from runtime.settings import Dtype, EvaluationTemperature, GroupSize, NonNegativeInt, PositiveFloat, PositiveInt

HELP = """Evaluation: the papers' tables from any checkpoint.

For example:
    python evaluate.py Qwen/Qwen2.5-3B-Instruct runs/grpo_kk_0_… --suite kk --last 3 --paper

None: the value that the given runs have; without runs, the papers'."""

Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]  # a flag that may be repeated


@dataclasses.dataclass
class Args:
    """The settings of an evaluation.

    None: the value that the given runs have; without runs, the papers'.
    """

    # ---- models
    models: tyro.conf.Positional[tuple[str, ...]] = ()  # folders, hub ids, runs or checkpoints
    last: PositiveInt = 1  # average a run's row over this many of its newest checkpoints
    versus: str = ""  # a model or run; each of the others is compared with it, problem by problem

    # ---- problems
    suite: str | None = None  # a name of --task, or a Python file; None: the runs' task
    protocol: Literal["ar_lopti", "acpo"] = "ar_lopti"  # math: the paper whose problems and sampling are used
    data_dir: str = ""  # a folder with the suite's files, or with a subfolder of the suite's name
    data: Repeated = ()  # file, folder or hub id; math: SET=SOURCE; none: generated, math: the hub
    sets: str = ""  # math: only these sets, as in "math500,aime"; empty: the protocol's
    people: str | None = None  # kk: puzzle sizes in people, from 2 to 8: "3-7" or "2,3"
    numbers: str | None = None  # countdown: how many numbers, from 3 to 6: "3-4" or "5"
    operations: str | None = None  # calculator: operations per problem, from 1 to 3: "1" or "2-3"
    gym: str | None = None  # gym: generators of reasoning-gym: "letter_counting,chain_sum"
    gym_options: str | None = None  # gym: their parameters as JSON: '{"max_words": 3}'
    score_timeout: PositiveFloat = 60.0  # own task: seconds for a call of score(), then it is ended
    limit: PositiveInt | None = None  # problems per column (own generator: in all); None: all or 100-512

    # ---- sampling
    chat_template: Literal["auto", "none"] | None = None  # auto: the model's; none: plain text
    template_options: str | None = None  # the template's keywords: '{"enable_thinking": false}'
    samples: GroupSize | None = None  # responses per problem, if not greedy
    temperature: EvaluationTemperature | None = None  # of these responses; 0: greedy
    max_response_tokens: PositiveInt | None = None  # longer responses are truncated, as by the context
    max_turns: PositiveInt | None = None  # the most turns of the model, if the task replies
    max_reply_tokens: PositiveInt = 1024  # a longer reply of the task is cut
    tool_timeout: PositiveFloat = 10.0  # seconds for a call; then its reply is an error
    tool_parser: str = "auto"  # vLLM's parser for calls of a task's TOOLS; auto: by the chat template
    dtype: Dtype | None = None  # compute dtype; None: the one that is fast on this machine
    kv_cache_gb: PositiveFloat | None = None  # GiB; None: all a GPU has left; on a CPU up to 2
    batch: PositiveInt | None = None  # responses that are saved together; None: 512, CPU 128
    seed: NonNegativeInt = 0  # seeds generated puzzles and sampling

    # ---- output
    paper: bool = False  # add the papers' rows to the table
    pass_at_k: bool = False  # not math: also pass@1, pass@2, pass@4 … up to --samples
    words: bool = False  # count words of reasoning; relate them to the reward; compare models
    keep_responses: bool = False  # also write every response with its score
    out: str = "evaluations"  # folder of results and responses; a rerun reads responses from it


OF_A_RUN = {  # the settings of a run that are used here, with their types
    "task": [str],
    "people": [str],
    "numbers": [str],
    "operations": [str],
    "gym": [str],
    "gym_options": [str],
    "chat_template": [str],
    "template_options": [str],
    "max_response_tokens": [int],
    "max_turns": [int],
    "eval_temperature": [int, float],
}
CPU_TOKENS = 128  # max_response_tokens without a GPU, except if kk_tiny is the only model


def read_settings(argv: list[str]):
    """Return the settled Args of a command line. ValueError if a value is wrong; exit 2 if unreadable."""
    args = flags.parse(argv, Args, Args(), HELP)
    settings.check_ranges(args)
    checks.check_vllm()
    settle(args)
    # Also check a run's values. settle may have set protocol to "", which no user can choose: skip it.
    settings.check_ranges(dataclasses.replace(args, protocol=Args.protocol))
    return args


def settle(args) -> None:
    """Replace None by the runs' or the papers' settings, and put --versus last in args.models.

    Works in place; dtype stays, because only torch can decide it. ValueError if a value is ambiguous,
    or contradicts another one.
    """
    if not args.models:
        raise ValueError("no model is given: python evaluate.py models/kk_tiny, or the folder of a run")
    models = [model for model in dict.fromkeys(args.models) if model != args.versus]
    if args.versus:
        models.append(args.versus)
    args.models = tuple(models)
    # Models other than runs have one checkpoint.
    if args.last > 1 and not any(Path(model, "checkpoints").is_dir() for model in models):
        raise ValueError(f"--last is {args.last}, but none of the models is a run folder")

    runs = [found for found in map(run_settings, models) if found]
    if not args.suite:
        args.suite = the_one("suite", {run.get("task", "kk") for run in runs}) or "kk"
    find_task(args.suite, "--suite")
    suites.check_flags(args)
    args.protocol = suites.paper_of(args.suite, args.protocol)
    of_paper = suites.papers_settings(args)
    if not flags.ON_GPU and any(Path(model).name != "kk_tiny" for model in models):
        of_paper["max_response_tokens"] = CPU_TOKENS
    for name, value in of_paper.items():
        of_runs = the_one_of_runs(name, runs, args)
        if getattr(args, name) is None:
            setattr(args, name, value if of_runs is None else of_runs)
    if args.batch is None:
        args.batch = 512 if flags.ON_GPU else 128
    if args.temperature == 0 and args.samples > 1:
        raise ValueError(f"--samples is {args.samples}, but greedy responses are all alike: give a --temperature")
    if args.pass_at_k and (args.suite == "math" or args.samples == 1):
        raise ValueError("--pass_at_k needs several --samples; math has its own pass@16")
    sources = [*args.data, args.data_dir] if args.data_dir else args.data
    if args.suite != "math" and len(sources) > 1:
        raise ValueError(f"--suite {args.suite} takes one --data or --data_dir")
    suites.check_options(args)


def the_one_of_runs(name, runs, args):
    """Return the setting's value in the runs that have the suite as their task; None without such runs."""
    if getattr(args, name) is not None:
        return None
    name_in_run = name
    if name == "temperature":
        if args.suite != "kk":  # the protocol sets it for the other suites
            return None
        name_in_run = "eval_temperature"
    values = set()
    for run in runs:
        if name_in_run in run and run.get("task", "kk") == args.suite:
            values.add(run[name_in_run])
    return the_one(name, values)


def the_one(name, values):
    """Return the value that all runs share, or None if there is none. ValueError if they differ."""
    if len(values) > 1:
        raise ValueError(f"the runs differ in {name} ({', '.join(sorted(map(str, values)))}): give --{name}")
    return next(iter(values), None)


def run_settings(model):
    """Return the content of args.json of a run, or of a checkpoint's run; {} if there is none.

    ValueError, with the file's name, if it can't be read, or if a setting that is used has another
    type.
    """
    folder = Path(model).expanduser().absolute()
    places = [folder]
    if folder.parent.name == "checkpoints":
        places.append(folder.parents[1])
    found = [place / "args.json" for place in places if (place / "args.json").is_file()]
    if not found:
        return {}
    content = files.read_object(found[0])
    for name, kinds in OF_A_RUN.items():
        if name in content and type(content[name]) not in kinds:
            raise ValueError(f"{found[0]} can't be used: {name} is {content[name]!r}")
    task = content.get("task", "kk")
    if task not in suites.SETTINGS and not task.endswith(".py"):
        raise ValueError(f"{found[0]} can't be used: there is no task {task!r}")
    return content
