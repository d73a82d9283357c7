"""What a run depends on and no checkpoint holds: prompts, and the weights of --model below LoRA.

run.json keeps digests of them. If one has changed, a resumed run would go on differently.
"""

import contextlib
import hashlib
import json
from array import array
from pathlib import Path

from huggingface_hub import snapshot_download

from runtime import files, folders

WHOLE = 2**28  # bytes of a file that is read whole; a larger one is read in samples
SAMPLE, EVERY = 2**12, 2**22  # bytes of a sample, and from one to the next
# Settings that choose the problems, or what is done to them: who gives another one wants others.
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
    """{name in CHANGED: SHA-256 in hex, or None without files}. A hub id's weights are fetched."""
    problems, prompts = hashlib.sha256(), hashlib.sha256()
    for problem in [*train, *test]:
        texts = [problem.get(key) for key in ("messages", "answer", "response")]
        problems.update(json.dumps(texts, default=str).encode())
        for key in ("prompt_ids", "response_ids"):
            prompts.update(array("q", problem.get(key, [])).tobytes() + b".")
    folder = Path(args.model)
    if not folder.is_dir():  # a hub id, whose files the run needs in any case
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
    """SHA-256 (hex) of the model's settings. The version of transformers does not count."""
    found = []
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.is_file():
            found.append(files.read_object(path) | {"transformers_version": ""})
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else None


def of_weights(folder):
    """SHA-256 (hex) of the sizes and contents of a folder's weights; None without any.

    4 KiB in every 4 MiB of a file above 256 MiB: enough to notice another training of a model.
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
    """ValueError if --resume goes on with other inputs than the run had. found: digests' result.

    The weights of --model count if LoRA adds to them or the KL term compares with them: otherwise
    the checkpoint has all. A run of a version without digests is not checked.
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
    for name, what in CHANGED.items():  # other problems are other prompts, too: the first says it
        values = {had.get(name), found[name]} - {None}
        if name not in allowed and len(values) == 2:
            raise ValueError(f"--resume {run}: since the run began, {what} changed")
