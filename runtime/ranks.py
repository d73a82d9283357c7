"""Read this process's number from torchrun. With `python` there is only one process."""

import os


def number(name, default):
    return int(os.environ.get(name) or default)


WORLD_SIZE = number("WORLD_SIZE", 1)  # number of processes
RANK = number("RANK", 0)  # counted from 0
LOCAL_WORLD_SIZE = number("LOCAL_WORLD_SIZE", 1)  # on this machine
LOCAL_RANK = number("LOCAL_RANK", 0)  # like RANK, among this machine's processes
