"""A tokenizer small enough to follow by hand, for lesson 12: byte-pair encoding, as SmolLM2 and Qwen have it.

A vocabulary is a list of pieces of text, the single characters among them. A token's id is its place in the list.
"""

from itertools import pairwise


def decode(ids, pieces):
    """Return the text of some tokens."""
    return "".join(pieces[token] for token in ids)


def encode(text, pieces):
    """Return the ids of a text: start from characters, and merge the neighbours whose join comes first in pieces."""
    parts = list(text)
    while True:
        pairs = enumerate(pairwise(parts))
        joins = [(pieces.index(a + b), i) for i, (a, b) in pairs if a + b in pieces]
        if not joins:
            return [pieces.index(part) for part in parts]
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
