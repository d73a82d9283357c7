r"""Read a mathematical answer without a library: clean it, and recognise numbers, clock times, units, words and lists.

Answers and golds are texts, mostly LaTeX, but people and data sets also write Unicode, program code and plain words.
`clean` brings them into one notation. All other functions take cleaned texts.
"""

import re
import struct
from fractions import Fraction

from rewards.notation import latex

# --------------------------------------------------------------------------------------------------------------------
# Cleaning

BLANK = r"(?:\s|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
STYLES = (
    "boxed fbox boldsymbol mathbf mathtt texttt bm bf underline displaystyle textstyle large Large LARGE huge Huge "
    "left right big Big bigl bigr Bigl Bigr bigg Bigg biggl biggr Biggl Biggr mathstrut"
).replace(" ", "|")
TEXT = r"\\(?:text|textrm|textnormal|textit|textbf|textsf|emph|mathrm|mathsf|mathit|operatorname|mbox|hbox)\s*"
UNWRAPPED = re.compile(TEXT + r"\{([^{}]*)\}")
MINUTES = r"(?:'|\^\s?(?:\\prime|\{\s?\\prime\s?\}))(?!')"  # of an angle; also feet
SECONDS = r"(?:''|\"|\^\s?\{\s?\\prime\s?\\prime\s?\})"  # also inches
DOTS = r"(?:\\(?:ldots|dots|cdots|dotsc|dotsb)(?![A-Za-z])|\.{3,})"


def clean(text: str):
    r"""Return the answer in LaTeX without meaningless parts: math mode, boxes, fonts, outer blanks, a full stop.

    Unicode (x², 3½, 60°) and code (2*pi, sqrt(3), x**2) become LaTeX; recurring decimals (0.\overline{3}) and mixed
    numbers (11 5/6) become fractions. \$ stays, because it is a unit.
    """
    if text.isascii() and text.isdigit():
        return text
    text = re.sub(r"\s+", " ", latex(text)).replace("~", " ")
    text = re.sub(r",\\!\s?(?=\d{3}(?!\d))", "{,}", text).replace(r"\!", "")
    text = re.sub(r"\\\(|\\\)|\\\[(?!\d*\.?\d*(?:ex|em|pt|cm|mm)\])|(?<!\\)\\\]", "", text)
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        text = re.sub(r"(?<!\\)\$(?=-?\s?[\d.])", r"\\$", text, count=1)  # a dollar, not math mode
    text = re.sub(r"(?<!\\)\$", "", text)
    text = re.sub(rf"{TEXT}\{{\s?(\\\$|Rs\.?|USD|[:,;])\s?\}}|\{{(:)\}}", r"\1\2", text).replace(r"\textdollar", r"\$")
    text = re.sub(r"\\(?:color|textcolor|colorbox)\s?\{[^{}]*\}", "", text)
    text = re.sub(
        r"\\(?:newline|linebreak|(?:black)?square|qed|(?:hspace|[hv]?phantom)\s?\{[^{}]*\})(?![A-Za-z])", " ", text
    )
    text = re.sub(rf"\\(?:{STYLES})(?![A-Za-z])(?!\s?\.)", "", text)
    text = re.sub(r"\\degree(?![A-Za-z])", r"^\\circ", text)
    text = re.sub(r"\\([lgn])eq(?:slant)?(?![A-Za-z])", r"\\\1e", text)
    text = re.sub(r"\\(?:mathrm|rm|operatorname)(?:\s([eid])(?![A-Za-z])|\s?\{([eid])\})", r"\1\2", text)
    text = re.sub(r"(\\sqrt\s?\[[^\[\]]*\])\s?(\w)", r"\1{\2}", text)
    text = re.sub(r"\\varnothing(?![A-Za-z])|\\\{\s?\\\}|\b(?:[Tt]he )?[Ee]mpty set\b", r"\\emptyset ", text)
    text = re.sub(rf"({TEXT}\{{[^{{}}]*[^\s{{}}])(\s(?:and|or)\s?\}})", r"\1}\\text{\2", text)  # \text{ boys and }
    text = re.sub(rf"^(\d+)\s?{MINUTES}\s?([\d.]+)\s?{SECONDS}$", r"\1 ft \2 in", text)
    text = re.sub(rf"(\d)\s?\^\s?\{{?\s?\\circ\s?\}}?\s?(\d+)\s?{MINUTES}", r"\1 degrees \2 arcmin ", text)
    text = re.sub(rf"(arcmin\s+[\d.]+)\s?{SECONDS}", r"\1 arcsec", text)
    text = trim(text)
    text = re.sub(rf"(-?\d*\.\d+)\s?{DOTS}", unfold, text)
    text = re.sub(DOTS, r"\\ldots ", text)
    text = re.sub(r"(\d{0,99})\.(\d{0,99})(?:\\(?:overline|bar)\s?(?:\{(\d{1,99})\}|(\d)))", recurring, text)
    text = re.sub(r"(\d{0,99})\.()\((\d{1,99})\)", recurring, text)
    text = re.sub(r"(\d{0,99})\.(\d{0,99})\\dot\s?\{?(\d)\}?(?:(\d{0,99})\\dot\s?\{?(\d)\}?)?", recurring, text)
    text = re.sub(rf"(?<=\d)\s?\^?\s?\{{?\s?(?:{TEXT}\{{\s?)?(?:st|nd|rd|th)\s?\}}*$", "", text)
    text = re.sub(r"(?<=\d)\s?(?:\^\s?\{?(?:\s?\\prime)+\s?\}?|'+|\")$", "", text)
    return trim(mixed_numbers(code_as_latex(text)))


def trim(text: str):
    r"""Strip blanks, line breaks, braces, one \text{...}, bold marks and a final full stop or comma from the text."""
    for _ in range(5):  # layers; hostile texts may have many
        before = text
        text = re.sub(rf"^{BLANK}+|(?:{BLANK}|\\\\|[,;])+\\?$", "", text)
        text = re.sub(r"^(\*\*?|__|`+)(.+)\1$", r"\2", text)
        text = re.sub(rf"^{TEXT}\{{([^{{}}]*)\}}$", r"\1", text)
        if text.endswith(".") and not re.search(r"\\(?:right|left)\s?\.$|\.{3}$", text):
            text = text[:-1]
        if text[:1] == "{" and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            break
    return text


def closing(text: str, start):
    """Return the position where the bracket opened at `start` closes, or None."""
    depth = 0
    for token in re.finditer(r"\\[A-Za-z]+|\\?[()\[\]{}]|\\.", text[start:]):
        depth += (token[0][-1] in "([{") - (token[0][-1] in ")]}")
        if depth == 0:
            return start + token.start()
    return None


def unfold(match):
    r"""Write 0.333\ldots as 0.\overline{3} if its digits repeat; otherwise the continuation is unknown."""
    head, _, digits = match[1].partition(".")
    if len(digits) > 60:
        return match[0]
    found = re.fullmatch(r"(\d*?)(?:(\d)\2{2,}|(\d{2,}?)\3+)", digits)
    return rf"{head}.{found[1]}\overline{{{found[2] or found[3]}}}" if found else match[0]


def recurring(match) -> str:
    r"""Write 0.1\overline{6} and 0.1\dot{6} as \frac{15}{90}."""
    whole, fixed, *parts = (group or "" for group in match.groups())
    period = "".join(parts)
    below = 10 ** len(fixed) * (10 ** len(period) - 1)
    above = int(whole + fixed + period) - int(whole + fixed or "0")
    return rf"\frac{{{above}}}{{{below}}}"


def mixed_numbers(text: str):
    r"""Write 11 5/6 as 11\frac{5}{6}: only a blank may separate the two, and the fraction is below 1."""

    def mixed(match):
        proper = int(match[2]) < int(match[3])
        return rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}" if proper else match[0]

    return re.sub(rf"(?<![\w.,/^}}\\])(\d{{1,9}}){BLANK}+(\d{{1,9}})\s?/\s?(\d{{1,9}})(?![\d/^(])", mixed, text)


# Functions and names in code, and their LaTeX. LaTeX has a command for each of the first kind.
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth ln log".split()
CALLS = {"sqrt": r"\sqrt{%s}", "cbrt": r"\sqrt[3]{%s}", "exp": "e^{%s}", "abs": "|%s|", "Abs": "|%s|"}
CALLS |= {"floor": r"\lfloor %s\rfloor ", "ceil": r"\lceil %s\rceil ", "ceiling": r"\lceil %s\rceil "}
ROOT = re.compile(r"(?<![\\A-Za-z])(sqrt|cbrt)\s?(?:(\d+(?:\.\d+)?|[A-Za-z])(?![\w^.(])|(?=[{[]))")
NAMES = {name: "\\" + name for name in "pi theta alpha beta gamma delta lambda mu rho sigma phi omega infty".split()}
NAMES |= {"Pi": r"\pi", "infinity": r"\infty", "Infinity": r"\infty", "inf": r"\infty", "oo": r"\infty"}
NAMES |= {"a" + name: r"\arc" + name for name in ("sin", "cos", "tan")} | {name: "\\" + name for name in FUNCTIONS}
ARGUMENT = re.compile(r"\s?[\^(\\\w]")
SIGNS = {"**": "^", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "*": r"\cdot "}


def code_as_latex(text: str):
    r"""Write 2*pi, ln(2), x**(1/2) and exp(16) as 2\cdot \pi , \ln (2), x^{1/2} and e^{16}. Words stay."""
    text = ROOT.sub(lambda root: CALLS[root[1]] % root[2] if root[2] else CALLS[root[1]].removesuffix("{%s}"), text)
    runs = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", UNWRAPPED.sub("", text))
    if re.fullmatch(r"[\w\s'-]*", text) and any(run not in NAMES and run not in CALLS for run in runs):
        return text
    text = re.sub(r"\*\*|[<>!]=|(?<!\^)(?<!\^\{)\*", lambda sign: SIGNS[sign[0]], text)
    text = re.sub(r"\^\s?(-\s?(?:\d+|[A-Za-z](?![A-Za-z])))", r"^{\1}", text)
    for name in re.findall(r"(?<![A-Za-z_])\\?(sqrt|cbrt|exp|[aA]bs|floor|ceil(?:ing)?)(?=\s?\()", text):
        text = call_as_latex(text, name)
    for start in reversed([match.end() - 1 for match in re.finditer(r"\^\s?\(", text)]):
        end = closing(text, start)
        if end is not None:
            text = f"{text[:start]}{{{text[start + 1 : end]}}}{text[end + 1 :]}"

    def named(match):
        name, rest = match[0], text[match.end() :]
        needs_argument = name.removeprefix("a") in FUNCTIONS
        return NAMES[name] + " " if name in NAMES and (not needs_argument or ARGUMENT.match(rest)) else name

    return re.sub(rf"{TEXT}\{{[^{{}}]*\}}|\\[A-Za-z]+|_\s?\{{?[A-Za-z]+|[A-Za-z]+", named, text)


def call_as_latex(text: str, name):
    """Return the text with the first call of the function, such as sqrt(x+1), in LaTeX."""
    match = re.search(rf"\\?(?<![A-Za-z]){name}\s?\(", text)
    end = closing(text, match.end() - 1) if match else None
    if end is None:
        return text
    return text[: match.start()] + CALLS[name] % text[match.end() : end] + text[end + 1 :]


# --------------------------------------------------------------------------------------------------------------------
# Numbers

# 12, -0.5, 1,234 and 1{,}234 and 1\,234, 8.7 \times 10^{8}, 3e-19, \$5
NUMBER = re.compile(
    r"([-+]?)\s*(?:\\\$)?([-+]?)\s*((?:\d++|\d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})++)?(?:\.\d*)?)"
    r"(?:(?:\s*(?:\\times|\\cdot|×|\*)\s*10\s*\^\s*|[eE])(?:([-+]?\d{1,3})|\{\s*([-+]?\d{1,3})\s*\}))?",
    re.ASCII,
)


def number(text: str):
    r"""Return the exact value of a number written in digits, as a Fraction, or None.

    math-verify treats 8.7 \times 10^8 and 870000000 as different numbers, and reads the e of 3e12 as Euler's number.
    """
    match = NUMBER.fullmatch(text)
    if match is None or match[3] in ("", ".") or (match[1] and match[2]) or len(text) > 1000:
        return None  # Python refuses to read 5,000 digits
    digits = Fraction((match[1] or match[2]) + re.sub(r"[^\d.]", "", match[3]))
    return digits * Fraction(10) ** int(match[4] or match[5] or 0)


def values(gold) -> list:
    """Return the values of a gold in digits: its own, and any without float noise (0.30000000000000004: also 0.3)."""
    value = number(gold)
    return [] if value is None else [value, *without_noise(gold, value)]


def without_noise(gold, value) -> list:
    """Return short decimals that a computer turned into this one: a 32-bit float, or a 64-bit float's last digits."""
    num_digits = significant_digits(gold)
    as_float = float(value) if abs(value) < 1e30 else 0.0
    apart = abs(Fraction(as_float) - value)
    if value.denominator == 1 or num_digits < 9 or apart > (abs(value) / 2**53 if num_digits <= 17 else 0):
        return []
    found = [f"{as_float:.15g}"] if num_digits >= 16 else []
    if as_float32(as_float) == as_float:
        found.append(next(text for n in range(1, 18) if as_float32(float(text := f"{as_float:.{n}g}")) == as_float))
    return [Fraction(text) for text in found if significant_digits(text) <= 12]


def significant_digits(text: str) -> int:
    return len(re.sub(r"[eE\\].*|\D", "", text.replace(r"\$", "")).strip("0"))


def as_float32(value):
    """Return the nearest 32-bit float."""
    return struct.unpack("f", struct.pack("f", value))[0]


# --------------------------------------------------------------------------------------------------------------------
# Units

SPELLINGS = {  # spellings of units; others are never compared. Case counts if a name is written as here.
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "nm": "nanometer nanometre", "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "mg": "milligram", "g": "gram gm", "kg": "kilogram", "oz": "ounce", "lb": "pound", "ton": "tonne",
    "ml": "mL milliliter millilitre", "cl": "cL", "dl": "dL", "l": "L liter litre", "gal": "gallon",
    "ms": "millisecond", "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "wk", "month": "",
    "year": "yr", "decade": "", "century": "centuries",
    "cent": "¢", "dollar": "$ USD usd buck", "euro": "€ EUR", "poundsterling": "£ GBP", "yen": "¥ JPY",
    "rupee": "₹ INR Rs", "degree": "deg", "degreecelsius": "", "degreefahrenheit": "", "rad": "radian",
    "arcmin": "arcminute", "arcsec": "arcsecond",
    "%": "percent percentage pct", "am": "", "pm": "", "acre": "", "ha": "hectare",
    "mHz": "millihertz", "Hz": "hertz", "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz",
    "N": "newton", "kN": "kilonewton", "J": "joule", "kJ": "kilojoule", "MJ": "megajoule",
    "mW": "milliwatt", "W": "watt", "kW": "kilowatt", "MW": "megawatt", "kWh": "",
    "mV": "millivolt", "V": "volt", "kV": "kilovolt", "mA": "milliampere", "A": "ampere amp", "K": "kelvin",
    "Pa": "pascal", "kPa": "kilopascal", "atm": "atmosphere", "mol": "mole",
    "eV": "", "keV": "", "MeV": "", "GeV": "", "erg": "", "cal": "calorie", "kcal": "kilocalorie", "bit": "",
    "kB": "KB kilobyte", "MB": "megabyte", "GB": "gigabyte",
}  # fmt: skip
UNITS = {name: unit for unit, names in SPELLINGS.items() for name in [unit, *names.split()]}
UNITS |= {"per": "/", "mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "celsius": "celsius"}
UNITS |= {"fahrenheit": "fahrenheit", "o'clock": "oclock", "squared": "2", "cubed": "3"}
SHORT_POWER = re.compile(r"(?<![A-Za-z])([sS]q|[cC]u)(?:\.\s?|(?=(?:[mck]?m|in|ft|yd|mi)(?![A-Za-z])))")  # sq. ft, sqft
POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
MULTIPLIERS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words that are not units: with one of them behind a number, the text is not a quantity.
NO_UNITS = set(
    "and or not no nor is isn't are if to than then but minus plus times over between wrong false incorrect never "
    "maybe unless because since where when".split()
)

OPERATORS = "times|cdot|div|pm|mp|le|ge|ne|lt|gt|approx|neg|to|in|not|sim|cup|cap"
POWER = r"(?:\s?\^\s?(?:\{\s?\(?(?P<power>-?\d)\)?\s?\}|(?P<power2>-?\d)))?"
LAST_WORD = re.compile(
    rf"(?P<gap>(?:{BLANK}|/|\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\()*)"
    rf"(?:(?P<wrapped>{TEXT}\{{(?P<inside>[^{{}}]*)\}})|(?<![\\A-Za-z^_{{])(?P<bare>[A-Za-z][A-Za-z.'-]*|[€£¥₹¢])"
    rf"|(?P<sign>\\?%|\\\$)|\^\s?\{{?\s?\\circ\s?\}}?\s?(?P<degree>[CF]?|{TEXT}\{{\s?(?P<scale>[CF])\s?\}}))"
    rf"{POWER}\)?$"
)


def quantity(text: str) -> tuple:
    r"""Return (the text without its unit, the unit in one spelling): ("5", "cm2") for 5\text{ square cm} and 5 cm^2.

    The unit is None if there is none, or if a word of it is missing in UNITS: 12 pens is ("12", None). A million
    multiplies. Bare words count as a unit only after a plain number, and single letters only after a blank: 6m is an
    expression.
    """
    text = SHORT_POWER.sub(r"\1 ", text)
    text = re.sub(rf"\\[dtc]?frac\s?\{{{UNWRAPPED.pattern}\}}\s?\{{{UNWRAPPED.pattern}\}}$", r"\\text{\1/\2}", text)
    currency = re.match(r"([-+]?)\s?(\\\$|[€£¥₹¢]|(?:Rs|USD|EUR|GBP|INR)(?=[.\s\d]))\.?\s?([-+]?)", text)
    head = currency[1] + currency[3] + text[currency.end() :] if currency else text
    head, words, is_bare = without_words(head)
    is_cut = re.search(rf"(?:[-+=/^_(,;:]|\\(?:{OPERATORS}))$", head) is not None
    if not head or is_cut or NO_UNITS & set(map(str.lower, words)) or (is_bare and not is_plain(head, words)):
        return text, None
    while words and words[0].lower() in MULTIPLIERS:
        head = times(head, MULTIPLIERS[words.pop(0).lower()])
    return head, unit_name(([currency[2].lstrip("\\")] if currency else []) + words)


def without_words(text: str) -> tuple:
    r"""Return (the text without its last words, these words, whether one is bare, i.e. without a \text around it)."""
    words, is_bare = [], False
    while (last := LAST_WORD.search(text)) and last.start() > 0:
        if last["bare"] and not is_unit(last, text):
            break
        is_bare = is_bare or bool(last["bare"])
        words = ["/"] * ("/" in last["gap"]) + words_of(last) + words
        text = text[: last.start()]
    return trim(text), words, is_bare


def is_plain(head, words) -> bool:
    """Return whether bare words can be the unit of the text before them: no letters, and no division such as 3/m."""
    letters = re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+|\{,\}", "", head))
    return letters is None and not (words[0] == "/" and len(words[1]) == 1)


def times(text: str, factor) -> str:
    """Multiply a number or an expression by a whole number."""
    value = number(text)
    if value is None:
        return rf"({text}) \cdot {factor}"
    value *= factor
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def is_unit(last, head):
    """Return whether a bare word at a text's end can be a unit: a name in UNITS, or a noun (see `is_noun`)."""
    word, before = last["bare"], head[: last.start() + len(last["gap"])]
    if len(word) == 1 and word.isascii():
        return word in UNITS and last["gap"] not in ("", "(")
    known = spelled(word) is not None or word.lower() in MULTIPLIERS or word.lower() in POWERS
    return known or (not before[-1].isdigit() and is_noun(word))


def is_noun(word):
    """Return True for a word of a language; False for letters that may be factors, such as abc, kx, mgh and xyz."""
    letters = word.lower().replace("-", "")
    is_alphabet = list(letters) == sorted(set(letters))
    return len(letters) > 2 and not is_alphabet and re.search("[aeiou]", letters) is not None


def words_of(last):
    """Return the words of a match of LAST_WORD, and its power."""
    words = re.findall(r"[A-Za-z][A-Za-z.']*|[/%\d€£¥₹¢]", last["inside"] or last["bare"] or "")
    if last["sign"]:
        words = [last["sign"].lstrip("\\")]
    elif last["degree"] is not None:
        scale = {"C": ["celsius"], "F": ["fahrenheit"]}
        words = ["degree", *scale.get(last["scale"] or last["degree"], [])]
    power = last.group("power") or last.group("power2")
    return words + [power] * (power not in (None, "1"))


def unit_name(words):
    """Return the unit in one spelling, or None."""
    if words and words[0].lower() in POWERS:
        words = [*words[1:], POWERS[words[0].lower()]]
    names = []
    for word in words:
        is_letter = len(word) == 1 and word.isalpha() and "/" in words  # 3 M/S
        names.append(spelled(word) or (UNITS.get(word.lower()) if is_letter else None if word[-1].isalpha() else word))
    if names[:2] == ["/", "cent"] or "%" in names:
        return "%"  # also for percentage points
    return "".join(names) if names and None not in names else None


def spelled(word):
    """Return the unit's name for a word, or None. Case may differ in words longer than a letter: KM and Hours."""
    word = word.replace(".", "")
    for name in (word, word.lower()) if len(word) > 1 else (word,):
        unit = UNITS.get(name) or (UNITS.get(name.removesuffix("s")) if len(name) > 2 else None)
        if unit:
            return unit
    return None


SCALES = [  # units that are converted into each other: how many of the smallest one each is
    {"nm": 1, "mm": 10**6, "cm": 10**7, "m": 10**9, "km": 10**12}, {"in": 1, "ft": 12, "yd": 36, "mi": 63360},
    {"mg": 1, "g": 10**3, "kg": 10**6}, {"oz": 1, "lb": 16}, {"ml": 1, "cl": 10, "dl": 100, "l": 1000},
    {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "day": 86_400_000, "week": 604_800_000},
    {"month": 1, "year": 12, "decade": 120, "century": 1200}, {"cent": 1, "dollar": 100},
    {"arcsec": 1, "arcmin": 60, "degree": 3600},
]  # fmt: skip
SCALE = {unit: (kind, factor) for kind, scale in enumerate(SCALES) for unit, factor in scale.items()}
BETWEEN = re.compile(  # where 5 ft and 6 in, or 5 ft 6 in, is cut
    r"(?:\s?,)?\s?\band\s|(?:(?<=[A-Za-z¢])|(?<=[A-Za-z]\.))(?<!frac|sqrt)\s?,?\s?(?=\\?\$?\d|\\[dt]?frac)"
)


def measure(text: str):
    """Return ((index in SCALES, power), units, sum in the smallest unit, a text) of 5 ft 6 in or 5 ft; or None."""
    text = re.sub(rf"{BLANK}+", " ", UNWRAPPED.sub(r" \1 ", text)).strip()
    pieces = BETWEEN.split(text)
    kinds, units, total = set(), [], []
    for piece in pieces:
        core, unit = quantity(trim(piece))
        glued = re.fullmatch(r"([\d.]+)([a-z]{1,3})", piece)
        if unit is None and glued and len(pieces) > 1:  # 2h 30min
            core, unit = glued[1], spelled(glued[2])
        if unit == "m" and "h" in units:  # 2 h 30 m
            unit = "min"
        found = re.fullmatch(r"([a-z]+)([23]?)", unit or "")
        is_list = number(core) is None and re.search("[,;]", core)
        if not found or found[1] not in SCALE or unit in units or is_list:
            return None
        kind, factor = SCALE[found[1]]
        kinds.add((kind, int(found[2] or 1)))
        units.append(unit)
        total.append(times(core, factor ** int(found[2] or 1)))
    return (kinds.pop(), units, " + ".join(total)) if len(kinds) == 1 else None


# --------------------------------------------------------------------------------------------------------------------
# Clock times

HALVES = {"am": "am", "pm": "pm", "noon": "pm", "midnight": "am", "in the morning": "am", "at night": "pm"}
HALVES |= {"in the afternoon": "pm", "in the evening": "pm"}
CLOCK = re.compile(rf"(\d{{1,2}})(?::([0-5]\d))?(?::([0-5]\d))?\s?({'|'.join(HALVES)})?(?:\s?o'clock|\s?h(?:ou)?rs)?")


def clock(text: str):
    """Return (hour, minute, second, "am" or "pm" or None) of a clock time such as 6:00, 06:00:00 and 6 p.m., or None.

    Minutes need both digits, and no blank before them: 1:2 and 21 : 44 are ratios.
    """
    words = re.sub(BLANK, " ", UNWRAPPED.sub(r" \1 ", text.rsplit("=", 1)[-1])).replace(".", "").lower().split()
    found = CLOCK.fullmatch(" ".join(words))
    if found is None or int(found[1]) > 24 or (found[2] is None and found[4] is None and "o'clock" not in found[0]):
        return None
    hour, half = int(found[1]), HALVES.get(found[4])
    if half and hour <= 12:
        hour = hour % 12 + 12 * (half == "pm")
    return hour % 24, int(found[2] or 0), int(found[3] or 0), half


def same_time(one, other):
    """Return whether two clock times are equal. A time without am or pm matches both halves of the other's day."""
    if one[1:3] != other[1:3]:
        return False
    if (one[3] is None) == (other[3] is None):
        return one[0] == other[0]
    (known, _, _, _), (hour, _, _, _) = (one, other) if one[3] else (other, one)
    return known == hour or (hour <= 12 and known % 12 == hour % 12)


# --------------------------------------------------------------------------------------------------------------------
# Words


def bare(text: str):
    r"""Return the text if it is only letters, digits, blanks (\text{...} unwrapped, (A) without brackets), or None."""
    text = re.sub(r"\\(angle|triangle)\s?\{?([A-Z](?:\s?[A-Z]){2})(?![A-Za-z_])\}?", figure, UNWRAPPED.sub(r"\1", text))
    text = re.sub(rf"{BLANK}+|(?<=[^\W\d])-(?=[^\W\d])|(?<=[^\W\d])\.", " ", text).strip(" \"'`")
    text = re.sub(r"^\(\s?(\w{1,4})\s?\)$|^(\w)\s?\)$", r"\1\2", text)
    text = re.sub(r"(?<=\d) (?=[^\W\d_](?![^\W_]))", "", text)  # 2 x y, H T H
    text = re.sub(r"(?<![^\W\d_]{2})(?<=[^\W\d_]) (?=[^\W\d_](?![^\W_]))", "", text)
    is_bare = re.fullmatch(r"[^\W_]+(?: [^\W_]+|'[^\W\d_]+)*", text) and re.search(r"[^\W\d_]", text)
    return text if is_bare else None


def figure(match):
    r"""Write \angle BCA as "angle ACB", and \triangle BCA as "triangle ABC": their names have several spellings."""
    points = match[2].replace(" ", "")
    return f"{match[1]} " + (min(points, points[::-1]) if match[1] == "angle" else "".join(sorted(points)))


def is_word(text: str) -> bool:
    """Return whether a text from `bare` is a word or a name, and not a product of numbers and variables.

    Products are single letters with or without a number in front (x, 24n), up to four small letters with a number in
    front (2xy), x, y and z in any order, and two different small letters that aren't e, i, o or u (ab, mg). Everything
    else is compared as a text: CAB, HTH, LRLR, east, no, II, abc, 2BA and A1.
    """
    return not all(is_product(token) for token in text.split())


def is_product(token):
    found = re.fullmatch(r"(\d*)([a-z]{1,4}|[^\W\d_]?)", token)
    if found is None:
        return False
    digits, letters = found.groups()
    if len(letters) < 2 or digits:
        return not digits or spelled(letters) is None or len(letters) < 2
    if len(set(letters)) < len(letters):
        return False
    return set(letters) <= set("xyz") or (len(letters) == 2 and not set(letters) & set("eiou"))


def folded(text: str) -> str:
    """Return a text from `bare` without case, unless only case distinguishes the name: Aa, AaBb, pH."""
    tokens = []
    for token in text.split():
        is_usual = token in (token.lower(), token.upper(), token.capitalize()) and len(token) > 1
        is_gene = len(token) > 1 and len(set(token.lower())) == 1 and len(set(token)) > 1
        tokens.append(token.casefold() if is_usual and not is_gene else token)
    return "".join(tokens)


NAMED = re.compile(r"([A-Za-z]\w*(?: [A-Za-z]+)*?)(?:\s?[=:]\s?| (?=-?\d))([^=:]+)")  # boys = 3, Ann: 5, Ann 5


def label(text: str) -> tuple:
    """Return (words, value) of 3 red balls, balls = 3 and x = 3, with words in the singular; otherwise ((), text)."""
    named = NAMED.fullmatch(re.sub(rf"{BLANK}+", " ", UNWRAPPED.sub(r" \1 ", text)).strip())
    if named:
        words, value = named[1].split(), named[2]
    else:
        value, words, _ = without_words(text)
        if number(value) is None or NO_UNITS & set(words):
            return (), text
    unit = unit_name(words)
    return (unit,) if unit else tuple(re.sub("e?s?$", "", word.casefold()) or word for word in words), value


# --------------------------------------------------------------------------------------------------------------------
# Lists

AND = r"(?:and|or|AND|OR)"
SEPARATOR = re.compile(
    r"(?P<blank>\\[,;:! ])|(?P<open>\\?[(\[{]|\\(?:lbrace|begin)(?![A-Za-z]))"
    r"|(?P<close>\\?[)\]}]|\\(?:rbrace|end)(?![A-Za-z]))"
    rf"|(?:[,;]{BLANK}*)?(?:{TEXT}\{{[\s,]*{AND}\s*\}}|(?<![A-Za-z\\]){AND}(?![A-Za-z]))|[,;](?P<digits>\d{{3}}(?!\d))?"
)


def elements(text: str, *, thousands=False) -> list:
    r"""Return the parts of a list at its top level: 1, (2, 3) and 4 has 1, (2, 3) and 4. 3 \pm x has two parts.

    thousands: treat a comma between digits, with three behind it and no blank, as part of a number (1,234).
    """
    parts, depth, start = [], 0, 0
    for found in SEPARATOR.finditer(text):
        depth += (found["open"] is not None) - (found["close"] is not None)
        if depth < 0:
            return [text]  # ]0, 1[
        is_separator = depth == 0 and not (found["blank"] or found["open"] or found["close"])
        if is_separator and not (thousands and found["digits"] and text[: found.start()][-1:].isdigit()):
            parts.append(text[start : found.start()])
            start = found.end() - len(found["digits"] or "")
    parts.append(text[start:])
    return [sign for part in map(trim, parts) if part for sign in both_signs(part)]


def both_signs(text: str) -> list:
    r"""Return [1+x, 1-x] for 1 \pm x, otherwise [text]."""
    signs = re.findall(r"\\(?:pm|mp)(?![A-Za-z])", text)
    if not signs or len(signs) > len(set(signs)):
        return [text]
    plus, minus = (re.sub(r"\\pm(?![A-Za-z])", a, re.sub(r"\\mp(?![A-Za-z])", b, text)) for a, b in ("+-", "-+"))
    return [re.sub(r"(^|=)\s?\+\s?", r"\1", plus), re.sub(r"(^|=)\s?\+\s?", r"\1", minus)]


def inside_brackets(text: str):
    """Return (opening bracket, content, closing bracket) of a text that one pair of brackets encloses, or None."""
    opening = re.match(r"\(|\[|\\\{|\\lbrace(?![A-Za-z])", text)
    end = closing(text, 0) if opening and opening[0] != r"\lbrace" else None
    if end is None or not re.fullmatch(r"[)\]}]", text[end:].lstrip("\\")):
        return None
    return opening[0], trim(text[opening.end() : end]), text[end:]


def ratio(text: str):
    """Return the parts of 1:2:3, of 1 to 2 and of a:b = 1:2, or None."""
    text = re.sub(r"^[A-Za-z\s:]*=|\\colon(?![A-Za-z])", lambda sign: ":" * (sign[0][-1] != "="), text)
    text = re.sub(rf"(?<=[\d}}\s])(?:{TEXT}\{{\s?to\s?\}}|to)(?=[\s\d\\])", ":", text)
    parts = [trim(part) for part in text.split(":")]
    return parts if len(parts) > 1 and all(re.search(r"\d", part) for part in parts) else None
