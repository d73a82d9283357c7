"""What ends a run when its files can't be written: one message instead of a traceback."""

import contextlib
import errno
import shutil
import sys
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from runtime import folders, processes


@contextlib.contextmanager
def end_the_run(what, run_dir, unfinished=None):
    """Ends all processes with one message (exit code 1) if one of them can't write in this block.

    All processes must enter the block; they wait for each other at its end. what: what the block
    writes, for the message. unfinished: a folder to remove in that case, for the room it takes.
    """
    problem = ""
    try:
        yield
    except (Exception, CheckpointException) as error:  # tokenizers raises nothing more special
        problem = reason(error)
        if not problem:
            raise
    problems = [problem for problem in processes.gather([problem]) if problem]
    if not problems:
        return
    if processes.RANK == 0:
        if unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):  # stderr may be a file on the same disk
            message = f"error: {what} can't be written: {problems[0]}. {way_on(run_dir)}"
            print(message, file=sys.stderr)
    sys.exit(1)  # the processes stay connected: vLLM's engine, which uses that, still has to end


def reason(error):
    """Why something could not be written, in words; "" if the disk is not to blame."""
    if isinstance(error, CheckpointException):  # {process: (its error, where it arose)}
        reasons = [reason(of_process) for of_process, _ in error.failures.values()]
        return next((words for words in reasons if words), "")
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, SafetensorError):
        return str(error)
    if type(error) is Exception and "(os error " in str(error):  # as Rust says it: tokenizers
        return str(error)
    if "inline_container" in str(error):  # torch.save's own, whatever the system said
        before = error.__context__
        return reason(before) if isinstance(before, OSError) else "the disk may be full"
    return ""


def is_of_the_disk(error):
    """Whether the error came from a disk: full, over a quota, read-only, without rights, or broken.

    A connection's errors are OSErrors with other numbers.
    """
    numbers = (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EFBIG,
        errno.EIO,
    )
    return isinstance(error, OSError) and error.errno in numbers


def way_on(run_dir):
    """What to do about a run that can't be written to."""
    complete = folders.complete(run_dir)
    if not complete:
        return "The run has no checkpoint yet: start it again in another --run_dir"
    return f"Its last checkpoint is {complete[-1]}; make room, and --resume {Path(run_dir)} goes on"
