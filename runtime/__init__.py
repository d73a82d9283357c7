"""What every trainer calls and no algorithm changes. Whoever reads for the algorithm can skip it.

How a run begins
- papers: the papers' settings for each task
- settings: the types and ranges of settings, and those that every script has
- flags: where a setting's value comes from; mistakes found before torch is imported
- start: the rest that can be read and checked before anything large is loaded, in order
- checks, hub: what can't work on this machine, in this folder, with this model; is the hub there
- header: what a run prints before it starts

Where it runs
- ranks, processes: which process this is; devices, and what processes tell each other
- streams: standard output that is closed, has no reader or only ASCII
- threads: how a CPU's threads wait for each other
- machine, memory: what the machine has; how much a run needs and used
- placement: a policy on its device: compiled, recomputing, split by FSDP2
- lora: adapters that are trained in place of the weights
- engine: vLLM's options for the machine, seeds of requests, sleeping and waking
- quiet: hides notices of the libraries, never their errors

What a step calls
- dealing: the order of problems; dealing out problems and groups to the processes
- chats: prompts and responses as tokens and as texts
- passes: which rows make a forward pass; prompts that are computed once
- measure, clock: metrics, seconds by phase

What a run leaves
- records, folders, files: its folder, and files that a kill can't spoil
- checkpoints: saving and resuming
- curves, terminal, before_after: what one looks at
- watched_tokens: what an update did to each token of a few responses, for tools/watch.py
- signals: Ctrl-C, SIGTERM, a closed terminal
"""

import sys
from importlib.util import find_spec

from runtime import streams

if not find_spec("tyro"):
    sys.exit(
        "error: this Python lacks the packages of requirements.txt. `make install` puts them into "
        ".venv; .venv/bin/python has them, or python after `. .venv/bin/activate`"
    )

streams.open_closed()
streams.show_any_sign()
