"""Files that a kill or a power cut can't spoil, and the lock on a run's folder.

A file that is replaced is written beside its place, forced to the disk and then renamed. Renaming
happens at once or not at all, so that its name always stands for the old content or the new one.
"""

import fcntl
import hashlib
import json
import os
import socket
import tempfile
from pathlib import Path

LOCKS = {}  # {folder: its open lock file}; closing the file would give the lock back


def write(path, text):
    """Replaces a file by this text, or makes it."""
    beside = path.with_name(f"{path.name}.tmp")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        force_to_disk(file)
    rename(beside, path)


def append(path, text):
    """Adds text to a file, or makes it. The text is on the disk when this returns."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
        force_to_disk(file)


def force_to_disk(file):
    """Writes out an open file, first Python's part of it, then the system's."""
    file.flush()
    os.fsync(file.fileno())


def rename(old, new):
    """Renames a file or folder. The new name is on the disk when this returns."""
    old.rename(new)
    sync(new.parent)


def sync(path):
    """Forces a file, or a folder's list of names, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_all(folder):
    """Forces everything in a folder to the disk, and then the folder itself."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sha256(path):
    """SHA-256 of a file, in hex. OSError if it can't be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path):
    """The JSON object in a file, as a dictionary. ValueError, with the file's name, without one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{path} can't be read: it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} can't be read: it holds no JSON object")
    return found


def check_writable(folder):
    """OSError if no file can be made in this folder."""
    with tempfile.TemporaryFile(dir=folder):
        pass


def check_unlocked(folder):
    """ValueError if another process has locked this folder. It need not exist."""
    path = Path(folder, "lock")
    if path.exists():
        with open(path, "a+", encoding="utf-8") as file:
            take_lock(file, folder)


def lock(folder):
    """Keeps other processes from using this folder as long as this process lives.

    The system gives the lock back when the process ends, in whatever way it ends. ValueError if
    another process has the lock. A file system that knows no locks gives none.
    """
    folder = Path(folder).resolve()
    if folder in LOCKS:
        return
    file = open(folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115 (stays open)
    take_lock(file, folder)
    LOCKS[folder] = file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")  # for the message above
    file.flush()


def take_lock(file, folder):
    """Locks a folder's open lock file until it is closed. ValueError if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(200).strip() or "another process"
        file.close()
        raise ValueError(f"{folder} is in use by {owner}") from None
    except OSError:
        pass  # no locks here: some network file systems have none
