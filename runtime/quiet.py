"""Silence messages that libraries print for their own developers. Errors are always shown.

Importing this module is enough: before or after transformers, but before vLLM. It keeps
environment variables that the user has set: `VLLM_LOGGING_LEVEL=INFO python grpo.py` shows
vLLM's log, and then nothing is hidden.
"""

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

from runtime import streams

# Whoever sets one of these wants to see a library's messages. vLLM's level is below.
LOGS = ("NCCL_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS")

os.environ["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL") or "ERROR"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns when a program starts

# vLLM says "Triton is installed, but doesn't include CPU backend" before its logging is set up.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())

if "TRANSFORMERS_VERBOSITY" not in os.environ:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    transformers_logging.set_verbosity_error()

if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
    transformers_logging.disable_progress_bar()  # "Loading weights" takes less than a second
    enable_progress_bars()  # keep bars of downloads, which can take minutes

warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")


@contextlib.contextmanager
def library_notices():
    """Hide output printed in this block, also by C++ code, which never uses Python's sys.stdout.

    Examples are vLLM's "NUMA binding" and Gloo's "Rank 0 is connected". Lines that contain "error"
    are printed afterwards, to stderr. If the block raises an exception, everything is printed. If
    the block ends the process (a crash in C++, a kill for its memory), a last line names the file
    that has everything. Nothing is hidden if the user wants a library's log.
    """
    if wants_logs():
        yield
        return
    flush()
    stdout = os.dup(1)
    stderr = os.dup(2)
    failed = True
    with tempfile.NamedTemporaryFile(prefix="libraries_", suffix=".log", delete=False) as captured:
        watcher = streams.say_if_it_dies(
            f"error: the program died while a library was at work; what that said is in "
            f"{captured.name}",
            stderr,
        )
        os.dup2(captured.fileno(), 1)
        os.dup2(captured.fileno(), 2)
        try:
            yield
            failed = False
        finally:
            flush()
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            streams.dismiss(watcher)
            Path(captured.name).unlink()
            captured.seek(0)
            for line in captured:
                if failed or b"error" in line.lower():
                    with contextlib.suppress(OSError):  # stderr may have no reader
                        os.write(2, line)


def wants_logs():
    """Return whether the user has asked for a library's log, by an environment variable."""
    level = os.environ["VLLM_LOGGING_LEVEL"].upper()
    return level != "ERROR" or any(os.environ.get(name) for name in LOGS)


def flush():
    """Flush the buffers of Python and the C library to their original destination."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
