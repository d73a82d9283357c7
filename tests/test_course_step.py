"""The student's own step: the check passes the solution, and names what is wrong with others."""

import pytest
from conftest import ROOT

from course import check, check_page, check_step, sandbox, step
from course.lesson_04 import solution_page as page

SOLUTION = check.COURSE / "lesson_02" / "solution_step.py"


def verdicts(file):
    return {part.function: (verdict, text) for part, verdict, text, _ in check_step.check_file(file)}


def test_the_exercise_is_not_written_yet():
    """That the solution passes is in test_course.py, where a class is graded."""
    found = verdicts(check.COURSE / "lesson_02" / "step.py")
    assert {verdict for verdict, _ in found.values()} == {"NOT YET"}


WRONG = [
    # (part, what stands in the solution, what stands there instead, what is said)
    ("update", "    torch.nn.utils.clip_grad_norm_(policy.parameters(), LARGEST_NORM)\n", "", "is not scaled down"),
    ("loss", "-(advantages * logp)[mask]", "(advantages * logp)[mask]", "has the wrong sign"),
    ("advantages", "rewards - rewards.mean()", "rewards", "up to 0"),
    ("loss", "/ mask.sum()", "/ len(mask)", "away from reinforce.py's"),
    ("update", "    optimizer.zero_grad()\n", "", "zero_grad() is missing"),
    ("update", "    optimizer.step()\n", "", "have not moved"),
]


def changed(old, new, folder):
    """The solution with something else in one place, as a file."""
    text = SOLUTION.read_text()
    assert text.count(old) == 1
    file = folder / "step.py"
    file.write_text(text.replace(old, new).replace("parents[2]", f"parents[0] / {str(ROOT)!r}"))
    return file


@pytest.mark.parametrize(("part", "old", "new", "said"), WRONG)
@pytest.mark.slow
def test_a_mistake_is_found(part, old, new, said, tmp_path):
    found = verdicts(changed(old, new, tmp_path))
    verdict, text = found[part]
    assert verdict == check.WRONG and said in text, found
    after = check_step.PARTS[check_step.PARTS.index(part) + 1 :]
    assert all(found[name][0] == check.PASS for name in check_step.PARTS if name not in (part, *after))


# ---------------------------------------------------------------------------------------------------------- samplers

BATCHED = '''
def sample(policy, tokenizer, problems):
    """All prompts in one call, padded on the left, 40 tokens at most."""
    end, rows, masks, texts = tokenizer.eos_token_id, [], [], []
    prompts = [encode(tokenizer, problem) for problem in problems for _ in range(G)]
    longest = max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
    attention_mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made = policy.generate(
        ids, attention_mask=attention_mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=40, pad_token_id=end
    )
    for prompt, row in zip(prompts, made):
        response = row[longest:].tolist()
        if end in response:
            response = response[: response.index(end) + 1]
        rows.append(torch.tensor(prompt + response))
        masks.append(torch.tensor([False] * len(prompt) + [True] * len(response)))
        texts.append(tokenizer.decode(response, skip_special_tokens=True))
    return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True), texts
'''
WRONG_ROWS = {  # what is said: what stands in BATCHED, and what there instead
    "row 0: the end token is cut off": (".index(end) + 1]", ".index(end)]"),
    "are equal: sample them (do_sample=True)": ("do_sample=True, temperature=1.0, top_k=0, top_p=1.0,", ""),
    "row 0 does not begin with its prompt": ("torch.tensor(prompt + response)", "row"),
    "row 1 does not begin with its prompt": ("[encode(tokenizer, problem) for problem in problems for _ in range(G)]",
                                             "[encode(tokenizer, problem) for _ in range(G) for problem in problems]"),
    "row 0: the text is not": ("decode(response", "decode(prompt + response"),
}  # fmt: skip
WRONG_DRAWS = {
    "": ("", ""),
    "most probable: top_k=0 takes all": ("top_k=0, top_p=1.0,", ""),
    "draws no token but the 20 most probable": ("top_k=0", "top_k=20"),
    "as with top_p = 0.90": ("top_p=1.0", "top_p=0.9"),
    "draws as with temperature 0.7": ("temperature=1.0", "temperature=0.7"),
    "draws as with temperature 1.": ("temperature=1.0", "temperature=1.3"),
    "generate needs an attention_mask": ("attention_mask=attention_mask", "attention_mask=torch.ones_like(ids)"),
}


def samples(old, new, *flat):
    """What the check gets of BATCHED with a change, from these policies."""
    assert not old or BATCHED.count(old) == 1
    module = sandbox.load(SOLUTION)
    exec(BATCHED.replace(old, new) if old else BATCHED, module.__dict__)
    policies = [check_step.checkers_policy(is_flat) for is_flat in flat]
    return step.samples(module, policies, check_step.tokenizer(), check_step.asked()[0])


@pytest.mark.parametrize("said", WRONG_ROWS)
def test_wrong_rows_of_a_sampler_are_named(said):
    [(ids, mask, texts)] = samples(*WRONG_ROWS[said], False)
    assert said in check_step.wrong_rows(ids, mask, texts)


@pytest.mark.parametrize("said", WRONG_DRAWS)
@pytest.mark.slow
def test_wrong_draws_of_a_sampler_are_named(said):
    text = check_step.wrong_sample({"drawn": samples(*WRONG_DRAWS[said], False, True)})
    assert said in text and bool(said) == bool(text)


@pytest.mark.parametrize("script", ["grpo", *page.CHANGES])
def test_a_page_is_compared_with_the_script_that_it_should_be(script, tmp_path, monkeypatch):
    """nano_grpo.py without vLLM computes what grpo.py computes, and the solutions what the other scripts compute."""
    monkeypatch.chdir(ROOT)
    file = tmp_path / "my_page.py"

    def verdict(changes):
        text = (ROOT / "nano_grpo.py").read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        file.write_text(text)
        return check_page.verdict(file, script)

    changes = page.CHANGES.get(script, [])
    assert verdict(changes) == ""
    if script == "dr_grpo":
        assert "still computes what grpo.py computes" in verdict([])
        assert "advantages are right" in verdict(changes[1:2])
    if script == "reinforce":
        assert "advantages differ" in verdict(changes[1:])
