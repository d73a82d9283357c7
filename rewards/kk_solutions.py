"""Write worked solutions of Knights & Knaves puzzles in words: sft.py and models/make_kk_tiny.py learn from them.

There are two kinds. A careful solution restates everyone's claim briefly, goes through the cases, judges the claims in
each case, and stops at the case in which all of them fit. Every sentence follows from the puzzle. A hasty one guesses,
with a meaningless reason. Both end in the papers' format. Most sentences have several wordings, so that many
tokens have a low probability but do not matter for the answer.

In the wordings "|" separates choices, more probable ones first: choice k has the weight (k + 1) ** -0.8. If possible,
the words are from the six families that AR-Lopti counts (Table 5): analysis, statement, causal indicator, conclusion
indicator, assumption, assertion.
"""

import itertools
import random
from random import Random

from rewards import kk

OPENINGS = "Let us|I will|We can|Now", "check|consider|examine|analyze|look at", "the|all|these", "cases|options"
CASE = "Assume ~.|Suppose ~.|If ~, then:|Say ~:|Imagine ~.|Next ~:|Take ~."
JOIN = ",| and| while| but"
CLAIMS = "~ says|~ claims|~'s statement is|~'s claim means|~ states|~'s remark is"
TRUTH = "so|thus|hence|must be|therefore"
CLASH = ": impossible|, a contradiction|: no|, which fails|: that cannot be"
FOUND = "So|Thus|Hence|Therefore|Consequently|As a result", "this is it|it must be this|that is definite|all fits"
GUESS = "Well|Hmm|I guess|I think|Maybe|Perhaps|Probably|My guess is:"
REASON = "since|because|given that|as", "statement|claim|remark|word", "sounds|looks|seems|is", "odd|fine|honest|clear"
REASON_END = ".|, I think.|, I guess.|, I feel."


DRAW, DRAWN_END = "\x01", "\x02"  # mark words that cannot be predicted; the model learns no marks


def unmark(text: str):
    """Return the text without marks, as the model learns it."""
    return text.replace(DRAW, "").replace(DRAWN_END, "")


def drawn(text: str):
    """Return the text with all of its words marked as unpredictable."""
    return DRAW + unmark(text) + DRAWN_END


def say(rng: Random, *slots, who=""):
    """Return a random wording of each slot, joined by blanks and marked, with `who` in place of "~"."""
    words = []
    for slot in slots:
        choices = slot.split("|")
        words += rng.choices(choices, [(k + 1) ** -0.8 for k in range(len(choices))])
    return drawn(" ".join(words)).replace("~", DRAWN_END + who + DRAW)


def say_roles(rng: Random, names, roles, foreseen=True):
    """List all people with their roles in a case: "Wei honest and Omar lying". foreseen: are the roles predictable?"""
    words = ["honest" if knight else "lying" for knight in roles]
    people = [f"{name} {word if foreseen else drawn(word)}" for name, word in zip(names, words)]
    return people[0] + "".join(f"{say(rng, JOIN)} {person}" for person in people[1:])


FORMS = {"and": "{} and {}", "or": "{} or {}", "->": "if {} then {}", "<=>": "{} iff {}"}


def shorten(statement, names, roles=None, inner=False):
    """Return the statement in short: "Omar knave or Wei knight".

    With the roles of a case, "Omar knave" becomes "Omar honest as knave (no)": Omar's role in this case, the claim
    about Omar, and whether it is true. Without the role, the model learns the truth only after a very long time. With
    "knight" instead of "honest", it confuses people's roles with the claims about them. Brackets are followed by their
    truth in this case.
    """
    op, *parts = statement
    negated = op == "not"
    if negated:
        ((op, *parts),) = parts  # a single person
    if op in ("telling-truth", "lying"):
        (person,) = parts
        claimed = f"{'not ' if negated else ''}{'knight' if op == 'telling-truth' else 'knave'}"
        if roles is None:
            return f"{names[person]} {claimed}"
        holds = roles[person] == ((op == "telling-truth") != negated)
        return f"{names[person]} {'honest' if roles[person] else 'lying'} as {claimed} {'(yes)' if holds else '(no)'}"
    text = FORMS[op].format(*(shorten(part, names, roles, inner=True) for part in parts))
    if not inner:
        return text
    return f"({text})" if roles is None else f"({text}) {'(yes)' if holds_in(statement, roles) else '(no)'}"


def holds_in(statement, roles) -> bool:
    """Return whether the statement is true in the case `roles`."""
    place = int("".join(str(int(role)) for role in roles), 2)  # the case's bit in kk's truth tables
    return bool(kk.table_of(statement, len(roles)) >> place & 1)


def restate(rng: Random, puzzle) -> str:
    """Return everyone's claim, in order, as text."""
    names = puzzle["names"]
    claims = zip(names, puzzle["statements"])
    return "".join(f" {say(rng, CLAIMS, who=name)} {shorten(claim, names)}." for name, claim in claims)


def judge(rng: Random, speaker, statement, names, roles, restated=False) -> tuple:
    """Return (sentence, fits): the statement's truth in this case, in words; whether the speaker can have said it.

    restated: the sentence repeats the speaker's role in this case, just before it says whether the two fit.
    """
    truth = holds_in(statement, roles)
    fits = truth == roles[speaker]
    text = f" {say(rng, CLAIMS, who=names[speaker])} {shorten(statement, names, roles)}, "
    text += f"{say(rng, TRUTH)} {'true' if truth else 'false'}"
    if restated:
        text += f", {names[speaker]} {'honest' if roles[speaker] else 'lying'}"
    return text + ("." if fits else say(rng, CLASH) + "."), fits


def careful_reasoning(rng: Random, puzzle, most_cases=None, told=True, restated=False) -> tuple:
    """Return (text, roles): a case analysis, and the roles that it finds.

    It goes through the assignments in ascending or descending order, from a random one on, and wraps around, until one
    agrees with all statements. Every sentence follows from the puzzle.
    most_cases: the solution is among this many first cases. told: the puzzle precedes the text, so everyone's claim
    can be predicted. restated: as in judge.
    """
    names, claims = puzzle["names"], restate(rng, puzzle)
    text = f" {say(rng, *OPENINGS)}.{claims if told else drawn(claims)}"
    cases = list(itertools.product([True, False], repeat=len(names)))[:: rng.choice([1, -1])]
    found = cases.index(kk.solve(puzzle["statements"])[0])
    start = found - rng.randrange(most_cases or len(cases))
    for number in range(len(cases)):
        roles = cases[(start + number) % len(cases)]
        text += " " + say(rng, CASE, who=say_roles(rng, names, roles, foreseen=number > 0))
        for speaker, statement in enumerate(puzzle["statements"]):
            sentence, fits = judge(rng, speaker, statement, names, roles, restated)
            text += sentence
            if not fits:
                break
        else:
            return f"{text} {say(rng, *FOUND)}.", roles
    raise ValueError("no case agrees with all statements")


def hasty_reasoning(rng: Random, puzzle) -> tuple:
    """Return (text, roles): a random guess with a meaningless reason."""
    names = puzzle["names"]
    roles = tuple(rng.random() < 0.5 for _ in names)
    why, its, looks, how = (say(rng, slot) for slot in REASON)
    text = f" {say(rng, GUESS)} {say_roles(rng, names, roles, foreseen=False)}, "
    return text + f"{why} {drawn(rng.choice(names))}'s {its} {looks} {how}{say(rng, REASON_END)}", roles


def solution(rng: Random, puzzle, careful, most_cases=None, told=True, restated=False) -> str:
    """Return the text after the prompt, which ends in <think>: reasoning, then the answer in the papers' format."""
    if careful:
        reasoning, roles = careful_reasoning(rng, puzzle, most_cases, told, restated)
    else:
        reasoning, roles = hasty_reasoning(rng, puzzle)
    people = enumerate(zip(puzzle["names"], roles), 1)
    answer = "\n".join(f"({i}) {name} is a {'knight' if knight else 'knave'}" for i, (name, knight) in people)
    return f"{reasoning}</think><answer> {answer}</answer>"


def retell(rng: Random, puzzle):
    """Return the same puzzle with different names and wordings."""
    names = rng.sample(kk.NAMES, len(puzzle["names"]))
    quiz = kk.tell(rng, names, puzzle["statements"])
    return kk.make_item(quiz, names, list(puzzle["answer"].values()), puzzle["statements"])


def worked(puzzle, careful, seed, restated=False):
    """Return a text to learn: the model's turn after the prompt, which ends in <think>. Equal seeds give equal texts.

    puzzle: from kk.load; careful: the fraction of careful solutions, from 0 to 1; restated: in these, as in judge.
    """
    rng = random.Random(f"{seed}/{puzzle['quiz']}")
    return unmark(solution(rng, puzzle, rng.random() < careful, restated=restated))
