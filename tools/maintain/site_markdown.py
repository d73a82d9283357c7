"""Read the site's Markdown as GitHub reads it, and turn its formulas into MathML.

Zensical reads Markdown with Python-Markdown, which shows lists, <details> and formulas differently from GitHub. This
extension of Python-Markdown passes a page to markdown-it-py, which follows CommonMark and GitHub's additions to it.
tools/maintain/site_files/zensical.toml names it.

Links are written as for GitHub. A link to a Markdown file leads to its page here, and a link to a source file to
the file's page.
"""

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

PAGES = Path(__file__).parents[2] / ".site/pages"  # the Markdown of all pages; a source file's is FILE.md
SAME_AS = {r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lvert": "|", r"\rvert": "|"}  # for commands that it lacks
FUNCTION = re.compile(r"<m([io])>(log|min|max|exp)</m\1>")
UNKNOWN = re.compile(r">\s*(\\[A-Za-z]+|&)\s*<")  # commands that the converter left unchanged
NUMBER = re.compile(r'<span id="L-(\d+)"><span class="linenos">( *)\d+</span>')  # as Pygments writes a line's number
ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{5})")
NUMBERED = "numbered"  # second word of a fence whose lines get numbers and anchors, as on the pages of source files
TARGET = re.compile(r'(?:\]\(|\bsrc="|\bsrcset=")([^)\s"]+)[)"]')  # of a link or picture
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|//")  # begins an external address


def links(text):
    """Return the links and pictures of a Markdown text, as they are written; perhaps also what looks like one."""
    return TARGET.findall(text)


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
    link = posixpath.relpath(path, posixpath.dirname(page) or ".")
    return f"{link}#{anchor}" if anchor else link


def formula(latex, display):
    """Return a formula as MathML. ValueError if the converter does not know a command in it."""
    for theirs, ours in SAME_AS.items():
        latex = latex.replace(theirs, ours)
    try:
        found = convert(latex.strip(), display="block" if display else "inline")
    except Exception as error:  # the converter raises a dozen kinds, with no common one
        raise ValueError(f"{latex!r} is no formula: {type(error).__name__}") from error
    if unknown := UNKNOWN.search(found):
        raise ValueError(f"unknown in the formula {latex!r}: {unknown[1]}")
    found = FUNCTION.sub(r'<mi class="function">\2</mi>', found)  # site.css puts thin spaces around it
    return f'<div class="formula">{found}</div>' if display else found


def shown_code(text, language, numbered=False):
    """Return a block of code in colours. numbered: each line has its number, which links to it: #L-1, #L-2, …"""
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    numbers = {"linenos": "inline", "linespans": "L"} if numbered else {}
    shown = highlight(text, lexer, HtmlFormatter(cssclass="highlight", wrapcode=True, **numbers))
    link = r'<a href="#L-\1" aria-label="line \1" tabindex="-1" data-linenos="\2\1 "></a>'
    shown = NUMBER.sub(rf'<span id="L-\1" class="line">{link}', shown)
    return ARXIV.sub(r'<a href="https://arxiv.org/abs/\1">\g<0></a>', shown) if numbered else shown


def in_colours(text):
    """Return the lines of a Python program in colours, as HTML."""
    return highlight(text, get_lexer_by_name("python", stripnl=False), HtmlFormatter(nowrap=True))


@cache
def parser():
    """Return a parser of GitHub's Markdown, with the site's links, formulas and code."""
    md = MarkdownIt("commonmark", {"html": True})
    md.use(gfm_plugin, dollarmath=True)
    md.use(anchors_plugin, max_level=6)

    def link_open(self, tokens, index, options, env):
        tokens[index].attrs["href"] = site_link(tokens[index].attrs["href"], env["page"])
        return self.renderToken(tokens, index, options, env)

    def image(self, tokens, index, options, env):
        tokens[index].attrs["src"] = site_link(tokens[index].attrs["src"], env["page"])
        return self.image(tokens, index, options, env)

    def math(self, tokens, index, options, env):
        return formula(tokens[index].content, tokens[index].type != "math_inline")

    def fence(self, tokens, index, options, env):
        language, *more = tokens[index].info.split() or [""]
        if language == "math":
            return math(self, tokens, index, options, env)
        return shown_code(tokens[index].content, language, NUMBERED in more)

    for rule in (link_open, image, fence):
        md.add_render_rule(rule.__name__, rule)
    for name in ("math_inline", "math_inline_double", "math_block", "math_block_label"):
        md.add_render_rule(name, math)
    return md


def headings(tokens):
    """Return the headings of a page, as Python-Markdown's toc does."""
    found = []
    for token, inside in itertools.pairwise(tokens):
        if token.type == "heading_open":
            title = html.escape("".join(child.content for child in inside.children if child.type != "image"))
            names = {"name": title, "html": title, "data-toc-label": ""}
            found.append({"level": int(token.tag[1]), "id": token.attrs["id"], **names})
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
