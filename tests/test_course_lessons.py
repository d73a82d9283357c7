"""The course's texts: quoted accuracies and outputs are right. test_docs.py looks at their links and commands."""

import importlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import grpo
from course import failures
from course.solutions import lesson_4, lesson_10
from rewards import kk
from tools import anchors, compare

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "course"
PAGES = sorted(COURSE.glob("*.md"))
LESSONS = range(12)
# "<!-- test accuracy: A, B -->", then a table: a column of steps and one column for each kept run.
SNIPPET = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
KEPT = re.compile(r"<!-- test accuracy: (.+?) -->\n\n\|.*\n\|[-| ]+\n((?:\|.*\n)+)")


def test_each_lesson_names_places_in_scripts_and_has_a_section_for_the_lecturer():
    lecturer = (COURSE / "lecturer.md").read_text()
    overview = (COURSE / "README.md").read_text()
    for number in LESSONS:
        text = (COURSE / f"lesson_{number}.md").read_text()
        assert anchors.NAMED.search(text), number
        assert f"python -m course.check {number}" in text
        assert text.count("<details>") == text.count("</details>") == 3, number
        assert f"## Lesson {number}:" in lecturer
        assert f"(lesson_{number}.md)" in overview


def test_quoted_accuracies_are_those_of_the_kept_runs():
    num_tables = 0
    for page in PAGES:
        for runs, rows in KEPT.findall(page.read_text()):
            num_tables += 1
            kept = []
            for run in runs.split(", "):
                file = ROOT / "benchmarks" / "kk_tiny" / f"{run}.json"
                kept.append({row["step"]: row for row in json.loads(file.read_text())["rows"]})
            for row in rows.strip().split("\n"):
                step, *values = row.strip("| ").split(" | ")
                right = [f"{of_run[int(step)]['eval/accuracy']:.3f}" for of_run in kept]
                assert values == right, (page.name, row)
    assert num_tables >= 5


@pytest.mark.parametrize("number", LESSONS)
def test_live_snippets_print_what_is_said(number, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    text = (COURSE / "lecturer.md").read_text()
    section = re.split(r"^## Lesson \d+: ", text, flags=re.MULTILINE)[number + 1]
    [(code, expected)] = SNIPPET.findall(section)
    exec(code, {})
    assert capsys.readouterr().out == expected


# ------------------------------------------------------------------------------------- numbers that the lessons claim


def rows_of(lesson, first):
    """The numbers of the table's rows whose first cell is one of `first`: {cell: [number, ...]}."""
    text = (COURSE / f"lesson_{lesson}.md").read_text().replace("−", "-")
    rows = {}
    for line in re.findall(r"^\| (.*) \|$", text, re.M):
        name, *cells = line.split(" | ")
        if name in first:
            rows[name] = [float(cell) for cell in cells]
    assert set(rows) == set(first)
    return rows


def gradient_of_two_tokens(weight):
    """∇J by the logits of a first "a" and of an "a" after it, over the old policy's responses; "aa" has reward 1.

    weight: what multiplies a response, from the ratios of its two tokens.
    """
    logits = torch.tensor([math.log(0.8 / 0.2), math.log(0.6 / 0.4)], dtype=torch.float64, requires_grad=True)
    first, second = logits.sigmoid()
    return torch.autograd.grad(0.25 * weight(first / 0.5, second / 0.5), logits)[0].tolist()


def test_the_ratio_of_a_token_does_not_correct_its_prefix():
    logits = torch.tensor([math.log(4), math.log(1.5)], dtype=torch.float64, requires_grad=True)
    true = torch.autograd.grad(logits.sigmoid().prod(), logits)[0].tolist()  # J = π(aa)
    computed = {
        "true": true,
        "weighted by the ratio of the response": gradient_of_two_tokens(lambda first, second: first * second),
        "weighted by the ratio of each token": gradient_of_two_tokens(lambda first, second: first + second),
    }
    assert rows_of(2, computed) == {name: pytest.approx(values, abs=5e-4) for name, values in computed.items()}


@pytest.mark.parametrize("shares", ["0.6, 0.4", "0.999, 0.001"])
def test_neither_k1_nor_k3_is_always_less_noisy(shares):
    policy = torch.tensor([float(share) for share in shares.split(", ")], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.5], dtype=torch.float64)
    k1, k3 = (policy / reference).log(), grpo.k3(policy.log(), reference.log())
    assert (policy * k1).sum() == pytest.approx((policy * k3).sum())  # both have the mean KL(π ‖ π_ref)
    variances = [((policy * k.square()).sum() - (policy * k).sum() ** 2).item() for k in (k1, k3)]
    [(k1_said, k3_said)] = re.findall(
        rf"\| {shares} \| 0.5, 0.5 \| (.*) \| (.*) \|", (COURSE / "lesson_2.md").read_text()
    )
    assert [float(k1_said), float(k3_said)] == pytest.approx(variances, rel=0.02)


def test_the_loss_of_the_notebook_is_not_near_zero():
    notebook = (COURSE / "grpo_by_hand.ipynb").read_text()
    assert "response tokens: [33, 157, 32, 29] - together: 251" in notebook
    advantages = [-0.5, 1.5, -0.5, -0.5]
    loss = -sum(a * n for a, n in zip(advantages, (33, 157, 32, 29))) / 251
    assert f"{loss:.3f}" == "-0.751" and "−0.751" in (COURSE / "lesson_2.md").read_text()


def test_the_three_divisors_of_lesson_4():
    lengths, largest = torch.tensor([10.0, 1000.0]), 1000
    computed = {
        "mean over tokens": 1 / lengths.sum().expand(2),
        "mean of means": 1 / lengths / 2,
        "a constant": torch.full((2,), 1 / (2 * largest)),
    }
    for name, said in rows_of(4, computed).items():
        of_token = computed[name]
        assert said == pytest.approx([*of_token.tolist(), *(of_token * lengths).tolist()], rel=0.02)


def test_the_advantages_of_lesson_4_are_those_of_grpo():
    batch = {"mask": torch.ones(3, 1, dtype=torch.bool)}
    found = grpo.compute_advantages(torch.tensor([0.0, 1, 1]), batch, SimpleNamespace(responses_per_prompt=3))
    assert found[:, 0].tolist() == pytest.approx(lesson_4.ADVANTAGES.tolist(), rel=1e-5)


def test_the_spikes_are_of_one_seed_and_of_the_script_with_a_kl_term():
    def largest(entry, seed):
        rows = json.loads((ROOT / "benchmarks" / "kk_tiny" / f"{entry}_seed_{seed}.json").read_text())["rows"]
        return max(row.get("grad_norm", 0) for row in rows)

    assert largest("16_updates", 0) > 20 and max(largest("16_updates", seed) for seed in (1, 2)) < 0.5
    assert max(largest("acpo_16_updates", seed) for seed in range(3)) == pytest.approx(0.56, abs=0.005)


def test_the_six_gradients_of_lesson_10():
    policy = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    found, means = lesson_10.gradients(policy, reference)
    text = (COURSE / "lesson_10.md").read_text().replace("−", "-")
    shown = {name: ", ".join(f"{round(value, 3) + 0:.3f}" for value in row.tolist()) for name, row in found.items()}
    for k in ("k1", "k2", "k3"):
        assert f"| {k} | {shown[f'{k} in the loss']} | {shown[f'{k} in the reward']} |" in text
    for name, latex in (("KL(π ‖ π_ref)", r"\pi \Vert \pi_{ref}"), ("KL(π_ref ‖ π)", r"\pi_{ref} \Vert \pi")):
        ratio = (policy / reference).log()
        value = (policy * ratio).sum() if name == "KL(π ‖ π_ref)" else -(reference * ratio).sum()
        assert rf"| $\text{{KL}}({latex})$ | {value:.3f} | {shown[name]} |" in text
    estimates = lesson_10.kl_estimates(policy.log(), reference.log())
    for k, values, mean in zip(("k1", "k2", "k3"), estimates, means):
        numbers = [f"{value:.3f}" if value else "0" for value in values.tolist()]
        assert f"| {k} | {' | '.join(numbers)} | {mean:.3f} |" in text
    assert torch.allclose(found["KL(π_ref ‖ π)"], policy - reference)


def rows_of_run(file):
    """{step: metrics} of a kept run."""
    return {row["step"]: row for row in json.loads((ROOT / f"{file}.json").read_text())["rows"]}


def test_the_runs_of_lesson_10():
    names = ("kl_k1", "kl_k2", "kl_k3", "healthy")
    k1, k2, k3, weak = runs = [rows_of_run(f"course/results/{name}_seed_0") for name in names]
    text = (COURSE / "lesson_10.md").read_text()
    keys = {"metric `kl`": "kl", "gradient norm": "grad_norm", "reward": "reward", "test accuracy": "eval/accuracy"}
    table = re.findall(rf"^\| ({'|'.join(keys)}) at step (\d) \| (.*) \|$", text, re.M)
    assert len(table) == 7
    for name, step, cells in table:
        for run, cell in zip(runs, cells.split("|")):
            if cell.strip():
                places = len(cell.strip().partition(".")[2])
                assert cell.strip() == f"{run[int(step)][keys[name]]:.{places}f}", (name, step)
    assert all(k1[step]["kl"] > weak[step]["kl"] > max(k2[step]["kl"], k3[step]["kl"]) for step in range(2, 7))
    assert all(k1[step]["grad_norm"] > max(k2[step]["grad_norm"], k3[step]["grad_norm"]) for step in range(1, 7))
    assert k2[6]["kl"] / weak[6]["kl"] == pytest.approx(0.5, abs=0.05)


def test_the_gaps_of_healthy_runs_in_lesson_3():
    runs = [rows_of_run(f"course/results/healthy_seed_{seed}") for seed in range(3)]
    gaps = [row["sampler_gap"] for run in runs for step, row in run.items() if step > 0]
    assert len(gaps) == 30 and (f"{min(gaps):.0e}", f"{max(gaps):.0e}") == ("2e-07", "4e-07")
    assert "2e-7 to 4e-7 nats in each of their ten steps" in " ".join((COURSE / "lesson_3.md").read_text().split())


def test_what_the_rule_pays_in_lesson_9():
    text = (COURSE / "lesson_9.md").read_text().replace("`", "").replace("−", "-")
    rows = re.findall(r"^\| (.*</answer>).* \| (.*) \| (.*) \|$", text, re.M)
    assert len(rows) == 4
    for response, reward, strict in rows:
        answer = {"Ann": True, "Ben": False}
        assert kk.score(response, answer)["reward"] == float(reward)
        assert kk.score(response, answer, strict=True)["reward"] == float(strict)


def kept_hacks(rule):
    """{seed: {step: metrics}} of the kept runs of lesson 9."""
    runs = {}
    for path in sorted((COURSE / "results").glob(f"{rule}_seed_*.json")):
        kept = json.loads(path.read_text())
        assert f"--task course/rules/{rule}.py --max_response_tokens 100" in kept["command"]
        runs[int(path.stem[-1])] = {row["step"]: row for row in kept["rows"]}
    return runs


def test_the_numbers_of_lesson_9_are_those_of_the_kept_runs():
    opened, closed = kept_hacks("fails_open"), kept_hacks("fails_closed")
    text = (COURSE / "lesson_9.md").read_text().replace("−", "-")
    places = {"reward": 2, "accuracy": 3, "format_rate": 3, "response_tokens": 0, "eval/accuracy": 3}
    for step in (0, 1, 4, 8, 12):
        row = opened[0][step]
        cells = [f"{row[name]:.{digits}f}" if name in row else "" for name, digits in places.items()]
        assert f"| {step} | {' | '.join(cells)} |" in text
    pairs = [(closed[seed][12]["eval/accuracy"], opened[seed][12]["eval/accuracy"]) for seed in opened]
    for seed, (of_closed, of_open) in zip(opened, pairs):
        assert f"| {seed} | {of_closed:.3f} | {of_open:.3f} | {of_open - of_closed:+.3f} |" in text
    mean, error = compare.mean_and_error([of_open - of_closed for of_closed, of_open in pairs])
    assert f"{mean:+.3f} ± {error:.3f} |" in text and len(pairs) == 3
    assert mean + 4.303 * error < 0  # so the leak harms
    for runs, sign in ((opened, -1), (closed, 1)):  # falls with the leak, rises without it
        assert all(sign * (run[12]["eval/accuracy"] - run[0]["eval/accuracy"]) > 0 for run in runs.values())
    assert all(run[12]["reward"] > run[1]["reward"] + 1 for run in opened.values())


FAILED_RUNS = {  # row of a table of lesson 11: the kept run and its metric, by heading
    "Format lost": {
        "gradient norm": ("format_lost", "grad_norm"),
        "the same, healthy, seed 0": ("healthy", "grad_norm"),
        "KL": ("format_lost", "kl"),
        "format": ("format_lost", "format_rate"),
        "tokens": ("format_lost", "response_tokens"),
        "reward": ("format_lost", "reward"),
    },
    "KL blow-up": {
        "KL": ("kl_blow_up", "kl"),
        "the same, healthy, seed 0": ("healthy", "kl"),
        "reward": ("kl_blow_up", "reward"),
        "format": ("kl_blow_up", "format_rate"),
        "entropy": ("kl_blow_up", "entropy"),
        "tokens": ("kl_blow_up", "response_tokens"),
    },
    "Stale weights": {
        "sampler gap": ("stale_weights", "sampler_gap"),
        "the same, healthy, seed 0": ("healthy", "sampler_gap"),
        "KL": ("stale_weights", "kl"),
        "gradient norm": ("stale_weights", "grad_norm"),
        "reward": ("stale_weights", "reward"),
        "test accuracy": ("stale_weights", "eval/accuracy"),
    },
    "Paid for length": {
        "tokens": ("length_explosion", "response_tokens"),
        "the same without the bonus": ("no_bonus", "response_tokens"),
        "reward": ("length_explosion", "reward"),
        "accuracy": ("length_explosion", "accuracy"),
        "test accuracy": ("length_explosion", "eval/accuracy"),
        "test accuracy without the bonus": ("no_bonus", "eval/accuracy"),
    },
    "Entropy collapse": {
        f"{name}, {script}.py": (kept, key)
        for script, kept in (("grpo", "grpo_smollm2"), ("grpo_ar_lopti", "ar_lopti_smollm2"))
        for name, key in (("entropy", "entropy"), ("accuracy", "accuracy"), ("test accuracy", "eval/accuracy"))
    },
}


@pytest.mark.parametrize("heading", FAILED_RUNS)
def test_the_numbers_of_lesson_11_are_those_of_the_kept_runs(heading):
    text = (COURSE / "lesson_11.md").read_text().replace("−", "-").replace("`", "")
    section = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text.split(f"### {heading}\n")[1].split("\n##")[0])
    head, _, *rows = [re.split(r" *\| *", line[2:-2]) for line in re.findall(r"^\|.*\|$", section, re.M)]
    said, right = {}, {}
    for name, *cells in rows:
        kept, key = FAILED_RUNS[heading][name]
        file = f"benchmarks/llm/{kept}_seed_1.json" if "smollm2" in kept else f"course/results/{kept}_seed_0.json"
        of_run = {f"step {row['step']}": row for row in json.loads((ROOT / file).read_text())["rows"]}
        for step, cell in zip(head[1:], cells):
            if cell.strip():
                style = ".2e" if "e" in cell else f".{len(cell.partition('.')[2])}f"
                said[name, step], right[name, step] = cell, f"{of_run[step][key]:{style}}"
    assert len(said) >= 15
    assert said == right


def widths_outside(run, healthy, key):
    """{step: how many widths a metric is outside of the healthy range}, as exercise 11.3 has it."""
    steps = range(1, 11)
    low = [min(other[step][key] for other in healthy) for step in steps]
    high = [max(other[step][key] for other in healthy) for step in steps]
    width = max(b - a for a, b in zip(low, high))
    return {step: max(a - run[step][key], run[step][key] - b) / width for step, a, b in zip(steps, low, high)}


def test_the_widths_of_lesson_11():
    text = " ".join((COURSE / "lesson_11.md").read_text().split())
    healthy = [rows_of_run(f"course/results/healthy_seed_{seed}") for seed in range(3)]

    def outside(name, key):
        return widths_outside(rows_of_run(f"course/results/{name}_seed_0"), healthy, key)

    kl, form, length, reward, norm = (
        outside("kl_blow_up", key) for key in ("kl", "format_rate", "response_tokens", "reward", "grad_norm")
    )
    assert f"it is {kl[2]:.0f} outside of the healthy range at step 2" in text
    assert f"format and length are {form[2]:.1f} and {length[2]:.1f} outside at the same step" in text
    assert f"later: {reward[2]:.1f} at step 2, {reward[3]:.1f} at step 3, {reward[5]:.1f} at step 5" in text
    run = rows_of_run("course/results/kl_blow_up_seed_0")
    norms = [other[1]["grad_norm"] for other in healthy]
    first = f"{run[1]['grad_norm']:.3f}, where the healthy runs have {min(norms):.3f} to {max(norms):.3f}"
    assert f"{first}. That is {norm[1]:.2f} widths" in text
    others = [[other for other in healthy if other is not one] for one in healthy]
    judged = [widths_outside(one, two, "grad_norm")[1] for one, two in zip(healthy, others)]
    assert "by {:.2f} and {:.2f} widths".format(*[value for value in judged if value > norm[1]]) in text
    assert f"never more than {max(outside('length_explosion', 'response_tokens').values()):.1f} widths" in text
    assert f"The KL is {outside('length_explosion', 'kl')[4]:.1f} widths outside at step 4" in text
    assert max(outside("no_bonus", "kl").values()) > 2
    assert f"The reward is {outside('length_explosion', 'reward')[1]:.1f} widths outside at step 1" in text


def test_the_numbers_of_the_quiz_are_those_of_the_kept_runs():
    text = " ".join((COURSE / "quiz.md").read_text().split())
    runs = {letter: rows_of_run(name) for letter, (name, _) in failures.QUIZ.items()}
    healthy = {letter: [rows_of_run(name) for name in others] for letter, (_, others) in failures.QUIZ.items()}

    def said(letter, words, step, key, style):
        assert words.format(f"{runs[letter][step][key]:{style}}") in text, (letter, words)

    said("A", "The KL is the loudest: {} at step 2", 2, "kl", ".3f")
    said("A", "the format falls to {}", 2, "format_rate", ".2f")
    said("A", "the length rises to {}.", 2, "response_tokens", ".0f")
    said("B", "from 3e-7 to {} at step 2", 2, "sampler_gap", ".3f")
    said("B", "and is {} at step 10", 10, "sampler_gap", ".3f")
    said("C", "a test accuracy of {} at step 10, beside 0.63 to 0.66", 10, "eval/accuracy", ".2f")
    said("E", "The gradient norm of step 1 is {}.", 1, "grad_norm", ".0f")
    said("E", "and the KL is {}.", 2, "kl", ".1f")
    said("F", "At step 6 the entropy is {}, where the healthy runs have 0.74 to 1.25", 6, "entropy", ".2f")
    said("F", "the test accuracy falls from 0.87 to {}", 12, "eval/accuracy", ".2f")
    assert runs["A"][5]["eval/accuracy"] == runs["F"][9]["grad_norm"] == 0
    tests = [run[10]["eval/accuracy"] for run in healthy["C"]]
    assert (min(tests), max(tests)) == (0.63, 0.66)
    assert len({runs["B"][step]["eval/accuracy"] for step in (0, 5, 10)}) == 1
    assert runs["B"][6]["kl"] > 5 and runs["B"][9]["kl"] > 200  # the spikes
    assert round(64 * (1 - runs["C"][3]["format_rate"])) == 6
    assert all(runs["C"][step]["kl"] > max(run[step]["kl"] for run in healthy["C"]) for step in range(2, 11))
    above = [runs["D"][step]["response_tokens"] - max(run[step]["response_tokens"] for run in healthy["D"])
             for step in range(6, 11)]  # fmt: skip
    assert min(above) > 80 and max(above) < 115
    entropies = [run[6]["entropy"] for run in healthy["F"]]
    assert [f"{entropy:.2f}" for entropy in (min(entropies), max(entropies))] == ["0.74", "1.25"]
    assert f"{runs['F'][4]['eval/accuracy']:.2f}" == "0.87" and runs["F"][9]["accuracy"] == 1


# -------------------------------------------------------------------------------------------------- weeks and hours

COMPUTED = {  # lesson: the kept runs whose training steps the lecturer's page counts, and its words
    0: (["kk_tiny/reinforce_seed_0"], "one run: {}"),
    1: (["kk_tiny/rloo_seed_0", "kk_tiny/grpo_seed_0"], "two runs: {}"),
    2: (["kk_tiny/ppo_seed_0"], "one run: {},"),
    4: (["kk_tiny/dapo_seed_0", "kk_tiny/grpo_seed_0"], "two runs: {},"),
    5: (["kk_tiny/lopti_seed_0"], "one run: {};"),
    6: (["kk_tiny/16_updates_seed_0", "kk_tiny/acpo_16_updates_seed_0"], "two runs: {}"),
    7: (["kk_tiny/2_updates_80_20_seed_0"], "one run: {}"),
    8: (6 * ["kk_tiny/grpo_seed_0"], "in week 2: {}"),
    9: ([f"fails_{rule}_seed_{seed}" for rule in ("open", "closed") for seed in range(3)], "six runs: {}"),
    10: ([f"kl_{estimate}_seed_0" for estimate in ("k1", "k2", "k3")], "three runs: {}"),
    11: ([f"{name}_seed_0" for name in ("healthy", "format_lost", "kl_blow_up", "stale_weights", "length_explosion")],
         "five runs: {};"),
}  # fmt: skip


def weeks():
    """{lesson: (needs, session, computing)} of the lecturer's table."""
    text = (COURSE / "lecturer.md").read_text()
    rows = re.findall(r"^\| [\d, ]+ \| (\d+)[^|]* \| ([^|]+) \| (\d+) \| \d+ \| ([^|]+) \|$", text, re.M)
    return {int(lesson): (needs, int(session), computing) for lesson, needs, session, computing in rows}


def test_the_weeks_have_every_lesson_with_its_minutes_and_what_it_needs():
    assert sorted(weeks()) == list(LESSONS)
    lecturer = (COURSE / "lecturer.md").read_text()
    for lesson, (needs, session, _) in weeks().items():
        [(total, parts)] = re.findall(rf"^## Lesson {lesson}: .*\n\n\*\*Timing \((\d+) minutes\)\.\*\* ((?:.+\n)+)",
                                      lecturer, re.M)  # fmt: skip
        minutes = [int(part) for part in re.findall(r"(?:^|; )(\d+) ", " ".join(parts.split()))]
        assert session == int(total) == sum(minutes), lesson
        head = (COURSE / f"lesson_{lesson}.md").read_text().split("## After this you can")[0]
        before = {int(number) for number in re.findall(r"\[lesson\s+(\d+)\]", head)}
        assert before == {int(number) for number in re.findall(r"\d+", needs)}, lesson


def test_the_readmes_minutes_are_those_of_the_lessons():
    text = (COURSE / "README.md").read_text()
    rows = re.findall(r"^\| \[(\d+)\]\(lesson_\d+\.md\) \| [^|]+ \| ([\d to]+)[^|]* \| [^|]+ \|$", text, re.M)
    assert [int(lesson) for lesson, _ in rows] == list(LESSONS)
    for lesson, minutes in rows:
        assert f"\n\n{minutes.strip()} minutes" in (COURSE / f"lesson_{lesson}.md").read_text(), lesson
        numbers = [int(number) for number in minutes.split(" to ")]
        assert numbers[0] <= weeks()[int(lesson)][1] <= numbers[-1], lesson
        assert numbers[0] >= 45 and numbers[-1] <= 90  # as the first sentence has it


@pytest.mark.parametrize("lesson", COMPUTED)
def test_the_minutes_of_computing_are_those_of_the_kept_runs(lesson):
    runs, words = COMPUTED[lesson]
    files = [f"benchmarks/{run}" if "/" in run else f"course/results/{run}" for run in runs]
    seconds = [row.get("time/step", 0) for file in files for row in rows_of_run(file).values()]
    assert words.format(round(sum(seconds) / 60)) in weeks()[lesson][2]


def test_the_readme_says_which_lessons_have_three_functions():
    exercises = [importlib.import_module(f"course.cases.lesson_{lesson}").EXERCISES for lesson in LESSONS]
    assert [lesson for lesson in LESSONS if len(exercises[lesson]) == 3] == [2, 4, 11]
    assert sum(map(len, exercises)) == 2 * 12 + 3
    assert "two functions to write (lessons 2, 4 and 11 have three)" in (COURSE / "README.md").read_text()
