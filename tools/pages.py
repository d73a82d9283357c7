"""Writes docs/algorithms: a page for each script, and an index with the order to read them in.

    python -m tools.pages            writes the pages
    python -m tools.pages --check    changes nothing; exit code 1 if a page is out of date

A page is put together from docs/algorithms/source/NAME.md, which is written by hand, and from facts: the lines of the
script on which each symbol is computed, a worked example (tools/example.py), the difference from the parent, what the
docstring says, and the kept results of lab/ and benchmarks/kk_tiny/. It needs no GPU and never imports vLLM.

In the source a symbol's line is named by a piece of it, which must occur once in the script. In the remarks
{{loss: suppose}} stands for a number of the worked example: a column and a token; {{value_loss}} for one of the whole.
"""

import ast
import difflib
import functools
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass

import tyro

from runtime import files
from tools import compare, diff, example, family, generated, updates

ROOT = family.ROOT
FOLDER = ROOT / "docs" / "algorithms"
SOURCE = FOLDER / "source"
LENS = ROOT / "lab" / "results" / "lens.json"
KEPT = ROOT / "benchmarks" / "kk_tiny"
PARTS = ["The idea", "The objective", "Symbols", "Remarks", "Papers"]  # of a source
CONTEXT = 3  # equal lines around what differs
LONG = 60  # lines, from which a difference is folded
BEGINS = ("def ", "class ", "@")  # what begins a function or a class
WIDTH = 120

# ------------------------------------------------------------------------------------------------- what is hand-written


@dataclass(frozen=True)
class Source:
    """The hand-written parts of a page."""

    title: str
    parts: dict  # {heading: text}


@functools.cache
def source(script):
    """A script's Source. ValueError if its file has other parts than PARTS, in order."""
    path = SOURCE / f"{script}.md"
    text = re.sub("<!--.*?-->", "", one_folder_up(path.read_text(encoding="utf-8")), flags=re.DOTALL).strip()
    first, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    found = {}
    for part in parts:
        heading, _, body = part.partition("\n")
        found[heading.strip()] = body.strip()
    if list(found) != PARTS or not first.startswith("# "):
        raise ValueError(f"{path} must have a title and the parts {', '.join(PARTS)}; it has {', '.join(found)}")
    return Source(first[2:].strip(), found)


def one_folder_up(text):
    """A source's text with its links as a page has them, which is one folder above."""
    return re.sub(r"\]\(\.\./", "](", text)


def line_of(snippet, script):
    """The number, from 1, of the line of a script in which the snippet stands. ValueError unless it occurs once."""
    text = family.source(script)
    count = text.count(snippet)
    if count != 1:
        raise ValueError(f"`{snippet}` occurs {count} times in {script}.py; it must occur once")
    return text[: text.index(snippet)].count("\n") + 1


def snippets(script):
    """[(symbol, what it is, snippet), …]: the table of symbols in a script's source."""
    rows = []
    for line in source(script).parts["Symbols"].splitlines()[2:]:  # below the table's head
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not re.fullmatch("`[^`]+`", cells[2]):
            raise ValueError(f"{script}: a row must be | symbol | what it is | `code` |, not {line}")
        rows.append((cells[0], cells[1], cells[2][1:-1]))
    return rows


def symbols(script):
    """The table of symbols, with a link to each one's line."""
    rows = []
    for symbol, what, snippet in snippets(script):
        line = line_of(snippet, script)
        rows.append([symbol, what, f"[line {line}](../../{script}.py#L{line})", f"`{snippet}`"])
    return example.table(["symbol", "what it is", "where", "code"], rows)


# --------------------------------------------------------------------------------------------------- the worked example

GIVEN = {  # what is given of a token: (title, kind of cell)
    "old": (r"$\pi_{\text{old}}$", "number"),
    "now": (r"$\pi$", "number"),
    "ref": (r"$\pi_{\text{ref}}$", "number"),
    "sampler": (r"$\pi_{\text{sampler}}$", "number"),
    "entropy": ("$H$ at sampling", "number"),
    "entropy_now": ("$H$ now", "number"),
    "value": (r"$V_{\text{old}}$", "number"),
    "value_now": ("$V$", "number"),
}
MADE = {  # what a script makes of it
    "logp": (r"$\log \pi$", "number"),
    "ratio": (r"$\rho$", "number"),
    "difference": (r"$\pi - \pi_{\text{old}}$", "number"),
    "clip_range": (r"$\epsilon_a$", "number"),
    "gate": (r"$f'(\rho)$", "number"),
    "weight": ("$w$", "number"),
    "icepop": ("$w$ (IcePop)", "number"),
    "reasoning": ("reasoning", "flag"),
    "in_loss": (r"$H \ge \tau$", "flag"),
    "advantages_before": ("$A$ of the response", "number"),
    "k1": ("$k_1$", "number"),
    "return": ("$R$", "number"),
    "estimate": (r"$\hat A$", "number"),
    "ar_weight": ("AR's factor", "number"),
    "advantages": ("$A$", "number"),
    "surrogate": (r"$\min[\cdot]$", "number"),
    "clipped": ("cut off", "flag"),
    "outside_kl": ("cut off (KL)", "flag"),
    "k3": ("$k_3$", "number"),
    "loss": ("loss", "number"),
    "value_loss": ("loss of $V$", "number"),
    "value_clipped": ("cut off", "flag"),
    "stage": ("stage", "count"),
    "first": ("weight, first update", "number"),
    "now": ("weight, second update", "number"),
}
OTHER_TITLES = {
    ("gspo", "ratio"): "$s$",
    ("cispo", "clipped"): "bounded",
    ("sapo", "surrogate"): r"$f(\rho) A$",
    ("reinforce", "now"): "weight",
    ("rloo", "now"): "weight",
}
CLIPPED = ["ratio", "advantages", "surrogate", "clipped"]
WEIGHTS = ["first", "now"]
COLUMNS = {  # what is given beside π_old and π; the tables of tokens, each a list of columns
    "reinforce": ([], [["logp", "advantages", "loss", "now"]]),
    "rloo": ([], [["logp", "advantages", "loss", "now"]]),
    "grpo": (["ref"], [[*CLIPPED, "k3", "loss", *WEIGHTS]]),
    "dr_grpo": ([], [[*CLIPPED, "loss", *WEIGHTS]]),
    "ppo": (
        ["ref", "value", "value_now"],
        [
            ["k1", "estimate", "advantages", "return", "value_loss", "value_clipped"],
            [*CLIPPED, "loss", *WEIGHTS],
        ],
    ),
    "reinforce_pp": (["ref"], [["k1", "return", "advantages"], [*CLIPPED, "loss", *WEIGHTS]]),
    "dapo": (["ref"], [[*CLIPPED, "k3", "loss", *WEIGHTS]]),
    "grpo_ar_lopti": (
        ["ref"],
        [["advantages_before", "ar_weight", "advantages", "stage"], [*CLIPPED, "k3", "loss", *WEIGHTS]],
    ),
    "reinforce_pp_ar_lopti": (
        ["ref"],
        [["k1", "return", "advantages_before", "ar_weight", "advantages", "stage"], [*CLIPPED, "loss", *WEIGHTS]],
    ),
    "dapo_ar_lopti": (
        ["ref"],
        [["advantages_before", "ar_weight", "advantages", "stage"], [*CLIPPED, "k3", "loss", *WEIGHTS]],
    ),
    "acpo": ([], [["ratio", "clip_range", "advantages", "surrogate", "clipped", "loss", *WEIGHTS]]),
    "cispo": ([], [["logp", "ratio", "advantages", "clipped", "loss", *WEIGHTS]]),
    "gspo": ([], [[*CLIPPED, "loss", *WEIGHTS]]),
    "sapo": ([], [["ratio", "advantages", "surrogate", "gate", "loss", *WEIGHTS]]),
    "dppo": ([], [["logp", "ratio", "difference", "advantages", "clipped", "outside_kl", "loss", *WEIGHTS]]),
    "entropy_top": (["ref", "entropy_now"], [["in_loss", *CLIPPED, "k3", "loss", *WEIGHTS]]),
    "archer": (["ref", "entropy"], [["reasoning", *CLIPPED, "k3", "loss", *WEIGHTS]]),
    "grpo_tis": (["ref", "sampler"], [["weight", "icepop", *CLIPPED, "k3", "loss", *WEIGHTS]]),
}


def title_of(script, name):
    return OTHER_TITLES.get((script, name), MADE[name][0])


@functools.cache
def example_of(script):
    return example.example(script)


def worked_example(script):
    """The part of a page with the example: what is given, what the script makes of it, remarks."""
    found = example_of(script)
    given, tables = COLUMNS[script]
    names = ["old", *([] if makes_one_update(found) else ["now"]), *given]
    lines = [*wrapped(introduction(script, found)), ""]
    lines += example.token_table({GIVEN[name][0]: (example.rows_of(name), GIVEN[name][1]) for name in names})
    lines += ["", *advantages_of(script, found)]
    for columns in tables:
        shown = {title_of(script, name): (found.columns[name], MADE[name][1]) for name in columns}
        lines += ["", *example.token_table(shown)]
    lines += ["", *wrapped(totals(found))]
    if found.bins:
        lines += ["", *bins_of(found)]
    return [*lines, "", *filled(script, found)]


def makes_one_update(found):
    """Whether the script makes one update a step: then the policy is still the one that sampled."""
    return found.args.updates_per_step == 1


def introduction(script, found):
    """What the example is, and with which settings."""
    what = f"One prompt, four responses, {example.NUM_TOKENS} tokens. "
    if makes_one_update(found):
        what += (
            r"$\pi_{\text{old}}$ is the probability of a token when it was sampled. The script makes one update a "
            r"step, so in that update $\pi$ is $\pi_{\text{old}}$. "
        )
    else:
        what += (
            r"$\pi_{\text{old}}$ is the probability of a token when it was sampled, $\pi$ its probability at the "
            "second update of the step, after the first one has moved the policy. "
        )
    own = ["4 responses to a prompt"]
    if getattr(found.args, "kl_coef", 0) > 0:
        own.append(rf"$\beta$ {example.KL_COEF} (0.001 would not show in three decimals)")
    if script == "dr_grpo":
        own.append(f"$L$ = {found.args.max_response_tokens}")
    if found.penalties:
        own.append(f"$L$ = {found.args.max_response_tokens}, $B$ = {found.args.overlong_buffer}")
    if found.value_loss is not None:
        what += (
            r"$V_{\text{old}}$ is what the critic expected when the token was sampled, $V$ what it expects after its "
            "first update of the step. "
        )
    return (
        f"{what}The settings are the script's own, except for these: {', '.join(own)}. All numbers below the first "
        f"table are computed by the functions of `{script}.py`."
    )


def advantages_of(script, found):
    """The table of responses: rewards, and the advantages of scripts that give all of a response's tokens the same."""
    rewards = [reward for reward, _ in example.RESPONSES]
    columns = {"reward": rewards}
    if found.penalties:
        columns["penalty"] = found.penalties
        rewards = [reward + penalty for reward, penalty in zip(rewards, found.penalties)]
        columns["$r$"] = rewards
    same = found.columns.get("advantages_before", found.columns["advantages"])
    if "return" not in found.columns:
        advantages = same.nan_to_num(0)[:, 0].tolist() if script != "entropy_top" else all_advantages(script)
        if script == "rloo":
            columns["mean of the others"] = [r - a for r, a in zip(rewards, advantages)]
        columns["$A$"] = advantages
    rows = []
    for i, values in enumerate(zip(*columns.values()), 1):
        words = " ".join(f"`{token.text}`" for token in example.RESPONSES[i - 1][1])
        rows.append([str(i), words, *map(example.cell, values)])
    mean, std = example.mean_and_std(rewards)
    which = "rewards, penalties included" if found.penalties else "rewards"
    about = f"Mean of the {which}: {example.cell(mean)}; standard deviation (ddof 1): {example.cell(std)}."
    if found.groups_kept is not None:
        about += (
            f" Beside this group there was a second one, whose four rewards are all {rewards[0]:.0f}: dynamic sampling "
            f"keeps {found.groups_kept} of the two."
        )
    return [*example.table(["response", "tokens", *columns], rows), "", *wrapped(about)]


def all_advantages(script):
    """The advantage of each response, also where none of its tokens is in the loss."""
    batch = updates.with_advantages(script, *example.sampled(), example.settings_of(script))
    return batch["advantages"][:, 0].tolist()


def totals(found):
    """The loss of the mini-batch in words, and what the weights are."""
    num_responses = len(example.RESPONSES)
    if found.divisor == example.NUM_TOKENS:
        how = f"the sum of the tokens' losses over all {example.NUM_TOKENS} tokens"
    elif found.divisor in (num_responses, None):
        how = f"the mean over the {num_responses} responses of the means over their tokens"
    else:
        how = f"the sum of the tokens' losses over $n L$ = {num_responses} × {found.args.max_response_tokens}"
    text = f"The loss of the mini-batch is {how}: {example.cell(sum(found.losses))}."
    if len(found.losses) > 1:
        low, high = (example.cell(loss) for loss in found.losses)
        text += f" The stage of low probabilities has {low} of it, the other one {high}."
    if found.value_loss is not None:
        text += f" The critic's loss, divided in the same way, is {example.cell(found.value_loss)}."
    if found.threshold is not None:
        text += rf" The threshold $\tau$ is {example.cell(found.threshold)}."
    return (
        f"{text} A token's weight is what the update puts on $\\nabla \\log \\pi$ of this token, times "
        f"{example.NUM_TOKENS}: positive weights make the token more probable."
    )


def bins_of(found):
    """acpo.py's bins."""
    rows = []
    for i, of_bin in enumerate(found.bins):
        low, high = i / len(found.bins), (i + 1) / len(found.bins)
        numbers = [example.cell(of_bin[name]) for name in ("sigma", "clip_range")]
        rows.append([f"{low:.1f} – {high:.1f}", str(of_bin["tokens"]), *numbers])
    return example.table([r"bin of $\pi$", "tokens", r"$\sigma_a$", r"$\epsilon_a$"], rows)


def filled(script, found):
    """The list of remarks, with numbers in place of {{name: token}} and {{name}}. ValueError without such a number."""

    def number(match):
        name, _, token = (part.strip() for part in match[1].partition(":"))
        if not token:
            return example.cell(getattr(found, name) if name != "loss" else sum(found.losses))
        places = [k for k, (_, one) in enumerate(example.ROWS) if one.text == token]
        if len(places) != 1 or name not in found.columns:
            raise ValueError(f"{script}: {{{{{match[1]}}}}} is no number of the worked example")
        mask = example.rows_of("old") > 0
        return example.cell(found.columns[name][mask][places[0]].item())

    text = re.sub(r"\{\{(.+?)\}\}", number, source(script).parts["Remarks"])
    _, *remarks = re.split(r"^- ", text, flags=re.MULTILINE)
    return [line for remark in remarks for line in wrapped(f"- {' '.join(remark.split())}", indent="  ")]


# ------------------------------------------------------------------------------------------------------- the difference


def difference(script):
    """The part of a page with the code that differs from the parent's, without comments and docstrings."""
    parent = family.PARENT.get(script)
    if parent is None:
        children = [f"[{child}]({child}.md)" for child, grew_from in family.PARENT.items() if grew_from == script]
        return wrapped(f"`{script}.py` has no parent: it is what {', '.join(children)} grew from.")
    before, after = family.source(parent), family.source(script)
    lines = code_difference(family.code_lines(before), family.code_lines(after))
    count = family.changed(before, after)
    text = (
        f"{count} lines of code are added to `{parent}.py` or removed from it, without comments and docstrings. "
        f"`python tools/diff.py {script}` shows both files side by side."
    )
    block = ["```diff", *lines, "```"]
    if len(lines) > LONG:
        block = [
            "<details>",
            f"<summary>the difference, {len(lines)} lines</summary>",
            "",
            *block,
            "",
            "</details>",
        ]
    return [*wrapped(text), "", *block]


def code_difference(before, after):
    """Two lists of lines of code as the lines of a diff. Above each piece stands the function that it is in."""
    lines = [line for line in difflib.ndiff(before, after) if line[0] != "?"]
    differs = [k for k, line in enumerate(lines) if line[0] != " "]
    near = {j for k in differs for j in range(max(0, k - CONTEXT), k + CONTEXT + 1)}
    places = []  # what each line belongs to: a function, a class or another name
    for line in lines:
        code = line[2:]
        if begins := re.match(r"(?:def|class) (\w+)|(\w+) = ", code):
            places.append(begins[1] or begins[2])
        else:
            inside = code.startswith((" ", ")", "]", "}", "@"))
            places.append(places[-1] if inside and places else "imports")
    found = []
    for k, line in enumerate(lines):
        if k in near and k - 1 not in near:
            found.append(f"@@ {places[next(j for j in differs if j >= k)]} @@")
        elif k in near and line[2:].startswith(BEGINS) and not lines[k - 1][2:].startswith(BEGINS):
            found.append("")
        if k in near:
            found.append(line[0] + line[2:])
    return found


# ------------------------------------------------------------------------------------------------------------- results


def measured(script):
    """The part of a page with kept results: the lens, and the comparison on kk_tiny."""
    return [
        "### The weight on each token, by probability",
        "",
        *lens_of(script),
        "",
        "### Accuracy of kk_tiny",
        "",
        *comparison_of(script),
    ]


@functools.cache
def lens_results():
    return files.read_object(LENS) if LENS.exists() else None


def lens_of(script):
    """Mean |weight| of tokens by probability, beside grpo.py's, from lab/results/lens.json."""
    result = lens_results()
    if result is None or script not in result["scripts"]:
        return ["The lens has not measured this script: `python -m lab.lens`."]
    mine, grpo = result["scripts"][script], result["scripts"]["grpo"]
    updates = result["settings"]["updates"]
    times = {"first": "first update", "later": f"after {updates} updates"}
    compared = [("this script", mine)] + ([("grpo", grpo)] if script != "grpo" else [])
    titles = ["probability at sampling", "share of the tokens"]
    whose = [f": {name}" if len(compared) > 1 else "" for name, _ in compared]
    titles += [f"{what}{of_whom}" for what in (*times.values(), "cut off") for of_whom in whose]
    rows = []
    for i, name in enumerate(result["bins"]):
        row = [name, f"{result['share_of_tokens'][i]:.1%}"]
        row += [f"{numbers[when]['weight'][i]:.3f}" for when in times for _, numbers in compared]
        row += [f"{numbers['later']['cut'][i]:.1%}" for _, numbers in compared]
        rows.append(row)
    means = [f"{numbers[when]['mean_weight']:.3f}" for when in times for _, numbers in compared]
    rows.append(["all", "100.0%", *means, *[""] * len(compared)])
    text = (
        "Mean size of the weight on a token, times the number of tokens, without the top 1 % of each bin. Cut off: the "
        "share of the tokens that had weight at the first update and have lost nearly all of it after "
        f"{updates} updates. One batch of kk_tiny's own responses; [numbers of all "
        "scripts](../../lab/results/lens.json), [what they mean](../../lab/README.md). Command: "
        f"`{result['command']}`; commit {result['commit']}; {result['machine']}; {result['date']}."
    )
    return [*example.table(titles, rows), "", *wrapped(text)]


def comparison_of(script):
    """Every suite of tools/compare.py that has entries of this script, from the runs that are kept."""
    lines, seen = [], set()
    for suite, (flags, entries) in compare.SUITES.items():
        commands = compare.read_entries(entries)
        mine = [name for name, words in commands.items() if words[0] == f"{script}.py"]
        mine = [name for name in mine if (name, flags) not in seen]
        seen |= {(name, flags) for name in mine}
        if mine:
            lines += [*suite_of(suite, flags, commands, mine), ""]
    if not lines:
        return ["No suite of `tools/compare.py` has an entry of this script."]
    return lines[:-1]


def suite_of(suite, flags, commands, mine):
    """The table of a script's entries in a suite, each below the one that it is compared with; what is missing."""
    seeds = compare.Args().seeds
    runs = {name: kept_runs(name, words, flags, seeds) for name, words in commands.items()}
    missing = missing_runs({name: runs[name] for name in mine}, seeds)
    again = f"`python tools/compare.py --suite {suite}`"
    if not any(runs[name] for name in mine):
        return wrapped(f"No run of the suite `{suite}` is kept. Missing: {missing}. Command: {again}.")
    names = list(dict.fromkeys(name for one in mine if runs[one] for name in (compare.base_of(one, commands), one)))
    same = len({compare.base_of(name, commands) for name in mine}) == 1
    rows, everything = [], []
    for name in names:
        by_seed, base = runs[name], runs[compare.base_of(name, commands)]
        if not by_seed:
            continue
        everything += by_seed.values()
        row = [name, f"`{shlex.join(commands[name])}`", ", ".join(map(str, by_seed))]
        row += [compare.shown([measure(run) for run in by_seed.values()]) for measure in (mean_accuracy, last_accuracy)]
        pairs = [(mean_accuracy(by_seed[seed]), mean_accuracy(base[seed])) for seed in by_seed if seed in base]
        compared = base is not by_seed and pairs and (same or name in mine)
        row.append(compare.shown_difference([ours - theirs for ours, theirs in pairs]) if compared else "")
        rows.append(row)
    several, last = compare.names_of_evaluations(everything)
    minus = f"mean minus {compare.base_of(mine[0], commands)}" if same else "mean minus the row above"
    titles = ["entry", "script and flags", "seeds", f"accuracy, mean of {several}", f"accuracy at {last}", minus]
    text = f"Suite `{suite}`: {again}; all entries with `{flags}`. "
    if missing:
        text += f"Not measured yet: {missing}. "
    text += f"{about(everything)}."
    whole = KEPT / f"{suite}.md"
    if whole.exists():
        text += f" [The whole table](../../benchmarks/kk_tiny/{suite}.md)."
    return [*example.table(titles, rows), "", *wrapped(text)]


def missing_runs(runs, seeds):
    """Which runs are missing, in words; "" if none is. runs: {name: {seed: kept run}}."""
    names = {}  # missing seeds: the entries that lack them
    for name, by_seed in runs.items():
        left = [str(seed) for seed in seeds if seed not in by_seed]
        if left:
            names.setdefault(f"seed{'s' * (len(left) > 1)} {', '.join(left)}", []).append(f"`{name}`")
    return "; ".join(f"{', '.join(entries)} ({left})" for left, entries in names.items())


def kept_runs(name, words, flags, seeds):
    """{seed: kept run} of an entry."""
    found = {}
    for seed in seeds:
        command = shlex.join([*words, *shlex.split(flags), "--seed", str(seed)])
        if kept := compare.read_kept(compare.kept_file(KEPT, name, seed), command):
            found[seed] = kept
    return found


def mean_accuracy(run):
    return compare.final(run, "eval/accuracy")


def last_accuracy(run):
    return compare.at_the_end(run, "eval/accuracy")


def about(runs):
    """Commits, machines and dates of some runs, and what a ± is."""
    texts = [", ".join(sorted({str(run[key]) for run in runs})) for key in ("commit", "machine", "date")]
    return (
        "± is the standard error over the seeds; differences are between runs of the same seed. "
        f"Commit {'; '.join(texts)}"
    )


# ------------------------------------------------------------------------------------------------------- the docstring


def deviations(script):
    """The paragraphs of the docstring that say where the file deviates, as Markdown."""
    lines = []
    for paragraph in diff.paragraphs(family.source(script)):
        if re.match("Where this file deviates|What this file settles", paragraph):
            first, *items = re.split(r"^- ", paragraph, flags=re.MULTILINE)
            lines += [*wrapped(marked(first)), ""]
            for item in items:
                lines += wrapped(f"- {marked(item)}", indent="  ")
            lines.append("")
    if not lines:
        raise ValueError(f"{script}.py does not say where it deviates")
    return lines[:-1]


def command(script):
    """The docstring's command, as Markdown: what it is for, then a block."""
    docstring = ast.get_docstring(ast.parse(family.source(script)))
    last = docstring[docstring.index("\nCommand (") :].strip().splitlines()
    words = [line for line in last if not line.startswith("    ")]
    commands = [line.strip() for line in last if line.startswith("    ")]
    return [*wrapped(marked(" ".join(words))), "", "```bash", *commands, "```"]


def marked(text):
    """A text of a docstring as Markdown: flags and names of files as code."""
    pieces = " ".join(text.split()).split("`")
    flag = r"--\w+(?: (?:\d+(?:\.\d+)?|float32)\b)?"
    for k in range(0, len(pieces), 2):  # the others are code already
        pieces[k] = re.sub(rf"(?<![\w/-])({flag}|\w+\.py)", r"`\1`", pieces[k])
        pieces[k] = pieces[k].replace("<", "&lt;")
    return "`".join(pieces)


def wrapped(text, indent=""):
    """A paragraph's lines, of at most WIDTH columns. No line but the first may begin a list or a heading."""
    whole = re.compile(r"\$[^$]+\$|`[^`]+`")  # formulas and code stay on one line
    text = whole.sub(lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    for k, line in enumerate(lines[1:], 1):
        lines[k] = re.sub(r"^(\s*\d*)([-+*#>.)])(?=\s|$)", r"\1\\\2", line)
    return [line.replace("\0", " ") for line in lines]


# ------------------------------------------------------------------------------------------------------------ the pages


def page(script):
    """A script's page."""
    own = source(script)
    order = updates.ALGORITHMS
    place = order.index(script)
    links = [f"[`{script}.py`](../../{script}.py)", f"{len(family.code_lines(family.source(script)))} lines of code"]
    if parent := family.PARENT.get(script):
        links.append(f"grew from [`{parent}.py`]({parent}.md)")
    if place > 0:
        links.append(f"before: [{source(order[place - 1]).title}]({order[place - 1]}.md)")
    if place + 1 < len(order):
        links.append(f"next: [{source(order[place + 1]).title}]({order[place + 1]}.md)")
    links.append("[all](README.md)")
    lines = [
        f"<!-- Written by python -m tools.pages. What is written by hand is in source/{script}.md. -->",
        "",
        f"# {own.title}",
        "",
        " · ".join(links),
        "",
        "## The idea",
        "",
        own.parts["The idea"],
        "",
        "## The objective",
        "",
        own.parts["The objective"],
        "",
        "## Where each symbol is computed",
        "",
        *symbols(script),
        "",
        "## A worked example",
        "",
        *worked_example(script),
        "",
        "## The difference",
        "",
        *difference(script),
        "",
        "## What was measured",
        "",
        *measured(script),
        "",
        "## Where it deviates",
        "",
        "From the script's docstring.",
        "",
        *deviations(script),
        "",
        "## Run it",
        "",
        *command(script),
        "",
        "## Papers",
        "",
        own.parts["Papers"],
    ]
    return "\n".join(lines) + "\n"


def index():
    """docs/algorithms/README.md: its source, with the tables in place of their marks. ValueError without a mark."""
    text = one_folder_up((SOURCE / "README.md").read_text(encoding="utf-8"))
    for mark, lines in (("<!-- order -->", order_table()), ("<!-- weights -->", weights_table())):
        if text.count(mark) != 1:
            raise ValueError(f"{SOURCE / 'README.md'} must have the mark {mark} once")
        text = text.replace(mark, "\n".join(lines))
    note = "<!-- Written by python -m tools.pages. What is written by hand is in source/README.md. -->\n\n"
    return note + re.sub(r"\A<!--.*?-->\s*", "", text, flags=re.DOTALL)


def order_table():
    """The scripts in the order to read them."""
    rows = []
    for i, script in enumerate(updates.ALGORITHMS, 1):
        text = family.source(script)
        parent = family.PARENT.get(script)
        changed = f"{family.changed(family.source(parent), text)} of [{parent}]({parent}.md)" if parent else ""
        about = " ".join(diff.paragraphs(text)[0].split())
        rows.append([str(i), f"[{source(script).title}]({script}.md)", about, changed])
    return example.table(["", "page", "in one line", "lines changed"], rows)


def weights_table():
    """What weight each script's second update puts on each token of the worked example."""
    titles = ["script", *(f"{i} `{token.text}`" for i, token in example.ROWS)]
    mask = example.rows_of("old") > 0
    rows = []
    for script in updates.ALGORITHMS:
        weights = example_of(script).columns["now"][mask].tolist()
        rows.append([f"[{script}]({script}.md)", *map(example.cell, weights)])
    return example.table(titles, rows)


def all_pages():
    """{path: text} of all pages. ValueError if a source is not as it must be."""
    if extra := {path.stem for path in SOURCE.glob("*.md")} ^ {"README", *updates.ALGORITHMS}:
        raise ValueError(f"{SOURCE} must have one file for each script, and README.md; see {', '.join(sorted(extra))}")
    pages = {FOLDER / f"{script}.md": page(script) for script in updates.ALGORITHMS}
    return {FOLDER / "README.md": index()} | pages


@dataclass
class Args:
    """Where the pages are."""

    check: bool = False  # only check if they are up to date


def main(args):
    try:
        pages = all_pages()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    generated.keep(pages, args.check, "python -m tools.pages")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
