"""Find out what this machine computes fast, and whether its GPUs can be used at all."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Processors' names for instructions that multiply in bfloat16. A CPU without them computes such
# products in float32, with a conversion before and after each.
BFLOAT16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
# This one counts only on AMD's processors. Intel's use AMX for speed, which a virtual machine may
# hide. Then float32 is 1.3 to 1.7 times as fast (measured: docs/speed.md).
FAST_OF_AMD = "avx512_bf16"
BFLOAT16_CAPABILITY = (8, 0)  # the first NVIDIA GPUs with bfloat16 (Ampere: A100, RTX 30)
LEAST_CAPABILITY = (7, 5)  # torch for CUDA 13 has no kernels below it (V100, P100)
LEAST_DRIVER = 580  # NVIDIA's, for CUDA 13, for which vLLM is built
ON_A_CPU = "on the CPU: `make install GPU=0 VENV=.venv-cpu`, then `.venv-cpu/bin/python grpo.py`"


def has_gpu():
    """Return whether torch can use a GPU or, before torch is imported, should be able to."""
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.is_available()
    if gpus_are_hidden() or not cuda_of_torch():
        return False
    # Some containers have the driver, but not the program nvidia-smi.
    return bool(nvidia_smi("name")) or Path("/dev/nvidiactl").exists()


def gpus_are_hidden():
    """Return whether the user wants the CPU: CUDA_VISIBLE_DEVICES is empty or begins with -1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def cuda_of_torch():
    """Return torch's CUDA version without importing torch; "" for a CPU build."""
    found = importlib.util.find_spec("torch")
    if not found:
        return ""
    version = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda[^=]*= '(.+)'", version, re.MULTILINE)
    return cuda[1] if cuda else ""


def has_fast_bfloat16():
    """Return whether bfloat16 is faster than float32, on the GPU or, without one, on the CPU."""
    if has_gpu():
        return gpu_has_bfloat16()
    return is_fast_in_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def fast_dtype():
    """Choose the compute dtype for this machine: "bfloat16", "float16" or "float32"."""
    if has_fast_bfloat16():
        return "bfloat16"
    return "float16" if has_gpu() else "float32"


def is_fast_in_bfloat16(about):
    """Return whether a CPU is faster in bfloat16 than in float32. about: its /proc/cpuinfo."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)", about, re.MULTILINE)
    found = BFLOAT16_INSTRUCTIONS & set(flags[1].split()) if flags else set()
    return bool(found - {FAST_OF_AMD}) or (bool(found) and "AuthenticAMD" in about)


def about_processor():
    """Return a core's entries in /proc/cpuinfo, such as "flags" and (not on ARM) "model name"."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(":") for line in lines]
    return {key.strip(): value.strip() for key, _, value in pairs}


def gpu_has_bfloat16():
    """Return whether this process's GPU has bfloat16 in hardware."""
    import torch

    return torch.cuda.get_device_capability() >= BFLOAT16_CAPABILITY


def driver_says_no_bfloat16():
    """Ask the driver, without torch, whether all GPUs lack bfloat16; False if it does not tell."""
    found = nvidia_smi("compute_cap")
    return bool(found) and all(
        tuple(map(int, value.split("."))) < BFLOAT16_CAPABILITY for (value,) in found
    )


def unusable_gpus(has_sampler=True):
    """Say why torch can't use a GPU that is there or needed, and what to do; "" if all is well.

    torch says only that CUDA is not available. Then a trainer would run on the CPU for days, or end
    in vLLM, whose GPU build needs a GPU. has_sampler: whether vLLM is needed.
    """
    import torch

    if torch.cuda.is_available() or not torch.version.cuda:  # CPU builds are installed on purpose
        return ""
    found = [] if gpus_are_hidden() else nvidia_smi("name,driver_version")
    if found:
        name, driver = found[0]
        return (
            f"there is a GPU ({name}), but torch, built for CUDA {torch.version.cuda}, can't use "
            f"it with driver {driver}: install driver {LEAST_DRIVER} or newer; if it is, look at "
            f"CUDA_VISIBLE_DEVICES, and restart the machine; {ON_A_CPU}"
        )
    if has_sampler:
        return (
            "torch and vLLM are builds for GPUs, and there is none: CUDA_VISIBLE_DEVICES may hide "
            "it, a container needs `docker run --gpus all`, a job must ask for a GPU; "
            f"{ON_A_CPU}"
        )
    return ""


def nvidia_smi(fields):
    """Return the driver's values of the `fields`: a list with one list per GPU.

    It is empty if there is no NVIDIA driver.
    """
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return []
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines()]
