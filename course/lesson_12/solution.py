"""Solutions of lesson 12: several turns. Run as a script, it prints the numbers of 12.5."""

import torch

from course.small_tokenizer import decode, encode


def conversation_row(prompt, turns, replies, before, after, length):
    ids = [*prompt]
    is_own = [False] * len(prompt)
    for i, turn in enumerate(turns):
        if i > 0:
            between = [*before, *replies[i - 1], *after]
            ids += between
            is_own += [False] * len(between)
        ids += turn
        is_own += [True] * len(turn)
    padding = length - len(ids)
    return torch.tensor(ids + [0] * padding), torch.tensor(is_own + [False] * padding)


def conversation_loss(logp, advantages, mask):
    return -(advantages[:, None] * logp)[mask].sum() / mask.sum()


def first_wrong_tokens(conversations, pieces):
    found = []
    for ids in conversations:
        again = encode(decode(ids, pieces), pieces)
        # Neither is the beginning of the other: both have the same text.
        differ = [i for i, (a, b) in enumerate(zip(ids, again)) if a != b]
        found.append(differ[0] if differ else -1)
    return torch.tensor(found)


def two_tools_rewards(calls, needs, bonus, cost):
    still_needed = [*needs]
    rewards = []
    for call in calls:
        is_too_early = call == "calculator" and len(still_needed) > 1
        if call in still_needed and not is_too_early:
            still_needed.remove(call)
            rewards.append(bonus / len(needs))
        else:
            rewards.append(-cost if call else 0.0)
    return torch.tensor(rewards)


# 12.5  How many turns of a real model come back with other ids?
#
# Run this file to count it for SmolLM2: 4 problems of the calculator and 4 games, 8 first turns
# each at temperature 1, at most 24 tokens. It takes minutes on a CPU; we have not kept the numbers.
# It does not count equal lengths: among turns with other ids, compare the two lists' lengths.
#
# A turn in its usual split comes back as it was, and the usual split is what the model was trained
# on. So expect other ids where low-probability tokens are drawn: at high temperatures, and at the
# beginning of a run. Low-probability tokens have the largest gradients (lesson 5).


def open_question():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rewards import calculator, guess
    from runtime import chats

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained("models/SmolLM2-135M-Instruct")
    policy = AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path, dtype=torch.float32)
    end = tokenizer.eos_token_id
    for name, task in (("calculator", calculator), ("guess", guess)):
        num_wrong = 0
        for problem in task.load(None, "train", size=4):
            prompt = torch.tensor([chats.encode(tokenizer, problem)] * 8)  # [8, prompt's tokens]
            ids = policy.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, max_new_tokens=24, pad_token_id=end,
            )  # fmt: skip
            for turn in ids[:, prompt.shape[1] :].tolist():
                own = turn[: turn.index(end)] if end in turn else turn
                text = tokenizer.decode(own)
                num_wrong += tokenizer.encode(text, add_special_tokens=False) != own
        print(f"{name}: {num_wrong} of 32")


if __name__ == "__main__":
    open_question()
