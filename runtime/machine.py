"""This process's number, and what its machine computes fast: GPUs, dtypes, threads.

Nothing here imports torch at its start: settings are checked before.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from runtime import files


def from_torchrun(name, default) -> int:
    return int(os.environ.get(name) or default)


WORLD_SIZE = from_torchrun("WORLD_SIZE", 1)  # number of processes
RANK = from_torchrun("RANK", 0)  # counted from 0
LOCAL_WORLD_SIZE = from_torchrun("LOCAL_WORLD_SIZE", 1)  # on this machine
LOCAL_RANK = from_torchrun("LOCAL_RANK", 0)  # like RANK, among this machine's processes


# ---------------------------------------------------------------------------------- GPUs and dtypes

# Processors' names for instructions that multiply in bfloat16. A CPU without them computes such
# products in float32, with a conversion before and after each.
BFLOAT16_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
# This one counts only on AMD's processors. Intel's use AMX for speed, which a virtual machine may
# hide. Then float32 is 1.3 to 1.7 times as fast (measured: docs/speed.md).
FAST_OF_AMD = "avx512_bf16"
BFLOAT16_CAPABILITY = 8  # of the first NVIDIA GPUs with bfloat16 (Ampere: A100, RTX 30)
ON_A_CPU = "on the CPU: `make install GPU=0 VENV=.venv-cpu`, then `.venv-cpu/bin/python grpo.py`"
UNSUPPORTED = {"hip": "AMD GPUs (ROCm)", "xpu": "Intel GPUs"}  # by names in torch/version.py


def has_gpu():
    """Return whether torch can use a GPU or, before torch is imported, should be able to."""
    if "torch" in sys.modules:
        return sys.modules["torch"].cuda.is_available()
    return bool(built_for("cuda")) and not gpus_are_hidden() and bool(nvidia_smi("name"))


def gpus_are_hidden() -> bool:
    """Return whether the user wants the CPU: CUDA_VISIBLE_DEVICES is empty or begins with -1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def built_for(name):
    """Return the version of "cuda", "hip" or "xpu" in torch's build, or "". Imports no torch."""
    found = importlib.util.find_spec("torch")
    if not found:
        return ""
    version = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    line = re.search(rf"^{name}[^=]*= '(.+)'", version, re.MULTILINE)
    return line[1] if line else ""


def unsupported_build() -> str:
    """Say that torch's build is for GPUs of AMD or Intel, and what to do; "" otherwise."""
    for name, gpus in UNSUPPORTED.items():
        if built_for(name):
            return f"torch is a build for {gpus}, which are not supported: train {ON_A_CPU}"
    return ""


def has_fast_bfloat16():
    """Return whether bfloat16 is faster than float32, on the GPU or, without one, on the CPU."""
    if has_gpu():
        return gpu_has_bfloat16()
    return is_fast_in_bfloat16(about_processor())


def fast_dtype() -> str:
    """Choose the compute dtype for this machine: "bfloat16", "float16" or "float32"."""
    if has_fast_bfloat16():
        return "bfloat16"
    return "float16" if has_gpu() else "float32"


def cores() -> list:
    """Return the numbers of the cores that this process may use; only Linux restricts them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def about_processor() -> dict:
    """Return a core's entries in /proc/cpuinfo, such as "flags" and (not on ARM) "model name"."""
    file = Path("/proc/cpuinfo")
    if not file.exists():  # on a Mac and on Windows
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(":") for line in lines]
    return {key.strip(): value.strip() for key, _, value in pairs}


def is_fast_in_bfloat16(processor) -> bool:
    """Return whether a CPU is faster in bfloat16 than in float32. processor: its entries."""
    flags = processor.get("flags") or processor.get("Features", "")  # Features: on ARM
    found = BFLOAT16_INSTRUCTIONS & set(flags.split())
    is_amd = processor.get("vendor_id") == "AuthenticAMD"
    return bool(found if is_amd else found - {FAST_OF_AMD})


def gpu_has_bfloat16():
    """Return whether this process's GPU has bfloat16 in hardware."""
    import torch

    return torch.cuda.get_device_capability()[0] >= BFLOAT16_CAPABILITY


def driver_says_no_bfloat16() -> bool:
    """Ask the driver, without torch, whether all GPUs lack bfloat16; False if it does not tell."""
    found = nvidia_smi("compute_cap")
    return bool(found) and all(float(value) < BFLOAT16_CAPABILITY for value in found)


def unusable_gpus():
    """Say why torch's build for GPUs can use none, and what to do; "" if all is well."""
    import torch

    if torch.cuda.is_available() or not torch.version.cuda:  # CPU builds are installed on purpose
        return unsupported_build()
    return (
        "torch and vLLM are builds for GPUs, and torch finds none: nvidia-smi must show driver 580 "
        "or newer (for CUDA 13), CUDA_VISIBLE_DEVICES may hide the GPU, a container needs "
        f"`docker run --gpus all`, a job must ask for a GPU; {ON_A_CPU}"
    )


def nvidia_smi(field):
    """Return the driver's value of this field for each GPU; [] without an NVIDIA driver."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.splitlines()


def device_name():
    """Return the GPU's name, or the number of CPU cores."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({os.cpu_count()} cores)"


# ------------------------------------------------------------------------------------------ threads

# Waiting threads that spin are faster if nothing else computes and the model is so small that they
# meet every few microseconds: a step is 1.5 times as fast with kk_tiny (hidden size 128), but no
# faster with SmolLM2-135M (576). While another program runs, spinning threads hold up the threads
# that they wait for: a step takes 3 to 4 times as long instead of 1.6 to 2.5, and 13 times next to
# a second run that spins.
SMALL_MODEL = 256  # smallest hidden size that is not small; measured at 128 and 576 only
# With kk_tiny, two threads save a tenth of the sampler's seconds. While another program holds up
# one of them, they take two to four times as long as one. The number must not depend on that:
# log-probabilities differ in rounding with it, and a resumed run must equal an unbroken one.
THREADS_OF_SMALL_SAMPLER = 1
BUSY = 0.2  # fraction of the machine's cores that others use, in a fifth of a second


def choose_waiting(model) -> None:
    """Let waiting threads sleep if spinning does not help. Call it before importing torch.

    model: a model's folder or its name on the hub. Keeps settings from the environment.
    """
    if is_small_model(model) and psutil.cpu_percent(0.2) <= 100 * BUSY:
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if WORLD_SIZE == 1:
        # vLLM would bind each thread to a core, which another program may occupy. If several
        # processes share the cores, it has to.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def is_small_model(model):
    """Return whether the model computes a token so quickly that threads gain little.

    model: a folder. A model on the hub counts as large.
    """
    config = Path(model, "config.json")
    if not config.is_file():  # on the hub
        return False
    return files.read_object(config).get("hidden_size", SMALL_MODEL) < SMALL_MODEL
