"""PPO: Proximal Policy Optimization, with a second model that says how good a position is.

From *Proximal Policy Optimization Algorithms* (Schulman et al. 2017, arXiv 1707.06347) and
*High-Dimensional Continuous Control Using Generalized Advantage Estimation* (GAE, Schulman et al.
2015, arXiv 1506.02438). grpo.py takes the mean reward of a group as the baseline of all its tokens.
Here a value model V, the critic, learns what reward is still to come at each position, so tokens of
one response get different advantages, and one response to a prompt would do. Maximise

    J = 1/Σ_i|o_i| · Σ_i Σ_t min[ρ·A, clip(ρ, 1−ε_low, 1+ε_high)·A]

    r_t = −β·k1 + (the reward, on the last token)       k1 = log(π_old/π_ref), as in reinforce_pp.py
    δ_t = r_t + γ·V_{t+1} − V_t                         was the token better than expected?
    Â_t = δ_t + γλ·Â_{t+1}                              GAE: this surprise and those to come
    A   = (Â − μ) / √(σ² + 1e-8)                        over all response tokens of the step

and the critic minimises, over the same mini-batches,

    1/Σ_i|o_i| · Σ_i Σ_t ½·max[(V − R)², (clip(V, V_old−ε_V, V_old+ε_V) − R)²]     R = Â + V_old

with ρ as in grpo.py. V_t is computed from the text before token t, like the token's probability.
After the last token it is 0. λ 1 means Â = (rewards to come) − V: no bias from a wrong V, but the
most noise. λ 0 means Â = δ.

What differs from grpo.py, and what GRPO therefore saves: ValueModel, of the policy's size, with an
optimizer of its own; compute_values, estimate_advantages, value_loss, update_values; the KL term is
in the rewards instead of the loss. The policy's update is grpo.py's. In memory it is another
trained model with AdamW's state; in time, one more forward pass and one more update. Metrics:
value_loss, value_clip_rate, value_grad_norm, explained_variance (1 − variance of R − V_old over
variance of R, before the update: 0 is no better than a constant, 1 is perfect, and nothing is told
if all returns are equal).

Where this file deviates from the papers and from verl's `gae`, and why:
- The critic begins as the model to train with a new linear head that is zero, so V is 0 everywhere
  at first. With γ and λ 1 the first step's advantages are then those of REINFORCE++. verl draws the
  head at random.
- Truncated responses end like others: V is 0 after the last token.
- γ 1 and λ 1 are verl's; so are the critic's learning rate 1e-5, ten times the policy's, and the
  whitening. ε_V is 0.2, PPO's own ε; verl has 0.5.
- The critic is updated before the policy. Both use advantages and returns that were computed
  before, so the order does not matter.
- Each prompt still gets G responses; nothing here compares them.
- A checkpoint's model is the policy. The critic is in its trainer/ folder, for --resume.
- Everything in which grpo.py deviates, except for groups. Where several processes round the
  embedding, they round the value head too.

Command (one 80 GB GPU; `torchrun --nproc-per-node 4 ppo.py` for four):
    python ppo.py
"""

import dataclasses
import hashlib
import math
import os
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rewards import data_sources, decode, load_task, next_prompts
from runtime import (
    checkpoints,
    checks,
    header,
    hub,
    machine,
    memory,
    processes,
    quiet,
    records,
    settings,
    signals,
    weights,
)
from runtime.clock import timed
from runtime.processes import DEVICE, ON_GPU, RANK, WORLD_SIZE, all_reduce, full_tensor, gather
from runtime.settings import (
    EvaluationTemperature,
    GroupSize,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
    Temperature,
)

# ----------------------------------------------------------------------------------------- settings


@dataclasses.dataclass
class Args:
    """The paper's settings for Knights & Knaves (Appendix B). TASKS has those of other tasks.

    A setting's type has its range: a Share is in [0, 1], a PositiveShare in (0, 1].
    """

    # ---- objective
    clip_low: Share = 0.2  # ε_low
    clip_high: NonNegativeFloat = 0.24  # ε_high
    kl_coef: NonNegativeFloat = 0.001  # β, weight of the KL term; 0: no reference model is loaded
    updates_per_step: PositiveInt = 2  # updates per step; 2: near on-policy, 16: off-policy

    # ---- value model
    gamma: Share = 1.0  # γ, discount of rewards for each token that they lie ahead
    gae_lambda: Share = 1.0  # λ of GAE; 1: trust the rewards, 0: trust the value model
    value_lr: PositiveShare = 1e-5  # AdamW's learning rate for the value model, constant
    value_clip: PositiveFloat = 0.2  # ε_V, how far a value may move in a step

    # ---- data
    task: Literal["kk", "math", "countdown", "hitab"] = "kk"  # a module in rewards/
    data: str = ""  # training problems: a file, a folder or a hub id; empty: the task's
    test_data: str = ""  # test problems, given in the same ways
    people: str = "3-7"  # kk: numbers of people in a puzzle, within 2-8: "3-7" or "2,3"
    numbers: str = "3-4"  # countdown: how many numbers in a puzzle, within 3-6: "3-4" or "5"
    chat_template: Literal["auto", "none"] = "auto"  # auto: the tokenizer's; none: plain text
    max_prompt_tokens: PositiveInt = 1024  # longer prompts are left out

    # ---- sampling
    prompts_per_step: PositiveInt = 64  # a multiple of updates_per_step × processes
    responses_per_prompt: GroupSize = 8  # G, the group size
    max_response_tokens: PositiveInt = 4096  # longer responses are cut off
    temperature: Temperature = 0.7  # of sampling, and of every probability in the loss

    # ---- optimiser
    lr: PositiveShare = 1e-6  # AdamW's learning rate, constant
    weight_decay: Share = 0.01  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # gradients are scaled down to this norm

    # ---- machine
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of compute; weights are float32
    micro_batch_tokens: PositiveInt = 16384  # of one forward pass; changes memory, not results
    gradient_checkpointing: bool = True  # recompute in the backward pass: slower, smaller
    compile: bool = True  # let torch.compile fuse the operations of a layer
    kv_cache_gb: PositiveFloat = 16.0  # GiB for the sampler's key-value cache, beside its weights

    # ---- run
    model: str = "Qwen/Qwen2.5-3B-Instruct"  # model to start from: a Hugging Face folder or hub id
    steps: PositiveInt | None = None  # sampling steps; None: as many as --epochs gives
    epochs: PositiveInt = 5  # passes over the training problems
    eval_every: PositiveInt = 20  # evaluate every so many steps, at the start and at the end
    eval_size: PositiveInt = 500  # number of test problems
    eval_temperature: EvaluationTemperature = 0.0  # of evaluation; 0: greedy
    save_every: PositiveInt = 20  # write a checkpoint every so many steps, and after the last
    keep_checkpoints: PositiveInt = 3  # how many of the newest checkpoints stay on disk
    seed: NonNegativeInt = 0  # of the order of prompts and of sampling
    run_dir: str = ""  # where everything is written; empty: runs/SCRIPT_TASK_SEED_TIME
    resume: str = ""  # a run to continue, or one of its checkpoints; its settings are the defaults
    track: bool = False  # also log to Weights & Biases (pip install wandb)
    dry_run: bool = False  # check everything, estimate the memory, load nothing and end


# What the papers set differently for other tasks than K&K.
TASKS = {
    "kk": {},
    "math": {  # AR-Lopti, Section 5.2: a base model, which knows no chat
        "model": "Qwen/Qwen2.5-7B",
        "chat_template": "none",
        "epochs": 1,  # of 57k problems (Open-Reasoner-Zero); with DSR-uniform's 10k use --epochs 5
        "prompts_per_step": 128,
        "temperature": 1.0,
    },
    "countdown": {  # the ACPO paper (arXiv 2606.22570), Section 4.2, and its release's scripts
        "prompts_per_step": 128,
        "responses_per_prompt": 10,
        "max_response_tokens": 3072,
        "temperature": 1.0,
    },
    "hitab": {  # the same, Table 1b: a base model
        "model": "Qwen/Qwen2.5-3B",
        "chat_template": "none",
        "prompts_per_step": 128,
        "responses_per_prompt": 10,
        "max_response_tokens": 3072,
        "temperature": 1.0,
    },
}

# Sizes for a machine without a GPU. They don't belong to the algorithm.
CPU_DEFAULTS = {
    "compile": False,  # lengths differ from pass to pass, and compiling takes minutes
    "eval_size": 20,
    "gradient_checkpointing": False,
    "kv_cache_gb": 0.5,
    "micro_batch_tokens": 2048,
}

# With many GPUs each holds little of the weights and of AdamW's state, and has room for the
# activations of one longest sequence. Recomputing them would be work for nothing.
MANY_GPUS = {"gradient_checkpointing": False, "micro_batch_tokens": 5120}
FROM_GPUS = {"kk": 4, "math": 8, "countdown": 4}  # of 80 GB; mathematics has the larger model

# For models/kk_tiny, a model of a million parameters that learns while you watch: the default
# without a GPU.
KK_TINY = {
    "model": "models/kk_tiny",
    "people": "2-3",
    "prompts_per_step": 12,
    "temperature": 1.0,
    "lr": 1e-4,
    "value_lr": 1e-3,
    "steps": 10,
    "max_prompt_tokens": 256,
    "max_response_tokens": 640,
    "micro_batch_tokens": 8192,
    "kv_cache_gb": 0.25,
    "eval_every": 5,
    "eval_size": 200,
    "eval_temperature": 1.0,
}


def default_settings(argv):
    """Defaults for what the command line leaves open: ({name: default}, {name: where it is from}).

    Later ones override earlier ones:
    1. Args: the paper's settings for K&K.
    2. TASKS: what differs for the task.
    3. CPU_DEFAULTS if there is no GPU, then KK_TINY if that is the model. A resumed run has its own
       settings in place of these.
    """
    given = settings.given(argv)  # what the command line says of --task, --model, --resume …
    resumed = settings.of_resumed_run(argv, Args)
    task = given.get("task", resumed.get("task", Args.task))
    layers = [(f"task {task}", TASKS.get(task, {}))]
    if resumed:
        layers.append(("the resumed run", resumed))
        return settings.layered(layers)
    if not ON_GPU:
        layers.append(("no GPU", CPU_DEFAULTS))
        if not machine.has_fast_bfloat16():
            layers.append(("bfloat16 is slow here", {"dtype": "float32"}))
    elif FROM_GPUS.get(task, 4) <= WORLD_SIZE:
        layers.append((f"{WORLD_SIZE} GPUs", MANY_GPUS))
    is_kk_tiny = not ON_GPU  # without a GPU it is the default model; --model overrides that
    if "model" in given:
        is_kk_tiny = Path(given["model"]).name == "kk_tiny"
    if is_kk_tiny:
        layers.append(("kk_tiny", KK_TINY))
    return settings.layered(layers)


def parse_args(argv):
    """Args from the command line and, for what it leaves open, from default_settings."""
    defaults, _ = default_settings(argv)
    return settings.parse(argv, Args, Args(**defaults), description=__doc__.split("\n\n")[0])


def check_args(args):
    """ValueError, saying what would be right, if a value or a folder does not fit."""
    settings.check_ranges(args)
    checks.check_gpus(args)
    multiple = args.updates_per_step * WORLD_SIZE
    if args.prompts_per_step % multiple:
        raise ValueError(
            f"--prompts_per_step is {args.prompts_per_step}; it must be a multiple of {multiple} "
            f"({args.updates_per_step} updates × {WORLD_SIZE} processes)"
        )
    checks.check_run_folders(args)


def prepare(args):
    """Reads what is small and checks that the rest can work, before anything large loads.

    Returns the tokenizer; the task's module (rewards/) with its training and test problems; a
    dictionary of sizes for the header. Sets args.steps if only --epochs is given. ValueError if
    something can't work.
    """
    hub.ask(args.model, *data_sources(args))
    # HEAD_CHUNK, the tokens per block of logits (below), is for the estimate of the memory.
    tokenizer, sizes = checks.check_model(args, HEAD_CHUNK)
    task, train, test = load_task(args, tokenizer)
    if len(train) < args.prompts_per_step:
        raise ValueError(
            f"--prompts_per_step is {args.prompts_per_step}, "
            f"but there are {len(train)} training problems"
        )
    if args.steps is None:
        args.steps = args.epochs * (len(train) // args.prompts_per_step)
    sizes["training_problems"] = len(train)
    sizes["test_problems"] = len(test)
    return tokenizer, task, train, test, sizes


# ----------------------------------------------------------------------- policy (log-probabilities)

# Tokens whose logits exist at one time: [HEAD_CHUNK, vocabulary] in float32.
HEAD_CHUNK = 4096 if ON_GPU else 1024

# What it costs to begin a forward pass, in tokens that could be computed in the same time: measured
# with kk_tiny on a CPU, and less with larger models. Sharing a prompt makes two passes of one.
PASS_COST = 500


class Policy(nn.Module):
    """A causal language model that gives log-probabilities of the tokens it is shown."""

    def __init__(self, lm, autocast, share_prompt):
        super().__init__()
        self.lm = lm
        self.autocast = autocast  # compute in bfloat16
        self.share_prompt = share_prompt  # see hidden_states_sharing_prompt

    def forward(self, ids, mask, temperature, with_entropy=False):
        """Log-probability and entropy, in nats, of each response token under the policy.

        ids [N, T]: prompt and response, padded on the right. Padding needs no attention mask: under
        causal attention no real token sees what comes after it. mask [N, T]: True on response
        tokens, never on a row's first token. Returns two float32 [N, T], zero outside the mask. The
        entropy is that of the full distribution; it is zero everywhere unless with_entropy asks for
        it.
        """
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.hidden_states(ids, mask)  # [N, T, D]
            # Each response token was drawn from the state of the token before it.
            states = hidden[:, :-1][mask[:, 1:]]  # [num_tokens, D]
            targets = ids[mask]  # [num_tokens]
            chunks = zip(states.split(HEAD_CHUNK), targets.split(HEAD_CHUNK))
            logp_chunks = []
            entropy_chunks = []
            for some_states, some_targets in chunks:
                # The logits are the largest tensor here. They exist for one chunk at a time, and
                # are computed a second time in the backward pass instead of being kept.
                logp, entropy = checkpoint(
                    self.head,
                    some_states,
                    some_targets,
                    temperature,
                    with_entropy,
                    use_reentrant=False,
                )
                logp_chunks.append(logp)
                entropy_chunks.append(entropy)
        return to_rows(logp_chunks, mask), to_rows(entropy_chunks, mask)

    def hidden_states(self, ids, mask):
        """The last layer's output for every token, [N, T, D]."""
        # The embeddings are made float32, and then the residual stream is float32 too: autocast
        # rounds the inputs of matrix products, not the sums between layers. Otherwise a reference
        # with bfloat16 weights would differ from a policy with the same weights.
        embedded = self.lm.get_input_embeddings()(ids).float()  # [N, T, D]
        if self.share_prompt:
            shared_length = shared_prompt_length(ids, mask)
            if shared_length * (len(ids) - 1) > PASS_COST:  # the tokens that sharing saves
                return self.hidden_states_sharing_prompt(embedded, shared_length)
        return self.lm.model(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def head(self, states, targets, temperature, with_entropy):
        """Log-probability and entropy of a chunk: states [n, D], targets [n] → two float32 [n]."""
        logits = self.lm.lm_head(states).float()  # [n, vocabulary]
        all_log_probs = logits.div_(temperature).log_softmax(-1)  # in place: the largest tensor
        logp = all_log_probs.gather(-1, targets[:, None])[:, 0]
        entropy = torch.zeros_like(logp)
        if with_entropy:
            entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return logp, entropy

    def hidden_states_sharing_prompt(self, embedded, shared_length):
        """The same as the plain pass, with the tokens that all rows begin with computed only once.

        A matter of speed alone, to be skipped on first reading. The first row's prompt goes through
        the model; its keys and values are repeated for the N rows, whose remaining tokens see them.
        Gradients flow back through the repeated keys and values into the one prompt.
        """
        num_rows = len(embedded)
        prompt = self.lm.model(inputs_embeds=embedded[:1, :shared_length], use_cache=True)
        cache = prompt.past_key_values
        cache.batch_repeat_interleave(num_rows)
        rest = self.lm.model(inputs_embeds=embedded[:, shared_length:], past_key_values=cache)
        of_prompt = prompt.last_hidden_state.expand(num_rows, -1, -1)
        return torch.cat([of_prompt, rest.last_hidden_state], 1)  # [N, T, D]


class ValueModel(Policy):
    """The critic: the same transformer with one output instead of the vocabulary, zero at first."""

    def __init__(self, lm, autocast, share_prompt):
        super().__init__(lm, autocast, share_prompt)
        lm.lm_head = nn.Linear(lm.config.hidden_size, 1, bias=False)
        nn.init.zeros_(lm.lm_head.weight)

    def forward(self, ids, mask):
        """The value of each response token's position: what reward is to come, before it is drawn.

        ids, mask: [N, T], as in Policy. Returns float32 [N, T], zero outside the mask.
        """
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.hidden_states(ids, mask)  # [N, T, D]
        # The state before the token, as for its probability. In float32: values are compared.
        states = hidden[:, :-1][mask[:, 1:]].float()  # [num_tokens, D]
        values = states @ self.lm.lm_head.weight[0].float()  # [num_tokens]
        return to_rows([values], mask)


def to_rows(chunks, mask):
    """Puts response tokens' values, a list of [n], in their places: [N, T], zero elsewhere."""
    rows = torch.zeros(mask.shape, device=mask.device)
    return rows.masked_scatter(mask, torch.cat(chunks))


def shared_prompt_length(ids, mask):
    """The length of the rows' common beginning, without response tokens. ids, mask: [N, T].

    To be skipped on first reading. The last position is never shared, so that the second pass of
    hidden_states_sharing_prompt has at least one token.
    """
    is_shared = (ids == ids[0]).all(0) & ~mask.any(0)  # [T]
    from_the_start = is_shared[:-1].cumprod(0)  # 1 until the first position that is not shared
    return int(from_the_start.sum())


def load_policy(args, trained, kind=Policy):
    """The model to train (float32 weights) or the frozen reference (weights in --dtype).

    kind: ValueModel for the critic, which begins with the same weights.
    """
    dtype = torch.float32 if trained else getattr(torch, args.dtype)
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, trust_remote_code=False)
    lm.config.dtype = args.dtype  # changes no weight: it says how checkpoints will save them
    if trained and args.gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()  # else transformers recomputes nothing; these models have no dropout
    autocast = args.dtype == "bfloat16"
    policy = kind(lm, autocast, share_prompt=prompts_can_be_shared(args))
    policy.requires_grad_(trained)
    if args.compile:
        for layer in lm.model.layers:
            layer.compile(dynamic=True)  # one program for all lengths
    if WORLD_SIZE > 1:  # FSDP2: a process keeps a shard of every layer and gathers it to compute
        sharding = {
            "mesh": processes.mesh(),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=getattr(torch, args.dtype),  # gathered in this type: half the traffic
                reduce_dtype=torch.float32,  # gradients are summed over the processes in this one
                cast_forward_inputs=False,  # the residual stream stays float32
            ),
        }
        for layer in lm.model.layers:
            fully_shard(layer, **sharding)
        # FSDP2 would keep the root's weights (embedding and head) gathered after the forward pass.
        fully_shard(policy, reshard_after_forward=True, **sharding)
    return policy.to(DEVICE)  # after sharding: a process moves its own shards only


def micro_batches(batch, args):
    """Cuts a batch into micro-batches, each for one forward pass.

    Yields (row numbers, the rows' part of the batch on DEVICE). Each tensor is cut to the longest
    of these rows, counted up to the row's last token in the mask.
    """
    lengths = used_lengths(batch["mask"])  # [N]
    passes = plan_passes(batch["mask"], lengths, args)
    # Under FSDP2 every process must make the same number of passes, forward and backward. A process
    # that has too few makes its last pass again, with an empty mask, so that its loss is zero.
    num_passes = int(all_reduce(len(passes), dist.ReduceOp.MAX))
    for i in range(num_passes):
        rows = passes[min(i, len(passes) - 1)]
        # 2 is the shortest row that has a token and the one before it; the mask may be empty.
        longest = max(2, int(lengths[rows].max()))
        micro = {}
        for name, value in batch.items():
            if value.dim() == 2:  # [N, T]; others, such as batch["truncated"], are [N]
                micro[name] = value[rows, :longest].to(DEVICE)
        if i >= len(passes):
            micro["mask"] = torch.zeros_like(micro["mask"])
        yield rows, micro


def used_lengths(mask):
    """How many tokens of each row a pass needs, [N]: up to its last True in the mask [N, T]."""
    positions = torch.arange(1, mask.shape[1] + 1)
    return (mask * positions).amax(1)  # 0 if there is none


def plan_passes(mask, lengths, args):
    """Which rows go through the policy together: a list of row numbers for each pass.

    A pass has at most micro_batch_tokens tokens, padding included, or a single row that is longer.
    Longest rows come first, so that rows of similar length share a pass. Rows without a token in
    the mask are left out (update_once takes out tokens without a gradient), but there is always
    one pass.
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
    if prompts_can_be_shared(args):  # to be skipped on first reading
        sharing_passes, sharing_cost = plan_passes_sharing_prompts(rows, mask, lengths, args)
        if sharing_cost < cost:
            return sharing_passes
    return passes


def prompts_can_be_shared(args):
    """Whether hidden_states_sharing_prompt may be used.

    transformers keeps no keys and values under gradient checkpointing; and compiled layers would be
    compiled again for each layer's keys and values.
    """
    return not (args.gradient_checkpointing or args.compile)


def plan_passes_sharing_prompts(rows, mask, lengths, args):
    """The same for passes that compute a prompt once: each has rows of one group only.

    Returns (passes, their cost in tokens). To be skipped on first reading, like
    hidden_states_sharing_prompt.
    """
    group = torch.arange(len(lengths)) // args.responses_per_prompt  # [N]
    rows = rows[group[rows].argsort(stable=True)]  # group by group, longest first in each
    passes = []
    cost = 0
    while len(rows):
        first = rows[0]
        shared = int(mask[first].int().argmax())  # tokens before the mask's first: computed once
        own = max(1, int(lengths[first]) - shared)  # tokens computed for each row
        num_rows = max(1, (args.micro_batch_tokens - shared) // own)
        num_left = int((group[rows] == group[first]).sum())
        num_rows = min(num_rows, num_left)
        passes.append(rows[:num_rows])
        cost += 2 * PASS_COST + shared + num_rows * own
        rows = rows[num_rows:]
    return passes, cost


@torch.no_grad()
def log_probs(policy, batch, args, with_entropy=True):
    """Log-probability and entropy of a batch's response tokens, without gradient.

    Two [N, T] on the CPU, zero outside the mask.
    """
    all_logp = torch.zeros(batch["ids"].shape)
    all_entropy = torch.zeros(batch["ids"].shape)
    passes = micro_batches(batch, args)
    for rows, micro in tqdm(passes, desc="log-probabilities", leave=False, disable=RANK != 0):
        logp, entropy = policy(micro["ids"], micro["mask"], args.temperature, with_entropy)
        length = logp.shape[1]
        all_logp[rows, :length] += logp.cpu()  # added, since a repeated pass gives zeros
        all_entropy[rows, :length] += entropy.cpu()
    return all_logp, all_entropy


@torch.no_grad()
def compute_values(value_model, batch, args):
    """Values of a batch's response tokens, without gradient: [N, T] on the CPU, zero elsewhere."""
    all_values = torch.zeros(batch["ids"].shape)
    for rows, micro in micro_batches(batch, args):
        values = value_model(micro["ids"], micro["mask"])
        all_values[rows, : values.shape[1]] += values.cpu()  # a repeated pass gives zeros
    return all_values


# ------------------------------------------------------------------------------------------ sampler


def load_sampler(args):
    """A vLLM engine in this process (one in each), made before the trainer takes its memory."""
    cores = processes.own_cores()
    # In this process, so that weights can be handed over.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM  # reads the environment and takes seconds, so it comes after every check

    context = args.max_prompt_tokens + args.max_response_tokens
    options = {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": context,
        "seed": args.seed,
        "kv_cache_memory_bytes": int(args.kv_cache_gb * 2**30),
        "logprobs_mode": "processed_logprobs",  # log-probabilities at the sampling temperature
        "generation_config": "vllm",  # no top-p, top-k or temperature of the model's own
        "use_tqdm_on_load": False,
        "trust_remote_code": False,
    }
    if ON_GPU:
        options["enable_sleep_mode"] = True
        # vLLM checks that this share of the memory is free. The cache's size is set above.
        options["gpu_memory_utilization"] = 0.1
    else:
        options["enforce_eager"] = True
        options["enable_chunked_prefill"] = False  # seeded requests fail in it on a CPU
        options["max_num_batched_tokens"] = context
        if not args.compile:
            # Else vLLM compiles a function of its own at the first request: seconds for no gain.
            torch.compiler.set_stance("force_eager")
    if WORLD_SIZE > 1:
        # torchrun has started the processes; each has an engine of its own.
        options["distributed_executor_backend"] = "external_launcher"
    with quiet.library_notices():
        return LLM(**options)


def request_seed(seed, when, prompt_id):
    """A seed for one prompt at one time, the same on any number of processes.

    when: the step, or "test" for all evaluations. vLLM adds j to it for response j of a group.
    """
    digest = hashlib.sha256(f"{seed}/{when}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:6])  # 48 bits, so that what vLLM adds never overflows


def end_token_ids(policy):
    """The tokens that end a response. Some models have several, and vLLM would know only one."""
    end = policy.lm.generation_config.eos_token_id
    if end is None:
        return []
    if isinstance(end, int):
        return [end]
    return end


def generate(llm, problems, params, title):
    """vLLM's outputs for the problems, with a progress bar, from an empty prefix cache.

    The cache is emptied because it may hold keys and values of older weights, and so that a request
    always gives the same result: what an evaluation leaves in the cache would change the rounding.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept its prefix cache: it may hold keys and values of old weights")

    def progress_bar(*items, **options):  # vLLM calls it instead of tqdm
        options["desc"] = title
        options["leave"] = False
        return tqdm(*items, **options)

    prompts = [{"prompt_token_ids": problem["prompt_ids"]} for problem in problems]
    return llm.generate(prompts, params, use_tqdm=progress_bar if RANK == 0 else False)


def sample(llm, problems, stop_ids, step, args):
    """G responses to each problem: a batch of N = problems × G rows, and the responses' texts."""
    from vllm import SamplingParams

    params = []
    for problem in problems:
        params.append(
            SamplingParams(
                n=args.responses_per_prompt,
                seed=request_seed(args.seed, step, problem["id"]),
                temperature=args.temperature,
                max_tokens=args.max_response_tokens,
                stop_token_ids=stop_ids,
                logprobs=0,  # of the sampled token alone
                flat_logprobs=True,  # plain lists of numbers, quickly made
                detokenize=False,  # decode does it for all responses together
            )
        )
    outputs = generate(llm, problems, params, f"step {step}: sampling")
    prompts, responses = [], []
    for problem, output in zip(problems, outputs):
        for response in output.outputs:
            prompts.append(problem["prompt_ids"])
            responses.append(response)
    return to_batch(prompts, responses), decode(llm.get_tokenizer(), responses)


def to_batch(prompts, responses):
    """Prompts (lists of token ids) and vLLM's responses to them as tensors.

    ids [N, T]: prompt and response, padded with zeros on the right. mask [N, T]: True on response
    tokens, the end token included. sampler_logp [N, T]: the sampler's own log-probabilities.
    truncated [N]: cut off by length.
    """
    num_rows = len(prompts)
    rows = list(zip(prompts, responses))
    longest = max(len(prompt) + len(response.token_ids) for prompt, response in rows)
    ids = torch.zeros(num_rows, longest, dtype=torch.long)
    mask = torch.zeros(num_rows, longest, dtype=torch.bool)
    sampler_logp = torch.zeros(num_rows, longest)
    for i, (prompt, response) in enumerate(rows):
        start = len(prompt)
        end = start + len(response.token_ids)
        ids[i, :start] = torch.tensor(prompt)
        ids[i, start:end] = torch.tensor(response.token_ids)
        mask[i, start:end] = True
        # logprobs=0 and flat_logprobs: a number for each token, that of the sampled one.
        sampler_logp[i, start:end] = torch.tensor(response.logprobs.logprobs)
    truncated = torch.tensor([response.finish_reason == "length" for response in responses])
    return {"ids": ids, "mask": mask, "sampler_logp": sampler_logp, "truncated": truncated}


def sync_weights(policy, llm, args):
    """Gives the trainer's weights to the sampler, tensor by tensor, in its dtype.

    On a GPU this also wakes the sampler, which sleeps while the trainer works (main puts it to
    sleep): first it takes memory for its weights again, then for its cache.
    """

    def named_weights():
        # All processes go through the names in the same order, as full_tensor needs.
        # remove_duplicate=False: if embedding and head are one tensor it comes under both names,
        # because vLLM's CPU engine keeps two copies.
        for name, weight in policy.lm.named_parameters(remove_duplicate=False):
            yield name, full_tensor(weight).to(getattr(torch, args.dtype))

    if ON_GPU:
        torch.cuda.empty_cache()
        llm.wake_up(tags=["weights"])  # nothing to do the first time: it is awake
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights()})
    if ON_GPU:
        llm.wake_up(tags=["kv_cache"])


# --------------------------------------------------------------------------------------- advantages


def estimate_advantages(rewards, batch, args):
    """Â of every response token by GAE, [N, T] in float64, zero elsewhere.

    rewards [N]; the batch's old_logp, ref_logp, values and mask are [N, T].
    """
    mask = batch["mask"]
    values = batch["values"].double()
    k1 = (batch["old_logp"].double() - batch["ref_logp"]) * mask  # [N, T], in nats
    token_rewards = -args.kl_coef * k1
    last = used_lengths(mask) - 1  # [N], the place of each response's last token
    token_rewards[torch.arange(len(mask)), last] += rewards.double()
    advantages = torch.zeros_like(values)
    advantage = torch.zeros(len(mask), dtype=torch.float64)  # of the token after this one
    next_value = torch.zeros(len(mask), dtype=torch.float64)
    for t in reversed(range(mask.shape[1])):
        surprise = token_rewards[:, t] + args.gamma * next_value - values[:, t]  # δ, [N]
        advantage = (surprise + args.gamma * args.gae_lambda * advantage) * mask[:, t]
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages


def compute_advantages(rewards, batch, args):
    """Advantage of every response token, [N, T]: GAE's, whitened over the step's tokens.

    rewards [N]; batch as in estimate_advantages. The tokens of all processes count; the variance
    divides by their number less one.
    """
    mask = batch["mask"]
    advantages = estimate_advantages(rewards, batch, args)
    num_tokens = all_reduce(mask.sum())
    mean = all_reduce(advantages.sum()) / num_tokens
    variance = all_reduce((advantages - mean)[mask].square().sum()) / max(1, num_tokens - 1)
    whitened = (advantages - mean) / math.sqrt(variance + 1e-8)
    return (whitened * mask).to(rewards.dtype)  # [N, T]


# --------------------------------------------------------------------------------------------- loss


def policy_loss(logp, batch, num_tokens, args):
    """The negative of J for one micro-batch, and how many of its tokens are clipped.

    logp [N, T] carries the gradient; the batch's old_logp, advantages and mask are [N, T] too.
    num_tokens: response tokens of the whole mini-batch, over all micro-batches and processes,
    so that the losses of the micro-batches add up to the mini-batch's.
    """
    advantages = batch["advantages"]
    mask = batch["mask"]
    low = 1 - args.clip_low
    high = 1 + args.clip_high
    ratio = (logp - batch["old_logp"]).clamp(-20, 20).exp()  # ρ
    surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    # A clipped token's surrogate has no gradient: it has moved far enough in A's direction.
    too_high = (advantages > 0) & (ratio > high)
    too_low = (advantages < 0) & (ratio < low)
    clipped = (too_high | too_low) & mask
    loss = -surrogate  # [N, T]
    return loss[mask].sum() / num_tokens, clipped.sum()


def value_loss(values, batch, num_tokens, args):
    """The value model's loss for one micro-batch, and how many of its tokens are clipped.

    values [N, T] carries the gradient; the batch's values, returns and mask are [N, T] too. Its
    values are V_old. num_tokens: as in policy_loss. A clipped value has no gradient: it has moved
    far enough from V_old.
    """
    mask = batch["mask"]
    moved = values - batch["values"]
    allowed = moved.clamp(-args.value_clip, args.value_clip)
    error = (values - batch["returns"]).square()
    error_if_clipped = (batch["values"] + allowed - batch["returns"]).square()
    # Where nothing is clamped the two errors are the same, except for rounding.
    clipped = (allowed != moved) & (error_if_clipped > error) & mask
    loss = 0.5 * torch.max(error, error_if_clipped)  # [N, T]
    return loss[mask].sum() / num_tokens, clipped.sum()


def k3(logp, ref_logp):
    """exp(ref − logp) − (ref − logp) − 1 for each token, in nats (Schulman 2020)."""
    difference = (ref_logp - logp).clamp(-20, 20)  # as for ρ: one absurd token must not overflow
    return difference.exp() - difference - 1


# ------------------------------------------------------------------------------------------- update


def minibatches(batch, count):
    """The batch in `count` mini-batches: equal parts of its rows, in order, of whole groups."""
    size = len(batch["ids"]) // count
    parts = []
    for start in range(0, count * size, size):
        parts.append({name: value[start : start + size] for name, value in batch.items()})
    return parts


def update(policy, optimizer, batch, step, args):
    """All optimizer updates of a step, one on each mini-batch.

    Returns clip_rate (a share of tokens), grad_norm (a mean) and optimizer_steps.
    """
    updates = []  # a pair for each: number of clipped tokens, gradient norm
    total = len(batch["ids"])
    bar = tqdm(total=total, desc=f"step {step}: updating", leave=False, disable=RANK != 0)
    for minibatch in minibatches(batch, args.updates_per_step):
        num_tokens = all_reduce(minibatch["mask"].sum())
        updates.append(update_once(policy, optimizer, minibatch, num_tokens, bar, step, args))
    bar.close()
    # max(1, …) because a variant that drops groups (dapo.py) may have none left.
    step_tokens = max(1, all_reduce(batch["mask"].sum()))
    num_clipped = all_reduce(sum(clipped for clipped, _ in updates))
    return {
        "clip_rate": num_clipped / step_tokens,
        "grad_norm": sum(grad_norm for _, grad_norm in updates) / max(1, len(updates)),
        "optimizer_steps": len(updates),
    }


def update_once(policy, optimizer, minibatch, num_tokens, bar, step, args):
    """One optimizer update. Returns the number of clipped tokens and the gradient norm.

    The gradient is summed over micro-batches and processes, then scaled down to max_grad_norm. If
    the loss or the gradient is not finite, the program ends before the weights are touched.
    """
    if args.kl_coef == 0:
        # A token with advantage 0 has no gradient then, and needs no pass: leave it out of this
        # mini-batch's mask. num_tokens has counted it.
        minibatch["mask"] = minibatch["mask"] & (minibatch["advantages"] != 0)
    minibatch_loss = 0.0
    num_clipped = 0
    for rows, micro in micro_batches(minibatch, args):
        logp, _ = policy(micro["ids"], micro["mask"], args.temperature)
        loss, clipped = policy_loss(logp, micro, num_tokens, args)
        (loss * WORLD_SIZE).backward()  # FSDP2 averages over the processes; we want the sum
        minibatch_loss += loss.item()
        num_clipped += clipped
        bar.update(len(rows))
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
    grad_norm = full_tensor(grad_norm).item()  # under FSDP2 it is a sharded tensor
    minibatch_loss = all_reduce(minibatch_loss)
    if not math.isfinite(minibatch_loss + grad_norm):
        records.stop_at_non_finite(minibatch, step, minibatch_loss, grad_norm, args)
    optimizer.step()
    optimizer.zero_grad()
    return num_clipped, grad_norm


def update_values(value_model, optimizer, batch, step, args):
    """The value model's updates of a step, one on each mini-batch, like the policy's in update.

    Returns value_loss and value_grad_norm (means), value_clip_rate (a share of tokens) and
    explained_variance, which is that of the values before the update. It is None if all returns are
    equal.
    """
    step_tokens = all_reduce(batch["mask"].sum())
    returns = batch["returns"][batch["mask"]].double()  # [num_tokens]
    errors = returns - batch["values"][batch["mask"]]  # [num_tokens]
    mean = all_reduce(returns.sum()) / step_tokens
    mean_error = all_reduce(errors.sum()) / step_tokens
    variance = all_reduce((returns - mean).square().sum()) / step_tokens
    unexplained = all_reduce((errors - mean_error).square().sum()) / step_tokens
    explained_variance = None
    if variance > 1e-8:  # otherwise returns differ by rounding alone, as of equal rewards
        explained_variance = 1 - unexplained / variance
    losses, grad_norms = [], []
    num_clipped = 0
    total = len(batch["ids"])
    bar = tqdm(total=total, desc=f"step {step}: value model", leave=False, disable=RANK != 0)
    for minibatch in minibatches(batch, args.updates_per_step):
        num_tokens = all_reduce(minibatch["mask"].sum())
        minibatch_loss = 0.0
        for rows, micro in micro_batches(minibatch, args):
            values = value_model(micro["ids"], micro["mask"])
            loss, clipped = value_loss(values, micro, num_tokens, args)
            (loss * WORLD_SIZE).backward()  # as in update_once
            minibatch_loss += loss.item()
            num_clipped += clipped
            bar.update(len(rows))
        grad_norm = nn.utils.clip_grad_norm_(value_model.parameters(), args.max_grad_norm)
        grad_norm = full_tensor(grad_norm).item()
        minibatch_loss = all_reduce(minibatch_loss)
        if not math.isfinite(minibatch_loss + grad_norm):
            records.stop_at_non_finite(
                minibatch, step, minibatch_loss, grad_norm, args, lr_flag="--value_lr"
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(minibatch_loss)
        grad_norms.append(grad_norm)
    bar.close()
    return {
        "value_loss": fmean(losses),
        "value_clip_rate": all_reduce(num_clipped) / step_tokens,
        "value_grad_norm": fmean(grad_norms),
        "explained_variance": explained_variance,
    }


# --------------------------------------------------------------------------------------- evaluation


def evaluate(llm, task, problems, stop_ids, step, args):
    """Accuracy on the test problems, one response to each; and the responses of this process.

    Returns the metrics (accuracy by category, and the categories' mean) and a list of dictionaries
    with prompt, response and score. A score, as rewards/ gives it, has reward, correct and format.
    """
    from vllm import SamplingParams

    mine = problems[RANK::WORLD_SIZE]
    params = []
    for problem in mine:
        params.append(
            SamplingParams(
                seed=request_seed(args.seed, "test", problem["id"]),
                temperature=args.eval_temperature,
                max_tokens=args.max_response_tokens,
                stop_token_ids=stop_ids,
                detokenize=False,
            )
        )
    outputs = generate(llm, mine, params, f"step {step}: evaluating")
    texts = decode(llm.get_tokenizer(), [output.outputs[0] for output in outputs])
    scores = task.score_all(texts, [problem["answer"] for problem in mine])
    accuracy = accuracy_by_category("eval/accuracy", mine, scores)
    examples = []
    for problem, text, score in zip(mine, texts, scores):
        prompt = problem["messages"][-1]["content"]
        examples.append({"id": problem["id"], "prompt": prompt, "response": text, **score})
    return {"eval/accuracy": fmean(accuracy.values()), **accuracy}, examples


def accuracy_by_category(name, problems, scores):
    """{name_CATEGORY: share of right responses, over all processes}; kk: by number of people."""
    mine = [(problem["category"], score["correct"]) for problem, score in zip(problems, scores)]
    results = {}
    for category, correct in gather(mine):  # the processes' lists, joined
        results.setdefault(f"{name}_{category}", []).append(correct)
    return {key: fmean(results[key]) for key in sorted(results)}


def batch_metrics(batch, problems, scores, args):
    """A step's metrics that don't need its update, over all processes' responses."""
    num_tokens = all_reduce(batch["mask"].sum())
    rewards = torch.tensor(gather([score["reward"] for score in scores]), dtype=torch.float64)
    groups = rewards.view(-1, args.responses_per_prompt)  # [prompts, G]

    def token_mean(values):  # [N, T] → mean over the response tokens
        return all_reduce(values[batch["mask"]].double().sum()) / num_tokens

    kl = None
    if args.kl_coef > 0:
        kl = token_mean(k3(batch["old_logp"], batch["ref_logp"]))
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),  # over the whole step
        "accuracy": fmean(gather([score["correct"] for score in scores])),
        "format_rate": fmean(gather([score["format"] for score in scores])),
        "response_tokens": num_tokens / len(rewards),
        "truncated_rate": fmean(gather(batch["truncated"].tolist())),
        "zero_std_rate": (groups == groups[:, :1]).all(1).double().mean().item(),
        "entropy": token_mean(batch["entropy"]),
        "kl": kl,
        # Scoring can take too long on mathematics.
        "timed_out": sum(gather([score.get("timed_out", False) for score in scores])),
        "sampler_gap": token_mean((batch["sampler_logp"] - batch["old_logp"]).abs()),
        "tokens": int(num_tokens),
        **accuracy_by_category("accuracy", problems, scores),
    }


# --------------------------------------------------------------------------------------------- main


def main():
    signals.end_while_loading()
    with settings.errors_in_one_line():  # those that the user can fix
        args = parse_args(sys.argv[1:])
        _, sources = default_settings(sys.argv[1:])  # for the header
        check_args(args)
        tokenizer, task, train, test, sizes = prepare(args)
    if args.dry_run:
        if RANK == 0:
            header.show(args, sizes, sources)
        return
    memory.keep_freed_memory()  # on a CPU, where getting it again from the system is slow
    processes.start()
    records.choose_folder(args)
    if RANK == 0:
        header.show(args, sizes, sources)

    llm = load_sampler(args)
    policy = load_policy(args, trained=True)
    reference = load_policy(args, trained=False) if args.kl_coef > 0 else None
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True
    )
    value_model = load_policy(args, trained=True, kind=ValueModel)
    value_optimizer = torch.optim.AdamW(
        value_model.parameters(), lr=args.value_lr, weight_decay=args.weight_decay, fused=True
    )
    critic = (value_model, value_optimizer)
    step = 0
    num_prompts_used = 0
    if args.resume:
        step, num_prompts_used = checkpoints.load(policy, optimizer, args.resume, critic)
    sync_weights(policy, llm, args)
    stop_ids = end_token_ids(policy)
    run = records.Records(step, args, sizes)  # in process 0 it writes
    asked_to_stop = signals.catch()  # a list, which a signal's name is put into
    if step == 0:
        metrics, examples = evaluate(llm, task, test, stop_ids, step, args)
        run.write({"step": 0, **metrics})
        run.write_tests(step, examples)
    interrupted = all_reduce(len(asked_to_stop)) > 0

    while step < args.steps and not interrupted:
        step += 1
        started = time.perf_counter()
        metrics = {"step": step}

        # Sample a group of responses to each prompt.
        indices, num_prompts_used = next_prompts(
            len(train), num_prompts_used, args.prompts_per_step, args.seed
        )
        problems = [train[i] for i in indices[RANK::WORLD_SIZE]]  # this process's
        with timed(metrics, "sample"):
            batch, texts = sample(llm, problems, stop_ids, step, args)
            peak_memory_gb = memory.peak_gb()  # in use now, while the sampler has its memory
            if ON_GPU:
                llm.sleep(level=1)  # its memory is the trainer's until sync_weights

        # The problem of each row of the batch: every problem G times.
        row_problems = [problem for problem in problems for _ in range(args.responses_per_prompt)]

        # Score the responses.
        with timed(metrics, "score"):
            scores = task.score_all(texts, [problem["answer"] for problem in row_problems])
        rewards = torch.tensor([score["reward"] for score in scores])  # [N]

        # Probabilities before the update, and advantages.
        with timed(metrics, "logprob"):
            batch["old_logp"], batch["entropy"] = log_probs(policy, batch, args)  # [N, T]
            batch["ref_logp"] = batch["old_logp"]  # a stand-in: without reference it has weight 0
            if reference:
                batch["ref_logp"], _ = log_probs(reference, batch, args, with_entropy=False)

        # Values before the update, advantages and returns; then the value model's update.
        with timed(metrics, "value"):
            batch["values"] = compute_values(value_model, batch, args)  # [N, T]
            batch["advantages"] = compute_advantages(rewards, batch, args)  # [N, T]
            estimates = estimate_advantages(rewards, batch, args).float()  # Â, not whitened
            batch["returns"] = estimates + batch["values"]  # [N, T]
            metrics.update(update_values(value_model, value_optimizer, batch, step, args))
        metrics.update(batch_metrics(batch, row_problems, scores, args))

        # Update the policy, and hand the new weights to the sampler.
        # changes_logged: the share of weights that change as the sampler sees them, in its dtype.
        with weights.changes_logged(metrics, policy, args.dtype), timed(metrics, "train"):
            metrics.update(update(policy, optimizer, batch, step, args))
        peak_memory_gb = max(peak_memory_gb, memory.peak_gb())
        metrics["peak_memory_gb"] = all_reduce(peak_memory_gb, dist.ReduceOp.MAX)
        with timed(metrics, "sync"):
            sync_weights(policy, llm, args)
        metrics["time/step"] = time.perf_counter() - started
        metrics["tokens_per_s"] = metrics["tokens"] / metrics["time/step"]

        # Evaluate, write down, save.
        interrupted = all_reduce(len(asked_to_stop)) > 0
        last = step == args.steps
        is_due = step % args.eval_every == 0 and not interrupted  # interrupted: save without delay
        if last or is_due:
            test_metrics, examples = evaluate(llm, task, test, stop_ids, step, args)
            metrics.update(test_metrics)
            run.write_tests(step, examples)
        run.write(metrics)
        run.write_samples(step, problems, texts, scores)  # a few of them
        # A signal may also come during the evaluation, or during the save.
        interrupted = all_reduce(len(asked_to_stop)) > 0
        if last or interrupted or step % args.save_every == 0:
            checkpoints.save(policy, optimizer, tokenizer, step, num_prompts_used, args, critic)
            interrupted = all_reduce(len(asked_to_stop)) > 0

    run.close(step, asked_to_stop)
    del llm  # before the process group, which it uses
    processes.end()


if __name__ == "__main__":
    main()
