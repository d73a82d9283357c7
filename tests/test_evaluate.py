"""evaluate.py: figures against arithmetic done by hand, and whole evaluations by a model that answers as it was taught.

That model learns a few answers by heart, right ones and wrong ones, so that the table is known beforehand; vLLM samples
it. Evaluations run in this process, as main() does it, and share vLLM's engines, whose loading is most of their time.
"""

import errno
import itertools
import json
import math
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch
from conftest import DATA, KK_TINY, ROOT, check_linear_time, learn_by_heart, python, run
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import evaluation.run
from evaluation import figures, suites, words
from evaluation.figures import Column
from rewards import countdown, hitab, kk
from rewards.math import INSTRUCTION
from runtime import machine
from runtime.chats import encode

needs_files = pytest.mark.skipif(not (DATA / "math").is_dir(), reason=f"the papers' files are not in {DATA}")

# ------------------------------------------------------------------------------------------------------------ figures


def scores_of(*counts):
    """For each (right, wrong) a problem's scores."""
    return [[{"correct": True}] * right + [{"correct": False}] * wrong for right, wrong in counts]


def test_avg_at_n_and_both_parts_of_its_error():
    """Shares 1, 0, 1/2, 1/2: mean 1/2, squares 1/4 + 1/4 over 3, so that the error is √(1/6)/2.

    Of it sampling has √(1/4 + 1/4)/4: p(1−p)/(n−1) is 1/4 where one of two is right and 0 elsewhere.
    """
    problems = [{"category": "a", "samples": 2}] * 4
    values, noise = figures.contributions(Column("", "a", None), problems, [scores_of((2, 0), (0, 2), (1, 1), (1, 1))])
    assert values == [1, 0, 0.5, 0.5] and noise == [0, 0, 0.25, 0.25]
    found = figures.figure(values, noise)
    assert found["value"] == 0.5 and found["problems"] == 4
    assert found["error"] == pytest.approx(math.sqrt(1 / 6) / 2)
    assert found["error_samples"] == pytest.approx(math.sqrt(0.5) / 4)
    assert found["error_problems"] == pytest.approx(math.sqrt(1 / 24 - 1 / 32))


def test_greedy_figures_have_an_error_over_problems_alone():
    """3 of 4 right: squares 3/16 + 9/16 over 3 is 1/4, so that the error is 1/4. One problem has none."""
    values, noise = figures.contributions(
        Column("", None, None), [{"category": "a", "samples": 1}] * 4, [scores_of((1, 0), (1, 0), (1, 0), (0, 1))]
    )
    assert figures.figure(values, noise) == {"value": 0.75, "error": 0.25, "problems": 4}
    assert figures.figure([1.0]) == {"value": 1.0, "error": None, "problems": 1}
    assert evaluation.tables.shown(figures.figure([1.0]), (100, 2)) == "100.00"
    assert evaluation.tables.shown({"value": 0.75, "error": 0.25}, (1, 3)) == "0.750 ± 0.250"


def test_checkpoints_are_averaged_for_each_problem_before_anything_else():
    """Two checkpoints, right at the first and at the second problem: each contributes 1/2, and nothing differs."""
    problems = [{"category": "a", "samples": 4}] * 2
    one, two = scores_of((4, 0), (0, 4)), scores_of((0, 4), (4, 0))
    values, noise = figures.contributions(Column("", "a", None), problems, [one, two])
    assert values == [0.5, 0.5] and noise == [0, 0] and figures.figure(values, noise)["error"] == 0
    values, noise = figures.contributions(Column("", "a", None), problems, [scores_of((2, 2), (2, 2))] * 2)
    assert noise == [pytest.approx(1 / 4 / 3 / 2)] * 2  # p(1−p)/(n−1), halved by the second checkpoint
    values, _ = figures.contributions(Column("", "a", 2), problems, [scores_of((1, 3), (0, 4)), two])
    assert values == [pytest.approx((0.5 + 0) / 2), pytest.approx((0 + 1) / 2)]  # pass@2: 1 − C(3,2)/C(4,2) = 1/2


def test_a_mean_over_sets_adds_their_squared_errors():
    columns = {"2": Column("2 people", "2", None), "3": Column("3 people", "3", None)}
    values = {"2": [1.0, 0.0, 1.0, 1.0], "3": [0.0, 0.0, 1.0]}
    found = figures.mean_figure(columns, values)
    assert found["value"] == pytest.approx((3 / 4 + 1 / 3) / 2) and found["problems"] == 7
    assert found["error"] == pytest.approx(math.sqrt(0.25**2 + (1 / 9)) / 2)  # of [0, 0, 1]: √(1/3)/√3 = 1/3
    assert figures.mean_figure(columns, values | {"3": [1.0]})["error"] is None


def test_columns_that_share_their_problems_are_one_set():
    """avg and pass of two problems, (0.25, 1) and (0.75, 0): each contributes 1.25 and 0.75 to the sum."""
    columns = {"p": Column("pass", "aime", 2), "a": Column("avg", "aime", None), "m": Column("other", "math500", None)}
    found = figures.mean_figure(columns, {"a": [0.25, 0.75], "p": [1.0, 0.0], "m": [0.0, 1.0]})
    assert found["value"] == pytest.approx(0.5) and found["problems"] == 4
    assert found["error"] == pytest.approx(math.sqrt(0.25**2 + 0.5**2) / 3)  # [1.25, 0.75]: √(1/8)/√2 = 1/4


def test_a_paired_comparison_counts_who_moved_where():
    """Differences 1, −1/2, 0, 0, 1/2 and −1, 0: means 1/5 and −1/2."""
    columns = {"2": Column("2 people", "2", None), "3": Column("3 people", "3", None)}
    mine = {"2": [1.0, 0.0, 1.0, 0.0, 1.0], "3": [0.0, 0.5]}
    theirs = {"2": [0.0, 0.5, 1.0, 0.0, 0.5], "3": [1.0, 0.5]}
    found = figures.paired(columns, mine, theirs)
    differences = [1.0, -0.5, 0.0, 0.0, 0.5]
    assert found["2"]["value"] == pytest.approx(0.2)
    assert found["2"]["error"] == pytest.approx(stdev(differences) / math.sqrt(5))
    assert (found["2"]["up"], found["2"]["down"], found["2"]["ties"]) == (2, 1, 2)
    assert (found["3"]["up"], found["3"]["down"], found["3"]["ties"]) == (0, 1, 1)
    assert found["mean"]["value"] == pytest.approx((0.2 - 0.5) / 2)
    assert (found["mean"]["up"], found["mean"]["down"], found["mean"]["ties"]) == (2, 2, 3)
    same = figures.paired(columns, mine, mine)
    assert same["mean"]["error"] == same["mean"]["value"] == same["2"]["up"] == 0 and same["mean"]["ties"] == 7
    assert figures.moved([fmean([0.1] * 3) - 0.1, 0.1 - fmean([0.1] * 3)])["ties"] == 2


def test_a_paired_mean_counts_the_problems_of_aime_once():
    columns = {"aime pass@2": Column("", "aime", 2), "aime": Column("", "aime", None)}
    found = figures.paired(
        columns, {"aime pass@2": [1.0, 0.0], "aime": [0.5, 0.0]}, {"aime pass@2": [0.0] * 2, "aime": [0.0] * 2}
    )
    assert (found["mean"]["up"], found["mean"]["down"], found["mean"]["ties"]) == (1, 0, 1)
    assert found["mean"]["value"] == pytest.approx((0.5 + 0.25) / 2)


def test_batches_are_cut_where_they_are_full():
    requests = [{"samples": n} for n in (1, 1, 16, 1, 1, 1)]
    assert [len(batch) for batch in evaluation.sampling.batches(requests, 3)] == [3, 3]
    assert [len(batch) for batch in evaluation.sampling.batches(requests, 100)] == [6]
    assert list(itertools.chain(*evaluation.sampling.batches(requests, 1))) == requests


def test_pass_at_k_over_all_problems_is_beside_the_columns_and_not_in_their_mean():
    """Right of 4 responses: 1 and 4 with 2 people, 2 with 3 people. pass@2: 1 − 3/6, 1, 1 − 1/6."""
    problems = [{"category": "2", "samples": 4}] * 2 + [{"category": "3", "samples": 4}]
    args = settled("m", "--suite", "kk", "--samples", "4", "--temperature", "1", "--pass_at_k")
    columns = figures.columns_of(problems, args)
    assert list(columns) == ["2", "3", "pass@1", "pass@2", "pass@4"]
    scored = [scores_of((1, 3), (4, 0), (2, 2))]
    values = {key: figures.contributions(column, problems, scored)[0] for key, column in columns.items()}
    assert values["pass@2"] == pytest.approx([1 / 2, 1, 5 / 6]) and values["pass@4"] == [1, 1, 1]
    assert figures.mean_figure(columns, values)["value"] == pytest.approx((5 / 8 + 1 / 2) / 2)
    for wrong in (["--samples", "1"], ["--suite", "math"]):
        with pytest.raises(ValueError, match="--pass_at_k needs several --samples"):
            settled("m", "--suite", "kk", "--samples", "4", "--temperature", "1", "--pass_at_k", *wrong)


# -------------------------------------------------------------------------------------------------------------- words

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


def test_correlations_are_of_responses():
    responses = [[{"response": "so " * n, "reward": reward} for n, reward in some] for some in RELATED]
    counts, relations = words.count_all(responses)
    assert counts["conclusion indicator"] == [0.5, 5] and counts["assertion"] == [0, 0]
    found = relations["conclusion indicator"]
    # By hand: counts 0 1 3 7 (mean 2.75), rewards -1 0 0 5 (mean 1): 18 − … ; ranks 1 2 3 4 and 1 2.5 2.5 4.
    assert found["pearson"] == pytest.approx((35 - 4 * 2.75) / math.sqrt((59 - 4 * 2.75**2) * (26 - 4)))
    assert found["spearman"] == pytest.approx((29.5 - 25) / math.sqrt(5 * 4.5))
    assert relations["assertion"]["pearson"] is relations["assertion"]["spearman"] is None
    assert found["raw"][1] == {"category": "all", "count": [3, 7], "reward": [0.0, 5.0]}
    assert found["by_category"]["all"]["spearman"] == found["spearman"]
    alone = words.count_all(responses[:1])[1]["conclusion indicator"]["by_category"]["all"]
    assert alone == {"spearman": pytest.approx(1), "error": None}  # one puzzle has no error


def test_a_columns_title_is_printed_as_it_is(capsys):
    evaluation.tables.print_table(evaluation.run.Console(width=80), "", [["model", "[bold] [/x]"], ["a", "1"]])
    assert "[bold] [/x]" in capsys.readouterr().out


def test_a_task_that_gives_too_few_scores_is_said():
    task = SimpleNamespace(score_all=lambda responses, answers: [])
    problem = {"answer": 1, "category": "all", "messages": [{"content": "?"}]}
    with pytest.raises(ValueError, match=r"score_all\(\) gave 0 scores for 1 responses"):
        evaluation.scoring.score(task, [problem], [[{"response": "1"}]], {})


RELATED = [[(0, -1.0), (1, 0.0)], [(3, 0.0), (7, 5.0)]]

# -------------------------------------------------------------------------------------------------------- the papers


def test_the_papers_rows_are_whole_and_their_means_are_means():
    papers = json.loads((ROOT / "benchmarks" / "paper.json").read_text())
    rounded_down = {0.826: 0.82, 0.614: 0.62, 0.89: 0.88}  # three means that the paper prints otherwise
    for paper in papers:
        factor = evaluation.tables.unit_of(paper["suite"])[0]
        for name, *numbers in paper["rows"]:
            assert len(numbers) == len(paper["columns"]), name
            *parts, mean = numbers
            assert all(number is None or 0 <= number <= factor for number in numbers)
            if paper["columns"][-1] == "mean" and None not in numbers:
                found = round(fmean(parts), 3)
                assert rounded_down.get(found, mean) == mean
                assert found in rounded_down or abs(fmean(parts) - mean) < 0.0051, name
    assert sum(len(paper["rows"]) for paper in papers if paper["suite"] == "kk") == 28
    tables = {paper["source"] for paper in papers}
    assert {f"AR-Lopti, Table {i}" for i in (1, 7, 8, 9, 10)} < tables and "ACPO, Table 2" in tables


# ------------------------------------------------------------------------------------- a model that was taught answers

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


@pytest.fixture(scope="module")
def kk_results(model, tmp_path_factory):
    return call(model, *KK, "--out", tmp_path_factory.mktemp("kk"), "--keep_responses", "--words", "--paper")


def test_what_was_taught_is_the_table(kk_results, capsys):
    results = read(kk_results[".json"])
    (row,) = results["rows"]
    assert in_short(row) == {"2": (1, 2), "3": (0, 2), "4": (0.5, 2), "mean": (0.5, 6)}
    assert [row["figures"][key]["error"] for key in "234"] == [0, 0, pytest.approx(0.5)]  # √(1/2)/√2
    assert row["figures"]["mean"]["error"] == pytest.approx(0.5 / 3)
    assert row["format_rate"] == 1 and row["truncated_rate"] == 0 and row["responses"] == 6
    assert row["by_category"]["2"]["responses"] == 2 and set(row["by_category"]) == {"2", "3", "4"}
    responses = [json.loads(line) for line in kk_results["responses.jsonl"].read_text().splitlines()]
    assert [r["correct"] for r in responses] == [True, False, True, True, False, False]
    assert [r["reward"] for r in responses] == [3, -0.5, 3, 3, -0.5, -0.5]
    assert row["mean_tokens"] == pytest.approx(fmean(r["tokens"] for r in responses))
    assert responses[0]["response"] == taught()[0][1][0] and responses[0]["tokens"] > 10
    text = kk_results[".md"].read_text()
    assert "| 1.000 ± 0.000 | 0.000 ± 0.000 | 0.500 ± 0.500 | 0.500 ± 0.167 | 1.000 |" in text
    # The papers have no 2 people, and their mean is over 3 to 7: it has no place here.
    assert "| Llama-3.2-3B-Instruct, GRPO, Lopti (AR-Lopti, Table 9) |  | 0.73 | 0.70 |  |" in text


def test_results_say_what_made_them(kk_results, model):
    results = read(kk_results[".json"])
    assert results["settings"]["temperature"] == 0 and results["settings"]["people"] == "2-4"
    assert results["settings"]["seed"] == 0 and results["settings"]["max_response_tokens"] == 100
    assert results["sampling"]["3"] == {"samples": 1, "temperature": 0.0}
    assert results["provenance"]["versions"]["torch"] == torch.__version__ and results["provenance"]["commit"]
    (checkpoint,) = results["rows"][0]["checkpoints"]
    assert checkpoint["path"] == str(model) and checkpoint["fingerprint"] == evaluation.models.fingerprint(model)
    fast = "bfloat16" if machine.has_fast_bfloat16() else "float32"
    assert checkpoint["engine"]["dtype"] == fast and checkpoint["made"] == [results["provenance"]]


def test_words_go_with_the_reward_as_taught(kk_results):
    """Right answers begin with "So", wrong ones with "It must be": each once in half of the responses."""
    found = read(kk_results[".json"])["rows"][0]["words"]
    for family, sign in (("conclusion indicator", 1), ("assertion", -1)):
        assert found[family]["value"] == 0.5 and found[family]["error"] == pytest.approx(math.sqrt(0.3) / math.sqrt(6))
        assert found[family]["pearson"] == pytest.approx(sign) and found[family]["spearman"] == pytest.approx(sign)
    assert found["analysis"]["value"] == 0 and found["analysis"]["pearson"] is None
    assert kk_results[".png"].read_bytes()[:4] == b"\x89PNG"


@pytest.fixture(scope="module")
def math_folder(tmp_path_factory):
    """Files of the five sets; AIME's under another of its names."""
    folder = tmp_path_factory.mktemp("data") / "math"
    folder.mkdir()
    for name, problems in MATH.items():
        rows = [{"problem": problem, "answer": gold} for problem, gold, _ in problems]
        (folder / f"{'AIME-2024' if name == 'aime' else name}.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize(("protocol", "n"), [("ar_lopti", 16), ("acpo", 8)])
def test_mathematics_by_both_protocols(model, math_folder, tmp_path, protocol, n):
    """Sampled figures are worked out anew from the responses that were kept."""
    flags = f"--suite math --data_dir {math_folder.parent} --chat_template auto --max_response_tokens 20".split()
    written = call(model, *flags, "--out", tmp_path, "--protocol", protocol, "--keep_responses", "--paper")
    results = read(written[".json"])
    of_row = results["rows"][0]["figures"]
    counts = {}
    for response in map(json.loads, written["responses.jsonl"].read_text().splitlines()):
        box = ["", *re.findall(r"\\boxed\{(\d+)\}", response["response"])][-1]
        right = [
            int(box == str(gold)) for problem, gold, _ in MATH[response["category"]] if problem in response["prompt"]
        ]
        counts.setdefault(response["category"], {}).setdefault(response["problem"], []).extend(right)
    shares = {name: [fmean(right) for right in by_problem.values()] for name, by_problem in counts.items()}
    sampled = ["amc", "aime"] if protocol == "ar_lopti" else ["amc", "minerva", "math500", "olympiad_bench"]
    how = {True: {"samples": n, "temperature": 1.0}, False: {"samples": 1, "temperature": 0.0}}
    assert results["sampling"] == {name: how[name in sampled] for name in shares}
    for name in shares:
        assert {len(right) for right in counts[name].values()} == {n if name in sampled else 1}
        assert of_row[name]["value"] == pytest.approx(fmean(shares[name])), name
        assert of_row[name]["error"] == pytest.approx(stdev(shares[name]) / math.sqrt(2))
        assert ("error_samples" in of_row[name]) == (name in sampled)
    assert 0 < shares["amc"][1] < 1 and shares["amc"][0] > 0.8  # one problem half right, one right
    if protocol == "acpo":
        assert list(of_row) == ["amc", "minerva", "math500", "olympiad_bench", "mean"]
        assert of_row["mean"]["value"] == pytest.approx(fmean(map(fmean, shares.values())))
        assert results["papers"][0]["source"] == "ACPO, Table 2"
        return
    assert list(of_row) == ["olympiad_bench", "minerva", "math500", "amc", "aime pass@16", "aime", "mean"]
    assert [of_row[name]["value"] for name in ("olympiad_bench", "minerva", "math500")] == [0.5, 1, 0]
    passed = [any(right) for right in counts["aime"].values()]
    assert passed[0] and of_row["aime pass@16"]["value"] == fmean(passed)
    assert of_row["mean"]["value"] == pytest.approx(fmean([*map(fmean, shares.values()), fmean(passed)]))
    assert {paper["source"] for paper in results["papers"]} == {"AR-Lopti, Table 1", "AR-Lopti, Table 10"}
    assert "| Qwen2.5-7B (AR-Lopti, Table 1) | 27.64 | 18.38 | 63.00 | 22.21 | 30.00 | 5.00 | 27.71 |" in (
        written[".md"].read_text()
    )


def test_countdown_is_over_all_puzzles(model, tmp_path):
    flags = ["--suite", "countdown", "--limit", 2, "--max_response_tokens", 100, "--out", tmp_path]
    greedy = read(call(model, *flags, "--samples", 1, "--temperature", 0)[".json"])
    assert in_short(greedy["rows"][0]) == {"3": (1, 2), "4": (0.5, 2), "all": (0.75, 4)}
    assert greedy["rows"][0]["figures"]["all"]["error"] == pytest.approx(0.25)


def test_hitab_without_a_folder_has_256_questions_of_each_kind():
    _, problems = suites.load_problems(settled("--suite", "hitab"))
    assert Counter(problem["category"] for problem in problems) == dict.fromkeys(hitab.KINDS, 256)


def test_questions_on_tables_have_a_column_for_each_kind_and_one_for_all(model, tmp_path):
    flags = ["--suite", "hitab", "--limit", 2, "--max_response_tokens", 100, "--chat_template", "auto"]
    written = call(model, *flags, "--samples", 1, "--temperature", 0, "--paper", "--out", tmp_path)
    (row,) = read(written[".json"])["rows"]
    shares = {"comparison": (1, 2), "difference": (0.5, 2), "lookup": (0.5, 2), "sum": (0.5, 2), "all": (0.625, 8)}
    assert in_short(row) == shares and row["format_rate"] == 1
    lines = written[".md"].read_text()
    assert "| model | comparison | difference | lookup | sum | accuracy | format |" in lines
    assert "| Qwen2.5-7B, ACPO, near on-policy (ACPO, Table 1) |  |  |  |  | 69.83 |" in lines


def test_a_release_of_hitab_is_evaluated_whole(tmp_path):
    """Its folder, or one with a subfolder of that name. Its kinds of questions become the columns."""
    rows = []
    for i, step in enumerate(["none", "none", "div", "pair-argmax"]):
        rows.append({"table_id": "a", "question": f"number {i}?", "answer": [i], "aggregation": [step]})
    (tmp_path / "hitab/tables/raw").mkdir(parents=True)
    (tmp_path / "hitab/test_samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = {"texts": [["", "n"], ["all", "5"]], "top_header_rows_num": 1, "left_header_columns_num": 1}
    (tmp_path / "hitab/tables/raw/a.json").write_text(json.dumps(table))
    for folder in (tmp_path, tmp_path / "hitab"):
        args = settled("m", "--suite", "hitab", "--data_dir", folder)
        _, problems = suites.load_problems(args)
        assert [problem["category"] for problem in problems] == ["lookup", "lookup", "other", "comparison"]
        assert all(problem["samples"] == 4 and problem["temperature"] == 1 for problem in problems)
        assert list(figures.columns_of(problems, args)) == ["comparison", "lookup", "other", "all"]


def test_a_task_of_ones_own_may_name_categories_by_numbers_and_texts():
    problems = [{"category": category, "samples": 1} for category in ("b", 10, "a", 9)]
    args = SimpleNamespace(suite="own.py", samples=1, pass_at_k=False)
    assert list(figures.columns_of(problems, args)) == [9, 10, "a", "b", "all"]


# ------------------------------------------------------------------------------------ interrupted, and what is kept


def blank(path, out):
    """A result's bytes without the name of the folder that it lies in."""
    return path.read_bytes().replace(str(out).encode(), b"")


@pytest.mark.parametrize("how", ["by Ctrl-C", "by a full disk", "by a kill"])
def test_an_interrupted_evaluation_goes_on_where_it_was(model, tmp_path, monkeypatch, how):
    """Batches of 2: an unbroken evaluation, and one that stops in its third batch and goes on. At temperature 1."""
    flags = [model, *KK, "--temperature", 1, "--samples", 2, "--batch", 4, "--keep_responses"]
    unbroken = call(*flags, "--out", tmp_path / "unbroken")
    sample, sampled = evaluation.sampling.sample, []

    def stopping(*args):
        sampled.append(len(args[1]))
        if len(sampled) == 3:
            raise OSError(errno.ENOSPC, "full") if how == "by a full disk" else KeyboardInterrupt
        return sample(*args)

    monkeypatch.setattr(evaluation.sampling, "sample", stopping)
    with pytest.raises(SystemExit) as stopped:
        call(*flags, "--out", tmp_path / "broken")
    assert "the same command goes on" in stopped.value.code
    assert [path.name for path in (tmp_path / "broken").iterdir()] == ["responses"]
    (kept,) = (tmp_path / "broken/responses").iterdir()
    assert kept.read_bytes().count(b"\n") == 3  # what it is of, and two batches
    if how == "by a kill":  # in the middle of a line
        kept.write_bytes(kept.read_bytes() + b'{"made": {"script": "eval')
    broken = call(*flags, "--out", tmp_path / "broken")
    assert sampled[3:] == [2] and len(sampled) == 4  # the third batch alone
    for kind in (".json", ".md", "responses.jsonl"):
        assert blank(broken[kind], tmp_path / "broken") == blank(unbroken[kind], tmp_path / "unbroken")
    other = tmp_path / "unbroken/responses" / kept.name
    assert kept.read_bytes() == other.read_bytes()


def test_what_is_complete_is_not_sampled_again_and_nothing_else_is_taken_for_it(model, tmp_path, monkeypatch):
    sample, sampled = evaluation.sampling.sample, []

    def counting(*args):
        sampled.append(len(args[1]))
        return sample(*args)

    monkeypatch.setattr(evaluation.sampling, "sample", counting)
    copy = shutil.copytree(model, tmp_path / "copy")

    def asked(*flags):
        before = len(sampled)
        call(copy, *KK, "--out", tmp_path / "out", *flags)
        return len(sampled) > before

    assert asked() and not asked() and not asked("--words", "--paper", "--keep_responses")
    assert asked("--seed", 1) and asked("--temperature", 1) and asked("--max_response_tokens", 99)
    other = "bfloat16" if not machine.has_fast_bfloat16() else "float32"
    assert asked("--limit", 1) and asked("--chat_template", "none") and asked("--dtype", other) and not asked()
    moved = copy.rename(tmp_path / "moved")
    assert evaluation.models.fingerprint(moved) == evaluation.models.fingerprint(model)
    shutil.copytree(moved, copy)
    assert not asked()  # the same weights
    shutil.rmtree(copy)
    spoiled(model, copy)
    assert asked()  # others under the same name


def test_two_evaluations_do_not_write_one_file(model, tmp_path):
    import fcntl

    call(model, *KK, "--out", tmp_path)
    (kept,) = (tmp_path / "responses").iterdir()
    with open(kept, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another evaluation is writing"):
            call(model, *KK, "--out", tmp_path)


# ------------------------------------------------------------------------------------------------- runs and comparisons


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


def test_a_runs_last_checkpoints_are_one_row(a_run, model, tmp_path, monkeypatch):
    """Steps 4, 6 and 8, of which the second knows nothing: 2/3 of what was taught, for each problem alike."""
    newer = a_run / "checkpoints/step_000012"  # the run is still training
    newest = a_run / "checkpoints/step_000008"
    monkeypatch.setattr(evaluation.run, "print_header", lambda *_: shutil.copytree(newest, newer))
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


def test_a_run_is_its_newest_checkpoint_and_a_checkpoint_has_its_runs_settings(a_run):
    assert evaluation.models.checkpoints(str(a_run), 1) == [str(a_run / "checkpoints/step_000008")]
    assert settled(a_run).people == "2,4" and settled(a_run / "checkpoints/step_000004").people == "2,4"
    assert settled(a_run, "--people", "3").people == "3"
    assert settled(a_run, "--suite", "countdown").max_response_tokens == (3072 if evaluation.run.ON_GPU else 128)


def settled(*flags):
    words = list(map(str, flags))
    if not words or words[0].startswith("--"):
        words.insert(0, "m")
    return evaluation.settings.read_settings(words)


def test_a_runs_temperature_goes_for_puzzles_and_defaults_are_the_papers(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"task": "kk", "eval_temperature": 0.7, "people": "5"}))
    assert settled(tmp_path).temperature == 0.7 and settled(tmp_path, "--suite", "math").temperature == 1
    args = settled("m")
    assert (args.suite, args.people, args.temperature, args.samples, args.chat_template) == ("kk", "3-7", 0, 1, "auto")
    args = settled("m", "--suite", "math")
    assert (args.temperature, args.samples, args.chat_template) == (1, 16, "none")
    assert settled("m", "--suite", "math", "--protocol", "acpo").samples == 8
    args = settled("m", "--suite", "countdown")
    assert (args.temperature, args.samples, args.numbers, args.protocol) == (1, 4, "3-4", "acpo")
    args = settled("m", "--suite", "hitab")
    assert (args.temperature, args.samples, args.chat_template, args.protocol) == (1, 4, "none", "acpo")
    assert settled("models/kk_tiny").max_response_tokens == 4096
    assert settled("m", "--suite", "gym").protocol == settled("m", "--suite", "rewards/largest.py").protocol == ""


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "no model is given"),
        (["models"], "models is no model folder"),
        (["models/nothing"], "models/nothing is no model folder"),
        ([KK_TINY, "--versus", "./nothing"], "nothing is no model folder"),
        ([KK_TINY, "--last", 3], "--last is 3, but none of the models is a run folder"),
        ([KK_TINY, "--last", 0], "--last is 0; it must be greater than 0"),
        ([KK_TINY, "--limit", -1], "--limit is -1; it must be greater than 0"),
        ([KK_TINY, "--seed", -1], "--seed is -1; it must be "),
        ([KK_TINY, "--temperature", 0.001], "--temperature is 0.001; it must be 0 or at least 0.01"),
        ([KK_TINY, "--samples", 4], "--samples is 4, but greedy responses are all alike"),
        ([KK_TINY, "--data", "nothing.parquet"], "nothing.parquet does not exist"),
        ([KK_TINY, "--data_dir", "nothing"], "nothing is no folder; the papers' files are in the GitHub repository"),
        ([KK_TINY, "--data_dir", "a", "--data", "b"], "--suite kk takes one --data or --data_dir"),
        ([KK_TINY, "--suite", "countdown", "--people", "2"], "--people is of --suite kk, not of countdown"),
        ([KK_TINY, "--suite", "gym", "--data_dir", "a"], "--suite gym generates its problems: it takes no --data"),
        ([KK_TINY, "--kv_cache_gb", 1e-4], "one sequence of"),
        ([KK_TINY, "--suite", "math", "--sets", "gsm8k"], "'gsm8k' is no set"),
        ([KK_TINY, "--suite", "math", "--data", "x.json"], "own problems: x.json"),
        ([KK_TINY, "--suite", "math", "--data", "x.json", "--sets", "amc"], "'x.json' is no set"),
        (
            [KK_TINY, "--suite", "math", "--data", "aime=x", "--sets", "amc"],
            "--data aime=…: the sets that are asked are amc",
        ),
        ([KK_TINY, "--suite", "math"], "Olympiad Bench (olympiad_bench.parquet"),
        ([KK_TINY, "--suite", "hitab", "--data_dir", "models"], "models holds no test_samples.jsonl"),
    ],
)
def test_errors_come_before_anything_loads_and_say_what_would_be_right(flags, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation.sampling, "load_engine", lambda *_: pytest.fail("an engine was loaded"))
    with pytest.raises(SystemExit) as ended:
        call(*flags, "--out", tmp_path / "out")
    error = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and error.startswith("error: ") and says in error and "\n" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--limit", "-1"], "--limit is -1; it must be greater than 0"),
        (["--people", "2-9"], "people must be like 3-7"),
        (["--suite", "countdown", "--numbers", "1-9"], "numbers must be like "),
    ],
)
def test_a_bad_flag_is_refused_before_torch_is_imported(flags, says):
    finished = python("-X", "importtime", "evaluate.py", KK_TINY, *flags)
    *imports, error = finished.stderr.splitlines()
    assert finished.returncode == 2 and error.startswith(f"error: {says}")
    names = [line.rpartition("|")[2].strip() for line in imports]
    assert "tyro" in names and "torch" not in names


def test_a_missing_file_says_what_to_get_and_from_where(math_folder, tmp_path, capsys):
    folder = shutil.copytree(math_folder, tmp_path / "math")
    (folder / "AIME-2024.json").unlink()
    (folder / "aime25.json").write_text("[]")  # another year is not taken for it
    with pytest.raises(SystemExit):
        call(KK_TINY, "--suite", "math", "--data_dir", folder, "--out", tmp_path)
    error = capsys.readouterr().err
    for part in ("AIME24 (aime.parquet", "data/deepscaler/aime_dsr.parquet", "zhyang2226/AR-Lopti", "--data aime="):
        assert part in error
    assert "HuggingFaceH4/aime_2024" in error and "--sets" in error and "MATH-500" not in error


def test_runs_that_differ_are_not_evaluated_by_guesswork(tmp_path):
    """--temperature is the flag of evaluate.py for a trainer's --eval_temperature."""
    for name, people, temperature in (("a", "2", 0.0), ("b", "3", 0.0), ("c", "2", 0.6), ("d", "2", 0.005)):
        (tmp_path / name).mkdir()
        of_run = {"task": "kk", "people": people, "eval_temperature": temperature}
        (tmp_path / name / "args.json").write_text(json.dumps(of_run))
    with pytest.raises(ValueError, match=r"the runs differ in people \(2, 3\): give --people"):
        settled(tmp_path / "a", tmp_path / "b")
    assert settled(tmp_path / "a", tmp_path / "b", "--people", "4").people == "4"
    with pytest.raises(ValueError, match=r"the runs differ in temperature \(0.0, 0.6\): give --temperature"):
        settled(tmp_path / "a", tmp_path / "c")
    with pytest.raises(ValueError, match=r"--temperature is 0.005; it must be 0 or at least 0.01"):
        settled(tmp_path / "d")


def test_more_checkpoints_than_there_are_is_an_error(a_run):
    with pytest.raises(ValueError, match=r"has 4 complete checkpoint\(s\), and --last is 5"):
        evaluation.models.checkpoints(str(a_run), 5)


def test_a_prompt_must_fit_and_a_response_ends_with_the_context():
    args = SimpleNamespace(max_response_tokens=2000, chat_template="auto", dtype="bfloat16", kv_cache_gb=None, batch=8)
    problem = {"messages": [{"role": "user", "content": "Zoe " * 200}], "prefix": "", "samples": 1}
    problem |= {"temperature": 0.0, "seed": 0}
    (request,), engine = evaluation.sampling.requests_of(str(KK_TINY), [problem], args)
    assert engine["context"] == 2048 and request["max_tokens"] == 2048 - len(request["prompt_ids"]) < 2000
    problem["messages"][0]["content"] *= 10
    with pytest.raises(ValueError, match="kk_tiny takes 2048 tokens, and 1 prompts have as many"):
        evaluation.sampling.requests_of(str(KK_TINY), [problem], args)


# ----------------------------------------------------------------------------------------------- the real things


def test_kk_tiny_from_the_command_line(tmp_path):
    """A few puzzles of what `python evaluate.py models/kk_tiny --suite kk --people 2-4` does, as a user starts it."""
    finished = run(
        "evaluate.py", "models/kk_tiny", "--suite", "kk", "--people", "2-4", "--limit", "8", "--out", tmp_path
    )
    (results,) = map(read, tmp_path.glob("*.json"))
    of_row = results["rows"][0]["figures"]
    assert list(of_row) == ["2", "3", "4", "mean"] and of_row["mean"]["problems"] == 24
    assert of_row["mean"]["value"] > 0 and results["rows"][0]["format_rate"] > 0.5
    assert "2 people" in finished.stdout and "format" in finished.stdout and "kk_tiny" in finished.stdout
    assert "24/24" in finished.stderr or "100%" in finished.stderr  # the progress bar


@needs_files
@pytest.mark.parametrize("suite", ["kk", "math", "countdown"])
def test_every_suite_runs_on_the_papers_files(suite, tmp_path):
    flags = ["--suite", suite, "--data-dir", DATA, "--limit", 1, "--max-response-tokens", 8, "--out", tmp_path]
    sampled = ["--samples", 2] if suite != "kk" else ["--people", "3-7"]
    results = read(call(KK_TINY, *flags, *sampled, "--paper")[".json"])
    of_row = results["rows"][0]["figures"]
    columns = {"kk": ["3", "4", "5", "6", "7", "mean"], "countdown": ["3", "4", "all"]}
    columns["math"] = ["olympiad_bench", "minerva", "math500", "amc", "aime pass@2", "aime", "mean"]
    assert list(of_row) == columns[suite] and results["papers"]
    assert all(found["problems"] == 1 for key, found in of_row.items() if key not in ("mean", "all"))


def test_problems_of_your_own_are_a_set_alone_and_greedy(tmp_path):
    """As docs/data.md has them."""
    file = tmp_path / "mine.jsonl"
    file.write_text('{"problem": "What is 17 + 25?", "answer": "42"}\n{"problem": "What is 2 + 3?", "answer": "5"}\n')
    for flags, how in ([(), (1, 0.0)], [("--samples", 4, "--temperature", 0.7), (4, 0.7)]):
        args = settled("m", "--suite", "math", "--data", file, *flags)
        _, problems = suites.load_problems(args)
        assert [(p["category"], p["samples"], p["temperature"]) for p in problems] == [("own", *how)] * 2
        said = evaluation.tables.settings_of(args)
        assert (said["samples"], said["temperature"]) == how  # in the header and below the table
        title = "own problems" + " avg@4" * bool(flags)
        assert figures.columns_of(problems, args) == {"own": (title, "own", None)}


@needs_files
def test_the_papers_files_are_whole():
    args = settled("m", "--suite", "math", "--data_dir", DATA)
    _, problems = suites.load_problems(args)
    counts = Counter((problem["category"], problem["samples"]) for problem in problems)
    assert counts == {
        ("olympiad_bench", 1): 672, ("minerva", 1): 268, ("math500", 1): 500, ("amc", 16): 83, ("aime", 16): 30
    }  # fmt: skip
    assert len({problem["seed"] for problem in problems}) == len(problems)
    args = settled("m", "--suite", "math", "--data-dir", DATA / "orz", "--sets", "aime,math500")
    assert Counter(p["category"] for p in suites.load_problems(args)[1]) == {"math500": 500, "aime": 30}
    args = settled("m", "--data_dir", DATA)
    assert Counter(p["category"] for p in suites.load_problems(args)[1]) == dict.fromkeys("34567", 100)
