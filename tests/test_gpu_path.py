"""What a machine without a GPU can decide about the way that a GPU takes. gpu_paths.py does more, with CUDA's build."""

import copy
import gc
import json
import weakref

import pytest
import torch
from conftest import python
from gpu_paths import CARDS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config, masking_utils

import grpo
from runtime import lora, memory, passes, placement, processes
from tools.maintain import fits

ENGINE = """
import argparse, dataclasses, json, os, sys, types
os.environ["PATH"] = "/usr/bin:/bin"  # without nvcc
from runtime import engine, machine, memory
engine.ON_GPU = True
machine.nvidia_smi = lambda fields: [["10.0"]]  # a B200, which has most options
chosen = {}
for cache in (None, 2.0):
    chosen |= engine.options(argparse.Namespace(
        model="models/kk_tiny", dtype="bfloat16", max_prompt_tokens=8, max_response_tokens=8, kv_cache_gb=cache,
        compile=True))
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext
assert chosen["enable_sleep_mode"] and chosen["gpu_memory_utilization"] == 0.1
unknown = chosen.keys() - {field.name for field in dataclasses.fields(arg_utils.EngineArgs)}
assert not unknown, unknown
for name, _, gib, _ in json.loads(sys.argv[1]).values():
    arg_utils.current_platform = types.SimpleNamespace(
        get_device_total_memory=lambda: int(gib * 2**30), get_device_name=lambda: name, is_tpu=bool, is_cpu=bool)
    of_vllm = [sizes[UsageContext.LLM_CLASS] for sizes in arg_utils.EngineArgs.get_batch_defaults(1)]
    assert of_vllm == ([16384, 1024] if memory.takes_large_batches(name, gib * 2**30) else [8192, 256]), name
"""


def test_vllm_knows_each_option_and_its_batches_are_those_of_the_estimate():
    done = python("-c", ENGINE, json.dumps(CARDS))
    assert done.returncode == 0, done.stderr[-3000:]


SLEEP = """
import sys, torch
from runtime import engine
from transformers import AutoConfig, AutoModelForCausalLM
folder, *kinds = sys.argv[1:]
for kind in kinds:
    config = AutoConfig.for_model(
        kind, vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings="gemma" in kind,
        pad_token_id=0, bos_token_id=0, eos_token_id=1,
    )
    lm = AutoModelForCausalLM.from_config(config)
    lm.save_pretrained(folder)
    options = engine.common_options(folder, 64, 0.01, *["float32"] * (engine.common_options.__code__.co_argcount - 3))
    from vllm import LLM, SamplingParams
    llm = LLM(model=folder, dtype="float32", skip_tokenizer_init=True, **options)
    [model] = llm.apply_model(lambda model: model)
    weights = dict(lm.named_parameters(remove_duplicate=False))

    def reload(sent=weights):
        named = ((name, weight.detach()) for name, weight in sent.items())
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})

    def response():
        engine.empty_prefix_cache(llm)
        params = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
        return llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids

    before = response()
    assert engine.sleep_level(model, reload) == 2
    for parameter in model.parameters():  # as a sleep of level 2 leaves them
        parameter.data.fill_(torch.nan)
    reload()
    assert response() == before
    # What no weight replaces: an attribute of a layer, and weights that are not sent.
    model.model.layers[0].table = [torch.full((2, 2), 7.0)]
    assert engine.sleep_level(model, reload) == 1
    assert (model.model.layers[0].table.pop() == 7).all()
    some = {name: weight for name, weight in weights.items() if "norm" not in name}
    assert engine.sleep_level(model, lambda: reload(some)) == 1
    assert response() == before  # all is as it was
    print("passed", kind)
    del llm, model
"""


def test_a_sleeping_sampler_loses_no_tensor_or_keeps_them_all(tmp_path):
    """Level 2 where all but buffers is sent again; level 1 where something is not."""
    kinds = ["llama", "qwen2", "qwen3", "gemma", "gemma3_text"]
    done = python("-c", SLEEP, tmp_path, *kinds)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == len(kinds)
    assert "no new weight replaces vLLM's model.layers.0.table[0]" in done.stdout


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
        ("SmolLM2-135M", "bfloat16", False, 1, 0),
        ("SmolLM2-135M", "bfloat16", True, 32, 0),
        ("Qwen2.5-0.5B", "bfloat16", False, 1, 0),
        ("Qwen2.5-0.5B", "float32", True, 2, 0),
        ("Llama-3.2-1B", "float32", False, 1, 0),
        ("Llama-3.2-1B", "bfloat16", True, 4, 0),
        ("Qwen2.5-3B", "bfloat16", False, 1, 16),
        ("Qwen2.5-3B", "bfloat16", True, 4, 16),
        ("Llama-3.2-3B", "float32", False, 2, 16),
        ("Qwen2.5-7B", "bfloat16", True, 4, 0),
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
    monkeypatch.setattr(processes, "ON_GPU", True)
    monkeypatch.setattr(passes, "HEAD_CHUNK", fits.HEAD_CHUNK)
    monkeypatch.setattr(passes, "prompts_can_be_shared", lambda args: False)  # as with layers that are compiled
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    # It looks at data; without them it would give each layer a mask.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=True), Tally() as tally:
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        policy = grpo.Policy(lm, args)
        if rank:
            lora.add_adapters(policy, args)
        placement.place(policy, args)
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
            logp, _ = passes.in_chunks(policy.head, states, targets, 1.0, False)
        del states
        logp.sum().backward()
    shape, width = memory.shapes_of(config), memory.width_of(dtype)
    sizes = shape.num_parameters(), memory.adapter_size(shape, rank), width
    estimate = memory.training_bytes(config, *sizes, args, fits.HEAD_CHUNK, memory.Machine(True, 1, 1, 80))
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
        monkeypatch.setattr(processes, "ON_GPU", on_gpu)
        args = grpo.Args(dtype=dtype, gradient_checkpointing=recompute, compile=False)
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        policy = placement.place(grpo.Policy(lm, args), args)
        with Attention() as attention:
            logits = policy.lm(ids, use_cache=False).logits
            logits.pow(2).mean().backward()
        if not recompute:
            shared = passes.with_shared_prompt(policy.lm.model, policy.lm.get_input_embeddings()(ids), 6)
            torch.testing.assert_close(policy.lm.lm_head(shared), logits)
        found[on_gpu, dtype] = logits, policy.lm.model.layers[0].self_attn.k_proj.weight.grad
        assert (attention.keys[1], attention.shared) == ((4, False) if on_gpu and dtype == "float32" else (2, True))
    torch.testing.assert_close(found[True, "float32"], found[False, "float32"])
    policy.lm.save_pretrained(tmp_path)
    assert placement.REPEATED not in (tmp_path / "config.json").read_text()
