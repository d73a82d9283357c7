"""LoRA: what adapters compute, what of them is trained, sent to the sampler and saved, on one process and on two."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import KK_TINY, run_together
from helpers import adamw, arguments, distance, gradients, rows_of, share
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import ppo
from runtime import checkpoints, distributed, lora, memory, sampler
from tools import merge

pytestmark = pytest.mark.usefixtures("on_the_cpu")
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def with_lora(model, **changes):
    return arguments(model=str(model), **{"lora_rank": 3, "temperature": 1.0} | changes)


def adapted(args, spread=0.1):
    """A policy whose adapters do something: B is random."""
    policy = grpo.load_policy(args, trained=True)
    rng = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = spread * torch.randn(parameter.shape, generator=rng)
    return policy


def ordinary(args, weights):
    """A policy without adapters that has these weights, {name: weight}."""
    policy = grpo.load_policy(dataclasses.replace(args, lora_rank=0), trained=True)
    missing = policy.lm.load_state_dict(weights, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    return policy


def largest(a, b):
    return (a - b).abs().max().item()


@each_dtype
def test_a_run_begins_with_the_model_itself(tiny_model, batch, dtype):
    """B is 0. And A is uniform within 1/√in, the same for a seed, and leaves torch's random state alone."""
    args = with_lora(tiny_model, dtype=dtype, lora_rank=8)
    before = torch.get_rng_state()
    policy = grpo.load_policy(args, trained=True)
    assert torch.equal(before, torch.get_rng_state())
    plain = grpo.load_policy(dataclasses.replace(args, lora_rank=0), trained=True)
    assert torch.equal(grpo.log_probs(policy, batch, args)[0], grpo.log_probs(plain, batch, args)[0])
    a = policy.lm.model.layers[1].mlp.down_proj.lora_A["default"].weight  # [8, 128]
    assert 0.95 / 128**0.5 < a.abs().max() <= 1 / 128**0.5
    assert a.std().item() == pytest.approx((1 / 128 / 3) ** 0.5, rel=0.1)
    again, other = (grpo.load_policy(dataclasses.replace(args, seed=seed), trained=True) for seed in (0, 1))
    assert torch.equal(a, again.lm.model.layers[1].mlp.down_proj.lora_A["default"].weight)
    assert not torch.equal(a, other.lm.model.layers[1].mlp.down_proj.lora_A["default"].weight)


@each_dtype
def test_all_linear_layers_have_an_adapter_and_the_weights_are_frozen_in_dtype(dtype):
    """kk_tiny's head is its embedding: neither has one. The critic of ppo.py is trained whole."""
    args = with_lora(KK_TINY, dtype=dtype)
    policy = grpo.load_policy(args, trained=True)
    plain = dict(AutoModelForCausalLM.from_pretrained(KK_TINY).named_parameters())
    layers = {name for name in plain if name.endswith("_proj.weight")}
    found = set()
    for name, parameter in policy.lm.named_parameters():
        is_adapter = "lora_" in name
        assert parameter.requires_grad == is_adapter
        assert parameter.dtype == (torch.float32 if is_adapter else getattr(torch, dtype))
        if is_adapter:
            found.add(name.partition(".lora_")[0] + ".weight")
    assert found == layers and len(layers) == 7 * len(policy.lm.model.layers)
    num_trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert num_trained == memory.adapter_size(grpo.load_policy(arguments(model=str(KK_TINY)), trained=True).lm, 3)
    critic = ppo.load_policy(with_lora(KK_TINY, dtype=dtype), trained=True, kind=ppo.ValueModel)
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in critic.parameters())


@each_dtype
def test_merged_weights_are_those_of_an_ordinary_model_that_computes_the_same(tiny_model, batch, dtype):
    """W + α/r·B·A by hand; the model's own weights stay as they are, to the last bit."""
    args = with_lora(tiny_model, dtype=dtype)
    policy = adapted(args)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    merged = dict(lora.merged_weights(policy.lm))
    assert all(torch.equal(before[name], weight) for name, weight in policy.state_dict().items())
    plain = grpo.load_policy(dataclasses.replace(args, lora_rank=0), trained=False)
    assert {name: weight.shape for name, weight in merged.items()} == {
        name: weight.shape for name, weight in plain.lm.named_parameters()
    }
    layer = policy.lm.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    expected = layer.base_layer.weight.double() + 32 / 3 * b @ a
    exact = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    assert distance(merged["model.layers.0.self_attn.q_proj.weight"], expected) < exact

    with_adapters = grpo.log_probs(policy, batch, args)[0]
    of_merged = grpo.log_probs(ordinary(args, merged), batch, args)[0]
    of_base = grpo.log_probs(plain, batch, args)[0]
    assert largest(with_adapters, of_merged) < {"float32": 1e-4, "bfloat16": 0.2}[dtype]
    assert largest(with_adapters, of_base) > 1


def test_the_reference_is_the_policy_with_its_adapters_off(tiny_model, batch):
    args = with_lora(tiny_model, dtype="bfloat16")
    policy = adapted(args)
    logp = grpo.log_probs(policy, batch, args)[0]
    reference = lora.without_adapters(policy)
    plain = grpo.load_policy(args, trained=False)
    expected = grpo.log_probs(plain, batch, args, with_entropy=False)[0]
    assert torch.equal(grpo.log_probs(reference, batch, args, with_entropy=False)[0], expected)
    assert torch.equal(grpo.log_probs(policy, batch, args)[0], logp)  # they are on again
    assert any(parameter.requires_grad for parameter in policy.parameters())


def gradients_by_name(args, policy, batch):
    """{name: gradient} of the weights that are trained."""
    (flat,), _ = gradients(grpo, batch, args, policy)
    named = [(name, weight) for name, weight in policy.lm.named_parameters() if weight.requires_grad]
    parts = flat.split([weight.numel() for _, weight in named])
    return {name: part.view(weight.shape) for (name, weight), part in zip(named, parts, strict=True)}


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"micro_batch_tokens": 100}])
def test_gradients_follow_from_those_of_the_merged_weights(tiny_model, batch, changes):
    """With G that of W: α/r·G·Aᵀ for B and α/r·Bᵀ·G for A."""
    args = with_lora(tiny_model, **changes)
    policy = adapted(args)
    expected = gradients_by_name(args, ordinary(args, dict(lora.merged_weights(policy.lm))), batch)
    found = gradients_by_name(args, policy, batch)
    assert len(found) == 2 * 7 * 2  # nothing else has one
    for name in [name for name in found if "lora_A" in name]:
        layer = name.partition(".lora_A")[0]
        a, b = (policy.lm.get_submodule(f"{layer}.{which}.default").weight.detach() for which in ("lora_A", "lora_B"))
        of_weight = expected[layer + ".weight"]
        assert distance(found[name], 32 / 3 * b.T @ of_weight) < 1e-4
        assert distance(found[name.replace("lora_A", "lora_B")], 32 / 3 * of_weight @ a.T) < 1e-4


def train_share(folder):
    """Two steps of two updates of this process's rows, in each type; what the sampler gets, and the log-probabilities.

    Rank 3: two processes can't divide A equally.
    """
    distributed.start()
    found = {}
    for dtype in ("float32", "bfloat16"):
        about = {"run_dir": f"{folder}/{dtype}_{distributed.WORLD_SIZE}", "dtype": dtype}
        args = grpo.Args(**torch.load(folder / "args.pt") | about)
        Path(args.run_dir).mkdir(exist_ok=True)
        of_process = share(torch.load(folder / "batch.pt"), rows_of(distributed.RANK, distributed.WORLD_SIZE))
        policy = grpo.load_policy(args, trained=True)
        optimizer, sent = adamw(policy, lr=1e-2), {}
        for step in (1, 2):
            grpo.update(policy, optimizer, of_process, step, args)
        checkpoints.save(policy, optimizer, AutoTokenizer.from_pretrained(args.model), 2, 16, args)
        sampler.load_weights = lambda llm, named, sent=sent: sent.update(named)
        grpo.sync_weights(policy, None, args)
        sampler.load_weights = lambda llm, named, sent=sent: sent.update((f"8 bits {n}", w) for n, w in named)
        grpo.sync_weights(policy, None, dataclasses.replace(args, sampler_dtype="int8"))
        logp = grpo.log_probs(policy, of_process, args)[0]
        ref_logp = grpo.log_probs(lora.without_adapters(policy), of_process, args, with_entropy=False)[0]
        found[dtype] = {"sent": sent, "logp": logp, "ref_logp": ref_logp}
    torch.save(found, folder / f"of_{distributed.RANK}_in_{distributed.WORLD_SIZE}.pt")


@pytest.fixture(scope="module")
def shares(tiny_model, batch, tmp_path_factory):
    """The folder, and what train_share finds in one process and in each of two."""
    folder = tmp_path_factory.mktemp("shares")
    args = with_lora(tiny_model, updates_per_step=2, micro_batch_tokens=60)
    torch.save(dataclasses.asdict(args), folder / "args.pt")
    torch.save(batch, folder / "batch.pt")
    for number in (1, 2):
        run_together(train_share, folder, processes=number)
    return folder, [torch.load(folder / f"of_{rank}_in_{number}.pt") for rank, number in ((0, 1), (0, 2), (1, 2))]


@each_dtype
@pytest.mark.slow
def test_two_processes_send_the_sampler_the_merged_weights(tiny_model, batch, shares, dtype):
    """Not the weights without adapters: an ordinary model with what is sent gives the policy's probabilities."""
    args = with_lora(tiny_model, dtype=dtype)
    fresh = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype)).state_dict()
    one, *two = (found[dtype] for found in shares[1])
    plain = grpo.load_policy(args, trained=False)
    for rank, found in enumerate(two):
        of_8_bits = {name: found["sent"].pop(name) for name in list(found["sent"]) if name.startswith("8 bits")}
        for name, weight in found["sent"].items():  # --sampler_dtype rounds the gathered sums of all shards
            close = distance(of_8_bits[f"8 bits {name}"].float(), weight.float())
            assert 0 < close < 0.02 if name.endswith("_proj.weight") else close == 0, name
        assert found["sent"].keys() == fresh.keys()
        assert {weight.dtype for weight in found["sent"].values()} == {getattr(torch, dtype)}
        for name, weight in found["sent"].items():
            if not name.endswith("_proj.weight"):
                assert torch.equal(weight, fresh[name])
            else:
                moved = weight.float() - fresh[name].float()
                assert distance(moved, one["sent"][name].float() - fresh[name].float()) < 0.15, name
        of_process = share(batch, rows_of(rank, 2))
        of_sent = grpo.log_probs(ordinary(args, found["sent"]), of_process, args)[0]
        of_plain = grpo.log_probs(plain, of_process, args)[0]
        assert largest(found["logp"], of_sent) < {"float32": 1e-4, "bfloat16": 0.2}[dtype]
        assert largest(found["ref_logp"], of_plain) < {"float32": 1e-5, "bfloat16": 0.1}[dtype]
        assert largest(found["logp"], found["ref_logp"]) > 0.5


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.slow
def test_a_checkpoints_adapter_makes_its_model(shares, number, tmp_path):
    """peft puts it on --model; in bfloat16. Settings go along."""
    folder, made = shares[0] / f"float32_{number}/checkpoints/step_000002", tmp_path / "merged"
    settings = folder / "adapter" / "trainer_settings.json"
    settings.write_text('{"people": "2"}')
    merge.main(folder / "adapter", made)
    assert (made / settings.name).read_text() == settings.read_text()
    merged, weights = (load_file(path / "model.safetensors") for path in (made, folder))
    assert merged.keys() == weights.keys()
    for name, weight in weights.items():
        assert merged[name].dtype == torch.bfloat16
        assert (merged[name].float() - weight).abs().le(weight.abs() / 256 + 1e-6).all(), name
    AutoTokenizer.from_pretrained(made)
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["r"] == 3
    state = dcp.HuggingFaceStorageReader(folder / "trainer").read_metadata().state_dict_metadata
    assert len(state) == 1 + 4 * 2 * 7 * 2  # "rng"; weight, two moments and step of A and B in two layers
    assert all("lora_" in name or name == "rng" for name in state)
