"""Everything that all trainers call and no algorithm changes. To learn an algorithm, skip it.

Before torch is imported
- settings: the types and ranges of settings, those that every script has, the papers' per task
- flags: where a setting's value comes from; finds mistakes
- checks: find whatever can't work on this machine, in this folder, with this model
- machine: this process's number, GPUs, fast dtypes, threads
- files: files that a kill can't corrupt; the folders of runs and checkpoints
- chats: prompts as tokens: the chat template

Models
- models: families, loading, FSDP2, float16; whether trainer and sampler compute the same model
- lora: adapters that are trained in place of the weights
- memory: memory that a run needs and used
- distributed: devices, and communication between processes; hides notices of the libraries
- sampler: vLLM's options for the machine, seeds of requests, sleeping and waking
- sampler_process: vLLM in a process of its own

A step
- batches: problems, forward passes, and their assignment to processes
- tools: the task's side of conversations
- metrics: metrics of responses, tokens and weights; seconds per phase

What a run leaves behind
- records: starts a run, and writes its files
- checkpoints: saving and resuming
- terminal: output to look at
- curves: plots

This module itself keeps a program alive if its output is closed, or can't be written any more.
`| head`, a `| tee` that Ctrl-C ends and a closed terminal take away its reader, and the disk of a
log may be full. A print would then end a run in the middle of a step.
"""

import io
import os
import sys
from importlib.util import find_spec

NEEDS_VLLM = (
    "runs need vLLM: make install (Linux); on a Mac or Windows: nano_grpo.py, WSL2, a container"
)
NEEDED = "tyro pydantic psutil tqdm rich transformers matplotlib pandas fastapi".split()
if missing := [name for name in NEEDED if not find_spec(name)]:
    sys.exit(
        f"error: {NEEDS_VLLM}. This Python, {sys.executable}, lacks {', '.join(missing)} "
        "(requirements-common.txt); make install puts all packages into .venv"
    )


class Unbreakable(io.FileIO):
    """Write to a descriptor. If that fails, drop all that is written from then on."""

    def write(self, content):
        try:
            return super().write(content) or 0  # None: a busy terminal; the buffer tries again
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.fileno() == 1:
                text = f"{sys.argv[0]} goes on without standard output: {error.strerror}"
                print(text, file=sys.stderr)
            return len(content)


def keep_streams() -> None:
    """Make every print succeed from now on. Characters that an encoding lacks become "?"."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # otherwise a file would get the number
        os.set_inheritable(opened, True)  # for child programs
    os.close(opened)
    for name, number in (("stdout", 1), ("stderr", 2)):
        usual = getattr(sys, name)
        if usual is getattr(sys, f"__{name}__"):  # not a notebook's or pytest's
            encoding = usual.encoding if usual else "utf-8"
            raw = io.BufferedWriter(Unbreakable(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, encoding, "replace", line_buffering=True))


keep_streams()
