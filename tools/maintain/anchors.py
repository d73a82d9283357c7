"""Find the lines of scripts that texts name, so that no text needs line numbers.

A text names a line in two ways: a link [grpo.py, update: divisor](../grpo.py), and in the table of symbols on an
algorithm's page a piece of code that occurs once in the script. with_anchors() adds the lines to a text's links.
tools/maintain/site.py calls it for each page that it builds, and a test calls it for all texts.
"""

import ast
import posixpath
import re
from pathlib import Path

from tools import diff, family

NAMED = re.compile(r"\[(\w+\.py),\s+([^\[\]]+)\]\(([^()\s#]+\.py)\)")
SYMBOLS = re.compile(r"^## Where each symbol is computed\n(.*?)^## ", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(?<=\| )`([^`\n]+)` \|$", re.MULTILINE)  # a row's last cell
ARXIV = re.compile(r"(?<!\[)arXiv\s+(\d{4}\.\d{5})")
DIFF = re.compile(r"`python -m tools\.diff (?:(\w+) )?(\w+)`")


def definition(text, name):
    """Return the node of a program's class, function or variable: "Policy.head", "k3", "kl_coef".

    ValueError if there is none. If there are several, the outermost one counts.
    """
    *outer, last = name.split(".")
    for node in ast.walk(definition(text, ".".join(outer)) if outer else ast.parse(text)):
        target = getattr(node, "target", None) or getattr(node, "targets", [None])[0]
        if last in (getattr(node, "name", None), getattr(target, "id", None)):
            return node
    raise ValueError(f"nothing is called {name!r}")


def line_named(text, name):
    """Return the number, from 1, of the line of a program that `name` names. ValueError if there is none.

    name: a definition's name, or "k3: exp" for the first line below the docstring of k3 that has this word.
    """
    outer, _, word = name.partition(": ")
    node = definition(text, outer)
    if not word:
        return node.lineno
    first = node.body[ast.get_docstring(node) is not None].lineno
    for number, line in enumerate(text.splitlines()[: node.end_lineno], 1):
        if number >= first and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", line):
            return number
    raise ValueError(f"{outer} has no {word!r}")


def with_anchors(text, page):
    """Return a page's Markdown with the site's additions. page: its path from the repository's root.

    Links that name a place lead to its line, the code of symbols links to its line, papers' numbers link to arXiv, and
    calls of tools/diff.py link to the page that shows the difference. On a script's page the hunks of the difference
    follow, folded. ValueError, saying where, if a place is missing.
    """
    folder = family.ROOT / posixpath.dirname(page)
    above = "../" * page.count("/")

    def named(match):
        name, what, link = match.groups()
        if Path(link).name != name:
            raise ValueError(f"{page}: {match[0]} leads to another file")
        number = line_named((folder / link).read_text(encoding="utf-8"), " ".join(what.split()))
        return f"[{name}, {what}]({link}#L-{number})"

    def symbol(match):
        script = family.source(Path(page).stem)
        if script.count(match[1]) != 1:
            raise ValueError(f"{page}: `{match[1]}` must occur once, not {script.count(match[1])} times")
        number = script.partition(match[1])[0].count("\n") + 1
        return f"[`{match[1]}`]({above}{Path(page).stem}.py#L-{number}) |"

    def with_differences(paragraph):
        calls = DIFF.findall(paragraph)
        for parent, script in calls:
            left = parent or family.PARENT[script]
            viewer = f"{above}diff.html#left={left}&right={script}"
            paragraph = DIFF.sub(rf"[\g<0>]({viewer})", paragraph, count=1)
            if Path(page).stem in family.family() and page.startswith("docs/algorithms/"):
                paragraph += f"\n\n{folded_difference(left, script, viewer)}"
        return paragraph

    text = SYMBOLS.sub(lambda part: CODE.sub(symbol, part[0]), NAMED.sub(named, text))
    text = ARXIV.sub(r"[\g<0>](https://arxiv.org/abs/\1)", text)
    return "\n\n".join(map(with_differences, text.split("\n\n")))


def folded_difference(left, right, viewer):
    """Return the difference between two scripts as folded Markdown. viewer: the page that has it side by side."""
    _, _, found = diff.run([left, right], capture_output=True, text=True).stdout.partition("\n@@")
    removed, added = (len(re.findall(rf"^[{sign}]", found, re.MULTILINE)) for sign in ("-", "+"))
    summary = f"<summary>The lines that differ from {left}.py: −{removed} +{added}, with comments</summary>"
    button = f'<a class="md-button" href="{viewer}">Open side by side</a>'
    return f"{button}\n\n<details>{summary}\n\n~~~~~~diff\n@@{found}~~~~~~\n\n</details>"
