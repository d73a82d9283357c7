"""Share code between the puzzle generators: disjoint splits, and equally many puzzles of each kind."""

import hashlib
import random
import re

TEST_SHARE = 10  # one in ten belongs to the test split, for any seed


def digest(text: str):
    """Return the SHA-256 (hex)."""
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(digest) -> str:
    """Return the split of a puzzle, whatever the seed. digest: of the puzzle's identity."""
    return "test" if int(digest, 16) % TEST_SHARE == 0 else "train"


def parse_counts(text: str, name, examples, least, most) -> list:
    """Return the numbers in "3-7", "2,3" or "5" as a sorted list. ValueError if the text has a different form.

    name, examples: the setting's, for the error. least, most: the numbers' limits.
    """
    wrong = f"{name} must be like {examples}, from {least} to {most}, not {text!r}"
    counts = set()
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*([0-9])\s*(?:-\s*([0-9])\s*)?", part)
        if match is None:
            raise ValueError(wrong)
        first = int(match[1])
        last = int(match[2] or match[1])
        if not least <= first <= last <= most:
            raise ValueError(wrong)
        counts.update(range(first, last + 1))
    return sorted(counts)


def shares(n, kinds) -> list:
    """Return [(kind, how many of it)]: together n, equally many of each, or one more."""
    share, extra = divmod(n, len(kinds))
    return [(kind, share + (i < extra)) for i, kind in enumerate(kinds)]


def draw(by_kind, size, seed):
    """Return `size` of the puzzles (None: all), with alternating kinds: equally many of each, as far as possible.

    by_kind: {kind: its puzzles}. The seed decides which ones are dropped.
    """
    groups = {kind: list(puzzles) for kind, puzzles in by_kind.items()}
    if size is not None and size < sum(map(len, groups.values())):
        for kind, puzzles in groups.items():
            random.Random(f"subset {seed} {kind}").shuffle(puzzles)
    return take_turns(groups.values())[:size]


def take_turns(groups) -> list:
    """Merge several lists: the first element of each, then the second of each, and so on to the end of the longest."""
    groups = list(groups)
    longest = max(map(len, groups))
    return [group[i] for i in range(longest) for group in groups if i < len(group)]
