"""Write files that a kill can't corrupt, lock a run's folder, and find checkpoints.

A run's checkpoints are in RUN/checkpoints/step_STEP.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # a disk takes no more
LOCKS = {}  # {folder: its open lock file}; closing the file would release the lock


def write(path: Path, text: str) -> None:
    """Replace a file's content by this text, or create the file.

    The new version is written next to it and then renamed. Renaming happens completely or not at
    all, so the name always refers to the old content or the new one.
    """
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    rename(beside, path)


def rename(old, new) -> None:
    """Rename a file, or a folder with files, once they are on the disk: safe from a power cut."""
    for path in filter(Path.is_file, [old, *old.rglob("*")]):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    old.rename(new)


def append(path: Path, text: str) -> None:
    """Append text to a file, or create it."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def why_full(error):
    """Return the system's words if an error, of any library, is of a full disk; None otherwise."""
    for number in FULL:
        if number == getattr(error, "errno", None) or os.strerror(number) in str(error):
            return os.strerror(number)
    return None


def sha256(path: Path):
    """Return the SHA-256 of a file, in hex. OSError if it can't be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path):
    """Return the JSON object in a file as a dictionary. ValueError, with its name, without one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error


def lock(folder: Path) -> None:
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


# --------------------------------------------------------------------------------------------- rows


def read_rows(path: Path):
    """Return the objects of a JSON-lines file; [] without the file.

    Skips a last line that a kill truncated. ValueError, with the file's name, if another is broken.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


# ---------------------------------------------------------- folders of a run and of its checkpoints

POSITION = "trainer_state.json"  # in a checkpoint; written among the last


def all_checkpoints(run_dir: str | Path) -> list:
    """Return the folders of a run's checkpoints, oldest first, including damaged ones."""
    folders = Path(run_dir).glob("checkpoints/step_*")
    return sorted(filter(is_checkpoint, folders), key=step_of)


def complete_checkpoints(run_dir: str | Path) -> list:
    """Return the checkpoints that have all their files, oldest first."""
    return [folder for folder in all_checkpoints(run_dir) if (folder / POSITION).is_file()]


def how_to_go_on(run_dir: str | Path) -> str:
    """Say how to resume a run that has ended early."""
    there = complete_checkpoints(run_dir)
    if not there:
        return "it has no checkpoint to go on from"
    return f"--resume {run_dir} goes on from {there[-1].name}"


def is_checkpoint(folder: Path):
    """Return whether this is the path of a checkpoint: RUN/checkpoints/step_STEP."""
    return folder.parent.name == "checkpoints" and bool(re.fullmatch(r"step_\d{6,}", folder.name))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def run_of(resume: str | Path):
    """Return the run folder that --resume names: RUN, or RUN/checkpoints/step_STEP."""
    folder = Path(resume)
    return folder.parents[1] if is_checkpoint(folder) else folder


def to_resume(resume: str | Path):
    """Return the checkpoint that --resume names: itself, or the run's newest; None without one."""
    folder = Path(resume)
    if is_checkpoint(folder):
        return folder if folder.is_dir() else None
    there = all_checkpoints(folder)
    return there[-1] if there else None
