"""Build the site: the texts, the course, the lab and the differences between any two scripts, as pages in a folder.

    make site                             installs its requirements, and writes site/index.html
    python -m tools.maintain.site --out FOLDER     the same into another folder (needs requirements-site.txt)

The pages need no network and no server: open index.html in a browser. Zensical makes them from Markdown that is
collected in .site/pages. Each build looks for the texts anew: those that TEXTS names, and the files that they link
to. A linked source file becomes a page with numbered lines, and links that name a place in it lead to the line
(tools/maintain/anchors.py). tools/maintain/site_markdown.py reads the Markdown.
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
import textwrap
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools import family
from tools.maintain import anchors, site_markdown

ROOT, BUILD = family.ROOT, site_markdown.PAGES.parent
OWN = ROOT / "tools/maintain/site_files"  # the configuration, styles and programs of the pages
CHAPTERS = {  # the navigation's chapters: Markdown files, in order
    "Course": ["course/README.md", "course/lesson_*.md", "course/lecturer.md", "course/*.md"],
    "Algorithms": ["docs/algorithms/README.md", "docs/algorithms/ladder.md", "docs/algorithms/*.md"],
    "Guides": ["docs/README.md", "docs/*.md", "docs/**/*.md", "examples/README.md"],
    "Lab": ["lab/README.md", "lab/**/*.md"],
    "Measurements": ["models/kk_tiny/README.md", "benchmarks/README.md", "benchmarks/kk_tiny/*.md"],
}
LENS = "lab/results/lens_page.jsonl"  # data of lab/page.html, from a recorded run
HOME_RESPONSES = [9, 8]  # places of the home page's responses in these data: right, and wrong
HOME_SCRIPTS = ["reinforce", "grpo", "dapo", "grpo_ar_lopti", "acpo", "cispo", "gspo"]
SOURCES = ["*.py", "rewards/*.py", "runtime/*.py", "lab/*.py", "tools/*.py", "tools/maintain/*.py"]
AS_THEY_ARE = {f".{kind}" for kind in "png svg jpg gif html json jsonl csv pdf ipynb".split()}  # linked, and copied
RAW = "benchmarks/kk_tiny/"  # tables that the search skips: every script's name is in all of them
WHOLE = (
    "docs/claims.md",
    "docs/comparison.md",
    "docs/objectives.md",
    "lab/README.md",
    "benchmarks/llm/",
    RAW,
)  # texts without a side column
NEVER = {".git", ".venv", ".site", "site", ".venv-site", "runs", "__pycache__"}
FENCE = "~" * 20  # no source file has it
ADDRESS = re.compile(r'<(\w+)\b[^>]*?\s(?:href|src)="([^"]*)"')
ANCHOR = re.compile(r'\s(?:id|name)="([^"]+)"')


@dataclass
class Args:
    """The folder of the site."""

    out: Path = ROOT / "site"  # the folder to write; earlier builds in it are removed


# ------------------------------------------------------------------------------------------------------- which files


def natural(path):
    """Return a key that sorts lesson_10 after lesson_9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)]


def found(pattern):
    """Return the paths that match a pattern, from the root of the repository, in order."""
    paths = (path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern) if path.is_file())
    return sorted((path for path in paths if shown(path)), key=natural)


def shown(path):
    """Return whether a path may be part of the site."""
    return not NEVER & set(path.split("/"))


def chapters():
    """Return {chapter: the paths of its Markdown files}.

    The algorithms are in the order in which their README.md lists them.
    """
    whole = {}
    readme = (ROOT / CHAPTERS["Algorithms"][0]).read_text(encoding="utf-8")
    order = [f"docs/algorithms/{name}" for name in re.findall(r"^\| \[.*?\]\((.*?)\)", readme, re.MULTILINE)]
    for name, patterns in CHAPTERS.items():
        paths = [path for pattern in patterns for path in found(pattern)]
        if name == "Algorithms":
            paths.sort(key=lambda path: order.index(path) if path in order else -1)
        taken = {"README.md", *itertools.chain(*whole.values())}
        whole[name] = [path for path in dict.fromkeys(paths) if path not in taken]
    return whole


def collect(texts):
    """Return (texts, sources, copies): what these texts need, including the files that they link to.

    texts: Markdown files; sources: files that are shown with numbered lines; copies: files that are copied.
    """
    known = [path for pattern in SOURCES for path in found(pattern)]
    sources, copies = list(known), []
    texts = list(texts)
    known += texts
    for text in texts:  # grows meanwhile
        for link in site_markdown.links((ROOT / text).read_text(encoding="utf-8")):
            path, _ = site_markdown.resolved(link, text)
            if path and (ROOT / path).is_dir():
                path = posixpath.normpath(f"{path}/README.md")
            if path is None or path in known or path.startswith("..") or not shown(path) or not (ROOT / path).is_file():
                continue  # the last three: it leads out of the repository
            is_copied = Path(path).suffix in AS_THEY_ARE
            (texts if path.endswith(".md") else copies if is_copied else sources).append(path)
            known.append(path)
    return texts, sources, copies


# ------------------------------------------------------------------------------------------------------------ pages


def front(**settings):
    """Return the front matter of a page, as JSON, which is YAML, too."""
    return f"---\n{json.dumps(settings)}\n---\n\n"


def settings_of(path):
    """Return the front matter of a text's page; "" if it has none."""
    if path == "README.md":
        return front(title="One file per algorithm", hide=["navigation"])
    if not path.startswith(WHOLE):
        return ""
    more = {"search": {"exclude": True}} if path.startswith(RAW) else {}
    if path.startswith("benchmarks/"):  # tables alone, without a heading
        more["title"] = Path(path).stem.replace("_", " ")
    return front(hide=["navigation", "toc"], **more)


def source_page(path, texts):
    """Return the Markdown of the page of a source file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    stem = path.removesuffix(".py")
    above = "../" * path.count("/")
    about = []
    if stem in family.PARENT:
        parent = family.PARENT[stem]
        about.append(f"[what differs from {parent}.py]({above}diff.html#{state(parent, stem)})")
    if f"docs/algorithms/{stem}.md" in texts:
        about.append(f"[the algorithm](docs/algorithms/{stem}.md)")
    about.append(f"[all source files]({above}source.md)")
    language = "make" if path == "Makefile" else Path(path).suffix[1:] or "text"
    # no search: scripts that share most lines would match every query; no navigation: lines are 100 columns wide
    return (
        front(title=path, hide=["navigation"], search={"exclude": True}) + f"# {path}\n\n{' · '.join(about)}\n\n"
        f"{FENCE}{language} {site_markdown.NUMBERED}\n{text.rstrip()}\n{FENCE}\n"
    )


def home(text):
    """Return the README's text, with three ways to begin, and a small lens in place of its figure."""
    title, first, _, rest = text.split("\n\n", 3)
    data = json.loads((ROOT / LENS).read_text(encoding="utf-8"))
    data["responses"] = [data["responses"][number] for number in HOME_RESPONSES]
    for response in data["responses"]:
        response["weights"] = {script: response["weights"][script] for script in HOME_SCRIPTS}
    data |= {"scripts": HOME_SCRIPTS, "summary": None, "start": ["probability", "grpo_ar_lopti/first"]}
    return f"""{title}

{first}

<p class="begin">
<a class="md-button md-button--primary" href="#try-it">Run it on your laptop</a>
<a class="md-button" href="course/lesson_0.md">Start the course</a>
<a class="md-button" href="diff.html#{state("grpo", "dr_grpo")}">Compare two scripts</a>
</p>

**What does an update do to each token?** A small model answered the puzzle below twice.
Left: how probable each token was. Right: its weight in the update of GRPO with AR and Lopti, blue to make it more
probable, orange less. Low-probability tokens weigh less. Choose other algorithms, and point at a token or tap it.

{lens(data, "small").replace('<details id="problem">', '<details id="problem" open>')}

[All 32 responses and all algorithms](lab/lens.md)

{rest}"""


def lens(data, kind="whole"):
    """Return the HTML of the lens (lab/page.html) with these data, in the site's design.

    Its styles apply only inside #lens, and the site's choice of light or dark overrides the system's.
    """
    text = (ROOT / "lab" / "page.html").read_text(encoding="utf-8")
    text = text.replace("DATA_OF_THE_LENS", json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"))
    style = re.search(r"<style>\n(.*?)</style>", text, re.DOTALL)[1]
    chosen = 'color-scheme: light; [data-md-color-scheme="slate"] & { color-scheme: dark; }'
    style = style.replace("color-scheme: light dark;", chosen)
    style = re.sub(r"(?m)^( *)(:root|body)(?= \{)", r"\1&", style)
    body, *scripts = re.search(r"<body>\n(.*)</body>", text, re.DOTALL)[1].split("<script")
    parts = [f'<div id="lens" class="{kind}">\n{body}</div>', f"<style>\n#lens {{\n{style}}}\n</style>"]
    parts = [re.sub(r"\n\s*\n", "\n", part) for part in parts]  # an empty line would end a block of HTML
    parts += [f"<script{script.rstrip()}" for script in scripts]
    return "\n\n".join(parts)


def sources_page(sources):
    """Return the Markdown of the list of all source files: their names and descriptions."""
    lines = ["# Source files", ""]
    by_folder = sorted(sources, key=lambda path: (posixpath.dirname(path), path))
    for folder, paths in itertools.groupby(by_folder, posixpath.dirname):
        lines += [f"## {folder or 'The scripts'}", ""]
        for path in paths:
            about = ""
            if path.endswith(".py"):
                first = " ".join(family.paragraphs((ROOT / path).read_text(encoding="utf-8"))[0].split())
                about = re.sub(r"([\\`*_\[\]<>|$])", r"\\\1", first)
            lines.append(f"- [`{path}`]({path})" + (f": {about}" if about else ""))
        lines.append("")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- the viewer


def state(left, right):
    """Return the viewer's state for its address."""
    return f"left={left}&right={right}"


def viewer_data(names):
    """Return the scripts for the viewer, as JavaScript: texts without the module docstring, and the docstring."""
    scripts = {}
    for name in names:
        text = family.source(name)
        paragraphs = family.paragraphs(text)
        objective = [part for part in paragraphs if all(line.startswith("    ") for line in part.splitlines())]
        pieces = family.pieces(text)
        above = pieces[0].last
        scripts[name] = {
            "parent": family.PARENT.get(name),
            "about": site_markdown.with_papers(html.escape(" ".join(paragraphs[0].split()))),
            "objective": textwrap.dedent("\n\n".join(objective)),
            "above": above,  # lines of the docstring
            "sections": {piece.name: piece.section for piece in pieces if piece.name.isidentifier()},
            "text": "".join(text.splitlines(keepends=True)[above:]),
            "code": "\n".join(family.code_lines(text)) + "\n",
        }
    return f"const SCRIPTS = {json.dumps(scripts, ensure_ascii=False)};\n"


# -------------------------------------------------------------------------------------------------------------- build


def navigation(whole, texts):
    """Return Zensical's navigation in TOML. whole: chapters()."""
    rest = set(texts) - {"README.md", *itertools.chain(*whole.values())}
    chosen = {"Home": "README.md"} | whole | {"More": sorted(rest, key=natural)}
    chosen["Lab"] = [*chosen["Lab"], "lab/lens.md"]
    chosen |= {"Differences": "diff.md", "Source": "source.md"}
    return "".join(f'[[project.nav]]\n"{name}" = {json.dumps(pages)}\n' for name, pages in chosen.items() if pages)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def prepare(folder):
    """Write Zensical's input into a folder."""
    pages = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    whole = chapters()
    texts, sources, copies = collect(["README.md", *itertools.chain(*whole.values())])
    for path in texts:
        text = anchors.with_anchors((ROOT / path).read_text(encoding="utf-8"), path)
        write(pages / path, settings_of(path) + (home(text) if path == "README.md" else text))
    for path in sources:
        write(pages / f"{path}.md", source_page(path, texts))
    for path in copies:
        (pages / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, pages / path)
    start = front(title="The lens", hide=["navigation", "toc"], search={"exclude": True})
    write(pages / "lab/lens.md", start + lens(json.loads((ROOT / LENS).read_text(encoding="utf-8"))) + "\n")
    shutil.copytree(OWN, pages / "site_files", ignore=shutil.ignore_patterns("*.toml", "*.md"))
    write(pages / "source.md", sources_page(sources))
    shutil.copyfile(OWN / "diff.md", pages / "diff.md")
    write(pages / "site_files/scripts.js", viewer_data(family.family()))
    settings = (OWN / "zensical.toml").read_text(encoding="utf-8") + navigation(whole, texts)
    if "GITHUB_REPOSITORY" in os.environ:  # a workflow builds it
        address = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
        settings = settings.replace("[project]\n", f'[project]\nrepo_url = "{address}"\n', 1)
    write(folder / "zensical.toml", settings)


def publish(built, out):
    """Replace an earlier build by the new one."""
    for name in ("404.html", "sitemap.xml"):  # their links need a server's address
        (built / name).unlink(missing_ok=True)
    for page in built.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        write(page, text.replace(' data-md-component="source"', ""))  # or the theme would ask GitHub for its stars
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(built, out)


# -------------------------------------------------------------------------------------------------------------- check


def faults(folder):
    """List what is wrong with a built site, a line per fault: links that lead nowhere, files from other hosts."""
    pages = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}
    anchors_of = {name: set(ANCHOR.findall(text)) for name, text in pages.items()}
    found = []
    for name, text in sorted(pages.items()):
        for tag, address in dict.fromkeys(ADDRESS.findall(text)):
            path, anchor = site_markdown.resolved(html.unescape(address).partition("?")[0] or name, name)
            if path is None:
                if (tag != "a" and not address.startswith("data:")) or re.match("/[^/]", address):
                    found.append(f"{name}: {address} is of another host, or begins at its root")
            elif path.startswith("..") or not (folder / path).is_file():
                found.append(f"{name}: {address} leads nowhere")
            elif path in pages and path != "diff.html" and anchor and unquote(anchor) not in anchors_of[path]:
                found.append(f"{name}: {address} leads to no anchor of its page")
    return found


def main(args):
    if args.out.exists() and any(args.out.iterdir()) and not (args.out / "site_files/scripts.js").is_file():
        sys.exit(f"error: {args.out} exists, and no earlier build wrote it")
    prepare(BUILD)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--config-file", str(BUILD / "zensical.toml")]
    made = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if made.returncode:
        sys.exit(made.returncode)
    publish(BUILD / "site", args.out)
    found = faults(args.out)
    print(*found, f"wrote {args.out / 'index.html'}; {len(found) or 'no'} faults", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
