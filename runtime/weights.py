"""Whether a step changes the weights that the sampler sees.

In bfloat16 a small learning rate can change none of them; weights_changed in the metrics tells.
"""

import contextlib

import torch
from torch.distributed.tensor import DTensor

from runtime.processes import all_reduce


@contextlib.contextmanager
def changes_logged(metrics, policy, dtype):
    """Logs weights_changed: which share of the policy's weights its block changes.

    Counted on about a million weights, as they are in the sampler's dtype ("bfloat16" or
    "float32").
    """
    before = some_of(policy, dtype)
    yield
    num_changed = (some_of(policy, dtype) != before).sum()
    metrics["weights_changed"] = all_reduce(num_changed) / all_reduce(len(before))


def some_of(policy, dtype):
    """About a million of a policy's weights, in this dtype, as [n]: the same ones at each call.

    Under FSDP2 every process gives some of its own shards.
    """
    parts = []
    for parameter in policy.parameters():
        part = parameter.detach()
        if isinstance(part, DTensor):
            part = part.to_local()
        parts.append(part.flatten())
    stride = 1 + sum(len(part) for part in parts) // 2**20
    return torch.cat([part[::stride].to(getattr(torch, dtype)) for part in parts])
