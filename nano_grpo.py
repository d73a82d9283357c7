"""GRPO on one page: sample answers to puzzles, score them, and make the better ones more probable.

    pip install torch transformers    # on Linux, macOS or Windows; vLLM is used if it is installed
    python nano_grpo.py

The model, models/kk_tiny, solves Knights & Knaves puzzles. It can guess, or go through the cases.
At first it mostly guesses, and a third of its answers are right. After ten steps it goes through
the cases, and two thirds are right. Read this page from top to bottom.

grpo.py computes the same and explains the objective. It has what longer runs need: flags, less
memory, several GPUs, metrics, checkpoints. A test compares both.
"""

import hashlib
import os
import random
from importlib.util import find_spec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads only help larger models
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # otherwise vLLM sets the number

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards import kk

# ----------------------------------------------------------------------------------------- settings

MODEL = "models/kk_tiny"
STEPS = 10  # training steps
PROMPTS = 12  # puzzles per step
GROUP = 8  # responses to each puzzle, which are compared with each other
UPDATES = 2  # optimizer updates per step; each uses its own part of the responses
TEST_PUZZLES = 200  # for the accuracy before and after training
MAX_TOKENS = 640  # longer responses are truncated
TEMPERATURE = 1.0  # the policy is softmax(logits / TEMPERATURE)
LEARNING_RATE = 1e-4
CLIP_LOW, CLIP_HIGH = 0.2, 0.24  # how far a token's probability may move in a step
BETA = 0.001  # weight of the KL term, which keeps the policy near the initial model
MAX_GRAD_NORM = 1.0  # larger gradients are scaled down to this norm
MICRO_BATCH = 32  # responses in one forward pass; fewer need less memory
SEED = 0
USE_VLLM = bool(find_spec("vllm"))  # otherwise generate() of transformers samples, more slowly
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

# ------------------------------------------------------------------------------- puzzles and models

torch.manual_seed(SEED)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
END = tokenizer.eos_token_id  # the token that ends a response
train = kk.load(None, "train", seed=SEED, people="2-3")
test = kk.load(None, "test", size=TEST_PUZZLES, seed=SEED, people="2-3")
for problems in train, test:
    for i, problem in enumerate(problems):
        chat = problem["messages"]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        text += problem["prefix"]  # "<think>": the response begins after it
        problem["id"] = i
        problem["prompt"] = tokenizer.encode(text, add_special_tokens=False)  # token ids
random.Random(f"{SEED}/0").shuffle(train)

if USE_VLLM:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, which gives it weights
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams

    llm = LLM(
        MODEL,
        dtype="float32",
        generation_config="vllm",  # ignore the model's own top-p and top-k
        max_model_len=256 + MAX_TOKENS,  # no prompt has more than 256 tokens
        max_num_batched_tokens=256 + MAX_TOKENS,
        kv_cache_memory_bytes=2**28,
        gpu_memory_utilization=0.1,
        enforce_eager=True,
        enable_chunked_prefill=False,  # on a CPU, seeded requests fail with it
    )
policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(DEVICE)
reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(DEVICE)
optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)


# ----------------------------------------------------------------------------- sampling and scoring


def generate(problems, n, when):
    """Sample n responses to each problem: lists of token ids, which end with END or are truncated.

    when: the step, or "test". vLLM's seeds depend on it, as in grpo.py.
    """
    if USE_VLLM:
        return with_vllm(problems, n, when)
    return with_transformers(problems, n)


def with_vllm(problems, n, when):
    prompts = []
    params = []
    for problem in problems:
        prompts.append({"prompt_token_ids": problem["prompt"]})
        digest = hashlib.sha256(f"{SEED}/{when}/{problem['id']}".encode()).digest()
        sampling = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS}
        params.append(SamplingParams(n=n, seed=int.from_bytes(digest[:6], "big"), **sampling))
    llm.reset_prefix_cache()  # its keys and values come from older weights
    responses = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        responses += [list(response.token_ids) for response in output.outputs]
    return responses


def with_transformers(problems, n):
    prompts = [problem["prompt"] for problem in problems for _ in range(n)]
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}
    responses = []
    for i in range(0, len(prompts), MICRO_BATCH):
        # Pad on the left, because generate() appends tokens on the right.
        inputs = {"input_ids": prompts[i : i + MICRO_BATCH]}
        inputs = tokenizer.pad(inputs, padding_side="left", return_tensors="pt").to(DEVICE)
        rows = policy.generate(**inputs, **sampling, max_new_tokens=MAX_TOKENS)
        for row in rows[:, inputs["input_ids"].shape[1] :].tolist():
            length = row.index(END) + 1 if END in row else len(row)
            responses.append(row[:length])
    return responses


def score(responses, problems):
    """Score each response by the rule: its reward is 3, -0.5, -1 or -3, and correct is a bool."""
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return kk.score_all(texts, [problem["answer"] for problem in problems])


def evaluate():
    """Return the fraction of test puzzles that one sampled response solves."""
    scores = score(generate(test, 1, "test"), test)
    return sum(s["correct"] for s in scores) / len(test)


# ----------------------------------------------------------------------- log-probabilities and loss


def log_probs(model, ids, mask):
    """Compute the log-probability of each response token, [N, T], 0 outside the mask.

    ids [N, T]: prompt and response, padded on the right, so that they never see the padding.
    mask [N, T]: True on response tokens.
    """
    logits = model(ids[:, :-1]).logits / TEMPERATURE  # [N, T-1, V]: each predicts the next token
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # [N, T-1]
    return torch.nn.functional.pad(logp, (1, 0)) * mask  # the first token has no prediction


def compute_advantages(rewards):
    """Compare each reward with its group's: [N] -> [N, 1], one number for all tokens of a row."""
    groups = rewards.view(-1, GROUP)
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    return ((groups - mean) / (std + 1e-6)).view(-1, 1)


def token_loss(new, old, ref, advantages):
    """Compute each token's loss, [N, T], from its log-probabilities, [N, T] each.

    new: under the current policy; old: under the policy before the step; ref: under the initial
    model.
    """
    ratio = (new - old).exp()  # 1 in the first update of a step
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    surrogate = torch.min(ratio * advantages, clipped * advantages)
    kl = (ref - new).exp() - (ref - new) - 1  # an estimate of KL(policy || reference)
    return BETA * kl - surrogate


# ----------------------------------------------------------------------------------------- training

print(f"{MODEL} on {DEVICE}; {'vLLM' if USE_VLLM else 'transformers'} samples", flush=True)
print(f"before training: test accuracy {evaluate():.3f}", flush=True)
for step in range(1, STEPS + 1):
    # Sample a group of responses to each puzzle, and score them.
    chosen = train[(step - 1) * PROMPTS : step * PROMPTS]
    responses = generate(chosen, GROUP, step)
    problems = [problem for problem in chosen for _ in range(GROUP)]  # one per response
    rewards = torch.tensor([s["reward"] for s in score(responses, problems)])  # [N]

    # Put prompts and responses into tensors, one row per response.
    rows = [problem["prompt"] + response for problem, response in zip(problems, responses)]
    ids = torch.full((len(rows), max(map(len, rows))), END)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, len(problems[i]["prompt"]) : len(row)] = True
    ids, mask = ids.to(DEVICE), mask.to(DEVICE)

    # Compute advantages, and log-probabilities before the update.
    advantages = compute_advantages(rewards).to(DEVICE)
    parts = list(zip(ids.split(MICRO_BATCH), mask.split(MICRO_BATCH)))
    with torch.no_grad():
        old = torch.cat([log_probs(policy, *part) for part in parts])
        ref = torch.cat([log_probs(reference, *part) for part in parts])

    # Update the policy.
    for minibatch in torch.arange(len(rows), device=DEVICE).chunk(UPDATES):
        num_tokens = mask[minibatch].sum()
        for micro in minibatch.split(MICRO_BATCH):  # row numbers; their gradients are added up
            new = log_probs(policy, ids[micro], mask[micro])
            loss = token_loss(new, old[micro], ref[micro], advantages[micro])
            ((loss * mask[micro]).sum() / num_tokens).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    if USE_VLLM:  # copy the new weights to it
        weights = {"weights_iterator": policy.state_dict().items()}
        llm.collective_rpc("reload_weights", kwargs=weights)
    about = f"gradient norm {grad_norm:.3f}, {mask.sum() / len(rows):.0f} tokens per response"
    print(f"step {step}: reward {rewards.mean():.3f}, {about}", flush=True)
print(f"after training: test accuracy {evaluate():.3f}", flush=True)
