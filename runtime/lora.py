"""LoRA: a small product of two matrices is trained beside each weight, which stays as it is.

From *LoRA: Low-Rank Adaptation of Large Language Models* (Hu et al. 2021, arXiv 2106.09685). A
linear layer with the weight W [out, in] computes with

    W + α/r · B·A       A [r, in] at random within ±1/√in, B [out, r] zero

so that a run begins with the model itself. A and B, the adapter, are float32 and trained; W is in
--dtype and frozen. The settings follow *LoRA Without Regret* (Schulman and Thinking Machines 2025):
adapters on all linear layers except the head, α 32, and a learning rate ten times as high as
for full fine-tuning, whatever the rank.

The layers are peft's. They are put into the model and leave its own form (.model, .lm_head) alone.
A checkpoint has the adapter in peft's form, too: a few MB, which peft and vLLM load beside --model.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate

ADAPTER = "default"  # peft's name for the only one


def add_adapters(policy, args):
    """Freezes a policy's weights, in args.dtype, and adds adapters of rank args.lora_rank to train.

    policy: with float32 weights, whole and still on the CPU. A depends on args.seed alone, so that
    all processes have the same one; torch's random state stays as it was.
    """
    from peft import LoraConfig, inject_adapter_in_model  # two seconds, needed here alone

    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules="all-linear",  # peft leaves out the head
        task_type="CAUSAL_LM",  # this and the next for those who load the adapter alone
        base_model_name_or_path=args.model,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        inject_adapter_in_model(config, policy.lm, ADAPTER)  # it freezes all other parameters
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, args.dtype))


def without_adapters(policy):
    """The model that training began with: the policy, to call like it, with its adapters off.

    There is no second copy of the weights.
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
    """All of a state_dict as an ordinary model has it, without gradient: (name, weight).

    Its parameters come first, then the buffers that a checkpoint holds (some activations have
    trained ones).

    An adapter is added to its weight, in float32, and the sum is rounded to the weight's type. One
    tensor at a time, and the model stays as it is: to add an adapter in place and to subtract it
    again would not give the same weights back. Under FSDP2 the sum is sharded like its weight; all
    processes must ask for the weights in the same order.
    """
    for name, weight in model.named_parameters(remove_duplicate=remove_duplicate):
        weight = weight.detach()
        if ".lora_A." in name or ".lora_B." in name:
            continue
        if name.endswith(".base_layer.weight"):
            layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
            weight = (weight.float() + adapter_of(layer)).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight
    yield from saved_buffers(model)


def saved_buffers(model):
    """The buffers that a state_dict holds: (name, buffer)."""
    saved = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def peft_weights(model):
    """The weights of all A and B, without gradient, by peft's names: (name, weight)."""
    for name, weight in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", weight.detach()


def adapter_of(layer):
    """α/r · B·A of a layer, [out, in] in float32, sharded like its weight."""
    a = layer.lora_A[ADAPTER].weight.detach()  # [r, in]
    b = layer.lora_B[ADAPTER].weight.detach()  # [out, r]
    if isinstance(a, DTensor):
        a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)  # whole in each process
    return layer.scaling[ADAPTER] * (b @ a)
