"""Looks at the built site in a browser: links, tables, accessibility, and what the first page costs.

    make site && .venv-site/bin/python tests/check_site.py    exit code 1 if there is a fault
    … tests/check_site.py --shots FOLDER                      also writes pictures of ten pages

Every page is opened at 1280 and at 400 pixels. A fault is a link that leads nowhere, a table that hides a column at
1280 pixels, a page that is wider than its window, or a rule of axe-core that does not hold, in light or in dark. Of the
pages of source files, which are all made alike, two are looked at.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import browser

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
WIDE, NARROW, HEIGHT = 1280, 400, 900  # pixels
SOURCES = ["grpo.py.html", "rewards/kk.py.html"]
PICTURES = [
    "index.html",
    "course/lesson_2.html",
    "docs/algorithms/dapo.html",
    "docs/algorithms/index.html",
    "docs/claims.html",
    "docs/comparison.html",
    "docs/objectives.html",
    "diff.html",
    "grpo.py.html",
    "lab/results/lens.html",
]
HIDING = """[...document.querySelectorAll('article table:not(.diff)')].filter((table) => {
  for (let box = table; box.tagName !== 'ARTICLE'; box = box.parentElement)
    if (box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX !== 'visible') return true;
}).length"""
AXE = """axe.run(document, OPTIONS).then((found) => found.violations.map(
  (rule) => `${rule.id}: ${rule.nodes.length} × ${rule.nodes[0].target} ${rule.nodes[0].any[0]?.message ?? ''}`))"""
CONTRAST = "{runOnly: ['color-contrast']}"
COST = """(() => {
  const [page] = performance.getEntriesByType('navigation');
  const [paint] = performance.getEntriesByName('first-contentful-paint');
  return [Math.round(paint.startTime), Math.round(page.loadEventEnd)];
})()"""


def pages(site):
    """The addresses of the pages that are looked at, from the root of the site."""
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    return [name for name in names if not name.endswith(".py.html") or name in SOURCES]


def look(page, site, name, axe):
    """Yields what is wrong with a page, a line each, and how many tables hide columns on a phone, as a number."""
    address = f"{site.as_uri()}/{name}"
    page.resize(WIDE, HEIGHT)
    page.dark(False)
    page.open(address)
    if hiding := page.run(HIDING):
        yield f"{name}: {hiding} tables hide columns at {WIDE} pixels"
    page.run(axe)
    yield from (f"{name}: {fault}" for fault in page.run(AXE.replace("OPTIONS", "{}")))
    page.dark()
    page.open(address)
    page.run(axe)
    yield from (f"{name}, dark: {fault}" for fault in page.run(AXE.replace("OPTIONS", CONTRAST)))
    page.dark(False)
    page.resize(NARROW, HEIGHT)
    if (width := page.run("document.documentElement.scrollWidth")) > NARROW:
        yield f"{name}: {width} pixels wide in a window of {NARROW}"
    yield page.run(HIDING)


def cost(page, site):
    """Bytes of the first page with all that it loads, and milliseconds to its first paint and to its end."""
    page.requests.clear()
    page.open((site / "index.html").as_uri())
    paths = {Path(address.removeprefix("file://").split("?")[0]) for address in page.requests}
    return sum(path.stat().st_size for path in paths if path.is_file()), *page.run(COST)


def take_pictures(page, site, folder):
    """Writes pictures of PICTURES in both widths, light and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        for width in (WIDE, NARROW):
            for scheme in ("light", "dark"):
                page.resize(width, HEIGHT)
                page.dark(scheme == "dark")
                page.open(f"{site.as_uri()}/{name}")
                picture = name.removesuffix(".html").replace("/", "_")
                page.screenshot(folder / f"{picture}_{width}_{scheme}.png")


def main():
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("site", nargs="?", type=Path, default=ROOT / "site", help="the folder of the site")
    options.add_argument("--shots", type=Path, help="a folder for pictures")
    args = options.parse_args()
    import axe_core_python

    from tools.site import faults

    site = args.site.resolve()
    axe = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    found = faults(site)
    hiding = 0
    with tempfile.TemporaryDirectory() as profile, browser.Browser(profile) as page:
        size, paint, end = cost(page, site)
        names = pages(site)
        for name in names:
            *lines, of_page = look(page, site, name, axe)
            found += lines
            hiding += of_page
        if args.shots:
            take_pictures(page, site, args.shots)
    print(*found, sep="\n", end="\n" * bool(found))
    print(f"{len(names)} pages looked at; {hiding} tables hide columns at {NARROW} pixels")
    print(f"first page: {size / 1e6:.2f} MB, first paint after {paint} ms, all of it after {end} ms")
    print(f"{len(found) or 'no'} faults")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
