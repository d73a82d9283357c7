"""LoRA: train a small product of two matrices next to each weight, and freeze the weight.

From *LoRA: Low-Rank Adaptation of Large Language Models* (Hu et al. 2021, arXiv 2106.09685). A
linear layer with the weight W [out, in] computes with

    W + α/r · B·A       A [r, in] at random within ±1/√in, B [out, r] zero

so that a run begins with the model itself. A and B, the adapter, are float32 and trained; W is in
--dtype and frozen. The settings follow *LoRA Without Regret* (Schulman and Thinking Machines 2025):
adapters on all linear layers except the head, α 32, and a learning rate ten times as high as
for full fine-tuning, whatever the rank.

The layers are peft's. They are inserted into the model and leave its own form (.model, .lm_head)
alone. A checkpoint also has the adapter in peft's format: a few MB to load on top of --model.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate

ADAPTER = "default"  # peft's name for the only one


def add_adapters(policy, args) -> None:
    """Freeze a policy's weights, in args.dtype, and add trainable adapters of rank args.lora_rank.

    policy: with float32 weights, whole and still on the CPU. A depends on args.seed alone, so that
    all processes have the same A; torch's random state stays as it was.
    """
    from peft import LoraConfig, inject_adapter_in_model  # two seconds, only LoRA needs it

    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules="all-linear",  # peft skips the head
        task_type="CAUSAL_LM",  # this and the next: for loading the adapter alone
        base_model_name_or_path=args.model,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        inject_adapter_in_model(config, policy.lm, ADAPTER)  # it also freezes all other parameters
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, args.dtype))


def without_adapters(policy):
    """Return the model that training began with: a function like the policy, with adapters off.

    It needs no second copy of the weights.
    """
    layers = [module for module in policy.modules() if hasattr(module, "lora_A")]

    def reference(*inputs):
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return policy(*inputs)
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    return reference


def merged_weights(model, remove_duplicate=True):
    """Yield (name, weight) for all weights and saved buffers, as an ordinary model has them.

    An adapter is added to its weight in float32, and the sum is rounded to the weight's dtype. This
    happens for one tensor at a time and not in place, because adding an adapter and subtracting it
    again would not restore the weights exactly. Under FSDP2 the sum is sharded like its weight; all
    processes must ask for the weights in the same order.
    """
    for name, weight in all_tensors(model, remove_duplicate):
        weight = weight.detach()
        if ".lora_A." in name or ".lora_B." in name:
            continue
        if name.endswith(".base_layer.weight"):
            layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
            weight = (weight.float() + adapter_of(layer)).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def all_tensors(model, remove_duplicate=True):
    """Yield (name, tensor) of parameters and saved buffers, such as Gemma 4's scalars."""
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            yield name, buffer


def peft_weights(model):
    """Yield (peft's name, weight) for all A and B, without gradient."""
    for name, weight in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", weight.detach()


def adapter_of(layer):
    """Return α/r · B·A of a layer, [out, in] in float32, sharded like its weight."""
    a = layer.lora_A[ADAPTER].weight.detach()  # [r, in]
    b = layer.lora_B[ADAPTER].weight.detach()  # [out, r]
    if isinstance(a, DTensor):
        a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)  # whole in each process
    return layer.scaling[ADAPTER] * (b @ a)
