"""Call the functions of a user's task that score responses in a process that can be ended if a call hangs.

The process imports the task's file and calls its load() as the trainer did, so that score() finds what load() left in
the module. It has the trainer's rights, environment and output, because the file is the user's own. workers.py's
processes have none of these: they compare answers that a model wrote.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from rewards import own

ROOT = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1  # Linux's: the signal that a process gets if its parent dies


class Judge:
    """One process. It starts on the first call, and again after its end.

    loads: the arguments (source, split, size, seed) of each load(); seconds: the most that a call may take.
    """

    process = None

    def __init__(self, task, loads, seconds):
        self.file = task.__file__
        self.loads = loads
        self.seconds = seconds
        self.has_warned = False

    def start(self) -> None:
        """Begin to start the process; call waits for it."""
        self.pipe, theirs = Pipe()
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.process = subprocess.Popen(
            # -P: the working folder is not on the path, as in a trainer. Ctrl-C does not reach its process group.
            [sys.executable, "-u", "-P", "-m", "rewards.judge", self.file, str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            process_group=0,
        )  # fmt: skip
        theirs.close()
        self.pipe.send(self.loads)
        self.is_ready = False

    def call(self, name, *arguments):
        """Return the result of the task's function of this name.

        TimeoutError if the call takes too long or ends the process, twice: once may be the system's doing, for want of
        memory. own.TaskError if it raises.
        """
        for is_last in (False, True):
            if self.process is None:
                self.start()
            try:
                if not self.is_ready:
                    self.read()  # load() may take any time
                    self.is_ready = True
                self.pipe.send((name, arguments))
                is_late = not self.pipe.poll(self.seconds)
                if not is_late:
                    return self.read()
            except (EOFError, OSError) as error:
                is_late = False
                if not self.is_ready and is_last:
                    raise own.TaskError(f"{self.file}: the process that scores responses did not start") from error
            self.end()
            if is_late or is_last:
                raise TimeoutError

    def read(self):
        """Wait for the next result. own.TaskError if there is an error instead."""
        try:
            result, error = self.pipe.recv()
        except (AttributeError, ImportError) as found:  # a result of a class that only the process knows
            error = f"{self.file}: a score can't be copied: {found}"
        if error:
            raise own.TaskError(error)
        return result

    def end(self) -> None:
        """End the process, with all that it has started."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def work(file, pipe) -> None:
    """Run the process's loop: answer calls until its pipe breaks, which is when the trainer ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # even in the middle of a call that hangs
    task, name, arguments = None, "load", [""]
    with contextlib.suppress(EOFError, OSError):
        loads = pipe.recv()
        while True:
            result, error = None, ""
            try:
                if task is None:
                    task = own.read_file(file)
                    for source, split, size, seed in loads:
                        task.load(source, split, size=size, seed=seed)
                else:
                    result = getattr(task, name)(*arguments)
            except BaseException as found:  # also sys.exit and KeyboardInterrupt
                error = own.failure(file, name, arguments[0], found)
            try:
                pipe.send((result, error))
            except (TypeError, AttributeError, ValueError) as found:  # a result that can't be copied
                pipe.send((None, own.failure(file, name, arguments[0], found)))
            name, arguments = pipe.recv()


if __name__ == "__main__":
    work(sys.argv[1], Connection(int(sys.argv[2])))
