"""The pages of docs/algorithms: their facts, the worked example, the links, and that they are up to date."""

import itertools
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from tools import example, family, pages, updates

TITLE_ROW = re.compile(r"^\|---", flags=re.MULTILINE)


@pytest.fixture(scope="module")
def texts():
    """{name: text} of all pages, as the generator makes them."""
    return {path.stem: text for path, text in pages.all_pages().items()}


# --------------------------------------------------------------------------------------------------------------------
# The pages


def test_the_pages_are_up_to_date(texts):
    for name, text in texts.items():
        assert (pages.FOLDER / f"{name}.md").read_text() == text, f"{name}.md: python -m tools.pages"


def test_no_tool_imports_the_lab():
    """The lab may use the tools: its commands are one of the things that tools are for."""
    for path in (ROOT / "tools").glob("*.py"):
        assert not re.search(r"^\s*(from|import) lab\b", path.read_text(), re.MULTILINE), path.name


def test_every_script_has_a_page_and_no_page_is_left_over(texts):
    names = {path.stem for path in pages.FOLDER.glob("*.md")}
    assert names == set(texts) == {"README", "grpo", *family.PARENT}


@pytest.mark.parametrize("script", updates.ALGORITHMS)
def test_links_lead_to_the_line_with_the_snippet(script, texts):
    lines = family.source(script).splitlines()
    table = texts[script].split("## Where each symbol is computed")[1].split("\n## ")[0]
    found = re.findall(r"\[line (\d+)\]\(\.\./\.\./(\w+)\.py#L(\d+)\) \| `([^`]+)`", table)
    assert len(found) == len(pages.snippets(script)) >= 6
    for shown, name, number, snippet in found:
        assert shown == number and name == script
        assert snippet in lines[int(number) - 1]
        assert sum(line.count(snippet) for line in lines) == 1


def test_a_snippet_must_occur_once():
    snippet = "advantages = (groups - mean) / (std + 1e-6)"
    assert family.source("grpo").splitlines()[pages.line_of(snippet, "grpo") - 1].strip() == snippet
    with pytest.raises(ValueError, match=r"occurs 0 times in grpo\.py"):
        pages.line_of("advantages = (groups + mean)", "grpo")
    with pytest.raises(ValueError, match=r"occurs \d+ times in grpo\.py"):
        pages.line_of("import", "grpo")


@pytest.mark.parametrize("name", ["README", *updates.ALGORITHMS])
def test_relative_links_resolve(name, texts):
    targets = re.findall(r"\]\(([^)#]+)(?:#L\d+)?\)", texts[name])
    assert len(targets) > 10
    for target in targets:
        assert (pages.FOLDER / target).exists(), target


@pytest.mark.parametrize("path", sorted(pages.SOURCE.glob("*.md")), ids=lambda path: path.stem)
def test_links_of_a_source_resolve_from_its_own_folder(path):
    for target in re.findall(r"\]\(([^)\s#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("script", updates.ALGORITHMS)
def test_the_idea_has_five_sentences(script):
    assert len(re.findall(r"[.?!](?=\s|$)", pages.source(script).parts["The idea"])) == 5


@pytest.mark.parametrize("name", ["README", *updates.ALGORITHMS])
def test_a_page_reads_well_on_github(name, texts):
    text = texts[name]
    outside = re.sub("```.*?```", "", text, flags=re.DOTALL)
    for line in outside.splitlines():
        assert len(line) <= 120 or line.startswith(("|", "[`")) or "\\" in line, line
        # A list or a heading that is none.
        assert not re.match(r"\s+[+*-] |[+*#] [^A-Z]|=+$", line), line
    for formula in re.findall(r"\$\$.*?\$\$|\$[^$\n]+\$", outside, flags=re.DOTALL):
        # Markdown takes the backslash from \, and \{; < and > may be taken for tags; some macros are not allowed.
        assert not re.search(r"\\[^a-zA-Z\s]|[<>]|\\operatorname", formula), formula
        assert formula.count("{") == formula.count("}"), formula
        assert len(re.findall(r"\\left\b", formula)) == len(re.findall(r"\\right\b", formula)), formula
    for line in re.sub(r"\$[^$\n]+\$", "", outside.replace("$$", "")).splitlines():
        assert "$" not in line, line  # a formula that does not end on its line
    lines = outside.splitlines()
    for before, line in itertools.pairwise(lines):
        if line.startswith("|") and before.startswith("|"):
            assert line.count("|") == before.count("|"), line
    assert "{{" not in outside  # a number that was not filled in


def test_the_docstrings_flags_and_files_are_code():
    assert pages.marked("see grpo.py, and --kl_coef 0 --lr 0.1, or `--gated`") == (
        "see `grpo.py`, and `--kl_coef 0` `--lr 0.1`, or `--gated`"
    )
    assert pages.marked("ε_a < 1") == "ε_a &lt; 1"


def test_a_wrapped_line_begins_no_list_and_breaks_no_formula():
    text = "x" * 119 + " - y " + "z" * 100 + " $a + b + c + d + e + f$ 1. w"
    lines = pages.wrapped(text)
    assert lines[1].startswith("\\- y") and pages.wrapped("x" * 119 + " 2. y")[1] == "2\\. y"
    assert all(len(line) <= 121 for line in lines)
    assert any("$a + b + c + d + e + f$" in line for line in lines)


@pytest.mark.parametrize("script", list(family.PARENT))
def test_the_difference_has_as_many_lines_as_it_says(script, texts):
    part = texts[script].split("## The difference")[1].split("\n## ")[0]
    count = int(re.search(r"(\d+) lines of code are added to", part)[1])
    block = part.split("```diff\n")[1].split("\n```")[0].splitlines()
    assert sum(line[:1] in ("+", "-") for line in block) == count
    before, after = (family.code_lines(family.source(name)) for name in (family.PARENT[script], script))
    assert count == family.changed("\n".join(before), "\n".join(after))
    assert all(line[1:] in after for line in block if line.startswith("+"))
    assert ("<details>" in part) == (len(block) > pages.LONG)


def test_a_difference_names_the_function_and_sets_functions_apart():
    same = ["def f():", "    a = 1", "    b = 2", "    c = 3", "    d = 4"]
    lines = pages.code_difference([*same, "def g(x):", "    return x"], [*same, "def g(y):", "    return y"])
    assert lines == [
        "@@ g @@", "     b = 2", "     c = 3", "     d = 4", "",
        "-def g(x):", "+def g(y):", "-    return x", "+    return y",
    ]  # fmt: skip


def test_what_a_docstring_says_is_on_the_page(texts):
    assert "- Dual clip. The release limits −ρ·A to 10·|A| if A &lt; 0." in texts["grpo"]
    assert (
        "What this file settles:" in texts["archer"] and "Where this file deviates from the paper's" in texts["archer"]
    )
    assert "```bash\npython acpo.py --task countdown --updates_per_step 16 --prompts_per_step 256\n" in texts["acpo"]
    for script in updates.ALGORITHMS:
        assert f"python {script}.py" in texts[script].split("## Run it")[1]


# --------------------------------------------------------------------------------------------------------------------
# The worked example

BY_HAND = {  # of grpo.py: (response, π_old, π, π_ref); the advantages are (r − 0.5) / 3, from the rewards 3, 3, −1, −3
    "now": (0, 0.90, 0.92, 0.85),
    "suppose": (0, 0.05, 0.07, 0.04),
    "check": (1, 0.50, 0.45, 0.50),
    "so": (2, 0.90, 0.73, 0.90),
    "obviously": (2, 0.02, 0.012, 0.03),
    "lies": (2, 0.42, 0.41, 0.50),
    "guess": (3, 0.30, 0.48, 0.30),
    "perhaps": (3, 0.10, 0.09, 0.20),
}
CUT_OFF = {"suppose", "obviously"}  # ρ 1.4 above 1.24 with A > 0, ρ 0.6 below 0.8 with A < 0


@pytest.mark.parametrize("token", BY_HAND)
def test_the_numbers_of_grpo_by_hand(token):
    response, old, now, ref = BY_HAND[token]
    advantage = ([3, 3, -1, -3][response] - 0.5) / (3 + 1e-6)  # the squares 6.25, 6.25, 2.25, 12.25 add up to 27 = 3·3²
    ratio = now / old
    surrogate = {"suppose": 1.24, "obviously": 0.8}.get(token, ratio) * advantage
    k3 = ref / now - math.log(ref / now) - 1
    weight = (0 if token in CUT_OFF else ratio * advantage) + 0.1 * (ref / now - 1)
    expected = {
        "ratio": ratio,
        "advantages": advantage,
        "surrogate": surrogate,
        "clipped": float(token in CUT_OFF),
        "k3": k3,
        "loss": 0.1 * k3 - surrogate,
        "first": advantage + 0.1 * (ref / old - 1),
        "now": weight,
    }
    columns = pages.example_of("grpo").columns
    mask = example.rows_of("old") > 0
    place = [one.text for _, one in example.ROWS].index(token)
    for name, value in expected.items():
        assert columns[name][mask][place].item() == pytest.approx(value, abs=1e-6), name


def test_grpos_page_has_these_numbers(texts):
    part = texts["grpo"].split("## A worked example")[1].split("\n## ")[0]
    row = "| 1 | `suppose` | 1.400 | 0.833 | 1.033 | yes | 0.131 | −1.020 | 0.813 | −0.043 |"
    assert row in part.splitlines()
    assert "| 4 | `guess` `A` `perhaps` | −3.000 | −1.167 |" in part.splitlines()
    assert "$\\rho$ = 1.400 is above $1 + \\epsilon_{\\text{high}}$ = 1.24" in " ".join(part.split())


def test_the_loss_is_the_mean_of_the_tokens_losses():
    for script in ("grpo", "rloo", "ppo", "dppo", "grpo_tis", "grpo_ar_lopti"):
        found = pages.example_of(script)
        mask = example.rows_of("old") > 0
        assert sum(found.losses) == pytest.approx(found.columns["loss"][mask].sum().item() / 12)
    gspo = pages.example_of("gspo").columns["loss"]
    of_responses = [row[:length].mean() for row, length in zip(gspo, (3, 2, 4, 3))]
    assert pages.example_of("gspo").losses == [pytest.approx(torch.stack(of_responses).mean().item())]


@pytest.mark.parametrize(
    ("script", "token", "column", "value"),
    [
        ("reinforce", "obviously", "now", -1.5),  # r − the mean of the step
        ("rloo", "guess", "advantages", -3 - 5 / 3),  # the others' mean is (3 + 3 − 1) / 3
        ("rloo", "suppose", "now", 3 + 1 / 3),  # there is no clip
        ("dr_grpo", "guess", "first", -3.5 * 12 / 20),  # divided by 4 × 5, and the weights are times 12
        ("ppo", "now", "k1", math.log(0.90 / 0.85)),
        ("ppo", "suppose", "return", 3 - 0.1 * math.log(0.05 / 0.04)),  # λ 1: the rewards to come, whatever V is
        ("ppo", "perhaps", "value_loss", 0.5 * (-1.6 - (-3 + 0.1 * math.log(2))) ** 2),
        ("reinforce_pp", "perhaps", "return", -3 + 0.1 * math.log(2)),
        ("dapo", "so", "advantages", (-1.5 - 0.375) / math.sqrt((2 * 2.625**2 + 1.875**2 + 3.375**2) / 3)),
        ("grpo_ar_lopti", "suppose", "ar_weight", 0.3 * 0.05 + 0.7),
        ("grpo_ar_lopti", "check", "stage", 1),  # π_old is η
        ("reinforce_pp_ar_lopti", "suppose", "ar_weight", 0.1 * 0.05 + 0.9),
        ("acpo", "check", "first", 2.5 / 3 * 12 / 8),  # the mean over two tokens, then over four responses
        ("cispo", "guess", "now", -1.45 * 3.5 / 3),  # ρ is 1.6
        ("gspo", "check", "ratio", math.sqrt(0.9 * 0.93 / 0.95)),
        ("sapo", "suppose", "gate", 4 * (p := 1 / (1 + math.exp(-0.4))) * (1 - p)),
        ("dppo", "so", "clipped", 1),  # −0.17 is beyond −0.15
        ("dppo", "suppose", "now", 1.4 * 2.5 / 3),
        ("entropy_top", "now", "in_loss", 0),
        ("entropy_top", "guess", "in_loss", 1),
        ("archer", "perhaps", "reasoning", 1),
        ("archer", "guess", "reasoning", 0),
        ("grpo_tis", "obviously", "weight", 2),  # 0.02 / 0.005, bounded
        ("grpo_tis", "perhaps", "icepop", 0),
    ],
)
def test_numbers_of_the_other_scripts_by_hand(script, token, column, value):
    columns = pages.example_of(script).columns
    mask = example.rows_of("old") > 0
    place = [one.text for _, one in example.ROWS].index(token)
    assert columns[column][mask][place].item() == pytest.approx(value, abs=1e-5)


def test_acpos_bins_by_hand():
    lowest, empty, *_ = pages.example_of("acpo").bins
    ratios = torch.tensor([1.4, 0.6, 0.9])
    assert lowest["tokens"] == 3 and lowest["sigma"] == pytest.approx(ratios.std(correction=0).item())
    assert lowest["clip_range"] == pytest.approx(0.2 + 3 * lowest["sigma"])
    assert empty == {"tokens": 0, "sigma": 0.0, "clip_range": 0.2}


def test_dynamic_sampling_drops_the_group_of_equal_rewards():
    assert pages.example_of("dapo").groups_kept == 1
    assert pages.example_of("dapo").penalties == [0, 0, -0.5, 0]


def test_each_script_has_its_own_settings_except_for_the_sizes():
    import grpo

    ours, default = example.settings_of("grpo"), grpo.Args()
    changed = {name for name, value in vars(ours).items() if value != getattr(default, name)}
    assert changed == {*example.SETTINGS, "kl_coef", "max_grad_norm"}


def test_watching_changes_nothing_and_ends(monkeypatch):
    before = sys.getprofile()
    with example.watched(example, "mean_and_std") as calls:
        assert example.mean_and_std([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    example.mean_and_std([1.0, 2.0])
    assert [call.local["values"] for call in calls["mean_and_std"]] == [[1.0, 3.0]]
    assert sys.getprofile() is before


def test_a_remark_can_only_have_numbers_that_are_there(monkeypatch):
    found = pages.example_of("grpo")
    parts = {"Remarks": "- It is {{ratio: suppose}}, and {{loss}} in all."}
    monkeypatch.setattr(pages, "source", lambda script: pages.Source("GRPO", parts))
    assert pages.filled("grpo", found) == ["- It is 1.400, and 0.135 in all."]
    for wrong in ("{{ratio: nobody}}", "{{nothing: suppose}}", "{{ratio: A}}"):  # there are two tokens `A`
        parts["Remarks"] = f"- {wrong}"
        with pytest.raises(ValueError, match="is no number of the worked example"):
            pages.filled("grpo", found)


def test_cells():
    assert [example.cell(value) for value in (1.23456, -0.5, -0.0001, math.nan)] == ["1.235", "−0.500", "0.000", "–"]
    assert [example.cell(value, "flag") for value in (0.0, 1.0)] == ["", "yes"] and example.cell(2.0, "count") == "2"


# --------------------------------------------------------------------------------------------------------------------
# Results


def test_a_missing_run_is_said_to_be_missing_and_a_new_one_is_picked_up(tmp_path, monkeypatch):
    kept = ROOT / "benchmarks" / "kk_tiny"
    monkeypatch.setattr(pages, "KEPT", tmp_path)
    text = "\n".join(pages.comparison_of("rloo"))
    assert "No run of the suite `family` is kept. Missing: `rloo` (seeds 0, 1, 2)." in text.replace("\n", " ")
    run = (kept / "rloo_seed_0.json").read_text()
    Path(tmp_path, "rloo_seed_0.json").write_text(run)
    for seed in (1, 2):
        Path(tmp_path, f"rloo_seed_{seed}.json").write_text(run.replace("--seed 0", f"--seed {seed}"))
    text = "\n".join(pages.comparison_of("rloo"))
    assert "| rloo | `rloo.py` | 0, 1, 2 | " in text and "Missing" not in text and "Not measured yet" not in text
    Path(tmp_path, "rloo_seed_2.json").unlink()
    assert "Not measured yet: `rloo` (seed 2)." in "\n".join(pages.comparison_of("rloo")).replace("\n", " ")


def test_the_comparisons_numbers_are_those_of_its_table(texts):
    """What benchmarks/kk_tiny/comparison.md says of an entry, the page says too."""
    whole = (ROOT / "benchmarks" / "kk_tiny" / "comparison.md").read_text().splitlines()
    cells = [cell.strip() for cell in next(line for line in whole if "| ar+lopti |" in line).split("|")]
    mean, minus, last = cells[4], cells[5], cells[6]
    assert f"| {mean} | {last} | {minus} |" in texts["grpo_ar_lopti"]


def test_a_difference_is_only_given_to_the_row_above(texts):
    """In the suite `updates` each number of updates has a base of its own."""
    rows = [line for line in texts["entropy_top"].splitlines() if line.startswith(("| 4 updates", "| 16 updates"))]
    assert [row.split("|")[-2].strip() != "" for row in rows] == [False, True, False, True]
    assert "| mean minus the row above |" in texts["entropy_top"]


def test_the_lens_numbers_are_kept_results(texts, monkeypatch):
    result = pages.lens_results()
    numbers = result["scripts"]["acpo"]
    row = next(line for line in texts["acpo"].splitlines() if line.startswith(f"| {result['bins'][0]} |"))
    assert f"| {numbers['first']['weight'][0]:.3f} |" in row and f"{numbers['later']['cut'][0]:.1%}" in row
    monkeypatch.setattr(pages, "lens_results", lambda: None)
    assert pages.lens_of("acpo") == ["The lens has not measured this script: `python -m lab.lens`."]


# --------------------------------------------------------------------------------------------------------------------
# The command


def test_check_changes_nothing(tmp_path, monkeypatch, capsys):
    made = {tmp_path / "a.md": "one\n", tmp_path / "b.md": "two\n"}
    monkeypatch.setattr(pages, "all_pages", lambda: made)
    (tmp_path / "a.md").write_text("one\n")
    with pytest.raises(SystemExit) as ended:
        pages.main(pages.Args(check=True))
    assert ended.value.code == 1 and "b.md is out of date" in capsys.readouterr().out
    assert not (tmp_path / "b.md").exists()
    pages.main(pages.Args())
    assert capsys.readouterr().out.split()[::2] == ["left", "wrote"]
    with pytest.raises(SystemExit) as ended:
        pages.main(pages.Args(check=True))
    assert ended.value.code == 0 and capsys.readouterr().out.count("is up to date") == 2


def test_what_is_wrong_with_a_source_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    def wrong():
        raise ValueError("`x` occurs 0 times in grpo.py; it must occur once")

    monkeypatch.setattr(pages, "all_pages", wrong)
    with pytest.raises(SystemExit) as ended:
        pages.main(pages.Args())
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("error: `x` occurs 0 times")


def test_a_source_has_all_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "SOURCE", tmp_path)
    (tmp_path / "grpo.md").write_text("# GRPO\n\n## The idea\n\nNone.\n")
    pages.source.cache_clear()
    try:
        with pytest.raises(ValueError, match="must have a title and the parts The idea, The objective, Symbols"):
            pages.source("grpo")
    finally:
        pages.source.cache_clear()
