"""Handle requests to end a run: Ctrl-C, SIGTERM, a closed terminal, an output without a reader.

Each of them ends the run after its step, with a checkpoint. A second Ctrl-C or SIGTERM ends it at
once. While a run loads, before its first step, the first one already ends it at once.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from runtime import streams
from runtime.ranks import RANK

# Signals within so many seconds of the first count as the same request: torchrun passes on a Ctrl-C
# that the terminal has already sent to every process.
GRACE = 5
BROKEN = "a broken standard output"
INSISTENT = ("SIGINT", "SIGTERM")  # if it comes again, end at once
last_line_in = None  # the run's folder, once there is one


def handle(end):
    """Call end(name, number) from now on at a signal, and when standard output has no reader.

    Under nohup, which makes a process ignore SIGHUP, SIGHUP stays ignored.
    """

    def at_signal(number, frame):
        end(signal.Signals(number).name, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, at_signal)
    streams.when_gone = lambda: end(BROKEN, signal.SIGPIPE)


def end_while_loading():
    """Let any of them end this process at once, with one line, until catch is called."""
    stderr = os.dup(2)  # runtime.quiet redirects the usual one while libraries load

    def end(name, number):
        if RANK == 0:
            tell(f"stopped by {name} before the first step\n", stderr)
        die_of(number)

    handle(end)


def catch():
    """Return a list that gets the first signal's name ("SIGINT", "SIGHUP" …), which ends the run.

    Process 0 says at once what happens now. A second signal ends the process at once.
    """
    asked_to_stop = []
    first = None

    def remember(name, number):
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            asked_to_stop.append(name)
            if RANK == 0:
                text = (
                    f"\n{name}: the run ends after this step, with a checkpoint. A second one, "
                    f"{GRACE} seconds from now or later, ends it at once and loses the step.\n"
                )
                if "TORCHELASTIC_RUN_ID" in os.environ:
                    text += (
                        "torchrun waits for 30 seconds, and a step that takes longer is lost, too; "
                        "torchrun --shutdown-timeout 600 would wait for ten minutes.\n"
                    )
                tell(text, 2)
        elif now - first > GRACE and name in INSISTENT:
            die_of(number)

    handle(remember)
    return asked_to_stop


def tell(text, stderr):
    """Write a text to stderr, a descriptor, and into the run's folder, where anyone can see it.

    The terminal may be closed by now, and the disk full, so errors are ignored.
    """
    with contextlib.suppress(OSError):
        os.write(stderr, text.encode())
    if last_line_in:
        with contextlib.suppress(OSError):
            Path(last_line_in, "ended.txt").write_text(text.strip() + "\n", encoding="utf-8")


def die_of(number):
    """End this process by a signal; a shell sees the exit code 128 + number."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
