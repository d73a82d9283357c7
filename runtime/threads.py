"""Choose how a CPU's threads wait, so that a run makes progress while other programs run."""

import os
from pathlib import Path

import psutil

from runtime import files
from runtime.ranks import WORLD_SIZE

# Waiting threads that spin are faster if nothing else computes and the model is so small that they
# meet every few microseconds: a step is 1.5 times as fast with kk_tiny (hidden size 128), but no
# faster with SmolLM2-135M (576). While another program runs, spinning threads hold up the threads
# that they wait for: a step takes 3 to 4 times as long instead of 1.6 to 2.5, and 13 times next to
# a second run that spins.
SMALL = 256  # smallest hidden size that is not small; measured at 128 and 576 only
# With kk_tiny, two threads save a tenth of the sampler's seconds. While another program holds up
# one of them, they take two to four times as long as one. The number must not depend on that:
# log-probabilities differ in rounding with it, and a resumed run must equal an unbroken one.
OF_SMALL_SAMPLER = 1
BUSY = 0.2  # fraction of the machine's cores that others use, in a fifth of a second


def choose_waiting(model):
    """Let waiting threads sleep if spinning does not help. Call it before importing torch.

    model: a model's folder or its name on the hub. Keeps settings from the environment.
    """
    if is_small(model) and psutil.cpu_percent(0.2) <= 100 * BUSY:
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if WORLD_SIZE == 1:
        # vLLM would bind each thread to a core, which another program may occupy. If several
        # processes share the cores, it has to.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def is_small(model):
    """Return whether the model computes a token so quickly that threads gain little.

    model: a folder. A model on the hub counts as large.
    """
    config = Path(model, "config.json")
    if not config.is_file():  # on the hub
        return False
    return files.read_object(config).get("hidden_size", SMALL) < SMALL
