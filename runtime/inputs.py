"""Detect changed inputs that no checkpoint holds: problems, prompts, the files of --model.

run.json has their digests. If an input has changed, a resumed run would continue differently.
"""

import hashlib
import json
from array import array
from pathlib import Path

from runtime import files, folders

BEGINNING = 2**24  # bytes of each file; other training changes them, too
# Settings that choose or change the problems. Whoever changes one expects other problems.
OF_PROBLEMS = """task data test_data people numbers gym gym_options careful restated seed eval_size
    chat_template template_options max_prompt_tokens max_response_tokens""".split()
CHANGED = {
    "problems": "the problems or their answers have",
    "prompts": "the tokenizer or its chat template (--template_options may set its date) has",
    "model": "config.json or the weights of --model have",
    "teacher": "config.json or the weights of --teacher have",
}


def digests(args, train, test):
    """Return {name in CHANGED: SHA-256 in hex, None without files}."""
    problems, prompts = hashlib.sha256(), hashlib.sha256()
    for problem in [*train, *test]:
        texts = [problem.get(key) for key in ("messages", "answer", "response")]
        problems.update(json.dumps(texts, default=str).encode())
        for key in ("prompt_ids", "response_ids"):
            prompts.update(array("q", problem.get(key, [])).tobytes() + b".")
    return {
        "problems": problems.hexdigest(),
        "prompts": prompts.hexdigest(),
        "model": of_model(args.model),
        "teacher": of_model(args.teacher) if args.teacher else None,
    }


def of_model(model):
    """Return the SHA-256 (hex) of the sizes and beginnings of a folder's files; None: a hub id."""
    names = ("config.json", "generation_config.json", "*.safetensors", "*.bin")
    digest = hashlib.sha256()
    for path in sorted(path for name in names for path in Path(model).glob(name)):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(BEGINNING))
    return digest.hexdigest() if Path(model).is_dir() else None


def check_resumed(args, found):
    """Raise ValueError if --resume would continue with other inputs. found: a result of digests."""
    if not args.resume:
        return
    run = folders.run_of(args.resume)
    before = files.read_object(run / "args.json")
    had = files.read_object(run / "run.json").get("sizes", {}).get("digests", {})
    allowed = set()
    if any(before.get(name) != getattr(args, name, None) for name in OF_PROBLEMS):
        allowed |= {"problems", "prompts"}
    if before.get("teacher") != args.teacher:
        allowed |= {"teacher"}
    for name, what in CHANGED.items():  # other problems also mean other prompts: name the problems
        values = {had.get(name), found[name]} - {None}
        if name not in allowed and len(values) == 2:
            raise ValueError(f"--resume {run}: since the run began, {what} changed")
