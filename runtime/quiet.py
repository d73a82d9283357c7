"""Silences what the libraries say to their own developers. Errors are always shown.

Importing this module is enough, before or after transformers, but before vLLM. Environment
variables that the user has set stay as they are: `VLLM_LOGGING_LEVEL=INFO python grpo.py` shows
vLLM's log.
"""

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
import warnings

from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns when a program is started

# vLLM says "Triton is installed, but doesn't include CPU backend" before its own logging is set up.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())

if "TRANSFORMERS_VERBOSITY" not in os.environ:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    transformers_logging.set_verbosity_error()

if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
    transformers_logging.disable_progress_bar()  # "Loading weights", which takes less than a second
    enable_progress_bars()  # a download keeps its bar: it can take many minutes

warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or")


@contextlib.contextmanager
def library_notices():
    """Hides what is printed in its block, also by C++ code, which Python's sys.stdout never sees.

    Such lines are vLLM's "NUMA binding" and Gloo's "Rank 0 is connected". Lines that contain
    "error" are printed afterwards, to stderr. If the block raises an exception, everything is
    printed.
    """
    flush()
    stdout = os.dup(1)
    stderr = os.dup(2)
    failed = True
    with tempfile.TemporaryFile() as captured:
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
            captured.seek(0)
            for line in captured:
                if failed or b"error" in line.lower():
                    os.write(2, line)


def flush():
    """Writes out what Python and the C library still hold back, to where it was meant to go."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
