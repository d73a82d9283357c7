"""Tries many faults on the files of a run, its processes, the rewards and the command lines; prints what held.

    python tools/faults.py                          everything, for an hour or more
    python tools/faults.py --only exits full_disk   some of the kinds
    python tools/faults.py --kills 50 --responses 500

Most kinds run in processes that are forked from this one, so that nothing has to be loaded again; "deaths" and "growth"
start runs as a user does. tests/test_faults.py tries each of the others once. Exit code 1 if something did not hold.
"""

import contextlib
import dataclasses
import errno
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import curves
from tools import family

ROOT = Path(__file__).parents[1]
LIMIT = 120  # seconds that one try may take


# --------------------------------------------------------------------------------------------------------------------
# Processes that fail


@dataclass
class Ended:
    """How a forked process ended."""

    code: int  # exit code, or minus the signal
    text: str  # what it wrote to stdout and stderr

    def is_one_message(self, code):
        return self.code == code and "Traceback" not in self.text


def forked(work, seconds=LIMIT, kill_after=None):
    """Runs work() in a forked process: how it ended. It is killed after `seconds`, or as early as kill_after says."""
    sys.stdout.flush()  # or the child would write it a second time
    sys.stderr.flush()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 0
            try:
                work()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
                if isinstance(ended.code, str):
                    print(ended.code, file=sys.stderr)
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 70
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code or 0)
        deadline = time.monotonic() + (kill_after or seconds)
        status = None
        while status is None:
            done, found = os.waitpid(child, os.WNOHANG)
            if done:
                status = found
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                status = os.waitpid(child, 0)[1]
            else:
                time.sleep(0.001)
        output.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), output.read().decode(errors="replace"))


FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")


class FaultAt:
    """Makes the n-th filesystem call in a folder fail, by Python's audit events; counts them if n is 0.

    how: "exit" ends the process in front of the call; "full" makes it and all later ones that write fail with ENOSPC.
    """

    def __init__(self, folder, n, how):
        self.folder, self.n, self.how = str(folder), n, how
        self.count = 0
        sys.addaudithook(self.hook)

    def hook(self, event, values):
        if event not in FILE_EVENTS or not str(values[0]).startswith(self.folder):
            return
        if event == "open" and not values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return  # reads
        self.count += 1
        if not self.n or self.count < self.n:
            return
        if self.how == "exit":
            os._exit(9)
        if event not in ("os.remove", "os.rmdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(values[0]))


def count_calls(work, folder):
    """The number of filesystem calls of work() in a folder."""

    def counted():
        fault = FaultAt(folder, 0, "")
        work()
        print(f"calls {fault.count}")

    ended = forked(counted)
    return int(ended.text.rpartition("calls ")[2])


# --------------------------------------------------------------------------------------------------------------------
# Runs


class Run:
    """A run with two checkpoints, of a policy that is as much as a checkpoint needs."""

    def __init__(self, folder):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import grpo
        from runtime import checkpoints

        torch.set_num_threads(1)
        model = ROOT / "models" / "kk_tiny"
        self.folder = folder
        sys.argv = ["grpo.py"]  # which run.json names
        self.args = grpo.Args(run_dir=str(folder), model=str(model), dtype="float32", steps=9)
        self.policy = torch.nn.Module()
        self.policy.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3, fused=True)
        for parameter in self.policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        folder.mkdir()
        for step in (1, 2):
            self.save(step)
        rows = "".join(json.dumps({"step": step, "reward": 0.5}) + "\n" for step in range(4))
        for name in ("metrics", "samples", "test_samples"):
            (folder / f"{name}.jsonl").write_text(rows)
        (folder / "args.json").write_text(json.dumps(dataclasses.asdict(self.args)))
        (folder / "run.json").write_text(json.dumps({"script": "grpo"}))
        self.checkpoints = checkpoints
        self.whole = folder.with_name("whole")
        shutil.copytree(folder, self.whole)

    def save(self, step):
        from runtime import checkpoints

        checkpoints.save(self.policy, self.optimizer, self.tokenizer, step, 10 * step, self.args)

    def restore(self):
        shutil.rmtree(self.folder)
        shutil.copytree(self.whole, self.folder)

    def records(self):
        """What resuming writes."""
        from runtime import records

        book = records.Records(self.args, {"estimated_memory_gb": 1.0})
        book.open(2)
        book.write({"step": 3, "reward": 1.0})

    def loss(self):
        """What is lost or can't go on, in words; "" if nothing."""
        from runtime import checks, settings

        newest = self.checkpoints.to_resume(str(self.folder))
        if newest is None or self.checkpoints.step_of(newest) < 2:
            return "the newest checkpoint is gone"
        if damage := self.checkpoints.damage_of(newest):
            return f"the newest checkpoint is damaged: {damage}"
        self.args.resume = str(self.folder)
        try:
            checks.check_run_folders(self.args)
            read = settings.of_resumed_run([f"--resume={self.folder}"], type(self.args))
        except ValueError as error:
            return str(error)
        finally:
            self.args.resume = ""
        if not read:
            return "the settings are gone"
        rows = [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").read_text().split("\n")[:-1]]
        return "" if rows[:3] == [0, 1, 2] else f"rows are lost: {rows}"


# --------------------------------------------------------------------------------------------------------------------
# Kinds of faults. Each gives (number of tries, [what did not hold, in words]), and what else is kept of it.


def at_every_call(run, work, how, args):
    """Lets each filesystem call of work() fail in turn, or args.calls of them."""
    run.restore()
    numbers = list(range(1, count_calls(work, run.folder) + 1))
    if args.calls:
        numbers = random.Random(args.seed).sample(numbers, min(args.calls, len(numbers)))
    broken = []
    for n in numbers:
        run.restore()

        def failing(n=n):
            FaultAt(run.folder, n, how)
            work()

        ended = forked(failing)
        if how == "full" and not ended.is_one_message(1):
            broken.append(
                f"call {n}: exit code {ended.code}, {len(ended.text.splitlines())} lines: {ended.text[-200:]}"
            )
        if words := run.loss():
            broken.append(f"call {n}: {words}")
        elif forked(lambda: run.save(7)).code:
            broken.append(f"call {n}: the next save fails")
    return len(numbers), broken


def exits(run, args):
    """The process ends in front of every filesystem call of a save."""
    return at_every_call(run, lambda: run.save(3), "exit", args)


def full_disk(run, args):
    """The disk is full from every filesystem call of a save on."""
    return at_every_call(run, lambda: run.save(3), "full", args)


def records(run, args):
    """Both of these for what resuming writes."""
    tries, broken = at_every_call(run, run.records, "exit", args)
    more, also = at_every_call(run, run.records, "full", args)
    return tries + more, broken + also


def kills(run, args):
    """SIGKILL at random moments while checkpoints are saved one after the other."""
    chance = random.Random(args.seed)
    run.restore()
    broken = []

    def saves():
        newest = run.checkpoints.step_of(run.checkpoints.all_of(run.folder)[-1])
        for step in range(newest + 1, newest + 1000):
            run.save(step)

    for kill in range(args.kills):
        forked(saves, kill_after=0.02 + chance.random())
        if words := run.loss():
            broken.append(f"kill {kill}: {words}")
            run.restore()
    return args.kills, broken


def damage(run, args):
    """A file of the newest checkpoint is cut, emptied, removed, or has one bit flipped, at a random place."""
    chance = random.Random(args.seed)
    broken = []
    names = [
        name for name in run.checkpoints.files_in(run.whole / "checkpoints" / "step_000002") if "checksums" not in name
    ]
    for n in range(args.damages):
        run.restore()
        name = names[n % len(names)]
        path = run.folder / "checkpoints" / "step_000002" / name
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content))
        how = chance.choice(["cut", "flip", "remove"])
        if how == "cut":
            path.write_bytes(content[:place])
        elif how == "flip":
            content[place] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
        else:
            path.unlink()
        try:
            run.checkpoints.check(str(run.folder))
            broken.append(f"{how} {name} at {place}: not noticed")
        except ValueError as error:
            if name not in str(error) or "step_000001 goes on" not in str(error):
                broken.append(f"{how} {name} at {place}: {error}")
    return args.damages, broken


def versions(run, args):
    """A run of another version is refused: a setting more or less, another script, a model of another shape."""
    import torch

    settings = json.loads((run.whole / "args.json").read_text())
    about = {"script": "grpo", "commit": "0123abc"}
    less = {name: value for name, value in settings.items() if name != "clip_low"}
    changes = {  # how it differs: (args.json, run.json)
        "a setting more": (settings | {"clip": 0.2}, about),
        "a setting less": (less, about),
        "a setting renamed": (less | {"clip": 0.2}, about),
        "another type of a setting": (settings | {"people": 3}, about),
        "another script": (settings, about | {"script": "ppo"}),
        "no script": (settings, {}),
    }
    broken = []
    for how, (values, made_by) in changes.items():
        run.restore()
        (run.folder / "args.json").write_text(json.dumps(values))
        (run.folder / "run.json").write_text(json.dumps(made_by))

        def resume():
            sys.argv = ["grpo.py", f"--resume={run.folder}", "--dry_run"]
            importlib.import_module("grpo").main()

        ended = forked(resume)
        if not ended.is_one_message(2) or len(ended.text.splitlines()) != 1:
            broken.append(f"{how}: exit code {ended.code}: {ended.text[-300:]}")
    run.restore()
    for how in ("a larger weight", "a weight more"):

        def load(how=how):
            lm = run.policy.lm
            if how == "a weight more":
                lm.more = torch.nn.Linear(2, 2)
            else:
                lm.model.norm.weight = torch.nn.Parameter(torch.ones(2 * len(lm.model.norm.weight)))
            optimizer = torch.optim.AdamW(run.policy.parameters())
            run.checkpoints.load(run.policy, optimizer, str(run.folder))

        ended = forked(load)
        if not ended.is_one_message(1) or len(ended.text.splitlines()) != 1:
            broken.append(f"{how}: exit code {ended.code}: {ended.text[-300:]}")
    return len(changes) + 2, broken


SIGNS = ["<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}", "{", "(1)", "knight", "knave", "\\frac{1}{2}"]
SIGNS += [*"+-*/()^=", "999999999999", "0", "1e999", "\x00", "\ud800", *"é𝟙\n ", "__"]


def responses(run, args):
    """Texts of random signs, scored by every task: no exception, and a reward that is a number."""
    broken = []
    answers = {
        "kk": {"Zoey": True, "Liam": False},
        "countdown": {"nums": [3, 5, 7], "target": 22},
        "math": ["142"],
        "hitab": [142, "north"],
    }
    for name, answer in answers.items():
        task = importlib.import_module(f"rewards.{name}")
        chance = random.Random(f"{args.seed}/{name}")
        texts = ["".join(chance.choices(SIGNS, k=chance.randrange(1, 60))) for _ in range(args.responses)]
        for start in range(0, len(texts), 500):
            some = texts[start : start + 500]
            try:
                scores = task.score_all(some, [answer] * len(some))
                if not all(isinstance(score["reward"], float | int) for score in scores):
                    broken.append(f"{name}: a reward is no number")
            except Exception as error:
                broken.append(f"{name}, responses from {start}: {type(error).__name__}: {error}")
    return len(answers) * args.responses, broken


BAD_VALUES = ["", "-1", "0", "nan", "inf", "1e400", "9" * 30, "fast", "[]", "None", "\n", "--", "a/b/c", "/proc/x", "ä"]


def may_be_right(name, default, value):
    """Whether a value of BAD_VALUES is right for a flag: judged by its text, not by the trainers' own checks."""
    if name == "run_dir":  # any folder that can be made
        return value != "/proc/x"
    if value == "None":
        return default is None
    if isinstance(default, str):
        return name in ("data", "test_data") and value == ""
    return value in ("0", "9" * 30) and not isinstance(default, bool)  # a share of 0, or very many steps


def commands(run, args):
    """Wrong values for every flag of every trainer: exit code 2 without a traceback, before anything loads."""
    chance = random.Random(args.seed)
    scripts = [importlib.import_module(name) for name in family.family()]
    broken = []
    for n in range(args.commands):
        trainer = scripts[n % len(scripts)]
        flag = chance.choice(dataclasses.fields(trainer.Args))
        value = chance.choice(BAD_VALUES)
        argv = [f"{trainer.__name__}.py", f"--{flag.name}={value}", "--dry_run"]

        def main(trainer=trainer, argv=argv):
            sys.argv = argv
            trainer.main()

        ended = forked(main)
        accepted = ended.is_one_message(0) and may_be_right(flag.name, flag.default, value)
        if not accepted and not ended.is_one_message(2):
            broken.append(f"{' '.join(argv)!r}: exit code {ended.code}: {ended.text[-200:]}")
    return args.commands, broken


SMALL = (
    "--model models/kk_tiny --people 2 --prompts_per_step 4 --responses_per_prompt 4 --max_response_tokens 48 "
    "--eval_size 4 --kv_cache_gb 0.25"
)
WITHIN = 60  # seconds in which a run has ended after one of its processes has died


def deaths(run, args):
    """One of two processes is killed at a random moment: within a minute the run ends, says which, and can go on."""
    chance = random.Random(args.seed)
    broken = []
    for n in range(args.deaths):
        if words := after_a_death(run.folder.with_name(f"deaths_{n}"), n % 2, 3 * chance.random()):
            broken.append(f"death {n}: {words}")
    return args.deaths, broken


def after_a_death(folder, rank, seconds):
    """Kills a process of a run of two, so many seconds after its first save: what does not hold then, in words."""
    from runtime import checkpoints

    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "grpo.py", *SMALL.split()]
    words += ["--run_dir", str(folder), "--steps", "1000", "--save_every", "1", "--dtype", "float32"]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        launcher = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_until(lambda: list(folder.glob("checkpoints/step_*[0-9]")), 5 * LIMIT)
        time.sleep(seconds)
        pid = processes_of(launcher.pid)[rank]
        os.kill(pid, signal.SIGKILL)
        code = launcher.wait(WITHIN)
        says = f"process {rank} (pid {pid}) has died, so the run ends: --resume {folder} goes on from"
        wait_until(lambda: last_line(log).startswith(says), 10)
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        return f"{error}: {last_line(log)}"
    finally:
        launcher.kill()
    newest = checkpoints.to_resume(str(folder))
    steps = [row["step"] for row in curves.read_rows(folder / "metrics.jsonl")]
    if code != 1:
        return f"exit code {code}"
    if damage := checkpoints.damage_of(newest):
        return f"{newest} is damaged: {damage}"
    if steps != list(range(len(steps))) or steps[-1] - checkpoints.step_of(newest) not in (0, 1):
        return f"rows of the steps {steps}, and the newest checkpoint is {newest.name}"
    return ""


def wait_until(happens, seconds):
    """Returns when it has happened. TimeoutError after so many seconds."""
    latest = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > latest:
            raise TimeoutError(f"nothing happened within {seconds} s")
        time.sleep(0.1)


def processes_of(launcher):
    """{rank: process id} of the processes that torchrun, with this process id, has started."""
    ranks = {child.pid: child.environ().get("RANK") for child in psutil.Process(launcher).children()}
    return {int(rank): pid for pid, rank in ranks.items() if rank is not None}


def last_line(log):
    return log.read_text().rstrip().rpartition("\n")[2]


SETTLED = 120  # steps, after which all lengths have come and their kernels are kept
MOST_GROWTH = 0.02  # as a share


def growth(run, args):
    """A run of many steps: after step 120 its peak memory grows by less than 2 %."""
    folder = run.folder.with_name("growth")
    words = ["grpo.py", *SMALL.split(), "--run_dir", str(folder)]
    words += ["--steps", str(args.steps), "--save_every", "50", "--eval_every", "50"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return args.steps, [f"exit code {done.returncode}: {done.stderr[-300:]}"]
    peaks = {row["step"]: row["peak_memory_gb"] for row in curves.read_rows(folder / "metrics.jsonl")[1:]}
    kept = {f"GiB at step {step}": round(peaks[step], 3) for step in (20, SETTLED, args.steps)}
    grown = peaks[args.steps] / peaks[SETTLED] - 1
    return args.steps, [] if grown < MOST_GROWTH else [f"{kept}"], kept


KINDS = {
    kind.__name__: kind
    for kind in (exits, full_disk, records, kills, damage, versions, responses, commands, deaths, growth)
}


@dataclass
class Args:
    """What to try, and how often."""

    only: list[Literal[*KINDS]] = field(default_factory=list)  # kinds of faults; empty: all
    calls: int = 0  # exits, full_disk and records: so many filesystem calls, drawn at random; 0: all
    kills: int = 1000  # kills at random moments of saves
    damages: int = 200  # files damaged at random places
    responses: int = 20_000  # fuzzed responses for each task
    commands: int = 300  # bad command lines
    deaths: int = 4  # runs of two processes of which one is killed
    steps: int = 200  # of the run whose memory may not grow
    seed: int = 0  # of everything that is random
    out: str = ""  # a file for the results, as JSON; empty: none


def main(args):
    results = {}
    print("| kind | tries | did not hold | seconds | what it is |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        run = Run(Path(folder, "run"))
        for name in args.only or KINDS:
            started = time.monotonic()
            tries, broken, *kept = KINDS[name](run, args)
            seconds = time.monotonic() - started
            results[name] = {"tries": tries, "broken": broken, "seconds": round(seconds)}
            if kept:
                results[name]["kept"] = kept[0]
            print(f"| {name} | {tries} | {len(broken)} | {seconds:.0f} | {KINDS[name].__doc__} |", flush=True)
    for name, result in results.items():
        for words in result["broken"]:
            print(f"{name}: {words}", file=sys.stderr)
    if args.out:
        from runtime import files, records

        files.write(Path(args.out), json.dumps(records.provenance() | {"results": results}, indent=1) + "\n")
    sys.exit(1 if any(result["broken"] for result in results.values()) else 0)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
