"""lab.forking_tokens on cases worked by hand, and its gradients against a real model's Jacobian."""

import json
import math
import sys

import pytest
import torch
from conftest import KK_TINY, ROOT
from test_lab import words_on

import grpo
from lab import common, forking_tokens, proposition, verdicts

pytestmark = pytest.mark.usefixtures("on_the_cpu")

TEXTS = [  # (prompt, response); every word of the responses is a token of kk_tiny
    (" You meet Zoey and Rafael.", " Well, Zoey is honest, so Rafael is a knave.\n Suppose"),
    (" Who is a knight?", " Hence Zoey says so. If Rafael is honest, Zoey is"),
]


def of_lab(**changes):
    return forking_tokens.Args(model=str(KK_TINY), prompts=1, responses=2, **changes)


@pytest.fixture(scope="module")
def known():
    """(policy, tokenizer, Sampled): kk_tiny and two responses that it has not sampled itself."""
    args = of_lab()
    policy, tokenizer = common.load_policy(args)
    rows = [[tokenizer.encode(text) for text in pair] for pair in TEXTS]
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    batch = {"ids": torch.zeros(2, longest, dtype=torch.long)}
    batch["mask"] = torch.zeros(2, longest, dtype=torch.bool)
    for i, (prompt, response) in enumerate(rows):
        batch["ids"][i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        batch["mask"][i, len(prompt) : len(prompt) + len(response)] = True
    of_script = common.trainer_args("grpo", args)
    batch["old_logp"], batch["entropy"] = grpo.log_probs(policy, batch, of_script)
    texts = [response for _, response in TEXTS]
    return policy, tokenizer, common.Sampled(batch, torch.ones(2), texts, ["?"], [True, False])


# --------------------------------------------------------------------------------------- gradients


def test_a_tokens_gradient_is_the_heads_jacobian_times_one_hot_minus_p(known):
    policy, _, sampled = known
    batch = sampled.batch
    for temperature in (1.0, 0.7):
        norms = forking_tokens.gradient_norms(policy, batch, of_lab(temperature=temperature))
        assert (norms[~batch["mask"]] == 0).all()
        first, last_but_one = batch["mask"][0].nonzero()[0], batch["mask"][1].nonzero()[-2]
        for row, t in [(0, int(first)), (1, int(last_but_one))]:
            ids, mask = batch["ids"][row : row + 1, : t + 1], batch["mask"][row : row + 1, : t + 1]
            _, activations = proposition.activations_of(policy, ids, mask, temperature)
            last = activations[-1][:, t - 1 : t].detach()  # [1, 1, D]
            p = (policy.lm.lm_head(policy.lm.model.norm(last))[0, 0] / temperature).softmax(-1)
            one_hot = torch.zeros_like(p)
            one_hot[ids[0, t]] = 1
            matrix = proposition.last_jacobian(policy, last, temperature)  # [vocabulary, D]
            expected = (matrix.T @ (one_hot - p)).norm().item()
            assert norms[row, t].item() == pytest.approx(expected, rel=1e-4)


def test_norms_at_all_weights_are_those_of_the_tokens_they_are_said_to_be_of(known):
    policy, _, sampled = known
    batch = sampled.batch
    rows, positions, norms = forking_tokens.norms_at_all_weights(policy, batch, of_lab(checked=3))
    assert len(norms) == 3 and batch["mask"][rows, positions].all()
    logp, _ = policy(batch["ids"], batch["mask"], 1.0)
    for row, t, norm in zip(rows, positions, norms):
        gradients = torch.autograd.grad(logp[row, t], policy.parameters(), retain_graph=True)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        assert norm.item() == pytest.approx(flat.norm().item(), rel=1e-3)
    everything = forking_tokens.norms_at_all_weights(policy, batch, of_lab(checked=1000))
    assert len(everything[2]) == batch["mask"].sum()


# -------------------------------------------------------------------------------------------- words


def test_the_words_of_a_response_and_what_they_are(known):
    policy, tokenizer, sampled = known
    found = forking_tokens.measure(policy, tokenizer, sampled, of_lab())
    words = "Well , Zoey is honest , so Rafael is a knave . \\n Suppose".split()
    begins = [word in ("Well", "\\n", "Suppose") for word in words]  # after the full stop
    assert found["words"][: len(words)] == words
    assert found["begins"][: len(words)].tolist() == begins
    connecting = [w for w, c in zip(found["words"], found["connects"]) if c]
    assert connecting == ["so", "Hence", "so"]
    mask = sampled.batch["mask"]
    assert len(found["words"]) == mask.sum() == len(found["entropy"])
    assert found["probability"].tolist() == pytest.approx(
        [math.exp(x) for x in sampled.batch["old_logp"][mask].tolist()]
    )


def test_words_and_steps_by_hand():
    assert forking_tokens.word_of(" so") == "so" and forking_tokens.word_of("so ") == "so"
    assert forking_tokens.word_of("\n") == "\\n" and forking_tokens.word_of("  ") == "  "
    for word in ("so", "Therefore", "since", "assumes", "definite"):
        assert forking_tokens.is_connecting(word)
    for word in ("some", "knight", "honest", "if", ""):  # "if" only with a "then" after it
        assert not forking_tokens.is_connecting(word)
    texts = [" A", " b", '."', " C", ",", " d", "\n", "e", " f", "?)", "g"]
    begins = forking_tokens.step_beginnings(texts)
    assert [t for t, begin in zip(texts, begins) if begin] == [" A", " C", "e", "g"]
    assert forking_tokens.step_beginnings([]) == []


def batch_of_words(words, entropy, probability, gradient, top):
    found = {"words": words}
    for name, values in (("entropy", entropy), ("probability", probability), ("gradient", gradient)):
        found[name] = torch.tensor(values, dtype=torch.float64)
    found["in entropy"] = torch.tensor(top)
    return found


def test_the_table_of_words_by_hand():
    """Means over both batches; "c" occurs once and is left out."""
    one = batch_of_words(["a", "b", "a"], [1.0, 0.0, 2.0], [0.5, 1, 0.5], [3.0, 0, 3], [1, 0, 1])
    two = batch_of_words(["b", "c", "a"], [0.2, 9.0, 3.0], [0.8, 0, 0.2], [1.0, 9, 6], [0, 1, 0])
    rows = {row["word"]: row for row in forking_tokens.word_table([one, two], least=2)}
    assert set(rows) == {"a", "b"}
    a = {"word": "a", "count": 3, "entropy": 2.0, "probability": 0.4, "gradient": 4.0}
    assert rows["a"] == a | {"probability": pytest.approx(0.4), "in_top": pytest.approx(2 / 3)}
    assert rows["b"]["entropy"] == pytest.approx(0.1) and rows["b"]["in_top"] == 0
    lists = forking_tokens.lists_of(list(rows.values()), listed=1)
    first = {name: [row["word"] for row in of_list] for name, of_list in lists.items()}
    assert first == {
        "highest entropy": ["a"], "lowest probability": ["a"], "largest gradient": ["a"],
        "lowest entropy": ["b"],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ numbers


def test_how_many_tokens_have_most_of_a_sum():
    """4 + 3 are 7 of 10, and 2 more make 9: three of four values have 80 %."""
    values = torch.tensor([1.0, 4.0, 2.0, 3.0]).double()
    assert forking_tokens.share_carrying(values, 0.8) == 0.75
    assert forking_tokens.share_carrying(values, 0.7) == 0.5  # exactly 7 of 10
    assert forking_tokens.share_carrying(values, 1.0) == 1.0
    assert forking_tokens.carried_by(values, 0.5) == pytest.approx(0.7)
    assert forking_tokens.carried_by(values, 0.2) == pytest.approx(0.4)  # ⌈0.8⌉ is one value


def test_overlaps_and_rank_correlations_by_hand():
    some = torch.tensor([True, True, False, False])
    assert forking_tokens.overlap(some, torch.tensor([False, True, True, False])) == 0.5
    assert forking_tokens.overlap(~some & some, some) == 0
    rising = torch.tensor([1.0, 2.0, 4.0, 80.0])
    assert common.rank_correlation(rising, rising**3) == pytest.approx(1)
    assert common.rank_correlation(rising, -rising) == pytest.approx(-1)
    top = forking_tokens.top_tokens(torch.tensor([1.0, 3.0, 3.0, 2.0]), 1)
    assert top.tolist() == [False, True, False, False]


def test_the_sets_are_those_of_entropy_top(known):
    """A half of four tokens: of highest entropy the first two, of lowest p and largest gradient 0
    and 3."""
    batch = {
        "mask": torch.tensor([[False, True, True, True, True]]),
        "entropy": torch.tensor([[9.0, 2.0, 3.0, 0.5, 1.0]]),
    }
    found = {
        "entropy": torch.tensor([2.0, 3.0, 0.5, 1.0]),
        "probability": torch.tensor([0.1, 0.8, 0.9, 0.2]),
        "gradient": torch.tensor([5.0, 0.1, 0.0, 4.0]),
    }
    sets = forking_tokens.sets_of(batch, found, of_lab(share=0.5))
    assert sets["entropy"].tolist() == [True, True, False, False]
    assert sets["probability"].tolist() == [True, False, False, True]
    assert sets["gradient"].tolist() == [True, False, False, True]
    assert forking_tokens.sets_of(batch, found, of_lab(share=0.2))["entropy"].sum() == 1


def test_the_bounds_of_the_entropy_by_hand():
    """Three words, p 0.5: the rest on one word gives ln 2, shared by two ln 2 / 2 more."""
    low, high = forking_tokens.entropy_bounds(torch.tensor([0.5, 1.0]).double(), 3)
    assert low.tolist() == pytest.approx([math.log(2), 0])
    assert high.tolist() == pytest.approx([1.5 * math.log(2), 0])


def test_a_batchs_numbers_by_hand():
    found = {
        "entropy": torch.tensor([1.0, 0.005, 0.61, 0.385]).double(),
        "probability": torch.tensor([0.4, 0.9995, 0.6, 0.9]).double(),
        "gradient": torch.tensor([6.0, 0.0, 3.0, 1.0]).double(),
        "in entropy": torch.tensor([True, False, False, False]),
        "in probability": torch.tensor([True, False, False, False]),
        "in gradient": torch.tensor([False, False, True, False]),
        "connects": torch.tensor([True, False, True, False]),
        "begins": torch.tensor([False, False, False, False]),
    }
    numbers = forking_tokens.numbers_of(found, 630)
    assert numbers["tokens"] == 4 and numbers["nearly_certain"] == 0.25
    assert numbers["mean_entropy"] == pytest.approx(0.5)
    assert numbers["tokens_with_most_of_the_entropy"] == 0.5  # 1.61 of 2 nats
    assert numbers["entropy_of_top"] == pytest.approx(0.5)
    assert numbers["gradient_of_top"] == pytest.approx(0.6)
    shared = {"entropy, probability": 1, "entropy, gradient": 0, "probability, gradient": 0}
    assert numbers["overlap"] == shared
    # The ranks of entropy are 4 1 3 2, those of probability 1 4 2 3, those of gradient 4 1 3 2.
    assert numbers["rank_correlation"]["entropy, gradient"] == pytest.approx(1)
    assert numbers["rank_correlation"]["entropy, probability"] == pytest.approx(-1)
    assert numbers["connects"]["entropy"] == pytest.approx(0.805)
    assert numbers["connects"]["entropy_of_others"] == pytest.approx(0.195)
    assert numbers["connects"]["share"] == 0.5 and numbers["connects"]["share_of_top"] == 1
    assert numbers["begins"]["entropy"] is None
    # p 0.6 allows no less than 0.673 nats, so the third token's 0.61 is outside.
    assert numbers["within_bounds"] == 0.75


# ----------------------------------------------------------------------------------------- verdicts


def row_of(certain, top, shared, gap, within=1.0):
    kind = {"entropy": 0.3 + gap, "entropy_of_others": 0.3}
    of_pair = dict(zip([f"{a}, {b}" for a, b in forking_tokens.PAIRS], shared))
    found = {"nearly_certain": certain, "entropy_of_top": top, "overlap": of_pair, "within_bounds": within}
    return found | {"connects": kind, "begins": kind}


def test_verdicts_can_say_yes_no_and_that_they_cannot_tell(tmp_path):
    def words(*rows):
        return words_on("forking_tokens", tmp_path, rows)

    yes = row_of(0.6, 0.9, (0.8, 0.7, 0.9), 0.2)
    assert words(yes, yes, yes)[:-1] == ["shows"] * 8  # the last is that of the bounds, which can't fail
    less = "no effect of that size"  # than half of the tokens, 80 % of the entropy, or all tokens, which are claimed
    no = row_of(0.4, 0.7, (0.4, 0.46, 0.45), -0.2, within=0.99)
    assert words(no, no, no) == [less, less, *["the opposite"] * 6, less]
    assert set(words(yes, yes)) == {"too few runs to tell"}
    varying = [row_of(0.6, 0.9, (0.8, 0.7, 0.9), gap) for gap in (0.5, -0.3, 0.1)]
    assert words(*varying)[6:8] == ["too few runs to tell"] * 2
    without = yes | {"connects": yes["connects"] | {"entropy": None}}
    assert len(words(without, without, without)) == 8  # of a kind that no batch has, nothing is said


# ---------------------------------------------------------------------------------------- the whole


def test_a_run_writes_json_and_picture(known, tmp_path, monkeypatch, capsys):
    policy, tokenizer, sampled = known
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(common, "load_policy", lambda args: (policy, tokenizer))
    monkeypatch.setattr(common, "load_batches", lambda policy, args, count, need_gradient: [sampled] * count)
    flags = ["--batches", "3", "--least", "1", "--checked", "4", "--out", str(tmp_path)]
    flags += ["--cache", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["forking_tokens", *flags])
    forking_tokens.main()
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "forking_tokens.json").read_text())
    assert (tmp_path / "forking_tokens.png").stat().st_size > 20_000
    assert result["command"].startswith("python -m lab.forking_tokens --batches 3")
    assert result["tokens"] == 3 * int(sampled.batch["mask"].sum())
    assert [row["within_bounds"] for row in result["batches"]] == [1, 1, 1]
    assert sum(len(of["all_weights"]) for of in result["responses"]) == 4
    highest = result["lists"]["highest entropy"]
    assert [row["entropy"] for row in highest] == sorted(r["entropy"] for r in highest)[::-1]
    assert all(row["count"] % 3 == 0 for row in highest)
    assert shown.rstrip().splitlines()[-1] == verdicts.of_file("forking_tokens", tmp_path)[-1]


# -------------------------------------------------------------------------------------- what is kept


def test_what_the_labs_readme_says_is_what_is_kept():
    kept = json.loads((ROOT / "lab" / "results" / "forking_tokens.json").read_text())
    section = (ROOT / "lab" / "README.md").read_text().split("## Forking tokens")[1].split("\n## ")[0]
    assert not kept["commit"].endswith("+") and f"{kept['tokens']:,} tokens" in section
    for name, rows in kept["lists"].items():
        key = name.split()[1]
        words = ", ".join(f"`{row['word']}` {row[key]:.2g}" for row in rows[:10])
        assert words.replace("|", "\\|") in section, name
