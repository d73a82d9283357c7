"""Says something when a program has ended: python runtime/last_words.py PID TEXT.

torchrun ends with a long traceback if one of its processes fails, or if it gets Ctrl-C or SIGTERM.
What matters should come last. And a process that dies in a library says nothing itself.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 3600  # seconds
WATCHERS = []  # processes that would say that this one has died


def under_torchrun():
    """Whether torchrun has started this process, and is its parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def after_torchrun(text, stderr=None):
    """Starts the process that prints the text when torchrun has ended. The process can be killed.

    It has a session of its own, so that Ctrl-C does not reach it. stderr: where to; None: as here.
    """
    words = [sys.executable, __file__, str(os.getppid()), text]
    return subprocess.Popen(words, stderr=stderr, start_new_session=True)


def if_it_dies(text, stderr):
    """Starts a process that prints the text if this one ends before it calls dismiss.

    stderr: a file descriptor. The process is a shell, which takes no time to start. It waits for a
    line of its input, which breaks when this process is dead.
    """
    words = ["sh", "-c", 'read -r _ || printf "\\n%s\\n" "$1" >&2', "sh", text]
    options = {"stdin": subprocess.PIPE, "stderr": stderr, "start_new_session": True}
    WATCHERS.append(subprocess.Popen(words, **options))
    return WATCHERS[-1]


def dismiss(*watchers):
    """Lets these processes end without a word; without any: all that if_it_dies has started."""
    for watcher in watchers or [*WATCHERS]:
        watcher.communicate(b"\n")
        WATCHERS.remove(watcher)


def has_ended(pid):
    """Whether a process has ended, also if nobody has asked for its exit code yet (a zombie)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


if __name__ == "__main__":
    pid, text = sys.argv[1:]
    latest = time.monotonic() + PATIENCE
    while not has_ended(pid) and time.monotonic() < latest:
        time.sleep(0.1)
    print(text, file=sys.stderr)
