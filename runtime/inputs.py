"""Detect problems that have changed since a run began: no checkpoint holds them.

run.json has their digest. With other problems, a resumed run would continue differently.
"""

import hashlib
import json
from array import array

from runtime import files, folders

# Settings that choose or change the problems. Whoever changes one expects other problems.
OF_PROBLEMS = """task data test_data people numbers gym gym_options careful restated seed eval_size
    chat_template template_options max_prompt_tokens max_response_tokens""".split()


def digest(problems):
    """Return the SHA-256 (hex) of the problems' tokens and answers."""
    found = hashlib.sha256()
    for problem in problems:
        found.update(json.dumps(problem.get("answer"), default=str).encode())
        for key in ("prompt_ids", "response_ids"):
            found.update(array("q", problem.get(key, [])).tobytes() + b".")
    return found.hexdigest()


def check_resumed(args, found):
    """Raise ValueError if --resume would continue with other problems. found: their digest."""
    if not args.resume:
        return
    run = folders.run_of(args.resume)
    before = files.read_object(run / "args.json")
    had = files.read_object(run / "run.json").get("sizes", {}).get("digest", found)
    asked = any(before.get(name) != getattr(args, name, None) for name in OF_PROBLEMS)
    if had != found and not asked:
        raise ValueError(
            f"--resume {run}: the problems have changed since the run began, or the tokenizer, or "
            "its chat template (--template_options may set its date)"
        )
