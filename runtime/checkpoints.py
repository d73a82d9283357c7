"""Save and load checkpoints. A resumed run is bitwise identical to one that never stopped.

One exception: if a signal skipped the evaluation after the last step, resuming does not add it.

RUN/checkpoints/step_000020 is a Hugging Face folder, which any program that reads models can read.
Next to the model it holds

adapter/            with LoRA: the adapter alone, in peft's format
versions/           with --lag: the older weights that the sampler still needs
trainer/            the state of training, as torch.distributed.checkpoint (DCP) writes it
trainer_state.json  the place in the run
checksums.json      the SHA-256 of every other file

A kill at any moment, even during a save, leaves the last complete checkpoint intact. Resuming
detects files that a disk has damaged since. Resuming runs no code from a checkpoint: see
read_metadata.
"""

import errno
import json
import pickle
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from runtime import files, float16, lora, processes
from runtime.folders import POSITION, all_of, complete, run_of, step_of, to_resume

CHECKSUMS = "checksums.json"
VERSIONS = "versions"
INDEX = "trainer/.metadata"  # DCP's list of tensors and their places


# ------------------------------------------------------------------------------------------- saving


def save(policy, optimizer, tokenizer, step, num_used, args, critic=None):
    """Write checkpoints/step_STEP and delete all but the newest args.keep_checkpoints.

    The model is written in args.dtype with LoRA's adapters merged, the training state in float32.
    step: steps done; num_used: training problems used; critic: as in trainer_state. If the policy
    has versions (grpo_stale.py), all but the last are written: the last one is the policy itself.
    All processes must call it. If the disk is full, the last checkpoint stays as it was.
    """
    path = Path(args.run_dir, "checkpoints", f"step_{step:06d}")
    unfinished = path.with_suffix(".tmp")
    if processes.RANK == 0:
        make_way(path, unfinished)
    processes.barrier()
    dcp.save(
        trainer_state(policy, optimizer, critic),
        checkpoint_id=unfinished / "trainer",
        no_dist=processes.WORLD_SIZE == 1,
    )
    weights = whole(lora.merged_weights(policy.lm), getattr(torch, args.dtype))
    adapter = whole(lora.peft_weights(policy.lm), torch.float32)
    names = []
    if processes.RANK == 0:
        read_metadata(unfinished / "trainer")  # raise now whatever resuming would refuse
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
        position = {"step": step, "n_used": num_used}
        (unfinished / POSITION).write_text(json.dumps(position))
        names = files_in(unfinished)
    sums = checksums(unfinished, processes.broadcast(names))
    if processes.RANK == 0:
        for name, checksum in sums.items():
            if checksum is None:
                raise OSError(errno.EIO, f"{name} can't be read again")
        (unfinished / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n")
        files.sync_all(unfinished)
        # Rename it only when all of it is on the disk, so that a folder with this name is never
        # half written. Delete old checkpoints only when the new one is complete.
        files.rename(unfinished, path)
        for old in complete(args.run_dir)[: -args.keep_checkpoints]:
            delete(old)


def export(run_dir, folder):
    """Copy the model of the newest checkpoint, if there is one, to a separate folder."""
    there = complete(run_dir)
    if there and processes.RANK == 0:
        not_the_model = shutil.ignore_patterns("trainer", VERSIONS, POSITION, CHECKSUMS)
        shutil.copytree(there[-1], folder, ignore=not_the_model, dirs_exist_ok=True)


def make_way(path, unfinished):
    """Make the folder that a checkpoint is written to; remove anything in its way."""
    for left_by_a_kill in path.parent.glob("*.tmp"):
        shutil.rmtree(left_by_a_kill)
    if path.exists():  # incomplete: left by a kill
        delete(path)
    unfinished.mkdir(parents=True)


def delete(path):
    """Delete a checkpoint. Rename it first, so that half of one never looks complete."""
    shutil.rmtree(path.rename(path.with_suffix(".tmp")))


def files_in(folder):
    """Return the names of all files in a folder and its subfolders, sorted: ["config.json", …]."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in paths)


def checksums(folder, names):
    """Return {name: SHA-256 in hex, or None if unreadable}. The processes split the work."""
    mine = []
    for name in names[processes.RANK :: processes.WORLD_SIZE]:
        try:
            mine.append((name, files.sha256(folder / name)))
        except OSError:
            mine.append((name, None))
    return dict(processes.gather(mine))


# ------------------------------------------------------------------------------------------ loading


def check(resume):
    """Raise ValueError if --resume's checkpoint is damaged, and name an older one that is not.

    All processes must call it.
    """
    path = to_resume(resume)
    damage = damage_of(path)
    if not damage:
        return
    older = [folder for folder in all_of(run_of(resume)) if step_of(folder) < step_of(path)]
    for folder in reversed(older):
        if not damage_of(folder):
            raise ValueError(
                f"checkpoint {path} is damaged: {damage}; --resume {folder} goes on from an older "
                "one that is not"
            )
    raise ValueError(
        f"checkpoint {path} is damaged: {damage}; there is no older one to go on from, so start "
        "again in another --run_dir"
    )


def damage_of(path):
    """Describe which file of a checkpoint is damaged, and how; "" if none. All must call it."""
    expected, damage = {}, ""
    if processes.RANK == 0:
        try:
            expected = expected_checksums(path)
        except (ValueError, OSError) as error:
            damage = str(error)
    expected, damage = processes.broadcast((expected, damage))
    if damage:
        return damage
    found = checksums(path, list(expected))
    for name, checksum in expected.items():
        if found[name] is None:
            return f"{name} is missing or can't be read"
        if found[name] != checksum:
            return f"{name} is not what was written (its checksum differs)"
    return ""


def expected_checksums(path):
    """Return {name: SHA-256} from checksums.json. ValueError if a small file is damaged."""
    position_in(path)
    read_metadata(path / "trainer")
    expected = files.read_object(path / CHECKSUMS)
    if not {POSITION, INDEX, "model.safetensors"} <= expected.keys():
        raise ValueError(f"{CHECKSUMS} lacks files")
    return expected


def position_in(path):
    """Return (step, num_used) from trainer_state.json. ValueError if it lacks them."""
    position = files.read_object(path / POSITION)
    step, num_used = position.get("step"), position.get("n_used")
    if type(step) is not int or type(num_used) is not int or step != step_of(path) or num_used < 0:
        raise ValueError(f"{POSITION} does not say how far the run was")
    return step, num_used


def load(policy, optimizer, resume, critic=None):
    """Load a checkpoint's weights, AdamW's state and the random state. Return (step, num_used).

    Without resume, for a new run, nothing changes, and it returns (0, 0).

    resume: a run (its newest checkpoint is loaded), or one of its checkpoints. Newer checkpoints
    are deleted, because the run takes another course from here. The number of processes may differ
    from the run that wrote it. critic: as in trainer_state. All must call it.
    """
    if not resume:
        return 0, 0
    path = to_resume(resume)
    state = trainer_state(policy, optimizer, critic)  # DCP loads in place: it fills these tensors
    of_float16 = scalers(policy, optimizer, critic)
    if "scaler" not in read_metadata(path / "trainer").state_dict_metadata:
        of_float16 = {}  # so far the run had another --dtype
        state = {name: value for name, value in state.items() if not name.endswith("scaler")}
    try:
        dcp.load(
            state,
            storage_reader=CheckedReader(path / "trainer"),
            no_dist=processes.WORLD_SIZE == 1,
        )
    except CheckpointException as error:
        errors = [of_process for of_process, _ in error.failures.values()]
        reason = " ".join(str(errors[0]).split())
        sys.exit(f"error: checkpoint {path} is not of this model or of this version: {reason}")
    torch.set_rng_state(state["rng"])
    for name, scaler in of_float16.items():
        scaler.load_state(state[name])
    position = position_in(path)
    if processes.RANK == 0:
        delete_newer(path)
    processes.barrier()
    return position


def load_versions(resume):
    """Return the older weights of policy.versions, oldest first: a list of {name: tensor}, or [].

    resume: as in load. Call it after load.
    """
    if not resume:
        return []
    return [load_file(path) for path in sorted((to_resume(resume) / VERSIONS).glob("*"))]


def delete_newer(path):
    """Delete a run's checkpoints that are newer than this one, and print that."""
    newer = [folder for folder in all_of(run_of(path)) if step_of(folder) > step_of(path)]
    if newer:
        names = ", ".join(folder.name for folder in newer)
        print(f"going on from {path}: {names} and all rows of later steps are dropped")
    for folder in reversed(newer):  # newest first: a kill in between leaves the older ones
        delete(folder)


# All names in DCP's index of our own state. They only hold values.
IN_AN_INDEX = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "uint8"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}


class IndexUnpickler(pickle.Unpickler):
    """Read a pickle that names nothing outside IN_AN_INDEX."""

    def find_class(self, module, name):
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 calls it
        if (module, name) not in IN_AN_INDEX:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(path):
    """Return DCP's index in a checkpoint's folder trainer/. ValueError if it is not from our save.

    The index is a pickle, and loading a pickle can call any function. So it is refused if it names
    anything unexpected, leads out of the folder, or holds anything besides tensors, which DCP would
    unpickle without restriction.
    """
    try:
        with open(path / ".metadata", "rb") as file:
            metadata = IndexUnpickler(file).load()
    except OSError as error:
        raise ValueError(f"{INDEX} can't be read: {error.strerror}") from error
    except Exception as error:  # damaged pickles raise many kinds of errors
        raise ValueError(f"{INDEX} is not one of our own: {error}") from error
    try:
        entries = list(metadata.state_dict_metadata.values())
        places = list(metadata.storage_data.values())
        names = {place.relative_path for place in places}
        is_ours = (
            type(metadata) is Metadata
            and all(type(entry) is TensorStorageMetadata for entry in entries)
            and all(Path(name).name == name for name in names)
            and all(type(place.offset) is type(place.length) is int for place in places)
            and not any(place.transform_descriptors for place in places)
        )
    except (AttributeError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError(f"{INDEX} is not one of our own: it holds other things than tensors")
    return metadata


class CheckedReader(dcp.FileSystemReader):
    """DCP's reader with read_metadata in place of a plain pickle.load."""

    def read_metadata(self, *args, **kwargs):
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


# ------------------------------------------------------------------------------- what is in a state


def trainer_state(policy, optimizer, critic=None):
    """Return {parameter name: {weight, exp_avg, exp_avg_sq, step}} and torch's random state, "rng".

    Covers the trained parameters. The tensors are the policy's and the optimizer's own, not copies.
    With --dtype float16 it has the state of each optimizer's float16.Scaler, too. critic: a pair,
    another trained model and its optimizer (ppo.py); its names begin with "critic.".
    """
    state = {"rng": torch.get_rng_state()}
    for name, scaler in scalers(policy, optimizer, critic).items():
        state[name] = scaler.state()
    trained = {"": (policy, optimizer)}
    if critic:
        trained["critic."] = critic
    for prefix, (model, its_optimizer) in trained.items():
        for name, parameter in model.lm.named_parameters():
            if parameter.requires_grad:
                of_optimizer = of_adamw(parameter, its_optimizer)
                state[prefix + name] = {**of_optimizer, "weight": parameter.detach()}
    return state


def scalers(policy, optimizer, critic=None):
    """Return {name in a checkpoint: float16.Scaler} of the optimizers; {} in other dtypes."""
    if policy.lm.config.dtype != "float16":  # placement.place has set it to args.dtype
        return {}
    found = {"scaler": float16.scaler(optimizer, policy.args)}
    if critic:
        found["critic.scaler"] = float16.scaler(critic[1], policy.args)
    return found


def of_adamw(parameter, optimizer):
    """Return AdamW's exp_avg, exp_avg_sq and step of a parameter; zeros before its first update."""
    if not optimizer.state[parameter]:
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=processes.DEVICE),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer.state[parameter]


def whole(named_weights, dtype):
    """Return {name: weight on the CPU} in process 0, {} in the others. All must call it."""
    weights = {}
    for name, weight in named_weights:
        # one at a time, so that a GPU never holds the whole model
        weight = processes.full_tensor(weight)
        if processes.RANK == 0:
            weights[name] = weight.to(dtype if weight.is_floating_point() else None).cpu()
    return weights
