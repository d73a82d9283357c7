"""Read the site's Markdown as GitHub reads it, and turn its formulas into MathML.

Zensical reads Markdown with Python-Markdown, which shows lists, <details> and formulas differently from GitHub. This
extension of Python-Markdown passes a page to markdown-it-py, which follows CommonMark and GitHub's additions to it.
tools/maintain/site_files/zensical.toml names it.

Links are written as for GitHub. A link to a Markdown file leads to its page here, and a link to a source file to
the file's page, at the same line.
"""

import ast
import html
import itertools
import posixpath
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from latex2mathml.converter import convert
from markdown.extensions import Extension
from markdown.extensions.toc import nest_toc_tokens
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.gfm import gfm_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound
from zensical.extensions.context import ContextPreprocessor

ROOT = Path(__file__).parents[2]
PAGES = ROOT / ".site/pages"  # the Markdown of all pages; a source file's is FILE.md
SAME_AS = [  # commands that the converter lacks, and equivalents that it has
    (r"\\lbrace\b", r"\{"),
    (r"\\rbrace\b", r"\}"),
    (r"(?<!\\left)\\lvert\b", r"\left|"),
    (r"(?<!\\right)\\rvert\b", r"\right|"),
]
FUNCTION = re.compile(r"<m([io])>(log|min|max|exp)</m\1>")
UNKNOWN = re.compile(r">\s*(\\[A-Za-z]+|&)\s*<")  # commands that the converter left unchanged
NUMBERED = "numbered"  # second word of a fence whose lines get numbers and anchors, as on the pages of source files
ATTRIBUTE = re.compile(r"""(?<=\s)(href|src)=(["'])(.*?)\2""")  # of an HTML tag
TARGET = re.compile(r"\]\(([^)\s]+)\)")  # of a link or picture in Markdown
ARXIV = re.compile(r"(?<![\d.])(\d\d(?:0[1-9]|1[0-2])\.\d{5})(?![\d.]\d)")  # arXiv number of a paper
LONG_NAME = re.compile(r"\w{30,}")
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|//")  # begins an external address


# --------------------------------------------------------------------------------------------------------------- links


def links(text):
    """Return the links and pictures of a Markdown text, as they are written; perhaps also what looks like one."""
    return [*TARGET.findall(text), *(html.unescape(match[3]) for match in ATTRIBUTE.finditer(text))]


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


def site_link(target, page):
    """Return a Markdown file's link as it must be on the site; both relative to the page, the file's path."""
    path, anchor = resolved(target, page)
    if path is None or target.startswith("#"):
        return target
    if (PAGES / path / "README.md").is_file():
        path += "/README.md"
    elif (PAGES / f"{path}.md").is_file():
        path += ".md"
    path = re.sub(r"(^|/)README\.md$", r"\1index.md", path)
    path = re.sub(r"\.md$", ".html", path)
    anchor = re.sub(r"^(L\d+)(C\d+)?-L\d+(C\d+)?$", r"\1", anchor)  # lines 10 to 20: link to the first
    link = posixpath.relpath(path, posixpath.dirname(page) or ".")
    return f"{link}#{anchor}" if anchor else link


# --------------------------------------------------------------------------------------------------- formulas and code


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
    return f'<div class="formula" tabindex="0">{found}</div>' if display else found


def shown_code(text, language, numbered=False):
    """Return a block of code in colours. numbered: each line has its number, which is also its anchor: L1, L2, …"""
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    code = highlight(text, lexer, HtmlFormatter(nowrap=True))
    if numbered:
        code = "".join(
            f'<span id="L{number}" class="line"><a href="#L{number}" aria-hidden="true" tabindex="-1" '
            f'data-line="{number}"></a>{with_papers(line)}\n</span>'
            for number, line in enumerate(code.removesuffix("\n").split("\n"), 1)
        )
    classes = "highlight numbered" if numbered else "highlight"
    return f'<div class="{classes}"><pre><code tabindex="0">{code}</code></pre></div>\n'


# ------------------------------------------------------------------------------------------------------------ the page


@cache
def parser():
    """Return a parser of GitHub's Markdown, with the site's links, formulas, headings and code."""
    md = MarkdownIt("commonmark", {"html": True})
    md.use(gfm_plugin, dollarmath=True)
    md.use(anchors_plugin, max_level=6)

    def is_linked(tokens, index):
        return sum(token.nesting for token in tokens[:index] if token.tag == "a") > 0

    def link_open(self, tokens, index, options, env):
        tokens[index].attrSet("href", site_link(tokens[index].attrGet("href"), env["page"]))
        return self.renderToken(tokens, index, options, env)

    def text(self, tokens, index, options, env):
        shown = breakable(html.escape(tokens[index].content, quote=False))
        return shown if is_linked(tokens, index) else with_papers(shown)

    def image(self, tokens, index, options, env):
        token = tokens[index]
        path, _ = resolved(token.attrGet("src"), env["page"])
        drawing = (ROOT / path).read_text(encoding="utf-8") if path and path.endswith(".svg") else ""
        if drawing.startswith("<svg"):  # written by hand: inlined, so that it has the colour of its text
            return drawing
        address = site_link(token.attrGet("src"), env["page"])
        token.attrs |= {"alt": self.renderInlineAsText(token.children, options, env), "src": address, "loading": "lazy"}
        shown = self.renderToken(tokens, index, options, env)
        return shown if is_linked(tokens, index) else f'<a href="{address}">{shown}</a>'  # a click shows the full size

    def as_html(self, tokens, index, options, env):
        def link(match):
            return f'{match[1]}="{html.escape(site_link(html.unescape(match[3]), env["page"]))}"'

        return ATTRIBUTE.sub(link, tokens[index].content)

    def code_inline(self, tokens, index, options, env):
        code = re.sub(r"(--\w[\w-]*)", r'<span class="flag">\1</span>', html.escape(tokens[index].content))
        return f"<code>{breakable(code)}</code>"

    def math(self, tokens, index, options, env):
        return formula(tokens[index].content, tokens[index].type != "math_inline")

    def fence(self, tokens, index, options, env):
        language, *more = tokens[index].info.split() or [""]
        if language == "math":
            return math(self, tokens, index, options, env)
        return shown_code(tokens[index].content, language, NUMBERED in more)

    def th_open(self, tokens, index, options, env):
        children = tokens[index + 1].children or []
        if any(child.type == "math_inline" for child in children):  # programs that read pages aloud find no text in it
            tokens[index].attrSet("aria-label", "".join(child.content for child in children))
        return self.renderToken(tokens, index, options, env)

    def heading_close(self, tokens, index, options, env):
        title, anchor = html.escape(tokens[index - 1].content.replace("`", "")), tokens[index - 2].attrGet("id")
        link = f'<a class="headerlink" href="#{anchor}" aria-label="Link to {title}">&para;</a>'
        return link + self.renderToken(tokens, index, options, env)

    for rule in (link_open, text, image, code_inline, fence, th_open, heading_close):
        md.add_render_rule(rule.__name__, rule)
    for name in ("html_inline", "html_block"):
        md.add_render_rule(name, as_html)
    for name in ("math_inline", "math_inline_double", "math_block", "math_block_label"):
        md.add_render_rule(name, math)
    return md


def headings(tokens):
    """Return the headings of a page, or the functions and classes of a source file's, as Python-Markdown's toc does."""
    found = []

    def add(level, anchor, title):
        title = html.escape(title)
        found.append({"level": level, "id": anchor, "name": title, "html": title, "data-toc-label": ""})

    for token, inside in itertools.pairwise(tokens):
        if token.type == "heading_open":
            title = "".join(child.content for child in inside.children if child.type != "image")
            add(int(token.tag[1]), token.attrGet("id"), title)
    if tokens and tokens[-1].info == f"py {NUMBERED}":
        for node in ast.parse(tokens[-1].content).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                add(2, f"L{node.lineno}", node.name)
    return nest_toc_tokens(found)


class GitHubMarkdown(Extension):
    def extendMarkdown(self, md):
        page = ContextPreprocessor.from_markdown(md).page.path

        def convert(text):
            env = {"page": page}
            tokens = parser().parse(text, env)
            md.toc_tokens = headings(tokens)
            return f"<div>\n{parser().renderer.render(tokens, parser().options, env)}</div>"

        md.convert = convert


def makeExtension(**settings):
    return GitHubMarkdown(**settings)
