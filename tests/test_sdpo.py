"""SDPO in numbers: which hint a response gets, and the advantages against log-probabilities that torch alone computes.

The loss is opd.py's (test_opd.py); no sampler runs here: test_every_script.py has a whole run.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, step_of_main
from helpers import arguments
from transformers import AutoTokenizer

import sdpo
from runtime import chats

pytestmark = pytest.mark.usefixtures("on_the_cpu")

WORDS = ["No.", " Adaeze is a knight.", " Quinn is a knave, and Adaeze is not.", " Both lie."]


def scores_of(correct, feedback):
    return [{"correct": right, "feedback": said} for right, said in zip(correct, feedback, strict=True)]


@pytest.mark.parametrize(
    ("correct", "feedback", "expected"),
    [
        ([0, 0, 0, 0], [None] * 4, ["", "", "", ""]),
        ([0, 1, 0, 0], [None] * 4, ["a1", "", "", ""]),  # its own success is no hint, nor is another group's
        ([1, 1, 0, 1], [None] * 4, ["a1", "a0", "a3", ""]),
        ([0, 0, 0, 1], ["f", "", "g", "h"], ["f", "", "a3", ""]),  # a right sibling before feedback, which says "wrong"
    ],
)
def test_the_hint_is_the_first_right_sibling_or_feedback(correct, feedback, expected):
    """Two groups of two responses, a0 to a3."""
    args = arguments(sdpo, responses_per_prompt=2)
    responses = [SimpleNamespace(text=f"a{i}") for i in range(4)]
    for i, text in enumerate(expected):
        template = sdpo.SOLUTION if text.startswith("a") else sdpo.FEEDBACK
        hint = sdpo.find_hint(i, responses, scores_of(correct, feedback), args)
        assert hint == (template.format(text) if text else "")


def with_hints(policy, args):
    """(problems, responses, a batch, has_hint) of a group of four responses in the words above; the second is right."""
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    problem = {"messages": [{"role": "user", "content": "Who is a knave, Adaeze or Quinn?"}], "prefix": "<think>"}
    problem["prompt_ids"] = chats.encode(tokenizer, problem)
    responses = []
    for text in WORDS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        logprobs = SimpleNamespace(logprobs=[-1.0] * len(ids))
        responses.append(SimpleNamespace(token_ids=ids, text=text, logprobs=logprobs))
    problems = [problem] * 4
    batch = sdpo.to_batch(problems, responses)
    batch["old_logp"], _ = sdpo.log_probs(policy, batch, args)
    scores = scores_of([0, 1, 0, 0], [None] * 4)
    batch["teacher_logp"], has_hint = sdpo.hinted_log_probs(policy, batch, problems, responses, scores, tokenizer, args)
    return problems, responses, batch, has_hint


@pytest.mark.parametrize("tokens", [10**6, 1], ids=["one pass", "a pass per row"])
def test_advantages_against_log_probabilities_in_float64(tokens):
    """At a temperature of 0.8, of a policy in float32. Response 1 is right: it is the others' hint, and has none."""
    args = arguments(sdpo, model=str(KK_TINY), responses_per_prompt=4, temperature=0.8, micro_batch_tokens=tokens)
    policy = sdpo.load_policy(args, trained=True)
    problems, responses, batch, has_hint = with_hints(policy, args)
    found = sdpo.compute_advantages(None, batch, args)
    assert has_hint.flatten().tolist() == [True, False, True, True] and not found[1].any()

    model = policy.lm.double()

    def by_hand(prompt_ids, ids):
        """log π of each of the ids after the prompt, by transformers in float64."""
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1] / 0.8
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]

    question = problems[0]["messages"][0]["content"]
    asked = f"{question}\n\nCorrect solution:\n\n{WORDS[1]}\n\nCorrectly solve the original question."
    hinted = {"messages": [{"role": "user", "content": asked}], "prefix": "<think>"}
    hinted = chats.encode(AutoTokenizer.from_pretrained(KK_TINY), hinted)
    for i in (0, 2, 3):
        ids = responses[i].token_ids
        expected = by_hand(hinted, ids) - by_hand(problems[0]["prompt_ids"], ids)
        torch.testing.assert_close(found[i][batch["mask"][i]].double(), expected, rtol=1e-4, atol=1e-5)
        assert expected.abs().max() > 0.01 and not found[i][~batch["mask"][i]].any()


def test_a_hint_that_does_not_fit_is_dropped():
    """The sampler's context is the limit, and the model's positions, with the response. Without any hint no pass is
    needed, and A is exactly 0."""
    for room, positions, fits in ((0, 2048, False), (500, 2048, True), (500, 50, False)):
        args = arguments(sdpo, model=str(KK_TINY), responses_per_prompt=4, max_prompt_tokens=20, max_response_tokens=9)
        args.max_prompt_tokens += room
        policy = sdpo.load_policy(args, trained=True)
        policy.lm.config.max_position_embeddings = positions
        _, _, batch, has_hint = with_hints(policy, args)
        assert has_hint.any() == fits and torch.equal(batch["teacher_logp"], batch["old_logp"]) != fits


def test_the_metrics_by_hand(batch, monkeypatch):
    """kl is the mean of log π − log π with the hint; hint_rate the share of responses with one."""
    has_hint = torch.arange(len(batch["ids"]))[:, None] % 4 == 0
    given = torch.where(has_hint, batch["ref_logp"], batch["old_logp"])
    metrics, update = step_of_main(sdpo, arguments(sdpo), batch | {"ref_logp": given}, [0.0] * len(given), monkeypatch)
    assert metrics["hint_rate"] == 0.25
    gap = ((batch["old_logp"] - given) * batch["mask"]).double().sum() / batch["mask"].sum()
    assert metrics["kl"] == pytest.approx(gap.item(), rel=1e-6)
    assert torch.equal(update["advantages"], (given - batch["old_logp"]) * batch["mask"])
