"""Ctrl-C and SIGTERM end a run after its step, with a checkpoint; a second one ends it at once."""

import signal
import time


def catch(grace=5.0):
    """A list that gets the name of the first signal ("SIGINT", "SIGTERM") that asks the run to end.

    A signal more than `grace` seconds after the first one ends the process at once. Earlier ones
    count as the same request: torchrun passes on a Ctrl-C that the terminal has already sent to
    every process.
    """
    asked_to_stop = []
    first = None

    def remember(number, frame):
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            asked_to_stop.append(signal.Signals(number).name)
        elif now - first > grace:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, remember)
    signal.signal(signal.SIGTERM, remember)
    return asked_to_stop
