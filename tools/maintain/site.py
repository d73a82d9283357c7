"""Build the site: the texts, the course, the lab and the differences between any two scripts, as pages in a folder.

    make site                             installs its requirements, and writes site/index.html
    python -m tools.maintain.site --out FOLDER     the same into another folder (needs requirements-site.txt)

The pages need no network and no server: open index.html in a browser. Zensical makes them from Markdown that is
collected in .site/pages: the texts that TEXTS names, and the files that they link to. A linked source file becomes a
page with numbered lines, and links that name a place in it lead to the line (tools/maintain/anchors.py).
tools/maintain/site_markdown.py reads the Markdown.
"""

import html
import itertools
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools import family
from tools.maintain import anchors, site_markdown

ROOT, BUILD = family.ROOT, site_markdown.PAGES.parent
OWN = ROOT / "tools/maintain/site_files"  # the configuration, styles and programs of the pages
TEXTS = {  # the navigation's chapters: Markdown files, in order
    "Course": ["course/README.md", "course/lesson_?.md", "course/lesson_??.md", "course/lecturer.md", "course/*.md"],
    "Algorithms": ["docs/algorithms/README.md", "docs/algorithms/ladder.md", "docs/algorithms/*.md"],
    "Guides": ["docs/README.md", "docs/*.md", "examples/README.md"],
    "Lab": ["lab/README.md", "lab/**/*.md"],
    "Measurements": ["models/kk_tiny/README.md", "benchmarks/README.md", "benchmarks/kk_tiny/*.md"],
}
COPIED = {f".{kind}" for kind in "png svg jpg gif html json jsonl csv pdf ipynb".split()}  # other files become pages
RAW = "benchmarks/kk_tiny/"  # tables that the search skips: every script's name is in all of them
WIDE = ("docs/claims.md", "docs/comparison.md", "docs/objectives.md", "lab/README.md", "benchmarks/llm/", RAW)
FENCE = "~" * 20  # no source file has it
ADDRESS = re.compile(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]*)"')
ANCHOR = re.compile(r'\s(?:id|name)="([^"]+)"')


# ------------------------------------------------------------------------------------------------------- which files


def chapters():
    """Return {chapter: the paths of its Markdown files}, each path once.

    The algorithms are in the order in which their README.md lists them.
    """
    readme = (ROOT / "docs/algorithms/README.md").read_text(encoding="utf-8")
    order = [f"docs/algorithms/{name}" for name in re.findall(r"^\| \[.*?\]\((.*?)\)", readme, re.MULTILINE)]
    whole, taken = {}, {"README.md"}
    for name, patterns in TEXTS.items():
        patterns = [*patterns[:-1], *order, patterns[-1]] if name == "Algorithms" else patterns
        found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        paths = dict.fromkeys(path.relative_to(ROOT).as_posix() for path in found)
        whole[name] = [path for path in paths if path not in taken]
        taken.update(paths)
    return whole


def collect(texts):
    """Return (texts, sources, copies): these texts, and the files that they and linked texts link to.

    texts: Markdown files; sources: files that are shown with numbered lines; copies: files that are copied.
    """
    texts, sources, copies = list(texts), [], []
    for text in texts:  # grows meanwhile
        for link in site_markdown.links((ROOT / text).read_text(encoding="utf-8")):
            path, _ = site_markdown.resolved(link, text)
            if path and (ROOT / path).is_dir():
                path = posixpath.normpath(f"{path}/README.md")
            if path is None or path.startswith("..") or not (ROOT / path).is_file():
                continue
            kind = Path(path).suffix
            of_kind = texts if kind == ".md" else copies if kind in COPIED else sources
            if path not in of_kind:
                of_kind.append(path)
    return texts, sources, copies


# ------------------------------------------------------------------------------------------------------------ pages


def front(**settings):
    """Return the front matter of a page, as JSON, which is YAML, too."""
    return f"---\n{json.dumps(settings)}\n---\n\n"


def settings_of(path):
    """Return the front matter of a text's page; "" if it has none."""
    if path == "README.md":
        return front(title="One file per algorithm", hide=["navigation"])
    if not path.startswith(WIDE):
        return ""
    more = {"search": {"exclude": True}} if path.startswith(RAW) else {}
    if path.startswith("benchmarks/"):  # tables alone, without a heading
        more["title"] = Path(path).stem.replace("_", " ")
    return front(hide=["navigation", "toc"], **more)


def source_page(path):
    """Return the Markdown of the page of a source file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = "make" if path == "Makefile" else Path(path).suffix[1:] or "text"
    # no search: scripts that share most lines would match every query; no navigation: lines are 100 columns wide
    settings = front(title=path, hide=["navigation"], search={"exclude": True})
    return f"{settings}# {path}\n\n{FENCE}{language} {site_markdown.NUMBERED}\n{text.rstrip()}\n{FENCE}\n"


def viewer_data():
    """Return the scripts for the viewer of differences, as JavaScript: {name: its texts}."""
    scripts = {}
    for name in family.family():
        text = family.source(name)
        scripts[name] = {"text": text, "code": "\n".join(family.code_lines(text)) + "\n"}
    return f"const SCRIPTS = {json.dumps(scripts, ensure_ascii=False)};\n"


# -------------------------------------------------------------------------------------------------------------- build


def configuration(whole, texts):
    """Return Zensical's configuration, in TOML, with the navigation. whole: chapters()."""
    rest = set(texts) - {"README.md", *itertools.chain(*whole.values())}
    chosen = {"Home": "README.md"} | whole | {"More": sorted(rest), "Differences": "diff.md", "Lens": "lens.html"}
    settings = (OWN / "zensical.toml").read_text(encoding="utf-8")
    for name, pages in chosen.items():
        settings += f'[[project.nav]]\n"{name}" = {json.dumps(pages)}\n'
    if "GITHUB_REPOSITORY" in os.environ:  # a workflow builds it
        address = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
        settings += f'[[project.extra.social]]\nicon = "fontawesome/brands/github"\nlink = "{address}"\n'
    return settings


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def prepare():
    """Write Zensical's input into the folder .site."""
    pages = BUILD / "pages"
    shutil.rmtree(BUILD, ignore_errors=True)
    whole = chapters()
    texts, sources, copies = collect(["README.md", *itertools.chain(*whole.values())])
    for path in texts:
        write(pages / path, settings_of(path) + anchors.with_anchors((ROOT / path).read_text(encoding="utf-8"), path))
    for path in sources:
        write(pages / f"{path}.md", source_page(path))
    for path in copies:
        (pages / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, pages / path)
    shutil.copytree(OWN, pages / "site_files", ignore=shutil.ignore_patterns("*.toml", "*.md"))
    shutil.copyfile(OWN / "diff.md", pages / "diff.md")
    write(pages / "site_files/scripts.js", viewer_data())
    data = (ROOT / "lab/results/lens_page.jsonl").read_text(encoding="utf-8")
    lens = (ROOT / "lab/page.html").read_text(encoding="utf-8")
    write(pages / "lens.html", lens.replace("DATA_OF_THE_LENS", data))
    write(BUILD / "zensical.toml", configuration(whole, texts))


def faults(folder):
    """List what is wrong with a built site, a line per fault: links that lead nowhere, files from other hosts."""
    pages = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    anchors_of = {name: set(ANCHOR.findall(text)) for name, text in pages.items()}
    found = []
    for name, text in sorted(pages.items()):
        for tag, address in dict.fromkeys(ADDRESS.findall(text)):
            path, anchor = site_markdown.resolved(html.unescape(address).partition("?")[0] or name, name)
            if path is None:
                if tag != "a" and not address.startswith("data:"):
                    found.append(f"{name}: {address} is of another host")
            elif path.startswith("..") or not (folder / path).is_file():
                found.append(f"{name}: {address} leads nowhere")
            elif path in pages and path != "diff.html" and anchor and unquote(anchor) not in anchors_of[path]:
                found.append(f"{name}: {address} leads to no anchor of its page")
    return found


def main(out: Path = ROOT / "site"):
    """Build the site.

    Args:
        out: the folder to write; an earlier build in it is replaced
    """
    if out.exists() and not (out / "site_files/scripts.js").is_file():
        sys.exit(f"error: {out} exists, and no earlier build wrote it")
    prepare()
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--config-file", str(BUILD / "zensical.toml")]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    for name in ("404.html", "sitemap.xml"):  # their links need a server's address
        (BUILD / "site" / name).unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(BUILD / "site", out)
    found = faults(out)
    print(*found, f"wrote {out / 'index.html'}; {len(found) or 'no'} faults", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    tyro.cli(main)
