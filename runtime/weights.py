"""A sample of the weights, which tells how many of them a step has changed."""

import torch
from torch.distributed.tensor import DTensor

SAMPLE = 2**20  # weights, about


def sample_of(policy, dtype):
    """About a million of this process's weights, evenly spread, as one tensor [n].

    dtype: "bfloat16" or "float32", the sampler's. Rounded to it, because a change that the sampler
    does not see does not count.
    """
    parts = []
    for parameter in policy.parameters():
        part = parameter.detach()
        if isinstance(part, DTensor):
            part = part.to_local()
        parts.append(part)
    stride = 1 + sum(part.numel() for part in parts) // SAMPLE
    dtype = getattr(torch, dtype)
    return torch.cat([part.flatten()[::stride].to(dtype) for part in parts])
