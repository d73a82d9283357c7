"""Write files that a kill or a power cut can't corrupt, and lock a run's folder.

A new version of a file is written next to it, forced to the disk and then renamed. Renaming
happens completely or not at all, so the name always refers to the old content or the new one.
"""

import fcntl
import hashlib
import json
import os
import socket
import tempfile
from pathlib import Path

LOCKS = {}  # {folder: its open lock file}; closing the file would release the lock


def write(path, text):
    """Replace a file's content by this text, or create the file."""
    beside = path.with_name(f"{path.name}.tmp")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        force_to_disk(file)
    rename(beside, path)


def append(path, text):
    """Append text to a file, or create it. The text is on the disk when this returns."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
        force_to_disk(file)


def force_to_disk(file):
    """Flush an open file to the disk: first Python's buffer, then the system's."""
    file.flush()
    os.fsync(file.fileno())


def rename(old, new):
    """Rename a file or folder. The new name is on the disk when this returns."""
    old.rename(new)
    sync(new.parent)


def sync(path):
    """Force a file, or a folder's list of names, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_all(folder):
    """Force everything in a folder to the disk, and then the folder itself."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


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


def check_writable(folder):
    """Raise OSError if no file can be created in this folder."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def lock(folder):
    """Keep other processes from using this folder as long as this process lives.

    The system releases the lock when the process ends, however it ends. ValueError if another
    process has the lock. On a file system without locks, nothing is locked.
    """
    folder = Path(folder).resolve()
    if folder in LOCKS:
        return
    file = open(folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115 (stays open)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(f"{folder} is in use by {file.read(200).strip()}") from None
    except OSError:
        pass  # some network file systems have no locks
    LOCKS[folder] = file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")  # for the message above
    file.flush()
