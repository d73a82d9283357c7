"""sft.py: what is learned and what is not, whole runs, and the one line for bad input."""

import json
from pathlib import Path

import pytest
import torch
from conftest import KK_TINY, puzzles, run, write_rows
from helpers import chat, distance, flat, gradients, settings_of_sft
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import sft
from rewards import examples, kk
from runtime.chats import load_task

CHATS = [
    chat("What is 2 + 2?", "4"),
    chat("Which number comes after 9?", "It is 10."),
    chat("Name a colour.", "Red, or blue."),
    chat("Count to five.", "One, two, three, four, five."),
]


def read(tokenizer, folder, rows=CHATS, **changes):
    """(examples to learn, those to test on) of a file of chats, which is also the test file unless told otherwise."""
    file = str(write_rows(folder / "chats.jsonl", rows))
    _, train, test = load_task(settings_of_sft(**{"data": file, "test_data": file} | changes), tokenizer, examples)
    return train, test


def by_transformers(model, given):
    """Σ log π over the response tokens, and their number, by transformers' own cross-entropy."""
    total, count = 0.0, 0
    for one in given:
        ids = torch.tensor([one["prompt_ids"] + one["response_ids"]])
        labels = ids.clone()
        labels[:, : len(one["prompt_ids"])] = -100  # not learned
        num = len(one["response_ids"])
        total = total - model(input_ids=ids, labels=labels).loss * num  # transformers gives the mean
        count += num
    return total, count


def test_loss_and_gradient_are_those_of_transformers_cross_entropy_on_responses_alone(tokenizer, tmp_path, on_the_cpu):
    """And the held-out loss. Also if each example has a pass of its own."""
    given, _ = read(tokenizer, tmp_path)  # four of different lengths
    model = AutoModelForCausalLM.from_pretrained(KK_TINY, dtype=torch.float32)
    total, count = by_transformers(model, given)
    (-total / count).backward()
    expected = pytest.approx((-total / count).item(), rel=1e-5)
    for tokens in (16, 4096):  # passes of one example, and of all
        sizes = {"micro_batch_tokens": tokens, "prompts_per_step": 4, "max_grad_norm": 1e9}
        off = {"gradient_checkpointing": False, "compile": False}
        args = sft.Args(model=str(KK_TINY), dtype="float32", **sizes, **off)
        policy = sft.load_policy(args, trained=True)
        assert sft.evaluate(policy, given, args) == {"eval/loss": expected}
        [gradient], metrics = gradients(sft, sft.to_batch(given), args, policy)
        assert metrics["loss"] == expected and metrics["optimizer_steps"] == 1
        assert distance(gradient, flat(weight.grad for weight in model.parameters())) < 1e-5


def test_prompts_are_not_learned(on_the_cpu):
    """By hand: three tokens of prompt and two of response, the log-probabilities 1 to 5."""
    one = {"prompt_ids": [7, 8, 9], "response_ids": [5, 6]}
    other = {"prompt_ids": [7], "response_ids": [5]}
    batch = sft.to_batch([one, other])
    assert batch["ids"].tolist() == [[7, 8, 9, 5, 6], [7, 5, 0, 0, 0]]
    assert batch["mask"].tolist() == [[False, False, False, True, True], [False, True, False, False, False]]
    logp = torch.tensor([[-1.0, -2, -3, -4, -5], [-6, -7, -8, -9, -10]], requires_grad=True)
    loss = sft.policy_loss(logp, batch, divisor=3)
    assert loss.item() == pytest.approx((4 + 5 + 7) / 3)
    loss.backward()
    assert (logp.grad != 0).tolist() == batch["mask"].tolist()


def test_worked_solutions_are_right_if_careful_and_end_with_the_end_token(tokenizer, monkeypatch):
    """Half are careful, and those are right; the others guess."""
    monkeypatch.setitem(kk.DEFAULT_SIZE, "train", 250)
    _, train, test = load_task(settings_of_sft(eval_size=40), tokenizer, examples)
    scores = [kk.score(one["response"], one["answer"]) for one in train[:200]]
    assert all(score["format"] for score in scores)
    right = sum(score["correct"] for score in scores) / 200
    assert 0.45 < right < 0.75  # the careful half, and a quarter or an eighth of the rest
    assert all(one["response_ids"][-1] == tokenizer.eos_token_id for one in train[:20])
    assert not {one["quiz"] for one in train} & {one["quiz"] for one in test}
    _, careful, _ = load_task(settings_of_sft(careful=1.0, eval_size=40), tokenizer, examples)
    assert all(kk.score(one["response"], one["answer"])["reward"] == 3 for one in careful[:100])


def small(run_dir, **changes):
    """Flags of a run that takes seconds: kk_tiny learns solutions of 60 puzzles."""
    flags = {
        "model": KK_TINY, "run_dir": run_dir, "steps": 2, "prompts_per_step": 8, "eval_size": 8,
        "micro_batch_tokens": 2000, "lr": 1e-3, "updates_per_step": 2, "dtype": "float32", "eval_every": 1,
        "data": chats_of_puzzles(Path(run_dir).parent),
    }  # fmt: skip
    return [word for key, value in (flags | changes).items() for word in (f"--{key}", str(value))]


def chats_of_puzzles(folder):
    """Solutions as a file of chats, in another form than kk_tiny's own, so that there is something to learn."""
    rows = []
    for puzzle in kk.load(str(puzzles()), "train", people="2-3"):
        text = ". ".join(f"{name}: {'knight' if role else 'knave'}" for name, role in puzzle["answer"].items())
        last = {"role": "assistant", "content": text}
        rows.append({"messages": [*puzzle["messages"], last]})
    return write_rows(Path(folder, "chats.jsonl"), rows)


def rows_of(run_dir):
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    return run_dir, run("sft.py", *small(run_dir))


def test_a_run_lowers_the_held_out_loss_and_writes_what_it_promises(two_steps):
    run_dir, finished = two_steps
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] > 0
    keys = "loss grad_norm optimizer_steps response_tokens tokens weights_changed time/train time/step peak_memory_gb"
    assert all(row[key] is not None for row in rows[1:] for key in keys.split())
    assert all(row["optimizer_steps"] == 2 for row in rows[1:])
    assert "loss on held-out examples" in finished.stdout and "held back to test on" in finished.stdout
    assert load_file(run_dir / "checkpoints/step_000002/model.safetensors")


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes need two GPUs, or none")
def test_two_processes_learn_as_one(two_steps, tmp_path):
    """No sampler: so beside rounding the numbers are the same in every step."""
    run("sft.py", *small(tmp_path / "run"), processes=2)
    for one, two in zip(rows_of(two_steps[0]), rows_of(tmp_path / "run"), strict=True):
        for key in ("loss", "eval/loss", "grad_norm", "tokens", "response_tokens"):
            if key in one:
                assert two[key] == pytest.approx(one[key], rel=1e-3), (one["step"], key)


QUESTION, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[QUESTION, ANSWER], [QUESTION]], "row 2 is not complete: messages: List should have at least 2 items"),
        ([[QUESTION, ANSWER, QUESTION]], "row 1: the last turn must be the assistant's, to be learned, not the user's"),
        ([[QUESTION, {"role": "assistant"}]], "row 1 is not complete: messages.1.content: Field required"),
        ([[QUESTION, {"role": "assistant", "content": " "}]], "row 1: the assistant's last turn is empty"),
        ([[QUESTION, ANSWER]], "has one chat; without --test_data there must be two"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_its_row(rows, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"chats\.jsonl") as error:
        read(tokenizer, tmp_path, [{"messages": row} for row in rows], test_data="")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_chat_that_the_template_refuses(tokenizer, tmp_path):
    """Llama's and Mistral's templates, among others, ask that user and assistant take turns."""
    strict, rows = AutoTokenizer.from_pretrained(KK_TINY), [{"messages": [QUESTION, QUESTION, ANSWER]}] * 2
    strict.chat_template = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="example 1: the model's chat template refuses the chat: roles must alternate"):
        read(strict, tmp_path, rows)
    read(tokenizer, tmp_path, rows)  # kk_tiny's takes any


def test_examples_that_are_too_long(tokenizer, tmp_path, capsys):
    long = chat("Go on.", "and so on " * 300)
    assert len(read(tokenizer, tmp_path, [long, *CHATS])[0]) == 4
    assert "1 of 5 examples are too long and left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no train example has at most 600 tokens of prompt"):
        read(tokenizer, tmp_path, [long, long])


def test_a_chat_that_stands_twice_is_not_on_both_sides(tokenizer, tmp_path, capsys):
    train, test = read(tokenizer, tmp_path, CHATS * 5, test_data="")
    assert not {str(one["messages"]) for one in train} & {str(one["messages"]) for one in test}
    assert "are test problems, too, and left out" in capsys.readouterr().out


def test_a_task_without_worked_solutions(tokenizer):
    with pytest.raises(ValueError, match="--task countdown has no worked solutions: give --data FILE"):
        load_task(settings_of_sft(task="countdown"), tokenizer, examples)
