"""What this machine computes fast, and whether its GPUs can be used at all."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Processors' names for their instructions for products in bfloat16. Without one of them a CPU
# computes such products in float32, with a conversion before and after each.
BFLOAT16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
# This one counts on AMD's processors alone. Intel's have AMX for speed; a virtual machine may hide
# that, and then float32 is 1.3 to 1.7 times as fast (measured: docs/speed.md).
FAST_OF_AMD = "avx512_bf16"
BFLOAT16_CAPABILITY = (8, 0)  # the first NVIDIA GPUs with bfloat16 (Ampere: A100, RTX 30)


def has_gpu():
    """Whether torch can use a GPU. Before torch is imported: whether it should be able to."""
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.is_available()
    if gpus_are_hidden() or not cuda_of_torch():
        return False
    # In some containers there is the driver, but not the program nvidia-smi.
    return bool(nvidia_smi("name")) or Path("/dev/nvidiactl").exists()


def gpus_are_hidden():
    """Whether the user wants the CPU: CUDA_VISIBLE_DEVICES is empty, or begins with -1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def cuda_of_torch():
    """The version of CUDA that torch is built for, without importing it; "" for a CPU build."""
    found = importlib.util.find_spec("torch")
    if not found:
        return ""
    version = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda[^=]*= '(.+)'", version, re.MULTILINE)
    return cuda[1] if cuda else ""


def has_fast_bfloat16():
    """Whether bfloat16 is faster than float32: on the GPU, or else on the CPU."""
    if has_gpu():
        return gpu_has_bfloat16()
    return is_fast_in_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def fast_dtype():
    """The type of compute to choose here: "bfloat16", "float16" or "float32"."""
    if has_fast_bfloat16():
        return "bfloat16"
    return "float16" if has_gpu() else "float32"


def is_fast_in_bfloat16(about):
    """Whether a CPU is faster in bfloat16 than in float32. about: its /proc/cpuinfo."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", about, re.MULTILINE)
    found = BFLOAT16_INSTRUCTIONS & set(flags[1].split()) if flags else set()
    return bool(found - {FAST_OF_AMD}) or (bool(found) and "AuthenticAMD" in about)


def about_processor():
    """What /proc/cpuinfo says of a core, such as "flags" and (not on ARM) "model name"."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(":") for line in lines]
    return {key.strip(): value.strip() for key, _, value in pairs}


def gpu_has_bfloat16():
    """Whether this process's GPU has bfloat16 in hardware."""
    import torch

    return torch.cuda.get_device_capability() >= BFLOAT16_CAPABILITY


def driver_says_no_bfloat16():
    """Whether no GPU has bfloat16, by the driver and without torch; False if it does not tell."""
    found = nvidia_smi("compute_cap")
    return bool(found) and all(
        tuple(map(int, value.split("."))) < BFLOAT16_CAPABILITY for (value,) in found
    )


def unusable_gpus():
    """Why GPUs that are there can't be used, in words that say what to do; "" if all is well.

    torch says only that CUDA is not available. Then a trainer would run on the CPU for days.
    """
    import torch

    if gpus_are_hidden() or torch.cuda.is_available() or not torch.version.cuda:
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
