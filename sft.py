"""Supervised fine-tuning (SFT): make given responses more probable.

If no response of the model is ever right, reinforcement learning has nothing to make more probable,
and SFT comes first. The data are prompts with responses o_i: worked solutions, or chats whose last
turn is learned. Over all responses o_i of a mini-batch and all their tokens o_it, maximise

    J = 1/Σ_i|o_i| · Σ_i Σ_t log π(o_it)

This is reinforce.py's objective with two changes, and they are the lesson: the responses are given
instead of sampled, and each has the weight A_i = 1. So there is no sampler, no reward and no
advantage; every response counts as good, and the model never sees its own mistakes. −J is the
cross-entropy, so this is maximum likelihood. Prompts are not learned. The end of a response is
learned: the tokenizer's EOS token, even if the chat template ends a turn with another token.

SFT or reinforcement learning? SFT needs somebody who writes the solutions, and teaches the model to
write like them. Reinforcement learning needs a rule and a model that is sometimes right; it makes
the model right more often, in its own ways. A model that is never right needs SFT first.

What differs from reinforce.py: no sampler, and nothing that needs one; to_batch makes tensors of
the given responses; policy_loss has no advantage; evaluate measures the loss, in nats per token, on
held-out examples.

Settings: the learning rate is constant, as in all scripts. SmolLM2's own recipe for its small
models (alignment-handbook) has 1e-3 with a warm-up over a tenth of the steps and a cosine, two
epochs and loss on all tokens; TRL's default is 2e-5. Without a warm-up 1e-3 is too much: on 16
puzzles per step the loss was 1.70, 3.20, 2.69 in the first three steps, and with 3e-4 it was 1.70,
1.59, 1.29. Examples are not packed: rows of similar length share a forward pass.

Command, for worked solutions of Knights & Knaves of which half are careful, and for chats:
    python sft.py --model models/SmolLM2-135M-Instruct --people 2-3 --careful 0.5 --restated \\
        --lr 3e-4 --prompts_per_step 16 --steps 90 --max_prompt_tokens 352 --max_response_tokens 512
    python sft.py --model models/SmolLM2-135M-Instruct --data chats.jsonl
"""

import dataclasses
from typing import Literal

from runtime import flags, settings
from runtime.settings import (
    Dtype,
    Fraction,
    LearningRate,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

# ----------------------------------------------------------------------------------------- settings


@dataclasses.dataclass
class Args(settings.CommonArgs):
    """Settings. The defaults suit worked solutions of Knights & Knaves puzzles.

    A model's folder may have a file trainer_settings.json, whose values replace these defaults. The
    model of runs without a GPU, models/kk_tiny, has one. CommonArgs adds settings that no algorithm
    reads. Types check ranges: Fraction is in [0, 1].
    """

    # ---- objective
    updates_per_step: PositiveInt = 1  # mini-batches per step, each for one optimizer update

    # ---- problems
    task: str = "kk"  # a task with worked solutions, which are learned unless --data has chats
    careful: Fraction = 0.3  # kk: fraction of careful solutions; the others are hasty
    restated: bool = False  # kk: careful solutions repeat a speaker's role before judging a claim
    chat_template: Literal["auto", "none"] = "auto"  # auto: the model's template; none: plain text
    max_prompt_tokens: PositiveInt = 1024  # problems with longer prompts are dropped

    # ---- examples
    prompts_per_step: PositiveInt = 64  # examples per step: a multiple of updates × processes
    max_response_tokens: PositiveInt = 4096  # examples with longer responses are dropped

    # ---- optimizer
    lr: LearningRate = 1e-5  # AdamW's learning rate, constant
    weight_decay: Fraction = 0.01  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # larger gradients are scaled down to this norm
    lora_rank: NonNegativeInt = 0  # LoRA's rank r, e.g. 16 (with lr × 10); 0: train all weights
    lora_alpha: PositiveFloat = 32.0  # LoRA: W becomes W + α/r · P·Q; only P, Q of rank r learn

    # ---- run
    model: str = "Qwen/Qwen2.5-3B-Instruct"  # model to start from: a Hugging Face folder or hub id
    dtype: Dtype = "bfloat16"  # compute dtype; trained weights stay float32
    steps: PositiveInt | None = None  # number of training steps; None: computed from --epochs
    epochs: PositiveInt = 2  # passes over the training examples
    eval_every: PositiveInt = 20  # evaluate every this many steps, at the start and the end
    save_every: PositiveInt = 20  # write a checkpoint every this many steps and at the end
    seed: NonNegativeInt = 0  # seeds the order of the examples

    def check(self):
        """Raise ValueError if two settings do not fit each other. flags.check calls it."""
        if self.data and (self.restated or self.careful != type(self).careful):
            raise ValueError(
                "--careful and --restated are of the task's own solutions: give them without --data"
            )


TASKS = {}  # no task replaces defaults

# Exit here on --help or a bad flag: importing torch takes seconds. main reads the flags again.
flags.check(Args, TASKS)

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rewards import examples
from runtime import batches, checkpoints, distributed, lora, metrics, models, records
from runtime.batches import balance, micro_batches, next_problems, own_part
from runtime.distributed import DEVICE, WORLD_SIZE, all_reduce, full_tensor
from runtime.metrics import Clock
from runtime.models import place, text_only

# ----------------------------------------------------------------------- policy (log-probabilities)


class Policy(nn.Module):
    """A causal language model that returns the log-probabilities of given tokens."""

    def __init__(self, lm, args):
        super().__init__()
        self.lm = lm
        self.args = args

    def forward(self, ids, mask, temperature, with_entropy=False):
        """Compute the log-probability and entropy, in nats, of each response token.

        ids [N, T]: prompt and response, padded on the right. Causal attention needs no attention
        mask here: real tokens do not see the padding after them.
        mask [N, T]: True on response tokens.
        Returns two float32 tensors [N, T], zero outside the mask. The entropy is taken over the
        full vocabulary; without with_entropy it is zero.
        """
        dtype = getattr(torch, self.args.dtype)  # of matrix products, by autocast
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            hidden = self.hidden_states(ids, mask)  # [N, T, D]
            # The state at position t predicts token t + 1, so pair states 0 to T − 2 with the mask
            # of tokens 1 to T − 1. No response token is lost, because the prompt comes first.
            states = hidden[:, :-1][mask[:, 1:]]  # [num_tokens, D]
            targets = ids[mask]  # [num_tokens], in the same order
            # Apply self.head to one chunk of tokens at a time, and recompute its logits in the
            # backward pass (gradient checkpointing): all logits would be the largest tensor here.
            logp, entropy = models.in_chunks(self.head, states, targets, temperature, with_entropy)
        return to_rows(logp, mask), to_rows(entropy, mask)

    def hidden_states(self, ids, mask):
        """Compute the final hidden state of every token, the input of the head: [N, T, D]."""
        # Start from float32 embeddings: each layer adds its output to them, and this sum stays
        # float32, even if weights are not (LoRA). autocast rounds only inputs of matrix products.
        embedded = models.embed(self.lm, ids)  # {"inputs_embeds": [N, T, D] in float32}
        # If all rows begin with one prompt, compute it once: results and gradients are the same.
        # The length is 0 if the rows differ, or if sharing would save no time.
        length = batches.length_to_share(ids, mask, self.args)
        if length > 0:
            return models.with_shared_prompt(self.lm.model, embedded, length)
        return self.lm.model(**embedded, use_cache=False).last_hidden_state

    def head(self, states, targets, temperature, with_entropy):
        """Compute log-probability and entropy: states [n, D], targets [n] → two float32 [n]."""
        logits = models.logits(self.lm, states)  # [n, vocabulary] in float32
        all_log_probs = logits.div_(temperature).log_softmax(-1)  # in place: saves memory
        logp = all_log_probs.gather(-1, targets[:, None])[:, 0]  # of the targets: [n]
        entropy = torch.zeros_like(logp)
        if with_entropy:
            with torch.no_grad():  # a metric only
                entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return logp, entropy


def to_rows(values, mask):
    """Scatter values [num_tokens] to the response tokens of [N, T]; zero elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


def load_policy(args, trained):
    """Load the model: trainable, in float32, or frozen, in --dtype (a reference model)."""
    dtype = torch.float32 if trained else getattr(torch, args.dtype)
    # If the model also reads images, text_only leaves that part out.
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, **text_only(args.model))
    policy = Policy(lm, args)
    policy.requires_grad_(trained)
    if trained and args.lora_rank > 0:
        lora.add_adapters(policy, args)  # trains only these; casts all else to --dtype
    return place(policy, args)  # to its device; sharded if there are several processes


@torch.no_grad()
def log_probs(policy, batch, args, with_entropy=True):
    """Compute log-probability and entropy of a batch's response tokens, without gradient.

    Returns two tensors [N, T] on the CPU, zero outside the mask.
    """
    all_logp = torch.zeros(batch["ids"].shape)
    all_entropy = torch.zeros(batch["ids"].shape)
    # A micro-batch is on the policy's device and has as many rows as fit in one forward pass,
    # padded to the longest of them. Each row comes once, longest first; rows without response
    # tokens are skipped. The last argument is the progress bar's title.
    for rows, micro in micro_batches(batch, args, "log-probabilities"):
        logp, entropy = policy(micro["ids"], micro["mask"], 1.0, with_entropy)
        length = logp.shape[1]
        # Add, don't assign. With sharded weights, all processes must run the same number of passes.
        # A process that finishes early repeats its last pass with an empty mask, which gives zeros.
        all_logp[rows, :length] += logp.cpu()
        all_entropy[rows, :length] += entropy.cpu()
    return all_logp, all_entropy


# ----------------------------------------------------------------------------------------- examples


def to_batch(given):
    """Convert examples to tensors, one row per example.

    given: examples from rewards/examples.py.
    ids [N, T]: prompt and response, padded with zeros on the right.
    mask [N, T]: True on response tokens, the EOS token included.
    """
    longest = max(len(one["prompt_ids"]) + len(one["response_ids"]) for one in given)
    ids = torch.zeros(len(given), longest, dtype=torch.long)
    mask = torch.zeros(len(given), longest, dtype=torch.bool)
    for i, one in enumerate(given):
        begin = len(one["prompt_ids"])
        end = begin + len(one["response_ids"])
        ids[i, :begin] = torch.tensor(one["prompt_ids"])
        ids[i, begin:end] = torch.tensor(one["response_ids"])
        mask[i, begin:end] = True
    return {"ids": ids, "mask": mask}


# --------------------------------------------------------------------------------------------- loss


def policy_loss(logp, batch, divisor):
    """Compute one micro-batch's part of −J.

    logp [N, T] carries the gradient; the batch's mask is [N, T] too. divisor: Σ|o_i| of J, the
    response tokens of the whole mini-batch on all processes, so that the losses of its
    micro-batches add up to −J.
    """
    return -logp[batch["mask"]].sum() / divisor


# ------------------------------------------------------------------------------------------- update


def minibatches(batch, count):
    """Yield `count` equal parts of the batch, in order. No group is split."""
    size = len(batch["ids"]) // count
    for first in range(0, count * size, size):
        yield {name: value[first : first + size] for name, value in batch.items()}


def update(policy, optimizer, batch, step, args):
    """Make all optimizer updates of a step, one per mini-batch.

    Returns metrics: loss and grad_norm (means), optimizer_steps (count).
    """
    losses = []  # one per update
    grad_norms = []
    for minibatch in minibatches(batch, args.updates_per_step):
        divisor = all_reduce(minibatch["mask"].sum())  # response tokens on all processes
        minibatch = balance(minibatch, args)  # swaps rows between processes: equal work
        loss, grad_norm = update_once(policy, optimizer, minibatch, divisor, step, args)
        losses.append(loss)
        grad_norms.append(grad_norm)
    return {
        "loss": metrics.mean(losses),
        **metrics.of_updates(grad_norms, args),  # grad_norm, optimizer_steps, overflows (float16)
    }


def update_once(policy, optimizer, minibatch, divisor, step, args):
    """Make one optimizer update. Returns the loss before it and the gradient norm.

    Gradients are summed over micro-batches, each as many rows as fit in one forward pass, and over
    processes, then clipped to norm max_grad_norm.
    """
    # In float16, multiply the loss, so that small gradients do not become 0. Otherwise do nothing.
    scaler = models.scaler(optimizer, args)  # one for the whole run; it wraps torch's GradScaler
    minibatch_loss = 0.0
    for _, micro in micro_batches(minibatch, args, f"step {step}: updating"):
        logp, _ = policy(micro["ids"], micro["mask"], temperature=1.0)
        loss = policy_loss(logp, micro, divisor)
        # If there are several processes, FSDP2 averages their gradients: × WORLD_SIZE is the sum.
        scaler.scale(loss * WORLD_SIZE).backward()
        minibatch_loss += loss.detach().double()  # .item() would wait for the GPU
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
    grad_norm = full_tensor(grad_norm).item()  # with FSDP2, each process has a part of it
    # Exit if the loss or the norm is NaN or infinite, while the weights are still good. In float16
    # such a norm is only an overflow: scaler.step skips this update and lowers the loss's scale.
    records.check_finite(minibatch_loss, grad_norm, minibatch, step, args)
    scaler.step(optimizer)  # makes the optimizer's step, and adapts the loss's scale
    optimizer.zero_grad()
    return all_reduce(minibatch_loss), grad_norm


# --------------------------------------------------------------------------------------- evaluation


def evaluate(policy, test, args):
    """Measure the loss on held-out examples, in nats per response token."""
    batch = to_batch(own_part(test))  # this process's part
    logp, _ = log_probs(policy, batch, args, with_entropy=False)
    return {"eval/loss": -metrics.token_mean(logp, batch["mask"])}


# --------------------------------------------------------------------------------------------- main


def main():
    # Read flags, tokenizer and problems, and print the header. Exits here with --dry_run, and on
    # errors that flags.check could not see, such as a missing file. run writes the run's files,
    # train and test are lists of examples.
    args, run, tokenizer, _, train, test = records.begin(Args, TASKS, examples)

    policy = load_policy(args, trained=True)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True
    )
    # Steps done and training problems used so far: 0, 0 unless the run is resumed.
    step, num_used = checkpoints.load(policy, optimizer, args.resume)
    # End the run if policy and transformers compute different models.
    models.compare(policy, train[0], args)
    run.open(step)  # opens its files; from here, Ctrl-C or SIGTERM stops after the step
    if step == 0:
        run.write({"step": 0, **evaluate(policy, test, args)})

    saved = step
    while step < args.steps and not run.interrupted():
        step += 1
        clock = Clock()  # times each phase

        # Update the policy with the next examples.
        # Take this process's examples. Every epoch is shuffled anew; leftover examples that do not
        # fill a step are dropped.
        given, num_used = next_problems(train, num_used, args)
        batch = to_batch(given)
        # For a metric: the share of weights that change in --dtype, which rounds small changes off.
        weights_before = metrics.some_weights(policy, args.dtype)
        updated = update(policy, optimizer, batch, step, args)  # metrics
        clock.lap("train")
        timings = clock.end()  # seconds per phase, peak memory

        # Log, evaluate, save.
        row = {
            "step": step,
            **updated,
            **metrics.of_lengths(batch),  # response_tokens (a mean) and tokens
            "weights_changed": metrics.share_changed(weights_before, policy, args.dtype),
            **timings,
        }
        if step == args.steps or (step % args.eval_every == 0 and not run.interrupted()):
            row.update(evaluate(policy, test, args))
        run.write(row)
        if step % args.save_every == 0:
            # Even if the run is killed here, the last complete checkpoint stays intact.
            checkpoints.save(policy, optimizer, tokenizer, step, num_used, args)
            saved = step

    if saved < step:  # after the last step, or an interruption
        checkpoints.save(policy, optimizer, tokenizer, step, num_used, args)
    run.close(step)  # plots the curves; prints how the run ended and how to resume it
    distributed.end()


if __name__ == "__main__":
    main()
