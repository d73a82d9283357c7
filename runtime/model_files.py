"""Find what is wrong with a model's files before anything large is loaded.

Every check raises a ValueError of one line. flag, name: identify the model in that line.
"""

from pathlib import Path

import torch
from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache
from safetensors import safe_open
from transformers import AutoConfig
from transformers.modeling_utils import load_state_dict

from runtime import engine, files, memory
from runtime.processes import ON_GPU

LFS = b"version https://git-lfs"  # git's pointer in place of a large file begins like this
SHOWN = 3  # weights named in an error


def check_files(flag, name):
    """Raise ValueError if git has left pointers in place of files."""
    for path in sorted(Path(name).glob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                if file.read(len(LFS)) == LFS:
                    raise ValueError(
                        f"{flag} {name}: {path.name} is a pointer of git-lfs in place of the file: "
                        "`git lfs pull` gets it"
                    )


def check_trainable(flag, name, config):
    """Raise ValueError if the weights are quantised, or the folder has an adapter for them."""
    quantised = quantisation_of(config)
    if quantised:
        how = dict(quantised).get("quant_method", "quantization_config in its config.json")
        raise ValueError(
            f"{flag} {name} has quantised weights ({how}), which can't be trained: take the model "
            "that they were made from"
        )
    if Path(name, "adapter_config.json").exists():
        raise ValueError(
            f"{flag} {name} holds a model and an adapter (adapter_config.json): take the adapter's "
            "files out if the model has it already; python -m tools.merge makes one of both"
        )


def quantisation_of(config):
    """Return a configuration's entry about quantised weights; None if they are ordinary numbers."""
    found = [getattr(config, name, None) for name in ("quantization_config", "compression_config")]
    return found[0] or found[1]


def check_tokenizer(flag, name, config, tokenizer, for_sampler):
    """Raise ValueError if no token ends a response, or letters have no tokens."""
    ends = {tokenizer.eos_token_id}
    if for_sampler:
        ends |= set(engine.end_tokens(name))
    if not any(end is not None and end < config.vocab_size for end in ends):
        raise ValueError(
            f"{flag} {name} has no token that ends a response: give its tokenizer an eos_token "
            "that has a row in the embedding"
        )
    ids = tokenizer.encode("Is Zoey a knight?", add_special_tokens=False)
    if not any(map(str.isalpha, tokenizer.decode(ids, skip_special_tokens=True))):
        raise ValueError(f"{flag} {name}: its tokenizer has no letters")


def check_prompts(name, problems):
    """Raise ValueError if a prompt or a response to learn has tokens beyond --model's embedding.

    A tokenizer may have such tokens, as some published ones do, as long as none is used.
    """
    size = AutoConfig.from_pretrained(name, trust_remote_code=False).vocab_size
    for problem in problems:
        largest = max((*problem["prompt_ids"], *problem.get("response_ids", ())), default=0)
        if largest >= size:
            raise ValueError(
                f"--model {name}: its tokenizer is larger than its embedding: a problem has token "
                f"{largest}, and there are {size} rows (resize_token_embeddings makes more)"
            )


def check_evaluated(name, config):
    """Check a model for evaluate.py, in which only vLLM loads it."""
    if quantisation_of(config):  # vLLM knows many kinds
        return
    try:
        model = memory.shapes_of(config)
    except Exception:  # vLLM may know the model anyway
        return
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is not None and memory.is_recurrent(model.model) and not ON_GPU:
        raise ValueError(
            f"model {name} has recurrent layers or convolutions beside attention: vLLM needs a GPU "
            "for seeded requests to it"
        )
    check_weights("model", name, config, for_sampler=True)


def check_weights(flag, name, config, for_sampler):
    """Raise ValueError if weights are missing, unexpected, unreadable, or of another shape.

    for_sampler: whether vLLM, which knows fewer formats, loads them too. Reads only the headers of
    files, from the hub if they are not here. Without this check, transformers would fill missing
    weights with random numbers, different each time.
    """
    stored = weights_of(flag, name)
    if stored is None:
        return
    model, found = type(memory.shapes_of(config)).from_pretrained(
        None,
        config=config,
        state_dict=dict(stored),
        device_map="meta",
        ignore_mismatched_sizes=True,  # report them instead of raising an error
        output_loading_info=True,
    )
    # transformers' Gemma 3 takes the angles in old checkpoints for weights; no model needs them.
    unexpected = [key for key in found["unexpected_keys"] if not key.endswith(".inv_freq")]
    wrong = [key for key, *_ in found["mismatched_keys"]]
    kinds = {"lacks": found["missing_keys"], "has unknown": unexpected, "has wrongly shaped": wrong}
    for what, keys in kinds.items():
        if keys:
            shown = ", ".join(sorted(keys)[:SHOWN])
            more = ", …" if len(keys) > SHOWN else ""
            raise ValueError(f"{flag} {name} {what} weights: {len(keys)} ({shown}{more})")
    if for_sampler and "embed_tokens.weight" in stored:
        raise ValueError(
            f"{flag} {name} has the weights of a base class: vLLM needs model.embed_tokens.weight. "
            "Load it with AutoModelForCausalLM, and save it again"
        )
    for tied, source in model.all_tied_weights_keys.items():
        if {tied, source} <= stored.keys() and not are_equal(name, tied, source):
            raise ValueError(
                f"{flag} {name} has different weights in {tied} and {source}, and its config.json "
                "says that they are one: set tie_word_embeddings to false in it"
            )


def weights_of(flag, name):
    """Return {name: tensor without data} of a folder's or hub id's weights; None if unreachable."""
    cached = try_to_load_from_cache(name, "config.json") if not Path(name).is_dir() else None
    folder = Path(cached).parent if isinstance(cached, str) else Path(name)
    paths = paths_of(folder)
    if not paths and folder == Path(name) and folder.is_dir():
        raise ValueError(f"{flag} {name}: no weights in it (model.safetensors)")
    if not paths:
        return headers_of(name)
    stored = {}
    for path in paths:
        try:
            stored |= load_state_dict(path, map_location="meta")
        except Exception as error:  # many kinds, for two formats
            raise ValueError(f"{flag} {name}: {path.name} can't be read: {error}") from error
    return stored


def are_equal(name, *keys):
    """Return whether these weights of a safetensors folder are equal; True for other folders."""
    found = []
    for path in paths_of(Path(name)):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                found += [file.get_tensor(key) for key in keys if key in file.keys()]  # noqa: SIM118
    return all(torch.equal(found[0], other) for other in found[1:])


def paths_of(folder):
    """Return the files of a folder's weights, found as transformers finds them; [] without any."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return [folder / name]
        if index.exists():
            parts = files.read_object(index).get("weight_map", {}).values()
            return [folder / part for part in sorted(set(parts))]
    return []


def headers_of(hub_id):
    """Return {name: tensor without data} from the headers of a hub id; None if unreachable."""
    try:
        of_files = get_safetensors_metadata(hub_id).files_metadata.values()
    except Exception:  # the hub's library raises many kinds; loading says more
        return None
    headers = {}
    for of_file in of_files:
        for key, tensor in of_file.tensors.items():
            headers[key] = torch.empty(tensor.shape, device="meta")
    return headers
