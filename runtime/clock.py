"""The seconds of a step by phase, and the memory that it needs."""

import time

import torch
import torch.distributed as dist

from runtime import memory
from runtime.processes import all_reduce


class Clock:
    """Begins with a step. Each lap is a phase: sampling, scoring, log-probabilities, updating."""

    def __init__(self):
        self.seconds = {}  # by phase
        self.peak_gb = 0.0
        self.started = time.perf_counter()
        self.last = self.started

    def lap(self, phase):
        """Adds the seconds since the lap before to time/PHASE, and notes the memory in use now.

        A GPU works on after Python has gone on: the lap ends when the GPU has finished.
        """
        self.peak_gb = max(self.peak_gb, memory.peak_gb())
        self.stop(phase)

    def stop(self, phase):
        """The same without a look at the memory."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        key = f"time/{phase}"
        self.seconds[key] = self.seconds.get(key, 0) + now - self.last
        self.last = now

    def end(self, phase=""):
        """Ends the step. Returns the seconds, and the peak of the memory at the laps before.

        phase: the last one, in which the sampler wakes up and takes its own memory; "" if all
        phases had their laps.
        """
        if phase:
            self.stop(phase)
        return {
            **self.seconds,
            "time/step": self.last - self.started,
            "peak_memory_gb": all_reduce(self.peak_gb, dist.ReduceOp.MAX),
        }
