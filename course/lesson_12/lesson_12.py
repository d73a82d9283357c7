"""Lesson 12: several turns. Write the four functions, then run `python -m course.check 12`.

N is the number of conversations, T the number of positions.
"""

import torch

from course.small_tokenizer import decode, encode


def conversation_row(prompt, turns, replies, before, after, length):
    """A conversation as tensors: (ids, mask), both [T]. T is length.

    prompt: a list of ids. turns, replies: lists of lists of ids, one reply fewer than turns. A turn
    has the end token that was sampled, a reply only the ids of its text. before, after: lists of
    ids, what the chat template puts before each reply's text (from the newline after the end token
    on), and behind it (up to where the next turn begins).

        ids   prompt, turn, before, reply, after, turn …, then zeros
        mask  of bool: True where the model wrote        (to_batch in grpo_multi_turn.py)

    Pay attention to the end tokens: the model wrote them, or the turn would not have ended.
    """
    raise NotImplementedError


def conversation_loss(logp, advantages, mask):
    """The loss of a mini-batch of conversations, one number.

    logp [N, T], carries the gradient; what it holds outside the mask must not matter. advantages
    [N], one for each conversation. mask [N, T], of bool: True where the model wrote.

        −1/Σ|o_i| · Σ_i Σ_t A_i · log π(o_it), t over the model's own tokens
            (has the gradient of policy_loss in grpo_multi_turn.py at its first update)

    Pay attention to the gaps: a reply lies between two turns, and is in no sum.
    """
    raise NotImplementedError


def first_wrong_tokens(conversations, pieces):
    """Where a trainer with the re-encoding bug first has another token than was sampled: [N].

    conversations: lists of ids, as they were sampled. pieces: the vocabulary. The trainer keeps the
    text alone, decode(ids, pieces), and encodes it again before the update. For each conversation
    the result is the first position, counted from 0, at which its ids differ; −1 if none does.

    Pay attention: the text is the same, and often the number of tokens, too.
    """
    raise NotImplementedError


def two_tools_rewards(calls, needs, bonus, cost):
    """The reward of each turn in a conversation with two tools: search(thing) and calculator.

    calls: a list with a string for each turn: the thing that was searched for, "calculator",
    "error" for a call that failed, or "" for a turn without a call. needs: a list of different
    strings: the things whose prices the question needs and, at its end, perhaps "calculator".

        bonus / |needs|   for a call that is in needs, and was not paid before
        −cost             for any other call: needless, repeated, failed
        0                 without a call       (parts per turn of rewards/facts.py)

    Searches may come in any order. The calculator is needed only after all searches in needs: until
    then the sum can't be known. Leave the arguments as they are.
    """
    raise NotImplementedError


# 12.5 (open)  How many of a real model's turns come back with other ids if they are decoded and
# encoded again? Sample e.g. 48 turns of SmolLM2 with transformers' `generate` (do_sample=True,
# temperature 1, top_k 0), on the calculator's prompts: rewards.calculator.load(None, "train",
# size=6) makes problems, and runtime.chats.encode(tokenizer, problem) the ids of a prompt. It takes
# minutes on a CPU. Cut off the EOS token first, or every turn differs. Report the number of turns
# with other ids, and how many of those have equal length. Does it matter for what is learned?
