"""Solutions of lesson 12: several turns. Run as a script, it prints the numbers of 12.4."""

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
