"""Prints a line when a program has ended: python runtime/last_words.py PID TEXT.

torchrun ends with a long traceback if one of its processes fails. What matters should come last.
"""

import sys
import time
from pathlib import Path

PATIENCE = 60  # seconds


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
