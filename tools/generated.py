"""Files of docs/ that a tool makes: written, or only compared with what the tool would write now."""

import sys

from runtime import files


def keep(texts, check, command):
    """Writes each text to its file, if the file is not the same already; says what it did, a line for each file.

    texts: {path: text}. check: change nothing, and end the program: exit code 1 if a file is out of date, or 0.
    command: the one that writes the files, for the message.
    """
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in texts:
        if check:
            print(f"{path} is out of date: {command}" if path in stale else f"{path} is up to date")
        elif path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, texts[path])
            print(f"wrote {path}")
        else:
            print(f"left {path}")
    if check:
        sys.exit(int(bool(stale)))
