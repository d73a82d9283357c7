r"""Decide whether two answers are mathematically equal: by answers.py if it can tell, otherwise by math-verify.

math-verify reads LaTeX into SymPy and compares. It can loop or use up all memory on a short text such as 9^{9^{9^9}},
so only worker processes call `same` and `readable` (workers.py). SymPy takes a second to import, and a trainer does
not need it.

Known holes: math-verify ignores the case of variables (n equals N) unless one text has both cases of a letter. A unit
on only one side is ignored, and so are words that are not known units (5 apples equals 5 pears).
"""

import math
import re
from dataclasses import replace
from functools import cache, lru_cache

from rewards.answers import (
    TEXT,
    UNWRAPPED,
    bare,
    clock,
    elements,
    folded,
    inside_brackets,
    is_noun,
    is_word,
    label,
    measure,
    number,
    quantity,
    ratio,
    same_time,
    values,
)

MAX_WORDS = 4  # words in a gold; a longer gold is a sentence


def same(answer, golds) -> bool:
    """Return whether the answer equals one of the golds mathematically. In: cleaned texts."""
    return any(equal(answer, gold) for gold in golds)


def equal(answer, gold):
    """Return whether the answer equals the gold. Each rule returns True or False, or None if it does not apply."""
    if answer == gold:
        return True
    for rule in RULES:
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    return equal_expressions(answer, gold)


def equal_times(answer, gold):
    r"""Compare clock times: 4:50 is not a ratio, except beside 14:76. For 7:38, \frac{7}{38} is also right."""
    one, other = clock(answer), clock(gold)
    if one and other:
        return same_time(one, other)
    time = answer if one else gold if other else ""
    if ":" not in time:
        return None
    parts = ratio(gold if one else answer)
    if parts and len(parts) == len(time.split(":")) and re.fullmatch(r"[\d:]+", time):
        return None  # equal_ratios compares them
    plain = (gold if one else answer).replace(" ", "")
    found = re.fullmatch(r"(\d+)(?::|/)(\d+)|\\[dt]?frac\{(\d+)\}\{(\d+)\}", plain)
    return found is not None and ":".join(filter(None, found.groups())) == time


def equal_ratios(answer, gold):
    """Compare ratios: 1:2:3 equals 2:4:6, and 1:2 equals 1/2, as math-verify reads it."""
    one, other = ratio(answer), ratio(gold)
    if one and other:
        pairs = zip(one, one[1:], other, other[1:])
        return len(one) == len(other) and all(equal_expressions(*fractions_of(*parts)) for parts in pairs)
    return False if len(one or other or []) > 2 else None


def fractions_of(a, b, c, d) -> tuple:
    return rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{c}}}{{{d}}}"


def equal_measures(answer, gold):
    """Compare amounts in several units or in different ones: 5 ft 6 in equals 66 in, and 25 cents equal $0.25."""
    one, other = measure(answer), measure(gold)
    if one is None or other is None or (one[1] == other[1] and len(one[1]) == 1):
        return None
    return one[0] == other[0] and equal(one[2], other[2])


def equal_lists(answer, gold):
    """Compare plain lists in any order, each element equally often; compare tuples in order.

    The commas of 120,150 may separate thousands or elements: any reading that makes the answer right counts.
    """
    if number(answer) is not None and number(gold) is not None:
        return None
    inside, of_gold = inside_brackets(answer), inside_brackets(gold)
    if inside and of_gold and inside[0] in ("(", "[") and inside[::2] == of_gold[::2]:
        return equal_tuples(inside[1], of_gold[1])
    if inside and of_gold and inside[0] == of_gold[0] == r"\{":
        return equal_sets(elements(inside[1]), elements(of_gold[1]))
    ways, of_gold_ways = list_readings(answer), list_readings(gold)
    for one in ways:
        for other in of_gold_ways:
            if len(one) == len(other) > 1 and equal_elements(list(one), list(other)):
                return True
    n, m = min(map(len, ways)), min(map(len, of_gold_ways))
    if n == m == 1:
        return None
    if n > 1 and m > 1:
        return False
    # One is a list, and the other is not a plain list: it is a tuple, a set, or a single value.
    single, parts, brackets = (answer, of_gold_ways[0], inside) if n == 1 else (gold, ways[0], of_gold)
    if brackets and len(elements(brackets[1])) > 1:
        return None if len(elements(brackets[1])) == len(parts) else False
    if n == 1 and re.search(r"(?<![A-Za-z])(?:or|OR)(?![A-Za-z])", gold) and all(equal(parts[0], x) for x in parts):
        return equal(answer, parts[0])  # 0.09 or 9/100
    return None if re.search(r"[,;]|\\cup", single) and number(single) is None else False


def list_readings(text: str) -> list:
    """Return the parts of a list in both readings: every comma separates, or some commas separate thousands."""
    return sorted({tuple(elements(text, thousands=thousands)) or (text,) for thousands in (False, True)}, key=len)


def equal_tuples(answer, gold):
    """Return whether the contents of two brackets are equal, element by element; None if neither has several."""
    for thousands in (False, True):
        one, other = elements(answer, thousands=thousands), elements(gold, thousands=thousands)
        if len(one) == len(other) == 1:
            return None
        if len(one) == len(other) and all(map(equal_parts, one, other)):
            return True
    return False


def equal_sets(answers, golds):
    """Return whether each element of either set is in the other; None if neither has several."""
    if len(answers) <= 1 and len(golds) <= 1:
        return None
    in_golds = all(any(equal_parts(one, gold) for gold in golds) for one in answers)
    return in_golds and all(any(equal_parts(one, gold) for one in answers) for gold in golds)


def equal_elements(answers, golds):
    """Return whether the lists have equal elements, each equally often. Empties both.

    Values belong to their names: 3 boys and 2 girls are not 2 boys and 3 girls. If only one list has names, and they
    differ, the order counts; letters in the answer alone (a = 3, b = 2) only number the values.
    """
    mine, theirs = names(answers), names(golds)
    if mine and theirs:
        return mine.keys() == theirs.keys() and all(equal(mine[name], theirs[name]) for name in theirs)
    if theirs and not any(label(one)[0] for one in answers):
        return all(map(equal, answers, theirs.values()))
    if mine and max(map(len, mine)) > 1 and not any(label(gold)[0] for gold in golds):
        return all(map(equal, mine.values(), golds))
    while golds:
        gold = golds.pop(0)
        ordered = sorted(answers, key=lambda one: one != gold)
        found = next((one for one in ordered if equal_parts(one, gold)), None)
        if found is None:
            return False
        answers.remove(found)
    return True


def names(parts):
    """Return {name: value} if each part of a list has a name of its own, otherwise None: 3 boys, 2 girls.

    The name is the last word, such as pens for red pens, or all words if last words are equal.
    """
    found = [label(part) for part in parts]
    for name_of in (lambda words: words[-1], " ".join):
        named = {name_of(words).split("_")[0]: value for words, value in found if words}
        if len(named) == len(parts) > 1:
            return named
    return None


def equal_parts(answer, gold):
    """Return whether two parts of lists are equal. 3 apples and 3 pears differ here, because a list may have both."""
    if not equal(answer, gold):
        return False
    if quantity(answer)[1] or quantity(gold)[1] or not bare(answer) or not bare(gold):
        return True
    return folded(bare(answer)) == folded(bare(gold)) or not is_word(bare(answer)) or not is_word(bare(gold))


def equal_words(answer, gold):
    """Compare words and names as texts (see `is_word` and `folded`)."""
    one, other = bare(answer), bare(gold)
    if one is None or other is None or not (is_word(one) or is_word(other)):
        return None
    if any(number(quantity(text)[0]) is not None for text in (answer, gold)):
        return None if one != other else True  # 12 pens
    return folded(one) == folded(other)


def equal_quantities(answer, gold):
    """Compare the units, then the values. A unit on only one side does not matter."""
    (one, unit), (other, unit_of_gold) = quantity(answer), quantity(gold)
    if unit and unit_of_gold and unit != unit_of_gold:
        return False
    if unit in ("%", "degree") and "=" in one:
        one = one.rsplit("=", 1)[-1].strip()  # 75% from 3/4 = 75%
    if "%" in (unit, unit_of_gold) and unit != unit_of_gold:
        return equal_percent(one, other, unit_of_gold == "%")
    if (one, other) != (answer, gold):
        return equal(one, other)
    value, golds = number(one), values(other)
    return value in golds if value is not None and golds else None


def equal_percent(answer, gold, of_gold):
    """Compare a percentage with a number: 50% equals 0.5 and 50; 0.5% only 0.005. of_gold: it is the percentage."""
    value, golds = number(answer), values(gold)
    if value is not None and golds:
        shares = [one / 100 if of_gold else one * 100 for one in golds]
        return value in shares or (abs(value) > 1 and value in golds)
    answer_share, gold_share = (answer, rf"\frac{{{gold}}}{{100}}") if of_gold else (rf"\frac{{{answer}}}{{100}}", gold)
    return equal_expressions(answer_share, gold_share) or (equal(answer, gold) and not is_share(gold))


def is_share(text: str):
    """Return whether a text is a number from -1 to 1."""
    try:
        return abs(complex(read(text).evalf())) <= 1
    except (TypeError, ValueError, AttributeError):
        return False


RULES = [equal_times, equal_ratios, equal_measures, equal_lists, equal_words, equal_quantities]


def readable(gold):
    """Return whether a right answer can equal the gold, because the gold is of a kind above. In: a cleaned text.

    Sentences, formulas with words in them, and texts that math-verify can't read are not readable.
    """
    brackets = inside_brackets(gold)
    parts = elements(brackets[1] if brackets else gold)
    if len(parts) > 1:
        return all(map(readable, parts))
    core, _ = quantity(gold)
    if number(core) is not None or clock(gold) or measure(gold) or core == r"\emptyset":
        return True
    words = bare(gold)
    if words is not None and is_word(words):
        return len(words.split()) <= MAX_WORDS and not re.search(r"\b\d+\b", words)
    if len(ratio(gold) or []) > 2:
        return all(map(readable, ratio(gold)))
    return not has_words(UNWRAPPED.sub("", core)) and read(core) is not None


def has_words(text: str) -> bool:
    """Return True for a formula with a word in it, such as 5 apples + 3."""
    runs = re.findall(r"(?<![\\A-Za-z_{])[a-z]{4,}", re.sub(r"\\(?:begin|end)\s?\{[^{}]*\}", "", text))
    return any(map(is_noun, runs))


# --------------------------------------------------------------------------------------------------------------------
# Expressions, by math-verify


def equal_expressions(answer, gold):
    """Return whether math-verify finds two expressions equal, and they don't differ in a way that it overlooks."""
    from sympy import Float

    mine, theirs = read(answer), read(gold)
    if mine is None or theirs is None or differs_in_form(answer, gold, mine, theirs):
        return False
    if library().verify(theirs, mine, timeout_seconds=None):
        apart = distance(mine, theirs)
        return apart is None or apart < 1e-3  # verify rounds to six places: to it, 1.6e-19 equals 6.6e-34
    # verify misses equal products, such as 8.7 * 10^8 and 870000000
    apart = distance(mine, theirs) if mine.has(Float) or theirs.has(Float) else None
    return apart is not None and apart < 1e-12


def differs_in_form(answer, gold, mine, theirs):
    """Return whether the answer differs in a way that math-verify overlooks. In: cleaned texts, SymPy expressions."""
    return (
        has_unequal_sides(answer, mine)
        or is_set_for_tuple(answer, gold, mine, theirs)
        or number_base(answer) not in ("10", number_base(gold))
    )


def has_unequal_sides(answer, mine) -> bool:
    """Return True for 99 = 142 or x = 5 = 3, of which math-verify compares only the last side with the gold.

    Sides may differ by rounding if one is a decimal. Percentages, degrees and number bases are not compared.
    """
    from sympy import Eq, Float

    if re.search(r"%|\\circ|\d\s*_", answer):
        return False
    for equation in mine.atoms(Eq):
        apart = distance(*equation.args)
        if apart is not None and apart > (0.05 if equation.has(Float) else 1e-9):
            return True
    return False


def is_set_for_tuple(one, other, of_one, of_other):
    r"""Return True for \{1, 2\} and (1, 2): only one of them has an order, or is an interval.

    The plain list 1, 2 also becomes a set in SymPy; as an answer it equals both.
    """
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(of_other, FiniteSet):
        one, other, of_one, of_other = other, one, of_other, of_one
    braces = re.search(r"\\\{|\\lbrace", one) is not None
    return braces and isinstance(of_one, FiniteSet) and len(of_one) > 1 and isinstance(of_other, (Tuple, Interval))


def number_base(text: str):
    """Return the subscript of the text's last number, such as 8 for 57_8 and 57_{8}. Without one it is 10."""
    found = re.findall(r"\d\s*_\s*(?:\{([^{}]*)\}|(\w))", UNWRAPPED.sub(r"\1", text.rsplit("=", 1)[-1]))
    return "".join(found[-1]).strip() if found else "10"


@cache
def library():
    r"""Return math-verify with one change in how its parser reads adjacent factors.

    To read the mixed number 3\frac{1}{2}, it adds any two such numbers, so 14\binom{9}{4}2 is 14 + 126 + 2. Here only
    a mixed number is a sum, and the rest a product. Two plain numbers, as in 14 2, raise ValueError.
    """
    import math_verify
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
    from sympy import Rational

    convert = _Latex2Sympy.convert_postfix_list

    def convert_side_by_side(self, factors, i=0):
        texts = [factor.getText() for factor in factors[i : i + 2]]
        if len(texts) == 2 and all(re.fullmatch(r"\{?[\d.,]+\}?", text) for text in texts):
            raise ValueError("two numbers side by side")
        value = convert(self, factors, i)
        is_mixed = re.fullmatch(r"-?[\d,]+\{?\\frac.*", "".join(texts)) and len(factors) == i + 2
        if len(texts) < 2 or not isinstance(value, Rational) or is_mixed:
            return value
        return self.mul_flat(self.convert_postfix(factors[i]), self.convert_postfix_list(factors, i + 1))

    _Latex2Sympy.convert_postfix_list = convert_side_by_side
    return math_verify


@lru_cache(10000)
def read(text: str):
    r"""Return the text as a SymPy expression, or None. In: a cleaned text without its unit.

    It reads the text as one LaTeX expression. By default, if math-verify cannot read an answer, it searches for a part
    that it can read, such as the 9 in \neq 9. Here this search is off. So is the removal of units, which takes the m of
    6m away, and of dots, which turns 0.3\ldots into 0.3.
    """
    math_verify = library()
    if r"\ldots" in text:
        return None
    text = re.sub(r"\^\s?(?:\{\s?\\circ\s?\}|\\circ(?![A-Za-z]))", "", text)
    if number(text) is not None:
        text = re.sub(r"(?<=[\d.])[eE](.*)", r" \\times 10^{\1}", text.replace(r"\,", ""))
    text = with_case(re.sub(r"(?<=\d)i(?![A-Za-z])", " i", text))  # math-verify recognises i after a blank
    boxed = math_verify.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    boxed = replace(boxed, normalization_config=replace(boxed.normalization_config, units=False))
    only = {"extraction_config": [boxed], "extraction_mode": "first_match", "fallback_mode": "no_fallback"}
    return next(iter(math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None, **only)), None)


def with_case(text: str):
    r"""Add an index to the R of \pi(R^2 - r^2), because math-verify would read both letters as r."""
    pieces = re.split(rf"({TEXT}\{{[^{{}}]*\}}|\\[A-Za-z]+|_\s?\{{[^{{}}]*\}}|_\s?\w)", text)
    letters = set("".join(pieces[::2]))
    both = "".join(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    if not both:
        return text
    pieces[::2] = [re.sub(f"[{both}]", r"\g<0>_{\g<0>}", piece) for piece in pieces[::2]]
    return re.sub(r"(_\{[A-Z]\})(_)", r"\2", "".join(pieces))


def distance(a, b):
    """Return the distance of two SymPy numbers relative to the larger one, or None if they aren't finite numbers."""
    try:
        a, b = complex(a.doit().evalf()), complex(b.doit().evalf())
    except (TypeError, ValueError, AttributeError):
        return None
    apart = abs(a - b) / (max(abs(a), abs(b)) or 1)
    return apart if math.isfinite(apart) else None
