"""What the tests of the algorithms share: settings for a tiny model, batches, gradients at fixed weights, and what
transformers and torch alone make of them."""

import contextlib
import math

import pytest
import torch
from conftest import KK_TINY

import evaluation.sampling
import evaluation.settings
import grpo
import sft
from rewards import kk
from tools.maintain import updates

PROMPTS, GROUP = 8, 3  # of the batch most tests use: 24 rows, 12 in each of a step's two mini-batches
N = PROMPTS * GROUP

# Responses as (prompt tokens, the k1 of each response token, padding), and their rewards.
ROWS = [(1, [1, -2, 4], 2), (4, [-1], 1), (2, [0.5, 0.5, -1, 2], 0)]
REWARDS = [2.5, -0.25, 1.0]
# What begins a run's records: the sizes of its model, memory and data.
SIZES = {
    "parameters": 9e5, "estimated_memory_gb": 1.6, "memory_gb": 23.5, "training_problems": 640, "test_problems": 20
}  # fmt: skip


def arguments(trainer=grpo, **changes):
    """Args for a tiny model: float32, no gradient clipping, one micro-batch, one update, GRPO's own stages."""
    settings = {
        "dtype": "float32", "gradient_checkpointing": False, "compile": False, "max_grad_norm": 1e9,
        "prompts_per_step": PROMPTS,
        "responses_per_prompt": GROUP, "updates_per_step": 1, "micro_batch_tokens": 10**6, "kl_coef": 0.1,
    } | changes  # fmt: skip
    if "kl_coef" not in trainer.Args.__dataclass_fields__:  # reinforce.py has none, whatever is asked for
        del settings["kl_coef"]
    return trainer.Args(**settings)


def refused(says):
    """The block raises a ValueError with this message; with an empty one, none."""
    return pytest.raises(ValueError, match=says) if says else contextlib.nullcontext()


def requests_of(model, chat_template="auto"):
    """What evaluate.py asks vLLM for one K&K puzzle: its requests, and the sampling's settings."""
    args = evaluation.settings.Args(
        suite="kk", max_response_tokens=8, dtype="float32", chat_template=chat_template, batch=1, template_options="{}"
    )
    problem = {**kk.generate(1, "2", seed=1)[0], "samples": 1, "temperature": 0, "seed": 0}
    return evaluation.sampling.requests_of(str(model), [problem], args)


def policy_and_optimizer():
    """kk_tiny in float32, and its AdamW."""
    args = arguments(model=str(KK_TINY))
    policy = grpo.load_policy(args, trained=True)
    return policy, torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)


def learn(policy, optimizer):
    """An update that depends on the weights, on AdamW's state and on torch's random state."""
    for parameter in policy.parameters():
        parameter.grad = parameter.detach() + torch.randn(parameter.shape)
    optimizer.step()


class Recorder(torch.optim.SGD):
    """An optimizer that keeps each step's gradient, flat, and leaves the weights alone."""

    def __init__(self, policy):
        super().__init__(policy.parameters(), lr=0.0)
        self.gradients = []

    def step(self):
        trained = [p for p in self.param_groups[0]["params"] if p.requires_grad]
        self.gradients.append(flat(grpo.full_tensor(p.grad) for p in trained))


def flat(tensors):
    return torch.cat([tensor.detach().flatten().clone() for tensor in tensors])


def weights(policy):
    return flat(grpo.full_tensor(p) for p in policy.parameters())


def distance(a, b):
    """How far a is from b, relative to b: the norm of all differences over the norm of b."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def gradients(trainer, batch, args, policy=None):
    """The gradient of each optimizer step that update makes, at fixed weights, and update's metrics."""
    policy = policy or trainer.load_policy(args, trained=True)
    recorder = Recorder(policy)
    metrics = trainer.update(policy, recorder, dict(batch), 1, args)  # which may add to it
    return recorder.gradients, metrics


def adamw(policy, lr=1e-3):
    return torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.01)


def state_of(optimizer):
    return flat(value for state in optimizer.state.values() for value in state.values())


def make_batch(model, seed=0):
    """A batch such as main hands to update: responses drawn from the model, long ones to prompts 0,
    2, 4, 6.

    old_logp and ref_logp lie some noise away from the model's own, so that ratios leave the clip
    range on both sides.
    """
    rng = torch.Generator().manual_seed(seed)
    args = arguments(model=str(model))
    policy = grpo.load_policy(args, trained=False)
    rows = []
    for prompt_id in range(PROMPTS):
        prompt_size, sizes = (30 + 7 * prompt_id, (8, 15, 11)) if prompt_id % 2 == 0 else (3 + prompt_id, (5, 1, 4))
        prompt = torch.randint(2, 600, (prompt_size,), generator=rng)
        for size in sizes:
            ids = prompt
            for _ in range(size):
                with torch.no_grad():
                    next_token = policy.lm(ids[None]).logits[0, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(next_token, 1, generator=rng)])
            rows.append((prompt_size, ids))
    ids = torch.zeros(len(rows), max(len(row) for _, row in rows), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt_size, row) in enumerate(rows):
        ids[i, : len(row)], mask[i, prompt_size : len(row)] = row, True
    batch = {"ids": ids, "mask": mask}
    logp, batch["entropy"] = grpo.log_probs(policy, batch, args)

    def near_logp(spread):
        return (logp + spread * torch.randn(ids.shape, generator=rng)).clamp(max=0) * mask

    batch |= {"sampler_logp": near_logp(0.01), "old_logp": near_logp(0.2), "ref_logp": near_logp(0.3)}
    batch["advantages"] = torch.randn(len(rows), 1, generator=rng) * mask
    batch["token"] = torch.arange(ids.numel()).view(ids.shape)  # a number for each token, to recognise it by
    return batch


def rows_of(rank, n_processes):
    """The rows of whole prompts that a process gets, as main shares them out: prompts [RANK::WORLD_SIZE]."""
    return torch.arange(N).view(PROMPTS, GROUP)[rank::n_processes].flatten()


def share(batch, rows):
    return {key: value[rows] for key, value in batch.items()}


def advantages_of(rewards, trainer=grpo, group=4, old_logp=None, **changes):
    """Advantages, in float64, of responses whose three positions are prompt, response, padding (or as in old_logp)."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.tensor([[False, True, False]]).repeat(len(rewards), 1)
    if old_logp is not None:
        mask = torch.ones(len(rewards), len(old_logp[0]), dtype=torch.bool)
        old_logp = torch.tensor(old_logp, dtype=torch.float64)
    else:
        old_logp = torch.zeros(mask.shape, dtype=torch.float64)
    args = arguments(trainer, responses_per_prompt=group, **changes)
    batch = {"mask": mask, "old_logp": old_logp, "ref_logp": old_logp}
    correct = rewards > 0 if rewards.dim() == 1 else None  # gdpo.py's are in parts
    return updates.with_advantages(trainer.__name__, batch, rewards, correct, args)["advantages"]


def padded(rows):
    """ids and mask of (prompt size, sequence) rows, padded on the right, with ids that are no padding token's."""
    longest = max(len(ids) for _, ids in rows)
    ids = torch.randint(2, 600, (len(rows), longest), generator=torch.Generator().manual_seed(5))
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for i, (prompt_size, row) in enumerate(rows):
        ids[i, : len(row)], mask[i, prompt_size : len(row)] = row, True
    return ids, mask


def tokens_of(batch, rows, low, eta=0.5):
    """By hand: the response tokens of these rows with π_old ≤ η (low) or > η."""
    triples = zip(*(batch[key][rows].flatten().tolist() for key in ("token", "mask", "old_logp")))
    return sorted(token for token, response, logp in triples if response and (math.exp(logp) <= eta) == low)


def sequences():
    """Sequences of many prompt and response sizes, the least (one and one token) among them."""
    rng = torch.Generator().manual_seed(4)
    sizes = [(1, 1), (1, 9), (9, 1), (30, 14), (17, 3), (5, 40)]
    return [(p, torch.randint(2, 600, (p + r,), generator=rng)) for p, r in sizes]


def batch_of(rows, old=-3.0):
    """A batch in float64 of (prompt tokens, the k1 of each response token, padding) rows. Outside the mask: garbage."""
    sizes = [prompt + len(k1) + padding for prompt, k1, padding in rows]
    assert len(set(sizes)) == 1
    mask = torch.zeros(len(rows), sizes[0], dtype=torch.bool)
    old_logp, ref_logp = (torch.full(mask.shape, x, dtype=torch.float64) for x in (50.0, -70.0))
    for i, (prompt, k1, _) in enumerate(rows):
        mask[i, prompt : prompt + len(k1)] = True
        old_logp[i, mask[i]] = old
        ref_logp[i, mask[i]] = old - torch.tensor(k1, dtype=torch.float64)
    return {"mask": mask, "old_logp": old_logp, "ref_logp": ref_logp}


def holds(statement, world):
    """Whether a statement of a knights-and-knaves puzzle is true in a world."""
    op, *parts = statement
    if op == "telling-truth":
        return world[parts[0]]
    if op == "lying":
        return not world[parts[0]]
    values = [holds(part, world) for part in parts]
    return {
        "not": lambda: not values[0],
        "and": lambda: all(values),
        "or": lambda: any(values),
        "->": lambda: values[1] or not values[0],
        "<=>": lambda: values[0] == values[1],
    }[op]()


def chat(question, answer):
    """A row of a file to learn from."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def settings_of_sft(**changes):
    fixed = {"people": "2-3", "careful": 0.5, "eval_size": 3, "max_prompt_tokens": 600, "max_response_tokens": 400}
    return sft.Args(**fixed | changes)


def compile_with(backend, monkeypatch):
    """Let --compile use this backend of torch.compile, for layers and for the head."""
    of_torch = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: of_torch(function, **how | {"backend": backend}))
