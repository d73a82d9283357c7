"""What CUDA's build of vLLM does on cards that are not here: `make gpu-paths` installs it and runs this, without a GPU.

For each card: vLLM's configuration from runtime/sampler.py's options.

    python tests/gpu_paths.py          all cards
    python tests/gpu_paths.py T4       one
"""

import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]
CARDS = {  # (name, compute capability, GiB of memory, multiprocessors)
    "P100": ("Tesla P100-PCIE-16GB", (6, 0), 15.89, 56),
    "V100": ("Tesla V100-SXM2-16GB", (7, 0), 15.77, 80),
    "T4": ("Tesla T4", (7, 5), 14.56, 40),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 79.15, 108),
    "4090": ("NVIDIA GeForce RTX 4090", (8, 9), 23.52, 128),
    "L4": ("NVIDIA L4", (8, 9), 21.95, 58),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 79.10, 132),
    "B200": ("NVIDIA B200", (10, 0), 178.0, 148),
    "5090": ("NVIDIA GeForce RTX 5090", (12, 0), 31.36, 170),
}
CHECKED = {  # card: (type of compute, kind of model)
    "T4": ("float16", "qwen2"),
    "A100": ("bfloat16", "qwen2"),
    "4090": ("bfloat16", "llama"),
    "L4": ("bfloat16", "qwen3"),
    "H100": ("bfloat16", "gemma"),
    "B200": ("bfloat16", "qwen3"),
    "5090": ("bfloat16", "gemma3_text"),
}
# Triton and vLLM's allocator load the driver's library. No function of this one does anything.
FUNCTIONS = """cuInit cuGetProcAddress_v2 cuGetProcAddress cuPointerGetAttribute cuTensorMapEncodeTiled cuCtxGetCurrent
    cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString cuMemAddressFree cuMemAddressReserve
    cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap cuDriverGetVersion
    cuDeviceGetCount cuDeviceGet"""


def main(cards):
    """Each in a process of its own. Exit code 1 if one failed."""
    import torch

    if not torch.version.cuda:
        sys.exit(f"error: this torch is a build for CPUs: pip install 'torch==={torch.__version__.split('+')[0]}'")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        stub = "".join(f"int {name}(void) {{ return 100; }}\n" for name in FUNCTIONS.split())
        compiler = ["gcc", "-shared", "-fPIC", "-x", "c", "-o", f"{folder}/libcuda.so.1", "-"]
        subprocess.run(compiler, input=stub, text=True, check=True)
        env = os.environ | {"LD_LIBRARY_PATH": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
        env |= {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PATH": "/usr/bin:/bin", "CUDA_HOME": folder}  # has no nvcc
        env |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        for card in cards:
            command = [sys.executable, "-c", f"import gpu_paths; gpu_paths.check('{card}')"]
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            outcome = f"FAIL\n{done.stderr[-3000:]}" if done.returncode else "PASS"
            print(f"{outcome} {card} {CHECKED[card]}\n{done.stdout}", flush=True)
            failed += [card] * (done.returncode != 0)
    sys.exit(f"failed: {failed}" if failed else 0)


def pretend(card):
    """Makes torch and vLLM believe in one GPU of this kind. No tensor can be on it."""
    import torch

    name, capability, gib, multiprocessors = CARDS[card]
    total = int(gib * 2**30)
    about = types.SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=total, warp_size=32, is_integrated=False,
        multi_processor_count=multiprocessors, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=101376, shared_memory_per_multiprocessor=102400, shared_memory_per_block=49152,
        L2_cache_size=50 * 2**20, gcnArchName="", uuid="",
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "get_device_capability": capability, "get_device_properties": about,
        "get_device_name": name, "mem_get_info": (total - 2**29, total), "current_device": 0, "set_device": None,
        "is_bf16_supported": capability >= (8, 0),
    }  # fmt: skip
    for function, answer in answers.items():
        setattr(torch.cuda, function, lambda *_, answer=answer, **__: answer)
    torch.accelerator.device_count = lambda: 1


def check(card):
    """vLLM takes every option and finds an attention."""
    pretend(card)
    dtype, kind = CHECKED[card]
    from transformers import AutoConfig, AutoModelForCausalLM

    from runtime import distributed, machine, memory, sampler

    assert distributed.ON_GPU
    name, capability, gib, _ = CARDS[card]
    said = {"name": name, "compute_cap": "{}.{}".format(*capability), "driver_version": "580.65.06"}
    machine.nvidia_smi = lambda field: [said[field]]
    model = tempfile.mkdtemp()
    config = AutoConfig.for_model(
        kind, hidden_size=896, intermediate_size=4864, num_hidden_layers=2, num_attention_heads=14,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
    )  # fmt: skip
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(model)
    args = types.SimpleNamespace(
        model=model, dtype=dtype, max_prompt_tokens=1024, max_response_tokens=4096, kv_cache_gb=2.0, compile=True
    )
    options = sampler.options(args)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    NonNvmlCudaPlatform.device_count = classmethod(lambda cls: 1)
    platform = vllm.platforms._current_platform = NonNvmlCudaPlatform()
    from vllm import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.attention.selector import AttentionSelectorConfig

    given = EngineArgs(
        model=model, dtype=dtype, seed=0, skip_tokenizer_init=True, logprobs_mode="processed_logprobs", **options
    )
    config = given.create_engine_config(UsageContext.LLM_CLASS)
    sizes = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
    assert all(of_vllm <= most for of_vllm, most in zip(sizes, memory.batch_sizes(gib))), sizes
    assert config.model_config.enable_sleep_mode and config.cache_config.gpu_memory_utilization == 0.1
    selector = AttentionSelectorConfig(
        head_size=config.model_config.get_head_size(), dtype=config.model_config.dtype, kv_cache_dtype="auto",
        block_size=None,
    )  # fmt: skip
    valid, _ = platform.get_valid_backends(
        device_capability=platform.get_device_capability(), attn_selector_config=selector, num_heads=14
    )
    names = [found.backend.name for found in valid]
    chosen = options.get("attention_backend", names[0])
    print(f"    batches {sizes}, attention {chosen} of {names}, graphs {config.compilation_config.cudagraph_mode}")
    assert chosen in names and not chosen.startswith("FLASHINFER"), "nvcc would compile it"
    assert card != "B200" or chosen == "FLASH_ATTN"


if __name__ == "__main__":
    main(sys.argv[1:] or CHECKED)
