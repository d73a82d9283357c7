"""A resumed run has the problems that it began with, and a folder of Mistral's has one set of files."""

import contextlib
import dataclasses
import json
import shutil
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, puzzles, write_rows
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig

import grpo
import sft
from rewards import examples
from runtime import checks, engine, inputs
from runtime.chats import load_task

DATE = "{{ strftime_now('%d %b %Y') }}"


CHANGES = {  # what is done to the folder of a run between its beginning and its resume
    "nothing": lambda folder: None,
    "template": lambda folder: (folder / "model/chat_template.jinja").write_text("{{ messages[-1]['content'] }}"),
    "problems": lambda folder: write_rows(folder / "train.jsonl", rows_of(folder)[::-1]),
    "fewer problems": lambda folder: write_rows(folder / "train.jsonl", rows_of(folder)[2:]),
    "old run": lambda folder: (folder / "run.json").write_text(json.dumps({"sizes": {}})),
    "date": lambda folder: None,  # the clock goes on
}


def rows_of(folder):
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("change", "resumed_with", "refused"),
    [
        ("nothing", {}, False),
        ("template", {}, True),
        ("template", {"template_options": "{ }"}, False),  # who gives an option wants another prompt
        ("date", {}, True),
        ("problems", {}, True),
        ("fewer problems", {}, True),
        ("problems", {"seed": 5}, False),
        ("old run", {}, False),
    ],
)
def test_a_resume_with_other_problems_is_refused(change, resumed_with, refused, tmp_path, monkeypatch):
    shutil.copytree(KK_TINY, tmp_path / "model")
    data = str(shutil.copy(puzzles(), tmp_path / "train.jsonl"))
    if change == "date":
        template = tmp_path / "model/chat_template.jinja"
        template.write_text(template.read_text() + DATE)

    def begin(**more):
        args = grpo.Args(model=str(tmp_path / "model"), data=data, test_data=data, **more)
        _, train, test = load_task(args, AutoTokenizer.from_pretrained(args.model))
        return args, inputs.digest(train + test)

    args, digest = begin()
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    (tmp_path / "run.json").write_text(json.dumps({"sizes": {"digest": digest}}))
    CHANGES[change](tmp_path)
    if change == "date":
        from transformers.utils import chat_template_utils

        later = SimpleNamespace(now=lambda: datetime.now() + timedelta(days=99))
        monkeypatch.setattr(chat_template_utils, "datetime", later)
    args, digest = begin(resume=str(tmp_path), **resumed_with)
    expected = pytest.raises(ValueError, match="the problems have changed since the run began")
    with expected if refused else contextlib.nullcontext():
        inputs.check_resumed(args, digest)


def test_examples_count_with_their_responses(tmp_path, tokenizer):
    digests = set()
    for answer in ("Me.", "You."):
        chats = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": answer}]}]
        file = str(write_rows(tmp_path / "chats.jsonl", chats))
        args = sft.Args(data=file, test_data=file, model=str(KK_TINY))
        digests.add(inputs.digest(load_task(args, tokenizer, examples)[1]))
    assert len(digests) == 2


def mistral(folder, **saving):
    """A tiny Mistral as its publisher has it: with the same weights in a second format, which we don't read."""
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    tokenizer.save_pretrained(folder)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id, sliding_window=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **saving)
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    sizes = {"dim": 64, "n_layers": 2, "head_dim": 32, "hidden_dim": 128, "n_heads": 2, "n_kv_heads": 2}
    (folder / "params.json").write_text(json.dumps(sizes | {"vocab_size": len(tokenizer), "norm_eps": 0.5}))
    (folder / "tekken.json").write_text("{}")
    return folder


def test_of_two_sets_of_files_vllm_reads_those_that_transformers_reads(tmp_path):
    """The engine's configuration and tokenizer, and the weights' files, by vLLM itself."""
    model = str(mistral(tmp_path / "model", max_shard_size="100KB"))
    config, ours = checks.read_config(model)
    chosen = engine.common_options(model, 64, 0.01)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.tokenizers import get_tokenizer

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    made = EngineArgs(model=model, **{name: value for name, value in chosen.items() if name in names})
    assert made.create_model_config().hf_config.rms_norm_eps == config.rms_norm_eps
    read = DefaultModelLoader(made.create_load_config())._prepare_weights(model, None, None, True, None)[1]
    assert read and all("consolidated" not in name for name in read)
    theirs = get_tokenizer(model, tokenizer_mode=made.tokenizer_mode)
    text = "<think>Zoey is a knight"
    assert theirs.encode(text) == ours.encode(text) and theirs.batch_decode([[5, 6]], skip_special_tokens=False)
    assert ours.chat_template
