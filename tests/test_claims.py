"""tools/claims.py: every item of the papers once, every verdict read from a result, every command one that exists."""

import ast
import dataclasses
import json
import re
import shlex
import shutil

import pytest
from conftest import ROOT

from tools import claims, compare

ALL = [claim for _, of_paper in claims.PAPERS.values() for claim in of_paper]
ITEMS = {paper: [claim.item for claim in of_paper] for paper, (_, of_paper) in claims.PAPERS.items()}


def numbered(kind, items):
    """The numbers of the figures (or tables) that the items name, in order, each once."""
    found = [int(number) for item in items for number in re.findall(rf"^{kind} (\d+)", item)]
    return sorted(set(found))


def equations(items):
    """The numbers of the equations that the items name."""
    numbers = []
    for item in items:
        for text in re.findall(r"eq\. ([\d–, ]+)", item):
            for part in text.split(","):
                first, _, last = part.strip().partition("–")
                numbers += range(int(first), int(last or first) + 1)
    return numbers


# ------------------------------------------------------------------------------------------------ the list of claims


@pytest.mark.parametrize(
    ("paper", "figures", "tables", "last_equation"), [("AR-Lopti", 19, 10, 21), ("ACPO", 4, 3, 69)]
)
def test_every_figure_table_and_equation_of_a_paper_is_listed(paper, figures, tables, last_equation):
    items = ITEMS[paper]
    assert numbered("Figure", items) == [*range(1, figures + 1)]
    assert numbered("Table", items) == [*range(1, tables + 1)]
    assert sorted(equations(items)) == [*range(1, last_equation + 1)]  # each once


def test_no_item_is_listed_twice():
    for items in ITEMS.values():
        assert len(items) == len(set(items))
        wholes = [item for item in items if re.fullmatch(r"(Figure|Table) \d+", item)]
        for whole in wholes:  # either a figure as a whole, or its parts
            assert not [item for item in items if re.match(rf"{whole}\D", item)], whole


def test_panels_of_a_figure_are_listed_once():
    for paper, figure, panels in [
        ("AR-Lopti", 1, "abcdef"),
        ("AR-Lopti", 5, "ab"),
        ("AR-Lopti", 6, "abcd"),
        ("ACPO", 1, "abc"),
    ]:
        found = [item for item in ITEMS[paper] if re.match(rf"Figure {figure}\(", item)]
        assert "".join(sorted(re.findall(r"\((\w)\)", " ".join(found)))) == panels


def test_every_numbered_statement_is_listed():
    text = " ".join(item for items in ITEMS.values() for item in items)
    for name in ("Assumption 4.1", "Proposition 4.2", "Algorithm 1", "Lemma 1", "Proposition 1", "Remark 1"):
        assert name in text, name


NOTES = ROOT.parent / "shared" / "papers" / "token_level_rl_notes.md"


@pytest.mark.skipif(not NOTES.exists(), reason="the notes are not at hand")
def test_every_figure_of_the_notes_is_listed():
    figures = set(re.findall(r'src="([^"]+)"', NOTES.read_text()))
    listed = set(re.findall(r"\w[\w-]*\.png", " ".join(ITEMS["Notes"])))
    assert figures == listed


def test_no_verdict_is_typed_by_hand():
    """Neither in the words of a claim nor in the table: only the sources give one."""
    for claim in ALL:
        for word in (claims.SHOWS, claims.DOES_NOT_SHOW, "cannot tell", "not measured", claims.TESTED):
            assert word not in f"{claim.says} {claim.why}", claim.item
    tree = ast.parse((ROOT / "tools" / "claims.py").read_text())
    tables = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("AR_LOPTI", "ACPO", "NOTES")
    ]
    assert len(tables) == 3
    names = {node.id for table in tables for node in ast.walk(table) if isinstance(node, ast.Name)}
    assert not names & {"SHOWS", "DOES_NOT_SHOW", "CANNOT_TELL", "NOT_MEASURED", "TESTED", "NO_CLAIM", "Finding"}


def test_the_words_are_the_labs():
    """Read from its source, because to import it takes seconds."""
    text = (ROOT / "lab" / "common.py").read_text()
    function = text[text.index("def verdict(") :].split("\ndef ")[0]
    found = {node.value for node in ast.walk(ast.parse(function)) if isinstance(node, ast.Constant)}
    assert {claims.SHOWS, claims.DOES_NOT_SHOW, claims.CANNOT_TELL} <= found


# ----------------------------------------------------------------------------------------------------- the commands


INHERITED = {"settings.RunArgs": "runtime/settings.py", "common.Args": "lab/common.py"}  # classes of settings


def flags_of(file, name="Args"):
    """The names of a script's settings: those of its Args and of the class that it grew from."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            names |= {member.target.id for member in node.body if isinstance(member, ast.AnnAssign)}
            for base in map(ast.unparse, node.bases):
                names |= flags_of(INHERITED[base], base.split(".")[1])
    return names


def commands():
    found = []
    for claim in ALL:
        for source in claim.sources:
            found += re.findall(r"`([^`]+)`", source.command())
        found += [text for text in re.findall(r"`([^`]+)`", claim.why) if text.startswith("python")]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_every_command_exists(command):
    program, *words = shlex.split(command)
    if program == "pytest":
        assert [(ROOT / word).is_file() for word in words] == [True]
        return
    assert program == "python"
    if words[0] == "-m":
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    file, *rest = words
    assert (ROOT / file).is_file()
    given = {word[2:]: rest[i + 1] for i, word in enumerate(rest) if word.startswith("--") and i + 1 < len(rest)}
    flags = {word[2:] for word in rest if word.startswith("--")}
    assert flags <= flags_of(file), flags - flags_of(file)
    if "suite" in given and "compare" in file:
        assert given["suite"] in compare.SUITES


def test_every_entry_that_is_compared_is_one_of_its_suite():
    for claim in ALL:
        for source in claim.sources:
            if isinstance(source, claims.Ahead):
                entries = compare.read_entries(compare.SUITES[source.suite][1])
                assert {source.entry, source.base} <= set(entries), claim.item
                assert source.key == claims.EVALUATION or source.key in compare.KEPT


def test_what_is_named_in_the_code_is_there():
    """A test or definition that is gone would leave its row not measured."""
    for claim in ALL:
        for source in claim.sources:
            if isinstance(source, claims.Test | claims.Where):
                assert source.findings(claims.Folders()), (claim.item, source)


def test_every_key_finds_its_verdicts_in_the_results_that_are_kept():
    for claim in ALL:
        for source in claim.sources:
            if isinstance(source, claims.Lab) and (claims.LAB / f"{source.name}.json").exists():
                found = [verdict[0] for verdict in source.verdicts(claims.Folders())]
                for key in source.claims:
                    assert any(text.startswith(key) for text in found), (claim.item, key)


# ------------------------------------------------------------------------------------------------------ the verdicts


@pytest.fixture
def folders(tmp_path):
    for name in ("lab", "runs"):
        (tmp_path / name).mkdir()
    return claims.Folders(tmp_path / "lab", tmp_path / "runs", tmp_path / "limit.json", tmp_path / "words.json")


def keep(folders, suite, entry, seed, accuracies, **metrics):
    """A kept run with these evaluations, one every 4 steps, and metrics that all steps share."""
    common, entries = compare.SUITES[suite]
    words = [*compare.read_entries(entries)[entry], *shlex.split(common), "--seed", str(seed)]
    rows = [{"step": 0, "eval/accuracy": 0.1}]
    rows += [{"step": 4 * i, "eval/accuracy": value} | metrics for i, value in enumerate(accuracies, 1)]
    about = {"command": shlex.join(words), "commit": "abc", "machine": "m", "date": "d"}
    path = compare.kept_file(folders.runs, entry, seed)
    path.write_text(json.dumps(about | {"rows": rows}))
    return path


AHEAD = claims.Ahead("comparison", "ar", "grpo")


def test_a_difference_by_hand(folders):
    """Differences in the mean 0.1, 0.2, 0.3: 0.2 ± 0.058; at the end 0.1 each."""
    for seed, gain in enumerate((0.1, 0.2, 0.3)):
        keep(folders, "comparison", "grpo", seed, [0.2, 0.2, 0.5])
        keep(folders, "comparison", "ar", seed, [0.2 + 1.5 * gain - 0.05, 0.2 + 1.5 * gain - 0.05, 0.6])
    [found] = AHEAD.findings(folders)
    assert found == claims.Finding(claims.SHOWS, "ar minus grpo: +0.200 ± 0.058 mean, +0.100 ± 0.000 at step 12")
    [other] = dataclasses.replace(AHEAD, sign=-1).findings(folders)
    assert other.word == claims.DOES_NOT_SHOW and other.numbers == f"{found.numbers} (the opposite)"


def test_one_measure_of_two_cannot_tell(folders):
    for seed, noise in enumerate((-0.1, 0.0, 0.1)):
        keep(folders, "comparison", "grpo", seed, [0.2, 0.2, 0.5])
        keep(folders, "comparison", "ar", seed, [0.6, 0.6, 0.5 + noise])
    assert AHEAD.findings(folders)[0].word == claims.CANNOT_TELL
    for seed, noise in enumerate((-0.1, 0.0, 0.1)):
        keep(folders, "comparison", "ar", seed, [0.2, 0.2, 0.5 + noise])
    assert AHEAD.findings(folders)[0].word == claims.DOES_NOT_SHOW


def test_too_few_seeds_cannot_tell_and_none_is_not_measured(folders):
    assert AHEAD.findings(folders) == []
    for seed in (0, 1):
        keep(folders, "comparison", "grpo", seed, [0.2, 0.2, 0.2])
    keep(folders, "comparison", "ar", 2, [0.9, 0.9, 0.9])
    assert AHEAD.findings(folders) == []  # no seed in common
    for seed in (0, 1):
        keep(folders, "comparison", "ar", seed, [0.9, 0.9, 0.9])
    [found] = AHEAD.findings(folders)
    assert found.word == claims.CANNOT_TELL and found.numbers.endswith("; 2 seeds")


def test_a_metric_is_the_mean_of_the_last_five_steps(folders):
    for seed in range(3):
        keep(folders, "comparison", "grpo", seed, [0.2] * 6, response_tokens=100 + seed)
        keep(folders, "comparison", "ar", seed, [0.2] * 6, response_tokens=110 + seed)
    [found] = dataclasses.replace(AHEAD, key="response_tokens").findings(folders)
    expected = "ar minus grpo: +10.000 ± 0.000 response length [tokens], last 5 steps"
    assert found == claims.Finding(claims.SHOWS, expected)


def test_a_run_with_other_flags_is_an_error(folders):
    path = keep(folders, "comparison", "ar", 0, [0.2])
    path.write_text(path.read_text().replace("--alpha 0.3", "--alpha 0.2"))
    with pytest.raises(ValueError, match="was made by"):
        AHEAD.findings(folders)


def test_the_labs_verdicts_are_read_by_the_beginning_of_the_claim(folders):
    source = claims.Lab("who_dominates", ("one thing",))
    claim = claims.Claim("Figure 0", "", (source,), "")
    assert claims.judged(claim, folders) == claims.Finding(claims.NOT_MEASURED)
    verdicts = [["one thing (a)", "shows", "1"], ["another: one thing", "shows", "2"]]
    path = folders.lab / "who_dominates.json"
    path.write_text(json.dumps({"verdicts": verdicts}))
    assert claims.judged(claim, folders) == claims.Finding("shows", "1")
    path.write_text(json.dumps({"verdicts": [*verdicts, ["one thing (b)", "does not show", "3"]]}))
    assert claims.judged(claim, folders) == claims.Finding("does not show", "(1 × shows, 1 × does not show) a: 1; b: 3")
    assert ("who_dominates", "another: one thing", "shows", "2") in claims.unused(folders)


def test_all_sources_count_except_controls_and_files_of_the_lab_that_are_not_there(folders):
    assert claims.combined(["shows", "shows"]) == "shows"
    assert claims.combined(["shows", "cannot tell at this scale"]) == "cannot tell at this scale"
    assert claims.combined(["cannot tell at this scale", "does not show"]) == "does not show"
    assert claims.combined([]) == claims.NOT_MEASURED
    (folders.lab / "lens.json").write_text(json.dumps({"verdicts": [["a", "shows", "1"]]}))
    here, elsewhere = claims.Lab("lens", ("a",)), claims.Lab("proposition", ("a",))
    assert claims.judged(claims.Claim("", "", (here, elsewhere), ""), folders).word == "shows"
    assert claims.judged(claims.Claim("", "", (here, AHEAD), ""), folders).word == claims.NOT_MEASURED
    control = dataclasses.replace(AHEAD, is_control=True)
    assert claims.judged(claims.Claim("", "", (here, control), ""), folders).word == "shows"


def test_words_go_both_ways_from_two_standard_errors_on(folders):
    """Of 101 responses a rank correlation has a standard error of 0.1."""
    source = claims.Words("evaluate.py")
    assert source.findings(folders) == []
    for low, high, word in ((-0.21, 0.25, "shows"), (-0.19, 0.25, "does not show"), (0.3, 0.4, "does not show")):
        of_words = {"a": {"spearman": low}, "b": {"spearman": high}, "never said": {"spearman": None}}
        folders.words.write_text(json.dumps({"rows": [{"responses": 101, "words": of_words}]}))
        [found] = source.findings(folders)
        assert found.word == word
        numbers = f"b {high:+.2f}, a {low:+.2f}".replace("-", "−")
        assert f"{numbers} (101 responses; counts from 0.20 on)" in found.numbers


def test_the_cost_by_hand(folders):
    source = claims.Cost(least=1.5, most=1.1)
    assert source.findings(folders) == []
    for lopti, ar, word in ((1.7, 1.0, "shows"), (1.2, 1.0, "does not show"), (1.7, 1.3, "does not show")):
        seconds = {"update": 10.0, "update, AR": 10 * ar, "update, Lopti": 10 * lopti}
        phases = {name: {"seconds": value} for name, value in seconds.items()}
        folders.times.write_text(json.dumps({"phases": phases}))
        [found] = source.findings(folders)
        assert found.word == word and f"{lopti:.2f} times GRPO's with Lopti" in found.numbers


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_file_is_up_to_date():
    assert claims.FILE.read_text() == claims.page(), "python -m tools.claims"


def test_a_new_result_of_the_lab_changes_the_page(folders):
    shutil.copy(claims.LAB / "who_dominates.json", folders.lab)
    before = claims.page(dataclasses.replace(claims.Folders(), lab=folders.lab))
    path = folders.lab / "who_dominates.json"
    path.write_text(path.read_text().replace('"shows"', '"does not show"'))
    after = claims.page(dataclasses.replace(claims.Folders(), lab=folders.lab))
    assert "| Figure 1(a), (d) |" in before
    row = next(line for line in before.splitlines() if line.startswith("| Figure 1(a), (d) |"))
    assert "**shows**" in row and row.replace("**shows**", "**does not show**") in after


def test_every_verdict_of_the_lab_is_somewhere_on_the_page():
    page = claims.FILE.read_text()
    for path in claims.LAB.glob("*.json"):
        for _, _, numbers in claims.read_lab(path):
            assert numbers.replace("|", "∣") in page, path


def test_links_lead_somewhere_and_rows_have_all_cells():
    page = claims.FILE.read_text()
    for target in re.findall(r"\]\(\.\./([^)]+)\)", page):
        assert (ROOT / target).exists(), target
    for line in page.splitlines():
        assert line.startswith("|") or len(line) <= 120
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count(" | ") != 1]
    assert {line.count(" | ") for line in rows} <= {2, 3, 4}


def test_check_changes_nothing(tmp_path, capsys):
    file = tmp_path / "claims.md"
    with pytest.raises(SystemExit) as ended:
        claims.main(claims.Args(check=True, file=file))
    assert ended.value.code == 1 and not file.exists() and "out of date" in capsys.readouterr().out
    claims.main(claims.Args(file=file))
    with pytest.raises(SystemExit) as ended:
        claims.main(claims.Args(check=True, file=file))
    assert ended.value.code == 0 and "is up to date" in capsys.readouterr().out
