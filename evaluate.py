"""Evaluation: the papers' tables from any checkpoint.

vLLM samples a model's responses to the problems of a suite, and the suite's rule (rewards/) scores
them. The result is one row of a table:

    kk         accuracy by number of people and their mean, greedy      AR-Lopti, Tables 7, 8, 9
    math       Olympiad Bench, Minerva, MATH-500 greedy; AMC avg@16;
               AIME24 pass@16 and avg@16; their mean                    AR-Lopti, Tables 1, 10
               --protocol acpo: AMC, Minerva, MATH-500,
               Olympiad Bench, all avg@8 at T = 1                       ACPO, Table 2
    countdown  accuracy, avg@4 at T = 1                                 ACPO, Table 1a
    hitab      accuracy by kind of question and over all,
               avg@4 at T = 1                                           ACPO, Table 1b
    gym        accuracy by generator of reasoning-gym (--gym)
               and over all, avg@4 at T = 1                             no paper

--pass_at_k adds pass@1, pass@2, pass@4 … up to --samples, over all problems. tools/figures.py says
what avg@n and pass@k are, and what the standard error beside each figure covers.

Deviations from the papers, and choices that they leave open:
- The papers don't state the temperature of avg@16 and avg@4. Here it is 1, as in their training.
- ACPO's figures for HiTab are multiples of 1/1200, so that it seems to test on 300 of the 1,584
  test questions. It does not say on which, nor how it shows a table or compares answers. Here it
  is all of them, by this project's own rule.
- Problems whose answer math-verify can't read are left out (4 of Minerva's 272, 3 of Olympiad
  Bench's 675). The papers divide by all problems.

Command (--data_dir FOLDER evaluates on the papers' puzzles instead of generated ones):
    python evaluate.py Qwen/Qwen2.5-3B-Instruct runs/grpo_kk_0_… --suite kk --last 3 --paper
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Literal

import tyro

from rewards import find_task
from runtime import defaults, files, machine, settings
from runtime.settings import (
    Dtype,
    EvaluationTemperature,
    GroupSize,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from tools import evaluation_suites

# ----------------------------------------------------------------------------------------- settings

HELP = f"""{__doc__.splitlines()[0]}

For example:
    {__doc__.splitlines()[-1].strip()}

None: the value that the given runs have; without runs, the papers'."""

Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]  # a flag that may be given several times


@dataclasses.dataclass
class Args:
    """What to evaluate, and how.

    None: the value that the given runs have; without runs, the papers'.
    """

    # ---- models
    models: tyro.conf.Positional[tuple[str, ...]] = ()  # folders, hub ids, runs or checkpoints
    last: PositiveInt = 1  # a run's row is the mean over so many of its newest checkpoints
    versus: str = ""  # a model or run; each of the others is compared with it, problem by problem

    # ---- problems
    suite: str | None = None  # kk, math, countdown, hitab, gym, a Python file; None: the runs' task
    protocol: Literal["ar_lopti", "acpo"] = "ar_lopti"  # math: the paper that says what is asked
    data_dir: str = ""  # a folder with the suite's files, or with a subfolder of the suite's name
    data: Repeated = ()  # file, folder or hub id; math: SET=SOURCE; none: generated, math: the hub
    sets: str = ""  # math: only these sets, as in "math500,aime"; empty: the protocol's
    people: str | None = None  # kk: numbers of people, from 2 to 8: "3-7" or "2,3"
    numbers: str | None = None  # countdown: how many numbers, from 3 to 6: "3-4" or "5"
    gym: str | None = None  # gym: generators of reasoning-gym: "letter_counting,chain_sum"
    gym_options: str | None = None  # gym: their parameters as JSON: '{"max_words": 3}'
    limit: PositiveInt | None = None  # of each column (own generator: of all); None: all or 100-512

    # ---- sampling
    chat_template: Literal["auto", "none"] | None = None  # auto: the model's; none: plain text
    template_options: str | None = None  # the template's keywords: '{"enable_thinking": false}'
    samples: GroupSize | None = None  # responses to a problem, if they are not greedy
    temperature: EvaluationTemperature | None = None  # of these responses; 0: greedy
    max_response_tokens: PositiveInt | None = None  # longer ones are cut off, as by the context
    dtype: Dtype | None = None  # compute dtype; None: the type that is fast on this machine
    kv_cache_gb: PositiveFloat | None = None  # GiB; None: all a GPU has left; on a CPU up to 2
    batch: PositiveInt | None = None  # responses that are saved together; None: 512, CPU 128
    seed: NonNegativeInt = 0  # of generated puzzles and of sampling

    # ---- output
    paper: bool = False  # add the papers' rows to the table
    pass_at_k: bool = False  # not math: also pass@1, pass@2, pass@4 … up to --samples
    words: bool = False  # count words of reasoning; relate them to the reward; compare models
    keep_responses: bool = False  # also write every response with its score
    out: str = "evaluations"  # of results and responses; a rerun reads the responses from there


OF_A_RUN = {  # the settings of a run that are used here, with their types
    "task": [str],
    "people": [str],
    "numbers": [str],
    "gym": [str],
    "gym_options": [str],
    "chat_template": [str],
    "template_options": [str],
    "max_response_tokens": [int],
    "eval_temperature": [int, float],
}
CPU_TOKENS = 128  # max_response_tokens without a GPU, except if kk_tiny is the only model


def read_settings(argv):
    """The Args of a command line, all settled. ValueError if one is wrong; exit 2 if unreadable."""
    args = settings.parse(argv, Args, Args(), HELP)
    settings.check_ranges(args)
    settle(args)
    # A run's values, too; but settle may have set protocol to "", which is no choice of a user's.
    settings.check_ranges(dataclasses.replace(args, protocol=Args.protocol))
    return args


def settle(args):
    """Replaces None by the runs' or the papers' settings, and puts --versus last in args.models.

    In place; dtype, for which torch is asked, stays as it is. ValueError if a value is ambiguous,
    or does not go with another one.
    """
    if not args.models:
        raise ValueError("no model is given")
    models = [model for model in dict.fromkeys(args.models) if model != args.versus]
    if args.versus:
        models.append(args.versus)
    args.models = models
    # Models other than runs have one checkpoint.
    if args.last > 1 and not any(Path(model, "checkpoints").is_dir() for model in models):
        raise ValueError(f"--last is {args.last}, but none of the models is a run folder")

    runs = [found for found in map(run_settings, models) if found]
    if not args.suite:
        args.suite = the_one("suite", {run.get("task", "kk") for run in runs}) or "kk"
    find_task(args.suite, "--suite")
    evaluation_suites.check_flags(args)
    args.protocol = evaluation_suites.paper_of(args.suite, args.protocol)
    of_paper = evaluation_suites.papers_settings(args)
    if not defaults.ON_GPU and any(Path(model).name != "kk_tiny" for model in models):
        of_paper["max_response_tokens"] = CPU_TOKENS
    for name, value in of_paper.items():
        of_runs = the_one_of_runs(name, runs, args)
        if getattr(args, name) is None:
            setattr(args, name, value if of_runs is None else of_runs)
    if args.batch is None:
        args.batch = 512 if defaults.ON_GPU else 128
    if args.temperature == 0 and args.samples > 1:
        raise ValueError(
            f"--samples is {args.samples}, but greedy responses are all alike: give a --temperature"
        )
    if args.pass_at_k and (args.suite == "math" or args.samples == 1):
        raise ValueError("--pass_at_k needs several --samples; math has its own pass@16")
    sources = [*args.data, args.data_dir] if args.data_dir else args.data
    if args.suite != "math" and len(sources) > 1:
        raise ValueError(f"--suite {args.suite} takes one --data or --data_dir")
    evaluation_suites.check_options(args)


def the_one_of_runs(name, runs, args):
    """The value of a setting in those runs that have the suite as their task; None without one."""
    if getattr(args, name) is not None:
        return None
    name_in_run = name
    if name == "temperature":
        if args.suite != "kk":  # the protocol sets that of the other suites
            return None
        name_in_run = "eval_temperature"
    values = set()
    for run in runs:
        if name_in_run in run and run.get("task", "kk") == args.suite:
            values.add(run[name_in_run])
    return the_one(name, values)


def the_one(name, values):
    """The value that all runs share, or None if there is none. ValueError if they differ."""
    if len(values) > 1:
        raise ValueError(
            f"the runs differ in {name} ({', '.join(sorted(map(str, values)))}): give --{name}"
        )
    return next(iter(values), None)


def run_settings(model):
    """The content of args.json of a run, or of the run of a checkpoint; {} if there is none.

    ValueError, with the file's name, if it can't be read or a setting that is used is of another
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
    if task not in evaluation_suites.SETTINGS and not task.endswith(".py"):
        raise ValueError(f"{found[0]} can't be used: there is no task {task!r}")
    return content


# What follows imports torch, which takes seconds. A bad flag or --help ends here.
if __name__ == "__main__":
    with settings.errors_in_one_line():
        read_settings(sys.argv[1:])

import contextlib
import fcntl
import gc
import hashlib
import math
import re
import time
from collections import Counter
from itertools import chain

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from rewards import check_template, decode, encode, own
from runtime import (
    checks,
    engine,
    faults,
    folders,
    hub,
    memory,
    model_files,
    quiet,
    records,
    streams,
)
from runtime.processes import ON_GPU
from tools import figures, words

# ------------------------------------------------------------------------------------------- models


def checkpoints(model, last):
    """The paths or hub ids to load: a run's newest checkpoints, or the model itself.

    Of a run it is the `last` newest complete ones, oldest first. ValueError if it has fewer, or if
    the model is no model folder, no run and no hub id.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        checks.check_weights_files(folder)
        return [str(folder)]
    if (folder / "checkpoints").is_dir():
        complete = folders.complete(folder)
        if len(complete) < last:
            raise ValueError(
                f"{model} has {len(complete)} complete checkpoint(s), and --last is {last}"
            )
        return [str(path) for path in complete[-last:]]
    if checks.is_path(model):
        raise ValueError(
            f"{model} is no model folder (no config.json), no run (no checkpoints) and no hub id"
        )
    return [model]


def fingerprint(model):
    """SHA-256 (hex) of a folder's weights, configuration and tokenizer; of a hub id its commit."""
    if not Path(model).is_dir():
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        return f"{model} {config._commit_hash}"
    digest = hashlib.sha256()
    for path in sorted(Path(model).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"):
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def short_name(model):
    """The model's name for file names; for a checkpoint, with the name of its run."""
    parts = Path(model).absolute().parts
    name = parts[-1]
    if parts[-2] == "checkpoints":
        name = f"{parts[-3]}_{parts[-1]}"
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)


# ----------------------------------------------------------------------------------------- sampling


def requests_of(model, problems, args):
    """(a request for each problem, the plan: the engine's settings).

    A request has `prompt_ids`, `max_tokens`, `samples`, `temperature` and `seed`. ValueError if the
    model can't be loaded, a prompt exceeds its context, or a sequence exceeds the cache.
    """
    model_files.check_files("model", model)
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(
            model, trust_remote_code=False, mistral_format=False
        )
    except Exception as error:  # the libraries have many kinds
        raise ValueError(f"{model} can't be loaded: {checks.no_folder(model)}{error}") from error
    model_files.check_evaluated(model, config)
    config = config.get_text_config()
    options = check_template(args, tokenizer)
    prompts = [encode(tokenizer, problem, args.chat_template, options) for problem in problems]
    longest = max(map(len, prompts))
    most = getattr(config, "max_position_embeddings", math.inf)
    context = min(most, longest + args.max_response_tokens)
    if longest >= context:
        n = sum(len(ids) >= context for ids in prompts)
        raise ValueError(
            f"{model} takes {context} tokens, and {n} prompts have as many; "
            f"the longest has {longest}"
        )
    requests = []
    for problem, ids in zip(problems, prompts):
        request = {
            "prompt_ids": ids,
            "max_tokens": min(args.max_response_tokens, context - len(ids)),
            "samples": problem["samples"],
            "temperature": problem["temperature"],
            "seed": problem["seed"],
        }
        requests.append(request)
    plan = {
        "context": context,
        "dtype": args.dtype,
        "kv_cache_gb": cache_size(config, context, args),
        "batch": args.batch,
        "stop": engine.end_tokens(model),
    }
    return requests, plan


def cache_size(config, context, args):
    """GiB for keys and values; None: what a GPU has left. ValueError if one sequence needs more."""
    width = 4 if args.dtype == "float32" else 2  # bytes of a number
    sequence = memory.key_value_bytes(config, width) * context / 2**30
    cache = args.kv_cache_gb
    if cache is None and not ON_GPU:
        cache = max(1.1 * sequence, min(2.0, args.batch * sequence))
    if cache is not None and cache < sequence:
        raise ValueError(
            f"--kv_cache_gb is {cache}; "
            f"one sequence of {context} tokens already needs {sequence:.3f}"
        )
    return cache


def load_engine(model, plan, seed):
    """A vLLM engine. Only one may exist at a time. plan: as requests_of gives it."""
    options = engine.common_options(str(model), plan["context"], plan["kv_cache_gb"], plan["dtype"])
    from vllm import LLM  # imported here because it reads the environment and takes seconds

    with quiet.library_notices():
        return LLM(model=model, dtype=plan["dtype"], seed=seed, **options)


def batches(requests, size):
    """Lists of requests, in order; each ends with the one that brings it to `size` responses."""
    cut = []
    batch = []
    for request in requests:
        batch.append(request)
        if num_responses(batch) >= size:
            cut.append(batch)
            batch = []
    if batch:
        cut.append(batch)
    return cut


def num_responses(requests):
    return sum(request["samples"] for request in requests)


def sample(llm, batch, stop, title, done, total):
    """For each request of a batch a list of its responses.

    A response is {"response": its text, "tokens": how many, "truncated"}. stop: the tokens that end
    one. done, total: numbers of responses, for the progress bar of this title.
    """
    from vllm import SamplingParams

    prompts = []
    params = []
    for request in batch:
        prompts.append({"prompt_token_ids": request["prompt_ids"]})
        params.append(
            SamplingParams(
                n=request["samples"],
                max_tokens=request["max_tokens"],
                temperature=request["temperature"],
                seed=request["seed"],
                stop_token_ids=stop,
                detokenize=False,  # decode does it
            )
        )
    engine.empty_prefix_cache(llm)  # a batch's responses must not depend on earlier batches
    bar = engine.bar_with(title, initial=done, total=total)
    outputs = llm.generate(prompts, params, use_tqdm=bar)
    found = []
    for output in outputs:  # one for each request
        texts = decode(llm.get_tokenizer(), output.outputs)
        rows = []
        for text, response in zip(texts, output.outputs):
            row = {
                "response": text,
                "tokens": len(response.token_ids),
                "truncated": response.finish_reason == "length",
            }
            rows.append(row)
        found.append(rows)
    return found


def respond(model, requests, plan, args):
    """(the responses to all requests, in order; how they were made, for the results).

    Each complete batch becomes a line of OUT/responses/MODEL_DIGEST.jsonl. A rerun reads the lines
    that exist and samples the rest, in the same batches as an uninterrupted evaluation. The file's
    first line has everything that a response depends on: weights, requests, engine, seed, versions
    and machine. DIGEST is the digest of this line.
    """
    made = records.provenance()
    depends_on = {
        "model": fingerprint(model),
        "requests": hashlib.sha256(json.dumps(requests).encode()).hexdigest(),
        "engine": plan,
        "seed": args.seed,
        "versions": made["versions"],
        "machine": made["machine"],
    }
    first = json.dumps(depends_on, sort_keys=True).encode()
    name = f"{short_name(model)}_{hashlib.sha256(first).hexdigest()[:16]}.jsonl"
    path = Path(args.out, "responses", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    todo = batches(requests, args.batch)
    llm = None
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"error: another evaluation is writing {path}")
        except OSError:
            pass  # no locks here: some network file systems have none
        kept = read_batches(file, first)
        if kept:
            print(f"{model}: {len(kept)} of {len(todo)} batches are in {path}")
        done = sum(map(num_responses, todo[: len(kept)]))
        for batch in todo[len(kept) :]:
            if llm is None:
                llm = load_engine(model, plan, args.seed)
            title = short_name(model)
            responses = sample(llm, batch, plan["stop"], title, done, num_responses(requests))
            done += num_responses(batch)
            kept.append({"made": made, "responses": responses})
            file.write(json.dumps(kept[-1]).encode() + b"\n")
            file.flush()
    if llm:
        llm.llm_engine.engine_core.shutdown()  # now: the next model needs its memory
    del llm
    gc.collect()

    responses = []
    makers = []  # batches of one file may come from several commits
    for line in kept:
        responses += line["responses"]
        if line["made"] not in makers:
            makers.append(line["made"])
    about = {
        "path": model,
        "fingerprint": depends_on["model"],
        "responses": path.name,
        "engine": plan,
        "made": makers,
        "cut_by_context": sum(r["max_tokens"] < args.max_response_tokens for r in requests),
    }
    return responses, about


def read_batches(file, first):
    """The batches that a file of responses has; what can't be used is cut off.

    That is an incomplete last line, and everything if the first line differs.
    """
    file.seek(0)
    lines = file.read().split(b"\n")[:-1]
    if lines[:1] != [first]:
        lines = []
    file.truncate(sum(len(line) + 1 for line in lines))
    if not lines:
        file.write(first + b"\n")
    return [json.loads(line) for line in lines[1:]]


# --------------------------------------------------------------------------------------- evaluation


def evaluate(model, paths, task, problems, plans, columns, args):
    """(a row of the table, {column: the problems' contributions}, each problem's scored responses).

    paths: the model's checkpoints; plans: {checkpoint: (its requests, its plan)}.
    """
    row = {"model": model, "checkpoints": [], "figures": {}}
    if Path(paths[0]) != Path(model).expanduser():
        row["model"] += f": {', '.join(Path(path).name for path in paths)}"
    scored = []  # for each checkpoint, for each problem, the responses with their scores
    for path in paths:
        responses, about = respond(path, *plans[path], args)
        row["checkpoints"].append(about)
        origin = {"model": row["model"], "checkpoint": path}
        with settings.errors_in_one_line():  # a task of one's own may give too few scores
            scored.append(score(task, problems, responses, origin))

    values = {}
    for key, column in columns.items():
        values[key], noise = figures.contributions(column, problems, scored)
        row["figures"][key] = figures.figure(values[key], noise)
    if "all" not in columns:
        row["figures"]["mean"] = figures.mean_figure(columns, values)

    by_problem = []  # the responses of all checkpoints
    by_category = {}
    for problem, *of_checkpoints in zip(problems, *scored):
        of_problem = list(chain(*of_checkpoints))
        by_problem.append(of_problem)
        by_category.setdefault(problem["category"], []).extend(of_problem)
    row.update(figures.rates(list(chain(*by_problem))))
    row["by_category"] = {name: figures.rates(some) for name, some in by_category.items()}
    return row, values, by_problem


def score(task, problems, responses, origin):
    """For each problem its responses with their scores, as --keep_responses writes them.

    responses: for each problem a list; origin: a dictionary that each of them begins with.
    """
    texts = []
    answers = []
    for problem, of_problem in zip(problems, responses):
        texts += [one["response"] for one in of_problem]
        answers += [problem["answer"]] * len(of_problem)
    found = task.score_all(texts, answers)
    own.check_scores(task, found, texts)
    scores = iter(found)
    scored = []
    for i, (problem, of_problem) in enumerate(zip(problems, responses)):
        about = {
            **origin,
            "problem": i,
            "category": problem["category"],
            "prompt": problem["messages"][-1]["content"],
            "answer": problem["answer"],
        }
        scored.append([about | one | next(scores) for one in of_problem])
    return scored


def compare_with_last(rows, values, columns):
    """[the comparison of each row with the last, problem by problem]. values: for each row."""
    comparisons = []
    for row, of_columns in zip(rows[:-1], values):
        found = figures.paired(columns, of_columns, values[-1])
        comparison = {"model": row["model"], "versus": rows[-1]["model"], "figures": found}
        comparisons.append(comparison)
    return comparisons


def add_words(rows, responses, args):
    """Adds to each row its counts of words of reasoning, and how they differ from another row's.

    The other row is that of --versus, which is the last; without --versus it is the first.
    responses: for each row, for each problem a list.
    """
    counted = [words.count_all(of_model) for of_model in responses]
    base = -1 if args.versus else 0
    for row, (counts, relations) in zip(rows, counted):
        row["words"] = {}
        for family in counts:
            row["words"][family] = figures.figure(counts[family]) | relations[family]
        if row is rows[base]:
            continue
        row["words_change"] = {}
        for family, of_base in counted[base][0].items():
            differences = [a - b for a, b in zip(counts[family], of_base)]
            row["words_change"][family] = figures.figure(differences)


# ------------------------------------------------------------------------------------------- output

PERCENT = ("math", "countdown", "hitab")  # suites whose figures the papers print in percent


def unit_of(suite):
    """(factor, digits) of a suite's figures, as the papers print them."""
    return (100, 2) if suite in PERCENT else (1, 3)


def shown(found, unit, sign=""):
    """A figure with its standard error, as text. unit: (factor, digits)."""
    factor, digits = unit
    text = f"{found['value'] * factor:{sign}.{digits}f}"
    if found["error"] is not None:
        text += f" ± {found['error'] * factor:.{digits}f}"
    return text


def tables_of(rows, comparisons, papers, columns, args):
    """{title: lines of cells}. The first line has the titles of the columns."""
    titles = {key: column.title for key, column in columns.items()}
    if "all" not in columns:
        titles["mean"] = "mean"
    unit = unit_of(args.suite)
    title = "Share of right answers" + ", in percent" * (args.suite in PERCENT)
    tables = {title: [["model", *titles.values(), "format", "tokens", "truncated"]]}
    for row in rows:
        tables[title].append(line_of(row, titles, unit))
    for paper in papers:
        tables[title] += lines_of_paper(paper, titles, columns)
    if comparisons:
        name = "The same problems, compared"
        tables[name] = [["difference", *titles.values()]]
        for comparison in comparisons:
            tables[name] += lines_of_comparison(comparison, titles, unit)
    if args.words:
        tables["Words of reasoning in a response"] = words.lines_of(rows)
    return tables


def line_of(row, titles, unit):
    factor, digits = unit
    return [
        row["model"],
        *(shown(row["figures"][key], unit) for key in titles),
        f"{row['format_rate'] * factor:.{digits}f}",
        f"{row['mean_tokens']:.0f}",
        f"{row['truncated_rate'] * factor:.{digits}f}",
    ]


def lines_of_paper(paper, titles, columns):
    # The paper's mean is shown only if it is over the same columns.
    is_alike = set(paper["columns"]) - {"mean"} == set(columns)
    lines = []
    for name, *numbers in paper["rows"]:
        there = dict(zip(paper["columns"], numbers))
        if not is_alike:
            there.pop("mean", None)
        cells = []
        for key in titles:
            number = there.get(key)
            cells.append("" if number is None else f"{number:.2f}")
        lines.append([f"{name} ({paper['source']})", *cells, "", "", ""])
    return lines


def lines_of_comparison(comparison, titles, unit):
    differences = [f"{comparison['model']} minus {comparison['versus']}"]
    problems = ["problems up / down / ties"]
    for key in titles:
        found = comparison["figures"][key]
        differences.append(shown(found, unit, "+"))
        problems.append(f"{found['up']} / {found['down']} / {found['ties']}")
    return [differences, problems]


def settings_of(args):
    """{name: value} of the settings that the results depend on, without those that are not set."""
    left_out = ("models", "versus", "words", "pass_at_k", "paper", "keep_responses", "out")
    values = {}
    for name, value in dataclasses.asdict(args).items():
        if name not in left_out and value not in (None, "", ()):
            values[name] = ", ".join(value) if isinstance(value, tuple) else value
    return values


def caption(rows, problems, args):
    """The text below the tables: settings, problems, commit, versions and machine."""
    parts = [part for row in rows for part in row["checkpoints"]]
    made = [one for part in parts for one in part["made"]]
    commits = {str(one["commit"]) for one in made}
    machines = {one["machine"] for one in made}
    versions = set()
    for one in made:
        versions |= {f"{name} {version}" for name, version in one["versions"].items()}
    counts = Counter(problem["category"] for problem in problems)
    cut = sum(part["cut_by_context"] for part in parts)
    late = sum(row["timed_out"] for row in rows)

    how = ", ".join(f"{name} {value}" for name, value in settings_of(args).items())
    asked = ", ".join(f"{category}: {count}" for category, count in counts.items())
    sentences = ["± one standard error.", f"{how}.", f"Problems: {asked}."]
    if cut:
        sentences.append(
            f"{cut} times the model's context, and not --max_response_tokens, was the limit."
        )
    if late:
        sentences.append(f"{late} answers took too long to compare and count as wrong.")
    on = ", ".join([*sorted(versions), *sorted(machines)])
    sentences.append(f"Commit {', '.join(sorted(commits))}; {on}.")
    return " ".join(sentences)


def rows_of_papers(args):
    """The papers' tables of this suite and protocol, from benchmarks/paper.json."""
    file = Path(__file__).parent / "benchmarks" / "paper.json"
    wanted = (args.suite, args.protocol)
    papers = json.loads(file.read_text(encoding="utf-8"))
    return [paper for paper in papers if (paper["suite"], paper["protocol"]) == wanted]


def sampling_of(problems):
    """{category: how its problems' responses are sampled}."""
    sampling = {}
    for problem in problems:
        how = {"samples": problem["samples"], "temperature": problem["temperature"]}
        sampling[problem["category"]] = how
    return sampling


def print_header(console, args):
    console.rule(f"[bold]evaluate.py[/] {escape(', '.join(args.models))}")
    shown_settings = [
        f"{name} [bold]{escape(str(value))}[/]" for name, value in settings_of(args).items()
    ]
    console.print("   ".join(shown_settings))


def print_table(console, title, lines):
    """Prints a table. lines: lists of cells, of which the first has the titles."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(lines[0]):
        table.add_column(escape(name), justify="right" if i else "left", overflow="fold")
    for line in lines[1:]:
        table.add_row(*(escape(cell.replace(" ± ", "\n±")) for cell in line))
    console.print(table)


def markdown(tables, below):
    """The tables, with the text below them."""
    text = ""
    for title, lines in tables.items():
        text += f"{title}:\n\n"
        for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]]:
            text += f"| {' | '.join(line)} |\n"
        text += "\n"
    return f"{text}{below}\n"


def file_name(rows, args):
    """The name of the results: the suite, the first model, and a digest of what was evaluated."""
    files_of = [[part["responses"] for part in row["checkpoints"]] for row in rows]
    digest = hashlib.sha256(json.dumps([settings_of(args), files_of]).encode()).hexdigest()
    others = f"_and_{len(rows) - 1}_more" * (len(rows) > 1)
    return f"{Path(args.suite).stem}_{short_name(args.models[0])}{others}_{digest[:8]}"


def write(results, text, responses, args):
    """Writes the files of an evaluation into --out; their names."""
    rows = results["rows"]
    name = file_name(rows, args)
    contents = {
        f"{name}.json": json.dumps(results, indent=1, ensure_ascii=False) + "\n",
        f"{name}.md": text,
    }
    if args.keep_responses:
        everything = chain(*chain(*responses))
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in everything]
        contents[f"{name}_responses.jsonl"] = "".join(lines)
    for file, content in contents.items():
        files.write(Path(args.out, file), content)
    written = list(contents)
    if args.words:
        words.draw(rows, Path(args.out, f"{name}_words.png"))
        written.append(f"{name}_words.png")
    return written


# --------------------------------------------------------------------------------------------- main


def prepare(argv):
    """(args, the task's module, problems, paths, plans).

    paths: {model: its checkpoints}; plans: {checkpoint: (its requests, its plan)}. ValueError or
    OSError if something can't work.
    """
    defaults.ON_GPU = ON_GPU  # torch knows for certain
    args = read_settings(argv)
    checks.check_gpus(args)
    if args.dtype is None:
        args.dtype = machine.fast_dtype()
    for model in args.models:
        hub.ask(model)
    task, problems = evaluation_suites.load_problems(args)
    # Listed once: a run that still trains makes more of them.
    paths = {model: checkpoints(model, args.last) for model in args.models}
    all_paths = dict.fromkeys(chain(*paths.values()))
    plans = {path: requests_of(path, problems, args) for path in all_paths}
    for folder in (Path(args.out), Path(args.out, "responses")):
        folder.mkdir(parents=True, exist_ok=True)
        files.check_writable(folder)
    return args, task, problems, paths, plans


@contextlib.contextmanager
def stops_in_one_line(out):
    """Ends the program with one line at Ctrl-C, and if `out` can't be written."""
    way_on = f"the same command goes on from what is in {out}/responses"
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(f"stopped; {way_on}")
    except OSError as error:
        if not faults.is_of_the_disk(error):
            raise
        sys.exit(f"error: {out} can't be written: {error.strerror}. Make room; {way_on}")


def main():
    with settings.errors_in_one_line():
        args, task, problems, paths, plans = prepare(sys.argv[1:])
    started = time.perf_counter()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    print_header(console, args)

    columns = figures.columns_of(problems, args)
    rows = []
    values = []  # for each model, {column: the problems' contributions}
    responses = []  # for each model, for each problem, the responses with their scores
    with stops_in_one_line(args.out):
        for model in args.models:
            row, of_columns, of_problems = evaluate(
                model, paths[model], task, problems, plans, columns, args
            )
            rows.append(row)
            values.append(of_columns)
            responses.append(of_problems)
    comparisons = compare_with_last(rows, values, columns) if args.versus else []
    if args.words:
        add_words(rows, responses, args)
    papers = rows_of_papers(args) if args.paper else []

    tables = tables_of(rows, comparisons, papers, columns, args)
    below = caption(rows, problems, args)
    for title, lines in tables.items():
        print_table(console, title, lines)
    console.print(below, markup=False)

    results = {
        "settings": settings_of(args),
        "provenance": records.provenance(),
        "sampling": sampling_of(problems),
        "rows": rows,
        "versus": comparisons,
        "papers": papers,
    }
    with stops_in_one_line(args.out):
        written = write(results, markdown(tables, below), responses, args)
    seconds = time.perf_counter() - started
    text = f"{seconds:.0f} s; in {args.out}: {', '.join(written)}"
    console.print(text, soft_wrap=True, markup=False)


if __name__ == "__main__":
    streams.keep_writing()  # without a reader (`| head`) it goes on: the results are files
    main()
