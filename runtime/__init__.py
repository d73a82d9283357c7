"""Everything that all trainers call and no algorithm changes. To learn an algorithm, skip it.

How a run begins
- papers: the papers' settings per task
- settings: the types and ranges of settings, and those that every script has
- flags: where a setting's value comes from; finds mistakes before torch is imported
- start: reads and checks, in order, all that can be checked before anything large is loaded
- checks: find whatever can't work on this machine, in this folder, with this model
- header: the text that a run prints before it starts

Where it runs
- ranks, processes: this process's number; devices, and communication between processes
- threads: how a CPU's threads wait for each other
- machine, memory: GPUs and fast dtypes; memory that a run needs and used
- placement: puts a policy on its device: compiled, recomputing, sharded by FSDP2
- lora: adapters that are trained in place of the weights
- engine: vLLM's options for the machine, seeds of requests, sleeping and waking
- quiet: hides notices of the libraries, never their errors

What a step calls
- dealing: the order of problems; assigns problems and groups to processes
- chats: prompts and responses as tokens and as text
- passes: which rows form a forward pass; prompts that are computed once
- measure, clock: metrics; seconds per phase

What a run leaves behind
- records, folders, files: its folder, and files that a kill can't corrupt
- checkpoints: saving and resuming
- curves, terminal, before_after: plots and output to look at
- watched_tokens: the effect of an update on each token of a few responses, for tools/watch.py
- signals: Ctrl-C, SIGTERM, a closed terminal
- streams: output that is closed or has lost its reader
"""

import sys
from importlib.util import find_spec

from runtime import streams

NEEDS_VLLM = (
    "runs need vLLM: make install (Linux); on a Mac or Windows: nano_grpo.py, WSL2, a container"
)
NEEDED = "tyro pydantic psutil tqdm rich transformers matplotlib pandas fastapi".split()
if missing := [name for name in NEEDED if not find_spec(name)]:
    sys.exit(
        f"error: {NEEDS_VLLM}. This Python, {sys.executable}, lacks {', '.join(missing)} "
        "(requirements-common.txt); make install puts all packages into .venv"
    )

streams.keep()
