"""Measure the seconds per phase of a step, and the memory that the step needs."""

import time

import torch
import torch.distributed as dist

from runtime import memory
from runtime.processes import all_reduce


class Clock:
    """Times one step. Each lap is a phase: sampling, scoring, log-probabilities, updating."""

    def __init__(self):
        self.seconds = {}  # by phase
        self.peak_gb = 0.0
        self.started = time.perf_counter()
        self.last = self.started

    def lap(self, phase, records_memory=True):
        """Add the seconds since the last lap to time/PHASE, and record the memory in use now.

        A GPU keeps working after Python has moved on, so the lap waits for the GPU to finish.
        """
        if records_memory:
            self.peak_gb = max(self.peak_gb, memory.peak_gb())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        key = f"time/{phase}"
        self.seconds[key] = self.seconds.get(key, 0) + now - self.last
        self.last = now

    def end(self, phase=""):
        """End the step. Return the seconds, and the peak of the memory recorded at the laps.

        phase: the last one, in which the sampler wakes up and takes its own memory; "" if all
        phases had their laps.
        """
        if phase:
            self.lap(phase, records_memory=False)
        return {
            **self.seconds,
            "time/step": self.last - self.started,
            "peak_memory_gb": all_reduce(self.peak_gb, dist.ReduceOp.MAX),
        }
