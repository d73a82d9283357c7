r"""Whether two answers are equal as mathematics: math-verify, and what it overlooks.

math-verify reads LaTeX into SymPy and compares. It can loop or use up all memory on a short text such as 9^{9^{9^9}},
so `same` and `read` are called in worker processes alone (workers.py). SymPy takes a second to import, and a trainer
does without.
"""

import re
from fractions import Fraction
from functools import cache, lru_cache

# 12, -0.5, 1,234 and 1{,}234 and 1\,234, 8.7 \times 10^{8}, 3e-19
NUMBER = re.compile(
    r"([-+]?)\s*((?:\d++|\d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})++)?(?:\.\d*)?)"
    r"(?:(?:\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*|[eE])(?:([-+]?\d{1,3})|\{\s*([-+]?\d{1,3})\s*\}))?",
    re.ASCII,
)


def number(text):
    r"""The exact value of a number written in digits, as a Fraction, or None.

    math-verify treats 8.7 \times 10^8 and 870000000 as different numbers, and reads the e of 3e12 as Euler's number.
    """
    match = NUMBER.fullmatch(text)
    if match is None or match[2] in ("", ".") or len(text) > 1000:  # Python refuses to read 5,000 digits
        return None
    return Fraction(match[1] + re.sub(r"[^\d.]", "", match[2])) * Fraction(10) ** int(match[3] or match[4] or 0)


def same(answer, golds):
    """True if the answer equals one of the golds as mathematics. In: cleaned texts."""
    from sympy import Float

    mine = read(answer)
    for gold in golds:
        theirs = read(gold)
        if mine is None or theirs is None or differs_in_form(answer, gold, mine, theirs):
            continue
        if library().verify(theirs, mine, timeout_seconds=None):
            # verify rounds to six places, so it takes 1.6e-19 and 6.6e-34 for equal. Percentages are not checked again,
            # because 50% equals both 0.5 and 50.
            if "%" in answer + gold or (distance(mine, theirs) or 0) < 1e-3:
                return True
        elif mine.has(Float) or theirs.has(Float):  # verify misses equal products, such as 8.7 * 10^8 and 870000000
            apart = distance(mine, theirs)
            if apart is not None and apart < 1e-12:
                return True
    return False


def differs_in_form(answer, gold, mine, theirs):
    """True if the answer differs from the gold in what math-verify overlooks. In: cleaned texts, SymPy expressions."""
    unit = unit_of(answer)
    return (
        has_unequal_sides(answer, mine)
        or is_set_for_tuple(answer, gold, mine, theirs)
        or number_base(answer) not in ("10", number_base(gold))
        or (unit is not None and unit_of(gold) not in (None, unit))
    )


def has_unequal_sides(answer, mine):
    """True for 99 = 142 or x = 5 = 3, of which math-verify compares only the last side with the gold.

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
    r"""True for \{1, 2\} and (1, 2), of which only one has an order, or is an interval.

    The plain list 1, 2 also becomes a set in SymPy; as an answer it is right for both.
    """
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(of_other, FiniteSet):
        one, other, of_one, of_other = other, one, of_other, of_one
    braces = re.search(r"\\\{|\\lbrace", one) is not None
    return braces and isinstance(of_one, FiniteSet) and len(of_one) > 1 and isinstance(of_other, (Tuple, Interval))


def number_base(text):
    """The subscript of the text's last number, such as 8 for 57_8 and 57_{8}. Without one it is 10."""
    found = re.findall(r"\d\s*_\s*(?:\{([^{}]*)\}|(\w))", text.rsplit("=", 1)[-1])
    return "".join(found[-1]).strip() if found else "10"


SPELLINGS = {  # of units; those that are missing here are never compared
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "mg": "milligram", "g": "gram gm", "kg": "kilogram", "oz": "ounce", "lb": "pound", "ton": "tonne",
    "ml": "mL milliliter millilitre", "l": "L liter litre", "gal": "gallon",
    "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr",
    "cent": "", "dollar": "", "degree": "deg", "rad": "radian", "%": "percent", "am": "", "pm": "",
    "Hz": "hertz", "N": "newton", "J": "joule", "W": "watt", "V": "volt", "A": "ampere amp", "K": "kelvin",
}  # fmt: skip
UNITS = {name: unit for unit, names in SPELLINGS.items() for name in [unit, *names.split()]}
UNITS |= {"per": "/", "mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}


def unit_of(text):
    r"""The unit at the end of the text in one spelling, such as cm2 for 5\text{ square cm} and 5 cm^2, or None.

    math-verify drops units. So 5 km would equal 5 m.
    """
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", " degree", text.replace(r"\%", "%"))
    text = re.sub(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[,;:! ]|(?<=[A-Za-z])\.", lambda match: "" if match[0] == "." else " ", text)
    end = re.search(r"[\d\s)}\]](?=[A-Za-z%])([A-Za-z/%\s^{}\d]*)$", text)
    words = re.findall(r"[A-Za-z]+|[/%\d]", end[1]) if end else []
    if words and words[0] in POWERS:
        words = [*words[1:], POWERS[words[0]]]
    names = [UNITS.get(word) or UNITS.get(word.removesuffix("s")) or word for word in words]
    known = all(name in UNITS or not name.isalpha() for name in names)
    return "".join(names) if names and known else None


@cache
def library():
    r"""math-verify, with one change in how its parser reads factors that stand side by side.

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
def read(text):
    r"""The text as a SymPy expression, or None.

    It reads the content of the box as one LaTeX expression. If math-verify cannot read an answer, by default it
    searches for a part that it can read, such as the 9 in \neq 9. Here this search is off.
    """
    LatexExtractionConfig, parse = library().LatexExtractionConfig, library().parse
    if number(text) is not None:
        text = re.sub(r"(?<=[\d.])[eE](.*)", r" \\times 10^{\1}", text.replace(r"\,", ""))
    boxed = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    only = {"extraction_config": [boxed], "extraction_mode": "first_match", "fallback_mode": "no_fallback"}
    return next(iter(parse(rf"\boxed{{{text}}}", parsing_timeout=None, **only)), None)


def distance(a, b):
    """The distance of two SymPy numbers as a share of the larger one, or None if they aren't numbers."""
    try:
        a, b = complex(a.doit().evalf()), complex(b.doit().evalf())
    except (TypeError, ValueError, AttributeError):
        return None
    return abs(a - b) / (max(abs(a), abs(b)) or 1)
