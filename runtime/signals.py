"""Ctrl-C and SIGTERM end a run after its step, with a checkpoint; a second one ends it at once.

While a run loads, before its first step, the first one ends it at once.
"""

import os
import signal
import time

from runtime import last_words
from runtime.launch import RANK

# Signals so many seconds after the first one count as the same request: torchrun passes on a Ctrl-C
# that the terminal has already sent to every process.
GRACE = 5


def end_while_loading():
    """Until catch is called, a signal ends this process at once, with one line."""
    stderr = os.dup(2)  # while libraries load, runtime.quiet turns the usual one away

    def end(number, frame):
        if RANK == 0:
            name = signal.Signals(number).name
            os.write(stderr, f"stopped by {name} before the first step\n".encode())
        die_of(number)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)


def catch(asked):
    """A list that gets the name of the first signal ("SIGINT", "SIGTERM") that asks the run to end.

    Process 0 says at once what happens now, and calls asked(). (Not if another process has died:
    then torchrun sends SIGTERM to those that are left.) A second signal ends the process at once.
    """
    from runtime import peers  # late: it imports torch, and this module comes before

    asked_to_stop = []
    first = None

    def remember(number, frame):
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            name = signal.Signals(number).name
            asked_to_stop.append(name)
            if RANK == 0 and not peers.dead():
                text = (
                    f"\n{name}: the run ends after this step, with a checkpoint. A second one, "
                    f"{GRACE} seconds from now or later, ends it at once and loses the step.\n"
                )
                if last_words.under_torchrun():
                    text += (
                        "torchrun waits for 30 seconds, and a step that takes longer is lost, too; "
                        "torchrun --shutdown-timeout 600 would wait for ten minutes.\n"
                    )
                os.write(2, text.encode())
                asked()
        elif now - first > GRACE:
            die_of(number)

    signal.signal(signal.SIGINT, remember)
    signal.signal(signal.SIGTERM, remember)
    return asked_to_stop


def die_of(number):
    """Ends this process by a signal; a shell sees the exit code 128 + number."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
