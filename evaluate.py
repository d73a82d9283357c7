"""Evaluation: the papers' tables from any checkpoint.

vLLM samples a model's responses to the problems of a suite, and the suite's rule (rewards/) scores them. The result is
one row of a table:

    kk         accuracy by number of people and their mean, greedy                          AR-Lopti, Tables 7, 8, 9
    math       Olympiad Bench, Minerva, MATH-500 greedy; AMC avg@16; AIME24 pass@16 and avg@16; their mean    1, 10
               with --protocol acpo: AMC, Minerva, MATH-500, Olympiad Bench, all avg@8 at T = 1        ACPO, Table 2
    countdown  accuracy, avg@4 at T = 1                                                               ACPO, Table 1a
    hitab      accuracy by kind of question and over all, avg@4 at T = 1                              ACPO, Table 1b
    gym        accuracy by generator of reasoning-gym (--gym) and over all, avg@4 at T = 1                  no paper

--pass_at_k adds pass@1, pass@2, pass@4 … up to --samples, over all problems.

avg@n is the share of right responses among n responses to a problem, averaged over the problems. If c of a problem's n
responses are right, its pass@k is 1 − C(n−c, k) / C(n, k), which is unbiased (Chen et al. 2021).

The standard error of a figure is the standard deviation over problems (ddof 1) of their contributions, divided by
√problems. It covers the choice of problems and the sampling of responses. For avg@n with n > 1, the part of sampling is
√(mean of p(1−p)/(n−1) / problems), where p is a problem's share of right responses. The rest is the part of the
problems. The error of a mean over sets is √(Σ error²) / number of columns. Columns of one set (AIME24 has two) share
its problems, and each problem contributes the sum of its columns.

Deviations from the papers, and choices that they leave open:
- The papers don't state the temperature of avg@16 and avg@4. Here it is 1, as in their training.
- ACPO's figures for HiTab are multiples of 1/1200, so that it seems to test on 300 of the 1,584 test questions. It does
  not say on which, nor how it shows a table or compares answers. Here it is all of them, by this project's own rule.
- Problems whose answer math-verify can't read are left out (4 of Minerva's 272, 3 of Olympiad Bench's 675). The papers
  divide by all problems.

Command (--data_dir FOLDER evaluates on the papers' puzzles instead of generated ones):
    python evaluate.py Qwen/Qwen2.5-3B-Instruct runs/grpo_kk_0_… --suite kk --last 3 --paper
"""

import dataclasses
import fcntl
import gc
import hashlib
import json
import math
import re
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from rewards import decode, encode, find_task, own
from rewards.kk import SUFFIXES, parse_people
from runtime import engine, files, folders, hub, machine, measure, memory, quiet, records
from runtime.processes import ON_GPU
from tools import words

# ---------------------------------------------------------------------------------------------------------- arguments

EXAMPLE = __doc__.rstrip().rpartition("\n")[2].strip()
HELP = f"""{__doc__.splitlines()[0]}

For example:
    {EXAMPLE}

None: the value that the given runs have; without runs, the papers'."""


@dataclasses.dataclass
class Models:
    """Which models."""

    # Model folders, hub ids, run folders (their newest checkpoint) or checkpoints.
    models: tyro.conf.Positional[list[str]]
    last: int = 1  # a run's row is the mean over so many of its newest checkpoints, > 0
    versus: str = ""  # a model or run; each of the others is compared with it, problem by problem


@dataclasses.dataclass
class Problems:
    """Which problems the models are asked."""

    # The problems: kk, math, countdown, hitab, gym, or a task in a Python file; None: the runs' task, or kk
    suite: str | None = None
    # math: the paper that decides the sets, samples and temperature
    protocol: Literal["ar_lopti", "acpo"] = "ar_lopti"
    # A folder with the suite's files, or with a subfolder of the suite's name that has them.
    data_dir: str = ""
    # A file, folder or hub id; for math SET=SOURCE, once for each set that does not come from data_dir, or one file of
    # your own. Without data and data_dir, kk, countdown and hitab are generated, and math comes from the hub.
    data: tyro.conf.UseAppendAction[list[str]] = dataclasses.field(default_factory=list)
    sets: str = ""  # math: only these sets, as in "math500,aime"; empty: the protocol's
    people: str | None = None  # kk: numbers of people, from 2 to 8: "3-7" or "2,3"
    numbers: str | None = None  # countdown: how many numbers, from 3 to 6: "3-4" or "5"
    gym: str | None = None  # gym: generators of reasoning-gym: "letter_counting,chain_sum"
    gym_options: str | None = None  # gym: their parameters as JSON: '{"max_words": 3}'
    # How many problems of each set, number of people or numbers, kind of question or generator, from the first on, > 0.
    # None: all; of generated problems 100 (kk), 512 (countdown) and 256 (hitab, gym).
    limit: int | None = None


@dataclasses.dataclass
class Sampling:
    """How the models answer."""

    # auto: the tokenizer's; none: plain text, as in math and hitab
    chat_template: Literal["auto", "none"] | None = None
    samples: int | None = None  # responses to a problem, if they are not greedy, > 0
    temperature: float | None = None  # of these responses; 0: greedy; otherwise >= 0.01
    # Longer responses are cut off, > 0; the end of the model's context also cuts them off.
    max_response_tokens: int | None = None
    # Of the weights and of all computation; None: bfloat16 where this machine has instructions for it.
    dtype: Literal["bfloat16", "float32"] | None = None
    # GiB for keys and values, > 0; None: what a GPU has left; on a CPU up to 2
    kv_cache_gb: float | None = None
    # Responses that are sampled and saved together, > 0; None: 512, on a CPU 128
    batch: int | None = None
    seed: int = 0  # of generated puzzles and of sampling, 0 or greater, below 2**32


@dataclasses.dataclass
class Output:
    """What is counted and written."""

    paper: bool = False  # add the papers' rows to the table
    pass_at_k: bool = False  # not math: also pass@1, pass@2, pass@4 … up to --samples
    words: bool = False  # count words of reasoning; relate them to the reward; compare models
    keep_responses: bool = False  # also write every response with its score
    # Folder for results and responses; a rerun reads the responses instead of sampling them again.
    out: str = "evaluations"


@dataclasses.dataclass
class Args(Output, Sampling, Problems, Models):
    """All of these. None: the given runs' value if they have one, otherwise the papers'."""


@dataclasses.dataclass
class Groups:
    """The same in groups, as --help shows them."""

    models: Models
    problems: Problems
    sampling: Sampling
    output: Output


def parse(command=None):
    """The Args of a command line; None: of this process."""
    groups = tyro.cli(
        tyro.conf.OmitArgPrefixes[Groups],
        args=command,
        use_underscores=True,
        description=HELP,
    )
    return Args(
        **{name: value for group in vars(groups).values() for name, value in vars(group).items()}
    )


# The papers' settings.
DEFAULTS = {"kk": {"people": "3-7", "chat_template": "auto", "samples": 1, "temperature": 0.0}}
# Their base model for math has learned no chat.
DEFAULTS["math"] = {"chat_template": "none", "samples": 16, "temperature": 1.0}
DEFAULTS["countdown"] = {
    "numbers": "3-4",
    "chat_template": "auto",
    "samples": 4,
    "temperature": 1.0,
}
# The papers' models for HiTab are base models, too.
DEFAULTS["hitab"] = {"chat_template": "none", "samples": 4, "temperature": 1.0}
DEFAULTS["gym"] = {
    "gym": "letter_counting",
    "gym_options": "{}",
    "chat_template": "auto",
    "samples": 4,
    "temperature": 1.0,
}
OF_OWN_TASK = {"chat_template": "auto", "samples": 1, "temperature": 0.0}
OF_A_RUN = {  # the settings of a run that are used here, with their types
    "task": [str],
    "people": [str],
    "numbers": [str],
    "gym": [str],
    "gym_options": [str],
    "chat_template": [str],
    "max_response_tokens": [int],
    "eval_temperature": [int, float],
}
MOST_SAMPLES = 16384  # vLLM's limit
CPU_TOKENS = 128  # max_response_tokens without a GPU, except if kk_tiny is the only model

SETS = {  # math: title, possible names of its file (letters and digits only), hub id, the papers' file
    "olympiad_bench": (
        "Olympiad Bench",
        ["olympiadbench"],
        "",
        "data/deepscaler/olympiad_bench_dsr.parquet",
    ),
    "minerva": (
        "Minerva",
        ["minerva", "minervamath"],
        "math-ai/minervamath",
        "data/deepscaler/minerva_dsr.parquet",
    ),
    "math500": ("MATH-500", ["math500"], "HuggingFaceH4/MATH-500", "data/math/MATH-500.parquet"),
    "amc": ("AMC", ["amc"], "AI-MO/aimo-validation-amc", "data/deepscaler/amc_dsr.parquet"),
    "aime": (
        "AIME24",
        ["aime", "aime24", "aime2024"],
        "HuggingFaceH4/aime_2024",
        "data/deepscaler/aime_dsr.parquet",
    ),
}
PROTOCOLS = {"ar_lopti": list(SETS), "acpo": ["amc", "minerva", "math500", "olympiad_bench"]}
OWN = "own"  # the set of --data FILE, which is in no paper
TITLES = {name: title for name, (title, *_) in SETS.items()} | {OWN: "own problems"}
GREEDY = ["olympiad_bench", "minerva", "math500"]  # in ar_lopti
PAPERS_FILES = "the GitHub repository zhyang2226/AR-Lopti"


def settle(args):
    """Replaces None in args by the runs' or the papers' settings, and puts --versus last in args.models; in place.

    ValueError if a value is out of range or ambiguous.
    """
    for name in ("last", "limit", "samples", "max_response_tokens", "kv_cache_gb", "batch"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be greater than 0")
    if not args.models:
        raise ValueError("no model is given")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed is {args.seed}; it must be 0 or greater, below 2**32")
    if (args.samples or 1) > MOST_SAMPLES:
        raise ValueError(f"--samples is {args.samples}; it must be at most {MOST_SAMPLES}")
    others = [model for model in dict.fromkeys(args.models) if model != args.versus]
    args.models = models = [*others, *([args.versus] if args.versus else [])]
    # Models other than runs have one checkpoint.
    if args.last > 1 and not any(Path(model, "checkpoints").is_dir() for model in models):
        raise ValueError(f"--last is {args.last}, but none of the models is a run folder")
    runs = [settings for model in models if (settings := run_settings(model))]
    args.suite = args.suite or the_one("suite", {run.get("task", "kk") for run in runs}) or "kk"
    find_task(args.suite, "--suite")
    of_suite = {"math": args.protocol, "kk": "ar_lopti", "countdown": "acpo", "hitab": "acpo"}
    args.protocol = of_suite.get(args.suite, "")
    papers = DEFAULTS.get(args.suite, OF_OWN_TASK) | {
        "max_response_tokens": 4096,
        "batch": 512 if ON_GPU else 128,
    }
    if args.protocol == "acpo":
        papers |= {"max_response_tokens": 3072, "samples": 8 if args.suite == "math" else 4}
    if args.suite == "math" and is_own_file(args) and args.protocol == "ar_lopti":
        papers |= {"samples": 1, "temperature": 0.0}
    if not ON_GPU and any(Path(model).name != "kk_tiny" for model in models):
        papers["max_response_tokens"] = CPU_TOKENS
    for name in papers:
        # A run's eval_temperature applies only to kk, because the protocol sets that of the other suites.
        theirs = {"temperature": "eval_temperature" * (args.suite == "kk")}.get(name, name)
        values = {
            run[theirs] for run in runs if theirs in run and run.get("task", "kk") == args.suite
        }
        if getattr(args, name) is None:
            value = the_one(name, values)
            setattr(args, name, papers[name] if value is None else value)
    if args.dtype is None:
        args.dtype = "bfloat16" if machine.has_fast_bfloat16() else "float32"
    if args.temperature != 0 and not 0.01 <= args.temperature < math.inf:
        raise ValueError(f"--temperature is {args.temperature}; it must be 0 or at least 0.01")
    if args.temperature == 0 and args.samples > 1:
        raise ValueError(
            f"--samples is {args.samples}, but greedy responses are all alike: give a --temperature"
        )
    if args.pass_at_k and (args.suite == "math" or args.samples == 1):
        raise ValueError("--pass_at_k needs several --samples; math has its own pass@16")
    if args.suite != "math" and len(args.data) + bool(args.data_dir) > 1:
        raise ValueError(f"--suite {args.suite} takes one --data or --data_dir")


def the_one(name, values):
    """The value that all runs share, or None if there is none. ValueError if they differ."""
    if len(values) > 1:
        raise ValueError(
            f"the runs differ in {name} ({', '.join(sorted(map(str, values)))}): give --{name}"
        )
    return next(iter(values), None)


def run_settings(model):
    """The content of args.json of a run, or of the run of a checkpoint; {} if there is none.

    ValueError, with the file's name, if it can't be read or a setting that is used is of another type.
    """
    folder = Path(model).expanduser().absolute()
    places = [folder, *(folder.parents[1:2] if folder.parent.name == "checkpoints" else [])]
    found = [place / "args.json" for place in places if (place / "args.json").is_file()]
    if not found:
        return {}
    settings = files.read_object(found[0])
    for name, kind in OF_A_RUN.items():
        if name in settings and type(settings[name]) not in kind:
            raise ValueError(f"{found[0]} can't be used: {name} is {settings[name]!r}")
    task = settings.get("task", "kk")
    if task not in DEFAULTS and not task.endswith(".py"):
        raise ValueError(f"{found[0]} can't be used: there is no task {task!r}")
    return settings


# ------------------------------------------------------------------------------------------------ models and problems


def checkpoints(model, last):
    """The paths or hub ids to load: a run's `last` newest complete checkpoints, oldest first, or the model itself.

    ValueError if the run has fewer complete checkpoints, or if the model is none of these.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return [str(folder)]
    if (folder / "checkpoints").is_dir():
        complete = folders.complete(folder)
        if len(complete) < last:
            raise ValueError(
                f"{model} has {len(complete)} complete checkpoint(s), and --last is {last}"
            )
        return [str(path) for path in complete[-last:]]
    if (
        folder.exists()
        or model.startswith((".", "/", "~"))
        or (len(folder.parts) > 1 and folder.parent.is_dir())
    ):
        raise ValueError(
            f"{model} is no model folder (no config.json), no run (no checkpoints) and no hub id"
        )
    return [model]


def fingerprint(model):
    """SHA-256 (hex) of a folder's weights, configuration and tokenizer; for a hub id, the id and its commit."""
    if not Path(model).is_dir():
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        return f"{model} {config._commit_hash}"
    digest = hashlib.sha256()
    for path in sorted(Path(model).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"):
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def load_problems(args):
    """Returns (the task's module, its problems, each also with `samples`, `temperature` and `seed`).

    ValueError if data are invalid or missing; in the latter case it says which files are needed and where they are.
    """
    task = find_task(args.suite)
    folder = Path(args.data_dir).expanduser()  # "." if none is given
    if not folder.is_dir():
        raise ValueError(
            f"--data_dir {folder} is no folder; the papers' files are in {PAPERS_FILES}, folder data"
        )
    if (folder / args.suite).is_dir() and args.data_dir:
        folder = folder / args.suite
    if args.suite == "math":
        problems = []
        sources = math_sources(args, folder)
        hub.ask("", *sources.values())
        for name, source in sources.items():
            try:
                problems += [problem | {"category": name} for problem in task.load(source, "test")]
            except ValueError as error:
                where = "" if name == OWN else f" {where_from(name)}"
                raise ValueError(f"{TITLES[name]}: {error}{where}") from error
    else:
        source = args.data[0] if args.data else str(folder) if args.data_dir else None
        hub.ask("", source or "")
        if args.suite == "kk":
            which, categories = {"people": args.people}, parse_people(args.people)
        elif args.suite == "countdown":
            which, categories = {"numbers": args.numbers}, task.parse_numbers(args.numbers)
        elif args.suite == "gym":
            which = {"gym": args.gym, "gym_options": args.gym_options}
            categories = args.gym.split(",")
        else:
            which, categories = {}, getattr(task, "KINDS", ["all"])
        of_each = args.limit or {"kk": 100, "countdown": 512}.get(args.suite, 256)
        size = None if source else of_each * len(categories)
        if args.suite in DEFAULTS:
            problems = task.load(source, "test", size=size, seed=args.seed, **which)
        else:
            problems = own.load(args.suite, task, source, "test", size, args.seed)
    kept, seen = [], Counter()
    for problem in problems:
        category = problem["category"]
        seed = hashlib.sha256(f"{args.seed}/{category}/{seen[category]}".encode()).digest()[:6]
        how = {
            "samples": args.samples,
            "temperature": args.temperature,
            "seed": int.from_bytes(seed),
        }
        if args.suite == "math" and args.protocol == "ar_lopti" and category in GREEDY:
            how |= {"samples": 1, "temperature": 0.0}
        if args.limit is None or seen[category] < args.limit:
            kept.append(problem | how)
        seen[category] += 1
    return task, kept


def is_own_file(args):
    """Whether --data names one file of problems and no set that they belong to."""
    return len(args.data) == 1 and "=" not in args.data[0] and not (args.sets or args.data_dir)


def math_sources(args, folder):
    """{set: file or hub id}: from --data SET=SOURCE, otherwise from the folder, or from the hub without a folder.

    --data FILE, without a set, is all that is asked then.
    """
    if is_own_file(args):
        return {OWN: args.data[0]}
    sets = (
        [name.strip() for name in args.sets.split(",")] if args.sets else PROTOCOLS[args.protocol]
    )
    given = dict(text.partition("=")[::2] for text in args.data)
    if unknown := {*sets, *given} - set(SETS):
        raise ValueError(
            f"{min(unknown)!r} is no set; --sets and --data SET=SOURCE take {', '.join(SETS)}; "
            "a file of your own is one --data, alone"
        )
    files = {}
    for file in sorted(folder.iterdir(), reverse=True) if args.data_dir else []:
        if file.suffix in SUFFIXES:
            files[re.sub("[^a-z0-9]", "", file.stem.lower()).removesuffix("dsr")] = str(file)
    sources = {}
    for name in dict.fromkeys(sets):
        there = [files[stem] for stem in SETS[name][1] if stem in files]
        sources[name] = given.get(name) or (
            there[0] if there else "" if args.data_dir else SETS[name][2]
        )
    if missing := [name for name in sources if not sources[name]]:
        where = f"in {folder}" if args.data_dir else "without --data or --data_dir"
        lacking = ", ".join(
            f"{SETS[name][0]} ({name}.parquet, .json or .jsonl)" for name in missing
        )
        raise ValueError(
            f"{where} there is no {lacking}. {' '.join(map(where_from, missing))} --sets leaves sets out. "
            "Problems of your own: --data FILE."
        )
    return sources


def where_from(name):
    _, _, hub, file = SETS[name]
    return f"Get {file} from {PAPERS_FILES}: --data {name}=PATH" + (
        f"; or the hub's: --data {name}={hub}." * bool(hub)
    )


# ----------------------------------------------------------------------------------------------------------- sampling


def requests_of(model, problems, args):
    """Returns (a request for each problem, the plan: the engine's settings).

    A request has `prompt_ids`, `max_tokens`, `samples`, `temperature` and `seed`.
    ValueError if the model can't be loaded, a prompt exceeds its context, or a sequence exceeds the cache.
    """
    try:
        config, tokenizer = (
            AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config(),
            AutoTokenizer.from_pretrained(model, trust_remote_code=False),
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} can't be loaded: {error}") from error
    prompts = [encode(tokenizer, problem, args.chat_template) for problem in problems]
    longest = max(map(len, prompts))
    context = min(
        getattr(config, "max_position_embeddings", math.inf), longest + args.max_response_tokens
    )
    if longest >= context:
        n = sum(len(ids) >= context for ids in prompts)
        raise ValueError(
            f"{model} takes {context} tokens, and {n} prompts have as many; the longest has {longest}"
        )
    requests = []
    for problem, ids in zip(problems, prompts):
        room = min(args.max_response_tokens, context - len(ids))
        how = {key: problem[key] for key in ("samples", "temperature", "seed")}
        requests.append({"prompt_ids": ids, "max_tokens": room} | how)
    width = {"bfloat16": 2, "float32": 4}[args.dtype]
    sequence = memory.key_value_bytes(config, width) * context / 2**30  # GiB
    cache = args.kv_cache_gb
    if cache is None and not ON_GPU:
        cache = max(1.1 * sequence, min(2.0, args.batch * sequence))
    if cache is not None and cache < sequence:
        raise ValueError(
            f"--kv_cache_gb is {cache}; one sequence of {context} tokens already needs {sequence:.3f}"
        )
    return requests, {
        "context": context,
        "dtype": args.dtype,
        "kv_cache_gb": cache,
        "batch": args.batch,
        "stop": engine.end_tokens(model),
    }


def load_engine(model, plan, seed):
    """A vLLM engine. Only one may exist at a time. plan: as requests_of gives it."""
    options = engine.common_options(str(model), plan["context"], plan["kv_cache_gb"])
    from vllm import LLM  # imported here because it reads the environment and takes seconds

    with quiet.library_notices():
        return LLM(model=model, dtype=plan["dtype"], seed=seed, **options)


def batches(requests, size):
    """Lists of requests, in order. Each batch ends with the request that brings it to at least `size` responses."""
    cut, n = [[]], 0
    for request in requests:
        if n >= size:
            cut, n = [*cut, []], 0
        cut[-1].append(request)
        n += request["samples"]
    return cut


def sample(llm, batch, stop, title, done, total):
    """For each request of a batch, a list of its responses, {"response", "tokens" (how many), "truncated"}.

    The prefix cache is emptied first, so that a batch's responses do not depend on earlier batches.
    done, total: numbers of responses for the progress bar.
    """
    from vllm import SamplingParams

    engine.empty_prefix_cache(llm)
    params = []
    for request in batch:
        options = {key: request[key] for key in ("max_tokens", "temperature", "seed")}
        params.append(
            SamplingParams(n=request["samples"], stop_token_ids=stop, detokenize=False, **options)
        )
    bar = engine.bar_with(title, initial=done, total=total)
    prompts = [{"prompt_token_ids": r["prompt_ids"]} for r in batch]
    outputs = llm.generate(prompts, params, use_tqdm=bar)
    found = []
    for output in outputs:
        texts = decode(llm.get_tokenizer(), output.outputs)
        rows = []
        for text, response in zip(texts, output.outputs):
            truncated = response.finish_reason == "length"
            n_tokens = len(response.token_ids)
            rows.append({"response": text, "tokens": n_tokens, "truncated": truncated})
        found.append(rows)
    return found


def respond(model, requests, plan, args):
    """Returns (the responses to all requests, in order; a dict with the model's path, fingerprint, file, engine, ...).

    Each complete batch becomes a line of OUT/responses/MODEL_DIGEST.jsonl. A rerun reads the lines that exist and
    samples the rest, in the same batches as an uninterrupted evaluation. The file's first line has everything that a
    response depends on: weights, requests, engine, seed, versions and machine. DIGEST is the digest of this line.
    """
    made = records.provenance()
    asked = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
    key = {"model": fingerprint(model), "requests": asked, "engine": plan, "seed": args.seed}
    key |= {name: made[name] for name in ("versions", "machine")}
    first = json.dumps(key, sort_keys=True).encode()
    path = Path(
        args.out, "responses", f"{short_name(model)}_{hashlib.sha256(first).hexdigest()[:16]}.jsonl"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    todo, total, llm = (
        batches(requests, args.batch),
        sum(request["samples"] for request in requests),
        None,
    )
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"error: another evaluation is writing {path}")
        file.seek(0)
        lines = file.read().split(b"\n")[:-1]  # an incomplete last line is dropped
        lines = lines if lines[:1] == [first] else []
        file.truncate(sum(len(line) + 1 for line in lines))
        if not lines:
            file.write(first + b"\n")
        kept = [json.loads(line) for line in lines[1:]]
        if kept:
            print(f"{model}: {len(kept)} of {len(todo)} batches are in {path}")
        for batch in todo[len(kept) :]:
            llm = llm or load_engine(model, plan, args.seed)
            done = sum(request["samples"] for earlier in todo[: len(kept)] for request in earlier)
            responses = sample(llm, batch, plan["stop"], short_name(model), done, total)
            kept.append({"made": made, "responses": responses})
            file.write(json.dumps(kept[-1]).encode() + b"\n")
            file.flush()
    del llm
    gc.collect()  # the next model needs its memory
    about = {"path": model, "fingerprint": key["model"], "responses": path.name, "engine": plan}
    about["made"] = list({json.dumps(line["made"]): line["made"] for line in kept}.values())
    about["cut_by_context"] = sum(
        request["max_tokens"] < args.max_response_tokens for request in requests
    )
    return [response for line in kept for response in line["responses"]], about


def short_name(model):
    """The model's name for file names; for a checkpoint, with the name of its run."""
    parts = Path(model).absolute().parts[-3:]
    return re.sub(
        r"[^A-Za-z0-9.-]+",
        "_",
        f"{parts[0]}_{parts[2]}" if parts[1] == "checkpoints" else parts[-1],
    )


# ------------------------------------------------------------------------------------------------------------ figures


def columns_of(problems, args):
    """The table's columns: {key: (title, category or None for all, k of pass@k or None for the share of right ones)}.

    If no column is over all problems ("all"), the table also has the mean of its columns.
    """
    samples = {problem["category"]: problem["samples"] for problem in problems}
    if args.suite != "math":
        unit = {"kk": " people", "countdown": " numbers"}.get(args.suite, "")
        columns = {category: (f"{category}{unit}", category, None) for category in sorted(samples)}
        columns.pop("all", None)  # of a task without categories
        average = f"accuracy avg@{args.samples}" if args.samples > 1 else "accuracy"
        if args.suite != "kk":
            columns["all"] = (average, None, None)
        for k in measure.numbers_of_draws(args.samples) if args.pass_at_k else []:
            columns[f"pass@{k}"] = (f"pass@{k}", None, k)
        return columns
    columns = {}
    for name, n in samples.items():
        if name == "aime" and n > 1:
            columns[f"aime pass@{min(n, 16)}"] = (f"AIME24 pass@{min(n, 16)}", name, min(n, 16))
        columns[name] = (TITLES[name] + f" avg@{n}" * (n > 1), name, None)
    return columns


def contributions(column, problems, scored):
    """Returns (the contributions of a column's problems, the variances that sampling adds to them, [] if unknown).

    scored: for each checkpoint, for each problem, the scores of its responses. A problem contributes its share of right
    responses, or its pass@k, averaged over the checkpoints.
    """
    _, category, k = column
    values, noise = [], []
    for problem, *of_checkpoints in zip(problems, *scored):
        if category in (None, problem["category"]):
            counts = [
                (len(scores), sum(score["correct"] for score in scores))
                for scores in of_checkpoints
            ]
            values.append(fmean(measure.pass_at_k(n, c, k) if k else c / n for n, c in counts))
            if k is None and problem["samples"] > 1:
                noise.append(fmean(c / n * (1 - c / n) / (n - 1) for n, c in counts) / len(counts))
    return values, noise


def error_of(values):
    """The standard error of the mean over problems (ddof 1), or None for a single problem."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def figure(values, noise=()):
    """The mean over problems with its standard error. If noise is given, also the error's two parts."""
    found = {"value": fmean(values), "error": error_of(values), "problems": len(values)}
    if noise and found["error"] is not None:
        found["error_samples"] = math.sqrt(math.fsum(noise)) / len(values)
        found["error_problems"] = math.sqrt(
            max(0.0, found["error"] ** 2 - found["error_samples"] ** 2)
        )
    return found


def mean_figure(columns, values):
    """The mean over columns. Columns of one category share problems; each problem contributes the sum of its columns.

    Columns over all problems (pass@k) are left out.
    """
    columns = {key: column for key, column in columns.items() if column[1] is not None}
    sets = {}
    for key, (_, category, _) in columns.items():
        sets.setdefault(category, []).append(values[key])
    sums = [[math.fsum(parts) for parts in zip(*lists)] for lists in sets.values()]
    errors = [error_of(total) for total in sums]
    error = None if None in errors else math.sqrt(math.fsum(e**2 for e in errors)) / len(columns)
    value = math.fsum(fmean(total) for total in sums) / len(columns)
    return {"value": value, "error": error, "problems": sum(map(len, sums))}


def paired(columns, mine, theirs):
    """Differences of two models on the same problems: {key: a figure, with how many problems went up, down or neither}.

    mine, theirs: {key: the problems' contributions}. The counts of "mean" take each problem once, without pass@k.
    """
    differences = {
        key: [a - b for a, b in zip(mine[key], theirs[key], strict=True)] for key in columns
    }
    found = {key: figure(values) | moved(values) for key, values in differences.items()}
    if "all" not in columns:
        once = [
            value for key, (_, _, k) in columns.items() if k is None for value in differences[key]
        ]
        found["mean"] = mean_figure(columns, differences) | moved(once)
    return found


def moved(differences):
    up, down = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
    return {"up": up, "down": down, "ties": len(differences) - up - down}


def rates(scores):
    """Format rate, mean length in tokens, share of truncated responses, number of responses, and number timed out."""
    means = {"format_rate": "format", "mean_tokens": "tokens", "truncated_rate": "truncated"}
    found = {name: fmean(score[key] for score in scores) for name, key in means.items()}
    return found | {
        "responses": len(scores),
        "timed_out": sum(score.get("timed_out", False) for score in scores),
    }


def evaluate(model, task, problems, plans, columns, args):
    """Returns (a row of the table, {column: the problems' contributions}, each problem's responses with their scores).

    plans: {checkpoint: (its requests, its plan)}.
    """
    paths, scored = checkpoints(model, args.last), []
    row = {"model": model, "checkpoints": []}
    if Path(paths[0]) != Path(model).expanduser():
        row["model"] += f": {', '.join(Path(path).name for path in paths)}"
    for path in paths:
        responses, about = respond(path, *plans[path], args)
        row["checkpoints"].append(about)
        pairs = [
            (one["response"], problem["answer"])
            for problem, some in zip(problems, responses)
            for one in some
        ]
        scores = iter(task.score_all(*map(list, zip(*pairs))))
        scored.append([])
        for i, (problem, some) in enumerate(zip(problems, responses)):
            of = {
                "model": row["model"],
                "checkpoint": path,
                "problem": i,
                "category": problem["category"],
            }
            of |= {"prompt": problem["messages"][-1]["content"], "answer": problem["answer"]}
            scored[-1].append([of | one | next(scores) for one in some])
    values, row["figures"] = {}, {}
    for key, column in columns.items():
        values[key], noise = contributions(column, problems, scored)
        row["figures"][key] = figure(values[key], noise)
    if "all" not in columns:
        row["figures"]["mean"] = mean_figure(columns, values)
    by_problem = [
        [score for scores in of_checkpoints for score in scores] for of_checkpoints in zip(*scored)
    ]
    everything = [score for scores in by_problem for score in scores]
    row |= rates(everything) | {"by_category": {}}
    for category in dict.fromkeys(problem["category"] for problem in problems):
        row["by_category"][category] = rates(
            [score for score in everything if score["category"] == category]
        )
    return row, values, by_problem


# ------------------------------------------------------------------------------------------------------------- output

UNITS = {  # factor and digits, as the papers print them
    "math": (100, 2),
    "countdown": (100, 2),
    "hitab": (100, 2),
}


def shown(found, unit, sign=""):
    """A figure with its standard error, as text. unit: (factor, digits)."""
    text = f"{found['value'] * unit[0]:{sign}.{unit[1]}f}"
    return text if found["error"] is None else f"{text} ± {found['error'] * unit[0]:.{unit[1]}f}"


def tables_of(rows, comparisons, papers, columns, args):
    """{title: lines of cells}. The first line has the titles of the columns."""
    keys, unit = [*columns, *([] if "all" in columns else ["mean"])], UNITS.get(args.suite, (1, 3))
    titles = [columns[key][0] if key in columns else key for key in keys]
    lines = [["model", *titles, "format", "tokens", "truncated"]]
    for row in rows:
        good, cut = (
            f"{row[name] * unit[0]:.{unit[1]}f}" for name in ("format_rate", "truncated_rate")
        )
        figures = [shown(row["figures"][key], unit) for key in keys]
        lines.append([row["model"], *figures, good, f"{row['mean_tokens']:.0f}", cut])
    for paper in papers:
        # The paper's mean is shown only if it is over the same columns.
        alike = set(paper["columns"]) - {"mean"} == set(columns)
        for name, *numbers in paper["rows"]:
            there = dict(zip(paper["columns"], numbers))
            cells = [there.get(key) if key != "mean" or alike else None for key in keys]
            cells = ["" if cell is None else f"{cell:.2f}" for cell in cells]
            lines.append([f"{name} ({paper['source']})", *cells, "", "", ""])
    tables = {"Share of right answers" + ", in percent" * (unit[0] == 100): lines}
    lines = [["difference", *titles]]
    for comparison in comparisons:
        found = [comparison["figures"][key] for key in keys]
        lines.append(
            [
                f"{comparison['model']} minus {comparison['versus']}",
                *(shown(f, unit, "+") for f in found),
            ]
        )
        lines.append(
            [
                "problems up / down / ties",
                *(f"{f['up']} / {f['down']} / {f['ties']}" for f in found),
            ]
        )
    tables["The same problems, compared"] = lines
    tables["Words of reasoning in a response"] = words.lines_of(rows) if args.words else []
    return {title: lines for title, lines in tables.items() if len(lines) > 1}


def settings_of(args):
    """{name: value} of the settings that the results depend on, without those that are not set."""
    left_out = ("models", "versus", "words", "pass_at_k", "paper", "keep_responses", "out")
    values = {
        name: value for name, value in dataclasses.asdict(args).items() if name not in left_out
    }
    return {name: value for name, value in values.items() if value not in (None, "", [])}


def caption(rows, problems, args):
    """The text below the tables: settings, problems, commit, versions and machine."""
    parts = [checkpoint for row in rows for checkpoint in row["checkpoints"]]
    made = [one for part in parts for one in part["made"]]
    versions = sorted(
        {f"{name} {version}" for one in made for name, version in one["versions"].items()}
    )
    commits, machines = (sorted({str(one[name]) for one in made}) for name in ("commit", "machine"))
    counts = Counter(problem["category"] for problem in problems)
    cut, late = sum(part["cut_by_context"] for part in parts), sum(row["timed_out"] for row in rows)
    text = "± one standard error. " + ", ".join(
        f"{name} {value}" for name, value in settings_of(args).items()
    )
    text += (
        f". Problems: {', '.join(f'{category}: {count}' for category, count in counts.items())}."
    )
    text += (
        f" {cut} times the model's context, and not --max_response_tokens, was the limit."
        * bool(cut)
    )
    text += f" {late} answers took too long to compare and count as wrong." * bool(late)
    return f"{text} Commit {', '.join(commits)}; {', '.join([*versions, *machines])}."


# --------------------------------------------------------------------------------------------------------------- main


def main():
    try:
        args = parse()
        settle(args)
        for model in args.models:
            hub.ask(model)
        task, problems = load_problems(args)
        paths = [path for model in args.models for path in checkpoints(model, args.last)]
        plans = {path: requests_of(path, problems, args) for path in dict.fromkeys(paths)}
        Path(args.out, "responses").mkdir(parents=True, exist_ok=True)
        for folder in (args.out, Path(args.out, "responses")):
            files.check_writable(folder)
    except (ValueError, OSError) as error:  # the user can correct these: one line, no traceback
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    console, started = (
        Console(highlight=False, width=None if sys.stdout.isatty() else 160),
        time.perf_counter(),
    )
    console.rule(f"[bold]evaluate.py[/] {escape(', '.join(args.models))}")
    console.print(
        "   ".join(
            f"{name} [bold]{escape(str(value))}[/]" for name, value in settings_of(args).items()
        )
    )
    columns, rows, values, responses = columns_of(problems, args), [], [], []
    try:
        for model in args.models:
            results = evaluate(model, task, problems, plans, columns, args)
            for kept, result in zip((rows, values, responses), results):
                kept.append(result)
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same command goes on from what is in {args.out}/responses")

    # Without --versus, words are compared with the first model.
    comparisons, base = [], -1 if args.versus else 0
    if args.versus:
        for row, mine in zip(rows[:-1], values):
            found = paired(columns, mine, values[-1])
            comparisons.append(
                {"model": row["model"], "versus": rows[-1]["model"], "figures": found}
            )
    if args.words:
        counted = [words.count_all(of_model) for of_model in responses]
        for row, (counts, relations) in zip(rows, counted):
            row["words"] = {family: figure(counts[family]) | relations[family] for family in counts}
            if row is not rows[base]:
                pairs = {family: zip(counts[family], counted[base][0][family]) for family in counts}
                row["words_change"] = {
                    family: figure([a - b for a, b in both]) for family, both in pairs.items()
                }
    papers = (
        json.loads((Path(__file__).parent / "benchmarks" / "paper.json").read_text())
        if args.paper
        else []
    )
    papers = [
        paper
        for paper in papers
        if (paper["suite"], paper["protocol"]) == (args.suite, args.protocol)
    ]

    tables, text = tables_of(rows, comparisons, papers, columns, args), ""
    for title, lines in tables.items():
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(lines[0]):
            table.add_column(name, justify="right" if i else "left", overflow="fold")
        for line in lines[1:]:
            table.add_row(*(escape(cell.replace(" ± ", "\n±")) for cell in line))
        console.print(table)
        lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        text += f"{title}:\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"
    console.print(caption(rows, problems, args), markup=False)
    results = {"settings": settings_of(args), "provenance": records.provenance()}
    results["sampling"] = {
        p["category"]: {key: p[key] for key in ("samples", "temperature")} for p in problems
    }
    results |= {"rows": rows, "versus": comparisons, "papers": papers}
    of = [settings_of(args), [[part["responses"] for part in row["checkpoints"]] for row in rows]]
    more = f"_and_{len(rows) - 1}_more" * (len(rows) > 1)
    name = f"{Path(args.suite).stem}_{short_name(args.models[0])}{more}_{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:8]}"
    outputs = [
        Path(args.out, name + end) for end in (".json", ".md", "_words.png", "_responses.jsonl")
    ]
    outputs[0].write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    outputs[1].write_text(text + caption(rows, problems, args) + "\n")
    if args.words:
        words.draw(rows, outputs[2])
    if args.keep_responses:
        everything = [score for of_model in responses for scores in of_model for score in scores]
        outputs[3].write_text(
            "".join(json.dumps(score, ensure_ascii=False) + "\n" for score in everything)
        )
    written = [
        file.name
        for file, wanted in zip(outputs, (True, True, args.words, args.keep_responses))
        if wanted
    ]
    console.print(
        f"{time.perf_counter() - started:.0f} s; in {args.out}: {', '.join(written)}",
        soft_wrap=True,
        markup=False,
    )


if __name__ == "__main__":
    main()
