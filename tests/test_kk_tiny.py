"""models/kk_tiny: that what it learned from is sound, and that it is what its card says."""

import importlib
import itertools
import json
import random
import re
from statistics import fmean

import pytest
import regex
from conftest import KK_TINY, ROOT, metrics, read_claim, run
from helpers import holds

from models import make_kk_tiny
from rewards import kk, kk_solutions, puzzles
from runtime import files, flags, settings
from tools import family

CLAIM = r" (\w+)(?: says| claims|'s statement is|'s claim means| states|'s remark is) ([\w() ]+)"
RESTATED = re.compile(CLAIM + r"\.")
CASE = re.compile(r" (?:Assume|Suppose|If|Say|Imagine|Next|Take) (.*?)(?:, then:|[.:])")
JUDGEMENT = re.compile(
    CLAIM + r", (?:so|thus|hence|must be|therefore) (true|false)"
    r"(|: impossible|, a contradiction|: no|, which fails|: that cannot be)\."
)
BRACKET = re.compile(r"(\([^()]+\)) \((yes|no)\)")
PART = re.compile(r"(\w+) (honest|lying) as (not knight|not knave|knight|knave) \((yes|no)\)")
ROLE = re.compile(r"(\w+) (honest|lying)\b")


def read_careful(text, puzzle):
    """What everyone is said to claim, and [(roles, [(speaker, its truth by parts, its truth, rejected), ...]), ...].

    It is all of the text, or it fails.
    """
    opening = re.match(r" [A-Z][\w ]+ (?:cases|options)\.", text)
    assert opening, text
    place, claims, cases = opening.end(), [], []
    for name in puzzle["names"]:
        claim = RESTATED.match(text, place)
        assert claim and claim[1] == name, text[place:]
        place = claim.end()
        claims.append(claim[2])
    while match := JUDGEMENT.match(text, place) or CASE.match(text, place):
        place = match.end()
        if match.re is CASE:
            described = ROLE.findall(match[1])
            assert [name for name, _ in described] == puzzle["names"], match[1]
            cases.append((tuple(role == "honest" for _, role in described), []))
        else:
            truth = match[3] == "true"
            cases[-1][1].append((puzzle["names"].index(match[1]), match[2], truth, bool(match[4])))
    conclusion = text[place:]
    assert re.fullmatch(r" [A-Z][a-z ]+\.", conclusion), conclusion  # nothing else is said
    return claims, cases


def judged(spelled, puzzle, case):
    """The claim that a sentence judges: without the truth in this case of each part and bracket, which is right."""

    def part(match):
        name, role, claimed, truth = match.groups()
        person = puzzle["names"].index(name)
        assert case[person] == (role == "honest")
        assert holds(read_claim(f"{name} {claimed}", puzzle["names"]), case) == (truth == "yes")
        return f"{name} {claimed}"

    def bracket(match):
        assert holds(read_claim(match[1][1:-1], puzzle["names"]), case) == (match[2] == "yes")
        return match[1]

    return BRACKET.sub(bracket, PART.sub(part, spelled))


@pytest.mark.parametrize("people", [2, 3, 4, 5])
def test_careful_reasoning_is_sound_in_every_step(people):
    rng = random.Random(people)
    for puzzle in kk.generate(50, str(people), seed=3):
        reasoning, roles = kk_solutions.careful_reasoning(rng, puzzle)
        claims, cases = read_careful(make_kk_tiny.unmark(reasoning), puzzle)
        assert [read_claim(claim, puzzle["names"]) for claim in claims] == list(puzzle["statements"])
        assert len({case for case, _ in cases}) == len(cases)
        for number, (case, judgements) in enumerate(cases, 1):
            for speaker, (found, spelled, truth, rejected) in enumerate(judgements):
                assert found == speaker and judged(spelled, puzzle, case) == claims[speaker]
                assert truth == holds(puzzle["statements"][speaker], case)
                assert rejected == (truth != case[speaker])
            assert [rejected for *_, rejected in judgements[:-1]] == [False] * (len(judgements) - 1)
            assert judgements[-1][3] == (number < len(cases))  # all are rejected but the last
        assert case == roles == kk.solve(puzzle["statements"])[0] and len(judgements) == people


def test_a_restated_role_is_the_one_of_the_case_and_nothing_else_changes():
    said_again = re.compile(r" (true|false), (\w+) (honest|lying)(?=[.:,])")
    for puzzle in kk.generate(150, "2-4", seed=5):
        plain, restated = (kk_solutions.worked(puzzle, 1, 0, again) for again in (False, True))
        assert said_again.sub(r" \1", restated) == plain
        _, cases = read_careful(plain.split("</think>")[0], puzzle)
        roles = [(puzzle["names"][speaker], case[speaker]) for case, of in cases for speaker, *_ in of]
        assert [(name, role == "honest") for _, name, role in said_again.findall(restated)] == roles
    assert kk_solutions.worked(puzzle, 0, 0, True) == kk_solutions.worked(puzzle, 0, 0)  # a guess judges nothing


@pytest.mark.parametrize("careful", [True, False])
def test_solutions_are_in_the_papers_format(careful):
    rng = random.Random(0)
    puzzles = kk.generate(600, "2-4", seed=4)
    solutions = [make_kk_tiny.unmark(make_kk_tiny.solution(rng, puzzle, careful)) for puzzle in puzzles]
    scores = [kk.score(text, puzzle["answer"], strict=True) for text, puzzle in zip(solutions, puzzles)]
    assert all(score["format"] and score["parsed"] for score in scores)
    for people in "234":
        right = fmean(s["correct"] for s, p in zip(scores, puzzles) if p["category"] == people)
        assert right == 1 if careful else abs(right - 0.5 ** int(people)) < 0.1  # hasty is chance


@pytest.mark.slow
def test_every_puzzle_that_is_learned_from_belongs_to_the_train_split():
    for puzzle in itertools.chain(*make_kk_tiny.make_puzzles(0)):
        assert int(kk.identity(puzzle["statements"]), 16) % puzzles.TEST_SHARE


def test_a_retold_puzzle_is_the_same_puzzle():
    rng = random.Random(1)
    for puzzle in kk.generate(50, "2-5", seed=5):
        told = make_kk_tiny.retell(rng, puzzle)
        assert list(told["answer"].values()) == list(puzzle["answer"].values()) == list(kk.solve(told["statements"])[0])
        assert all(name in told["quiz"] for name in told["names"]) and told["quiz"] != puzzle["quiz"]


def test_every_puzzle_goes_through_the_tokenizer_and_back_word_by_word(tokenizer):
    for puzzle in kk.generate(1000, "2-8", seed=6):
        ids = tokenizer.encode(puzzle["quiz"], add_special_tokens=False)
        assert tokenizer.decode(ids) == puzzle["quiz"]
        assert len(ids) == len(regex.findall(make_kk_tiny.PIECES, puzzle["quiz"]))  # no word is spelled in bytes


@pytest.mark.slow
def test_it_starts_where_its_card_says():
    """100 test puzzles each of 2 and 3 people, 4 responses to each at temperature 1; vLLM samples."""
    measured = run("models/make_kk_tiny.py", "--measure", "--people", "2-3", "--samples", "4").stdout
    found = json.loads(measured.splitlines()[-1])
    mean = {key: (found["2"][key] + found["3"][key]) / 2 for key in found["2"]}
    assert 0.3 <= mean["accuracy"] <= 0.4 and mean["format"] > 0.95 and mean["cut off"] < 0.02, found
    assert 0.15 <= mean["tokens with p ≤ 0.5"] <= 0.25 and 0.2 <= mean["careful"] <= 0.35, found
    for people in found.values():
        assert people["accuracy of careful"] > people["accuracy of hasty"] + 0.25, found


@pytest.mark.parametrize("model", [KK_TINY, ROOT / "models" / "smollm2_kk"], ids=lambda path: path.name)
def test_all_settings_of_a_models_folder_are_settings_of_some_script_and_in_range(model):
    unknown = files.read_object(model / "trainer_settings.json").keys()
    for stem in family.family():
        trainer = importlib.import_module(stem)
        own = flags.of_model(model, trainer.Args)
        if stem == "grpo_kl":  # without its KL term it would be grpo.py
            own.pop("kl_coef", None)
        settings.check_ranges(trainer.Args(**own))
        unknown -= own.keys()
    assert not unknown


NO_NETWORK = """
import runpy, socket, sys
HERE = ("127.0.0.1", "::1", "localhost", "", None, socket.gethostname())
def refuse(event, about):
    host = None
    if event == "socket.connect" and about[0].family != socket.AF_UNIX:
        host = about[1][0]
    elif event == "socket.getaddrinfo":
        host = about[0]
    if host not in HERE:
        open({log!r}, "a").write(repr(host))
        raise OSError("no network")
sys.addaudithook(refuse)
sys.argv[0] = "grpo_ar_lopti.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_without_a_gpu_the_default_command_runs_without_any_network(tmp_path):
    """Only sizes are changed. Who asks for a name or an address elsewhere is written down."""
    worker = tmp_path / "worker.py"
    worker.write_text(NO_NETWORK.format(log=str(tmp_path / "asked")))
    flags = "--steps 1 --eval_size 4 --prompts_per_step 4 --max_response_tokens 100".split()
    run(worker, *flags, "--run_dir", tmp_path / "run", env={"CUDA_VISIBLE_DEVICES": ""})
    assert not (tmp_path / "asked").exists(), (tmp_path / "asked").read_text()
    settings = json.loads((tmp_path / "run" / "args.json").read_text())
    assert (settings["model"], settings["people"]) == ("models/kk_tiny", "2-3")  # not the paper's
    (row,) = metrics(tmp_path / "run")
    assert {"accuracy_2", "accuracy_3", "eval/accuracy_2", "eval/accuracy_3"} <= row.keys()
