"""Whether a step changes the weights that the sampler sees.

In bfloat16 a small learning rate can change none of them; weights_changed in the metrics tells.
"""

import torch
from torch.distributed.tensor import DTensor

from runtime import lora
from runtime.processes import all_reduce


def subset(policy, dtype):
    """About a million of a policy's weights, in this dtype, as [n]: the same ones at each call.

    Under FSDP2 every process gives some of its own shards. LoRA's adapters are added.
    """
    stride = 1 + sum(own_shard(parameter).numel() for parameter in policy.parameters()) // 2**20
    parts = []
    for _, weight in lora.merged_weights(policy):  # one at a time
        parts.append(own_shard(weight).flatten()[::stride].to(getattr(torch, dtype)))
    return torch.cat(parts)


def own_shard(weight):
    """This process's shard of a weight, or all of it, without gradient."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight


def changed(before, policy, dtype):
    """Which share of the policy's weights has changed since `before`, which subset gave."""
    num_changed = (subset(policy, dtype) != before).sum()
    return all_reduce(num_changed) / all_reduce(len(before))
