"""Read the site's Markdown as GitHub reads it, and turn its formulas into MathML.

Zensical reads Markdown with Python-Markdown, which shows lists, <details> and formulas differently from GitHub. This
extension of Python-Markdown passes a page to markdown-it-py, which follows CommonMark and GitHub's additions to it.
tools/maintain/site.py names it in the site's configuration.

Links are written as for GitHub. A link to a Markdown file leads to its page here, and a link to a source file to
the file's page, at the same line.
"""

import ast
import html
import itertools
import posixpath
import re
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from latex2mathml.converter import convert
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from markdown_it import MarkdownIt
from mdit_py_plugins.gfm import gfm_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound

SAME_AS = [  # commands that the converter lacks, and equivalents that it has
    (r"\{(aligned|gathered)\}", r"{align*}"),
    (r"\\lbrace\b", r"\{"),
    (r"\\rbrace\b", r"\}"),
    (r"(?<!\\left)\\lvert\b", r"\left|"),
    (r"(?<!\\right)\\rvert\b", r"\right|"),
]
FUNCTION = re.compile(r"<m([io])>(log|min|max|exp)</m\1>")
UNKNOWN = re.compile(r">\s*(\\[A-Za-z]+|&)\s*<")  # commands that the converter left unchanged
UNREADABLE = '<code class="unreadable-formula">'  # begins a formula that could not be converted
NUMBERED = "numbered"  # second word of a fence whose lines get numbers and anchors, as on the pages of source files
ATTRIBUTE = re.compile(r"""(?<=\s)(href|src)=(["'])(.*?)\2""")  # of an HTML tag
ARXIV = re.compile(r"(?<![\d.])(\d\d(?:0[1-9]|1[0-2])\.\d{5})(?![\d.]\d)")  # arXiv number of a paper
NUMBER = re.compile(r"[-−+]?\d[\d.,]*( ?%)?( ± \d[\d.]*)?")  # all of a cell
MANY = 10  # more columns don't fit on a phone
LONG_NAME = re.compile(r"\w{30,}")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|//")  # begins an external address


# --------------------------------------------------------------------------------------------------------------- links


def slug(title):
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def page_url(path):
    """Return the place of a Markdown file's page: README.md is the index of its folder."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, "index.html" if name == "README.md" else f"{name.removesuffix('.md')}.html")


def with_papers(text):
    """Return HTML with links from arXiv numbers to arXiv's pages."""
    return ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">\1</a>', text)


def breakable(text):
    """Return HTML whose long names may break after an underscore, so that they don't widen tables."""
    return LONG_NAME.sub(lambda name: name[0].replace("_", "_<wbr>"), text)


def resolved(target, page):
    """Return (path from the site's root, anchor) of a link on a page; (None, anchor) if it leads out of the site."""
    path, _, anchor = target.partition("#")
    if SCHEME.match(target) or path.startswith("/"):
        return None, anchor
    if not path:
        return page, anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path))), anchor


def site_link(target, page, files):
    """Return a Markdown file's link as it must be on the site; both relative to the page.

    page: the path of the Markdown file. files: {path in the repository: path of its page}, if they differ.
    """
    path, anchor = resolved(target, page)
    if path is None or target.startswith("#"):
        return target
    url = files.get(path) or (page_url(path) if path.endswith(".md") else path)
    anchor = re.sub(r"^(L\d+)(C\d+)?-L\d+(C\d+)?$", r"\1", anchor)  # lines 10 to 20: link to the first
    link = posixpath.relpath(url, posixpath.dirname(page_url(page)) or ".")
    return f"{link}#{anchor}" if anchor else link


# ------------------------------------------------------------------------------------------------------------ formulas


def formula(latex, display):
    """Return a formula as MathML. ValueError if the converter does not know a command in it."""
    latex = latex.strip()
    for theirs, ours in SAME_AS:
        latex = re.sub(theirs, lambda _, ours=ours: ours, latex)
    try:
        found = convert(latex, display="block" if display else "inline")
    except Exception as error:  # the converter raises a dozen kinds, with no common one
        raise ValueError(f"{latex!r} is no formula: {type(error).__name__}") from error
    if unknown := UNKNOWN.search(found):
        raise ValueError(f"unknown in the formula {latex!r}: {unknown[1]}")
    found = FUNCTION.sub(r'<mi class="function">\2</mi>', found)  # site.css puts thin spaces around it
    found = found.replace('<mn mathvariant="double-struck">1</mn>', "<mn>𝟙</mn>")  # browsers don't know the attribute
    return found.replace("<mi>&#x0007E;</mi>", "<mo>∼</mo>")  # \sim, which the converter takes for a variable


def shown_formula(latex, display, page):
    """Return a formula as MathML, or in LaTeX if it can't be converted; then print a line."""
    try:
        found = formula(latex, display)
    except ValueError as error:
        print(f"{page}: {error}", file=sys.stderr)
        return f"{UNREADABLE}{html.escape(latex)}</code>"
    return f'<div class="formula" tabindex="0">{found}</div>' if display else found


# ---------------------------------------------------------------------------------------------------------------- code


def shown_code(text, language, numbered=False):
    """Return a block of code in colours. numbered: each line has its number, which is also its anchor: L1, L2, …"""
    try:
        lexer = get_lexer_by_name(language, stripnl=False) if language else TextLexer(stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    lines = highlight(text, lexer, HtmlFormatter(nowrap=True)).split("\n")[: text.count("\n") or None]
    if numbered:
        lines = [
            f'<span id="L{number}" class="line"><a href="#L{number}" aria-hidden="true" tabindex="-1" '
            f'data-line="{number}"></a>{with_papers(line)}\n</span>'
            for number, line in enumerate(lines, 1)
        ]
    code = "".join(lines) if numbered else "\n".join(lines) + "\n"
    classes = "highlight numbered" if numbered else "highlight"
    return f'<div class="{classes}"><pre><code tabindex="0">{code}</code></pre></div>\n'


def definitions(text):
    """Return a module's functions and classes, as headings (2, anchor, name)."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [(2, f"L{node.lineno}", node.name) for node in ast.parse(text).body if isinstance(node, kinds)]


# ------------------------------------------------------------------------------------------------------------ the page


@cache
def parser():
    """Return a parser of GitHub's Markdown, with the site's links, formulas, headings and code."""
    md = MarkdownIt("commonmark", {"html": True})
    md.use(gfm_plugin, dollarmath=True)

    def link_open(self, tokens, index, options, env):
        token = tokens[index]
        token.attrSet("href", site_link(token.attrGet("href"), env["page"], env["files"]))
        return self.renderToken(tokens, index, options, env)

    def text(self, tokens, index, options, env):
        is_linked = sum(token.nesting for token in tokens[:index] if token.tag == "a")
        shown = breakable(html.escape(tokens[index].content, quote=False))
        return shown if is_linked else with_papers(shown)

    def image(self, tokens, index, options, env):
        token = tokens[index]
        path, _ = resolved(token.attrGet("src"), env["page"])
        if path and path.endswith(".svg"):  # inlined, so that it has the colour of its text
            return (Path(__file__).parents[2] / path).read_text(encoding="utf-8")
        token.attrSet("alt", self.renderInlineAsText(token.children, options, env))
        token.attrSet("src", site_link(token.attrGet("src"), env["page"], env["files"]))
        token.attrSet("loading", "lazy")
        shown = self.renderToken(tokens, index, options, env)
        is_linked = sum(token.nesting for token in tokens[:index] if token.tag == "a")
        return shown if is_linked else f'<a href="{token.attrGet("src")}">{shown}</a>'  # a click shows the full size

    def as_html(self, tokens, index, options, env):
        def link(match):
            url = html.unescape(match[3])
            return f'{match[1]}="{html.escape(site_link(url, env["page"], env["files"]))}"'

        return ATTRIBUTE.sub(link, tokens[index].content)

    def code_inline(self, tokens, index, options, env):
        code = re.sub(r"(--\w[\w-]*)", r'<span class="flag">\1</span>', html.escape(tokens[index].content))
        return f"<code>{breakable(code)}</code>"

    def inline(self, tokens, index, options, env):
        return shown_formula(tokens[index].content, False, env["page"])

    def block(self, tokens, index, options, env):
        return shown_formula(tokens[index].content, True, env["page"])

    def fence(self, tokens, index, options, env):
        text, words = tokens[index].content, tokens[index].info.split()
        if words[:1] == ["math"]:
            return shown_formula(text, True, env["page"])
        if words == ["python", NUMBERED]:
            env["headings"] += definitions(text)
        return shown_code(text, "".join(words[:1]), NUMBERED in words[1:])

    def heading_open(self, tokens, index, options, env):
        title = "".join(child.content for child in tokens[index + 1].children if child.type != "image")
        anchor = slug(title)
        env["anchors"][anchor] = env["anchors"].get(anchor, -1) + 1
        if env["anchors"][anchor]:
            anchor = f"{anchor}-{env['anchors'][anchor]}"
        tokens[index].attrSet("id", anchor)
        env["headings"].append((int(tokens[index].tag[1]), anchor, title))
        return self.renderToken(tokens, index, options, env)

    def heading_close(self, tokens, index, options, env):
        _, anchor, title = env["headings"][-1]
        link = f'<a class="headerlink" href="#{anchor}" aria-label="Link to {html.escape(title)}">&para;</a>'
        return link + self.renderToken(tokens, index, options, env)

    for rule in (link_open, text, image, heading_open, heading_close, fence, code_inline):
        md.add_render_rule(rule.__name__, rule)
    for name, rule in {
        "html_inline": as_html,
        "html_block": as_html,
        "math_inline": inline,
        "math_inline_double": block,
        "math_block": block,
        "math_block_label": block,
    }.items():
        md.add_render_rule(name, rule)
    return md


def links(text):
    """Return the links and pictures of a Markdown text, as they are written."""

    def walk(tokens):
        for token in tokens:
            if token.type in ("html_inline", "html_block"):
                yield from (html.unescape(match[3]) for match in ATTRIBUTE.finditer(token.content))
            yield from (token.attrGet(name) for name in ("href", "src") if token.attrGet(name))
            yield from walk(token.children or [])

    return list(walk(parser().parse(text)))


def contents(headings):
    """Return headings (level, anchor, title), in order, as the tree that Zensical shows next to the page."""
    root = {"level": 0, "children": []}
    path = [root]
    for level, anchor, title in headings:
        while path[-1]["level"] >= level:
            path.pop()
        text = html.escape(title)
        entry = {"level": level, "id": anchor, "name": text, "html": text, "data-toc-label": "", "children": []}
        path[-1]["children"].append(entry)
        path.append(entry)
    return root["children"]


def mark_columns(tokens):
    """Give the class "number" to table columns that have only numbers below their titles.

    The cells of a wide table with a title above each column have that title in data-title: on a phone, site.css shows
    its rows below each other.
    """
    columns = {}  # of one table: {column: [(token, text), …]}
    for token, inside in itertools.pairwise(tokens):
        if token.type == "table_open":
            columns = {}
        elif token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open"):
            text = "".join(child.content for child in inside.children)
            columns.setdefault(column, []).append((token, text))
            column += 1
        elif token.type == "tbody_close":
            for [(title, _), *cells] in columns.values():
                texts = [text for _, text in cells if text]
                if texts and all(NUMBER.fullmatch(text) for text in texts):
                    for cell in [title, *(cell for cell, _ in cells)]:
                        cell.attrJoin("class", "number")
            titles = [title for (_, title), *_ in columns.values()]
            if len(columns) > MANY and all(re.fullmatch(r"[^\\]+", title) for title in titles):  # words, no formula
                for (_, title), *cells in columns.values():
                    for cell, _ in cells:
                        cell.attrSet("data-title", title)


def rendered(text, page, files):
    """Return (HTML, headings) of a Markdown text; headings: [(level, anchor, title), …]. page, files: see site_link."""
    env = {"page": page, "files": files, "anchors": {}, "headings": []}
    tokens = parser().parse(text, env)
    mark_columns(tokens)
    return parser().renderer.render(tokens, parser().options, env), env["headings"]


class Whole(Preprocessor):
    """Replaces a page's Markdown by its HTML."""

    def __init__(self, md, files):
        super().__init__(md)
        self.files = files

    def run(self, lines):
        page = next(part.page.path for part in self.md.preprocessors if hasattr(part, "page"))  # Zensical's own
        found, headings = rendered("\n".join(lines), page, self.files)
        self.md.toc_tokens = contents(headings)
        self.md.treeprocessors.deregister("toc", strict=False)  # Zensical adds it; it would find no headings
        return [self.md.htmlStash.store(f"<div>\n{found}</div>")]


class GitHubMarkdown(Extension):
    """The extension. files: as in site_link()."""

    def __init__(self, **settings):
        self.config = {"files": [{}, "the pages of source files and folders"]}
        super().__init__(**settings)

    def extendMarkdown(self, md):
        md.preprocessors.register(Whole(md, self.getConfig("files")), "github_markdown", 1000)
        # These would read Markdown, but only a mark for the whole page is left, which the first one would remove.
        md.preprocessors.deregister("normalize_whitespace")
        md.preprocessors.deregister("html_block")


def makeExtension(**settings):
    return GitHubMarkdown(**settings)
