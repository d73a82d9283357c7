"""Run a function that somebody else wrote in a separate process with a time limit, and report its results.

    attempt_file(file, "leave_one_out", [{"rewards": …, "group_size": 2}])

The process gets only the arguments, no expected number and no comparison. The parent process judges the tensors that
come back. Your own files run with your rights, and can't open the solutions by accident. course/grade.py runs other
people's files in a jail (course/jail.py).
"""

import contextlib
import copy
import importlib
import importlib.util
import io
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = re.compile(rf"{re.escape(str(ROOT))}/course/lesson_\d+/(__pycache__/)?solution")
SECONDS = 20  # limit for all calls of one function; half of it in CPU time
MOST_PRINTED = 2000  # characters kept of the function's output
GENERATOR = "seed of a generator"


@dataclass
class Outcome:
    """The result of one call. parts: its tensors, one unless it is a tuple; for anything else the name of its type."""

    parts: list
    is_tuple: bool
    has_gradient: bool
    gradient: torch.Tensor | None  # of a weighted sum of the result, with respect to the argument named by the exercise
    changed: str  # the argument that the function changed, or ""
    drew: bool  # whether it used every generator that it was given


def call(function, arguments, gradient_of=""):
    """Return the Outcome of a function for some arguments. The function's exceptions are not caught.

    The function gets copies of the arguments; {GENERATOR: seed} becomes a generator.
    """
    given = copy.deepcopy(arguments)
    seeds = {name: value[GENERATOR] for name, value in arguments.items() if isinstance(value, dict)}
    generators = {name: torch.Generator().manual_seed(seed) for name, seed in seeds.items()}
    before = [generator.get_state() for generator in generators.values()]
    if gradient_of:
        given[gradient_of].requires_grad_()
    value = function(*(given | generators).values())
    is_tuple = isinstance(value, tuple | list)
    parts = list(value) if is_tuple else [value]
    kinds = {bool: torch.bool, int: torch.float64, float: torch.float64}
    parts = [torch.tensor(part, dtype=kinds[type(part)]) if type(part) in kinds else part for part in parts]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    has_gradient = any(part.requires_grad for part in tensors)
    gradient = None
    if gradient_of and has_gradient:
        # Different weights expose a gradient in the wrong position.
        total = sum((part * torch.arange(1, part.numel() + 1).view(part.shape)).sum() for part in tensors)
        (gradient,) = torch.autograd.grad(total, given[gradient_of], allow_unused=True)
    return Outcome(
        parts=[plain(part) for part in parts],
        is_tuple=is_tuple,
        has_gradient=has_gradient,
        gradient=None if gradient is None else plain(gradient),
        changed=next((name for name, value in arguments.items() if not unchanged(value, given[name])), ""),
        drew=not any(torch.equal(one.get_state(), state) for one, state in zip(generators.values(), before)),
    )


def plain(part):
    """Copy a tensor, without gradient, views and subclass; for anything else return the name of its type."""
    if not isinstance(part, torch.Tensor):
        return type(part).__name__
    return part.detach().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)


def unchanged(value, after):
    if not isinstance(value, torch.Tensor):
        return True
    return value.shape == after.shape and torch.allclose(value.double(), after.double(), rtol=0, atol=0, equal_nan=True)


def attempt(function, all_arguments, gradient_of="", file=__file__):
    """Return {"outcomes": [Outcomes, by arguments]}, or {"error": the exception, "at": index}. file: the function's."""
    outcomes = []
    for i, arguments in enumerate(all_arguments):
        try:
            outcomes.append(call(function, arguments, gradient_of))
        except BaseException as error:  # SystemExit, too
            return {"error": described(error, file), "at": i}
    return {"outcomes": outcomes}


def described(error, file):
    """Describe an exception: type, text, and the last line of the file in its traceback (0: none)."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else 0)
    return {"type": type(error).__name__, "text": str(getattr(error, "msg", error))[:500], "line": line}


def load(file):
    """Import a file as a module. Its exceptions are not caught."""
    spec = importlib.util.spec_from_file_location(f"checked_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_function(request):
    """Return the result of `attempt_file`, without "ended" and "printed"."""
    file = Path(request["file"])
    try:
        module = load(file)
    except BaseException as error:
        return {"unreadable": described(error, file)}
    if request["harness"]:
        harness = importlib.import_module(request["harness"])  # takes seconds: not for a file that can't be imported
        gave = {}
        try:
            harness.run(module, request["arguments"][0], gave)
        except BaseException as error:
            return {"gave": gave, "error": described(error, file)}
        return {"gave": gave}
    function = getattr(module, request["function"], None)
    if not callable(function):
        return {"missing": True}
    done = attempt(function, request["arguments"], request["gradient_of"], file)
    if "outcomes" in done:
        done["outcomes"] = [asdict(outcome) for outcome in done["outcomes"]]
    return done


def without_solutions(file):
    """Return an audit hook that forbids to open or import any solution but the checked file."""

    def hook(event, arguments):
        if event == "open" and isinstance(arguments[0], str):
            path = os.path.realpath(arguments[0])
            if SOLUTIONS.match(path) and path != file:
                raise PermissionError("a function that is checked may not open a solution")

    return hook


def in_child(request, answers):
    """Answer a file `request` with ANSWERS/result.pt and ANSWERS/printed."""
    os.setpgid(0, 0)  # a process group can be killed as a whole
    for path, descriptor in ((os.devnull, 0), (f"{answers}/printed", 1), (f"{answers}/printed", 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    torch.set_num_threads(1)
    request = torch.load(request, weights_only=True)
    save, leave = torch.save, os._exit  # the file may replace them
    sys.addaudithook(without_solutions(request["file"]))
    limit = math.ceil(time.process_time() + request["seconds"] / 2)  # CPU time: a loop without an end uses it up first
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    save(run_function(request), f"{answers}/result.pt")
    sys.stdout.flush()
    leave(0)


def serve(requests, answers):
    """Serve a jail: for each line of standard input, a number of seconds, run REQUESTS/request.pt in a fork.

    It prints how the fork ended: its exit code, or "time".
    """
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            in_child(f"{requests}/request.pt", answers)
        end = time.monotonic() + float(line)
        while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.01)
        ended = os.waitstatus_to_exitcode(done[1]) if done[0] else "time"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not done[0]:
            os.waitpid(pid, 0)
        print(ended, flush=True)


def run_here(request, seconds):
    """Run a request like Jail.run, in a process without a jail."""
    context = multiprocessing.get_context("forkserver")  # imports torch once, and forks a process for each function
    context.set_forkserver_preload(["torch", "tyro", "rich.table", "course.sandbox"])
    with tempfile.TemporaryDirectory() as folder:
        torch.save(request, f"{folder}/request.pt")
        process = context.Process(target=in_child, args=(f"{folder}/request.pt", folder))
        process.start()
        process.join(seconds)
        ended = "time" if process.exitcode is None else process.exitcode
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that it may have left behind
        process.join()
        written = [Path(folder, name) for name in ("result.pt", "printed")]
        return ended, *(path.read_bytes() if path.is_file() else b"" for path in written)


def attempt_file(file, function, all_arguments, gradient_of="", seconds=SECONDS, harness="", jail=None):
    """Run `attempt` for the function of this name in a file. jail: its place; None: here, with your rights.

    harness: a module whose run() calls functions of the file. The result is then {"gave": its results}, and "error" if
    one failed.

    Other results: {"unreadable": the file's exception}, {"missing": True}, {"ended": "time", or the exit code of a
    process without a result}. All have "printed": the file's output.
    """
    request = {"file": str(file), "function": function, "arguments": all_arguments}
    request |= {"gradient_of": gradient_of, "harness": harness, "seconds": seconds}
    ended, result, printed = (jail.run if jail else run_here)(request, seconds)
    ended = "time" if ended == -signal.SIGXCPU else ended
    found = read_result(result, ended, len(all_arguments))
    return found | {"printed": printed.decode(errors="replace")[:MOST_PRINTED]}


def read_result(result, ended, count):
    """Read and validate the result of a function's process: it may have written anything."""
    try:
        found = torch.load(io.BytesIO(result), weights_only=True) if ended == 0 else {}
        if "outcomes" in found:
            found["outcomes"] = [Outcome(**outcome) for outcome in found["outcomes"]]
            return found if len(found["outcomes"]) == count else {"ended": ended}
        return found or {"ended": ended}
    except Exception:
        return {"ended": ended}
