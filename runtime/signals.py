"""What ends a run from outside: Ctrl-C, SIGTERM, a closed terminal, an output without a reader.

Each of them ends it after its step, with a checkpoint; a second Ctrl-C or SIGTERM does at once.
While a run loads, before its first step, the first one ends it at once.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

from runtime import streams
from runtime.ranks import LOCAL_WORLD_SIZE, RANK

# Signals so many seconds after the first one count as the same request: torchrun passes on a Ctrl-C
# that the terminal has already sent to every process.
GRACE = 5
BROKEN = "a broken standard output"
INSISTENT = ("SIGINT", "SIGTERM")  # what a second one of means: now
last_line_in = None  # the run's folder, once there is one


def handle(end):
    """From now on end(name, number) is called at a signal, and when standard output has no reader.

    Under nohup, which makes a process ignore SIGHUP, this one still does.
    """

    def at_signal(number, frame):
        end(signal.Signals(number).name, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, at_signal)
    streams.when_gone = lambda: end(BROKEN, signal.SIGPIPE)


def end_while_loading():
    """Until catch is called, each of them ends this process at once, with one line."""
    stderr = os.dup(2)  # while libraries load, runtime.quiet turns the usual one away

    def end(name, number):
        if RANK == 0:
            tell(f"stopped by {name} before the first step\n", stderr)
        die_of(number)

    handle(end)


def catch():
    """A list that gets the name of the first one ("SIGINT", "SIGHUP" …) that asks the run to end.

    Process 0 says at once what happens now. A second signal ends the process at once. So does the
    first one if another process has died: then torchrun sends it to those that are left, which
    would wait for the dead one in their next all_reduce.
    """
    asked_to_stop = []
    first = None

    def remember(name, number):
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            if under_torchrun() and another_has_died():
                die_of(number)
            asked_to_stop.append(name)
            if RANK == 0:
                text = (
                    f"\n{name}: the run ends after this step, with a checkpoint. A second one, "
                    f"{GRACE} seconds from now or later, ends it at once and loses the step.\n"
                )
                if under_torchrun():
                    text += (
                        "torchrun waits for 30 seconds, and a step that takes longer is lost, too; "
                        "torchrun --shutdown-timeout 600 would wait for ten minutes.\n"
                    )
                tell(text, 2)
        elif now - first > GRACE and name in INSISTENT:
            die_of(number)

    handle(remember)
    return asked_to_stop


def under_torchrun():
    """Whether torchrun has started this process, and is its parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def another_has_died():
    """Whether torchrun has fewer processes on this machine than it started."""
    children = psutil.Process(os.getppid()).children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return len(alive) < LOCAL_WORLD_SIZE


def tell(text, stderr):
    """Writes a text to stderr, a descriptor, and into the run's folder, where anyone can see it.

    The terminal may be closed by now, and the disk full.
    """
    with contextlib.suppress(OSError):
        os.write(stderr, text.encode())
    if last_line_in:
        with contextlib.suppress(OSError):
            Path(last_line_in, "ended.txt").write_text(text.strip() + "\n", encoding="utf-8")


def die_of(number):
    """Ends this process by a signal; a shell sees the exit code 128 + number."""
    streams.dismiss()  # it is no crash
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
