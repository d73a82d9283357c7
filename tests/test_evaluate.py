"""evaluate.py: figures against arithmetic done by hand, and whole evaluations by a model that answers as it was taught.

That model learns a few answers by heart, right ones and wrong ones, so that the table is known beforehand; vLLM samples
it. Evaluations run in this process, as main() does it, and share vLLM's engines, whose loading is most of their time.
"""

import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import sys
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, TALK, check_linear_time, learn_by_heart, python, run, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import evaluation.run
from evaluation import figures, words
from evaluation.figures import Column
from rewards import countdown, hitab, kk, own
from rewards.math import INSTRUCTION
from runtime import machine
from runtime.chats import encode


def contributions(*checkpoints, k=None):
    """Of two or more problems, whose (right, wrong) responses each checkpoint has."""
    scored = []
    for counts in checkpoints:
        scored.append([[{"correct": True}] * right + [{"correct": False}] * wrong for right, wrong in counts])
    return figures.contributions(Column("", "a", k), [{"category": "a"}] * len(checkpoints[0]), scored)


def test_avg_at_n_and_both_parts_of_its_error():
    """Shares 1, 0, 1/2, 1/2: mean 1/2, squares 1/4 + 1/4 over 3, so that the error is √(1/6)/2.

    Of it sampling has √(1/4 + 1/4)/4: p(1−p)/(n−1) is 1/4 where one of two is right and 0 elsewhere.
    """
    values, noise = contributions([(2, 0), (0, 2), (1, 1), (1, 1)])
    assert values == [1, 0, 0.5, 0.5] and noise == [0, 0, 0.25, 0.25]
    expected = {"value": 0.5, "problems": 4, "error": math.sqrt(1 / 6) / 2, "error_samples": math.sqrt(0.5) / 4}
    assert figures.figure(values, noise) == pytest.approx(expected | {"error_problems": math.sqrt(1 / 24 - 1 / 32)})
    # Greedy, 3 of 4 right: squares 3/16 + 9/16 over 3 is 1/4, so that the error is 1/4. One problem has none.
    greedy = contributions([(1, 0), (1, 0), (1, 0), (0, 1)])
    assert figures.figure(*greedy) == {"value": 0.75, "error": 0.25, "problems": 4}
    assert figures.figure([1.0]) == {"value": 1.0, "error": None, "problems": 1}


def test_checkpoints_are_averaged_for_each_problem_before_anything_else():
    """Two checkpoints, right at the first and at the second problem: each contributes 1/2, and nothing differs."""
    values, noise = contributions([(4, 0), (0, 4)], [(0, 4), (4, 0)])
    assert values == [0.5, 0.5] and noise == [0, 0] and figures.figure(values, noise)["error"] == 0
    _, noise = contributions([(2, 2), (2, 2)], [(2, 2), (2, 2)])
    assert noise == [pytest.approx(1 / 4 / 3 / 2)] * 2  # p(1−p)/(n−1), halved by the second checkpoint
    values, _ = contributions([(1, 3), (0, 4)], [(0, 4), (4, 0)], k=2)
    assert values == pytest.approx([(0.5 + 0) / 2, (0 + 1) / 2])  # pass@2: 1 − C(3,2)/C(4,2) = 1/2


def test_equal_problems_are_one_cluster_in_errors_and_comparisons():
    """Repeating each problem changes no error, and its responses' clusters are those of the problems."""
    columns = {"all": Column("accuracy")}
    once, mine, theirs = ["a", "b", "c", "d"], [1.0, 0.0, 1.0, 1.0], [0.5, 0.0, 0.0, 1.0]
    expected = figures.paired(columns, {"all": mine}, {"all": theirs})["all"]
    assert expected["error"] == pytest.approx(stdev([0.5, 0, 1, 0]) / 2)
    found = figures.paired(columns, {"all": mine * 8}, {"all": theirs * 8}, {"all": once * 8})["all"]
    assert found == pytest.approx(expected | {"problems": 32})
    assert figures.error_of(mine * 8, once * 8) == pytest.approx(figures.error_of(mine)) == pytest.approx(0.25)
    assert figures.error_of([1.0, 0.0], ["a", "a"]) is None
    # By hand: clusters [1, 0] and [1], mean 2/3, deviations 1 − 4/3 and 1/3; √(2 · 2/9) / 3.
    assert figures.error_of([1.0, 0.0, 1.0], ["a", "a", "b"]) == pytest.approx(math.sqrt(2 * (1 / 9 + 1 / 9)) / 3)
    assert figures.mean_figure({"x": Column("", "x")}, {"x": mine * 2}, {"x": once * 2})["error"] == pytest.approx(0.25)
    # Games have equal prompts, and differ in their answers; a prompt may differ in blanks.
    texts = ["What?", "What? ", "What?"]
    problems = [{"messages": [{"role": "user", "content": text}], "category": "x"} for text in texts]
    names = figures.names_of({"x": Column("", "x")}, [p | {"answer": a} for p, a in zip(problems, (1, 1, 2))])["x"]
    assert names[0] == names[1] != names[2]
    kept = [[{"response": "so " * (i % 3), "reward": i * i % 5 % 2, "prompt": i % 4, "answer": 1}] for i in range(16)]
    errors = [
        words.count_all(some)[1]["conclusion indicator"]["by_category"]["all"] for some in (kept[:12], kept[:12] * 4)
    ]
    assert errors[0]["error"] == pytest.approx(errors[1]["error"], rel=1e-6) and errors[0]["error"] > 0


def test_a_mean_over_sets_adds_their_squared_errors():
    columns = {"2": Column("2 people", "2", None), "3": Column("3 people", "3", None)}
    values = {"2": [1.0, 0.0, 1.0, 1.0], "3": [0.0, 0.0, 1.0]}
    found = figures.mean_figure(columns, values)
    assert found["value"] == pytest.approx((3 / 4 + 1 / 3) / 2) and found["problems"] == 7
    assert found["error"] == pytest.approx(math.sqrt(0.25**2 + (1 / 9)) / 2)  # of [0, 0, 1]: √(1/3)/√3 = 1/3
    assert figures.mean_figure(columns, values | {"3": [1.0]})["error"] is None
    # Columns that share their problems are one set: each contributes 1.25 and 0.75, whose error is √(1/8)/√2 = 1/4.
    columns = {"p": Column("pass", "aime", 2), "a": Column("avg", "aime", None), "m": Column("other", "math500", None)}
    found = figures.mean_figure(columns, {"a": [0.25, 0.75], "p": [1.0, 0.0], "m": [0.0, 1.0]})
    assert found["value"] == pytest.approx(0.5) and found["problems"] == 4
    assert found["error"] == pytest.approx(math.sqrt(0.25**2 + 0.5**2) / 3)


def test_a_paired_comparison_counts_who_moved_where():
    """Differences 1, −1/2, 0, 0, 1/2 and −1, 0: means 1/5 and −1/2."""
    columns = {"2": Column("2 people", "2", None), "3": Column("3 people", "3", None)}
    mine = {"2": [1.0, 0.0, 1.0, 0.0, 1.0], "3": [0.0, 0.5]}
    theirs = {"2": [0.0, 0.5, 1.0, 0.0, 0.5], "3": [1.0, 0.5]}
    found = figures.paired(columns, mine, theirs)

    def moves(key, found=found):
        return [found[key][way] for way in ("up", "down", "ties")]

    assert (moves("2"), moves("3"), moves("mean")) == ([2, 1, 2], [0, 1, 1], [2, 2, 3])
    assert found["2"]["value"] == pytest.approx(0.2)
    assert found["2"]["error"] == pytest.approx(stdev([1.0, -0.5, 0.0, 0.0, 0.5]) / math.sqrt(5))
    assert found["mean"]["value"] == pytest.approx((0.2 - 0.5) / 2)
    same = figures.paired(columns, mine, mine)["mean"]
    assert same["error"] == same["value"] == 0 and same["ties"] == 7
    assert figures.moved([fmean([0.1] * 3) - 0.1, 0.1 - fmean([0.1] * 3)])["ties"] == 2
    # AIME's problems stand in two columns, and count once.
    columns = {"aime pass@2": Column("", "aime", 2), "aime": Column("", "aime", None)}
    mine, theirs = {"aime pass@2": [1.0, 0.0], "aime": [0.5, 0.0]}, {"aime pass@2": [0.0] * 2, "aime": [0.0] * 2}
    found = figures.paired(columns, mine, theirs)
    assert moves("mean", found) == [1, 0, 1] and found["mean"]["value"] == pytest.approx((0.5 + 0.25) / 2)


def test_pass_at_k_over_all_problems_is_beside_the_columns_and_not_in_their_mean():
    problems = [{"category": "2", "samples": 4}] * 2 + [{"category": "3", "samples": 4}]
    args = settled("m", "--suite", "kk", "--samples", "4", "--temperature", "1", "--pass_at_k")
    columns = figures.columns_of(problems, args)
    assert list(columns) == ["2", "3", "pass@1", "pass@2", "pass@4"]
    values = {"2": [1 / 4, 1], "3": [1 / 2]} | {f"pass@{k}": [1, 1, 1] for k in (1, 2, 4)}
    assert figures.mean_figure(columns, values)["value"] == pytest.approx((5 / 8 + 1 / 2) / 2)


TEXT = """Let me Analyze this. I considered it, look  at it and LOOKED
at it again; checking Zoe's statement. Recheck the checkbox. James' statements and Zoe’s Statement examine nothing.
Since Zoe lies, because of that and due to this, given that, sincerely. So, thus; hence as a result: consequently and
therefore, also so-called sofas. Assume she is. If she lies, then he does. If he lies. Then who? The statement must be
definite. It MUST be definitely so; mustbe. Assuming IF x then y then z."""
COUNTED = {
    "analysis": 6,  # Analyze, considered, look at, LOOKED at, checking, examine
    "statement": 3,  # Zoe's statement, James' statements, Zoe’s Statement
    "causal indicator": 4,  # Since, because, due to, given that
    "conclusion indicator": 8,  # So, thus, hence, as a result, consequently, therefore, so-called, so
    "assumption": 4,  # Assume, If … then, Assuming, IF … then; not across a full stop
    "assertion": 4,  # must be, definite, MUST be, definitely
}


def test_words_are_counted_as_by_hand():
    assert words.count_words(TEXT) == COUNTED
    assert words.count_words("") == dict.fromkeys(COUNTED, 0) == words.count_words("assumption, analysis, statement")
    assert words.count_words(" ".join([TEXT] * 3)) == {family: 3 * count for family, count in COUNTED.items()}


@pytest.mark.parametrize("part", ["if ", "a", "x's ", "look "])
def test_no_text_makes_counting_slow(part):
    check_linear_time(words.count_words, lambda size: size * part)


TEMPLATE = "{{ messages[-1]['content'][-90:] }}"  # short prompts are learned sooner
MATH = {  # set: (problem, gold, answers), the latter learned alike
    "olympiad_bench": [("Olympiad one?", 11, [11]), ("Olympiad two?", 12, [13])],
    "minerva": [("Minerva one?", 21, [21]), ("Minerva two?", 22, [22])],
    "math500": [("Math one?", 31, [32]), ("Math two?", 32, [31])],
    "amc": [("Contest one?", 41, [41]), ("Contest two?", 42, [42, 43])],
    "aime": [("Invited one?", 51, [51, 52]), ("Invited two?", 52, [51])],
}


def taught():
    """[(problem, responses to learn)].

    Right: K&K of 2 people, none of 3, half of 4; 3 numbers, half of 4; of questions on tables the first of each kind,
    and a second one that compares; MATH's.
    """
    rows = []
    for i, puzzle in enumerate(kk.generate(6, "2-4", seed=0, split="test")):
        right = puzzle["category"] == "2" or (puzzle["category"] == "4" and i < 3)
        roles = [(name, "knight" if knight == right else "knave") for name, knight in puzzle["answer"].items()]
        listed = " ".join(f"({j}) {name} is a {role}" for j, (name, role) in enumerate(roles, 1))
        rows.append((puzzle, [f"{' So' if right else ' It must be'}</think><answer>{listed}</answer>"]))
    for i, puzzle in enumerate(countdown.generate(4, "3-4", seed=0, split="test")):
        rows.append((puzzle, [f" so</think><answer>{puzzle['solution'] if i < 3 else '1 + 1'}</answer>"]))
    for i, problem in enumerate(hitab.generate(8, seed=0, split="test")):
        answer = "; ".join(map(str, problem["answer"])) if i < 4 or i == 7 else "none"
        rows.append((problem, [f" so</think><answer>{answer}</answer>"]))
    for problem, _, answers in itertools.chain(*MATH.values()):
        content = f"{problem} {INSTRUCTION}"
        messages = [{"role": "user", "content": content}]
        rows.append(({"messages": messages, "prefix": ""}, [rf"\boxed{{{answer}}}" for answer in answers]))
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama of 0.1 M parameters that has learned by heart what taught() says; in bfloat16, with kk_tiny's words."""
    folder = tmp_path_factory.mktemp("evaluate") / "taught"
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=end,
    )  # fmt: skip
    lm = LlamaForCausalLM(config)
    pairs = [(problem, text) for problem, texts in taught() for text in texts]
    rows = [(encode(tokenizer, problem), [*tokenizer.encode(text), end]) for problem, text in pairs]
    enough = 0.012  # what is left is the choice between two answers
    assert learn_by_heart(lm, rows, lr=4e-3, steps=1000, max_grad_norm=1.0, enough=enough) < enough
    lm.to(torch.bfloat16).save_pretrained(folder)
    return folder


def spoiled(model, folder):
    """A copy of a model whose last hidden states are turned round: it says nothing right."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= -1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", autouse=True)
def engines():
    """load_engine as it is, but a model's engine is kept running for the next evaluation, with one context for all."""
    kept, load = {}, evaluation.sampling.load_engine

    def load_once(model, engine, seed):
        key = evaluation.models.fingerprint(model)
        if key not in kept:
            kept[key] = load(model, engine | {"context": 2048, "kv_cache_gb": 0.1}, seed)
            patch.setattr(kept[key].llm_engine.engine_core, "shutdown", lambda *_: None)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation.sampling, "load_engine", load_once)
        yield kept


def call(*flags):
    """main() with these flags; {suffix: path} of what it wrote, in --out's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", *map(str, flags)])
        evaluation.run.main()
    out = Path(flags[flags.index("--out") + 1])
    return {
        path.name.split("_")[-1] if path.stem.endswith("responses") else path.suffix: path for path in out.iterdir()
    }


def read(path):
    return json.loads(path.read_text())


def in_short(row):
    return {key: (round(found["value"], 6), found["problems"]) for key, found in row["figures"].items()}


KK = ("--suite", "kk", "--people", "2-4", "--limit", 2, "--max_response_tokens", 100)


@pytest.mark.slow
def test_what_was_taught_is_the_table(model, tmp_path):
    kk_results = call(model, *KK, "--out", tmp_path, "--keep_responses", "--words", "--paper")
    results = read(kk_results[".json"])
    (row,) = results["rows"]
    assert in_short(row) == {"2": (1, 2), "3": (0, 2), "4": (0.5, 2), "mean": (0.5, 6)}
    assert [row["figures"][key]["error"] for key in "234"] == [0, 0, pytest.approx(0.5)]  # √(1/2)/√2
    assert row["figures"]["mean"]["error"] == pytest.approx(0.5 / 3)
    assert row["format_rate"] == 1 and row["truncated_rate"] == 0 and row["responses"] == 6
    assert {key: of["responses"] for key, of in row["by_category"].items()} == {"2": 2, "3": 2, "4": 2}
    responses = [json.loads(line) for line in kk_results["responses.jsonl"].read_text().splitlines()]
    assert [(r["reward"], r["correct"]) for r in responses] == [(x, x == 3) for x in (3, -0.5, 3, 3, -0.5, -0.5)]
    assert row["mean_tokens"] == pytest.approx(fmean(r["tokens"] for r in responses))
    assert responses[0]["response"] == taught()[0][1][0] and responses[0]["tokens"] > 10
    # The papers have no 2 people, and their mean is over 3 to 7: it has no place here.
    assert "(AR-Lopti, Table 9) |  | 0.73 | 0.70 |  |" in kk_results[".md"].read_text()
    # Right answers begin with "So", wrong ones with "It must be": each once in half of the responses.
    for family, sign in (("conclusion indicator", 1), ("assertion", -1)):
        found = row["words"][family]
        assert found["value"] == 0.5 and found["error"] == pytest.approx(math.sqrt(0.3) / math.sqrt(6))
        assert found["pearson"] == pytest.approx(sign) and found["spearman"] == pytest.approx(sign)
    assert kk_results[".png"].read_bytes()[:4] == b"\x89PNG"
    # What made them
    said = {"temperature": 0, "people": "2-4", "seed": 0, "max_response_tokens": 100}
    assert said.items() <= results["settings"].items()
    assert results["provenance"]["versions"]["torch"] == torch.__version__ and results["provenance"]["commit"]
    (checkpoint,) = row["checkpoints"]
    assert checkpoint["path"] == str(model) and checkpoint["fingerprint"] == evaluation.models.fingerprint(model)
    assert checkpoint["made"] == [results["provenance"]]


@pytest.mark.slow
def test_mathematics_by_the_papers_protocol(model, tmp_path):
    """Sampled figures are worked out anew from the responses that were kept. AIME's file has another of its names."""
    for name, problems in MATH.items():
        rows = [{"problem": problem, "answer": gold} for problem, gold, _ in problems]
        write_rows(tmp_path / "math" / f"{'AIME-2024' if name == 'aime' else name}.json", rows)
    flags = f"--suite math --data_dir {tmp_path} --chat_template auto --max_response_tokens 20".split()
    written = call(model, *flags, "--out", tmp_path / "out", "--keep_responses", "--paper")
    results = read(written[".json"])
    of_row = results["rows"][0]["figures"]
    right = {problem: [] for problems in MATH.values() for problem, *_ in problems}
    for response in map(json.loads, written["responses.jsonl"].read_text().splitlines()):
        for problem, gold, _ in MATH[response["category"]]:
            if problem in response["prompt"]:
                right[problem].append(response["response"].endswith(rf"\boxed{{{gold}}}"))
    for name, problems in MATH.items():
        how = (16, 1.0) if name in ("amc", "aime") else (1, 0.0)
        assert tuple(results["sampling"][name].values()) == how, name
        assert [len(right[problem]) for problem, *_ in problems] == [how[0]] * 2
        assert of_row[name]["value"] == pytest.approx(fmean(fmean(right[problem]) for problem, *_ in problems))
    assert 0 < fmean(right["Contest two?"]) < 1 and fmean(right["Contest one?"]) > 0.8
    assert [of_row[name]["value"] for name in ("olympiad_bench", "minerva", "math500")] == [0.5, 1, 0]
    assert of_row["aime pass@16"]["value"] == fmean([any(right["Invited one?"]), any(right["Invited two?"])])
    columns = ["olympiad_bench", "minerva", "math500", "amc", "aime pass@16", "aime"]
    assert list(of_row) == [*columns, "mean"]
    assert of_row["mean"]["value"] == pytest.approx(fmean(of_row[name]["value"] for name in columns))


OTHERS = {
    "countdown": {"3": 1, "4": 0.5, "all": 0.75},
    "hitab": {"comparison": 1, "difference": 0.5, "lookup": 0.5, "sum": 0.5, "all": 0.625},
}


@pytest.mark.parametrize(("suite", "shares"), OTHERS.items())
@pytest.mark.slow
def test_other_suites_have_a_column_for_each_kind_and_one_for_all(suite, shares, model, tmp_path):
    flags = ["--suite", suite, "--limit", 2, "--max_response_tokens", 100, "--chat_template", "auto", "--paper"]
    (row,) = read(call(model, *flags, "--samples", 1, "--temperature", 0, "--out", tmp_path)[".json"])["rows"]
    assert {key: found["value"] for key, found in row["figures"].items()} == shares and row["format_rate"] == 1


WITH_TURNS = """
def score_conversation(turns, answer):
    return {"reward": float(len(turns)), "correct": len(turns) == 2, "format": True}

def score(response, answer):
    return score_conversation([response], answer)
"""


@pytest.fixture
def sampled(monkeypatch):
    """How many problems the sampler got in each of its calls, in order."""
    sample, found = evaluation.sampling.sample, []
    monkeypatch.setattr(evaluation.sampling, "sample", lambda *given: found.append(len(given[2])) or sample(*given))
    return found


def test_a_task_that_replies_is_evaluated_turn_by_turn(tmp_path, sampled):
    """With pass@k over conversations; those that are kept are read again, unless the task has changed."""
    task = tmp_path / "talk.py"
    task.write_text(TALK + WITH_TURNS)
    flags = [KK_TINY, "--suite", task, "--limit", 3, "--samples", 4, "--temperature", 1, "--pass_at_k"]
    flags += ["--max_turns", 2, "--max_response_tokens", 150, "--batch", 8]
    flags += ["--keep_responses", "--out", tmp_path / "out"]
    found = call(*flags)
    rows = [json.loads(line) for line in found["responses.jsonl"].read_text().splitlines()]
    assert len(rows) == 12 and sampled == [2, 1] and {len(row["turns"]) for row in rows} == {1, 2}
    for row in rows:
        assert row["response"] == row["turns"][-1] and row["replies"] == ["Why?"] * (len(row["turns"]) - 1)
        assert row["reward"] == len(row["turns"]) and 0 < row["tokens"] <= 150
        if len(row["turns"]) == 2 and len(row["response"]) % 3:  # the task would have replied again
            assert row["truncated"]
    (result,) = read(found[".json"])["rows"]
    right = [sum(row["correct"] for row in rows[i : i + 4]) for i in (0, 4, 8)]
    assert result["figures"]["pass@4"]["value"] == fmean(n > 0 for n in right) and 0 < sum(right) < 12

    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    call(*flags)
    assert sampled == [2, 1] and {path: path.read_bytes() for path in before} == before
    task.write_text((TALK + WITH_TURNS).replace("Why?", "How so?"))
    own.read_file.cache_clear()
    call(*flags)
    (new,) = {*(tmp_path / "out").glob("*_responses.jsonl")} - {*before}
    assert sampled == [2, 1] * 2 and '"replies": ["How so?"]' in new.read_text()


def blank(path, out):
    """A result's bytes without the name of the folder that it lies in."""
    return path.read_bytes().replace(str(out).encode(), b"")


def test_results_are_written_before_they_are_shown(model, tmp_path, monkeypatch):
    def no_reader(*_):
        raise BrokenPipeError

    monkeypatch.setattr(evaluation.run, "print_table", no_reader)
    with pytest.raises(BrokenPipeError):
        call(model, *KK, "--out", tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".json", ".md"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=["Ctrl-C", "full disk"])
def test_an_interrupted_evaluation_goes_on_where_it_was(model, tmp_path, sampled, error):
    """Batches of 2: an unbroken evaluation, and one that stops in its third batch and goes on. At temperature 1."""
    flags = [model, *KK, "--temperature", 1, "--samples", 2, "--batch", 4, "--keep_responses"]
    unbroken = call(*flags, "--out", tmp_path / "unbroken")
    sample = evaluation.sampling.sample

    def stopping(*given):
        if len(sampled) == 3 + 2:
            raise error
        return sample(*given)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(evaluation.sampling, "sample", stopping)
        call(*flags, "--out", tmp_path / "broken")
    assert [path.name for path in (tmp_path / "broken").iterdir()] == ["responses"]
    (kept,) = (tmp_path / "broken/responses").iterdir()
    assert kept.read_bytes().count(b"\n") == 3  # what it is of, and two batches
    kept.write_bytes(kept.read_bytes() + b'{"made": {"script": "eval')  # as a kill in the middle of a line
    broken = call(*flags, "--out", tmp_path / "broken")
    assert sampled == [2] * (3 + 2 + 1)  # the third batch alone
    for kind in (".json", ".md", "responses.jsonl"):
        assert blank(broken[kind], tmp_path / "broken") == blank(unbroken[kind], tmp_path / "unbroken")
    assert kept.read_bytes() == (tmp_path / "unbroken/responses" / kept.name).read_bytes()


@pytest.mark.slow
def test_what_is_complete_is_not_sampled_again_and_nothing_else_is_taken_for_it(model, tmp_path, sampled):
    copy = shutil.copytree(model, tmp_path / "copy")

    def asked(*flags):
        sampled.clear()
        call(copy, *KK, "--out", tmp_path / "out", *flags)
        return bool(sampled)

    assert asked() and not asked() and not asked("--words", "--paper", "--keep_responses")
    other = "bfloat16" if not machine.has_fast_bfloat16() else "float32"
    changes = {"seed": 1, "temperature": 1, "max_response_tokens": 99, "limit": 1, "chat_template": "none"}
    for name, value in (changes | {"dtype": other}).items():
        assert asked(f"--{name}", value), name
    moved = copy.rename(tmp_path / "moved")
    shutil.copytree(moved, copy)
    assert not asked()  # the same weights
    shutil.rmtree(copy)
    spoiled(model, copy)
    assert asked()  # others under the same name
    locked = [os.open(kept, os.O_RDWR) for kept in (tmp_path / "out/responses").iterdir()]
    for file in locked:
        fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match="another evaluation is writing"):
        asked()
    for file in locked:
        os.close(file)


@pytest.fixture(scope="module")
def a_run(model, tmp_path_factory):
    """A run's folder: its checkpoints are the taught model, one that writes nothing right, and the taught one again."""
    folder = tmp_path_factory.mktemp("runs") / "grpo_kk"
    bad = spoiled(model, tmp_path_factory.mktemp("bad") / "model")
    for step, source in {2: bad, 4: model, 6: bad, 8: model}.items():
        path = shutil.copytree(source, folder / f"checkpoints/step_{step:06d}")
        (path / "trainer_state.json").write_text(json.dumps({"step": step}))
    (folder / "checkpoints/step_000010.tmp").mkdir()  # of a save that was cut off
    settings = {"task": "kk", "people": "2,4", "chat_template": "auto", "max_response_tokens": 100}
    (folder / "args.json").write_text(json.dumps(settings | {"eval_temperature": 0.0}))
    return folder


@pytest.mark.slow
def test_a_runs_last_checkpoints_are_one_row(a_run, model, tmp_path, monkeypatch):
    """Steps 4, 6 and 8, of which the second knows nothing: 2/3 of what was taught, for each problem alike."""
    newer = a_run / "checkpoints/step_000012"  # the run is still training
    monkeypatch.setattr(evaluation.run, "print_header", lambda *_: shutil.copytree(model, newer))
    flags = ["--last", 3, "--limit", 2, "--out", tmp_path, "--versus", model]
    results = read(call(a_run, *flags)[".json"])
    shutil.rmtree(newer)
    row, taught_row = results["rows"]
    assert results["settings"]["people"] == "2,4" and results["settings"]["max_response_tokens"] == 100
    assert row["model"] == f"{a_run}: step_000004, step_000006, step_000008"
    assert in_short(row) == {"2": (0.666667, 2), "4": (0.333333, 2), "mean": (0.5, 4)}
    assert row["figures"]["2"]["error"] == 0 and row["figures"]["4"]["error"] == pytest.approx(1 / 3)
    assert row["responses"] == 12 and taught_row["responses"] == 4
    (comparison,) = results["versus"]
    assert comparison["model"] == row["model"] and comparison["versus"] == str(model)
    found = comparison["figures"]
    assert found["2"]["value"] == pytest.approx(-1 / 3) and found["2"]["error"] == pytest.approx(0)
    assert [found["mean"][way] for way in ("up", "down", "ties")] == [0, 3, 1]
    assert found["mean"]["value"] == pytest.approx((-1 / 3 - 1 / 6) / 2)


def settled(*flags):
    return evaluation.settings.read_settings(list(map(str, flags)))


def test_a_run_is_its_newest_checkpoint_and_a_checkpoint_has_its_runs_settings(a_run):
    assert evaluation.models.checkpoints(str(a_run), 1) == [str(a_run / "checkpoints/step_000008")]
    assert settled(a_run).people == "2,4" and settled(a_run / "checkpoints/step_000004").people == "2,4"
    assert settled(a_run, "--people", "3").people == "3"
    assert settled(a_run, "--suite", "countdown").max_response_tokens == (3072 if evaluation.run.ON_GPU else 128)
    with pytest.raises(ValueError, match=r"has 4 complete checkpoint\(s\), and --last is 5"):
        evaluation.models.checkpoints(str(a_run), 5)


def test_a_runs_temperature_goes_for_puzzles_and_defaults_are_the_papers(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"task": "kk", "eval_temperature": 0.7, "people": "5"}))
    assert settled(tmp_path).temperature == 0.7 and settled(tmp_path, "--suite", "math").temperature == 1
    for flags, temperature, samples, template, protocol in [
        ("--suite kk", 0, 1, "auto", "ar_lopti"),
        ("--suite math", 1, 16, "none", "ar_lopti"),
        ("--suite math --protocol acpo", 1, 8, "none", "acpo"),
        ("--suite countdown", 1, 4, "auto", "acpo"),
        ("--suite hitab", 1, 4, "none", "acpo"),
    ]:
        args = settled("m", *flags.split())
        found = (args.temperature, args.samples, args.chat_template, args.protocol)
        assert found == (temperature, samples, template, protocol), flags
    assert settled("models/kk_tiny").max_response_tokens == 4096


ERRORS = [  # flags, and what is said of them
    ("", "no model is given"),
    ("models/nothing", "models/nothing is no model folder"),
    ("KK_TINY --versus ./nothing", "nothing is no model folder"),
    ("KK_TINY --last 3", "none of the models is a run folder"),
    ("KK_TINY --limit -1", "--limit is -1; it must be greater than 0"),
    ("KK_TINY --samples 4", "--samples is 4, but greedy"),
    ("KK_TINY --data nothing.parquet", "nothing.parquet does not exist"),
    ("KK_TINY --data_dir nothing", "nothing is no folder"),
    ("KK_TINY --data_dir a --data b", "one --data or --data_dir"),
    ("KK_TINY --suite countdown --people 2", "--people is of --suite kk"),
    ("KK_TINY --suite gym --data_dir a", "it takes no --data"),
    ("KK_TINY --kv_cache_gb 0.0001", "one sequence of"),
    ("KK_TINY --suite math --sets gsm8k", "'gsm8k' is no set"),
    ("KK_TINY --suite math --data x.json", "own problems: x.json"),
    ("KK_TINY --suite math --data aime=x --sets amc", "the sets that are asked are amc"),
    ("KK_TINY --suite math", "Olympiad Bench (olympiad_bench.parquet"),
    ("KK_TINY --suite kk --samples 1 --temperature 1 --pass_at_k", "--pass_at_k needs several --samples"),
]


@pytest.mark.parametrize(("flags", "says"), ERRORS)
def test_errors_come_before_anything_loads_and_say_what_would_be_right(flags, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation.sampling, "load_engine", lambda *_: pytest.fail("an engine was loaded"))
    with pytest.raises(SystemExit) as ended:
        call(*flags.replace("KK_TINY", str(KK_TINY)).split(), "--out", tmp_path / "out")
    error = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and error.startswith("error: ") and says in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_a_bad_flag_is_refused_before_torch_is_imported():
    finished = python("-X", "importtime", "evaluate.py", KK_TINY, "--people", "2-9")
    *imports, error = finished.stderr.splitlines()
    assert finished.returncode == 2 and error.startswith("error: people must be like 3-7")
    names = [line.rpartition("|")[2].strip() for line in imports]
    assert "tyro" in names and "torch" not in names


def test_runs_that_differ_are_not_evaluated_by_guesswork(tmp_path):
    for name, people, temperature in (("a", "2", 0.0), ("b", "3", 0.0), ("c", "2", 0.6)):
        (tmp_path / name).mkdir()
        of_run = {"task": "kk", "people": people, "eval_temperature": temperature}
        (tmp_path / name / "args.json").write_text(json.dumps(of_run))
    for names, says in [
        ("ab", r"the runs differ in people \(2, 3\): give --people"),
        ("ac", r"the runs differ in temperature \(0.0, 0.6\): give --temperature"),
    ]:
        with pytest.raises(ValueError, match=says):
            settled(*(tmp_path / name for name in names))
    assert settled(tmp_path / "a", tmp_path / "b", "--people", "4").people == "4"


def test_a_prompt_must_fit_and_a_response_ends_with_the_context():
    args = SimpleNamespace(suite="kk", max_response_tokens=2000, chat_template="auto", dtype="bfloat16", batch=8)
    args.kv_cache_gb = None
    problem = {"messages": [{"role": "user", "content": "Zoe " * 200}], "prefix": "", "samples": 1}
    problem |= {"temperature": 0.0, "seed": 0}
    (request,), engine = evaluation.sampling.requests_of(str(KK_TINY), [problem], args)
    assert engine["context"] == 2048 and request["max_tokens"] == 2048 - len(request["prompt_ids"]) < 2000
    problem["messages"][0]["content"] *= 10
    with pytest.raises(ValueError, match="kk_tiny takes 2048 tokens, and 1 prompts have as many"):
        evaluation.sampling.requests_of(str(KK_TINY), [problem], args)


@pytest.mark.slow
def test_kk_tiny_from_the_command_line(tmp_path):
    """A few puzzles of what `python evaluate.py models/kk_tiny --suite kk --people 2-3` does, as a user starts it."""
    flags = "models/kk_tiny --suite kk --people 2-3 --limit 8 --out".split()
    finished = run("evaluate.py", *flags, tmp_path)
    (results,) = map(read, tmp_path.glob("*.json"))
    of_row = results["rows"][0]["figures"]
    assert list(of_row) == ["2", "3", "mean"] and of_row["mean"]["problems"] == 16
    assert of_row["mean"]["value"] > 0 and results["rows"][0]["format_rate"] > 0.5
    assert "2 people" in finished.stdout and "kk_tiny" in finished.stdout
