"""Families of models, and folders with mistakes: a run is right, or one line says why not before anything loads."""

import json
import os

import pytest
import torch
from conftest import run_together
from helpers import refused
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Phi3Config

import evaluation.sampling
import evaluation.settings
import grpo
from rewards import kk
from runtime import checkpoints, checks, memory, model_files
from tools.maintain import families

pytestmark = pytest.mark.usefixtures("on_the_cpu")
WEIGHTS = "model.safetensors"
HEAD = "lm_head.weight"


def weights(**changes):
    """A change of a folder's weights: names are given new weights, or None, which takes them out."""

    def change(folder):
        there = load_file(folder / WEIGHTS) | {name.replace("__", "."): weight for name, weight in changes.items()}
        save_file({name: weight for name, weight in there.items() if weight is not None}, folder / WEIGHTS)

    return change


def values(file, **changes):
    """A change of a JSON file."""
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))


def content(file, text):
    return lambda folder: (folder / file).write_text(text)


def as_bin(folder):
    """The same weights as torch writes them, without a head."""
    there = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save({name: weight for name, weight in there.items() if name != HEAD}, folder / "pytorch_model.bin")


INDEX = {"weight_map": {HEAD: "model-00001-of-00001.safetensors"}}
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "some/model"}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n"
FOLDERS = {
    "missing": (weights(lm_head__weight=None), r"lacks weights: 1 \(lm_head\.weight\)"),
    "no_head_in_bin": (as_bin, r"lacks weights: 1 \(lm_head\.weight\)"),
    "unexpected": (weights(model__layers__9__x=torch.zeros(1)), r"has unknown weights: 1 \(model\.layers\.9\.x\)"),
    "shape": (weights(lm_head__weight=torch.zeros(3, 4)), r"has wrongly shaped weights: 1 \(lm_head\.weight\)"),
    "no_weights": (lambda folder: (folder / WEIGHTS).unlink(), "no weights in it"),
    "cut": (lambda folder: os.truncate(folder / WEIGHTS, 3000), "model.safetensors can't be read"),
    "lfs": (content(WEIGHTS, LFS), r"model.safetensors can't be read: .*`git lfs pull`"),
    "broken_tokenizer": (content("tokenizer.json", "{"), "can't be loaded"),
    "adapter": (content("adapter_config.json", json.dumps(ADAPTER)), "a model and an adapter"),
    "gptq": (values("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), r"quantised .*\(gptq\)"),
    # what must not be refused
    "right": (lambda folder: None, ""),
    "angles": (weights(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16)), ""),
}  # fmt: skip
OF_VLLM = ("adapter", "gptq")  # evaluate.py leaves them to vLLM


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_with_a_mistake_is_refused_in_one_line(name, tmp_path):
    change, says = FOLDERS[name]
    folder = families.make("llama", tmp_path / "model")
    change(folder)
    with refused(says) as error:
        checks.check_model(families.arguments(folder), 1024)
    assert not says or "\n" not in str(error.value)
    if name not in OF_VLLM:
        args = evaluation.settings.Args(
            suite="kk", max_response_tokens=8, dtype="float32", chat_template="none", batch=1, template_options="{}"
        )
        problem = {**kk.generate(1, "2", seed=1)[0], "samples": 1, "temperature": 0, "seed": 0}
        with refused(says):
            evaluation.sampling.requests_of(str(folder), [problem], args)


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "qwen3_moe", "gpt2", "phi3", "opt"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_as_transformers_saves_them_are_all_there(family, tied, tmp_path):
    folder = families.make(family, tmp_path / "model", tie_word_embeddings=tied)
    if family == "gpt2":  # as its first checkpoint has them
        there = load_file(folder / WEIGHTS)
        save_file({name.removeprefix("transformer."): weight for name, weight in there.items()}, folder / WEIGHTS)
    model_files.check_weights("model", str(folder), AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(("context", "says"), [(400, ""), (401, r"401, .*takes only 400 tokens here")])
def test_longrope_is_refused_beyond_the_length_of_pretraining(context, says):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "rope_theta": 1e4}
    sizes = {name: families.SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = Phi3Config(rope_parameters=rope, original_max_position_embeddings=400, **sizes)
    args = grpo.Args(model="m", max_prompt_tokens=300, max_response_tokens=context - 300)
    with refused(says):
        memory.estimate(config, args, 1024)


def test_a_checkpoint_holds_the_buffers_and_names_the_class(tmp_path):
    """xIELU's, in Apertus; and a base class's name in config.json would end a later run in vLLM."""
    folder = families.make("apertus", tmp_path / "model")
    values("config.json", architectures=["ApertusModel"])(folder)
    args = families.arguments(folder)
    policy = grpo.load_policy(args, trained=True)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    checkpoints.save(policy, optimizer, AutoTokenizer.from_pretrained(folder), 1, 0, args)
    saved = folder / "run/checkpoints/step_000001"
    lm, found = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(found.values())
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        assert torch.equal(lm.state_dict()[name], tensor), name
    assert lm.config.architectures == ["ApertusForCausalLM"]


def check_gaps(folder):
    gaps = families.measure(folder / "model")
    assert gaps.keys() == {"gap", "LoRA"} and max(gaps.values()) < 2e-3, gaps


@pytest.mark.parametrize("family", ["phi", "apertus"])
@pytest.mark.parametrize("processes", [1, 2])
def test_families_that_vllm_takes_from_transformers_and_buffers_reach_the_sampler(family, processes, tmp_path):
    """phi's class is transformers' own, which vLLM changes; apertus has buffers. Also with LoRA."""
    families.make(family, tmp_path / "model")
    run_together(check_gaps, tmp_path, processes)


def test_sft_trains_what_only_the_sampler_cannot(tmp_path):
    """Recurrent layers, whose states can't be shared between rows."""
    folder = families.make("falcon_h1", tmp_path / "model", mamba_d_ssm=64, mamba_n_heads=2, mamba_d_state=8)
    args = families.arguments(folder, micro_batch_tokens=10**6)
    policy = grpo.load_policy(args, trained=True)
    ids = torch.arange(200).repeat(4, 1)
    ids[:, -5:] = torch.arange(20).view(4, 5)
    mask = torch.zeros(4, 200, dtype=torch.bool)
    mask[:, -5:] = True
    logp, _ = policy(ids, mask, 1.0)
    logits = policy.lm(ids).logits[:, -6:-1].log_softmax(-1)
    expected = logits.gather(-1, ids[:, -5:, None])[..., 0]
    assert torch.allclose(logp[:, -5:], expected, atol=1e-4)
