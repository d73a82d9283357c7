"""What this machine computes fast, and whether its GPUs can be used at all."""

import os
import shutil
import subprocess

import torch

# Processors' names for their instructions for products in bfloat16. Without one of them a CPU
# computes such products in float32, with a conversion before and after each.
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "arm_bf16")
BFLOAT16_CAPABILITY = (8, 0)  # the first NVIDIA GPUs with bfloat16 (Ampere: A100, RTX 30)


def has_fast_bfloat16():
    """Whether bfloat16 is faster than float32: on this process's GPU, or else on the CPU."""
    if torch.cuda.is_available():
        return gpu_has_bfloat16()
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in BFLOAT16_INSTRUCTIONS)


def gpu_has_bfloat16():
    """Whether this process's GPU has bfloat16 in hardware."""
    return torch.cuda.get_device_capability() >= BFLOAT16_CAPABILITY


def unusable_gpus():
    """Why GPUs that are there can't be used, in words that say what to do; "" if all is well.

    torch says only that CUDA is not available. Then a trainer would run on the CPU for days.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # the user wants the CPU
    if hidden or torch.cuda.is_available() or not torch.version.cuda:
        return ""  # a CPU build of torch was installed on purpose
    found = nvidia_smi("name,driver_version")
    if not found:
        return ""
    name, driver = found[0]
    return (
        f"there is a GPU ({name}), but its driver {driver} does not work with this torch, which is "
        f"built for CUDA {torch.version.cuda}: install a newer driver (CUDA 13 needs 580, CUDA "
        "12.8 needs 570) or a torch for an older CUDA; CUDA_VISIBLE_DEVICES= trains on the CPU"
    )


def nvidia_smi(fields):
    """What the driver says of each GPU: a list with the values of the `fields`, a GPU an entry.

    It is empty if there is no NVIDIA driver.
    """
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return []
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines()]
