"""Silence messages that libraries print for their own developers. Errors are always shown.

Importing this module is enough: before or after transformers, but before vLLM.
`VLLM_LOGGING_LEVEL=INFO python grpo.py` shows vLLM's log, and then nothing is hidden.
"""

import contextlib
import ctypes
import logging
import os
import subprocess
import sys
import warnings

from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

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


def flush():
    """Flush the buffers of Python and the C library to their original destination."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
