"""Which of a run's processes this is. torchrun says so; with `python` there is only one."""

import os

RANK = int(os.environ.get("RANK", "0"))  # counted from 0
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # how many there are
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))  # the same among those on this machine
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
