"""Detect changed inputs that no checkpoint holds: prompts, and --model's weights under LoRA.

run.json has their digests. If an input has changed, a resumed run would continue differently.
"""

import contextlib
import hashlib
import json
from array import array
from pathlib import Path

from huggingface_hub import snapshot_download

from runtime import files, folders

WHOLE = 2**28  # bytes; larger files are read in samples
SAMPLE, EVERY = 2**12, 2**22  # bytes of a sample; distance between samples
# Settings that choose or change the problems. Whoever changes one expects other problems.
OF_PROBLEMS = """task data test_data people numbers gym gym_options careful restated seed eval_size
    chat_template template_options max_prompt_tokens max_response_tokens""".split()
CHANGED = {
    "problems": "the problems or their answers have",
    "prompts": "the tokenizer or its chat template (--template_options may set its date) has",
    "config": "config.json or generation_config.json of --model has",
    "weights": "the weights of --model have",
    "teacher": "the weights of --teacher have",
}


def digests(args, train, test):
    """Return {name in CHANGED: SHA-256 in hex, None without files}. Fetches a hub id's weights."""
    problems, prompts = hashlib.sha256(), hashlib.sha256()
    for problem in [*train, *test]:
        texts = [problem.get(key) for key in ("messages", "answer", "response")]
        problems.update(json.dumps(texts, default=str).encode())
        for key in ("prompt_ids", "response_ids"):
            prompts.update(array("q", problem.get(key, [])).tobytes() + b".")
    folder = Path(args.model)
    if not folder.is_dir():  # a hub id; the run needs its files anyway
        kinds = ["*.json", "*.safetensors"]
        with contextlib.suppress(OSError):  # a dry run loads nothing
            folder = Path(
                snapshot_download(args.model, allow_patterns=kinds, local_files_only=args.dry_run)
            )
    return {
        "problems": problems.hexdigest(),
        "prompts": prompts.hexdigest(),
        "config": of_config(folder),
        "weights": of_weights(folder),
        "teacher": of_weights(Path(args.teacher)) if args.teacher else None,
    }


def of_config(folder):
    """Return the SHA-256 (hex) of the model's settings, without transformers' version."""
    found = []
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.is_file():
            found.append(files.read_object(path) | {"transformers_version": ""})
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else None


def of_weights(folder):
    """Return the SHA-256 (hex) of the sizes and contents of a folder's weights; None without any.

    Reads 4 KiB in every 4 MiB of files above 256 MiB: enough to notice different training.
    """
    found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.bin"))
    digest = hashlib.sha256()
    for path in found:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for start in range(0, size, EVERY):
                file.seek(start)
                digest.update(file.read(EVERY if size <= WHOLE else SAMPLE))
    return digest.hexdigest() if found else None


def check_resumed(args, found):
    """Raise ValueError if --resume would continue with other inputs. found: a result of digests.

    --model's weights count only if LoRA adds to them or the KL term compares with them; otherwise
    the checkpoint has everything. Runs of versions without digests are not checked.
    """
    if not args.resume:
        return
    run = folders.run_of(args.resume)
    before = files.read_object(run / "args.json")
    had = files.read_object(run / "run.json").get("sizes", {}).get("digests", {})
    allowed = set()
    if any(before.get(name) != getattr(args, name, None) for name in OF_PROBLEMS):
        allowed |= {"problems", "prompts"}
    if args.lora_rank == 0 and args.kl_coef == 0:
        allowed |= {"weights"}
    if before.get("teacher") != args.teacher:
        allowed |= {"teacher"}
    for name, what in CHANGED.items():  # other problems also mean other prompts: name the problems
        values = {had.get(name), found[name]} - {None}
        if name not in allowed and len(values) == 2:
            raise ValueError(f"--resume {run}: since the run began, {what} changed")
