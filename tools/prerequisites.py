"""Tell in one line what this machine lacks for an installation, before anything is downloaded. `make install` calls it.

    python3 tools/prerequisites.py cpu      (or gpu: then vLLM brings what it needs)

It needs no package, and runs with any Python 3, so that an old one is named, too. The doctor asks it again.
"""

import ctypes
import os
import platform
import sys
from importlib.util import find_spec

OLDEST, NEWEST = (3, 11), (3, 14)  # for which vLLM has packages


def missing(on_cpu):
    """Return what is missing and what to do about it, a list of (name, text)."""
    found = []
    version = sys.version_info[:2]
    if platform.system() != "Linux":
        text = "runs need vLLM, and it needs Linux; on a Mac or Windows: nano_grpo.py, WSL2, a container"
        found.append(("system", text))
    if not OLDEST <= version <= NEWEST:
        text = "vLLM needs Python 3.11 to 3.14, and {} is {}.{}: make install PYTHON=python3.13, or another of these"
        found.append(("Python", text.format(sys.executable, *version)))
    if sys.prefix == sys.base_prefix and not find_spec("ensurepip"):  # it is needed to make an environment
        found.append(("venv", "python3 -m venv needs ensurepip: apt install python3-venv"))
    if on_cpu and platform.system() == "Linux" and not can_load("libnuma.so.1"):
        found.append(("libnuma", "vLLM needs libnuma: apt install libnuma1"))
    if platform.system() == "Linux" and not os.access("/dev/shm", os.W_OK):
        text = "you can't write to /dev/shm, which locks need: mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        found.append(("shared memory", text))
    return found


def can_load(library):
    """Return whether the system has a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    problems = missing(on_cpu="gpu" not in sys.argv[1:])
    for _, text in problems:
        print("error: " + text, file=sys.stderr)
    sys.exit(1 if problems else 0)
