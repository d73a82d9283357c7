"""SAPO: Soft Adaptive Policy Optimization, GRPO with a soft gate in place of the clip.

From *Soft Adaptive Policy Optimization* (Gao et al. 2025, arXiv 2511.20347). The clip is a switch:
a token inside the range keeps its whole gradient, ρ·A·∇log π, and a token just outside gets none.
SAPO keeps the fraction f' of the gradient, which falls smoothly as ρ moves away from 1 on either
side. Maximise, over the responses o_i of a mini-batch and their tokens o_it,

    J = mean over the responses of  1/|o_i| · Σ_t f(ρ)·A

    f(ρ) = 4/τ · sigmoid(τ·(ρ − 1))    τ: tau_positive if A > 0, else tau_negative
    f'(ρ) = 4·p·(1 − p)                with p = sigmoid(τ·(ρ − 1)): 1 at ρ = 1, less elsewhere
    ρ  = π(o_it) / π_old(o_it)         π_old: the policy before this step's updates
    A  = (r_i − mean) / (std + 1e-6)   the reward r_i, normalised in its group

A token's gradient is f'(ρ)·ρ·A·∇log π. τ is a little larger if A < 0, so that such tokens fade
sooner: lowering one token's probability raises all others, which is noise in a large vocabulary.

What differs from grpo.py: --tau_positive and --tau_negative instead of --clip_low and --clip_high;
policy_loss; its divisor, which counts responses instead of tokens; the default of --kl_coef.
clip_rate is the fraction of tokens whose gate f' is below 1/2: with τ = 1, tokens with ρ > 2.76. No
ρ below 1 counts, since f' is 0.79 at ρ = 0.

Where this file deviates from the paper, and why:
- `--kl_coef` above 0 adds grpo.py's KL term, averaged like the rest; by default there is none, as
  in the paper.
- The clamp of log(π/π_old) to ±20 is grpo.py's. Beyond it the gradient rounds to 0 anyway: above
  because f' does, below because ρ does.
- All deviations of grpo.py, except for its divisor and its clip range.

Command (one 80 GB GPU; `torchrun --nproc-per-node 4 sapo.py` for four):
    python sapo.py
"""

import dataclasses
from typing import Literal

from runtime import flags, settings
from runtime.settings import (
    Dtype,
    EvaluationTemperature,
    Fraction,
    GroupSize,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Temperature,
)

# ----------------------------------------------------------------------------------------- settings


@dataclasses.dataclass
class Args(settings.RunArgs):
    """Settings. The defaults train a 3B model on Knights & Knaves puzzles, as the AR-Lopti paper
    does (arXiv 2505.12929, Appendix B; docs/algorithms/grpo.md says what deviates).

    A model's folder may have a file trainer_settings.json, whose values replace these defaults. The
    model of runs without a GPU, models/kk_tiny, has one: shorter responses, a larger lr and so on.
    RunArgs adds settings of the machine and the run, such as --resume, --dry_run, --sampler_dtype.
    Types check ranges: Fraction is in [0, 1], GroupSize in [1, 16384].
    """

    # ---- objective
    tau_positive: PositiveFloat = 1.0  # τ of tokens with A > 0
    tau_negative: PositiveFloat = 1.05  # τ of tokens with A < 0; a larger τ fades them sooner
    kl_coef: NonNegativeFloat = 0.0  # β, the weight of the KL term; 0 loads no reference model
    updates_per_step: PositiveInt = 2  # mini-batches per step; 2: near on-policy, 16: off-policy

    # ---- problems
    task: str = "kk"  # kk, math, countdown, hitab, gym (see rewards/), or your own Python file
    chat_template: Literal["auto", "none"] = "auto"  # auto: the model's template; none: plain text
    max_prompt_tokens: PositiveInt = 1024  # problems with longer prompts are dropped

    # ---- sampling
    prompts_per_step: PositiveInt = 64  # a multiple of updates_per_step × processes (one per GPU)
    responses_per_prompt: GroupSize = 8  # G, the group size: responses to each prompt
    max_response_tokens: PositiveInt = 4096  # longer responses are truncated
    temperature: Temperature = 0.7  # π is softmax(logits / temperature), in sampling and loss

    # ---- optimizer
    lr: LearningRate = 1e-6  # AdamW's learning rate, constant
    weight_decay: Fraction = 0.01  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # larger gradients are scaled down to this norm
    lora_rank: NonNegativeInt = 0  # LoRA's rank r, e.g. 16 (with lr × 10); 0: train all weights
    lora_alpha: PositiveFloat = 32.0  # LoRA: W becomes W + α/r · P·Q; only P, Q of rank r learn

    # ---- run
    model: str = "Qwen/Qwen2.5-3B-Instruct"  # model to start from: a Hugging Face folder or hub id
    dtype: Dtype = "bfloat16"  # compute dtype; trained weights stay float32
    steps: PositiveInt | None = None  # number of training steps; None: computed from --epochs
    epochs: PositiveInt = 5  # passes over the training problems
    eval_every: PositiveInt = 20  # evaluate every this many steps, at the start and the end
    eval_temperature: EvaluationTemperature = 0.0  # sampling temperature in evaluations; 0: greedy
    eval_samples: GroupSize = 1  # responses per test problem; more than one also gives pass@k
    save_every: PositiveInt = 20  # write a checkpoint every this many steps and at the end
    seed: NonNegativeInt = 0  # seeds the prompt order and the sampling


# {task: {setting: value}}: a task's values in its own paper. With --task, they are the defaults.
TASKS = settings.TASKS

# Exit here on --help or a bad flag: importing torch takes seconds. main reads the flags again.
flags.check(Args, TASKS)

from statistics import fmean

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rewards import score
from runtime import batches, checkpoints, distributed, lora, metrics, models, records, sampler
from runtime.batches import balance, micro_batches, next_problems, own_part
from runtime.distributed import DEVICE, WORLD_SIZE, all_reduce, full_tensor
from runtime.metrics import Clock
from runtime.models import place, text_only
from runtime.sampler import decode

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
        logp, entropy = policy(micro["ids"], micro["mask"], args.temperature, with_entropy)
        length = logp.shape[1]
        # Add, don't assign. With sharded weights, all processes must run the same number of passes.
        # A process that finishes early repeats its last pass with an empty mask, which gives zeros.
        all_logp[rows, :length] += logp.cpu()
        all_entropy[rows, :length] += entropy.cpu()
    return all_logp, all_entropy


# ------------------------------------------------------------------------------------------ sampler


def load_sampler(args):
    """Start this process's vLLM engine, before the policy takes memory."""
    options = sampler.options(args)  # sets environment variables, too: call it before the import
    from vllm import LLM

    with distributed.library_notices():  # hides all of vLLM's output but errors
        return LLM(
            model=args.model,
            dtype=args.dtype,
            seed=args.seed,
            logprobs_mode="processed_logprobs",  # at the sampling temperature
            **options,
        )


def generate(llm, prompts, when, args, **sampling_params):
    """Generate responses with vLLM, in the order of the prompts, and decode them.

    prompts: problems, one per prompt.
    when: the step, or "test" in an evaluation. A request's seed is computed from --seed, `when` and
    the problem alone, so the responses do not depend on the number of processes. From it, vLLM
    derives a seed per response.
    sampling_params: further arguments for SamplingParams.
    """
    from vllm import SamplingParams

    requests = []
    params = []
    for problem in prompts:
        requests.append({"prompt_token_ids": problem["prompt_ids"]})
        params.append(
            SamplingParams(
                seed=sampler.request_seed(args.seed, when, problem["id"]),
                max_tokens=args.max_response_tokens,
                stop_token_ids=sampler.end_tokens(args.model),  # EOS tokens
                detokenize=False,  # decode() below does it for all responses at once
                **sampling_params,
            )
        )
    sampler.empty_prefix_cache(llm)  # vLLM's cached attention keys and values are of older weights
    outputs = llm.generate(requests, params, use_tqdm=sampler.progress_bar(when))
    responses = []
    for output in outputs:  # one per prompt
        responses += output.outputs
    # Decode without the EOS token and other tokens that only control the chat.
    for response, text in zip(responses, decode(llm.get_tokenizer(), responses)):
        response.text = text
    return responses


def sample(llm, problems, step, args):
    """Sample responses from the current policy. Returns tensors (see to_batch) and the responses.

    problems: one per response, so each problem is repeated G times in a row.
    """
    responses = generate(
        llm,
        problems[:: args.responses_per_prompt],  # one per prompt; n asks for G responses
        step,
        args,
        n=args.responses_per_prompt,
        temperature=args.temperature,
        logprobs=0,  # return log π of each sampled token, and of 0 others
        flat_logprobs=True,  # fast: response.logprobs.logprobs is a plain list of numbers
    )
    return to_batch(problems, responses), responses


def to_batch(problems, responses):
    """Convert prompts and responses to tensors, one row per response.

    ids [N, T]: prompt and response, padded with zeros on the right.
    mask [N, T]: True on response tokens, the EOS token included.
    sampler_logp [N, T]: vLLM's own log-probabilities.
    """
    rows = [(problem["prompt_ids"], response) for problem, response in zip(problems, responses)]
    longest = max(len(prompt) + len(response.token_ids) for prompt, response in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    sampler_logp = torch.zeros(len(rows), longest)
    for i, (prompt, response) in enumerate(rows):
        begin = len(prompt)
        end = begin + len(response.token_ids)
        ids[i, :begin] = torch.tensor(prompt)
        ids[i, begin:end] = torch.tensor(response.token_ids)
        mask[i, begin:end] = True
        sampler_logp[i, begin:end] = torch.tensor(response.logprobs.logprobs)
    return {"ids": ids, "mask": mask, "sampler_logp": sampler_logp}


def sync_weights(policy, llm, args):
    """Copy the policy's weights to vLLM, one tensor at a time, in --dtype."""

    def named_weights():
        # remove_duplicate=False: if embedding and head share a tensor, send it under both names,
        # because vLLM may hold two copies. full_tensor gathers a weight's shards, so all processes
        # must go through the weights in the same order. With LoRA, each adapter is merged into its
        # weight; without LoRA, the weights are sent unchanged.
        for name, weight in lora.merged_weights(policy.lm, remove_duplicate=False):
            weight = full_tensor(weight.to(getattr(torch, args.dtype)))
            yield name, sampler.rounded(policy.lm, name, weight, args)  # if --sampler_dtype says so

    sampler.load_weights(llm, named_weights())  # replaces all weights; wakes vLLM up


# --------------------------------------------------------------------------------------- advantages


def compute_advantages(scores, batch, args):
    """Compute the advantage of every response token: the reward, normalised within its group.

    scores: one per response; the G responses to a prompt are consecutive.
    Returns [N, T], zero outside the batch's mask (response tokens). In a group of one response,
    the mean is set to 0 and the standard deviation to 1, as in the library verl.
    """
    rewards = torch.tensor([s["reward"] for s in scores])  # [N]
    groups = rewards.view(-1, args.responses_per_prompt)  # [prompts, G]
    mean, std = 0.0, 1.0
    if args.responses_per_prompt > 1:
        # If a group's rewards only differ by rounding (1e-6 of the largest), set all to the first.
        groups = groups.where(~metrics.all_equal(groups), groups[:, :1])
        # Subtract the first reward, which cancels in A: then equal rewards have A = 0 exactly,
        # although their mean may be rounded.
        groups = groups - groups[:, :1]
        mean = groups.mean(1, keepdim=True)  # [prompts, 1]
        std = groups.std(1, keepdim=True)  # divides by G − 1
    advantages = (groups - mean) / (std + 1e-6)
    advantages = advantages.reshape(-1, 1)  # [N, 1]
    # Each response token gets the advantage; all other places get 0.
    return advantages * batch["mask"]  # [N, T]


# --------------------------------------------------------------------------------------------- loss


def policy_loss(logp, batch, divisor, args):
    """Compute one micro-batch's part of −J and the number of its tokens with a gate below 1/2.

    logp [N, T] carries the gradient; the batch's old_logp, ref_logp, advantages and mask are [N, T]
    too. divisor: the responses of the whole mini-batch on all processes, so that the losses of its
    micro-batches add up to −J. The mask has all tokens of a response, or none if its A is 0.
    """
    advantages = batch["advantages"]
    mask = batch["mask"]
    length = mask.sum(1, keepdim=True).clamp(min=1)  # [N, 1], |o_i|
    # The clamp changes only log-ratios beyond ±20, so that exp does not overflow.
    ratio = (logp - batch["old_logp"]).clamp(-20, 20).exp()  # ρ
    tau = torch.full_like(advantages, args.tau_negative)  # [N, T]
    tau = tau.masked_fill(advantages > 0, args.tau_positive)
    p = torch.sigmoid(tau * (ratio - 1))  # [N, T]
    surrogate = 4 / tau * p * advantages
    gate = 4 * p * (1 - p)  # f': the fraction of the gradient that is left
    clipped = (advantages != 0) & (gate < 0.5) & mask

    # To minimise the loss is to maximise J.
    loss = args.kl_coef * k3(logp, batch["ref_logp"]) - surrogate  # [N, T]
    # Sum, don't average: over the micro-batches, these parts add up to −J.
    return (loss / length)[mask].sum() / divisor, clipped.sum()


def k3(logp, ref_logp):
    """Compute the KL term of each token, exp(ref − logp) − (ref − logp) − 1, in nats.

    Value: averaged over tokens sampled from π, it is KL(π ‖ π_ref). Gradient: it pulls each token's
    π to π_ref, by (1 − π_ref/π)·∇log π. Averaged, this is the gradient of KL(π_ref ‖ π) instead,
    because a loss does not differentiate the sampling; grpo_kl.py has better estimates.
    """
    difference = (ref_logp - logp).clamp(-20, 20)
    return difference.exp() - difference - 1


# ------------------------------------------------------------------------------------------- update


def minibatches(batch, count):
    """Yield `count` equal parts of the batch, in order. No group is split."""
    size = len(batch["ids"]) // count
    for first in range(0, count * size, size):
        yield {name: value[first : first + size] for name, value in batch.items()}


def update(policy, optimizer, batch, step, args):
    """Make all optimizer updates of a step, one per mini-batch.

    Returns metrics: clip_rate (fraction of tokens), grad_norm (mean), optimizer_steps (count).
    """
    num_clipped = 0
    grad_norms = []  # one per update
    for minibatch in minibatches(batch, args.updates_per_step):
        # For the loss, over the whole mini-batch and all processes:
        divisor = all_reduce(len(minibatch["mask"]))  # responses on all processes
        minibatch = balance(minibatch, args)  # swaps rows between processes: equal work

        clipped, grad_norm = update_once(policy, optimizer, minibatch, divisor, step, args)
        num_clipped += clipped
        grad_norms.append(grad_norm)
    return {
        "clip_rate": metrics.token_rate(num_clipped, batch["mask"]),
        **metrics.of_updates(grad_norms, args),  # grad_norm, optimizer_steps, overflows (float16)
    }


def update_once(policy, optimizer, minibatch, divisor, step, args):
    """Make one optimizer update. Returns the number of clipped tokens and the gradient norm.

    Gradients are summed over micro-batches, each as many rows as fit in one forward pass, and over
    processes, then clipped to norm max_grad_norm.
    """
    # In float16, multiply the loss, so that small gradients do not become 0. Otherwise do nothing.
    scaler = models.scaler(optimizer, args)  # one for the whole run; it wraps torch's GradScaler
    minibatch_loss = 0.0
    num_clipped = 0
    # For speed, if β is 0, drop tokens with A = 0 from the mask: they have no gradient. The divisor
    # still counts them. If no token is left, one pass still runs: AdamW's momentum moves weights.
    minibatch = batches.without_idle(minibatch, args)
    for _, micro in micro_batches(minibatch, args, f"step {step}: updating"):
        logp, _ = policy(micro["ids"], micro["mask"], args.temperature)
        loss, clipped = policy_loss(logp, micro, divisor, args)
        # If there are several processes, FSDP2 averages their gradients: × WORLD_SIZE is the sum.
        scaler.scale(loss * WORLD_SIZE).backward()
        minibatch_loss += loss.detach().double()  # .item() would wait for the GPU
        num_clipped += clipped
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
    grad_norm = full_tensor(grad_norm).item()  # with FSDP2, each process has a part of it
    # Exit if the loss or the norm is NaN or infinite, while the weights are still good. In float16
    # such a norm is only an overflow: scaler.step skips this update and lowers the loss's scale.
    records.check_finite(minibatch_loss, grad_norm, minibatch, step, args)
    scaler.step(optimizer)  # makes the optimizer's step, and adapts the loss's scale
    optimizer.zero_grad()
    return num_clipped, grad_norm


# --------------------------------------------------------------------------------------- evaluation


@records.task_may_fail  # an error of the task ends the run, with a checkpoint
def evaluate(llm, task, test, step, run, args):
    """Measure accuracy on the test problems, and save some of the responses.

    Returns the accuracy of each category of problems (K&K: the number of people) and the mean over
    categories. With several responses (--eval_samples), also pass@k: the chance that one of k is
    right (arXiv 2107.03374).
    """
    prompts = own_part(test)  # this process's test problems; no other process has them
    k = args.eval_samples
    responses = generate(llm, prompts, "test", args, n=k, temperature=args.eval_temperature)
    problems = []  # one per response
    for problem in prompts:
        problems += [problem] * k
    scores = score(task, responses, problems)  # keys: reward, correct, format …
    run.write_tests(step, prompts, responses[::k], scores[::k])  # the first response per problem
    accuracy = metrics.accuracy_by_category("eval/accuracy", problems, scores)  # over all processes
    pass_at_k = metrics.pass_at_each_k("eval/pass", problems, scores, k)  # {} if k is 1
    return {"eval/accuracy": fmean(accuracy.values()), **accuracy, **pass_at_k}


# --------------------------------------------------------------------------------------------- main


def main():
    # Read flags, tokenizer and problems, and print the header. Exits here with --dry_run, and on
    # errors that flags.check could not see, such as a missing file. run writes the run's files,
    # task makes prompts and scores responses, train and test are lists of problems.
    args, run, tokenizer, task, train, test = records.begin(Args, TASKS)

    llm = load_sampler(args)
    policy = load_policy(args, trained=True)
    reference = None
    if args.kl_coef > 0 and args.lora_rank > 0:
        reference = lora.without_adapters(policy)  # the policy with its adapters off
    elif args.kl_coef > 0:
        reference = load_policy(args, trained=False)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True
    )
    # Steps done and training problems used so far: 0, 0 unless the run is resumed.
    step, num_used = checkpoints.load(policy, optimizer, args.resume)
    # End the run if Policy, transformers' own forward pass and vLLM disagree on log π of a few
    # tokens. The test changes the weights for a moment, to find any that do not reach vLLM.
    models.check_same(policy, llm, sync_weights, train[0], args)
    sync_weights(policy, llm, args)  # the check, or a resume, leaves vLLM with other weights
    run.open(step)  # opens its files; from here, Ctrl-C or SIGTERM stops after the step
    if step == 0:
        run.write({"step": 0, **evaluate(llm, task, test, step, run, args)})

    saved = step
    while step < args.steps and not run.interrupted():
        # Remember these: if the task fails before the update, they are saved as a checkpoint.
        run.begin_step(policy, optimizer, tokenizer, step, num_used, args)
        step += 1
        clock = Clock()  # times each phase

        # Sample a group of responses to each prompt.
        # Take this process's problems, each repeated G times in a row. Every epoch is shuffled
        # anew; leftover problems that do not fill a step are dropped.
        problems, num_used = next_problems(train, num_used, args)
        batch, responses = sample(llm, problems, step, args)
        clock.lap("sample")
        sampler.sleep(llm)  # frees GPU memory for training; sync_weights wakes it up

        # Score the responses. A score has a reward (K&K: 3 if right, −0.5 if wrong, −1 if no answer
        # can be read, −3 if tags are missing), correct (is the answer right?) and format (are the
        # required tags there?).
        scores = score(task, responses, problems)
        clock.lap("score")

        # Compute log-probabilities from before the update.
        batch["old_logp"], batch["entropy"] = log_probs(policy, batch, args)  # [N, T]
        if reference:
            batch["ref_logp"], _ = log_probs(reference, batch, args, with_entropy=False)
        else:
            batch["ref_logp"] = batch["old_logp"]  # a placeholder: β is 0
        batch["advantages"] = compute_advantages(scores, batch, args)  # [N, T]
        clock.lap("logprob")

        # Update the policy, and pass its weights on to vLLM.
        weights_before = metrics.some_weights(policy, args.dtype)  # to log how many values change
        updated = update(policy, optimizer, batch, step, args)  # metrics
        run.write_tokens(step, policy, batch, tokenizer)  # for make watch: one more pass
        clock.lap("train")
        sync_weights(policy, llm, args)
        timings = clock.end("sync")  # seconds per phase, peak memory

        # Log, evaluate, save.
        kl = k3(batch["old_logp"], batch["ref_logp"])  # [N, T]
        gap = (batch["old_logp"] - batch["sampler_logp"]).abs()  # [N, T]
        row = {
            "step": step,
            **metrics.of_responses(responses, problems, scores, args),  # reward, accuracy, lengths
            # Means over the response tokens of all processes:
            "entropy": metrics.token_mean(batch["entropy"], batch["mask"]),
            "sampler_gap": metrics.token_mean(gap, batch["mask"]),
            "kl": metrics.token_mean(kl, batch["mask"]) if reference else None,
            **updated,
            "weights_changed": metrics.share_changed(weights_before, policy, args.dtype),
            **timings,
        }
        if step == args.steps or (step % args.eval_every == 0 and not run.interrupted()):
            row.update(evaluate(llm, task, test, step, run, args))
        run.write(row)  # to metrics.jsonl, TensorBoard and, in one line, the terminal
        run.write_samples(step, problems, responses, scores)  # saves a few of them
        if step % args.save_every == 0:
            # Even if the run is killed here, the last complete checkpoint stays intact.
            checkpoints.save(policy, optimizer, tokenizer, step, num_used, args)
            saved = step

    if saved < step:  # after the last step, or an interruption
        checkpoints.save(policy, optimizer, tokenizer, step, num_used, args)
    run.close(step)  # plots the curves; prints how the run ended and how to resume it
    del llm  # must come first: distributed.end closes vLLM's process group
    distributed.end()


if __name__ == "__main__":
    main()
