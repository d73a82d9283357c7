r"""Convert typed characters to the notation that the reward functions read: Unicode to ASCII, and then to LaTeX.

Unicode's own normalisation NFKC would turn x² into x2 and 3½ into 31/2, so the characters are listed here.
"""

import re
import unicodedata

DASHES = "−–—‐‑‒―﹣⁃"  # each is a minus before a number
PLAIN = {ord(dash): "-" for dash in DASHES}
PLAIN |= {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width ！ to ～
PLAIN |= str.maketrans("，、。․；：％‘’‚“”„′″∶⁄∕∗﹪﹐", ",,..;:%'''\"\"\"'\":/" + "/*%,")
PLAIN |= {code: None for code in (0xAD, 0x180E, *range(0x200B, 0x2010), *range(0x202A, 0x202F), 0x2060, 0xFEFF)}
PLAIN |= dict.fromkeys(range(0xFE00, 0xFE10))  # variation selectors

RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵃᵇᵏᵐᵗ", "0123456789+-=()nixyabkmt"))
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₕₖₗₘₙₚₛₜᵢⱼ", "0123456789+-=()aeoxhklmnpstij"))
ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
COMMANDS = {
    "×": "times", "÷": "div", "·": "cdot", "⋅": "cdot", "∙": "cdot", "•": "cdot", "≤": "le", "≥": "ge", "⩽": "le",
    "⩾": "ge", "≠": "ne", "±": "pm", "∓": "mp", "≈": "approx", "≡": "equiv", "∞": "infty", "∪": "cup", "∩": "cap",
    "∈": "in", "∉": "notin", "⊂": "subset", "⊆": "subseteq", "∅": "emptyset", "∖": "setminus", "∠": "angle",
    "△": "triangle", "⊥": "perp", "∥": "parallel", "→": "to", "…": "ldots", "⋯": "cdots", "∑": "sum", "∏": "prod",
    "∫": "int", "∂": "partial", "∧": "wedge", "∨": "vee", "¬": "neg", "⌊": "lfloor", "⌋": "rfloor", "⌈": "lceil",
    "⌉": "rceil", "⟨": "langle", "⟩": "rangle", "ℏ": "hbar", "º": "degree", "°": "degree", "˚": "degree",
    "ℝ": "mathbb{R}", "ℤ": "mathbb{Z}", "ℕ": "mathbb{N}", "ℚ": "mathbb{Q}", "ℂ": "mathbb{C}",
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "ϵ": "epsilon", "ζ": "zeta", "η": "eta",
    "θ": "theta", "ϑ": "vartheta", "κ": "kappa", "λ": "lambda", "μ": "mu", "µ": "mu", "ν": "nu", "ξ": "xi", "π": "pi",
    "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "varphi", "ϕ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega",
    "Γ": "Gamma", "Δ": "Delta", "∆": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma",
    "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "Ø": "emptyset", "⌀": "emptyset",
}  # fmt: skip
FRACTIONS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞↉"


def plain(text: str):
    """Return the visible text in NFC, with blanks, dashes, quotes, full-width and mathematical letters in ASCII."""
    if text.isascii():
        return text
    text = re.sub(r"(?<=\d)[\u2009\u202f](?=\d{3}(?!\d))", ",", text)  # thin blanks between thousands
    text = unicodedata.normalize("NFC", text).translate(PLAIN)
    # The second range has bold, italic and similar letters and digits.
    return re.sub(r"[^\S\n]|[\U0001D400-\U0001D7FF]", lambda sign: unicodedata.normalize("NFKC", sign[0]), text)


def fraction(sign):
    """Split a fraction: ["3", "4"] for ¾."""
    return unicodedata.normalize("NFKC", sign).split("⁄")


def fractions_as_decimals(text: str):
    """Write 3½ as 3.5."""

    def decimal(match):
        above, below = map(int, fraction(match[2]))
        return repr(int(match[1] or 0) + above / below)

    return re.sub(rf"([0-9]{{0,15}})\s?([{FRACTIONS}])", decimal, text)


def latex(text: str):
    r"""Apply `plain`, and write mathematical characters as LaTeX: x² as x^{2}, 3½ as 3\frac{1}{2}, √12 as \sqrt{12}."""
    text = plain(text)
    if text.isascii():
        return text
    text = re.sub(f"[{FRACTIONS}]", lambda sign: r"\frac{{{}}}{{{}}}".format(*fraction(sign[0])), text)
    text = scripts(text.replace("³√", "∛").replace("⁴√", "∜"))
    count = 1
    while count:  # from the inside out
        text, count = re.subn(r"([√∛∜])\s?(?:(\d+(?:\.\d+)?|[^\W\d_])|\(([^()√∛∜]*)\))", root, text)
    text = text.translate({ord(sign): name for sign, name in ROOTS.items()})
    commands = {ord(sign): rf"\{name} " for sign, name in COMMANDS.items()}
    text = re.sub(r"\s*[º°˚]\s*(?![CFK]\b)", r"^\\circ ", text)
    return text.translate(commands)


def root(match) -> str:
    """Add braces to √3, √x and √(x+1). Others, such as √{3}, stay as they are."""
    return f"{ROOTS[match[1]]}{{{match[2] or match[3]}}}"


def scripts(text: str):
    """Write raised and lowered characters as ^{...} and _{...}."""
    for sign, letters in (("^", RAISED), ("_", LOWERED)):
        table = str.maketrans(letters)
        text = re.sub(f"[{''.join(letters)}]+", lambda run: f"{sign}{{{run[0].translate(table)}}}", text)  # noqa: B023
    return text
