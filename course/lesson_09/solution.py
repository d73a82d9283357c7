"""Solutions of lesson 9: reward hacking. Run as a script, it prints the numbers of 9.3."""

import torch


def closed_rewards(format, parsed, correct):
    was_read = format & parsed  # [N]
    answer = torch.where(was_read & correct, 2.0, torch.where(was_read, -1.5, -2.0))  # [N]
    return torch.where(format, 1.0, -1.0) + answer


def paid_wrongly(rewards, correct, full):
    paid = rewards >= full  # [N]
    return (paid & ~correct).sum() / paid.sum().clamp(min=1)


# 9.3  Which holes has kk.score, the papers' own rule, that the lesson's table lacks?
#
# For a puzzle of which the answer is that Ann is a knight and Ben is a knave:
#
#     Nobody knows. Suppose: 3.0, strict -1.0
#     Ben says that: 3.0, strict -1.0
#     both roles in the reasoning: 3.0, strict 3.0
#     the plain answer: 3.0, strict 3.0
#
# The rule searches the answer for "NAME is a knight" and "NAME is a knave", and counts these words.
# It never asks what stands around them. `strict` wants some reasoning, and one plain statement for
# each person and nothing else. It still accepts any reasoning, even one that says otherwise.
#
# kk_tiny does not fall into these holes. In 96 responses to 12 puzzles at temperature 1 the two
# rules differ
#
#     0 times
#
# because it never writes anything else between <answer> tags than a plain list. A hole matters only
# if the policy writes into it now and then: then its reward finds it. A larger model, or a longer
# run, writes more.

PLAIN = "(1) Ann is a knight\n(2) Ben is a knave"
TEXTS = {
    "Nobody knows. Suppose": ("hm</think><answer>Nobody knows. Suppose Ann is a knight, Ben is a knave.</answer>"),
    "Ben says that": ("hm</think><answer>Ben says that Ann is a knight. Ann says: Ben is a knave.</answer>"),
    "both roles in the reasoning": (f"Ann is a knight and a knave. I don't know.</think><answer>{PLAIN}</answer>"),
    "the plain answer": f"hm</think><answer>{PLAIN}</answer>",
}


def open_question():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rewards import kk
    from runtime.chats import encode

    answer = {"Ann": True, "Ben": False}
    for name, text in TEXTS.items():
        found, strict = kk.score(text, answer), kk.score(text, answer, strict=True)
        print(f"{name}: {found['reward']:.1f}, strict {strict['reward']:.1f}")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained("models/kk_tiny")
    policy = AutoModelForCausalLM.from_pretrained("models/kk_tiny", dtype=torch.float32)
    end = policy.generation_config.eos_token_id
    differ = 0
    for puzzle in kk.generate(12, "2-3", seed=0):
        prompt = torch.tensor([encode(tokenizer, puzzle)] * 8)  # [8, prompt's tokens]
        ids = policy.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, max_new_tokens=200, pad_token_id=end,
        )  # fmt: skip
        for text in tokenizer.batch_decode(ids[:, prompt.shape[1] :], skip_special_tokens=True):
            paid = kk.score(text, puzzle["answer"])["reward"]
            differ += paid != kk.score(text, puzzle["answer"], strict=True)["reward"]
    print(f"{differ} times")


if __name__ == "__main__":
    open_question()
