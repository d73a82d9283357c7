"""Build the site: the texts, the course, the lab and the differences between any two scripts, as pages in a folder.

    make site                             installs its requirements, and writes site/index.html
    python -m tools.maintain.site --out FOLDER     the same into another folder (needs requirements-site.txt)

The pages need no network and no server: open index.html in a browser. Zensical makes them from Markdown that is
collected in .site/pages: the texts that TEXTS names, and the files that they link to. A linked source file becomes a
page with numbered lines, and links that name a place in it lead to the line (tools/maintain/anchors.py).
tools/maintain/site_markdown.py reads the Markdown.
"""

import difflib
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

if ADDRESS_OF_REPOSITORY := os.environ.get("GITHUB_REPOSITORY", ""):  # a workflow builds it
    ADDRESS_OF_REPOSITORY = f"{os.environ['GITHUB_SERVER_URL']}/{ADDRESS_OF_REPOSITORY}"
ROOT, BUILD = family.ROOT, site_markdown.PAGES.parent
OWN = ROOT / "tools/maintain/site_files"  # the configuration, styles and programs of the pages
TEXTS = {  # the navigation's chapters: Markdown files, in order
    "Course": ["course/README.md", "course/lesson_*/README.md", "course/lecturer.md", "course/*.md"],
    "Algorithms": ["docs/algorithms/README.md", "docs/algorithms/ladder.md", "docs/algorithms/*.md"],
    "Guides": ["docs/README.md", "docs/*.md"],
    "Lab": ["lab/README.md", "lab/**/*.md"],
}
PARTS = {"docs/README.md": "## ", "course/README.md": "| | **"}  # what begins a part's name on a chapter's first page
COPIED = {f".{kind}" for kind in "png svg jpg gif html json jsonl csv pdf ipynb".split()}  # other files become pages
# What the search skips: tables with every script's name, and texts that no reader of the site looks for.
UNSOUGHT = ("benchmarks/", "docs/README.md", "course/quiz.md", "course/lecturer.md", "CHANGELOG.md")
WIDE = ("docs/claims.md", "docs/comparison.md", "docs/objectives.md", "lab/README.md", "benchmarks/")
FENCE = "~" * 20  # no source file has it
LENS = re.compile(r"<!-- lens: (\S+) (\S+) -->")  # a lens with these two sides stands here
FEW = ["grpo", "dr_grpo", "dapo", "grpo_ar_lopti", "cispo", "gspo", "dppo", "entropy_top"]  # a small lens's algorithms
ADDRESS = re.compile(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]*)"')
MOVED = '<script>location.replace("{0}" + location.hash)</script>\n<a href="{0}">This page has moved.</a>\n'
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
    found = {}
    if path == "README.md":
        found |= {"title": "One file per algorithm", "hide": ["navigation"]}
    if path.startswith(UNSOUGHT):
        found["search"] = {"exclude": True}
    if path.startswith(WIDE):
        found["hide"] = ["navigation"]
    if path.startswith("benchmarks/"):  # tables alone, without a heading
        found |= {"title": Path(path).stem.replace("_", " "), "hide": ["navigation", "toc"]}
    return front(**found) if found else ""


def source_page(path):
    """Return the Markdown of the page of a source file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = "make" if path == "Makefile" else Path(path).suffix[1:] or "text"
    # no search: scripts that share most lines would match every query; no navigation: lines are 100 columns wide
    settings = front(title=path, hide=["navigation"], search={"exclude": True})
    return f"{settings}# {path}\n\n{FENCE}{language} {site_markdown.NUMBERED}\n{text.rstrip()}\n{FENCE}\n"


def viewer_data():
    """Return the scripts for the viewer of differences, as JavaScript.

    LINES: [text, text in colours, code without comments] of all different lines; SCRIPTS: {name: its parent, and its
    lines: [place in LINES, section]}.
    """
    lines, scripts = {}, {}
    for name in family.family():
        text = family.source(name)
        code = family.numbered_code_lines(text)
        colours = site_markdown.in_colours(text).splitlines()
        sections = [
            re.sub(r"^Args\..*", "Args", part)
            for part, first, last in family.pieces(text)
            for _ in range(first, last + 1)
        ]
        rows = []
        for number, (line, section) in enumerate(zip(text.splitlines(), sections)):
            whole = (line, colours[number], code.get(number, ""))
            rows.append([lines.setdefault(whole, len(lines)), section])
        scripts[name] = {"parent": family.PARENT.get(name), "lines": rows}
    return f"const LINES = {json.dumps([*lines])};\nconst SCRIPTS = {json.dumps(scripts)};\n"


def lens(page, start=None):
    """Return lab/page.html's lens as a part of a page. start: what its sides show, of few algorithms and responses."""
    _, _, text = (ROOT / "lab/page.html").read_text(encoding="utf-8").partition("<!-- lens: begin")
    text = text.partition("-->")[2].partition("<!-- lens: end")[0].replace("DATA_OF_THE_LENS", "null")
    data = f'<script src="{"../" * page.count("/")}site_files/lens_{"few" if start else "all"}.js"></script>\n'
    begin = f"<script>LENS_DATA.start = {json.dumps(start)};</script>\n" if start else ""
    return data + begin + re.sub(r"\n+", "\n", text)  # a blank line would end the HTML in Markdown


def lens_data():
    """Return the lens's data as two JavaScript files: {name: text}."""
    data = json.loads((ROOT / "lab/results/lens_page.jsonl").read_text(encoding="utf-8"))
    few = {name: value for name, value in data.items() if name != "summary"} | {"scripts": FEW}
    short = [response for response in data["responses"] if len(response["tokens"]) < 50]
    few["responses"] = [one for one in short if one["correct"]] + [one for one in short if not one["correct"]][::6]
    return {
        f"lens_{name}.js": f"globalThis.LENS_DATA = {json.dumps(of)};\n" for name, of in (("all", data), ("few", few))
    }


def home():
    """Return the Markdown of the first page: site_files/home.md with parts of README.md."""
    first, *parts = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")
    sections = {part.partition("\n")[0]: f"## {part.strip()}\n" for part in parts}
    text = (OWN / "home.md").read_text(encoding="utf-8")
    clone = f"git clone {ADDRESS_OF_REPOSITORY}.git && cd {ADDRESS_OF_REPOSITORY.rpartition('/')[2]} && make demo"
    text = text.replace("CLONE", f"```bash\n{clone}\n```" if ADDRESS_OF_REPOSITORY else "")
    codes = [family.code_lines(family.source(name)) for name in ("grpo", "dr_grpo")]
    hunks = "\n".join([*difflib.unified_diff(*codes, lineterm="", n=2)][2:])
    text = text.replace("HUNKS", f"```diff\n{hunks}\n```")
    text = text.replace("PICTURE", next(part for part in first.split("\n\n") if part.startswith(("<picture", "!["))))
    text = re.sub(r"^SECTION (.*)$", lambda match: sections.pop(match[1]), text, flags=re.MULTILINE)
    return "\n".join([text, *sections.values()])


# -------------------------------------------------------------------------------------------------------------- build


def in_parts(pages):
    """Return a chapter's pages as TOML, in the parts and the order in which its first page links to them."""
    first, *rest = pages
    parts, seen = {}, set()
    begin = PARTS.get(first)
    for line in (ROOT / first).read_text(encoding="utf-8").splitlines() if begin else ():
        if line.startswith(begin):
            part = parts.setdefault(line.strip("|#* "), [])
        elif line.startswith(("- ", "| ")) and parts:
            found = [site_markdown.resolved(link, first)[0] for link in site_markdown.links(line)[:1]]
            part += [path for path in found if path and path.endswith(".md") and path not in seen]
            seen.update(found)
    inner = [f'{{"{name}" = {json.dumps(paths)}}}' for name, paths in parts.items() if paths]
    others = [json.dumps(path) for path in rest if path not in seen]
    return f"[{', '.join([json.dumps(first), *inner, *others])}]"


def configuration(whole):
    """Return Zensical's configuration, in TOML, with the navigation. whole: chapters()."""
    settings = (OWN / "zensical.toml").read_text(encoding="utf-8")
    chosen = {name: in_parts(pages) for name, pages in whole.items()}
    for name, pages in ({"Home": '"README.md"'} | chosen | {"Differences": '"diff.md"', "Lens": '"lens.md"'}).items():
        settings += f'[[project.nav]]\n"{name}" = {pages}\n'
    if ADDRESS_OF_REPOSITORY:
        name = ADDRESS_OF_REPOSITORY.rpartition("/")[2]
        address = f'repo_url = "{ADDRESS_OF_REPOSITORY}"\nrepo_name = "{name}"'
        settings = settings.replace("[project]", f"[project]\n{address}", 1)
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
        text = home() if path == "README.md" else (ROOT / path).read_text(encoding="utf-8")
        text = LENS.sub(lambda sides, path=path: lens(path, sides.groups()), text)
        write(pages / path, settings_of(path) + anchors.with_anchors(text, path))
    for path in sources:
        write(pages / f"{path}.md", source_page(path))
    for path in copies:
        (pages / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, pages / path)
    shutil.copytree(OWN, pages / "site_files", ignore=shutil.ignore_patterns("*.toml", "*.md", "overrides"))
    shutil.copyfile(OWN / "diff.md", pages / "diff.md")
    write(pages / "site_files/scripts.js", viewer_data())
    for name, text in lens_data().items():
        write(pages / "site_files" / name, text)
    write(pages / "lens.md", (OWN / "lens.md").read_text(encoding="utf-8") + lens("lens.md"))
    shutil.copytree(OWN / "overrides", BUILD / "overrides")
    write(BUILD / "zensical.toml", configuration(whole))


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
    for page in out.glob("course/lesson_*/index.html"):  # lessons had the addresses course/lesson_5.html and so on
        write(out / f"course/lesson_{int(page.parent.name[-2:])}.html", MOVED.format(f"{page.parent.name}/index.html"))
    found = faults(out)
    print(*found, f"wrote {out / 'index.html'}; {len(found) or 'no'} faults", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    tyro.cli(main)
