"""Find the models to evaluate: folders, hub ids, runs and their checkpoints."""

import hashlib
import re
from pathlib import Path

from transformers import AutoConfig

from runtime import checks, files


def checkpoints(model, last) -> list:
    """Return the paths or hub ids to load: a run's newest checkpoints, or the model itself.

    For a run: its `last` newest complete checkpoints, oldest first. ValueError if it has fewer, or if
    the model is neither a model folder, nor a run, nor a hub id.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return [str(folder)]
    if (folder / "checkpoints").is_dir():
        complete = files.complete_checkpoints(folder)
        if len(complete) < last:
            raise ValueError(f"{model} has {len(complete)} complete checkpoint(s), and --last is {last}")
        return [str(path) for path in complete[-last:]]
    if checks.is_path(model):
        raise ValueError(f"{model} is no model folder (no config.json), no run (no checkpoints) and no hub id")
    return [model]


def fingerprint(model):
    """Return the SHA-256 (hex) of a folder's weights, configuration and tokenizer, or a hub id's commit."""
    if not Path(model).is_dir():
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        return f"{model} {config._commit_hash}"
    digest = hashlib.sha256()
    for path in sorted(Path(model).iterdir()):
        if path.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"):
            with open(path, "rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def short_name(model):
    """Return the model's name for file names; for a checkpoint, with the name of its run."""
    parts = Path(model).absolute().parts
    name = parts[-1]
    if parts[-2] == "checkpoints":
        name = f"{parts[-3]}_{parts[-1]}"
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)
