"""A resumed run has the problems that it began with, and a folder of Mistral's has one set of files."""

import dataclasses
import json
import shutil

import pytest
import torch
from conftest import KK_TINY, puzzles, write_rows
from helpers import chat, refused
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import sft
from rewards import examples
from runtime import checks, engine, inputs
from runtime.chats import load_task
from tools.maintain import families

CHANGES = {  # what is done to the folder of a run between its beginning and its resume
    "nothing": lambda folder: None,
    "template": lambda folder: (folder / "model/chat_template.jinja").write_text("{{ messages[-1]['content'] }}"),
    "problems": lambda folder: write_rows(folder / "train.jsonl", rows_of(folder)[::-1]),
    "fewer problems": lambda folder: write_rows(folder / "train.jsonl", rows_of(folder)[2:]),
    "old run": lambda folder: (folder / "run.json").write_text(json.dumps({"sizes": {}})),
}


def rows_of(folder):
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("change", "resumed_with", "says"),
    [
        ("nothing", {}, None),
        ("template", {}, "the problems have changed since the run began"),
        ("template", {"template_options": "{ }"}, None),  # who gives an option wants another prompt
        ("problems", {}, "the problems have changed since the run began"),
        ("fewer problems", {}, "the problems have changed since the run began"),
        ("problems", {"seed": 5}, None),
        ("old run", {}, None),
    ],
)
def test_a_resume_with_other_problems_is_refused(change, resumed_with, says, tmp_path):
    shutil.copytree(KK_TINY, tmp_path / "model")
    data = str(shutil.copy(puzzles(), tmp_path / "train.jsonl"))

    def begin(**more):
        args = grpo.Args(model=str(tmp_path / "model"), data=data, test_data=data, **more)
        _, train, test = load_task(args, AutoTokenizer.from_pretrained(args.model))
        return args, inputs.digest(train + test)

    args, digest = begin()
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    (tmp_path / "run.json").write_text(json.dumps({"sizes": {"digest": digest}}))
    CHANGES[change](tmp_path)
    args, digest = begin(resume=str(tmp_path), **resumed_with)
    with refused(says):
        inputs.check_resumed(args, digest)


def test_examples_count_with_their_responses(tmp_path, tokenizer):
    digests = set()
    for answer in ("Me.", "You."):
        file = str(write_rows(tmp_path / "chats.jsonl", [chat("Who?", answer)]))
        args = sft.Args(data=file, test_data=file, model=str(KK_TINY))
        digests.add(inputs.digest(load_task(args, tokenizer, examples)[1]))
    assert len(digests) == 2


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
