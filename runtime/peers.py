"""The other processes of a run on this machine: if one dies, the others say so and end.

Otherwise they would wait for it in their next all_reduce, with NCCL for a long time, or end with a
traceback that says nothing of the one that died.
"""

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from runtime import folders, last_words
from runtime.processes import gather
from runtime.ranks import RANK, WORLD_SIZE

PIDS = {}  # {rank: process id} of those that are watched
EVERY = 1  # seconds


def watch(run_dir):
    """From now on this process ends with one message if another one of this machine dies."""
    if WORLD_SIZE == 1:
        return
    here = machine()
    for place, rank, pid in gather([(here, RANK, os.getpid())]):
        if place == here and rank != RANK:
            PIDS[rank] = pid
    usual_hook = sys.excepthook
    stderr = os.dup(2)  # while vLLM loads, runtime.quiet turns the usual one away

    def hook(kind, error, traceback):
        for _ in range(3):  # the connection breaks before the other process is quite dead
            end_if_one_is_dead(run_dir, stderr)
            time.sleep(EVERY)
        usual_hook(kind, error, traceback)

    def look():
        while PIDS:
            time.sleep(EVERY)
            if dead():
                time.sleep(EVERY)  # if all of them are ending, this one will not get here
                end_if_one_is_dead(run_dir, stderr)

    sys.excepthook = hook
    atexit.register(stop_watching)
    threading.Thread(target=look, daemon=True).start()


def stop_watching():
    """The run is over: the processes may end, one after the other."""
    PIDS.clear()


def dead():
    """The ranks of the watched processes that have died."""
    return [rank for rank, pid in PIDS.items() if last_words.has_ended(pid)]


def machine():
    """What processes that can see each other have in common. Two machines may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:  # in some sandboxes
        return socket.gethostname()


def end_if_one_is_dead(run_dir, stderr):
    """Ends this process at once (exit code 1) if a watched one has died.

    One of those that are left says which, and how to go on. stderr: a file descriptor.
    """
    ranks = dead()
    if not ranks:
        return
    alive = set(PIDS) - set(ranks)
    if min(alive, default=WORLD_SIZE) > RANK:
        text = message(ranks, run_dir)
        with contextlib.suppress(OSError):  # nobody may read it
            os.write(stderr, f"\n{text}\n".encode())
        if last_words.under_torchrun():
            last_words.after_torchrun(text, stderr)
    last_words.dismiss()  # of this process: its own end is no crash
    os._exit(1)  # the main thread may wait for the dead process


def message(ranks, run_dir):
    who = ", ".join(f"process {rank} (pid {PIDS[rank]})" for rank in ranks)
    return f"{who} has died, so the run ends: {folders.how_to_go_on(run_dir)}"
