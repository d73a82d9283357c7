"""Make a notebook of nano_grpo.py, one of its sections per cell: examples/nano_grpo.ipynb. pages.py writes it."""

import json
import re

from tools import family

FILE = family.ROOT / "examples" / "nano_grpo.ipynb"
BEFORE = """# {title}

{text}

The cells below are [nano_grpo.py](../nano_grpo.py), section by section. Any runtime of Colab will do: a T4 as well as a
CPU. On two cores of a CPU it takes up to ten minutes. In Colab, put the repository's address into the first cell."""
INSTALL = """\
import os
from pathlib import Path

REPOSITORY = ""  # https://…, for Colab
if Path("nano_grpo.ipynb").exists():  # started in examples/; the paths below begin at the root
    os.chdir("..")
if not Path("nano_grpo.py").exists():
    !git clone --depth 1 $REPOSITORY repository
    os.chdir("repository")
%pip install --quiet torch transformers"""


def text():
    """Return the notebook as text: what it is, the installation, then a heading and the code of each section."""
    about, *sections = re.split(r"^# -{5,} (.+)\n", family.source("nano_grpo"), flags=re.MULTILINE)
    docstring, imports = re.fullmatch(r'"""(.+?)"""\n(.+)', about, re.DOTALL).groups()
    title, _, rest = docstring.partition("\n")
    rest = re.sub(r"\n( {4}.+\n)+\n", "\n", rest)  # without its commands
    cells = [("markdown", BEFORE.format(title=title.rstrip("."), text=rest.strip())), ("code", INSTALL)]
    cells.append(("code", imports.strip()))
    for heading, code in zip(sections[::2], sections[1::2]):
        cells += [("markdown", f"## {heading[0].upper()}{heading[1:]}"), ("code", code.strip())]
    notebook = {
        "cells": [cell(number, *kind_and_source) for number, kind_and_source in enumerate(cells)],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def cell(number, kind, source):
    """Return a cell as a notebook's file has it. kind: "markdown" or "code"."""
    made = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
    return made if kind == "markdown" else made | {"execution_count": None, "outputs": []}
