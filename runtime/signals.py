"""End a run at Ctrl-C, SIGTERM or when its terminal is closed (SIGHUP).

The first of them ends the run after its step, with a checkpoint. A second Ctrl-C or SIGTERM ends it
at once, as the first one does while a run loads.
"""

import contextlib
import os
import signal
import time

from runtime.ranks import RANK

# Signals within so many seconds of the first count as the same request: torchrun passes on a
# SIGTERM that Slurm has already sent to every process.
GRACE = 5


def catch():
    """Return a list that gets the first signal's name ("SIGINT", "SIGHUP" …), which ends the run.

    Under nohup, which makes a process ignore SIGHUP, SIGHUP stays ignored.
    """
    asked_to_stop = []
    first = 0.0  # seconds on time.monotonic()'s clock

    def at_signal(number, frame):
        nonlocal first
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
