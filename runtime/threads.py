"""How the threads of a CPU wait for each other, so that a run gets on beside another program."""

import os
from pathlib import Path

import psutil

from runtime import files
from runtime.ranks import WORLD_SIZE

# Threads that spin while they wait are faster if nothing else computes and the model is so small
# that they meet every few microseconds: with kk_tiny (hidden size 128) they make a step 1.5 times
# as fast, with SmolLM2-135M (576) no faster. Beside another program they hold up the threads that
# they wait for: a step takes 3 to 4 times as long instead of 1.6 to 2.5, and 13 times beside a
# second run that spins.
SMALL = 256  # hidden size of the smallest model that is not small; measured at 128 and 576 only
# With kk_tiny two threads save a tenth of the sampler's seconds. Beside another program, which
# holds one of them up, they take two to four times as long as one. The number must not depend on
# that: log-probabilities differ in rounding with it, and a resumed run equals an unbroken one.
OF_SMALL_SAMPLER = 1
BUSY = 0.2  # share of the machine's cores that others use, in a fifth of a second


def choose_waiting(model):
    """Lets waiting threads sleep where spinning does not help. To call before torch is imported.

    model: a model's folder or its name on the hub. Keeps what the environment already says.
    """
    if is_small(model) and psutil.cpu_percent(0.2) <= 100 * BUSY:
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if WORLD_SIZE == 1:
        # vLLM would bind each thread to a core, which another program may occupy. Where several
        # processes share the cores, it has to.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def is_small(model):
    """Whether a token of the model is computed in so short a time that threads gain little.

    model: a folder. One on the hub is taken for large.
    """
    config = Path(model, "config.json")
    if not config.is_file():  # on the hub
        return False
    return files.read_object(config).get("hidden_size", SMALL) < SMALL
