"""Combine trainers: each is a difference from its parent, and differences add up.

    python -m tools.combine dapo grpo_multi_turn --out mine.py         then: python mine.py
    python -m tools.combine gspo grpo_ar_lopti grpo_tis --out mine.py  one after the other

Each definition and each setting is merged for itself, over the scripts' nearest common ancestor in the family. The
lines of a function are merged by git merge-file. Two insertions at one place are both taken, in the order of the names,
if neither sets what the other one uses. The docstring is made anew. If both scripts change the same line, both changes
are shown, nothing is written and the exit code is 1. What does not conflict may still be wrong: read the result.
"""

import ast
import builtins
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import flags
from tools import family

# Two scripts that change the same lines of these are alternatives: both say what is maximised, or over which tokens.
OBJECTIVE = {"policy_loss", "compute_advantages", "token_returns", "estimate_advantages", "value_loss"}
WIDTH = 100  # columns of a script
QUOTES, NEW_PARAGRAPH = '"', "\n\n"
DOC = '"""DOC"""'  # stands for a docstring while the code is merged


@dataclass
class Args:
    """The scripts to combine."""

    scripts: tyro.conf.Positional[tuple[str, ...]]  # names or files, such as dapo grpo_multi_turn
    out: Path  # the new script, in the repository's root


@dataclass
class Conflict(Exception):
    """Two scripts that both change the same lines of a piece."""

    piece: str  # "update", "Args.kl_coef"
    hunks: list  # (name of a parent, its lines), one for each

    def is_of_objective(self):
        lines = "".join(text for _, text in self.hunks)
        return self.piece in OBJECTIVE or "divisor =" in lines or 'minibatch["mask"] =' in lines


# -------------------------------------------------------------------------------------- a script's pieces


@dataclass
class Script:
    """A script cut into pieces. parts: {key: text}, in order; imports, {key: lines}, apart."""

    name: str
    docstring: str
    parts: dict
    imports: dict


@functools.cache
def read(name, text):
    """Return the Script of a text. SyntaxError if it is not Python."""
    lines = text.splitlines(keepends=True)
    docstring, parts, imports = "", {}, {}
    for piece, first, last in family.pieces(text):
        body = "".join(lines[first - 1 : last])
        if piece == "module docstring":
            docstring = body
            continue
        if piece == "imports":
            block = "imports" if "flags.check(Args, TASKS)" in parts else "first imports"
            imports[block] = imports.get(block, "") + body
            parts[block] = ""
            continue
        for rule in re.findall(r"\s*^ *# -{4,}.*\n", body, re.M):  # a heading is a piece of its own
            heading = rule.strip(" #-\n")
            parts[unused(f"# {heading}", parts)] = rule
            body = body.replace(rule, "")
        parts[unused(piece, parts)] = body
    return Script(name, docstring, parts, imports)


def unused(key, parts):
    """Return a key for a piece: the class line and the docstring of Args have one name."""
    while key in parts:
        key += "."
    return key


def split_docstring(text):
    """Return (the text with DOC in place of its docstring, the docstring or "")."""
    try:
        [node] = ast.parse(textwrap.dedent(text)).body
    except (SyntaxError, ValueError):  # a class's first line, or several statements
        return text, ""
    held = node.body if isinstance(node, ast.FunctionDef | ast.ClassDef) else [node]
    if not (isinstance(held[0], ast.Expr) and isinstance(getattr(held[0].value, "value", None), str)):
        return text, ""
    lines = text.splitlines(keepends=True)
    first, last = held[0].lineno - 1, held[0].end_lineno
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    return "".join([*lines[:first], f"{indent}{DOC}\n", *lines[last:]]), "".join(lines[first:last])


# ----------------------------------------------------------------------------------------------- merging


def merged(base, one, other):
    """Return the Script with the changes of both from the base. Conflict if they change the same lines."""
    parts, conflicts = {}, []
    for key in order_of(base, one, other):
        texts = [script.parts.get(key) for script in (base, one, other)]
        try:
            parts[key] = merged_piece(key, *texts, (one.name, other.name))
        except Conflict as conflict:
            conflicts.append(conflict)
    if conflicts:
        raise ExceptionGroup("", conflicts)
    imports = {block: one.imports[block] + other.imports[block] for block in base.imports}
    name = f"{one.name}.py, {other.name}"
    return Script(name, "", {key: text for key, text in parts.items() if text is not None}, imports)


def order_of(base, one, other):
    """Return the keys of all three: a script's new pieces come after the piece that is before them there."""
    keys = list(base.parts)
    for script in (one, other):
        before = None
        for key in script.parts:
            if key not in keys:
                at = keys.index(before) + 1
                while at < len(keys) and keys[at] not in base.parts and keys[at] not in script.parts:
                    at += 1  # after what the first script has added here
                keys.insert(at, key)
            before = key
    return keys


def merged_piece(key, base, one, other, names):
    """Return the merged text of a piece, None without it. Conflict, as above."""
    if one == other or base == other:
        return one
    if base == one:
        return other
    if base is None and key.endswith(".check"):
        return one + other.partition(other_head(other))[2]
    if key == "TASKS" and other.count("TASKS = settings.TASKS | ") == one.count("TASKS = settings.TASKS | ") == 1:
        return one + other.lstrip().replace("TASKS = settings.TASKS |", "TASKS |=").replace("settings.TASKS", "TASKS")
    if None in (base, one, other):
        raise Conflict(key, [(name, text or "(taken away)\n") for name, text in zip(names, (one, other))])
    codes, docstrings = zip(*map(split_docstring, (base, one, other)))
    if key.startswith("Args.") and ":" in base.partition("=")[0]:
        return merged_setting(key, base, one, other, names)
    text = merged_lines(key, *codes, names)
    new = merged_docstring(*docstrings, names)
    return re.sub(rf"^ *{re.escape(DOC)}\n", lambda _: new, text, count=1, flags=re.M)


def other_head(check):
    """Return what a second check() leaves out: its first line and its docstring."""
    return check[: check.index('"""\n', check.index('"""') + 3) + 4]


def merged_docstring(base, one, other, names):
    """Return the docstring that changed, or both, each with its script's name."""
    if base == one or one == other:
        return other
    if base == other:
        return one
    indent = one[: len(one) - len(one.lstrip())]
    both = []
    for name, text in zip(names, (one, other)):
        text = text.strip().strip(QUOTES).strip()
        is_of_several = re.match(r"In [\w., ]+:\n", text)  # it was merged before
        both.append(text if is_of_several else f"In {name}.py:\n{indent}{text}")
    return f'{indent}"""' + f"\n\n{indent}".join(both) + f'\n{indent}"""\n'


def merged_setting(key, base, one, other, names):
    """Return a setting's merged line: its code and its comment change one by one, and so do the blanks before it."""
    codes, _, comments = zip(*(text.partition("  # ") for text in (base, one, other)))
    types = [code.partition(" = ")[0] for code in codes]
    if types[1] != types[0] == types[2] or codes[2] == codes[0] != codes[1]:
        return one  # a default need not fit the other script's type
    if types[2] != types[0] == types[1] or codes[1] == codes[0] != codes[2]:
        return other
    if codes[1] != codes[2]:
        raise Conflict(key, list(zip(names, (one, other))))
    return other if comments[0] == comments[1] else one


def merged_lines(key, base, one, other, names):
    """Return the lines with both changes, by git merge-file. Conflict, as above."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in zip(("one", "base", "other"), (one, base, other)):
            Path(folder, name).write_text(text, encoding="utf-8", newline="")
        command = ["git", "merge-file", "-p", "--diff3", "one", "base", "other"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    if done.returncode > 127:
        raise ValueError(f"git merge-file: {done.stderr.strip()}")
    marked = re.compile(r"<<<<<<< one\n(.*?)\|{7} base\n(.*?)=======\n(.*?)>>>>>>> other\n", re.S)

    def resolved(found):
        of_one, before, of_other = found.groups()
        if before or not independent(of_one, of_other):
            raise Conflict(key, list(zip(names, (of_one, of_other))))
        return of_one + of_other

    return marked.sub(resolved, done.stdout)


def independent(one, other):
    """Return whether two blocks of assignments, or of entries of a dictionary, may come in any order."""
    used, changed = [], []
    for block in (one, other):
        code = textwrap.dedent(block)
        try:
            tree = ast.parse(code if not re.match(r'("|\*\*)', code) else f"{{{code}}}")
        except SyntaxError:
            return False
        if not all(isinstance(node, ast.Assign | ast.Expr) for node in tree.body):
            return False
        if any(isinstance(node, ast.Expr) and not isinstance(node.value, ast.Dict) for node in tree.body):
            return False
        targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        changed.append({node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)})
        used.append({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    return not (changed[0] & used[1] or changed[1] & used[0])


# ---------------------------------------------------------------------------------------------- checking


def check(text, scripts):
    """Raise ValueError if the text needs what one of the scripts takes away: a name, a setting, a parameter."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {alias.asname or alias.name for node in nodes if hasattr(node, "names") for alias in named(node)}
    known = bound | set(dir(builtins)) | {"__name__"}
    [of_args] = [node for node in tree.body if getattr(node, "name", "") == "Args"]
    taken = {key.removeprefix("Args.") for script in scripts for key in script.parts if key.startswith("Args.")}
    taken -= {node.target.id for node in of_args.body if isinstance(node, ast.AnnAssign)}
    taken -= {"", "check"}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        missing = ""
        if isinstance(node, ast.Name) and node.id not in known:
            missing = node.id
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "args" and node.attr in taken:
            missing = f"--{node.attr}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in functions and not fits(node, functions):
            missing = f"{node.func.id}() with other parameters"
        if missing:
            names = ", ".join(script.name for script in scripts)
            line = ast.unparse(node)[:60]
            raise ValueError(f"{names}: one takes away {missing}, which another one uses, in {line}")


def named(node):
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def fits(call, functions):
    """Return whether a function takes as many arguments as this call gives."""
    arguments = functions[call.func.id].args
    is_open = any(isinstance(one, ast.Starred) for one in call.args) or any(not one.arg for one in call.keywords)
    if is_open or arguments.vararg or arguments.kwarg:
        return True
    num_given = len(call.args) + len(call.keywords)
    return len(arguments.args) - len(arguments.defaults) <= num_given <= len(arguments.args)


# ----------------------------------------------------------------------------------------------- writing


def whole(script):
    """Return the Script's text, with the imports that it uses, sorted."""
    texts = []
    for key, text in script.parts.items():
        texts.append(f"\0{key}\0" if key in script.imports else text)
    body = "".join(texts)
    names = {node.id for node in ast.walk(ast.parse(re.sub("\0.*?\0", "", body))) if isinstance(node, ast.Name)}
    first, last = (sorted_imports(script.imports[block], names) for block in ("first imports", "imports"))
    body = body.replace("\0first imports\0", f"\n{first}").replace("\0imports\0", f"\n{last}", 1)
    return script.docstring + body


def sorted_imports(text, names):
    """Return the import statements of these names, sorted and wrapped as ruff does it."""
    modules, members = set(), {}
    for node in ast.parse(text).body:
        for alias in node.names:
            if isinstance(node, ast.Import) and alias.name.split(".")[0] in names:
                modules.add(alias.name)
            elif isinstance(node, ast.ImportFrom) and alias.name in names:
                members.setdefault(node.module, set()).add(alias.name)
    groups = [[], [], []]  # the standard library, other libraries, this repository
    for module in sorted(modules):
        groups[group_of(module)].append(f"import {module}\n")
    for module in sorted(members):
        groups[group_of(module)].append(wrapped(module, sorted(members[module], key=rank)))
    return "\n".join("".join(group) for group in groups if group)


def rank(name):
    """Return a key for ruff's order of members: CONSTANTS, Classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def group_of(module):
    top = module.split(".")[0]
    return 0 if top in sys.stdlib_module_names else 2 if (family.ROOT / top).is_dir() else 1


def wrapped(module, members):
    line = f"from {module} import {', '.join(members)}\n"
    if len(line) <= WIDTH + 1:
        return line
    each = "".join(f"    {member},\n" for member in members)
    return f"from {module} import (\n{each})\n"


def docstring(scripts, base, out, command):
    """Return the module docstring of a combination: what is in it, each script's own difference, the command."""
    names = [f"{script.name}.py" for script in scripts]
    paragraphs = [
        f"{out.stem}: {' and '.join(script.name for script in scripts)}, combined.",
        f"Made by `{command}`: the changes of each script over {base}.py, their common ancestor. The scripts' own "
        "docstrings have the objectives, the papers and the deviations.",
        f"What differs from {names[0]}: the changes of {' and '.join(names[1:])}, as below.",
    ]
    filled = [textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) for text in paragraphs]
    for script in scripts:
        text = script.docstring.strip()[3:-3].strip()
        found = re.search(r"^What differs from \w+\.py.*?(?=\n\n|\Z)", text, re.M | re.S)
        title = textwrap.fill(f"{script.name}.py: {text.partition(NEW_PARAGRAPH)[0]}", WIDTH)
        filled.append(f"{title}\n{found[0] if found else ''}".strip())
    return '"""' + "\n\n".join([*filled, f"Command: python {out.name}"]) + '\n"""\n'


# ---------------------------------------------------------------------------------------------- command


def ancestors(stem, parents):
    """Return the script and what it grew from, up to grpo."""
    line = [stem]
    while line[-1] in parents and parents[line[-1]]:
        line.append(parents[line[-1]])
    return line


def combine(names, out="mine.py", folder=family.ROOT):
    """Return the text of the combination of these scripts. ValueError if there is none; it says why."""
    parents = family.PARENT | family.own_scripts(folder)
    stems = [Path(name).stem for name in names]
    if len(stems) < 2:
        raise ValueError("name two scripts or more: python -m tools.combine dapo grpo_multi_turn --out mine.py")
    for stem in stems:
        if stem not in ["grpo", *parents]:
            raise ValueError(f"{stem} is no trainer: there are {', '.join(['grpo', *parents])}")
    for one, other in itertools.combinations(stems, 2):
        for inner, outer in ((one, other), (other, one)):
            if inner in ancestors(outer, parents):
                raise ValueError(f"{inner}.py is contained in {outer}.py already, which grew from it")
    scripts = [read(stem, family.source(stem, folder)) for stem in stems]
    result, line = scripts[0], ancestors(stems[0], parents)
    for script in scripts[1:]:
        common = next(stem for stem in line if stem in ancestors(script.name, parents))
        line = line[line.index(common) :]
        try:
            result = merged(read(common, family.source(common, folder)), result, script)
        except ExceptionGroup:
            done = stems[: stems.index(script.name)]
            for stem in done if len(done) > 1 else []:
                combine([stem, script.name], out, folder)  # raises if it is this one that conflicts
            raise
    command = f"python -m tools.combine {' '.join(stems)} --out {out}"
    result.docstring = docstring(scripts, line[0], Path(out), command)
    text = whole(result)
    check(text, scripts)
    return text


def kind_of_pair(one, other):
    """Return "clean", "contained", "alternatives" or "conflict"."""
    try:
        combine([one, other])
    except ExceptionGroup as group:
        return reason(group)[0]
    except ValueError as error:
        return "contained" if "contained" in str(error) else "conflict"
    return "clean"


def reason(error):
    """Return ("alternatives" or "conflict", what to print) of a combination that fails."""
    conflicts = error.exceptions
    kind = "alternatives" if any(one.is_of_objective() for one in conflicts) else "conflict"
    names = [f"{name}.py" for name, _ in conflicts[0].hunks]
    if kind == "alternatives":
        text = f"{' and '.join(names)} are alternatives: both change the objective, here:\n"
    else:
        text = f"{' and '.join(names)} change the same lines:\n"
    for conflict in conflicts:
        for name, lines in conflict.hunks:
            shown = lines.strip("\n").splitlines()
            more = [f"    … {len(shown) - 8} more"] if len(shown) > 8 else []
            text += "\n".join([f"  {conflict.piece}, in {name}.py:", *(f"    {one}" for one in shown[:8]), *more, ""])
    return kind, text + "Nothing is written."


def main(args):
    with flags.errors_in_one_line():
        if args.out.exists():
            raise ValueError(f"--out {args.out} exists; name a new file, or delete that one")
        if args.out.resolve().parent != family.ROOT or args.out.suffix != ".py" or not args.out.stem.isidentifier():
            raise ValueError(f"--out {args.out} must be a .py file in {family.ROOT}, where a trainer finds its modules")
        try:
            text = combine(args.scripts, args.out.name)
        except ExceptionGroup as group:
            sys.exit(reason(group)[1])
    part = args.out.with_name(f".{args.out.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, args.out)
    print(f"{args.out} is written: python {args.out.name} --help")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
