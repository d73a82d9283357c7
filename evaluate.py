"""Evaluation: the papers' tables from any checkpoint.

A model answers the problems of a suite with vLLM, a rule scores the answers (rewards/), and what comes out is a row:

    kk         accuracy by number of people and their mean, greedy                          AR-Lopti, Tables 7, 8, 9
    math       Olympiad Bench, Minerva, MATH-500 greedy; AMC avg@16; AIME24 pass@16 and avg@16; their mean    1, 10
               with --protocol acpo: AMC, Minerva, MATH-500, Olympiad Bench, all avg@8 at T = 1        ACPO, Table 2
    countdown  accuracy, avg@4 at T = 1                                                                ACPO, Table 1

avg@n: the share of right ones among n responses to a problem, mean over the problems. pass@k of a problem of whose n
responses c are right: 1 − C(n−c, k) / C(n, k), which is unbiased (Chen et al. 2021). A figure's standard error is the
standard deviation over problems (ddof 1) of what each contributes, over √problems: how far other problems and other
responses would have moved it. Of avg@n, n > 1, sampling's part is √(mean of p(1−p)/(n−1) / problems), p a problem's
share of right ones, and the rest the problems' part. A mean over sets has √(Σ error²) / number of columns; columns of
one set (AIME24's two) share its problems, each of which contributes their sum.

Where this file deviates from the papers, or fills in what they leave open:
- They don't say at which temperature they sampled avg@16 and avg@4: here it is 1, as in their training.
- Problems whose answer math-verify can't read are left out (4 of Minerva's 272, 3 of Olympiad Bench's 675); the
  papers divide by all.

Command (the papers' own puzzles instead of generated ones: --data_dir FOLDER):
    python evaluate.py Qwen/Qwen2.5-3B-Instruct runs/grpo_kk_0_… --suite kk --last 3 --paper
"""

import dataclasses
import fcntl
import gc
import hashlib
import importlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from rewards import encode
from rewards.kk import SUFFIXES, parse_people
from runtime import records
from tools import words

ON_GPU = torch.cuda.is_available()

# ---------------------------------------------------------------------------------------------------------- arguments


@dataclasses.dataclass
class Args:
    """What to evaluate, and how. None: as in the runs that are given, if they have it, else as in the papers."""

    # Model folders, hub ids, run folders (their newest checkpoint) or checkpoints.
    models: tyro.conf.Positional[list[str]]
    suite: Literal["kk", "math", "countdown"] | None = (
        None  # which problems; None: the runs' task, or kk
    )
    protocol: Literal["ar_lopti", "acpo"] = "ar_lopti"  # math: whose sets, samples and temperature
    last: int = 1  # a run's row is the mean over its newest so many checkpoints, > 0
    versus: str = ""  # a model or run to compare each of the others with, problem by problem
    words: bool = False  # count the words of reasoning, with the reward and between models
    paper: bool = False  # show the papers' rows below
    data_dir: str = ""  # a folder with the suite's files, or with a folder of the suite's name in which they are
    # A file, folder or hub id; for math SET=SOURCE, once for each set that is not to come from data_dir. Without both,
    # kk and countdown are generated, and math comes from the hub.
    data: tyro.conf.UseAppendAction[list[str]] = dataclasses.field(default_factory=list)
    sets: str = ""  # math: only these, as in "math500,aime"; empty: the protocol's
    people: str | None = None  # kk: numbers of people, within 2-8: "3-7" or "2,3"
    numbers: str | None = None  # countdown: how many numbers, within 3-6: "3-4" or "5"
    # The first so many problems of each set, number of people or of numbers, > 0. None: all; generated: 100 and 512.
    limit: int | None = None
    chat_template: Literal["auto", "none"] | None = (
        None  # auto: the tokenizer's; none: plain text, as in math
    )
    samples: int | None = None  # responses to a problem, where they are not greedy, > 0
    temperature: float | None = None  # of these responses; 0: greedy; else >= 0.01
    max_response_tokens: int | None = (
        None  # longer responses are cut off, > 0; also where the model's context ends
    )
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the weights and of all computation
    kv_cache_gb: float | None = (
        None  # GiB for keys and values, > 0; None: what a GPU has left; on a CPU up to 2
    )
    batch: int | None = (
        None  # responses sampled at a time, and kept when they are done, > 0; None: 512, on a CPU 128
    )
    seed: int = 0  # of generated puzzles and of sampling, >= 0
    keep_responses: bool = False  # write every response with its score, too
    out: str = (
        "evaluations"  # folder for results, and for responses, which a rerun does not sample again
    )


DEFAULTS = {
    "kk": {"people": "3-7", "chat_template": "auto", "samples": 1, "temperature": 0.0}
}  # the papers'
DEFAULTS["math"] = {
    "chat_template": "none",
    "samples": 16,
    "temperature": 1.0,
}  # their base model knows no chat
DEFAULTS["countdown"] = {
    "numbers": "3-4",
    "chat_template": "auto",
    "samples": 4,
    "temperature": 1.0,
}
CPU_TOKENS = (
    128  # max_response_tokens where there is no GPU, and the model is not as small as kk_tiny
)

SETS = {  # of math: title, names that its file may have (letters and digits of them), hub id, the papers' file
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
GREEDY = ["olympiad_bench", "minerva", "math500"]  # in ar_lopti
PAPERS_FILES = "the GitHub repository zhyang2226/AR-Lopti"


def settle(args):
    """Puts runs' and papers' settings in the place of None, and --versus behind the other models.

    ValueError where a value is out of range or unclear.
    """
    for name in ("last", "limit", "samples", "max_response_tokens", "kv_cache_gb", "batch"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be greater than 0")
    if args.seed < 0 or not args.models:
        raise ValueError(
            f"--seed is {args.seed}; it must be 0 or greater"
            if args.models
            else "no model is given"
        )
    others = [model for model in dict.fromkeys(args.models) if model != args.versus]
    args.models = models = [*others, *([args.versus] if args.versus else [])]
    if args.last > 1 and not any(
        Path(model, "checkpoints").is_dir() for model in models
    ):  # the others have one
        raise ValueError(f"--last is {args.last}, but none of the models is a run folder")
    runs = [settings for model in models if (settings := run_settings(model))]
    args.suite = args.suite or the_one("suite", {run.get("task", "kk") for run in runs}) or "kk"
    args.protocol = {"math": args.protocol, "kk": "ar_lopti", "countdown": "acpo"}[args.suite]
    papers = DEFAULTS[args.suite] | {"max_response_tokens": 4096, "batch": 512 if ON_GPU else 128}
    if args.protocol == "acpo":
        papers |= {"max_response_tokens": 3072, "samples": {"math": 8, "countdown": 4}[args.suite]}
    if not ON_GPU and any(Path(model).name != "kk_tiny" for model in models):
        papers["max_response_tokens"] = CPU_TOKENS
    for name in papers:
        # A run's own temperature of evaluation goes for puzzles alone: the other suites have a protocol.
        theirs = {"temperature": "eval_temperature" * (args.suite == "kk")}.get(name, name)
        values = {
            run[theirs] for run in runs if theirs in run and run.get("task", "kk") == args.suite
        }
        if getattr(args, name) is None:
            value = the_one(name, values)
            setattr(args, name, papers[name] if value is None else value)
    if args.temperature != 0 and not 0.01 <= args.temperature < math.inf:
        raise ValueError(f"--temperature is {args.temperature}; it must be 0 or at least 0.01")
    if args.temperature == 0 and args.samples > 1:
        raise ValueError(
            f"--samples is {args.samples}, but greedy responses are all alike: give a --temperature"
        )
    if args.suite != "math" and len(args.data) + bool(args.data_dir) > 1:
        raise ValueError(f"--suite {args.suite} takes one --data or --data_dir")


def the_one(name, values):
    """What all the runs have, or None where there is none. ValueError where they differ."""
    if len(values) > 1:
        raise ValueError(
            f"the runs differ in {name} ({', '.join(sorted(map(str, values)))}): give --{name}"
        )
    return next(iter(values), None)


def run_settings(model):
    """args.json of a run, or of the run that a checkpoint belongs to; {} where there is none."""
    folder = Path(model).expanduser().absolute()
    places = [folder, *(folder.parents[1:2] if folder.parent.name == "checkpoints" else [])]
    found = [place / "args.json" for place in places if (place / "args.json").is_file()]
    return json.loads(found[0].read_text()) if found else {}


# ------------------------------------------------------------------------------------------------ models and problems


def checkpoints(model, last):
    """What to load for a model: of a run its newest complete checkpoints, oldest first; anything else is itself."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return [str(folder)]
    if (folder / "checkpoints").is_dir():
        complete = sorted(
            path.parent for path in folder.glob("checkpoints/step_??????/trainer_state.json")
        )
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
    """SHA-256 over weights, configuration and tokenizer of a folder; of a hub id, its commit."""
    if not Path(model).is_dir():
        return f"{model} {AutoConfig.from_pretrained(model)._commit_hash}"
    digest = hashlib.sha256()
    for path in sorted(Path(model).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"):
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def load_problems(args):
    """The task's module, and the problems as it gives them, each also with `samples`, `temperature` and `seed`.

    ValueError where data are missing, saying what to get and from where, or not as they should be.
    """
    task = importlib.import_module(f"rewards.{args.suite}")
    folder = Path(args.data_dir).expanduser()  # "." where none is given
    if not folder.is_dir():
        raise ValueError(
            f"--data_dir {folder} is no folder; the papers' files are in {PAPERS_FILES}, folder data"
        )
    if (folder / args.suite).is_dir() and args.data_dir:
        folder = folder / args.suite
    if args.suite == "math":
        problems = []
        for name, source in math_sources(args, folder).items():
            try:
                problems += [problem | {"category": name} for problem in task.load(source, "test")]
            except ValueError as error:
                raise ValueError(f"{SETS[name][0]}: {error} {where_from(name)}") from error
    else:
        source = args.data[0] if args.data else str(folder) if args.data_dir else None
        counts = (
            parse_people(args.people) if args.suite == "kk" else task.parse_numbers(args.numbers)
        )
        which = {"people": args.people} if args.suite == "kk" else {"numbers": args.numbers}
        generated = (args.limit or {"kk": 100, "countdown": 512}[args.suite]) * len(counts)
        problems = task.load(
            source, "test", size=None if source else generated, seed=args.seed, **which
        )
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


def math_sources(args, folder):
    """{set: file or hub id}: from --data SET=SOURCE, else the folder's file, else, without a folder, the hub."""
    sets = (
        [name.strip() for name in args.sets.split(",")] if args.sets else PROTOCOLS[args.protocol]
    )
    given = dict(text.partition("=")[::2] for text in args.data)
    if unknown := {*sets, *given} - set(SETS):
        raise ValueError(
            f"{min(unknown)!r} is no set; --sets and --data SET=SOURCE take {', '.join(SETS)}"
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
            f"{where} there is no {lacking}. {' '.join(map(where_from, missing))} --sets leaves sets out."
        )
    return sources


def where_from(name):
    _, _, hub, file = SETS[name]
    return f"Get {file} from {PAPERS_FILES}: --data {name}=PATH" + (
        f"; or the hub's: --data {name}={hub}." * bool(hub)
    )


# ----------------------------------------------------------------------------------------------------------- sampling


def requests_of(model, problems, args):
    """What the sampler is asked for each problem, and the engine's settings.

    ValueError where the model can't be loaded, or a prompt does not fit in its context, or a sequence in the cache.
    """
    try:
        config, tokenizer = (
            AutoConfig.from_pretrained(model).get_text_config(),
            AutoTokenizer.from_pretrained(model),
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
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = (
        2 * {"bfloat16": 2, "float32": 4}[args.dtype] * config.num_hidden_layers * heads * width
    )  # its bytes
    sequence, cache = token * context / 2**30, args.kv_cache_gb  # GiB
    if cache is None and not ON_GPU:
        cache = max(1.1 * sequence, min(2.0, args.batch * sequence))
    if cache is not None and cache < sequence:
        raise ValueError(
            f"--kv_cache_gb is {cache}; one sequence of {context} tokens already needs {sequence:.3f}"
        )
    try:
        stop = GenerationConfig.from_pretrained(
            model
        ).eos_token_id  # several in some models; vLLM would know one
    except OSError:  # not every model has that file
        stop = config.eos_token_id
    stop = [stop] if isinstance(stop, int) else stop or []
    return requests, {
        "context": context,
        "dtype": args.dtype,
        "kv_cache_gb": cache,
        "batch": args.batch,
        "stop": stop,
    }


def load_engine(model, engine, seed):
    """A vLLM engine; of several models one after the other, each gone before the next comes."""
    if not ON_GPU:
        os.environ.setdefault(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
        )  # in this process, where it starts sooner
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM  # reads the environment, and takes seconds: so it comes after every check

    options = {
        "max_model_len": engine["context"],
        "dtype": engine["dtype"],
        "seed": seed,
        "use_tqdm_on_load": False,
    }
    options["generation_config"] = (
        "vllm"  # a model's own would change top-p, top-k and temperature without a word
    )
    if engine["kv_cache_gb"] is not None:
        options["kv_cache_memory_bytes"] = int(engine["kv_cache_gb"] * 2**30)
    if not ON_GPU:  # on the CPU seeded requests fail in chunked prefill
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
        options["max_num_batched_tokens"] = max(engine["context"], 2048)
    return LLM(model=model, **options)


def batches(requests, size):
    """The requests in order, cut behind the one with which a batch comes to at least `size` responses."""
    cut, n = [[]], 0
    for request in requests:
        if n >= size:
            cut, n = [*cut, []], 0
        cut[-1].append(request)
        n += request["samples"]
    return cut


def sample(llm, batch, stop, title, done, total):
    """For each request of a batch its responses, {"response", "tokens" (how many), "truncated"}.

    From an empty prefix cache: so a batch gives the same whatever came before it.
    """
    from vllm import SamplingParams

    def bar(*items, **options):
        return tqdm(
            *items, **options | {"desc": title, "initial": done, "total": total, "leave": False}
        )

    if not llm.reset_prefix_cache():
        raise RuntimeError(
            "vLLM kept its prefix cache, so that responses would depend on those before them"
        )
    params = []
    for request in batch:
        options = {key: request[key] for key in ("max_tokens", "temperature", "seed")}
        params.append(SamplingParams(n=request["samples"], stop_token_ids=stop, **options))
    outputs = llm.generate(
        [{"prompt_token_ids": r["prompt_ids"]} for r in batch], params, use_tqdm=bar
    )
    return [
        [
            {
                "response": r.text,
                "tokens": len(r.token_ids),
                "truncated": r.finish_reason == "length",
            }
            for r in out.outputs
        ]
        for out in outputs
    ]


def respond(model, requests, engine, args):
    """The responses to all requests, in order; and about them: path, fingerprint, file, where they were made.

    Every batch becomes a line of OUT/responses/MODEL_DIGEST.jsonl when it is complete. A rerun reads the lines that are
    there and samples the rest, in the batches in which an unbroken evaluation would. The file's first line, of which
    the digest is, has all that a response depends on: weights, requests, engine, versions and machine.
    """
    made = records.provenance()
    asked = hashlib.sha256(json.dumps(requests).encode()).hexdigest()
    key = {"model": fingerprint(model), "requests": asked, "engine": engine, "seed": args.seed}
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
        lines = file.read().split(b"\n")[:-1]  # what was cut off in the middle of a line is dropped
        lines = lines if lines[:1] == [first] else []
        file.truncate(sum(len(line) + 1 for line in lines))
        if not lines:
            file.write(first + b"\n")
        kept = [json.loads(line) for line in lines[1:]]
        if kept:
            print(f"{model}: {len(kept)} of {len(todo)} batches are in {path}")
        for batch in todo[len(kept) :]:
            llm = llm or load_engine(model, engine, args.seed)
            done = sum(request["samples"] for earlier in todo[: len(kept)] for request in earlier)
            responses = sample(llm, batch, engine["stop"], short_name(model), done, total)
            kept.append({"made": made, "responses": responses})
            file.write(json.dumps(kept[-1]).encode() + b"\n")
            file.flush()
    del llm
    gc.collect()  # the next model needs its memory
    about = {"path": model, "fingerprint": key["model"], "responses": path.name, "engine": engine}
    about["made"] = list({json.dumps(line["made"]): line["made"] for line in kept}.values())
    about["cut_by_context"] = sum(
        request["max_tokens"] < args.max_response_tokens for request in requests
    )
    return [response for line in kept for response in line["responses"]], about


def short_name(model):
    """A model's name as part of a file's; of a checkpoint with its run's."""
    parts = Path(model).absolute().parts[-3:]
    return re.sub(
        r"[^A-Za-z0-9.-]+",
        "_",
        f"{parts[0]}_{parts[2]}" if parts[1] == "checkpoints" else parts[-1],
    )


# ------------------------------------------------------------------------------------------------------------ figures


def pass_at_k(n, c, k):
    """Probability that k of n responses, drawn without replacement, have one of the c right ones among them."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def columns_of(problems, args):
    """The table's columns: {key: (title, category or None for all, k of pass@k or None for the share of right ones)}.

    Where there is no column over all problems ("all"), the table has the mean of its columns.
    """
    samples = {problem["category"]: problem["samples"] for problem in problems}
    if args.suite != "math":
        unit = "people" if args.suite == "kk" else "numbers"
        columns = {category: (f"{category} {unit}", category, None) for category in sorted(samples)}
        average = f"accuracy avg@{args.samples}" if args.samples > 1 else "accuracy"
        return columns | ({"all": (average, None, None)} if args.suite == "countdown" else {})
    columns = {}
    for name, n in samples.items():
        if name == "aime" and n > 1:
            columns[f"aime pass@{min(n, 16)}"] = (f"AIME24 pass@{min(n, 16)}", name, min(n, 16))
        columns[name] = (SETS[name][0] + f" avg@{n}" * (n > 1), name, None)
    return columns


def contributions(column, problems, scored):
    """What each of a column's problems contributes, and the variance that sampling has in it ([] where none is known).

    scored: for every checkpoint, for every problem, the scores of its responses. A problem contributes its share of
    right ones, or its pass@k, averaged over the checkpoints.
    """
    _, category, k = column
    values, noise = [], []
    for problem, *of_checkpoints in zip(problems, *scored):
        if category in (None, problem["category"]):
            counts = [
                (len(scores), sum(score["correct"] for score in scores))
                for scores in of_checkpoints
            ]
            values.append(fmean(pass_at_k(n, c, k) if k else c / n for n, c in counts))
            if k is None and problem["samples"] > 1:
                noise.append(fmean(c / n * (1 - c / n) / (n - 1) for n, c in counts) / len(counts))
    return values, noise


def error_of(values):
    """Standard error of the mean over problems, ddof 1; None for a single problem."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def figure(values, noise=()):
    """The mean over problems with its standard error and, of sampled responses, the error's two parts."""
    found = {"value": fmean(values), "error": error_of(values), "problems": len(values)}
    if noise and found["error"] is not None:
        found["error_samples"] = math.sqrt(math.fsum(noise)) / len(values)
        found["error_problems"] = math.sqrt(
            max(0.0, found["error"] ** 2 - found["error_samples"] ** 2)
        )
    return found


def mean_figure(columns, values):
    """The mean over columns. Those of one category share their problems, each of which contributes their sum."""
    sets = {}
    for key, (_, category, _) in columns.items():
        sets.setdefault(category, []).append(values[key])
    sums = [[math.fsum(parts) for parts in zip(*lists)] for lists in sets.values()]
    errors = [error_of(total) for total in sums]
    error = None if None in errors else math.sqrt(math.fsum(e**2 for e in errors)) / len(columns)
    value = math.fsum(fmean(total) for total in sums) / len(columns)
    return {"value": value, "error": error, "problems": sum(map(len, sums))}


def paired(columns, mine, theirs):
    """Differences of two models on the same problems: {key: a figure, and how many problems went up, down, nowhere}.

    mine, theirs: {key: what each problem contributes}. The mean counts each problem once, by its share of right ones.
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
    """Over responses: format rate, mean length in tokens, share cut off; how many there are, and how many timed out."""
    means = {"format_rate": "format", "mean_tokens": "tokens", "truncated_rate": "truncated"}
    found = {name: fmean(score[key] for score in scores) for name, key in means.items()}
    return found | {
        "responses": len(scores),
        "timed_out": sum(score.get("timed_out", False) for score in scores),
    }


def evaluate(model, task, problems, plans, columns, args):
    """A row of the table; {column: what each problem contributes}; for each problem all its responses with scores.

    plans: {checkpoint: (its requests, its engine's settings)}.
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

UNITS = {
    "kk": (1, 3),
    "math": (100, 2),
    "countdown": (100, 2),
}  # factor and digits, as the papers print them


def shown(found, unit, sign=""):
    """A figure with its standard error, as text."""
    text = f"{found['value'] * unit[0]:{sign}.{unit[1]}f}"
    return text if found["error"] is None else f"{text} ± {found['error'] * unit[0]:.{unit[1]}f}"


def tables_of(rows, comparisons, papers, columns, args):
    """{title: lines of cells, the first of which are the column's titles}."""
    keys, unit = [*columns, *([] if "all" in columns else ["mean"])], UNITS[args.suite]
    titles = [columns[key][0] if key in columns else key for key in keys]
    lines = [["model", *titles, "format", "tokens", "truncated"]]
    for row in rows:
        good, cut = (
            f"{row[name] * unit[0]:.{unit[1]}f}" for name in ("format_rate", "truncated_rate")
        )
        figures = [shown(row["figures"][key], unit) for key in keys]
        lines.append([row["model"], *figures, good, f"{row['mean_tokens']:.0f}", cut])
    for paper in papers:
        alike = set(paper["columns"]) - {"mean"} == set(
            columns
        )  # else its mean is over other columns
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
    """The settings on which the results depend, by name, without those that are not set."""
    left_out = ("models", "versus", "words", "paper", "keep_responses", "out")
    values = {
        name: value for name, value in dataclasses.asdict(args).items() if name not in left_out
    }
    return {name: value for name, value in values.items() if value not in (None, "", [])}


def caption(rows, problems, args):
    """What the tables are of, below them."""
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
        args = tyro.cli(Args, use_underscores=True, description=__doc__.split("\n\n")[0])
        settle(args)
        task, problems = load_problems(args)
        paths = [path for model in args.models for path in checkpoints(model, args.last)]
        plans = {path: requests_of(path, problems, args) for path in dict.fromkeys(paths)}
    except (ValueError, OSError) as error:  # the user's to mend: one line, no traceback
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    console, started = (
        Console(highlight=False, width=None if sys.stdout.isatty() else 160),
        time.perf_counter(),
    )
    console.rule(f"[bold]evaluate.py[/] {', '.join(args.models)}")
    console.print(
        "   ".join(f"{name} [bold]{value}[/]" for name, value in settings_of(args).items())
    )
    columns, rows, values, responses = columns_of(problems, args), [], [], []
    try:
        for model in args.models:
            results = evaluate(model, task, problems, plans, columns, args)
            for kept, result in zip((rows, values, responses), results):
                kept.append(result)
    except KeyboardInterrupt:
        sys.exit(f"stopped; the same command goes on from what is in {args.out}/responses")

    comparisons, base = (
        [],
        -1 if args.versus else 0,
    )  # words are compared with the first model where none is named
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
            table.add_row(*(cell.replace(" ± ", "\n±") for cell in line))
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
    name = f"{args.suite}_{short_name(args.models[0])}{more}_{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:8]}"
    files = [
        Path(args.out, name + end) for end in (".json", ".md", "_words.png", "_responses.jsonl")
    ]
    files[0].write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    files[1].write_text(text + caption(rows, problems, args) + "\n")
    if args.words:
        words.draw(rows, files[2])
    if args.keep_responses:
        everything = [score for of_model in responses for scores in of_model for score in scores]
        files[3].write_text(
            "".join(json.dumps(score, ensure_ascii=False) + "\n" for score in everything)
        )
    written = [
        file.name
        for file, wanted in zip(files, (True, True, args.words, args.keep_responses))
        if wanted
    ]
    console.print(
        f"{time.perf_counter() - started:.0f} s; in {args.out}: {', '.join(written)}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
