"""Seconds by phase: how long a step samples, scores, computes log-probabilities, updates."""

import contextlib
import time

import torch


@contextlib.contextmanager
def timed(metrics, phase):
    """Adds the seconds that its block takes to metrics["time/phase"].

    A GPU works on after Python has gone on; the block ends when the GPU has finished.
    """
    key = f"time/{phase}"
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    metrics[key] = metrics.get(key, 0) + seconds
