"""Compare mathematical answers in processes that can be killed without harm to the trainer.

A worker is a `python -m rewards.workers`, without torch. It has none of the trainer's environment and, if the system
allows it, no network and no root rights. It reads a line of JSON and writes a line of JSON. A job is [answer, golds]
(does the answer equal any of the golds?) or [gold, null] (can the gold be read?). A reply is [true or false, seconds],
or null if the comparison ended the process.

Workers are not forked from the trainer, because it has threads and a GPU. multiprocessing's spawn does not start them,
because it runs the trainer's file again. A worker has no threads and forks a copy of itself to compare answers. So an
answer kills only the copy, and the next copy need not import the library again.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from rewards.equality import readable, same

ROOT = Path(__file__).resolve().parents[1]

# Seconds of processor time per answer, which a busy machine does not change. Measured for 4,988 pairs of the real
# data's 2,138 golds in LaTeX (with themselves, with their neighbours and as x = gold), on one slow core: median 0.013,
# mean 0.032, 99 % below 0.23, 99.9 % below 0.73. Three take longer; none of them is right.
TIME_LIMIT = 1
# Seconds of processor time for all answers of one call: a fixed part, plus a part per answer, eight times the mean
# above. Only hostile answers can spend them; the remaining answers then count as timed out.
BATCH_LIMIT, BATCH_LIMIT_PER_ANSWER = 10, 0.25
WALL_LIMIT = 30  # wall-clock seconds per answer, if TIME_LIMIT fails
START_LIMIT = 120  # seconds for a worker to start; usually 1
MEMORY_LIMIT = 4 << 30  # bytes of address space per worker
MAX_WORKERS = 4


class Worker:
    """One worker process. It starts on the first job, and again after its death."""

    process = None
    seconds = 0.0  # processor time of the last job

    def ask(self, job):
        """Return the reply, True or False, or None if the job exceeded a limit and was killed."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            reply = json.loads(self.read_line(WALL_LIMIT))
        except (OSError, ValueError):  # a broken pipe; no line or an incomplete one
            self.kill()
            reply = None
        verdict, self.seconds = reply or (None, TIME_LIMIT)
        return verdict

    def start(self) -> None:
        # The path is explicit because PYTHONSAFEPATH drops the working folder. The worker ends when its input ends,
        # which is when the trainer ends. Its own process group keeps Ctrl-C from reaching it. A session of its own
        # could take minutes to start on a busy machine, because Linux may divide processor time between sessions
        # first (autogroup).
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        needed = {name: os.environ[name] for name in ("PYTHONHOME", "LD_LIBRARY_PATH") if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rewards.workers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
            env=needed | {"PYTHONPATH": path}, process_group=0,
        )  # fmt: skip
        hello = self.read_line(START_LIMIT)
        if hello != '"ready"\n':
            self.kill()
            raise RuntimeError(f"the process that compares answers did not start: {hello or 'it gave no reason'}")

    def read_line(self, seconds):
        """Return the worker's next line, or "" if none comes within `seconds` or the worker is dead."""
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        return self.process.stdout.readline() if poll.poll(seconds * 1000) else ""

    def kill(self) -> None:
        """End the worker and its copy."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()  # wait for the end, and close the pipes


@cache
def idle_workers():
    """Return a stack of the idle workers, one per core of this process but at most MAX_WORKERS."""
    workers = queue.LifoQueue()
    on_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count()
    for _ in range(min(MAX_WORKERS, cores)):
        workers.put(Worker())
    return workers


def ask(jobs) -> list:
    """Return the workers' replies to the jobs, in order: True, False, or None if the job was killed or too late."""
    left = BATCH_LIMIT + len(jobs) * BATCH_LIMIT_PER_ANSWER
    lock = threading.Lock()

    def ask_one(job):
        nonlocal left
        worker = idle_workers().get()
        try:
            if left <= 0:
                return None
            verdict = worker.ask(job)
            with lock:
                left -= worker.seconds
            return verdict
        finally:
            idle_workers().put(worker)

    if not jobs:
        return []
    with ThreadPoolExecutor(MAX_WORKERS) as threads:
        return list(threads.map(ask_one, jobs))


def work() -> None:
    """Run a worker's loop: pass jobs to its copy, and the copy's replies back, until its input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep a library's output out of the replies
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        leave_the_network()
        drop_root_and_import()
        copy, pipe = start_copy()
        reply = "ready"
    except Exception as error:
        reply = f"{type(error).__name__}: {error}"
    while True:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if not copy.is_alive():
            copy, pipe = start_copy()
        try:
            pipe.send(json.loads(line))
            reply = pipe.recv()
        except (EOFError, OSError):
            copy.join()
            reply = None


def start_copy() -> tuple:
    """Fork this process. Return (the copy, a pipe for jobs and replies, which breaks if the copy dies)."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    copy = fork.Process(target=compare, args=(here, there), daemon=True)
    copy.start()
    there.close()
    return copy, here


def compare(theirs, mine) -> None:
    """Run the loop of a worker's copy: reply to jobs until the pipe breaks. In: the worker's end, and its own."""
    theirs.close()  # or the pipe would not break at the worker's death
    # The system's default action ends the process, even during a computation that Python can't interrupt.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(EOFError, OSError):
        while True:
            answer, golds = mine.recv()
            start = time.thread_time()
            signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
            try:
                verdict = readable(answer) if golds is None else same(answer, golds)
            except Exception:  # out of memory or stack, or a bug in a library
                verdict = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            mine.send((verdict, time.thread_time() - start))


CLONE_NEWUSER, CLONE_NEWNET, PR_SET_KEEPCAPS = 0x10000000, 0x40000000, 8  # Linux's
CAPABILITY_VERSION, READ_ANY_FILE = 0x20080522, 1 << 2  # the second is CAP_DAC_READ_SEARCH
NOBODY = 65534


def leave_the_network() -> None:
    """Put this process in a network of its own, without connections. If the system forbids that, do nothing.

    Root may do so directly, others in a user namespace of their own.
    """
    ctypes.CDLL(None).unshare(CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET)


def drop_root_and_import():
    """Import the library, as the user nobody if this process is root's.

    Of root's capabilities it keeps at most the one to read any file, because Python and its packages may be in a
    folder that only root can read. If root itself lacks this capability, as in many containers, and the packages can't
    be read, the process stays root's, without any capability.
    """
    if os.geteuid() != 0:
        return warm_up()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # a container may lack this user
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, 0)  # the last allows the way back
    for kept in (READ_ANY_FILE, 0):
        header = struct.pack("Ii", CAPABILITY_VERSION, 0)
        if libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)) == 0:
            break
    try:
        warm_up()
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except (OSError, ImportError):
        os.setresuid(0, 0, 0)
        warm_up()


def warm_up() -> None:
    """Import the library and its lazy imports before the first answer's time counts."""
    same("x=\\frac{1}{2}", ["0.5"])


if __name__ == "__main__":
    work()
