r"""Math problems: questions with known answers from files or the hub, and the reward function for a \boxed{answer}.

The prompt and the reward function are from AR-Lopti, Appendix C.1.2, "Math dataset". The reward is 1 if the answer is
right, otherwise 0, with no reward for the format. The library math-verify decides whether two answers are equal
(equality.py), in separate processes (workers.py).
"""

import random
import re
from functools import lru_cache
from itertools import chain
from pathlib import Path

from rewards.answers import UNWRAPPED, clean, number, trim, values
from rewards.rows import (
    chat_of,
    check_rows,
    check_split,
    check_text,
    files_of,
    hub_parts,
    is_chat,
    read_file,
    text_of,
    with_content,
)
from rewards.workers import ask

INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
HUB = {"train": "Open-Reasoner-Zero/orz_math_57k_collection", "test": "HuggingFaceH4/MATH-500"}
# How a response marks its answer if the question asks for it. \boxed{...} counts in any case.
MARKERS = {
    "####": re.compile(r"####\s*"),
    "answer:": re.compile(r"answer[\s*]*:[\s*]*", re.IGNORECASE),
    "<answer>": re.compile(r"<answer>\s*(?=[^<]*</answer>)"),
}
# 'after "####"' and "of the form Answer: $Answer" ask for one; the heading "#### Problem" and a last "Answer:" do not.
ASKS = re.compile(
    r"\b(?:after|following|form|format|as|(?:with)?in|inside|between|with|like|write|put|by|using|line)\b[^.?!]{0,60}?(####|answer:|<answer>)"
    r"\s*(?:[^\w\s]|\d|(?:x|n|the|your|final|answer|number|result)\b)",
    re.IGNORECASE,
)
MAX_EXTRA = 300  # an answer that exceeds the longest gold by more characters than this is wrong


# --------------------------------------------------------------------------------------------------------------------
# Scoring


def score(response, answer):
    """Score one response; for many, `score_all` is faster."""
    return score_all([response], [answer])[0]


def score_all(responses, answers) -> list:
    r"""Score responses, in order.

    In: `responses`, any texts; `answers`, per response a gold text or a list of them, any of which counts, or
    {"golds": such a list, "marker": one of MARKERS, which marks an answer, too}.
    Out: per response a dict with `reward` (1.0 or 0.0), `correct`, `format` (it has a complete \boxed{...} that is
    not empty) and `timed_out` (the comparison took too long, ended its process or exceeded the batch's limit; the
    reward is then 0).
    It compares the content of the last complete \boxed{...}, or the text behind the marker if that comes later, and
    never raises on any response.
    Time: the first call starts the workers (about 2 s). An answer that `glance` cannot decide takes a few milliseconds,
    and at most TIME_LIMIT if it is hostile. All together take at most BATCH_LIMIT plus BATCH_LIMIT_PER_ANSWER per
    answer, in processor time. Up to MAX_WORKERS processes share these answers. The limits are in workers.py.
    Errors: RuntimeError if the workers cannot start, for example without math-verify.
    """
    pairs = []  # per response: the content of its box, the golds
    for response, answer in zip(responses, answers, strict=True):
        marker = None
        if isinstance(answer, dict):
            answer, marker = answer["golds"], answer["marker"]
        golds = [answer] if isinstance(answer, str) else answer
        golds = tuple(map(clean_gold, golds))
        box = (answer_of(response, marker) or "").strip()
        text = box if is_too_long(box, golds) else clean(box)
        pairs.append((stated(text) if box in answer else text, golds))
    verdicts = {pair: glance(*pair) for pair in pairs}
    undecided = [pair for pair, verdict in verdicts.items() if verdict is None]
    verdicts.update(zip(undecided, ask(undecided)))
    return [
        {
            "reward": float(verdicts[pair] is True),
            "correct": verdicts[pair] is True,
            "format": pair[0] != "",  # not the empty box of a prompt with "\\boxed{}"
            "timed_out": verdicts[pair] is None,
        }
        for pair in pairs
    ]


def answer_of(response, marker):
    """Return the answer that a response states: its last box, or the line behind its last marker if that is later."""
    begins = [found.end() for found in MARKERS[marker].finditer(response)] if marker else []
    if not begins:
        return last_box(response)
    behind = response[begins[-1] :]
    return last_box(behind) or re.split(r"\n|</answer>", behind)[0].strip(" *") or last_box(response)


def last_box(text: str):
    r"""Return the content of the complete \boxed{...} that opens last, or None. It takes linear time.

    Of nested boxes it is the innermost one. Unfinished boxes and escaped braces don't count.
    """
    open_braces = []  # where each one's content begins, and whether it opens a box
    last = (-1, None)  # beginning and end of the content
    for token in re.finditer(r"\\boxed\s*+\{|\\.|[{}]", text, re.DOTALL):
        if token[0][-1] == "{" and token[0] != r"\{":
            open_braces.append((token.end(), len(token[0]) > 1))
        elif token[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and start > last[0]:
                last = (start, token.start())
    start, end = last
    return None if end is None else text[start:end]


@lru_cache(10000)
def clean_gold(gold):
    r"""Return `clean` of a gold; of a sentence, only the box, or the value in The answer is 2, counts."""
    return stated(clean(last_box(gold) if gold.count(r"\boxed") == 1 and last_box(gold) else gold))


VERB = r"\b(?:is|are|was|were|equals?|has|have|takes?|needs?|costs|gets?|gives?)\b"
AROUND = re.compile(r"^(?:so|thus|hence|therefore|then)\b,?\s+|\s+is the (?:final )?answer$", re.IGNORECASE)
STATEMENT = re.compile(rf"(.*[A-Za-z].*?)\s*(?:{VERB}|(?<=answer)(?=\s?:))[\s:]*(.+)", re.IGNORECASE)
UNSTATED = re.compile(r"\b(?:not|no|if|than|least|most|because)\b")  # The answer is not 2


def stated(text: str):
    """Return the value that a sentence states: 2 for The answer is 2. Other texts stay as they are."""
    sentence = UNWRAPPED.sub(r"\1", text)
    plain = AROUND.sub("", sentence)
    if len(re.findall(VERB, plain)) > 1 or UNSTATED.search(plain):
        return text
    found = STATEMENT.fullmatch(plain)
    if not found:
        return text if plain == sentence else trim(plain)
    is_value = "answer" in found[1].lower() or re.search(r"\d", found[2])
    return trim(found[2]) if is_value else text


def is_too_long(answer, golds):
    """Return whether the answer is so much longer than the golds that it is wrong, and not worth reading."""
    return len(answer) > max(map(len, golds)) + MAX_EXTRA


def glance(answer, golds):
    """Decide without the library: True or False, or None if undecidable. In: cleaned texts."""
    if not answer or is_too_long(answer, golds):
        return False
    if answer in golds:
        return True
    value, known = number(answer), [values(gold) for gold in golds]
    if value is not None and any(value in of_gold for of_gold in known):
        return True
    return None if value is None or not all(known) else False


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load(source, split: str, *, size=None, seed=0):
    """Return problems as training or test items.

    In:
    - `source`: a .parquet, .json or .jsonl file, a folder of such files, a hub id, or None (the data set in HUB). Each
      file in a folder serves the split in its name (see `rows.folder_files`).
    - `split`: "train" or "test".
    - `size`: how many problems (None: all). `seed` samples them; they keep the file's order.
    Rows have the form of verl (`prompt`, `reward_model.ground_truth`), of Open-Reasoner-Zero (a conversation of two, or
    `prompt` and `final_answer`), or the plain form (`problem` or `question`, and `answer` or `final_answer`).
    Out: a list of dicts with `messages` (the chat; its last turn ends in INSTRUCTION), `prefix` (empty), `answer` (a
    list of gold texts, any of which counts; see `score_all` if the question asks for a marker) and `category` (the
    file's name, or the row's data source if the file has several).
    Problems with unreadable golds (see `equality.readable`) are dropped, because a right answer to them looks wrong. A
    printed line counts them.
    Errors: ValueError if the arguments, the files or a row are invalid; it names file and row (counted from 1).
    """
    check_split(split, size)
    source = source or HUB[split]
    items = []
    for name, rows in read_source(source, split):
        items += items_of(name, rows)
    unreadable = unreadable_golds(items)
    kept = []
    lost = []
    for item in items:
        answer = [gold for gold in item["answer"] if clean_gold(gold) not in unreadable]
        if answer:
            kept.append(item | {"answer": answer})
        else:
            lost.append(item["answer"][0])
    if lost:
        print(f"{source}: {len(lost)} of {len(items)} problems left out: can't read their answers, such as {lost[:3]}")
    if not kept:
        raise ValueError(f"{source} has no problem with an answer that can be read")
    for item in kept:
        if marker := marker_of(item["messages"]):
            item["answer"] = {"golds": item["answer"], "marker": marker}
    if size is not None and size < len(kept):
        kept = [kept[i] for i in sorted(random.Random(seed).sample(range(len(kept)), size))]
    return kept


def marker_of(messages):
    """Return the last marker, one of MARKERS, that a chat asks for; None if it asks for none."""
    asked = [found[1] for turn in messages if turn["role"] != "assistant" for found in ASKS.finditer(turn["content"])]
    return asked[-1].lower() if asked else None


def unreadable_golds(items) -> set:
    """Return the golds, cleaned, that no rule can read."""
    golds = map(clean_gold, chain.from_iterable(item["answer"] for item in items))
    unknown = [gold for gold in dict.fromkeys(golds) if number(gold) is None]
    replies = ask([(gold, None) for gold in unknown])
    return {gold for gold, can_be_read in zip(unknown, replies) if not can_be_read}


def read_source(source, split: str) -> list:
    """Return [(name, rows)] of the file, each of the folder's files, or the hub data set. ValueError without any."""
    files = files_of(source, split)
    if files is None:
        return [read_hub(source, split)]
    return [(str(file), read_file(file)) for file in files]


def read_hub(name, split: str) -> tuple:
    """Return (name, rows) of the data set's part for the split, or of its only part."""
    parts = hub_parts(name)
    if split not in parts and len(parts) > 1:
        raise ValueError(f"{name} has no part called {split}; it has {', '.join(parts)}")
    part = split if split in parts else next(iter(parts))
    return name, check_rows(parts[part].to_list(), name)


def items_of(name, rows):
    """Return the rows of one file as items."""
    sources = {str(row["data_source"]) for row in rows if isinstance(row, dict) and "data_source" in row}
    items = []
    for i, row in enumerate(rows, 1):
        try:
            prompt, answer = fields(row)
            messages, golds = messages_of(prompt), golds_of(answer)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            why = str(error)
            if not isinstance(error, ValueError):
                has = f"it has {', '.join(row)}" if isinstance(row, dict) else f"it is {row!r}"
                why = f"{has}. {KINDS_OF_ROWS}"
            raise ValueError(f"{name}, row {i}: no problem and answer that can be used: {why}") from error
        for text in [message["content"] for message in messages] + golds:
            check_text(text, f"{name}, row {i}")
        source = row.get("data_source", name) if isinstance(row, dict) and len(sources) > 1 else name
        category = Path(str(source)).stem
        item = {"messages": messages, "prefix": "", "answer": golds, "category": category}
        items.append(item | ({"tools": row["tools"]} if isinstance(row, dict) and row.get("tools") else {}))
    return items


KINDS_OF_ROWS = (
    "A row has problem (or question) and answer, prompt and final_answer, or prompt and reward_model with ground_truth"
)


def fields(row) -> tuple:
    """Return (prompt, answer) of a row in any form that `load` knows. LookupError or TypeError if it has none."""
    if isinstance(row, list):  # a conversation; on the hub, columns 0 and 1
        row = {"0": row[0], "1": row[1]}
    if "0" in row:
        return [row["0"]], row["1"]["ground_truth"]["value"]
    if "reward_model" in row:
        return row["prompt"], row["reward_model"]["ground_truth"]
    asks = [name for name in ("prompt", "problem", "question") if name in row]
    if "final_answer" in row and asks:
        return row[asks[0]], row["final_answer"]
    return row["problem" if "problem" in row else "question"], row["answer"]


def messages_of(prompt):
    """Return the chat with the instruction, from a text or a chat (keys `role` and `content` or `from` and `value`)."""
    prompt = chat_of(prompt)
    if isinstance(prompt, list) and any(isinstance(part, str) for part in prompt):
        raise ValueError(f"the problem must be a text or a chat, not a list of texts: {prompt!r:.60}")
    if prompt and isinstance(prompt, (str, list)) and not is_chat(prompt, ("role", "from")):  # the text, or its parts
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"the problem must be a text or a chat, not {prompt!r:.60}")
    messages = []
    for turn in map(with_content, prompt):
        try:
            role, content = (turn["role"], turn["content"]) if "role" in turn else (turn["from"], turn["value"])
        except (LookupError, TypeError):
            raise ValueError(f"a turn must have role and content, or from and value; it is {turn!r:.60}") from None
        if not isinstance(role, str):
            raise ValueError(f"a turn's role must be a text, not {role!r:.60}")
        more = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append(more | {"role": "user" if role == "human" else role, "content": text_of(content)})
    last = messages[-1]
    if last["role"] != "user" or not last["content"].strip():
        raise ValueError("the problem is empty, or its last turn is not the user's")
    if INSTRUCTION not in last["content"]:
        last["content"] = f"{last['content'].rstrip()} {INSTRUCTION}"
    return messages


def golds_of(answer):
    """Return the list of gold texts from a text, a number or a list of those. From GSM8K's solutions: the last line."""
    golds = []
    for gold in answer if isinstance(answer, list) else [answer]:
        if isinstance(gold, float) and gold.is_integer():
            gold = int(gold)  # a column of numbers stores 142 as 142.0
        if isinstance(gold, bool) or not isinstance(gold, (str, int, float)) or gold != gold:
            raise ValueError(f"the answer must be a text, a number or a list of those, not {answer!r}")
        gold = str(gold)
        golds.append((re.findall(r"####\s*(\S.*)", gold) or [gold])[-1].strip())  # GSM8K: … #### 12
    if not golds:
        raise ValueError("the list of answers is empty")
    return golds
