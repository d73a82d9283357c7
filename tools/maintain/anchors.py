"""Find the lines of scripts that texts name, so that no text needs line numbers.

A text names a line in two ways: a link [grpo.py, update: divisor](../grpo.py), and in the table of symbols on an
algorithm's page a piece of code that occurs once in the script. with_anchors() adds the lines to a text's links.
tools/maintain/site.py calls it for each page that it builds, and a test calls it for all texts.
"""

import ast
import posixpath
import re

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
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                yield prefix + ast.unparse(target), child

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
    folder = posixpath.dirname(page)
    script = page.removeprefix(PAGES).removesuffix(".md")

    def named(match):
        name, what, link = match[1], " ".join(match[2].split()), match[3]
        path = family.ROOT / folder / link
        if path.name != name:
            raise ValueError(f"{page}: {match[0]} leads to another file")
        try:
            number = line_named(path.read_text(encoding="utf-8"), what)
        except (OSError, ValueError) as error:
            raise ValueError(f"{page}: {match[0]}: {error}") from error
        return f"[{match[1]}, {match[2]}]({link}#L{number})"

    def symbol(match):
        try:
            number = line_with(family.source(script), match[3])
        except ValueError as error:
            raise ValueError(f"{page}: {error}") from error
        return f"| {match[1]} | {match[2]} | [`{match[3]}`](../../{script}.py#L{number}) |"

    def viewer(match):
        left, right = match.groups()
        if right is None:
            left, right = family.PARENT.get(left), left
        if {left, right} <= set(family.family()):
            return f"[{match[0]}]({posixpath.relpath('diff.html', folder or '.')}#left={left}&right={right})"
        return match[0]

    text = NAMED.sub(named, text)
    if script in family.PARENT:
        link = f"[side by side](../../diff.html#left={family.PARENT[script]}&right={script})"
        text = GREW.sub(rf"\g<0> ({link})", text, count=1)
    if page.startswith(PAGES):
        text = SYMBOLS.sub(lambda part: ROW.sub(symbol, part[0]), text)
    return DIFF.sub(viewer, text)
