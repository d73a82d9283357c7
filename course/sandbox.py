"""Runs a function that somebody else wrote, in a process of its own with a time limit, and says what it gave.

    with Sandbox() as sandbox:
        sandbox.attempt(file, "leave_one_out", [{"rewards": …, "group_size": 2}])

The process knows the arguments alone: no expected number, no solution and no comparison is in it. Whatever the function
patches, prints or looks up, the verdict is made elsewhere, of the tensors that come back. The process may read Python's
own files and the checked one. It may not write, start programs, send signals or use the network.

This keeps out what a student thinks of, and a file that would delete others by mistake. It is no wall against somebody
who knows CPython by heart: run the code of strangers in a container.

Run as a script (`python -I course/sandbox.py`), this file is the server: it imports torch once and forks a process for
each function. Like those, it holds nothing that is worth reading.
"""

import contextlib
import importlib.util
import io
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 20  # for all calls of one function
MEMORY = 4 << 30  # bytes that a function may take, beside what torch has
LARGEST = 64 << 20  # bytes of what it gives, and of what it prints
MOST_PRINTED = 2000  # characters that are kept of it
GENERATOR = "seed of a generator"

# ----------------------------------------------------------------------------------------------------------- one call


@dataclass
class Outcome:
    """What one call gave. parts: its tensors, one unless it gave a tuple; of anything else the name of its type."""

    parts: list
    is_tuple: bool
    has_gradient: bool
    gradient: torch.Tensor | None  # of a weighted sum of the result, by the argument that the exercise names
    changed: str  # the argument that the function changed, or ""
    drew: bool  # from every generator that it was given


def fresh(arguments, gradient_of=""):
    """The arguments, copied: a function can't change the next call's. {GENERATOR: seed} becomes a generator."""
    copies = {}
    for name, value in arguments.items():
        if isinstance(value, dict):
            value = torch.Generator().manual_seed(value[GENERATOR])
        elif isinstance(value, torch.Tensor):
            value = value.clone()
        if name == gradient_of:
            value.requires_grad_()
        copies[name] = value
    return copies


def call(function, arguments, gradient_of=""):
    """The Outcome of a function for some arguments. Whatever the function raises comes through."""
    given = fresh(arguments, gradient_of)
    generators = [value for value in given.values() if isinstance(value, torch.Generator)]
    before = [generator.get_state() for generator in generators]
    value = function(*given.values())
    is_tuple = isinstance(value, tuple | list)
    parts = []
    for part in value if is_tuple else [value]:
        if isinstance(part, bool | int | float):
            part = torch.tensor(part, dtype=torch.bool if isinstance(part, bool) else torch.float64)
        parts.append(part)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    has_gradient = any(part.requires_grad for part in tensors)
    gradient = None
    if gradient_of and has_gradient:
        # With different weights, so that a gradient in the wrong place shows.
        total = sum((part * torch.arange(1, part.numel() + 1).view(part.shape)).sum() for part in tensors)
        (gradient,) = torch.autograd.grad(total, given[gradient_of], allow_unused=True)
    return Outcome(
        parts=[plain(part) for part in parts],
        is_tuple=is_tuple,
        has_gradient=has_gradient,
        gradient=None if gradient is None else plain(gradient),
        changed=next((name for name, value in arguments.items() if not unchanged(value, given[name])), ""),
        drew=not any(torch.equal(generator.get_state(), state) for generator, state in zip(generators, before)),
    )


def plain(part):
    """A tensor without gradient, memory of its own and no subclass; the type's name of anything else."""
    if not isinstance(part, torch.Tensor):
        return type(part).__name__
    return part.detach().as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)


def unchanged(value, after):
    if not isinstance(value, torch.Tensor):
        return True
    return value.shape == after.shape and torch.allclose(value.double(), after.double(), rtol=0, atol=0, equal_nan=True)


def attempt(function, all_arguments, gradient_of="", file=__file__):
    """{"outcomes": [an Outcome for each arguments]}, or {"error": what the function raised, "at": with which of them}.

    file: where the function is written.
    """
    outcomes = []
    for i, arguments in enumerate(all_arguments):
        try:
            outcomes.append(call(function, arguments, gradient_of))
        except BaseException as error:  # SystemExit, too
            return {"error": described(error, file), "at": i}
    return {"outcomes": outcomes}


def described(error, file):
    """What an exception says: type, text, and the last line of the file that it came through (0: none)."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else 0)
    return {"type": type(error).__name__, "text": str(getattr(error, "msg", error))[:500], "line": line}


# --------------------------------------------------------------------------------------------- the function's process


def load(file):
    """The module of a file. Errors of the file come through."""
    spec = importlib.util.spec_from_file_location(f"checked_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_function(request, harness):
    """What `attempt` gives for the function of a file, or {"unreadable": error} or {"missing": True}.

    With a harness, a module, it is {"gave": what its run() gives}.
    """
    file = Path(request["file"])
    try:
        module = load(file)
    except BaseException as error:
        return {"unreadable": described(error, file)}
    if harness:
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


REFUSED = (  # audit events, by what they begin with
    "ctypes.", "ftplib.", "http.", "os.chmod", "os.chown", "os.exec", "os.fork", "os.kill", "os.link", "os.mkdir",
    "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.rmdir", "os.spawn", "os.symlink", "os.system",
    "os.truncate", "os.utime", "pty.", "shutil.", "signal.", "socket.", "subprocess.", "syslog.", "urllib.",
)  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def guard(file, may_also_read=()):
    """An audit hook that refuses what a function has no need of. may_also_read: folders of the repository."""
    environment, python = os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)
    libraries = os.path.realpath(os.path.dirname(os.__file__))
    inside = os.path.commonpath

    def may_read(path):
        path = os.path.realpath(os.fsdecode(path))
        if path in (str(file), os.devnull, "/dev/urandom"):
            return True
        if environment != python and inside([path, environment]) == environment:
            return True  # a virtual environment, which may lie in the repository
        if inside([path, str(ROOT)]) == str(ROOT):
            return any(inside([path, str(ROOT / folder)]) == str(ROOT / folder) for folder in may_also_read)
        return any(inside([path, folder]) == folder for folder in (python, libraries))

    def hook(event, arguments):
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed in a function that is checked")
        if event == "open" and not isinstance(arguments[0], int):
            path, _, flags = arguments
            if flags & WRITES or not may_read(path):
                name = os.path.basename(os.fsdecode(path))
                raise PermissionError(f"{name} may not be opened in a function that is checked: use its arguments")

    return hook


def become_child(request, result, printed, leave=os._exit, save=torch.save):
    """Runs the request, writes what comes back to the open file `result`, and ends the process."""
    # A group of its own, which can be ended as a whole. A session of its own would get little processor time on a busy
    # machine: Linux shares it out between sessions first.
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, printed.fileno()), (2, printed.fileno())):
        os.dup2(source, target)  # also closes the way to the checker
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_AS: pages * resource.getpagesize() + MEMORY,
        resource.RLIMIT_FSIZE: LARGEST,
        resource.RLIMIT_CPU: int(request["seconds"]) + 2,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    harness = load(Path(request["harness"])) if request["harness"] else None
    sys.addaudithook(guard(request["file"], harness.MAY_READ if harness else ()))
    try:
        save(run_function(request, harness), result)
        result.flush()
        sys.stdout.flush()
    finally:
        leave(0)


def serve():
    """Answers requests from stdin until it ends."""
    torch.set_num_threads(1)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    send(answers, {"ready": True})
    while (request := receive(requests)) is not None:
        if request["harness"]:
            load(Path(request["harness"]))  # imports what it needs, once for all processes
        with tempfile.TemporaryFile() as result, tempfile.TemporaryFile() as printed:
            child = os.fork()
            if child == 0:
                answers.close()
                become_child(request, result, printed)
            ended = wait(child, request["seconds"])
            result.seek(0)
            printed.seek(0)
            text = printed.read(4 * MOST_PRINTED).decode(errors="replace")[:MOST_PRINTED]
            written = result.read().decode("latin-1")  # a text, since `receive` takes no bytes
            send(answers, {"ended": ended, "result": written, "printed": text})


def wait(child, seconds):
    """How the process ended: its exit code, minus a signal's number, or "time" if it had to be ended."""
    descriptor = os.pidfd_open(child)
    ready, _, _ = select.select([descriptor], [], [], seconds)
    os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):  # also what it may have left behind
        os.killpg(child, signal.SIGKILL) if not ready else None
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL) if not ready else None
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ready else "time"


# --------------------------------------------------------------------------------------------------- the checker's side


def send(stream, message):
    """A dictionary of numbers, texts and tensors, with its length before it."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    stream.write(len(buffer.getvalue()).to_bytes(8, "big") + buffer.getvalue())
    stream.flush()


def receive(stream):
    """The next message, or None if there is none. No code in it is run: weights_only."""
    length = stream.read(8)
    if len(length) < 8:
        return None
    return torch.load(io.BytesIO(stream.read(int.from_bytes(length, "big"))), weights_only=True)


class Sandbox:
    """The server, and questions to it."""

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.server.stdin.close()
        self.server.wait()

    def start(self):
        self.server = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if receive(self.server.stdout) is None:  # -I: only packages of the environment itself are seen
            raise RuntimeError("the process that runs the functions could not start; what it says stands above")

    def attempt(self, file, function, all_arguments, gradient_of="", seconds=SECONDS, harness=""):
        """As the function `attempt`, for the function of this name in a file.

        harness: a Python file that is trusted, whose run() calls functions of the file. Then it is {"gave": what it
        gave}, and "error" if one failed.

        Other answers: {"unreadable": error of the file}, {"missing": True}, {"ended": "time", or the exit code of a
        process that gave nothing}. All have "printed": what the file printed.
        """
        request = {"file": str(file), "function": function, "arguments": all_arguments}
        request |= {"gradient_of": gradient_of, "seconds": float(seconds), "harness": str(harness)}
        try:
            send(self.server.stdin, request)
            answer = receive(self.server.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:  # the server itself is gone
            self.server.wait()
            self.start()
            return {"ended": -signal.SIGKILL, "printed": ""}
        return read_result(answer, len(all_arguments)) | {"printed": answer["printed"]}


def read_result(answer, count):
    """What a function's process wrote, made sure of: it may have written anything."""
    if answer["ended"] == "time":
        return {"ended": "time"}
    try:
        found = torch.load(io.BytesIO(answer["result"].encode("latin-1")), weights_only=True)
        if "gave" in found:
            return found
        for other in ("unreadable", "missing", "error"):
            if other in found:
                return {other: found[other], "at": found.get("at", 0)}
        outcomes = [Outcome(**outcome) for outcome in found["outcomes"]]
    except Exception:
        outcomes = []
    return {"outcomes": outcomes} if len(outcomes) == count else {"ended": answer["ended"]}


if __name__ == "__main__":
    serve()
