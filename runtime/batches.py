"""Plan a step: its problems, the rows of each forward pass, and the work of each process.

This affects speed and memory; results change at most by rounding. The terms, from large to small:

batch         the responses of one step
mini-batch    the responses of one optimizer update
micro-batch   the responses of one forward pass; their gradients are added up

A group is the G responses to one prompt. Which groups an update uses does not depend on the number
of processes.
"""

import random

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from runtime.distributed import DEVICE, ON_GPU, RANK, WORLD_SIZE, all_reduce, gather
from runtime.terminal import progress

# Fixed cost of a forward pass, in tokens computed in the same time: 60 to 220, measured with
# kk_tiny and SmolLM2-135M on one core.
PASS_COST = 150

# ------------------------------------------------------------------------------------------ batches


def swaps_rows(args):
    """Return whether processes swap rows before an update (batches.balance)."""
    return WORLD_SIZE > 1 and not prompts_can_be_shared(args)


def idle_tokens(batch: dict[str, Tensor], args):
    """Return a batch whose mask has the tokens that an update of this process's rows skips.

    These are the tokens that without_idle drops; if processes swap rows, they are all tokens.
    """
    if swaps_rows(args):
        return batch
    return {**batch, "mask": batch["mask"] & (batch["advantages"] == 0)}


def micro_batches(batch: dict[str, Tensor], args, title: str = ""):
    """Cut a batch into micro-batches, with a progress bar of this title.

    Yields (row numbers, the rows' part of the batch on DEVICE). Each tensor is cut to the longest
    of these rows, counted up to the row's last token in the mask. Each row with a token in the mask
    comes exactly once, longest first.
    """
    lengths = used_lengths(batch["mask"])  # [N]
    passes = plan_passes(batch["ids"], batch["mask"], lengths, args)
    # Under FSDP2 all processes must run equally many passes, forward and backward. A process with
    # too few repeats its last pass with an empty mask, so that its loss is zero.
    num_passes = int(all_reduce(len(passes), dist.ReduceOp.MAX))
    for i in progress(range(num_passes), title):
        rows = passes[min(i, len(passes) - 1)]
        # At least 2: the shortest row has a token and the one before it. The mask may be empty.
        longest = max(2, int(lengths[rows].max()))
        micro = {name: value[rows, :longest] for name, value in batch.items()}
        if i >= len(passes):
            micro["mask"] = torch.zeros_like(micro["mask"])
        shared = shared_prompt_length(micro["ids"], micro["mask"])
        micro = {name: to_device(value) for name, value in micro.items()}
        micro["ids"].shared_prompt_length = shared  # so that the GPU is never asked for it
        yield rows, micro


def without_idle(batch: dict[str, Tensor], args):
    """Return the batch, its mask [N, T] without the tokens that have no gradient.

    If the loss has no KL term, these are the tokens whose advantage is 0. A batch without
    advantages (sft.py) stays as it is.
    """
    if "advantages" in batch and args.kl_coef == 0:
        return {**batch, "mask": batch["mask"] & (batch["advantages"] != 0)}
    return batch


def to_device(value):
    """Return the tensor on DEVICE. Pinned memory lets the CPU go on during the copy."""
    if ON_GPU:
        value = value.pin_memory()
    return value.to(DEVICE, non_blocking=True)


def used_lengths(mask: Tensor):
    """Return the tokens that a pass needs of each row, [N]: up to its last True in mask [N, T]."""
    positions = torch.arange(1, mask.shape[1] + 1)
    return (mask * positions).amax(1)  # 0 if there is none


def plan_passes(ids, mask, lengths, args):
    """Plan which rows go through the policy together: a list of row numbers per pass.

    A pass has at most micro_batch_tokens tokens, padding included, or a single row that is longer.
    Longest rows come first, so that rows of similar length share a pass. Rows without a token in
    the mask are skipped, but there is always one pass.
    """
    rows = lengths.argsort(descending=True, stable=True)
    num_used = int((lengths > 0).sum())
    rows = rows[: max(1, num_used)]
    passes = []
    cost = 0  # in tokens
    left = rows
    while len(left):
        longest = max(1, int(lengths[left[0]]))
        num_rows = max(1, args.micro_batch_tokens // longest)
        passes.append(left[:num_rows])
        cost += PASS_COST + len(passes[-1]) * longest
        left = left[num_rows:]
    if prompts_can_be_shared(args):
        sharing_passes, sharing_cost = plan_passes_sharing_prompts(rows, ids, mask, lengths, args)
        if all_reduce(sharing_cost - cost) < 0:  # over all processes
            return sharing_passes
    return passes


# ----------------------------------------------------------------------------------- shared prompts


def prompts_can_be_shared(args) -> bool:
    """Return whether the prompt of a group may be computed once.

    Under gradient checkpointing transformers keeps no keys and values. Compiled layers would have
    to be compiled again for them. Recurrent layers overwrite their state.
    """
    return not (args.gradient_checkpointing or args.compile or args.recurrent)


def plan_passes_sharing_prompts(rows, ids: Tensor, mask: Tensor, lengths, args) -> tuple:
    """Return (passes, their cost in tokens), where each pass computes its prompt once."""
    group = groups_with_one_prompt(ids, mask, args)  # [N]
    rows = rows[group[rows].argsort(stable=True)]  # prompt by prompt, longest first in each
    passes = []
    cost = 0
    while len(rows):
        first = rows[0]
        left = rows[group[rows] == group[first]]  # rows with this prompt
        shared = shared_prompt_length(ids[left], mask[left])  # tokens that are computed once
        own = max(1, int(lengths[first]) - shared)  # tokens computed per row
        num_rows = max(1, (args.micro_batch_tokens - shared) // own)
        num_rows = min(num_rows, len(left))
        passes.append(rows[:num_rows])
        cost += 2 * PASS_COST + shared + num_rows * own
        rows = rows[num_rows:]
    return passes, cost


def groups_with_one_prompt(ids: Tensor, mask: Tensor, args) -> Tensor:
    """Return a number per row, [N], that is equal for rows with the same prompt: its group's.

    Several groups may have one prompt: in a game, the prompt does not show the hidden number. They
    get the number of the first of them.
    """
    size = args.responses_per_prompt
    groups = torch.arange(len(ids)) // size  # [N]
    first_with = {}  # the prompt's tokens: the first group that has it
    for i in range(0, len(ids), size):
        shared = shared_prompt_length(ids[i : i + size], mask[i : i + size])
        if shared:
            prompt = tuple(ids[i, :shared].tolist())
            groups[i : i + size] = first_with.setdefault(prompt, i // size)
    return groups


def length_to_share(ids: Tensor, mask: Tensor, args):
    """Return the length of the prefix to compute once, or 0 if sharing does not pay.

    ids, mask: [N, T]. Under FSDP2 every process must call the model equally often, and sharing
    calls it twice. So all processes share if it pays in one of them, unless one has nothing to
    share.
    """
    if not prompts_can_be_shared(args):
        return 0
    length = getattr(ids, "shared_prompt_length", None)  # micro_batches has counted it on the CPU
    if length is None:
        length = shared_prompt_length(ids, mask)
    saved = length * (len(ids) - 1)  # tokens
    pays = all_reduce(saved, dist.ReduceOp.MAX) > PASS_COST
    possible = all_reduce(length, dist.ReduceOp.MIN) > 0
    return length if pays and possible else 0


def shared_prompt_length(ids: Tensor, mask: Tensor) -> int:
    """Return the length of the rows' common prefix, without response tokens. ids, mask: [N, T].

    The last position is never shared, so that the second pass has at least one token.
    """
    is_shared = (ids == ids[0]).all(0) & ~mask.any(0)  # [T]
    from_the_start = is_shared[:-1].cumprod(0)  # 1 until the first position that is not shared
    return int(from_the_start.sum())


# --------------------------------------------------------------------------- problems and processes


def next_problems(train, num_used: int, args) -> tuple:
    """Return (the problems of this process's next responses, each G times; the new num_used).

    num_used: the number of training problems used by all steps before this one, on all processes.
    """
    indices, num_used = next_prompts(len(train), num_used, args.prompts_per_step, args.seed)
    problems = []
    for i in indices[RANK::WORLD_SIZE]:
        problems += [train[i]] * args.responses_per_prompt
    return problems, num_used


def next_prompts(num_problems, num_used: int, count, seed: int) -> tuple:
    """Return (indices of the next `count` problems, the new num_used).

    num_used: the position over all epochs, in problems. Each epoch has its own order and only
    complete steps.
    """
    epoch, at = divmod(num_used, num_problems)
    if at + count > num_problems:
        epoch, at = epoch + 1, 0
    order = list(range(num_problems))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[at : at + count], epoch * num_problems + at + count


def own_part(problems: list[dict]):
    """Return this process's part of the test problems."""
    return problems[RANK::WORLD_SIZE]


def balance(minibatch: dict[str, Tensor], args):
    """Swap rows between processes, so that none waits long for another in an update.

    minibatch: this process's rows, {name: [N, T]}. Together the processes keep the same rows, so
    the gradient stays the same; their numbers of rows may differ. The rows of all processes are
    sorted by length and cut into forward passes, and the passes are dealt out in turn. Passes that
    run at the same time are then about equally long: under FSDP2, every layer waits for the slowest
    process. Groups that may share the computation of their prompt are not split. All processes must
    call it.
    """
    if not swaps_rows(args):
        return minibatch
    ends = used_lengths(minibatch["mask"])  # [N]
    needed = used_lengths(without_idle(minibatch, args)["mask"])  # [N]
    mine = []
    for i, end in enumerate(ends.tolist()):
        # Clone it: sending a view would send the whole tensor behind it.
        row = {name: value[i, : max(2, end)].clone() for name, value in minibatch.items()}
        mine.append((int(needed[i]), row))
    every = sorted(gather(mine), key=lambda item: item[0], reverse=True)
    planned = plan_passes(None, None, torch.tensor([length for length, _ in every]), args)
    dealt = every[RANK::WORLD_SIZE]
    if len(planned) >= WORLD_SIZE:
        dealt = [every[i] for rows in planned[RANK::WORLD_SIZE] for i in rows]
        num_planned = sum(map(len, planned))
        dealt += every[num_planned:][RANK::WORLD_SIZE]  # rows that need no pass
    balanced = {}
    for name in minibatch:
        balanced[name] = pad_sequence([row[name] for _, row in dealt], batch_first=True)
    return balanced
