"""Find the folders of a run and of its checkpoints: RUN/checkpoints/step_STEP."""

import re
from pathlib import Path

POSITION = "trainer_state.json"  # in a checkpoint; written among the last


def all_of(run_dir):
    """Return the folders of a run's checkpoints, oldest first, including damaged ones."""
    folders = Path(run_dir).glob("checkpoints/step_*")
    return sorted(filter(is_checkpoint, folders), key=step_of)


def complete(run_dir):
    """Return the checkpoints that have all their files, oldest first."""
    return [folder for folder in all_of(run_dir) if (folder / POSITION).is_file()]


def how_to_go_on(run_dir):
    """Say how to resume a run that has ended early."""
    there = complete(run_dir)
    if not there:
        return "it has no checkpoint to go on from"
    return f"--resume {run_dir} goes on from {there[-1].name}"


def is_checkpoint(folder):
    """Return whether this is the path of a checkpoint: RUN/checkpoints/step_STEP."""
    return folder.parent.name == "checkpoints" and bool(re.fullmatch(r"step_\d{6,}", folder.name))


def step_of(folder):
    return int(folder.name.removeprefix("step_"))


def run_of(resume):
    """Return the run folder that --resume names: RUN, or RUN/checkpoints/step_STEP."""
    folder = Path(resume)
    return folder.parents[1] if is_checkpoint(folder) else folder


def to_resume(resume):
    """Return the checkpoint that --resume names: itself, or the run's newest; None without one."""
    folder = Path(resume)
    if is_checkpoint(folder):
        return folder if folder.is_dir() else None
    there = all_of(folder)
    return there[-1] if there else None
