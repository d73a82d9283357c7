"""Connect a run's processes: one per device (`torchrun`), or a single one (`python`).

RANK counts them from 0. With a single process every function here works and does nothing. Several
processes must all call barrier, broadcast, gather, all_reduce and full_tensor, in the same order.

Importing this module silences messages that libraries print for their own developers, if that
happens before vLLM is imported. Errors are always shown. `VLLM_LOGGING_LEVEL=INFO python grpo.py`
shows vLLM's log, and then nothing is hidden.
"""

import contextlib
import ctypes
import functools
import logging
import os
import subprocess
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from huggingface_hub.utils import enable_progress_bars
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.utils import logging as transformers_logging

from runtime import machine
from runtime.machine import LOCAL_RANK, LOCAL_WORLD_SIZE, RANK, WORLD_SIZE  # noqa: F401

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", LOCAL_RANK) if ON_GPU else torch.device("cpu")

# How long a process waits for the others. Process 0 may save for minutes while they wait.
PATIENCE = timedelta(hours=1)


def start() -> None:
    """Connect the processes if there are several. checks.check_gpus has chosen this one's GPU."""
    if ON_GPU:
        # cuDNN's attention would make a plan for every new shape, 0.4 to 0.9 s each, and lengths
        # differ from pass to pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if WORLD_SIZE > 1:
        with library_notices():
            dist.init_process_group("nccl" if ON_GPU else "gloo", timeout=PATIENCE)
        if len(set(gather([LOCAL_WORLD_SIZE]))) > 1:  # their meshes and defaults would differ
            raise SystemExit("error: each machine needs the same number of processes")


@functools.cache  # otherwise every model makes new groups of processes
def mesh():
    """Arrange the processes for FSDP2: a weight's shards are spread over the last dimension.

    On one machine, all processes share the shards. With several machines, each of them holds all
    shards (HSDP), so that only gradients cross the slower network between machines.
    """
    if WORLD_SIZE == LOCAL_WORLD_SIZE:
        return init_device_mesh(DEVICE.type, (WORLD_SIZE,))
    shape = (WORLD_SIZE // LOCAL_WORLD_SIZE, LOCAL_WORLD_SIZE)
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=("machine", "shard"))


def end() -> None:
    """Disconnect the processes, including the group that vLLM makes in a single process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def own_cores():
    """Return the numbers of this process's CPU cores: its part of the machine's."""
    cores = machine.cores()[LOCAL_RANK::LOCAL_WORLD_SIZE]
    return cores or [0]  # more processes than cores


def barrier() -> None:
    """Return when all processes have called it."""
    if WORLD_SIZE > 1:
        dist.barrier(device_ids=[LOCAL_RANK] if ON_GPU else None)


def broadcast(value):
    """Return process 0's value in every process. It may be anything that pickle can write."""
    values = [value]
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(items) -> list:
    """Return the processes' lists, concatenated in the order of their ranks, in every process."""
    lists = [items] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def all_reduce(value, op=dist.ReduceOp.SUM):
    """Return the sum of a number over all processes (or the maximum …, as op says), as a float.

    Sums in float64, so that counts up to 2**53 are exact. A single process sends nothing to its
    GPU.
    """
    value = torch.as_tensor(value, dtype=torch.float64)
    if WORLD_SIZE > 1:
        value = value.to(DEVICE, copy=True)  # all_reduce works in place
        dist.all_reduce(value, op)
    return value.item()


def own_shard(tensor):
    """Return this process's shard of a tensor, with the same memory; without FSDP2, the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor):
    """Return the whole tensor, without gradient, if FSDP2 keeps only a shard in each process."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


# ----------------------------------------------------------------------------- notices of libraries

os.environ["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL") or "ERROR"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns when a program starts

# vLLM says "Triton is installed, but doesn't include CPU backend" before its logging is set up.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()  # "Loading weights" takes less than a second
enable_progress_bars()  # keep bars of downloads, which can take minutes

warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")


@contextlib.contextmanager
def library_notices():
    """Hide output printed in this block, also by C++ code, which never uses Python's sys.stdout.

    Examples are vLLM's "NUMA binding" and Gloo's "Rank 0 is connected". Lines that contain "error"
    go to stderr at once, so that they are seen even if the block ends the process. Nothing is
    hidden if the user wants vLLM's log.
    """
    if os.environ["VLLM_LOGGING_LEVEL"].upper() != "ERROR":
        yield
        return
    flush()
    before = os.dup(1), os.dup(2)
    errors = ["grep", "--line-buffered", "--text", "--ignore-case", "error"]
    # In a session of its own, Ctrl-C does not reach it.
    kept = subprocess.Popen(errors, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
    for number in (1, 2):
        os.dup2(kept.stdin.fileno(), number)
    kept.stdin.close()
    try:
        yield
    finally:
        flush()
        for number, descriptor in enumerate(before, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def flush() -> None:
    """Flush the buffers of Python and the C library to their original destination."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
