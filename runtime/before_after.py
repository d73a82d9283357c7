"""Show one test problem with its responses before and after training, side by side."""

import itertools

from rich.table import Table
from rich.text import Text

LONGEST = 1200  # characters of a prompt or response that are shown


def view(rows):
    """Return (which problem and why, rich's table) from rows of test_samples.jsonl, or None.

    None if there are too few rows. The problem is the first one that was wrong before and is right
    after, or the first one of all if there is none.
    """
    before, after, learned = pairs(rows)
    lost = [i for i in before if before[i]["correct"] and not after[i]["correct"]]
    if not before:
        return None
    chosen = learned[0] if learned else next(iter(before))
    text = f"{len(learned)} of {len(before)} kept test problems went from wrong to right, "
    text += f"{len(lost)} from right to wrong; this is problem {chosen}:"
    return text, side_by_side(before[chosen], after[chosen])


def pairs(rows):
    """Return (rows before by problem, rows after by problem, the problems that were learned).

    Compares step 0 with the last evaluation, over the problems that both have. All three are empty
    if there is only one evaluation. Learned: wrong before and right after.
    """
    last = max((row["step"] for row in rows), default=0)
    before = {row["id"]: row for row in rows if row["step"] == 0 < last}
    after = {row["id"]: row for row in rows if row["step"] == last and row["id"] in before}
    before = {number: row for number, row in before.items() if number in after}
    learned = [i for i in before if after[i]["correct"] and not before[i]["correct"]]
    return before, after, learned


def side_by_side(before, after):
    """Put the prompt on top, the two responses below it, and their scores at the bottom."""
    prompt = Text(shown(before["prompt"]))
    table = Table(title=prompt, title_justify="left", title_style="", expand=True)
    table.add_column("before training (step 0)", ratio=1)
    table.add_column(f"after step {after['step']}", ratio=1)
    told = [Text(shown(conversation(row))) for row in (before, after)]
    table.add_row(*told, end_section=True)
    table.add_row(score(before), score(after))
    return table


def conversation(row):
    """Return a row's response; for a conversation, all turns and the task's replies in between."""
    if not row.get("replies"):
        return row["response"]
    replies = [f"\n  → {reply}\n" for reply in row["replies"]]
    pairs = itertools.zip_longest(row["turns"], replies, fillvalue="")
    return "".join(turn + reply for turn, reply in pairs).strip("\n")


def shown(text):
    """Return the beginning of a text. Replaces characters that would control the terminal."""
    printable = "".join(sign if sign.isprintable() or sign == "\n" else "�" for sign in text)
    if len(printable) <= LONGEST:
        return printable
    return f"{printable[:LONGEST]}… ({len(printable) - LONGEST} more characters)"


def score(row):
    verdict = "right" if row["correct"] else "wrong"
    return f"{verdict}, reward {row['reward']:g}"
