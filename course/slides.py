"""Build the slides: a deck per lesson, for the lecturer.

    make slides                   install Marp, which needs Node.js, and write slides/lesson_0.html and so on
    python -m course.slides       write them, once Marp is installed

Each deck is one file that needs no network. In a browser, `p` opens the presenter's view with notes and `f` fills the
screen. slides/lesson_0.md is the same deck in Markdown, for Marp's own editor.

A deck's source, course/lesson_00/slides.md, has titles and few words; course/decks/frame.md is around it. Each build
takes the rest from the lesson, the lecturer's page and the scripts: no number and no line of code is written twice.

    {{ formula: The clip }}       the lesson's formula under the heading that begins so; "The clip, 2": the second one
    {{ table: The clip }}         a table, likewise; so are a list, a quote, a picture, a command
    {{ text: Sampling is }}       the lesson's sentence that begins with these words
    {{ code: grpo.py, k3 }}       a function or class without its docstring; "k3: a to b" are its lines from the first
                                  with the word a to the first with the word b
    {{ ask: 2 }}                  the second question of the lecturer's page; {{ live }}: its snippet with the output
    {{ notes: Draw }}             a part of that page for the presenter's view
"""

import ast
import base64
import html
import mimetypes
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import tyro

from tools.maintain import anchors

ROOT = Path(__file__).resolve().parents[1]
COURSE = ROOT / "course"
DECKS = COURSE / "decks"
MARP = ROOT / ".marp" / "node_modules" / ".bin" / "marp"
LESSONS = range(16)
DIRECTIVE = re.compile(r"\{\{ (\w+)(?:: (.+?))? \}\}")
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\([^()]*\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^()\s]+)\)")
BLOCKS = {  # kinds of blocks under a lesson's heading
    "formula": re.compile(r"^\$\$.+?\$\$$", re.M | re.S),
    "table": re.compile(r"(?:^\|.*\n?)+", re.M),
    "list": re.compile(r"(?:^(?:- |\d+\. |  +\S).*\n?)+", re.M),
    "quote": re.compile(r"(?:^> .*\n?)+", re.M),
    "picture": re.compile(r"^!\[.*?\]\(.*?\)$", re.M | re.S),
    "command": re.compile(r"^```bash\n.*?^```$", re.M | re.S),
}


def block(kind, where, lesson):
    """Return a block of the lesson. where: its heading, and ", 2" if it is the second of its kind there."""
    heading, number = re.fullmatch(r"(.*?)(?:, (\d+))?", where).groups()
    part = re.search(rf"^#+ {re.escape(heading)}.*?\n(.*?)(?=^##+ |\Z)", lesson, re.M | re.S)
    found = BLOCKS[kind].findall(part[1])[int(number or 1) - 1].strip()
    return re.sub(r"\n +(?=\S)", " ", found) if kind == "list" else found


def sentence(begins, lesson):
    """Return the lesson's first sentence that begins with these words."""
    pattern = re.compile(rf"(?:^|[.?!:]\**) ?({re.escape(begins)}.*?[.?!]\**)(?= |$)")
    paragraphs = [" ".join(paragraph.split()) for paragraph in lesson.split("\n\n")]
    return next(found[1] for found in map(pattern.search, paragraphs) if found)


def code(where):
    """Return lines of a script, and below them their location. where: "grpo.py, k3" or "grpo.py, k3: a to b"."""
    name, _, place = where.partition(", ")
    outer, _, words = place.partition(": ")
    text = (ROOT / name).read_text(encoding="utf-8")
    node = anchors.definition(text, outer)
    numbers = list(range(node.lineno, node.end_lineno + 1))
    if words:
        begin, end = (anchors.line_named(text, f"{outer}: {word}") for word in words.split(" to "))
        numbers = list(range(begin, end + 1))
    elif ast.get_docstring(node) is not None:
        docstring = node.body[0]
        numbers = [number for number in numbers if not docstring.lineno <= number <= docstring.end_lineno]
    lines = "\n".join(text.splitlines()[number - 1] for number in numbers)
    return f"```python\n{textwrap.dedent(lines)}\n```\n\n`{name}`, line {numbers[0]}"


def part_for_lecturers(name, page):
    """Return a part of the lecturer's page, such as the text after **Draw.**"""
    return re.search(rf"^\*\*{name}\b[^*]*\*\*\s*(.*?)\s*(?=^\*\*[A-Z]|\Z)", page, re.M | re.S)[1]


def as_notes(text):
    """Return a text as a comment, which Marp shows in the presenter's view."""
    return f"<!--\n{text.replace('--', '––')}\n-->"


def taken(kind, where, lesson, page):
    """Return the text of a directive. page: the lecturer's page of the lesson. Any exception means it is missing."""
    if kind in BLOCKS:
        return block(kind, where, lesson)
    if kind == "title":
        return lesson.partition("\n")[0].removeprefix("# ")
    if kind == "text":
        return sentence(where, lesson)
    if kind == "code":
        return code(where)
    if kind == "ask":
        return "> " + re.findall(r'"([^"]+)"', " ".join(part_for_lecturers("Ask", page).split()))[int(where) - 1]
    if kind == "live":
        return re.search(r"```python\n.*?\n```\n\n```text\n.*?```", page, re.S)[0]
    if kind == "notes":
        return as_notes(part_for_lecturers(where, page))
    if kind == "questions":
        questions = re.findall(r"<summary>(.*?)</summary>\s*(.*?)\s*</details>", lesson, re.S)
        answers = as_notes("\n\n".join(answer for _, answer in questions))
        return "\n".join(f"1. {question}" for question, _ in questions) + f"\n\n{answers}"
    raise ValueError(f"there is no directive {kind!r}")


def deck(number):
    """Return the Markdown of a lesson's deck, with its pictures. ValueError, with its name, if a part is missing."""
    lesson = LINK.sub(r"\1", (COURSE / f"lesson_{number:02}/README.md").read_text(encoding="utf-8"))
    pages = re.split(r"^## Lesson \d+: ", (COURSE / "lecturer.md").read_text(encoding="utf-8"), flags=re.M)
    source = (COURSE / f"lesson_{number:02}/slides.md").read_text(encoding="utf-8")
    source = re.sub(r"\n+(?!- )", "\n\n", source)  # each line becomes a block, except for list items

    def put(match):
        try:
            return taken(*match.groups(), lesson, pages[number + 1])
        except Exception as error:
            raise ValueError(f"course/lesson_{number:02}/slides.md: {match[0]} is not there: {error}") from error

    text = (DECKS / "frame.md").read_text(encoding="utf-8").replace("{{ deck }}", source)
    return PICTURE.sub(embedded, DIRECTIVE.sub(put, text))


def embedded(match):
    """Return a picture of a lesson's page as HTML that embeds it."""
    path = COURSE / "lesson_00" / match[2]  # the same from every lesson's folder
    data = base64.b64encode(path.read_bytes()).decode()
    about = html.escape(" ".join(match[1].split()))
    return f'<img alt="{about}" src="data:{mimetypes.guess_type(path)[0]};base64,{data}">'


@dataclass
class Args:
    """The folder of the slides."""

    out: Path = ROOT / "slides"


def main(args):
    if not MARP.exists():
        print("error: Marp is not installed: run `make slides`, which needs Node.js 18 or later", file=sys.stderr)
        sys.exit(2)
    args.out.mkdir(parents=True, exist_ok=True)
    files = [args.out / f"lesson_{number}.md" for number in LESSONS]
    for number, file in zip(LESSONS, files):
        file.write_text(deck(number), encoding="utf-8")
    done = subprocess.run([MARP, *files, "--html", "--no-stdin", "--theme-set", DECKS / "style.css"])
    sys.exit(done.returncode)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
