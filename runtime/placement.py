"""A model on its device: recomputing activations, compiled, and sharded over several processes."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from runtime import processes

# How many programs torch.compile may make of a layer, for all layers together; for what comes after
# them it gives up, and the run is slow. Its own limit is 8. A run needs 6: with gradient, without,
# and of the reference, each for one row and for several; in bfloat16, with recomputing, it needs 8.
# Several processes (FSDP2) and a critic need no more.
PROGRAMS = 24

REPEATED = "sdpa_repeated"


def repeated_attention(module, query, key, value, attention_mask, **options):
    """transformers' attention by torch, with a copy of keys and values for each head of queries.

    All are [N, heads, T, width]. transformers tells torch that heads share keys and values instead.
    In float32, and in float16 on a T4, no fused kernel takes that, and the memory of the kernel
    that does grows with T².
    """
    times = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, times), repeat_kv(value, times)
    # None in place of the module, which says that heads share.
    return sdpa_attention_forward(None, query, key, value, attention_mask, **options)


AttentionInterface.register(REPEATED, repeated_attention)
AttentionMaskInterface.register(REPEATED, sdpa_mask)


def place(policy, args):
    """The policy on this process's device; with several processes it is sharded.

    With --gradient_checkpointing a policy that is trained computes activations again in the
    backward pass instead of keeping them.
    """
    lm = policy.lm
    lm.config.dtype = args.dtype  # changes no weight: it says how checkpoints will save them
    is_torchs = lm.config._attn_implementation == "sdpa"
    if processes.ON_GPU and args.dtype != "bfloat16" and is_torchs:
        lm.set_attn_implementation(REPEATED)
    is_trained = any(parameter.requires_grad for parameter in policy.parameters())
    if is_trained and args.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in lm.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # or it recomputes nothing; its parts stay without dropout
    if args.compile:
        torch.compiler.config.recompile_limit = PROGRAMS
        for layer in lm.model.layers:
            layer.compile(dynamic=True)  # one program for all lengths
    if processes.WORLD_SIZE > 1:
        shard(policy, getattr(torch, args.dtype))
    return policy.to(processes.DEVICE)  # on a GPU FSDP2 has moved its layers already


def shard(policy, dtype):
    """FSDP2: a process keeps a shard of every layer, and gathers the rest of it to compute."""
    sharding = {
        "mesh": processes.mesh(),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype,  # gathered in this type: half the traffic
            reduce_dtype=torch.float32,  # gradients are summed over the processes in this one
            cast_forward_inputs=False,  # the residual stream stays float32
        ),
    }
    for layer in policy.lm.model.layers:
        fully_shard(layer, **sharding)
    # FSDP2 would keep the root's weights (embedding and head) gathered after the forward pass.
    fully_shard(policy, reshard_after_forward=True, **sharding)
