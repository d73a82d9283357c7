"""Whether a step changes the weights that the sampler sees.

In bfloat16 a small learning rate can change none of them; weights_changed in the metrics tells.
"""

import torch
from torch.distributed.tensor import DTensor

from runtime.processes import all_reduce


def subset(policy, dtype):
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


def changed(before, policy, dtype):
    """Which share of the policy's weights has changed since `before`, which subset gave."""
    num_changed = (subset(policy, dtype) != before).sum()
    return all_reduce(num_changed) / all_reduce(len(before))
