"""Read this process's number from torchrun. With `python` there is only one process."""

import os
import sys


def said(name, default, least=0, below=2**31):
    """Return a whole number from the environment; default if it is missing or empty.

    Ends the program with one line (exit code 2) if it is anything else, or out of range.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isdecimal() and least <= int(text) < below):
        refuse(f"{name} is {text!r}; it must be a whole number of at least {least}, below {below}")
    return int(text)


def refuse(what):
    """End the program with one line (exit code 2)."""
    print(f"error: {what}. torchrun sets it; for a single process, unset it", file=sys.stderr)
    sys.exit(2)


WORLD_SIZE = said("WORLD_SIZE", 1, least=1)  # number of processes
RANK = said("RANK", 0, below=WORLD_SIZE)  # counted from 0
LOCAL_WORLD_SIZE = said("LOCAL_WORLD_SIZE", 1, least=1, below=WORLD_SIZE + 1)  # on this machine
LOCAL_RANK = said("LOCAL_RANK", 0)  # like RANK, among this machine's processes
if WORLD_SIZE % LOCAL_WORLD_SIZE:
    refuse(f"LOCAL_WORLD_SIZE is {LOCAL_WORLD_SIZE}, which does not divide WORLD_SIZE {WORLD_SIZE}")


def check_meeting_place():
    """End the program with one line if several processes don't know where to meet."""
    if WORLD_SIZE > 1:
        port = said("MASTER_PORT", 0, least=1, below=2**16)
        missing = "MASTER_PORT" if os.environ.get("MASTER_ADDR") else "MASTER_ADDR"
        if missing == "MASTER_ADDR" or not port:
            refuse(f"WORLD_SIZE is {WORLD_SIZE}, but {missing} is missing")
