"""Find what is wrong with a model's files before anything large is loaded.

Every check raises a ValueError of one line. flag, name: identify the model in that line.
"""

from pathlib import Path

from transformers.modeling_utils import load_state_dict

from runtime import memory

SHOWN = 3  # weights named in an error


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


def check_weights(flag, name, config):
    """Raise ValueError if a folder's weights are missing, unknown, unreadable or wrongly shaped.

    Reads only the headers of files. Without this check, transformers would fill missing weights
    with random numbers, different each time.
    """
    if not Path(name).is_dir():  # a hub id
        return
    try:
        model_class = type(memory.shapes_of(config))
    except Exception:  # a trainer has refused it by now; vLLM may know it (evaluate.py)
        return
    stored = weights_of(flag, name)
    _, found = model_class.from_pretrained(
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


def weights_of(flag, name):
    """Return {name: tensor without data} of a folder's weights."""
    folder = Path(name)
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise ValueError(f"{flag} {name}: no weights in it (model.safetensors)")
    stored = {}
    for path in paths:
        try:
            stored |= load_state_dict(path, map_location="meta")
        except Exception as error:  # many kinds, for two formats
            raise ValueError(
                f"{flag} {name}: {path.name} can't be read: {error} (if git cloned the folder: "
                "`git lfs pull`)"
            ) from error
    return stored
