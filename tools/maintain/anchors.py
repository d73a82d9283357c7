"""Find the lines of scripts that texts name, so that no text needs line numbers.

A text names a line in two ways: a link [grpo.py, update: divisor](../grpo.py), and in the table of symbols on an
algorithm's page a piece of code that occurs once in the script. with_anchors() adds the lines to a text's links.
tools/maintain/site.py calls it for each page that it builds, and a test calls it for all texts.
"""

import ast
import posixpath
import re
from pathlib import Path

from tools import family

NAMED = re.compile(r"\[(\w+\.py),\s+([^\[\]]+)\]\(([^()\s#]+\.py)\)")
SYMBOLS = re.compile(r"^## Where each symbol is computed\n(.*?)^## ", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (.+) \| (.+) \| `([^`\n]+)` \|$", re.MULTILINE)
DIFF = re.compile(r"`python tools/diff\.py (\w+)(?: (\w+))?`")
GREW = re.compile(r"· grew from \[`\w+\.py`\]\(\w+\.md\)")  # on an algorithm's page
PAGES = "docs/algorithms/"


def definitions(text):
    """Yield (name, node) of each class, function, constant and setting: "Policy.head", "TASKS", "Args.lr"."""

    def inside(node, prefix):
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield prefix + child.name, child
                yield from inside(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not isinstance(node, ast.FunctionDef):
                yield prefix + family.name_of(child), child

    yield from inside(ast.parse(text), "")


def line_named(text, name):
    """Return the number, from 1, of the line of a program that `name` names. ValueError if there is none.

    name: a definition's name ("k3", "Policy.head", "TASKS"), or "k3: exp" for the first line below the
    docstring of k3 that has this word.
    """
    outer, _, word = name.partition(": ")
    for found, node in definitions(text):
        if f".{found}".endswith(f".{outer}"):
            if not word:
                return node.lineno
            first = node.body[ast.get_docstring(node) is not None].lineno
            for number, line in enumerate(text.splitlines(), 1):
                if first <= number <= node.end_lineno and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", line):
                    return number
    raise ValueError(f"nothing is called {name!r}")


def line_with(text, snippet):
    """Return the number, from 1, of a program's line that has a piece of code. ValueError unless it occurs once."""
    if text.count(snippet) != 1:
        raise ValueError(f"`{snippet}` occurs {text.count(snippet)} times; it must occur once")
    return text[: text.index(snippet)].count("\n") + 1


def with_anchors(text, page):
    """Return a page's Markdown with the site's additions. page: its path from the repository's root.

    Links that name a place lead to its line, the code of symbols links to its line, and calls of tools/diff.py link to
    the page that shows the difference, as does the first line of an algorithm's page. ValueError, saying where, if a
    place is missing.
    """
    folder = family.ROOT / posixpath.dirname(page)
    above = "../" * page.count("/")
    script = page.removeprefix(PAGES).removesuffix(".md")

    def named(match):
        name, what, link = match.groups()
        if Path(link).name != name:
            raise ValueError(f"{match[0]} leads to another file")
        number = line_named((folder / link).read_text(encoding="utf-8"), " ".join(what.split()))
        return f"[{name}, {what}]({link}#L{number})"

    def symbol(match):
        number = line_with(family.source(script), match[3])
        return f"| {match[1]} | {match[2]} | [`{match[3]}`]({above}{script}.py#L{number}) |"

    def viewer(match):
        left, right = match.groups()
        if right is None:
            left, right = family.PARENT.get(left), left
        is_shown = {left, right} <= set(family.family())
        return f"[{match[0]}]({above}diff.html#left={left}&right={right})" if is_shown else match[0]

    try:
        text = NAMED.sub(named, text)
        if page.startswith(PAGES):
            text = SYMBOLS.sub(lambda part: ROW.sub(symbol, part[0]), text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{page}: {error}") from error
    if script in family.PARENT:
        link = f"[side by side]({above}diff.html#left={family.PARENT[script]}&right={script})"
        text = GREW.sub(rf"\g<0> ({link})", text, count=1)
    return DIFF.sub(viewer, text)
