"""GRPO over several turns: the model writes, the task replies, and the model goes on.

A problem here is a conversation. The model's turn may call a tool (rewards/calculator.py) or be a
move in a game (rewards/guess.py). The task reads it and replies, and the model's next turn follows,
until the task has nothing more to say. One reward is given to the whole conversation at its end.

J is grpo.py's, over conversations o_i in place of responses:

    J = 1/Σ_i|o_i| · Σ_i Σ_t { min[ρ·A, clip(ρ, 1−ε_low, 1+ε_high)·A] − β·k3 }

t runs over the tokens that the model wrote, in all turns, and |o_i| counts these tokens. A reply's
tokens are part of what the model reads. They are in no sum, because the model did not choose them:
a gradient on them would teach it to predict its tool. All turns of a conversation share A.

What differs from grpo.py
- converse plays all conversations of a step together. vLLM samples the first turn of each. Then the
  task replies, and one call of vLLM gives each conversation that goes on its next turn.
- Tokens in, tokens out. A turn's prompt is made of the ids that were sampled before. They are never
  decoded and encoded again: another split of the same text would be other tokens, which the policy
  did not sample, and ρ would be wrong. Only a reply is encoded, once, as the model's chat template
  writes a user's turn. A template that rewrites earlier turns (Qwen3's drops their thinking) has no
  effect: a conversation keeps every turn as it was sampled.
- The mask has gaps: it is True where the model wrote. The policy, the loss and the divisor read
  masks alone, so they are grpo.py's.
- --max_turns, and --max_response_tokens for a whole conversation, replies included. A conversation
  that reaches one of them counts as truncated.

A task without reply(), such as Knights & Knaves, ends every conversation after its first turn. Then
this file is grpo.py, to the last bit.

No single paper describes this algorithm. Masking what a tool says is common: Search-R1 (arXiv
2503.09516) and ReTool (arXiv 2504.11536) do it for PPO and GRPO. The settings are grpo.py's, and so
is everything that its docstring says of them.

Command (one 80 GB GPU; on two cores, `make agent` trains SmolLM2-135M in minutes):
    python grpo_multi_turn.py --task calculator
"""

import dataclasses
from typing import Literal

from runtime import flags, papers, settings
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
    """The AR-Lopti paper's settings for Knights & Knaves puzzles (arXiv 2505.12929, Appendix B),
    except for what the docstring at the top says.

    Without a GPU, models/kk_tiny and its trainer_settings.json take the place of some. RunArgs adds
    settings that no algorithm reads. A type says what is allowed: a Fraction is in [0, 1].
    """

    # ---- objective
    clip_low: Fraction = 0.2  # ε_low
    clip_high: NonNegativeFloat = 0.24  # ε_high
    kl_coef: NonNegativeFloat = 0.001  # β, weight of the KL term; 0: no reference model is loaded
    updates_per_step: PositiveInt = 2  # mini-batches of a step; 2: near on-policy, 16: off-policy

    # ---- problems
    task: str = "kk"  # calculator, guess, a task of one turn (kk, math …), or a Python file
    chat_template: Literal["auto", "none"] = "auto"  # auto: the model's form of a chat; none: text
    max_prompt_tokens: PositiveInt = 1024  # longer prompts are left out

    # ---- sampling
    prompts_per_step: PositiveInt = 64  # a multiple of updates_per_step × processes
    responses_per_prompt: GroupSize = 8  # G: a prompt's responses are its group
    max_response_tokens: PositiveInt = 4096  # of a whole conversation: turns and replies
    max_turns: PositiveInt = 4  # the model's turns in a conversation
    temperature: Temperature = 0.7  # π is softmax(logits / temperature), sampled and in the loss

    # ---- optimizer
    lr: LearningRate = 1e-6  # AdamW's learning rate, constant
    weight_decay: Fraction = 0.01  # AdamW's weight decay
    max_grad_norm: PositiveFloat = 1.0  # gradients are scaled down to this norm
    lora_rank: NonNegativeInt = 0  # r of LoRA, e.g. 16, with ten times the lr; 0: train all weights
    lora_alpha: PositiveFloat = 32.0  # α of LoRA, which trains A and B in W + α/r · B·A

    # ---- run
    model: str = "Qwen/Qwen2.5-3B-Instruct"  # model to start from: a Hugging Face folder or hub id
    dtype: Dtype = "bfloat16"  # compute dtype; trained weights stay float32
    steps: PositiveInt | None = None  # None: worked out from --epochs at the start
    epochs: PositiveInt = 5  # passes over the training problems
    eval_every: PositiveInt = 20  # evaluate every so many steps, at the start and at the end
    eval_temperature: EvaluationTemperature = 0.0  # of evaluation; 0: greedy
    eval_samples: GroupSize = 1  # responses to a test problem; more than one also give pass@k
    save_every: PositiveInt = 20  # write a checkpoint every so many steps, and after the last
    seed: NonNegativeInt = 0  # of the order of prompts and of sampling


# What the papers set differently for other tasks: runtime/papers.py.
TASKS = papers.TASKS

# What follows imports torch, which takes seconds. A bad flag or --help ends here.
flags.check(Args, TASKS)

from statistics import fmean

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from rewards import reply, score
from runtime import (
    checkpoints,
    engine,
    float16,
    lora,
    measure,
    passes,
    processes,
    quiet,
    records,
    start,
)
from runtime.chats import decode, encode_reply
from runtime.clock import Clock
from runtime.dealing import next_problems, own_part
from runtime.passes import micro_batches
from runtime.placement import place
from runtime.processes import DEVICE, WORLD_SIZE, all_reduce, full_tensor

# ----------------------------------------------------------------------- policy (log-probabilities)


class Policy(nn.Module):
    """A causal language model that gives log-probabilities of the tokens it is shown."""

    def __init__(self, lm, args):
        super().__init__()
        self.lm = lm
        self.args = args

    def forward(self, ids, mask, temperature, with_entropy=False):
        """Log-probability and entropy, in nats, of each response token under the policy.

        ids [N, T]: prompt and response, padded on the right. Padding needs no attention mask: under
        causal attention no real token sees what comes after it. mask [N, T]: True on response
        tokens. Returns two float32 [N, T], zero outside the mask. The entropy is that of the full
        distribution; it is zero unless with_entropy asks for it.
        """
        dtype = getattr(torch, self.args.dtype)
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            hidden = self.hidden_states(ids, mask)  # [N, T, D]
            # The output at a position predicts the next token: take the one before each response
            # token. A response never begins a row, since the prompt comes first.
            states = hidden[:, :-1][mask[:, 1:]]  # [num_tokens, D]
            targets = ids[mask]  # [num_tokens], in the same order
            # self.head(states, targets, …), a chunk of tokens at a time, since all logits together
            # would be the largest tensor here. None are kept: the backward pass makes them again.
            logp, entropy = passes.in_chunks(self.head, states, targets, temperature, with_entropy)
        return to_rows(logp, mask), to_rows(entropy, mask)

    def hidden_states(self, ids, mask):
        """The output of the last layer, below the head, for every token: [N, T, D]."""
        # In float32, however the weights are stored: so is the residual stream, to which each layer
        # adds its output. autocast rounds only what enters a matrix product.
        embedded = self.lm.get_input_embeddings()(ids).float()  # [N, T, D]
        # How many tokens all rows begin with, such as a prompt; 0 if sharing them would not pay.
        length = passes.length_to_share(ids, mask, self.args)
        if length > 0:  # compute them once: the same [N, T, D]
            return passes.with_shared_prompt(self.lm.model, embedded, length)
        return self.lm.model(inputs_embeds=embedded, use_cache=False).last_hidden_state

    def head(self, states, targets, temperature, with_entropy):
        """Log-probability and entropy: states [n, D], targets [n] → two float32 [n]."""
        logits = self.lm.lm_head(states).float()  # [n, vocabulary]
        all_log_probs = logits.div_(temperature).log_softmax(-1)  # div_: in place, no second copy
        logp = all_log_probs.gather(-1, targets[:, None])[:, 0]  # of each target
        entropy = torch.zeros_like(logp)
        if with_entropy:
            with torch.no_grad():  # no loss has it
                entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
        return logp, entropy


def to_rows(values, mask):
    """Puts response tokens' values, [num_tokens], in their places: [N, T], zero elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


def load_policy(args, trained):
    """The model to train, with float32 weights; or a frozen one, for a reference, in --dtype."""
    dtype = torch.float32 if trained else getattr(torch, args.dtype)
    lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, trust_remote_code=False)
    policy = Policy(lm, args)
    policy.requires_grad_(trained)
    if trained and args.lora_rank > 0:
        lora.add_adapters(policy, args)  # only they are trained; the weights are now in --dtype
    return place(policy, args)  # on its device; split over the processes if there are several


@torch.no_grad()
def log_probs(policy, batch, args, with_entropy=True):
    """Log-probability and entropy of a batch's response tokens, without gradient.

    Two [N, T] on the CPU, zero outside the mask.
    """
    all_logp = torch.zeros(batch["ids"].shape)
    all_entropy = torch.zeros(batch["ids"].shape)
    inputs = {"ids": batch["ids"], "mask": batch["mask"]}  # the policy reads nothing else
    # Micro-batches: as many rows as fit in a forward pass, cut to the longest of them, and on the
    # policy's device. Each row with a masked token comes exactly once, longest first. The text is
    # the progress bar's title.
    for rows, micro in micro_batches(inputs, args, "log-probabilities"):
        logp, entropy = policy(micro["ids"], micro["mask"], args.temperature, with_entropy)
        length = logp.shape[1]
        # += and not =, since a process may make a pass again, with an empty mask and values of 0:
        # all must make equally many, because each holds a part of the weights.
        all_logp[rows, :length] += logp.cpu()
        all_entropy[rows, :length] += entropy.cpu()
    return all_logp, all_entropy


# ------------------------------------------------------------------------------------------ sampler


def load_sampler(args):
    """The vLLM engine of this process, made before the policy takes its memory."""
    options = engine.options(args)  # for this machine; also sets what vLLM reads when imported
    from vllm import LLM

    with quiet.library_notices():  # hides what vLLM prints; errors are shown
        return LLM(
            model=args.model,
            dtype=args.dtype,
            seed=args.seed,
            logprobs_mode="processed_logprobs",  # log-probabilities at the sampling temperature
            **options,
        )


def generate(llm, problems, when, args, **sampling_params):
    """vLLM's responses to the problems, in order, with their texts.

    when: a name of the occasion, such as the step or "test". A request's seed depends on --seed,
    when and the problem, and not on the number of processes; vLLM makes n seeds of it for n
    responses. A problem's num_used is how many tokens its conversation has already.
    sampling_params: more for SamplingParams.
    """
    from vllm import SamplingParams

    prompts = []
    params = []
    for problem in problems:
        prompts.append({"prompt_token_ids": problem["prompt_ids"]})
        params.append(
            SamplingParams(
                seed=engine.request_seed(args.seed, when, problem["id"]),
                max_tokens=args.max_response_tokens - problem.get("num_used", 0),
                stop_token_ids=engine.end_tokens(args.model),  # all that may end a response
                detokenize=False,  # decode does it for all responses together
                **sampling_params,
            )
        )
    outputs = llm.generate(prompts, params, use_tqdm=engine.progress_bar(when))
    responses = []
    for output in outputs:  # one for each prompt
        responses += output.outputs
    # Texts without the token that ended them and others that only control the chat.
    for response, text in zip(responses, decode(llm.get_tokenizer(), responses)):
        response.text = text
    return responses


class Conversation:
    """The model's turns and the task's replies about a problem, as texts and token by token."""

    def __init__(self, problem, row):
        self.problem = problem
        self.row = row  # among the G conversations about this problem
        self.turns = []  # the texts of the model's turns
        self.replies = []  # the texts of the task's replies
        self.ids = []  # all tokens after the prompt
        self.is_own = []  # for each of them: True if the model wrote it
        self.logp = []  # the sampler's log-probability of each; 0 in replies
        self.finish_reason = None  # of the last turn; "length" if the conversation was cut off

    @property
    def text(self):
        """The last turn, which most tasks score."""
        return self.turns[-1]

    @property
    def token_ids(self):
        """The tokens that the model wrote."""
        return [token for token, own in zip(self.ids, self.is_own) if own]

    def add_turn(self, response):
        self.turns.append(response.text)
        self.ids += response.token_ids
        self.is_own += [True] * len(response.token_ids)
        self.logp += response.logprobs.logprobs
        self.finish_reason = response.finish_reason

    def add_reply(self, text, ids):
        self.replies.append(text)
        self.ids += ids
        self.is_own += [False] * len(ids)
        self.logp += [0.0] * len(ids)

    def to_go_on(self):
        """What generate needs for the next turn. The prompt is all tokens so far, as they are."""
        return {
            "prompt_ids": self.problem["prompt_ids"] + self.ids,
            "num_used": len(self.ids),
            "id": f"{self.problem['id']}/{self.row}",  # each row has a seed of its own
        }


def converse(llm, task, problems, when, args, **sampling_params):
    """n conversations about each problem, in order.

    Processes do not wait for each other here, so their conversations may differ in length.
    """
    # Once for all turns: a turn finds the keys and values of those before it.
    engine.empty_prefix_cache(llm)  # attention's keys and values of prompts, by older weights
    sampling_params["logprobs"] = 0  # log-probabilities of the sampled tokens alone
    sampling_params["flat_logprobs"] = True  # as a plain list of numbers, which is fast
    turns = generate(llm, problems, when, args, **sampling_params)
    n = sampling_params.pop("n")
    conversations = [Conversation(problems[i // n], i % n) for i in range(len(turns))]
    going_on = conversations
    while going_on:
        for conversation, turn in zip(going_on, turns):
            conversation.add_turn(turn)
        going_on = [c for c in going_on if has_reply(c, task, llm.get_tokenizer(), args)]
        if going_on:
            asked = [conversation.to_go_on() for conversation in going_on]
            occasion = f"{when}, turn {len(going_on[0].turns) + 1}"
            turns = generate(llm, asked, occasion, args, **sampling_params)
    return conversations


def has_reply(conversation, task, tokenizer, args):
    """Adds the task's reply to a conversation. False, and no reply, if the conversation is over."""
    if conversation.finish_reason == "length":  # the last turn was cut off
        return False
    text = reply(task, conversation.turns, conversation.problem)
    if text is None:
        return False
    ids = encode_reply(tokenizer, text, args.chat_template, args.template_options)
    num_tokens = len(conversation.ids) + len(ids)
    if len(conversation.turns) == args.max_turns or num_tokens >= args.max_response_tokens:
        conversation.finish_reason = "length"
        return False
    conversation.add_reply(text, ids)
    return True


def sample(llm, task, problems, step, args):
    """The current policy's conversations: as tensors (see to_batch), and as objects.

    problems: the problem of each conversation to come, so that each problem is there G times in a
    row.
    """
    conversations = converse(
        llm,
        task,
        problems[:: args.responses_per_prompt],  # each problem once
        step,
        args,
        n=args.responses_per_prompt,
        temperature=args.temperature,
    )
    return to_batch(problems, conversations), conversations


def to_batch(problems, conversations):
    """Prompts and conversations as tensors, a row for each of the N conversations.

    ids [N, T]: prompt, turns and replies, padded with zeros on the right. mask [N, T]: True on the
    model's own tokens, end tokens included. sampler_logp [N, T]: the sampler's own
    log-probabilities.
    """
    prompts = [problem["prompt_ids"] for problem in problems]
    rows = list(zip(prompts, conversations))
    longest = max(len(prompt) + len(conversation.ids) for prompt, conversation in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    sampler_logp = torch.zeros(len(rows), longest)
    for i, (prompt, conversation) in enumerate(rows):
        begin = len(prompt)
        end = begin + len(conversation.ids)
        ids[i, :begin] = torch.tensor(prompt)
        ids[i, begin:end] = torch.tensor(conversation.ids)
        # A reply between two turns is a gap in the mask. Policy.forward takes the states before the
        # True tokens alone, and the loss, the divisor and all metrics are sums over the mask.
        mask[i, begin:end] = torch.tensor(conversation.is_own)
        sampler_logp[i, begin:end] = torch.tensor(conversation.logp)
    return {"ids": ids, "mask": mask, "sampler_logp": sampler_logp}


def sync_weights(policy, llm, args):
    """Copies the policy's weights to vLLM, one tensor at a time, in --dtype."""

    def named_weights():
        # If embedding and head are one tensor, it is sent under both names (remove_duplicate):
        # vLLM may keep two copies. full_tensor joins the parts that the processes have; all of them
        # must ask for the tensors in the same order.
        # With LoRA each weight has its adapter added.
        for name, weight in lora.merged_weights(policy.lm, remove_duplicate=False):
            yield name, full_tensor(weight).to(getattr(torch, args.dtype))

    engine.load_weights(llm, named_weights())  # replaces all of them; vLLM is awake after it


# --------------------------------------------------------------------------------------- advantages


def compute_advantages(rewards, batch, args):
    """Advantage of every response token, [N, T]: the reward, normalised within its group.

    rewards [N]: the G responses to a prompt follow each other. The batch's mask [N, T] is True on
    response tokens; the advantage is zero elsewhere. A group of one response has mean 0 and
    standard deviation 1, as in verl.
    """
    groups = rewards.view(-1, args.responses_per_prompt)  # [prompts, G]
    mean, std = 0.0, 1.0
    if args.responses_per_prompt > 1:
        # Subtracting the first reward changes no advantage, but equal rewards give exactly 0.
        groups = groups - groups[:, :1]
        mean = groups.mean(1, keepdim=True)  # [prompts, 1]
        std = groups.std(1, keepdim=True)  # the sample's: divided by G − 1
    advantages = (groups - mean) / (std + 1e-6)
    return advantages.reshape(-1, 1) * batch["mask"]  # [N, T]


# --------------------------------------------------------------------------------------------- loss


def policy_loss(logp, batch, divisor, args):
    """One micro-batch's part of −J, and how many of its tokens are clipped.

    logp [N, T] carries the gradient; the batch's old_logp, ref_logp, advantages and mask are [N, T]
    too. divisor: Σ|o_i| of J, the response tokens of the whole mini-batch on all processes, so that
    the losses of its micro-batches add up to −J.
    """
    advantages = batch["advantages"]
    mask = batch["mask"]
    low = 1 - args.clip_low
    high = 1 + args.clip_high
    # The clamp matters to absurd tokens alone: their exp must not overflow.
    ratio = (logp - batch["old_logp"]).clamp(-20, 20).exp()  # ρ
    surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    # A clipped token's surrogate has no gradient: it has moved far enough in A's direction.
    too_high = (advantages > 0) & (ratio > high)
    too_low = (advantages < 0) & (ratio < low)
    clipped = (too_high | too_low) & mask
    loss = args.kl_coef * k3(logp, batch["ref_logp"]) - surrogate  # [N, T]
    return loss[mask].sum() / divisor, clipped.sum()


def k3(logp, ref_logp):
    """The KL term of each token, exp(ref − logp) − (ref − logp) − 1, in nats (Schulman 2020).

    grpo_kl.py has other estimates, and says which gradient each has.
    """
    difference = (ref_logp - logp).clamp(-20, 20)
    return difference.exp() - difference - 1


# ------------------------------------------------------------------------------------------- update


def minibatches(batch, count):
    """Yields the batch in `count` equal parts, each of whole groups, in order."""
    size = len(batch["ids"]) // count
    for first in range(0, count * size, size):
        yield {name: value[first : first + size] for name, value in batch.items()}


def update(policy, optimizer, batch, step, args):
    """All optimizer updates of a step, one on each mini-batch.

    Returns clip_rate (a share of tokens), grad_norm (a mean) and optimizer_steps.
    """
    num_clipped = 0
    grad_norms = []  # one for each update
    for minibatch in minibatches(batch, args.updates_per_step):
        divisor = all_reduce(minibatch["mask"].sum())  # response tokens, of all processes
        clipped, grad_norm = update_once(policy, optimizer, minibatch, divisor, step, args)
        num_clipped += clipped
        grad_norms.append(grad_norm)
    return {
        "clip_rate": measure.token_rate(num_clipped, batch["mask"]),
        **measure.of_updates(grad_norms, args),  # grad_norm, optimizer_steps (and overflows)
    }


def update_once(policy, optimizer, minibatch, divisor, step, args):
    """One optimizer update. Returns the number of clipped tokens and the gradient norm.

    The gradient is summed over micro-batches and processes, then scaled down to max_grad_norm.
    """
    scaler = float16.scaler(optimizer, args)  # torch's GradScaler; it does nothing in other dtypes
    minibatch_loss = 0.0
    num_clipped = 0
    # As in log_probs. For speed, a token with A = 0 gets no pass if the loss has no KL term: it has
    # no gradient, and only the divisor counts it. There is always one pass: if no token is left,
    # AdamW gets gradients of 0.
    for _, micro in micro_batches(minibatch, args, f"step {step}: updating"):
        logp, _ = policy(micro["ids"], micro["mask"], args.temperature)
        loss, clipped = policy_loss(logp, micro, divisor, args)
        # FSDP2, which splits the model over processes, averages their gradients. We want the sum.
        scaler.scale(loss * WORLD_SIZE).backward()
        minibatch_loss += loss.detach().double()  # item() would wait for the GPU
        num_clipped += clipped
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
    grad_norm = full_tensor(grad_norm).item()  # a number; under FSDP2 put together first
    # Ends the program, before the weights are touched, if one of the two is NaN or infinite.
    records.check_finite(minibatch_loss, grad_norm, minibatch, step, args)
    scaler.step(optimizer)  # skipped if a gradient overflowed in float16
    optimizer.zero_grad()
    return num_clipped, grad_norm


# --------------------------------------------------------------------------------------- evaluation


def evaluate(llm, task, problems, step, run, args):
    """Accuracy on the test problems; some of the responses to them go to the run's files.

    Returns it for each category of problems, and its mean over the categories. With several
    responses to each problem (--eval_samples) also pass@1, pass@2 … (arXiv 2107.03374).
    """
    mine = own_part(problems)  # this process's: every problem is in exactly one part
    k = args.eval_samples
    responses = converse(llm, task, mine, "test", args, n=k, temperature=args.eval_temperature)
    asked = []  # the problem of each response
    for problem in mine:
        asked += [problem] * k
    scores = score(task, responses, asked)  # for each: reward, correct (answer), format (tags)
    run.write_tests(step, mine, responses[::k], scores[::k])  # the first response to each problem
    accuracy = measure.accuracy_by_category("eval/accuracy", asked, scores)  # of all processes
    pass_at_k = measure.pass_at_each_k("eval/pass", asked, scores, k)  # {} if k is 1
    return {"eval/accuracy": fmean(accuracy.values()), **accuracy, **pass_at_k}


# --------------------------------------------------------------------------------------------- main


def main():
    # Reads the flags, the tokenizer and the problems, and prints the header. What flags.check could
    # not know, such as a missing file, ends the program here, and so does --dry_run.
    args, run, tokenizer, task, train, test = start.begin(Args, TASKS)

    llm = load_sampler(args)
    policy = load_policy(args, trained=True)
    reference = None
    if args.kl_coef > 0 and args.lora_rank > 0:
        reference = lora.without_adapters(policy)  # the same weights, with the adapters off
    elif args.kl_coef > 0:
        reference = load_policy(args, trained=False)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True
    )
    # How many steps are done and how many training problems they used: 0, 0 in a new run.
    step, num_used = checkpoints.load(policy, optimizer, args.resume)
    sync_weights(policy, llm, args)  # after a resume, vLLM still has the first weights
    run.open(step)  # its files; from now on Ctrl-C or SIGTERM ends the run after a step
    if step == 0:
        run.write({"step": 0, **evaluate(llm, task, test, step, run, args)})

    saved = step
    while step < args.steps and not run.interrupted():
        step += 1
        clock = Clock()  # a lap for each phase

        # Sample a group of responses to each prompt.
        # This process's problems, each G times in a row. Every epoch is shuffled anew, and the
        # problems at its end that make no whole step are dropped.
        problems, num_used = next_problems(train, num_used, args)
        batch, responses = sample(llm, task, problems, step, args)
        clock.lap("sample")
        engine.sleep(llm)  # on a GPU: frees its memory for training; sync_weights wakes it

        # Score them.
        # Of each response: correct (the answer), format (the tags that the prompt asks for) and
        # reward (for K&K 3, −0.5, −1 or −3).
        scores = score(task, responses, problems)
        rewards = torch.tensor([s["reward"] for s in scores])  # [N]
        clock.lap("score")

        # Probabilities before the update, and advantages.
        batch["old_logp"], batch["entropy"] = log_probs(policy, batch, args)  # [N, T]
        if reference:
            batch["ref_logp"], _ = log_probs(reference, batch, args, with_entropy=False)
        else:
            batch["ref_logp"] = batch["old_logp"]  # the KL term is multiplied by β = 0
        batch["advantages"] = compute_advantages(rewards, batch, args)  # [N, T]
        clock.lap("logprob")

        # Update the policy, and hand the new weights to the sampler.
        # For a metric: the share of weights that change when rounded to --dtype.
        weights_before = measure.some_weights(policy, args.dtype)
        updated = update(policy, optimizer, batch, step, args)  # metrics
        run.write_tokens(step, policy, batch, tokenizer)  # what it did to some responses' tokens
        clock.lap("train")
        sync_weights(policy, llm, args)
        timings = clock.end("sync")  # seconds of each phase, and the peak of the memory

        # Write down, evaluate, save.
        kl = k3(batch["old_logp"], batch["ref_logp"])  # [N, T]
        gap = (batch["old_logp"] - batch["sampler_logp"]).abs()  # [N, T]
        metrics = {
            "step": step,
            **measure.of_responses(responses, problems, scores, args),  # reward, accuracy, lengths
            **measure.of_turns(responses),  # turns, tool_rate
            # Means over the response tokens of all processes.
            "entropy": measure.token_mean(batch["entropy"], batch["mask"]),
            "sampler_gap": measure.token_mean(gap, batch["mask"]),
            "kl": measure.token_mean(kl, batch["mask"]) if reference else None,
            **updated,
            "weights_changed": measure.share_changed(weights_before, policy, args.dtype),
            **timings,
        }
        if step == args.steps or (step % args.eval_every == 0 and not run.interrupted()):
            metrics.update(evaluate(llm, task, test, step, run, args))
        run.write(metrics)  # to metrics.jsonl and TensorBoard; a line of them is printed
        run.write_samples(step, problems, responses, scores)  # a few of them
        if step % args.save_every == 0:
            # A kill at any moment leaves the last complete checkpoint as it was.
            checkpoints.save(policy, optimizer, tokenizer, step, num_used, args)
            saved = step

    if saved < step:  # the last step, or the one after which the run was interrupted
        checkpoints.save(policy, optimizer, tokenizer, step, num_used, args)
    run.close(step)  # draws the curves, and prints how the run ended and how it goes on
    del llm  # it uses the connection of the processes, which ends now
    processes.end()


if __name__ == "__main__":
    main()
