"""A step of your own: REINFORCE on kk_tiny, in plain torch and transformers. Write five functions.

    python -m course.check_step            compares a step of yours with one of reinforce.py
    python course/lesson_02/step.py        trains: eight steps

G responses to each problem, N together, T positions. Temperature 1 everywhere.
"""

import sys
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))
from rewards import kk
from runtime.chats import encode

MODEL = ROOT / "models" / "kk_tiny"
G, MOST_TOKENS, LR, LARGEST_NORM = 8, 160, 1e-4, 1.0


def sample(policy, tokenizer, problems):
    """G responses to each problem: ids [N, T], mask [N, T] (True on response tokens), texts [N].

    `encode(tokenizer, problem)` gives a prompt's ids, and `policy.generate` makes up to MOST_TOKENS
    more. It must draw from the whole vocabulary at temperature 1, which its defaults do not.
    Unless it is cut off, a response ends with `tokenizer.eos_token_id`: that token is in ids and
    mask, and none after it is in the mask. A text is the decoded response, no special tokens.

    A row is prompt, response, padding; the G responses to a problem follow each other. Prompts
    differ in length. One call of `generate` for all needs padding on the left and attention_mask,
    and the rows must be moved to the left afterwards. A call for each problem needs neither.
    """
    raise NotImplementedError


def log_probs(policy, ids, mask):
    """log π of each response token, given all before it: [N, T], 0 outside the mask.

    The logits at a position are of the next token. Padding on the right needs no attention_mask.
    """
    raise NotImplementedError


def advantages(rewards, mask):
    """[N, T]: a response's reward [N] minus the mean reward, on each of its tokens; 0 elsewhere."""
    raise NotImplementedError


def loss(logp, advantages, mask):
    """−1/Σ|o_i| · Σ_i Σ_t A_it · log π(o_it): a number that carries the gradient of logp."""
    raise NotImplementedError


def update(policy, optimizer, ids, mask, rewards):
    """One step of the optimizer, with a gradient of norm LARGEST_NORM at most. Returns the loss."""
    raise NotImplementedError


def main(steps=8):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.01)
    problems = kk.generate(12 * steps, "2", seed=0)
    for step in range(steps):
        of_step = problems[12 * step :][:12]
        ids, mask, texts = sample(policy, tokenizer, of_step)
        answers = [problem["answer"] for problem in of_step for _ in range(G)]
        rewards = torch.tensor([score["reward"] for score in kk.score_all(texts, answers)])
        value = update(policy, optimizer, ids, mask, rewards)
        length = mask.sum(1).float().mean()
        print(f"step {step + 1}: reward {rewards.mean():.2f}, length {length:.0f}, loss {value:.3f}")


if __name__ == "__main__":
    main()
