"""Write files that a kill can't corrupt, and lock a run's folder."""

import errno
import fcntl
import hashlib
import json
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # a disk takes no more
LOCKS = {}  # {folder: its open lock file}; closing the file would release the lock


def write(path, text):
    """Replace a file's content by this text, or create the file.

    The new version is written next to it and then renamed. Renaming happens completely or not at
    all, so the name always refers to the old content or the new one.
    """
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    rename(beside, path)


def rename(old, new):
    """Rename a file, or a folder with files, once they are on the disk: safe from a power cut."""
    for path in filter(Path.is_file, [old, *old.rglob("*")]):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    old.rename(new)


def append(path, text):
    """Append text to a file, or create it."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def why_full(error):
    """Return the system's words if an error, of any library, is of a full disk; None otherwise."""
    for number in FULL:
        if number == getattr(error, "errno", None) or os.strerror(number) in str(error):
            return os.strerror(number)
    return None


def sha256(path):
    """Return the SHA-256 of a file, in hex. OSError if it can't be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path):
    """Return the JSON object in a file as a dictionary. ValueError, with its name, without one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error


def lock(folder):
    """Keep other processes from using this folder as long as this process lives.

    The system releases the lock when the process ends, however it ends. ValueError if another
    process has the lock. On a file system without locks, nothing is locked.
    """
    if folder in LOCKS:
        return
    file = open(folder / "lock", "w", encoding="utf-8")  # noqa: SIM115 (stays open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder} is in use by another process") from None
    except OSError:
        pass  # some network file systems have no locks
    LOCKS[folder] = file
