"""A resumed run has the prompts and the base that it began with, and a folder of Mistral's has one set of files."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from conftest import KK_TINY, puzzles, write_rows
from helpers import chat, refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import opd
import sft
from rewards import examples
from runtime import checks, engine, inputs
from runtime.chats import load_task
from tools.maintain import families


def edited(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def other_weight(path):
    weights = load_file(path)
    name = sorted(weights)[-1]
    weights[name].view(-1)[-1] += 1  # a single number
    save_file(weights, path, metadata={"format": "pt"})


CHANGES = {  # what is done to the folder of a run between its beginning and its resume
    "nothing": lambda folder: None,
    "weights": lambda folder: other_weight(folder / "model/model.safetensors"),
    "config": lambda folder: edited(folder / "model/config.json", rope_theta=7.0),
    "end": lambda folder: edited(folder / "model/generation_config.json", eos_token_id=[2, 3]),
    "version": lambda folder: edited(folder / "model/config.json", transformers_version="9"),
    "template": lambda folder: (folder / "model/chat_template.jinja").write_text("{{ messages[-1]['content'] }}"),
    "problems": lambda folder: write_rows(folder / "train.jsonl", rows_of(folder)[::-1]),
    "fewer problems": lambda folder: write_rows(folder / "train.jsonl", rows_of(folder)[2:]),
    "teacher": lambda folder: other_weight(folder / "teacher/model.safetensors"),
    "old run": lambda folder: (folder / "run.json").write_text(json.dumps({"sizes": {}})),
}


def rows_of(folder):
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("change", "flags", "resumed_with", "says"),
    [
        ("nothing", {}, {}, None),
        ("weights", {"kl_coef": 0.0}, {}, None),  # the checkpoint has all
        ("weights", {"kl_coef": 0.1}, {}, "the weights of --model have changed"),
        ("weights", {"kl_coef": 0.0}, {"kl_coef": 0.1}, "the weights of --model have changed"),
        ("weights", {"kl_coef": 0.0, "lora_rank": 4}, {}, "the weights of --model have changed"),
        ("config", {"kl_coef": 0.0}, {}, "config.json or generation_config.json of --model has changed"),
        ("end", {}, {}, "config.json or generation_config.json of --model has changed"),
        ("version", {}, {}, None),
        ("template", {}, {}, "the tokenizer or its chat template (--template_options may set its date) has changed"),
        ("template", {}, {"template_options": "{ }"}, None),  # who gives an option wants another prompt
        ("problems", {}, {}, "the problems or their answers have changed"),
        ("fewer problems", {}, {}, "the problems or their answers have changed"),
        ("problems", {}, {"seed": 5}, None),
        ("teacher", {}, {}, "the weights of --teacher have changed"),
        ("old run", {}, {}, None),
    ],
)
def test_a_resume_with_another_input_is_refused_in_one_line(change, flags, resumed_with, says, tmp_path):
    for name in ("model", "teacher"):
        shutil.copytree(KK_TINY, tmp_path / name)
    data = str(shutil.copy(puzzles(), tmp_path / "train.jsonl"))
    fixed = {"model": str(tmp_path / "model"), "data": data, "test_data": data} | flags
    Args = grpo.Args
    if change == "teacher":
        Args, fixed["teacher"] = opd.Args, str(tmp_path / "teacher")

    def begin(**more):
        args = Args(**fixed | more)
        _, train, test = load_task(args, AutoTokenizer.from_pretrained(args.model))
        return args, inputs.digests(args, train, test)

    args, digests = begin()
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    (tmp_path / "run.json").write_text(json.dumps({"sizes": {"digests": digests}}))
    CHANGES[change](tmp_path)
    args, digests = begin(resume=str(tmp_path), **resumed_with)
    with refused(says and re.escape(f"--resume {tmp_path}: since the run began, {says}") + "$"):
        inputs.check_resumed(args, digests)


def test_examples_count_with_their_responses(tmp_path, tokenizer):
    digests = []
    for answer in ("Me.", "You."):
        file = str(write_rows(tmp_path / "chats.jsonl", [chat("Who?", answer)]))
        args = sft.Args(data=file, test_data=file, model=str(KK_TINY))
        digests.append(inputs.digests(args, *load_task(args, tokenizer, examples)[1:]))
    assert digests[0]["problems"] != digests[1]["problems"] and digests[0]["weights"] == digests[1]["weights"]


def test_of_two_sets_of_files_vllm_reads_those_that_transformers_reads(tmp_path):
    """A Mistral as its publisher has it: the same weights in a second format, which we don't read.

    By vLLM itself: the engine's configuration and tokenizer, and the weights' files.
    """
    folder = families.make("mistral", tmp_path / "model")
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    sizes = {"dim": 64, "n_layers": 2, "head_dim": 32, "hidden_dim": 128, "n_heads": 2, "n_kv_heads": 2}
    (folder / "params.json").write_text(json.dumps(sizes | {"vocab_size": 636, "norm_eps": 0.5}))
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds its weights twice, .* move consolidated\*\.safetensors"):
        checks.check_weights_files(str(folder))
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")  # with an index
    checks.check_weights_files(str(folder))
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
