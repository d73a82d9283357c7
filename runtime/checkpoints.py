"""Save and load checkpoints. A resumed run is bitwise identical to one that never stopped.

One exception: if a signal skipped the evaluation after the last step, resuming does not add it.

RUN/checkpoints/step_000020 is a Hugging Face folder, which any program that reads models can read.
Next to the model it holds

adapter/            with LoRA: the adapter alone, in peft's format
versions/           with --lag: the older weights that the sampler still needs
trainer/            the state of training, as torch.distributed.checkpoint (DCP) writes it
trainer_state.json  the place in the run, and the size of every other file

A kill at any moment, even during a save, leaves the last complete checkpoint intact. Resuming
detects files that are missing or cut, and runs no code from a checkpoint: DCP writes safetensors.
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from runtime import distributed, files, lora, models
from runtime.files import (
    POSITION,
    all_checkpoints,
    complete_checkpoints,
    run_of,
    step_of,
    to_resume,
)

VERSIONS = "versions"
TENSORS_PER_FILE = 64  # of trainer/; a process copies one file at a time to main memory
UNDELETABLE = []  # the first folder that could not be deleted

# ------------------------------------------------------------------------------------------- saving


def save(policy, optimizer, tokenizer, step, num_used, args, critic=None):
    """Write checkpoints/step_STEP and delete all but the newest args.keep_checkpoints.

    The model is written in args.dtype with LoRA's adapters merged, the training state in float32.
    step: steps done; num_used: training problems used; critic: as in trainer_state. If the policy
    has versions (grpo_stale.py), all but the last are written: the last one is the policy itself.
    All processes must call it. If the disk is full, the last checkpoint stays as it was.
    """
    path = Path(args.run_dir, "checkpoints", f"step_{step:06d}")
    unfinished = None
    if distributed.RANK == 0:
        clear(path.parent)
        if path.exists():  # incomplete: left by a kill
            delete(path)
        unfinished = unused(path)
        unfinished.mkdir(parents=True)
    unfinished = distributed.broadcast(unfinished)
    state = trainer_state(policy, optimizer, critic)
    places = {name: 1 + i // TENSORS_PER_FILE for i, name in enumerate(state)}
    writer = dcp.HuggingFaceStorageWriter(unfinished / "trainer", places, save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=distributed.WORLD_SIZE == 1)
    weights = whole(lora.merged_weights(policy.lm), getattr(torch, args.dtype))
    adapter = whole(lora.peft_weights(policy.lm), torch.float32)
    if distributed.RANK == 0:
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        policy.lm.config.architectures = [type(policy.lm).__name__]  # not a base class's
        policy.lm.config.save_pretrained(unfinished)
        # Not save_pretrained, which refuses a common case: a temperature without do_sample.
        policy.lm.generation_config.to_json_file(unfinished / "generation_config.json")
        tokenizer.save_pretrained(unfinished)
        if adapter:
            policy.lm.peft_config[lora.ADAPTER].save_pretrained(unfinished / "adapter")
            save_file(adapter, unfinished / "adapter" / "adapter_model.safetensors")
        for i, older in enumerate(list(getattr(policy, "versions", ()))[:-1]):
            (unfinished / VERSIONS).mkdir(exist_ok=True)
            save_file(older, unfinished / VERSIONS / f"{i:03d}.safetensors")
        position = {"step": step, "n_used": num_used, "sizes": sizes_in(unfinished)}
        (unfinished / POSITION).write_text(json.dumps(position))
        # Rename it only when all of it is on the disk, so that a folder with this name is never
        # half written. Delete old checkpoints only when the new one is complete.
        files.rename(unfinished, path)
        for old in complete_checkpoints(args.run_dir)[: -args.keep_checkpoints]:
            delete(old)


def clear(folder: Path) -> None:
    """Delete what kills have left of checkpoints that were written or deleted."""
    for path in folder.glob("*.tmp"):
        delete(path)


def unused(path: Path):
    """Return a name next to a checkpoint: step_000020.tmp, or a longer one if that is taken."""
    name = path.with_suffix(".tmp")
    while name.exists():  # it could not be deleted
        name = name.with_suffix(".again.tmp")
    return name


def delete(path: Path) -> None:
    """Delete a checkpoint. Rename it first, so that half of one never looks complete.

    Warn once if that fails, as on NFS while another program reads a file, or because of a mount.
    """
    with contextlib.suppress(OSError):
        if path.suffix != ".tmp":
            path = path.rename(unused(path))
        shutil.rmtree(path, ignore_errors=True)
    if path.exists() and not UNDELETABLE:
        UNDELETABLE.append(path)
        print(f"warning: {path} can't be deleted now; each save tries again", flush=True)


def sizes_in(folder: Path) -> dict:
    """Return {name: bytes} of all files in a folder and its subfolders."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


# ------------------------------------------------------------------------------------------ loading


def check(resume: str | Path) -> None:
    """Raise ValueError if a file of --resume's checkpoint is missing or cut."""
    path = to_resume(resume)
    expected = files.read_object(path / POSITION)["sizes"]
    found = sizes_in(path)
    wrong = [name for name in expected if found.get(name) != expected[name]]
    if wrong:
        raise ValueError(
            f"checkpoint {path} is damaged: {wrong[0]} is missing, or not as long as when it was "
            f"written; an older one, --resume {path.parent}/step_…, may not be"
        )


def load(policy, optimizer: Optimizer, resume: str | Path, critic=None) -> tuple:
    """Load a checkpoint's weights, AdamW's state and the random state. Return (step, num_used).

    Without resume, for a new run, nothing changes, and it returns (0, 0).

    resume: a run (its newest checkpoint is loaded), or one of its checkpoints. The number of
    processes may differ from the run that wrote it. critic: as in trainer_state. All must call it.
    """
    if not resume:
        return 0, 0
    path = to_resume(resume)
    state = trainer_state(policy, optimizer, critic)  # DCP loads in place: it fills these tensors
    reader = dcp.HuggingFaceStorageReader(path / "trainer")
    dcp.load(state, storage_reader=reader, no_dist=distributed.WORLD_SIZE == 1)
    torch.set_rng_state(state["rng"])
    for name, scaler in scalers(policy, optimizer, critic).items():
        scaler.load_state(state[name])
    position = files.read_object(path / POSITION)
    return position["step"], position["n_used"]


def load_versions(resume: str | Path) -> list:
    """Return the older weights of policy.versions, oldest first: a list of {name: tensor}, or [].

    resume: as in load. Call it after load.
    """
    if not resume:
        return []
    return [load_file(path) for path in sorted((to_resume(resume) / VERSIONS).glob("*"))]


def delete_newer(path: Path) -> None:
    """Delete a run's checkpoints that are newer than the one it goes on from, and print that."""
    newer = [folder for folder in all_checkpoints(run_of(path)) if step_of(folder) > step_of(path)]
    for folder in reversed(newer):  # newest first: a kill in between leaves the older ones
        print(f"the run goes on from {path.name}: {folder} is deleted")
        delete(folder)
        if folder.exists():
            sys.exit(f"error: {folder} can't be deleted: start a new run with --model {path}")
    clear(path.parent)


# ------------------------------------------------------------------------------- what is in a state


def trainer_state(policy, optimizer: Optimizer, critic=None):
    """Return {"NAME.weight", "NAME.exp_avg", "NAME.exp_avg_sq", "NAME.step": tensor} and "rng".

    NAME: each trained parameter's; rng: torch's random state. The others are no copies. A buffer of
    the policy itself, outside its lm, is there under its own name.
    With --dtype float16 it has the state of each optimizer's models.Scaler, too. critic: a pair,
    another trained model and its optimizer (ppo.py); its names begin with "critic.".
    """
    state = {"rng": torch.get_rng_state()}
    state |= policy.named_buffers(recurse=False)  # entropy_bonus.py's coefficient
    for name, scaler in scalers(policy, optimizer, critic).items():
        state[name] = scaler.state()
    trained = {"": (policy, optimizer)}
    if critic:
        trained["critic."] = critic
    for prefix, (model, its_optimizer) in trained.items():
        for name, parameter in model.lm.named_parameters():
            if parameter.requires_grad:
                tensors = {**of_adamw(parameter, its_optimizer), "weight": parameter.detach()}
                for part, tensor in tensors.items():
                    state[f"{prefix}{name}.{part}"] = tensor
    return state


def scalers(policy, optimizer: Optimizer, critic=None):
    """Return {name in a checkpoint: models.Scaler} of the optimizers; {} in other dtypes."""
    if policy.lm.config.dtype != "float16":  # models.place has set it to args.dtype
        return {}
    found = {"scaler": models.scaler(optimizer, policy.args)}
    if critic:
        found["critic.scaler"] = models.scaler(critic[1], policy.args)
    return found


def of_adamw(parameter, optimizer: Optimizer):
    """Return AdamW's exp_avg, exp_avg_sq and step of a parameter; zeros before its first update."""
    if not optimizer.state[parameter]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=distributed.DEVICE),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer.state[parameter]


def whole(named_weights, dtype):
    """Return {name: weight on the CPU} in process 0, {} in the others. All must call it."""
    weights = {}
    for name, weight in named_weights:
        # one at a time, so that a GPU never holds the whole model
        weight = distributed.full_tensor(weight.to(dtype))
        if distributed.RANK == 0:
            weights[name] = weight.cpu()
    return weights
