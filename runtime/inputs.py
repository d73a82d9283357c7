"""Keep a run's inputs the same when it is resumed: no checkpoint holds its problems, or its date.

run.json has a digest of the problems of each split, and the date that the chat template writes.
"""

import datetime
import hashlib
import json

from runtime import chats, files, folders


def digest(problems):
    """Return the SHA-256 (hex) of the problems' numbers, tokens and answers, in their order."""
    found = hashlib.sha256()
    for problem in problems:
        kept = [problem.get(key) for key in ("id", "prompt_ids", "response_ids", "answer")]
        found.update(json.dumps(kept, default=str).encode() + b"\n")
    return found.hexdigest()


def check_resumed(args, digests):
    """Raise ValueError if --resume would mix two test sets, or test on problems trained on.

    digests: {"training": digest, "test": digest} of the problems now.
    """
    if not args.resume:
        return
    run = folders.run_of(args.resume)
    before = files.read_object(run / "run.json").get("sizes", {}).get("digests")
    if before is None:
        print(f"{run} is of an older commit: whether its problems have changed is not checked")
        return
    differ = [split for split in digests if before[split] != digests[split]]
    if differ:
        raise ValueError(
            f"--resume {args.resume}: the {' and '.join(differ)} problems are not those that the "
            "run began with: a setting (--data, --seed, --eval_size, --max_prompt_tokens …), a "
            "file, the tokenizer or the chat template has changed. To go on with other problems, "
            f"start a new run with --model {folders.to_resume(args.resume)}"
        )


def fix_date(tokenizer, chat_template, begun):
    """Make a chat template that writes the date (strftime_now) write the same one in all of a run.

    begun: the run, or its checkpoint, that is resumed or evaluated; another model has no run.json.
    Return the date, "2026-05-31": today's or that run's. None if no template writes it.
    """
    if chat_template == "none" or "strftime_now" not in str(tokenizer.chat_template):
        return None
    date = str(datetime.date.today())
    path = folders.run_of(begun) / "run.json"
    if begun and path.is_file():
        about = files.read_object(path)
        date = about.get("sizes", {}).get("template_date") or about.get("date", date)
    chats.FIXED["strftime_now"] = datetime.datetime.fromisoformat(date).strftime  # at midnight
    print(f"the chat template writes the date: {date} in all of the run, even if it is resumed")
    return date
