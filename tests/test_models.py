"""Families of models, and folders with mistakes: a run is right, or one line says why not before anything loads."""

import contextlib
import copy
import dataclasses
import importlib
import io
import json
import os
import re
import sys
from types import SimpleNamespace

import families
import pytest
import torch
from conftest import run_together
from helpers import refused, requests_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import grpo
from runtime import checkpoints, checks, distributed, lora, models, sampler

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
        with refused(says):
            requests_of(folder, chat_template="none")


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
    chosen = sampler.common_options(str(folder), 64, 0.01)
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


@pytest.mark.parametrize(
    ("family", "width", "context", "sizes"),
    [("llama", 256, 64, (32, 1024)), ("llama", 256, 2048, (32, 2048)), ("llama", 64, 64, (None, 64)),
     ("granitemoehybrid", 256, 64, (None, 64))],
)  # fmt: skip
def test_the_responses_of_a_group_compute_few_tokens_of_their_prompt_again(family, width, context, sizes, tmp_path):
    """On a CPU: blocks of 32 tokens, passes of several prompts. Recurrent models have no cache; kk_tiny is small."""
    changes = {"hidden_size": width} | ({"mamba_d_head": 128} if family == "granitemoehybrid" else {})
    chosen = sampler.common_options(str(families.make(family, tmp_path / "model", **changes)), context, 0.01)
    assert (chosen.get("block_size"), chosen["max_num_batched_tokens"]) == sizes


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
    limit = 2e-3 if families.dtype_of(folder / "model") == "float32" else 0.1
    assert {"policy", "gap"} <= gaps.keys() and max(gaps.values()) < limit, gaps


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_family_that_vllm_takes_from_transformers_reaches_the_sampler(processes, tmp_path):
    """phi's class is transformers' own, which vLLM changes. Also with LoRA."""
    families.make("phi", tmp_path / "model")
    run_together(check_gaps, tmp_path, processes)


def longrope(folder, original):
    """A small Phi-3 that was pretrained on sequences of this many tokens. Its arguments have a context of 344."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "original_max_position_embeddings": original}
    changes = {"max_position_embeddings": 1024, "original_max_position_embeddings": original, "sliding_window": None}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    return families.make("phi3", folder, rope_parameters=rope, **changes)


@pytest.mark.parametrize(("original", "factor"), [(320, 3.0), (344, 1.0), (343, 3.0)])
def test_longrope_has_the_factors_that_vllm_chooses_by_the_context_whatever_a_batch_has(original, factor, tmp_path):
    args = families.arguments(longrope(tmp_path / "model", original))
    policy = grpo.load_policy(args, trained=True)
    expected = 1 / (factor * 1e4 ** (torch.arange(0, 32, 2) / 32))
    for length in (20, 400):  # transformers alone would choose by this
        policy(torch.ones(1, length, dtype=torch.long), torch.arange(length)[None] >= length - 9, temperature=1.0)
        torch.testing.assert_close(policy.lm.model.rotary_emb.inv_freq, expected)
    assert policy.lm.config.rope_parameters["short_factor"] == [1.0] * 16  # checkpoints keep both


def check_small_gaps(folder):
    gaps = families.measure(folder / "model")
    assert max(gaps.values()) < 1e-5, gaps


@pytest.mark.slow
@pytest.mark.parametrize("original", [320, 344])
def test_longrope_is_the_samplers_on_either_side_of_the_limit(original, tmp_path):
    longrope(tmp_path / "model", original)
    run_together(check_small_gaps, tmp_path, 1)


def test_a_tried_model_says_nothing_and_a_refused_one_says_why(tmp_path):
    for kind, why in models.REFUSED.items():
        with refused(f"^--model m is a {kind}, which can't be trained here: ."):
            models.check_family("--model", "m", SimpleNamespace(model_type=kind), None)
        assert why and kind not in models.TRIED
    with refused("whose head is not a linear .lm_head"):
        model = SimpleNamespace(model=SimpleNamespace(layers=[]), lm_head=None)
        models.check_family("--model", "m", SimpleNamespace(model_type="of 2027"), model)
    folder = families.make("olmoe", tmp_path / "olmoe")
    with refused("^--lora_rank 4: .*olmoe has experts, which LoRA can't train here"):
        checks.check_model(families.arguments(folder, lora_rank=4), 1024)


@pytest.mark.parametrize("family", [*families.CHANGES, "nanochat", *families.WITH_IMAGES])
def test_the_policy_is_transformers_own_model(family, tmp_path):
    """Logits, and the prompt computed once; with images, the language model of the whole. Then its checkpoint."""
    folder = families.make(family, tmp_path / "model")
    args = families.arguments(folder)
    dtype = families.dtype_of(folder)
    with refused("" if dtype == args.dtype else "^--dtype float32: .* give --dtype bfloat16"):
        checks.check_model(args, 1024)
    _, sizes = checks.check_model(dataclasses.replace(args, dtype=dtype), 1024)
    assert sizes["is_guess"] == any(word in family for word in ("moe", "hybrid", "qwen3_5"))
    policy = grpo.load_policy(args, trained=True)
    assert families.policy_gap(policy, args) < 1e-5
    assert sizes["without_images"] == (family in families.WITH_IMAGES)
    if sizes["without_images"]:
        ids = torch.arange(3, 40)[None]
        whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(policy.lm(ids).logits, whole(input_ids=ids).logits)
    checkpoint, different = families.save_and_resume(folder)
    assert not different
    saved = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert type(saved) is type(policy.lm) and saved.state_dict().keys() == policy.lm.state_dict().keys()
    checks.check_model(families.arguments(checkpoint, dtype=dtype), 1024)


def test_a_folder_with_images_may_have_old_or_new_names_and_a_missing_weight_is_noticed(tmp_path):
    folder = families.make("mistral3", tmp_path / "model")
    there = load_file(folder / WEIGHTS)  # language_model.model.layers...
    new = {name.replace("language_model.model.", "model.language_model."): there[name] for name in there}
    assert there.keys() != new.keys()
    for named in (there, new):
        save_file(named, folder / WEIGHTS)
        checks.check_model(families.arguments(folder), 1024)
    new.pop("model.language_model.layers.1.mlp.up_proj.weight")
    save_file(new, folder / WEIGHTS)
    with refused("1 weights are missing.*such as model.layers.1.mlp.up_proj.weight"):
        checks.check_model(families.arguments(folder), 1024)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_vllm_can_import_qwen3_5_without_torchvision():
    sampler.import_without_torchvision(["Qwen3_5ForCausalLM"])
    assert "transformers.models.qwen2_vl.image_processing_qwen2_vl" in sys.modules
    assert importlib.util.find_spec("torchvision") is None


def said(check):
    """What a check writes to stderr; and whether it ends the run."""
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            check()
        except SystemExit as ended:
            return error.getvalue(), ended.code == 1
    return error.getvalue(), False


def check_mistakes(folder):
    """The right model passes, with its weights and the random state as before. Then mistakes, each refused."""
    folder = next(folder.glob("model_*"))
    args, tokenizer, llm = families.start(folder)
    problem = {"prompt_ids": tokenizer.encode("Zoey says: Oliver is a knave, and so am I. " * 12)[:200]}
    policy = grpo.load_policy(args, trained=True)
    before, state = copy.deepcopy(policy.state_dict()), torch.get_rng_state()

    def check(change=lambda name, weight: weight, settings=args):
        def sync(policy, llm, args):
            weights = lora.merged_weights(policy.lm, remove_duplicate=False)
            changed = ((name, change(name, distributed.full_tensor(weight))) for name, weight in weights)
            sampler.load_weights(llm, ((name, weight) for name, weight in changed if weight is not None))

        return said(lambda: models.check_same(policy, llm, sync, problem, settings))

    assert check() == ("", False)
    assert torch.equal(state, torch.get_rng_state())
    after = policy.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    says = r"error: .*differ by \S+ nats from transformers, \S+ nats from vLLM.*families.py {}.* shows more.*\n"
    mistakes = {
        "gemma4": lambda name, weight: None if "layer_scalar" in name else weight,  # a buffer stays behind
        "moe": lambda name, weight: weight.roll(1, 0) if ".1.mlp.experts.down" in name else weight,
    }
    for family, mistake in mistakes.items():
        if family in folder.name:
            grpo.sync_weights(policy, llm, args)  # as after loading
            error, ends = check(mistake)
            assert ends and re.fullmatch(says.format(folder), error), error
    own = models.logits
    models.logits = lambda lm, states: 1.1 * own(lm, states)
    error, ends = check()
    assert ends and re.fullmatch(says.format(folder), error), error
    error, ends = check(settings=dataclasses.replace(args, stop_at_gap=False))
    assert not ends and error.startswith("warning: ")
    models.logits = lambda lm, states: torch.nan * own(lm, states)
    assert check()[1]
    models.logits = own
    assert check() == ("", False)


@pytest.mark.parametrize("family", ["gemma4", "qwen3_moe"])
def test_a_model_that_vllm_or_the_policy_computes_wrongly_ends_at_the_start(family, tmp_path):
    families.make(family, tmp_path / f"model_{family}")
    run_together(check_mistakes, tmp_path, processes=1)


def check_reload(folder):
    assert families.reload(families.save_and_resume(folder / "model")[0]) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", [*families.CHANGES, "nanochat", *families.WITH_IMAGES])
def test_families_of_2026_reach_the_sampler(family, tmp_path):
    """In one process and two; then vLLM reads a checkpoint by itself."""
    families.make(family, tmp_path / "model")
    for number in (1, 2):
        run_together(check_gaps, tmp_path, number)
    run_together(check_reload, tmp_path, 1)
