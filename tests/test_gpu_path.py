"""What a machine without a GPU can decide about the way that a GPU takes. gpu_paths.py does more, with CUDA's build."""

import argparse
import copy
import dataclasses
import gc
import os
import types
import weakref

import families
import pytest
import torch
from conftest import KK_TINY, run_together
from gpu_paths import CARDS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config, masking_utils

import grpo
from runtime import batches, distributed, lora, memory, models, sampler
from tools.maintain import fits


def check_options(_):
    """Of a process that believes in a GPU."""
    sampler.ON_GPU = True
    torch.cuda.get_device_capability = lambda: (10, 0)  # a B200
    settings = {"model": "models/kk_tiny", "dtype": "bfloat16", "max_prompt_tokens": 8, "max_response_tokens": 8}
    chosen = {}
    for cache in (None, 2.0):
        chosen |= sampler.options(argparse.Namespace(**settings, kv_cache_gb=cache, compile=True))
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    assert chosen["enable_sleep_mode"] and chosen["gpu_memory_utilization"] == 0.1
    assert chosen["attention_backend"] == "FLASH_ATTN" and sampler.attention("float32") == {}
    unknown = chosen.keys() - {field.name for field in dataclasses.fields(arg_utils.EngineArgs)}
    assert not unknown, unknown
    for name, _, gib, _ in CARDS.values():
        arg_utils.current_platform = types.SimpleNamespace(
            get_device_total_memory=lambda gib=gib: int(gib * 2**30), get_device_name=lambda name=name: name,
            is_tpu=bool, is_cpu=bool,
        )  # fmt: skip
        of_vllm = [sizes[UsageContext.LLM_CLASS] for sizes in arg_utils.EngineArgs.get_batch_defaults(1)]
        assert of_vllm[0] <= memory.batch_sizes(gib)[0] and of_vllm[1] <= memory.batch_sizes(gib)[1], name


def test_vllm_knows_each_option_and_its_batches_are_not_larger_than_in_the_estimate(tmp_path):
    run_together(check_options, tmp_path, processes=1)


def test_a_b200_gets_flash_attention_and_other_cards_vllms_choice(monkeypatch):
    monkeypatch.setattr(sampler, "ON_GPU", True)
    for card, (_, capability, *_) in CARDS.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        named = [sampler.attention(dtype).get("attention_backend") for dtype in ("bfloat16", "float16", "float32")]
        assert named == (["FLASH_ATTN", "FLASH_ATTN", None] if card == "B200" else [None] * 3)


def sleep_and_sync(_):
    """With kk_tiny. It is small: its sampler has one thread, and while that sleeps the trainer has all."""
    os.sched_setaffinity(0, range(os.cpu_count()))
    args = families.arguments(KK_TINY)
    llm, policy = grpo.load_sampler(args), grpo.load_policy(args, trained=True)
    problems = [{"prompt_ids": list(range(i + 5, i + 60)), "id": i} for i in range(2) for _ in range(4)]

    def has_the_policys_weights():
        sampled, _ = grpo.sample(llm, problems, 1, args)
        difference = grpo.log_probs(policy, sampled, args)[0] - sampled["sampler_logp"]
        return difference.abs().max().item() < 1e-3  # not if it is NaN

    assert has_the_policys_weights() and torch.get_num_threads() == 1
    sampler.sleep(llm)
    assert torch.get_num_threads() == os.cpu_count()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert not has_the_policys_weights()
    grpo.sync_weights(policy, llm, args)
    assert torch.get_num_threads() == 1 and has_the_policys_weights()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing is sampled in its sleep")
def test_after_a_sleep_the_sampler_gets_all_weights(tmp_path):
    run_together(sleep_and_sync, tmp_path, processes=1)


class Tally(TorchDispatchMode):
    """Counts the bytes of all tensors that are made in it: live and peak."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet()

    def free(self, size):
        self.live -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return results


@pytest.mark.parametrize(
    ("model", "dtype", "recompute", "rows", "rank"),
    [
        pytest.param("SmolLM2-135M", "bfloat16", True, 32, 0, marks=pytest.mark.slow),
        ("Qwen2.5-0.5B", "bfloat16", False, 1, 0),
        ("Llama-3.2-1B", "float32", False, 1, 0),
        ("Llama-3.2-1B", "bfloat16", True, 4, 0),
        pytest.param("Llama-3.2-3B", "float32", False, 2, 16, marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_the_peak_of_an_update_or_up_to_a_fifth_more(model, dtype, recompute, rows, rank, monkeypatch):
    """Counted on tensors without data, in a micro-batch that is not the first: its gradients add to what is there.

    rows: of 5120 tokens each, of which 1024 are the prompt's.
    """
    length, prompt = 5120, 1024
    config = copy.deepcopy(next(config for name, config in fits.MODELS.items() if fits.short(name) == model))
    sizes = {"max_prompt_tokens": prompt, "max_response_tokens": length - prompt, "micro_batch_tokens": rows * length}
    args = grpo.Args(dtype=dtype, gradient_checkpointing=recompute, compile=False, lora_rank=rank, **sizes)
    monkeypatch.setattr(distributed, "ON_GPU", True)
    monkeypatch.setattr(models, "HEAD_CHUNK", fits.HEAD_CHUNK)
    monkeypatch.setattr(batches, "prompts_can_be_shared", lambda args: False)  # as with layers that are compiled
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    # It looks at data; without them it would give each layer a mask.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=True), Tally() as tally:
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        policy = grpo.Policy(lm, args)
        if rank:
            lora.add_adapters(policy, args)
        models.place(policy, args)
        gc.collect()
        weights = tally.live
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        tally.peak = 0
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            hidden = policy.hidden_states(torch.zeros(rows, length, dtype=torch.long), None)
            states = hidden[:, prompt:].reshape(-1, config.hidden_size)
            del hidden
            targets = torch.zeros(len(states), dtype=torch.long)
            logp, _ = models.in_chunks(policy.head, states, targets, 1.0, False)
        del states
        logp.sum().backward()
    shape, width = memory.shapes_of(config), getattr(torch, dtype).itemsize
    sizes = shape.num_parameters(), memory.adapter_size(shape, rank), width
    estimate = memory.training_bytes(config, *sizes, args, fits.HEAD_CHUNK, memory.Machine(True, 1, 80))
    counted = tally.peak - weights
    print(f"{model} {dtype} {recompute} {rows} {rank}: {counted / 2**30:.2f} GiB, estimated {estimate / counted:.3f}")
    assert counted <= estimate <= 1.2 * counted


class Attention(TorchFunctionMode):
    """Notes of each call of torch's attention the shape of its keys, and whether heads share them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.keys, self.shared = args[1].shape, kwargs.get("enable_gqa", False)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [False, True])
def test_keys_and_values_are_repeated_where_no_fused_kernel_takes_shared_ones(recompute, tmp_path, monkeypatch):
    config = Qwen2Config(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    ids = torch.cat([torch.arange(6).expand(2, 6), torch.arange(12).view(2, 6)], 1)  # a prompt, and two responses
    found = {}
    for on_gpu, dtype in ((False, "float32"), (True, "bfloat16"), (True, "float32")):
        monkeypatch.setattr(distributed, "ON_GPU", on_gpu)
        args = grpo.Args(dtype=dtype, gradient_checkpointing=recompute, compile=False)
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        policy = models.place(grpo.Policy(lm, args), args)
        with Attention() as attention:
            logits = policy.lm(ids, use_cache=False).logits
            logits.pow(2).mean().backward()
        if not recompute:
            shared = models.with_shared_prompt(policy.lm.model, models.embed(policy.lm, ids), 6)
            torch.testing.assert_close(policy.lm.lm_head(shared), logits)
        found[on_gpu, dtype] = logits, policy.lm.model.layers[0].self_attn.k_proj.weight.grad
        assert (attention.keys[1], attention.shared) == ((4, False) if on_gpu and dtype == "float32" else (2, True))
    torch.testing.assert_close(found[True, "float32"], found[False, "float32"])
    policy.lm.save_pretrained(tmp_path)
    assert models.REPEATED not in (tmp_path / "config.json").read_text()
