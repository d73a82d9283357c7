"""Families of models, and folders with mistakes: a run is right, or one line says why not before anything loads."""

import dataclasses
import json
import os

import families
import pytest
import torch
from conftest import run_together
from helpers import refused
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import evaluation.sampling
import evaluation.settings
import grpo
from rewards import kk
from runtime import checkpoints, checks, engine

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


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 34\n"
WRONG = "1 weights are missing, unknown or of another shape than config.json says, such as {}"
FOLDERS = {
    "missing": (weights(lm_head__weight=None), WRONG.format(HEAD)),
    "no_head_in_bin": (as_bin, WRONG.format(HEAD)),
    "unexpected": (weights(model__layers__9__x=torch.zeros(1)), WRONG.format("model.layers.9.x")),
    "shape": (weights(lm_head__weight=torch.zeros(3, 4)), WRONG.format(HEAD)),
    "no_weights": (lambda folder: (folder / WEIGHTS).unlink(), "the weights can't be read"),
    "cut": (lambda folder: os.truncate(folder / WEIGHTS, 3000), "the weights can't be read"),
    "lfs": (content(WEIGHTS, LFS), "the weights can't be read: .*`git lfs pull`"),
    "broken_tokenizer": (content("tokenizer.json", "{"), "can't be loaded"),
    "gptq": (values("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
    "adapter": (content("adapter_config.json", "{}"), "weights and a LoRA adapter .*tools.merge"),
    # what must not be refused
    "right": (lambda folder: None, ""),
    "angles": (weights(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16)), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_with_a_mistake_is_refused_in_one_line(name, tmp_path):
    change, says = FOLDERS[name]
    folder = families.make("llama", tmp_path / "model")
    change(folder)
    with refused(says) as error:
        checks.check_model(families.arguments(folder), 1024)
    assert not says or "\n" not in str(error.value)
    if name != "gptq":  # evaluate.py leaves it to vLLM
        args = evaluation.settings.Args(
            suite="kk", max_response_tokens=8, dtype="float32", chat_template="none", batch=1, template_options="{}"
        )
        problem = {**kk.generate(1, "2", seed=1)[0], "samples": 1, "temperature": 0, "seed": 0}
        with refused(says):
            evaluation.sampling.requests_of(str(folder), [problem], args)


def test_of_two_sets_of_files_vllm_reads_those_that_transformers_reads(tmp_path):
    """A Mistral as its publisher has it: the same weights in a second format, which we don't read.

    By vLLM itself: the engine's configuration and tokenizer, and the weights' files.
    """
    folder = families.make("mistral", tmp_path / "model")
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    sizes = {"dim": 64, "n_layers": 2, "head_dim": 32, "hidden_dim": 128, "n_heads": 2, "n_kv_heads": 2}
    (folder / "params.json").write_text(json.dumps(sizes | {"vocab_size": 636, "norm_eps": 0.5}))
    (folder / "tekken.json").write_text("{}")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")  # with an index
    config, ours = checks.read_config(str(folder))
    chosen = engine.common_options(str(folder), 64, 0.01)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.tokenizers import get_tokenizer

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    made = EngineArgs(model=str(folder), **{name: value for name, value in chosen.items() if name in names})
    assert made.create_model_config().hf_config.rms_norm_eps == config.rms_norm_eps
    read = DefaultModelLoader(made.create_load_config())._prepare_weights(str(folder), None, None, True, None)[1]
    assert read and all("consolidated" not in name for name in read)
    theirs = get_tokenizer(str(folder), tokenizer_mode=made.tokenizer_mode)
    text = "<think>Zoey is a knight"
    assert theirs.encode(text) == ours.encode(text) and ours.chat_template


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "qwen3_moe", "gpt2", "phi3", "opt"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_as_transformers_saves_them_are_all_there(family, tied, tmp_path):
    folder = families.make(family, tmp_path / "model", tie_word_embeddings=tied)
    if family == "gpt2":  # as its first checkpoint has them
        there = load_file(folder / WEIGHTS)
        save_file({name.removeprefix("transformer."): weight for name, weight in there.items()}, folder / WEIGHTS)
    checks.check_weights("model", str(folder), AutoConfig.from_pretrained(folder))


def test_a_checkpoint_names_the_class(tmp_path):
    """A base class's name in config.json would end a later run in vLLM."""
    folder = families.make("llama", tmp_path / "model")
    values("config.json", architectures=["LlamaModel"])(folder)
    args = families.arguments(folder)
    policy = grpo.load_policy(args, trained=True)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    checkpoints.save(policy, optimizer, AutoTokenizer.from_pretrained(folder), 1, 0, args)
    saved = folder / "run/checkpoints/step_000001"
    assert AutoConfig.from_pretrained(saved).architectures == ["LlamaForCausalLM"]


def check_gaps(folder):
    gaps = families.measure(folder / "model")
    assert gaps.keys() == {"gap", "LoRA"} and max(gaps.values()) < 2e-3, gaps


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_family_that_vllm_takes_from_transformers_reaches_the_sampler(processes, tmp_path):
    """phi's class is transformers' own, which vLLM changes. Also with LoRA."""
    families.make("phi", tmp_path / "model")
    run_together(check_gaps, tmp_path, processes)
