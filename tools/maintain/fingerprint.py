"""Tell whether the numbers that the trainers compute have changed: two steps of every script, to the last digit.

    python -m tools.maintain.fingerprint                    compares with the commit since which digits count (see base)
    python -m tools.maintain.fingerprint --against REV      compares with another revision
    python -m tools.maintain.fingerprint --only grpo ppo    only some of the entries

The files of the other revision come from git archive, and both run here, with the same libraries and flags. It
compares the metrics of both steps and the SHA-256 of the weights. If some differ, it prints each entry's first
difference, and the exit code is 1. A change of comments, names or layout must not change a digit. A change of the
computation changes some: add a line to tests/digits.txt, in the same commit. Each side runs in one process, on one
thread of the CPU, with one vLLM engine.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from runtime import flags
from tools import family
from tools.doctor import CHANGES

ROOT = Path(__file__).parents[2]
MOVED = "tests/digits.txt"  # digits count since the commit that last changed this file
OF_DIGITS = [":(glob)*.py", "runtime", "rewards", "models"]  # the numbers depend on these git paths
SMALL = """--model models/kk_tiny --task kk --steps 2 --save_every 1 --prompts_per_step 4 --max_response_tokens 48
    --micro_batch_tokens 2000 --eval_size 4 --seed 7 --dtype float32""".split()
# For all scripts but sft.py. Temperature 1 would hide a script that forgets the temperature.
SAMPLED = "--responses_per_prompt 4 --temperature 0.8 --kv_cache_gb 0.25".split()
# name: script and flags, which override SMALL and SAMPLED. Every script has an entry under its own name.
ENTRIES = {script: script for script in (*family.family(), *family.own_scripts())} | {
    "sft": "sft --max_response_tokens 640",
    "grpo, bfloat16": "grpo --dtype bfloat16",
    "grpo, no prompt shared": "grpo --gradient_checkpointing",
    "grpo, countdown": "grpo --task countdown",
    "grpo, four updates, no KL": "grpo --updates_per_step 4 --kl_coef 0",
    "cispo, gated": "cispo --gated",
    "rloo, KL in the reward": "rloo --kl_coef 0.05",
    "dppo": "dppo --updates_per_step 4",
    "entropy_bonus, target": "entropy_bonus --entropy_target 9",
    "grpo_tis, responses left out": "grpo_tis --mask sequence --mask_delta 0 --updates_per_step 4",
    # At step 1 the student is the teacher, and only the large weight decay moves it away. Step 2 distils.
    "opd": "opd --teacher models/kk_tiny --lr 0.02 --weight_decay 1",
}

# Runs many scripts in one process. argv: a file with {name: [script, flags]}, one for the result of each.
WORKER = '''
import importlib, json, os, shutil, sys, traceback
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, os.getcwd())
runs = {}
if __name__ == "__main__":  # and not in the sampler's process of grpo_async.py, which imports this file, too
    path, result, core = sys.argv[1:]  # a run gets other words
    runs = json.load(open(path))
    os.sched_setaffinity(0, {int(core)})
import torch
import rewards.examples
from runtime import records
torch.set_num_threads(1)
torch.distributed.destroy_process_group = lambda *groups: None  # at the end of a run; the engine's must live on
records.Records.plot = lambda self: None  # it takes half of the time of so short a run, and no number is in it
OF_PROBLEMS = "task data test_data people numbers chat_template max_prompt_tokens eval_size seed model".split()

def once(load, key_of, kept):
    """load, which gives again what it gave for the same key."""
    def load_once(args, *rest):
        key = key_of(args)
        if key not in kept:
            kept[key] = load(args, *rest)
        return kept[key]
    return load_once

for data in (rewards, rewards.examples):
    data.load_task = once(data.load_task, lambda args: tuple(getattr(args, name, None) for name in OF_PROBLEMS), {})
size_of = lambda args: (args.dtype, args.max_prompt_tokens + args.max_response_tokens)
engines = {}  # a run begins by giving its engine its weights, so that one serves all of a size
ended = {}
for name, (script, flags) in runs.items():
    try:
        trainer = importlib.import_module(script)
        if hasattr(trainer, "load_sampler"):
            trainer.load_sampler = once(trainer.load_sampler, size_of, engines)
        sys.argv = [f"{script}.py", *flags]
        if flags[0] == "--resume":  # RUN/checkpoints/STEP: what the run has so far is kept beside it
            run = os.path.dirname(os.path.dirname(flags[1]))
            shutil.copytree(run, f"{run}_unbroken")
        torch.manual_seed(0)
        trainer.main()
        ended[name] = "done"
    except BaseException:
        ended[name] = traceback.format_exc()
    json.dump(ended, open(result, "w"))
'''


@dataclass
class Args:
    """The revisions and entries to compare."""

    against: str = ""  # a revision; empty: the commit since which digits count
    only: list[str] = field(default_factory=list)  # the entries to run; empty: all


def git(*words):
    """Return a git command's output. ValueError with git's message if it fails, or if there is no git."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"git {words[0]}: {error.strerror}") from None
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def base():
    """Return the revision since which digits count: the last to change MOVED, or the last release's tag if newer.

    Before either, the parent commit; "" if nothing has changed since that numbers depend on, or if MOVED has an
    uncommitted line. ValueError if git can't say: without git, or in a clone without history.
    """
    if git("rev-parse", "--is-shallow-repository") == "true":
        raise ValueError("this clone has no history: git fetch --unshallow")
    if Path(git("rev-parse", "--show-toplevel")) != ROOT:
        raise ValueError(f"{ROOT} is no git repository of its own")
    if git("status", "--porcelain", "--", MOVED):
        return ""
    tags = git("tag", "--merged", "HEAD", "--sort=-creatordate").splitlines()
    since = git("log", "-1", "--format=%h", *([f"{tags[0]}..HEAD"] if tags else []), "--", MOVED)
    revision = since or (tags[0] if tags else "HEAD~1")
    same = not git("diff", "--name-only", revision, "--", *OF_DIGITS)
    return "" if same and not git("ls-files", "-o", "--exclude-standard", "--", *OF_DIGITS) else revision


@contextmanager
def files_of(revision):
    """Provide a temporary folder with the files of a revision. ValueError if there is no such revision."""
    with tempfile.TemporaryDirectory() as folder:
        git("archive", "--output", f"{folder}/tree.tar", revision)
        shutil.unpack_archive(f"{folder}/tree.tar", f"{folder}/tree")
        yield Path(folder, "tree")


def command(name, folder):
    """Return (script, flags) of an entry, whose run goes to a folder."""
    script, *flags = ENTRIES[name].split()
    return script, [*SMALL, *(SAMPLED if script != "sft" else []), *flags, "--run_dir", str(folder)]


def in_python(words, root):
    return subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True)


def train(tree, runs, folder, place=0, launch=in_python):
    """Run scripts of a tree: runs is {name: (script, flags)}. Return {name: "done" or a traceback}.

    place: which of this process's cores they use; launch: runs a Python program in a folder.
    """
    cores = sorted(os.sched_getaffinity(0))
    core = str(cores[place % len(cores)])
    (folder / "runs.json").write_text(json.dumps(runs))
    (folder / "worker.py").write_text(WORKER)
    done = launch([folder / "worker.py", folder / "runs.json", folder / "ended.json", core], root=tree)
    ended = json.loads((folder / "ended.json").read_text()) if (folder / "ended.json").exists() else {}
    last = f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    return {name: ended.get(name, last) for name in runs}


def numbers_of(folder):
    """Return a run's metrics, without seconds and memory: a row per step, and one with its weights' SHA-256."""
    import torch
    from safetensors.torch import load_file

    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    rows = [{key: row[key] for key in row if not key.startswith(CHANGES)} for row in rows]
    digest = hashlib.sha256()
    last = max(Path(folder, "checkpoints").glob("step_*"))
    for name, weight in sorted(load_file(last / "model.safetensors").items()):
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return [*rows, {"step": rows[-1]["step"], "SHA-256 of the weights": digest.hexdigest()}]


def measure(tree, names, place=0, launch=in_python):
    """Return {entry: its numbers} of a tree's scripts. RuntimeError with a traceback if one fails. Rest: see train."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder, str(i)) for i, name in enumerate(names)}
        ended = train(tree, {name: command(name, folders[name]) for name in names}, Path(folder), place, launch)
        for name, how in ended.items():
            if how != "done":
                raise RuntimeError(f"{name}, in {tree}: {how}")
        return {name: numbers_of(folders[name]) for name in names}


def differences(before, after):
    """Return the first differing number of each entry that differs, one line each. A new metric is no difference."""
    lines = []
    for name, rows in before.items():
        for old, new in zip(rows, after[name]):
            if moved := [key for key in old if old[key] != new.get(key)]:
                key = moved[0]
                lines.append(f"{name}, step {old['step']}, {key}: {old[key]} -> {new.get(key)}")
                break
        else:
            if len(rows) != len(after[name]):
                lines.append(f"{name}: {len(rows)} rows -> {len(after[name])}")
    return lines


def main(args):
    with flags.errors_in_one_line():
        if unknown := set(args.only) - ENTRIES.keys():
            raise ValueError(f"--only {', '.join(sorted(unknown))}: ENTRIES in fingerprint.py has {'; '.join(ENTRIES)}")
        revision = args.against or base()
        if not revision:
            print(f"nothing to compare: no code has changed since {MOVED} has, or it has a new line")
            return
        with files_of(revision) as tree:
            names = [name for name in args.only or ENTRIES if (tree / f"{ENTRIES[name].split()[0]}.py").exists()]
            with ThreadPoolExecutor() as threads:
                before, after = threads.map(measure, (tree, ROOT), (names, names), (0, 1))
    lines = differences(before, after)
    print("\n".join(lines) or f"{len(names)} entries, against {revision}: no digit has moved")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
