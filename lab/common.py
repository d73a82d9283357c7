"""Share code between the lab's commands: settings, trainers, batches, a step, results.

Nothing here computes an advantage, a loss or an update: the trainers' own functions do. A batch is the input of a
trainer's update, made in the order of its main: prompts, responses by vLLM, rewards, log-probabilities, advantages.
"""

import dataclasses
import hashlib
import importlib
import json
import math
import re
import shlex
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
import tyro
from scipy import stats

import grpo
from evaluation import models
from rewards import check_options, find_task, score
from runtime import checks, curves, files, flags, machine, memory, records, sampler, settings
from runtime.batches import next_problems
from runtime.chats import load_task
from runtime.distributed import DEVICE, ON_GPU
from runtime.models import HEAD_CHUNK
from runtime.settings import GroupSize, NonNegativeInt, PositiveInt, Temperature
from tools import kept
from tools.maintain import claims, updates

ROOT = Path(__file__).parents[1]
STARTED = time.monotonic()  # when the command began, not counting the imports

BINS = 4  # quarters of probability, as in AR-Lopti's figure 1
BIN_NAMES = ["p ≤ 0.25", "0.25 – 0.5", "0.5 – 0.75", "p > 0.75"]


@dataclasses.dataclass
class Args:
    """The model, the batches, and the folder of the results. A command adds its own settings."""

    model: str = "models/kk_tiny"  # a model, a run's checkpoint or a hub id
    out: str = ""  # folder of JSON, figure and page; empty: lab/results, or runs/lab with another model or --quick
    seed: NonNegativeInt = 0  # seeds the prompt order and the sampling
    prompts: PositiveInt = 12  # prompts per batch
    responses: GroupSize = 8  # G, responses to each prompt
    max_tokens: PositiveInt = 640  # longer responses are truncated
    temperature: Temperature = 1.0  # for sampling, and for every probability
    task: str = "kk"  # kk, math, countdown, hitab or gym; asked in the model's chat template
    data: str = ""  # problems, as in a trainer; empty: generated, or from the hub
    people: str = "2-3"  # kk: numbers of people in the puzzles, within 2-8
    cache: str = "runs/lab_batches"  # where sampled batches are saved, to be reused
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # tiny sizes, to try the command
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False  # check everything and end


# Sizes of --quick, for those of these settings that a command has.
QUICK = {"prompts": 2, "responses": 3, "max_tokens": 96, "batches": 1, "updates": 2, "show": 1}
QUICK |= {"tokens": 12, "rows": 3, "jacobians": 1, "least": 3, "checked": 6}


def parse(args_class, description):
    """Parse the command line into an args_class; on errors, exit code 2 and one line."""
    args = tyro.cli(args_class, description=description.split("\n\n")[0], use_underscores=True)
    if args.quick:
        for name in (QUICK.keys() & vars(args)) - flags.given(sys.argv[1:], QUICK).keys():
            setattr(args, name, min(QUICK[name], getattr(args, name)))
    # lab/results has each command's results for its own default model.
    is_shown = args.model == args_class.model and not args.quick
    args.out = args.out or ("lab/results" if is_shown else "runs/lab")
    with flags.errors_in_one_line():
        check(args)
    return args


def check(args):
    """Raise ValueError, saying what would be right, if a setting does not fit; OSError if a folder can't be written."""
    settings.check_ranges(args)
    find_task(args.task)
    checks.check_model_folder(args.model)
    for folder in map(Path, (args.out, args.cache)):
        folder.mkdir(parents=True, exist_ok=True)


def trainer_args(script, args, **changes):
    """Return a script's own settings for the lab's model and sizes; others are its defaults for the model.

    Compute is float32, because the lab compares small differences. Gradients are never scaled down.
    """
    trainer = importlib.import_module(script)
    argv = [f"--model={began_with(args.model)}"]
    own = flags.merged(flags.layers(argv, trainer.Args, trainer.TASKS))
    sizes = {name: getattr(args, name) for name in ("model", "seed", "task", "data", "people", "temperature")} | {
        "prompts_per_step": args.prompts,
        "responses_per_prompt": args.responses,
        "max_response_tokens": args.max_tokens,
        "gradient_checkpointing": ON_GPU,  # models that need a GPU need to save memory, too
    }
    sizes |= {"updates_per_step": 1, "max_grad_norm": 1e9, "dtype": "float32", "compile": False}
    return trainer.Args(**own | sizes | changes)


def began_with(model):
    """Return the model that a checkpoint's run began with; any other model is returned as it is."""
    run = files.run_of(model)
    its_args = run / "args.json"
    if run == Path(model) or not its_args.exists():
        return model
    return json.loads(its_args.read_text())["model"]


def name_of(model):
    """Return the model's name for figures: its folder; for a run's checkpoint, the run's folder, too."""
    run, path = files.run_of(model), Path(model)
    return path.name if run == path else f"{run.name}, {path.name}"


def learning_rate(args):
    """Return --lr or, without it, grpo.py's learning rate for the model."""
    return args.lr or trainer_args("grpo", args).lr


def begin(args_class, description, least_updates=None, need_gradient=True):
    """Begin a command: return (args, policy, tokenizer, batches), one batch without --batches. It may end here.

    least_updates: of --updates, if any; need_gradient: see load_batches.
    """
    args = parse(args_class, description)
    with flags.errors_in_one_line():
        if least_updates and (args.updates < least_updates or args.prompts % args.updates):
            needed = f"it must be at least {least_updates} and divide --prompts, which is {args.prompts}"
            raise ValueError(f"--updates is {args.updates}; {needed}")
        if args.dry_run:
            dry_run(args)
            sys.exit()
        policy, tokenizer = load_policy(args)
        batches = load_batches(policy, args, getattr(args, "batches", 1), need_gradient)
    return args, policy, tokenizer, batches


@dataclasses.dataclass
class Sampled:
    """Responses with everything that does not depend on the algorithm. N responses of at most T tokens."""

    batch: dict  # ids, mask, sampler_logp, old_logp, ref_logp, entropy: [N, T]
    rewards: torch.Tensor  # [N], from the task
    prompts: list  # one text per group
    correct: list  # a bool per response


def dry_run(args):
    """Check the model's files without its weights, and print the memory that grpo.py would need at these sizes.

    Too little memory is no error here: a large model's command can be checked on a small machine.
    """
    of_trainer = trainer_args("grpo", args)
    check_options(of_trainer)
    checks.check_gpus(of_trainer)
    config, _ = checks.read_config(args.model)
    n_params, needed, available = memory.estimate(config, of_trainer, HEAD_CHUNK)
    print(f"{args.model}: {n_params / 1e9:.3g} billion parameters; about {needed:.1f} GiB of memory in float32, of")
    print(f"{available:.1f} here; main memory per gradient or copy of the weights: {4 * n_params / memory.GIB:.2g} GiB")
    print("the settings are right; --dry_run ends here")


def load_policy(args):
    """Load (the policy in float32, its tokenizer) with grpo.py. ValueError if that fails."""
    of_trainer = trainer_args("grpo", args)
    checks.check_gpus(of_trainer)
    tokenizer, _ = checks.check_model(of_trainer, HEAD_CHUNK)
    return grpo.load_policy(of_trainer, trained=True), tokenizer


def digest_of(source):
    """Return sixteen hexadecimal digits for a file, a folder or a hub id, from its name and content."""
    digest = hashlib.sha256(source.encode())
    path = Path(source)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(f"{file} {files.sha256(file)}".encode())
    return digest.hexdigest()[:16]


SAMPLERS = {}  # {model: vLLM's engine}: a process can't have two


def load_batches(policy, args, count, need_gradient=True):
    """Return `count` batches of the policy's own responses, each a Sampled, from the cache if possible.

    need_gradient: ValueError if all groups of a batch have equal rewards. Batch i has its own prompts and seed.
    """
    sizes = [args.seed, args.prompts, args.responses, args.max_tokens, args.temperature]
    problems = [args.people] if args.task == "kk" else [args.task]
    if args.data:
        problems.append(digest_of(args.data))
    named = "_".join(map(str, [models.fingerprint(args.model)[:16], *sizes, *problems]))
    paths = [Path(args.cache, f"batch_{named}_{i}.pt") for i in range(count)]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    if missing:
        for i, sampled in zip(missing, sample(policy, args, missing)):
            torch.save(dataclasses.asdict(sampled), paths[i])
    batches = [Sampled(**torch.load(path)) for path in paths]
    for i, sampled in enumerate(batches):
        if need_gradient and not is_mixed(sampled, args).any():
            raise ValueError(
                f"every group of batch {i} has equal rewards ({sampled.rewards.mean():g} on average), so there is no "
                "gradient to measure: take a model that is right at times, easier problems (--people 2) or more "
                "--responses"
            )
    return batches


def is_mixed(sampled, args):
    """Return which groups have different rewards, bools [groups]; the others have no advantage."""
    groups = sampled.rewards.view(-1, args.responses)
    return (groups != groups[:, :1]).any(1)


def sample(policy, args, numbers):
    """Sample the batches with these numbers, one after the other, with one engine."""
    of_trainer = trainer_args("grpo", args)
    _, tokenizer = checks.read_config(args.model)
    task, train, _ = load_task(of_trainer, tokenizer)
    if len(train) < args.prompts:
        raise ValueError(f"--prompts is {args.prompts}, but there are {len(train)} problems")
    memory.keep_freed_memory()
    if args.model not in SAMPLERS:
        SAMPLERS[args.model] = grpo.load_sampler(of_trainer)
    llm = SAMPLERS[args.model]
    grpo.sync_weights(policy, llm, of_trainer)
    made = []
    for number in numbers:
        problems, _ = next_problems(train, number * args.prompts, of_trainer)  # one per response
        batch, responses = grpo.sample(llm, problems, number, of_trainer)
        scores = score(task, responses, problems)
        batch["old_logp"], batch["entropy"] = grpo.log_probs(policy, batch, of_trainer)  # [N, T]
        batch["ref_logp"] = batch["old_logp"]  # as at the first step of a run
        made.append(
            Sampled(
                batch=batch,
                rewards=torch.tensor([s["reward"] for s in scores]),
                prompts=[p["messages"][-1]["content"] for p in problems[:: args.responses]],
                correct=[bool(s["correct"]) for s in scores],
            )
        )
    sampler.sleep(llm)  # on a GPU, the measurement gets its memory until the next sync_weights
    return made


def with_advantages(script, sampled, args):
    """Return the batch as the script's main passes it to its update. args: the script's own settings."""
    return updates.with_advantages(script, sampled.batch, sampled.rewards, sampled.correct, args)


def for_grpo(sampled, args):
    """Return (grpo.py's settings without a KL term, the batch as its main passes it to its update)."""
    of_script = trainer_args("grpo", args, kl_coef=0.0)
    return of_script, with_advantages("grpo", sampled, of_script)


def bins_of(logp, edges=(0.25, 0.5, 0.75)):
    """Return each token's bin, 0 for the least probable; an edge is in the bin below. logp: any shape, in nats."""
    return torch.bucketize(logp, torch.tensor(edges, dtype=torch.float64).log().to(logp))


def mean_of(values, chosen, empty=None):
    """Return the mean of the chosen values, or the fraction of true ones, [n] both; `empty` if none is chosen."""
    return values[chosen].double().mean().item() if chosen.any() else empty


def means_by_bin(values, bins, empty=None):
    return [mean_of(values, bins == i, empty) for i in range(BINS)]


def shares_of(bins):
    """Return the fraction of the tokens [n] in each bin."""
    return [(bins == i).double().mean().item() for i in range(BINS)]


def pooled(of_batches):
    """Merge [{name: values [n] of a batch's tokens}, …] into {name: the values of all batches}."""
    return {name: torch.cat([values[name] for values in of_batches]) for name in of_batches[0]}


def fine_log_probs(policy, batch, args):
    """Return the log-probability of each response token, [N, T] in float64, with all digits near 0. args: grpo.py's.

    float32 has no number between 1 and 1 − 6e-8. So the computation on the float32 logits is in float64.
    """

    def head(states, targets, temperature, with_entropy):
        logits = policy.lm.lm_head(states).double()  # [n, vocabulary]
        all_log_probs = (logits / temperature).log_softmax(-1)
        logp = all_log_probs.gather(-1, targets[:, None])[:, 0].float()
        return logp, torch.zeros_like(logp)

    policy.head = head
    logp, _ = grpo.log_probs(policy, batch, args, with_entropy=False)
    del policy.head
    return logp.double()


def gradient_of(policy, batch, args):
    """Return the gradient of GRPO's loss, a list of tensors, by its own update(). args: grpo.py's settings.

    With kl_coef 0, advantages choose the tokens. The divisor counts all tokens, so the parts of a batch add up to it.
    """
    recorder = updates.Recorder(policy)
    grpo.update(policy, recorder, batch, 1, args)
    return add(recorder.gradients)


def gradient_of_tokens(policy, batch, chosen, args):
    """Return the part of gradient_of that comes from the chosen tokens, bool [N, T]."""
    return gradient_of(policy, batch | {"advantages": batch["advantages"] * chosen}, args)


def norms_by_bin(policy, batch, args):
    """Return {norm: of each bin's part of GRPO's gradient, lowest probability first; norm_share: of their sum}."""
    bins = bins_of(batch["old_logp"])  # [N, T]
    norms = [norm(gradient_of_tokens(policy, batch, bins == i, args)) for i in range(BINS)]
    return {"norm": norms, "norm_share": [one / max(sum(norms), 1e-300) for one in norms]}


def add(gradients):
    """Return the sum of several gradients, each a list of tensors."""
    return [sum(parts) for parts in zip(*gradients)]


def copy_weights(policy):
    """Return a copy of the weights, a list of tensors in main memory."""
    return [weight.detach().to("cpu", copy=True) for weight in policy.parameters()]


@torch.no_grad()
def set_weights(policy, values):
    """Give the policy these weights, a list from copy_weights."""
    for weight, value in zip(policy.parameters(), values):
        weight.copy_(value)


def dot(some, others):
    """Return the inner product of two lists of tensors, as if each were one long vector."""
    return sum((a.double() * b.double()).sum().item() for a, b in zip(some, others))


def norm(tensors):
    """Return the Euclidean norm of all numbers in a list of tensors."""
    return math.sqrt(dot(tensors, tensors))


def angle(some, others):
    """Return the angle between two lists of tensors, in degrees; 90 if one is zero."""
    size = norm(some) * norm(others)
    cosine = dot(some, others) / size if size else 0.0
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))


def mean_and_error(values):
    """Return (mean, standard error of the mean, or 0 for a single value) over batches."""
    return fmean(values), float(stats.sem(values)) if len(values) > 1 else 0.0


def over_batches(rows):
    """Turn [a batch's tree of numbers, …] into one tree with [mean, standard error] over values that are not None."""
    if isinstance(rows[0], dict):
        return {name: over_batches([row[name] for row in rows]) for name in rows[0]}
    if isinstance(rows[0], list):
        return [over_batches(list(values)) for values in zip(*rows)]
    there = [value for value in rows if value is not None]
    return list(mean_and_error(there)) if there else None


def correlation(a, b):
    """Return Pearson's correlation of two vectors; 0 if one is constant or has fewer than three numbers."""
    found = torch.corrcoef(torch.stack([a, b]))[0, 1].item() if len(a) > 2 else 0.0
    return 0.0 if math.isnan(found) else found


def rank_correlation(a, b):
    """Return Spearman's correlation of two vectors; 0 if one is constant or has fewer than three values."""
    ranks = [torch.from_numpy(stats.rankdata(values.double().cpu())) for values in (a, b)]
    return correlation(*ranks)


def finish(args, name, result):
    """Write OUT/NAME.json, with the facts needed to repeat it, and print the verdicts."""
    command = ["python", "-m", f"lab.{name}", *sys.argv[1:]]
    about = records.provenance() | {
        "script": f"lab.{name}",
        "code": kept.code_of(f"lab.{name}"),
        "command": shlex.join(command),
        "seconds": round(time.monotonic() - STARTED, 1),
        "cores": len(machine.cores()),
        "device": str(DEVICE),
        "settings": dataclasses.asdict(args),
    }
    text = json.dumps(rounded(about | result), indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^][{}\"]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)  # a list of numbers: one line
    files.write(Path(args.out, f"{name}.json"), text + "\n")
    print("\n".join(claims.of_file(name, Path(args.out))))


def rounded(value):
    """Round a value for JSON: five significant digits in its floats."""
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.5g}"))


def bars(axes, places, pairs, width=0.8, decimals=0, **look):
    """Plot bars with their standard errors, and their heights as text. pairs: [mean, standard error] per bar."""
    heights, errors = zip(*pairs)
    drawn = axes.bar(places, heights, width, yerr=errors, ecolor="black", capsize=3, **look)
    axes.bar_label(drawn, [f"{height:,.{decimals}f}" for height in heights], padding=3, fontsize="small")


def points(axes, places, pairs, fmt, **look):
    """Plot markers with their standard errors. pairs: [mean, standard error] per place, or None."""
    there = [(place, *pair) for place, pair in zip(places, pairs) if pair]
    xs, means, errors = zip(*there) if there else ((), (), ())
    axes.errorbar(xs, means, yerr=errors, fmt=fmt, markersize=7, capsize=3, **look)


def percent(pairs):
    return [[100 * value for value in pair] for pair in pairs]


def draw_shares(panels, averages):
    """Plot the fractions of tokens and of gradient norms by bin. averages: {name: from over_batches}."""
    parts = ("share of the tokens [%]", "share of the gradient norms [%]")
    width = 0.8 / len(averages)
    for axes, key, title in zip(panels, ("share", "norm_share"), parts):
        for number, (name, average) in enumerate(averages.items()):
            places = [i + width * (number + 0.5) - 0.4 for i in range(BINS)]
            bars(axes, places, percent(average[key]), 0.95 * width, color=curves.COLOURS[number], label=name)
        axes.set_xticks(range(BINS), BIN_NAMES)
        axes.set(title=title, ylim=(0, 105))
    if len(averages) > 1:
        panels[0].legend(frameon=False, loc="upper left")


def picture_of_shares(title, averages, args, name):
    figure = curves.new_figure(curves.WIDTH, 5.5, title)
    draw_shares(figure.subplots(1, 2), averages)
    save_figure(figure, args, name)


def save_figure(figure, args, name):
    curves.save(figure, [Path(args.out, f"{name}.png")])
