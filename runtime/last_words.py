"""Prints a line when a program has ended: python runtime/last_words.py PID TEXT.

torchrun ends with a long traceback if one of its processes fails, or if it gets Ctrl-C or SIGTERM.
What matters should come last.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 3600  # seconds


def under_torchrun():
    """Whether torchrun has started this process, and is its parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def after_torchrun(text, stderr=None):
    """Starts the process that prints the text when torchrun has ended. The process can be killed.

    It has a session of its own, so that Ctrl-C does not reach it. stderr: where to; None: as here.
    """
    words = [sys.executable, __file__, str(os.getppid()), text]
    return subprocess.Popen(words, stderr=stderr, start_new_session=True)


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
