"""Checkpoints: a run that is resumed from one goes on as if it had never stopped, to the last bit.

RUN/checkpoints/step_000020 is a Hugging Face folder: any program that reads models reads it. Beside
the model it holds `trainer/`, the state of training, and `trainer_state.json`, the place in the
run. A kill at any moment, also in the middle of a save, leaves the last complete checkpoint as it
was.
"""

import json
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from runtime import processes


def complete(run_dir):
    """The folders of a run's complete checkpoints, oldest first."""
    last_files = Path(run_dir).glob("checkpoints/step_??????/trainer_state.json")
    return sorted(path.parent for path in last_files)


def save(policy, optimizer, tokenizer, step, n_used, args):
    """Writes checkpoints/step_STEP and deletes all but the newest args.keep_checkpoints.

    The model is written in args.dtype, which is the sampler's, the state of training in float32.
    step: steps done; n_used: training problems used, which is the place in the data.
    All processes must call it.
    """
    path = Path(args.run_dir, "checkpoints", f"step_{step:06d}")
    unfinished = path.with_suffix(".tmp")
    if processes.RANK == 0:
        for left_by_a_kill in path.parent.glob("*.tmp"):
            shutil.rmtree(left_by_a_kill)
        unfinished.mkdir(parents=True)
    processes.barrier()  # the others need the folder

    dcp.save(
        trainer_state(policy, optimizer),
        checkpoint_id=unfinished / "trainer",
        no_dist=processes.WORLD_SIZE == 1,
    )
    weights = whole_weights(policy, getattr(torch, args.dtype))
    if processes.RANK == 0:
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        policy.lm.config.save_pretrained(unfinished)
        policy.lm.generation_config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        position = {"step": step, "n_used": n_used}
        (unfinished / "trainer_state.json").write_text(json.dumps(position))
        # Only now does it get its name. Renaming happens at once or not at all, so that a folder
        # with this name is never half written; and old checkpoints go only when the new one is
        # there.
        unfinished.rename(path)
        for old in complete(args.run_dir)[: -args.keep_checkpoints]:
            # renamed first, so that a folder that is half deleted is not taken for a complete one
            shutil.rmtree(old.rename(old.with_suffix(".tmp")))
    processes.barrier()  # no process goes on before the checkpoint is there


def load(policy, optimizer, path):
    """Puts a checkpoint's weights, AdamW's state and random state in place. Returns (step, n_used).

    On any number of processes, whatever their number when it was written. All must call it.
    """
    # DCP loads in place: it fills tensors that exist. AdamW makes its own in its first step, which
    # has not happened yet, so they are made here.
    for parameter in policy.lm.parameters():
        optimizer.state[parameter] = {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "step": torch.zeros((), device=processes.DEVICE),
        }
    state = trainer_state(policy, optimizer)
    dcp.load(state, checkpoint_id=path / "trainer", no_dist=processes.WORLD_SIZE == 1)
    torch.set_rng_state(state["rng"])
    position = json.loads((path / "trainer_state.json").read_text())
    return position["step"], position["n_used"]


def trainer_state(policy, optimizer):
    """{parameter name: {weight, exp_avg, exp_avg_sq, step}} and torch's random state, "rng".

    The tensors are the policy's and the optimizer's own, not copies. By name and not by number, so
    that a state that was written in shards can be read whole. Sampling has a seed for each request,
    and the order of the problems one for each epoch; torch's state is kept for what an algorithm
    draws.
    """
    state = {}
    for name, parameter in policy.lm.named_parameters():
        state[name] = dict(optimizer.state[parameter])
        state[name]["weight"] = parameter.detach()
    state["rng"] = torch.get_rng_state()
    return state


def whole_weights(policy, dtype):
    """{name: weight on the CPU} in process 0, {} in the others. All must call it."""
    weights = {}
    for name, parameter in policy.lm.named_parameters():
        # one at a time, so that a GPU never holds the whole model
        weight = processes.full_tensor(parameter)
        if processes.RANK == 0:
            weights[name] = weight.to(dtype).cpu()
    return weights
