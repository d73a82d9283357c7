"""Put a model on its device: recompute activations, compile it, and shard it over processes."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime import families, processes

# The number of programs that torch.compile may make of a layer's code, counted over all layers.
# Beyond it, torch.compile gives up, and the run is slow. Its default is 8. A run needs 6: with
# gradient, without, and for the reference, each for one row and for several. bfloat16 with
# recomputing needs 8. Several processes (FSDP2) and a critic need no more.
PROGRAMS = 24

REPEATED = "sdpa_repeated"


def repeated_attention(module, query, key, value, attention_mask, **options):
    """Run transformers' torch attention with a copy of keys and values for each head of queries.

    All are [N, heads, T, width]. transformers tells torch that heads share keys and values instead.
    In float32, and in float16 on a T4, no fused kernel supports sharing. The kernel that does needs
    memory that grows with T².
    """
    times = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, times), repeat_kv(value, times)
    # Pass None instead of the module, which would say that heads share.
    return sdpa_attention_forward(None, query, key, value, attention_mask, **options)


AttentionInterface.register(REPEATED, repeated_attention)
AttentionMaskInterface.register(REPEATED, sdpa_mask)


def place(policy, args):
    """Put the policy on this process's device; with several processes it is sharded.

    With --gradient_checkpointing, a trained policy recomputes activations in the backward pass
    instead of keeping them.
    """
    lm = policy.lm
    lm.config.dtype = args.dtype  # the dtype of checkpoints; changes no weight
    fix_longrope(lm, args.max_prompt_tokens + args.max_response_tokens)
    args.recurrent = families.is_recurrent(lm.config)
    if getattr(lm.config, "attn_logit_softcapping", None):
        lm.set_attn_implementation("eager")  # torch's attention can't cap its logits (Gemma 2)
    is_torchs = lm.config._attn_implementation == "sdpa"
    if processes.ON_GPU and args.dtype != "bfloat16" and is_torchs:
        lm.set_attn_implementation(REPEATED)
    is_trained = any(parameter.requires_grad for parameter in policy.parameters())
    if is_trained and args.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in lm.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # so that it recomputes; its parts still have no dropout
    if args.compile:
        torch.compiler.config.recompile_limit = PROGRAMS
        for layer in lm.model.layers:
            layer.compile(dynamic=True)  # one program for all lengths
        # Fuse the head's softmax, too: its float32 logits are the largest tensors of all.
        policy.head = torch.compile(policy.head, dynamic=True)
    if processes.WORLD_SIZE > 1:
        shard(policy, getattr(torch, args.dtype))
    return policy.to(processes.DEVICE)  # on a GPU, FSDP2 has already moved the layers


def fix_longrope(lm, context):
    """Make a model with longrope (Phi-3, Phi-4-mini) keep the factors that vLLM has in this run.

    vLLM chooses the short or the long factors by `context`, the most tokens of a sequence.
    transformers would choose in each forward pass, by its longest row.
    """
    for rotary in lm.modules():
        if getattr(rotary, "rope_type", None) == "longrope":
            rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, seq_len=context)
            rotary.rope_type = "default"  # otherwise each forward pass would choose


def shard(policy, dtype):
    """Shard with FSDP2: a process keeps a shard of every layer, and gathers a layer to compute."""
    sharding = {
        "mesh": processes.mesh(),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype,  # dtype of gathered weights: half the traffic
            reduce_dtype=torch.float32,  # dtype in which gradients are summed over processes
            cast_forward_inputs=False,  # the residual stream stays float32
        ),
    }
    for layer in policy.lm.model.layers:
        fully_shard(layer, **sharding)
    # Otherwise FSDP2 keeps the root's weights (embedding, head) gathered after the forward pass.
    fully_shard(policy, reshard_after_forward=True, **sharding)
