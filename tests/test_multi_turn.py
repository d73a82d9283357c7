"""Several turns: the ids of a conversation, its gradient, runs of grpo_multi_turn.py, and the tasks that reply."""

import itertools
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import KK_TINY, ROOT, SMOLLM, TALK, answer, metrics, run, small
from helpers import arguments
from transformers import AutoTokenizer

import grpo_multi_turn
from rewards import calculator, facts, guess, maze, own, parts_of, scores_of, turn_rewards
from runtime import tools
from runtime.chats import encode
from runtime.tools import encode_reply

# Two of three of kk_tiny's turns get a reply, at most twice, so that conversations end after one, two or three turns.


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """A task with replies, as a file of one's own."""
    path = tmp_path_factory.mktemp("task") / "talk.py"
    path.write_text(TALK)
    return path


WORKER = """
import sys
sys.path.insert(0, {root!r})
import torch
import grpo_multi_turn as trainer
from runtime import tools
from runtime.chats import load_task
from transformers import AutoTokenizer

args = trainer.Args(model={model!r}, task=sys.argv[1], max_prompt_tokens=600, max_response_tokens=120, kv_cache_gb=0.1,
                    responses_per_prompt=4, eval_size=2, gradient_checkpointing=False, compile=False, dtype="float32",
                    temperature=1.5)  # hot enough for tokens that a tokenizer would not choose for their text
task, problems, _ = load_task(args, AutoTokenizer.from_pretrained(args.model))
problems = [problem for problem in problems[:6] for _ in range(4)]
llm = trainer.load_sampler(args)
calls = []  # (ids that vLLM was given, the ids that it gave back, their log-probabilities)
real = llm.generate

def generate(prompts, params, **more):
    outputs = real(prompts, params, **more)
    for prompt, output in zip(prompts, outputs):
        for one in output.outputs:
            calls.append((list(prompt["prompt_token_ids"]), list(one.token_ids), list(one.logprobs.logprobs)))
    return outputs

llm.generate = generate
batch, conversations = trainer.sample(llm, problems, 1, args)
policy = trainer.load_policy(args, trained=False)
logp, _ = trainer.log_probs(policy, batch, args)
kept = [{{name: getattr(c, name) for name in ("ids", "is_own", "logp", "turns", "replies", "finish_reason")}}
        for c in conversations]
prompts = [problem["prompt_ids"] for problem in problems]
torch.save((batch, logp, kept, prompts, calls), sys.argv[2])
"""


def test_a_conversations_ids_are_what_vllm_was_given_and_gave_back(talk, tmp_path):
    """And the policy gives each of the model's own tokens the probability that the sampler gave it, after replies."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(root=str(ROOT), model=str(KK_TINY)))
    run(worker, talk, tmp_path / "found.pt")
    batch, logp, conversations, prompts, calls = torch.load(tmp_path / "found.pt")
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    for i, (prompt, one) in enumerate(zip(prompts, conversations)):
        place = 0
        own_turns = 0
        for is_own, group in itertools.groupby(one["is_own"]):
            end = place + len(list(group))
            if is_own:
                own_turns += 1
                assert (prompt + one["ids"][:place], one["ids"][place:end], one["logp"][place:end]) in calls
            else:
                assert one["ids"][place:end] == encode_reply(tokenizer, "Why?")
            place = end
        assert place == len(one["ids"]) and own_turns == len(one["turns"]) == len(one["replies"]) + 1
        row = slice(len(prompt), len(prompt) + place)
        assert batch["ids"][i, row].tolist() == one["ids"] and batch["mask"][i, row].tolist() == one["is_own"]
        assert batch["mask"][i].sum() == sum(one["is_own"])
    assert {len(one["turns"]) for one in conversations} == {1, 2, 3}
    assert not batch["sampler_logp"][~batch["mask"]].any()
    assert (logp - batch["sampler_logp"]).abs().max() < 1e-3


@pytest.mark.parametrize("model", [KK_TINY, SMOLLM], ids=["kk_tiny", "SmolLM2"])
def test_the_ids_of_a_reply_are_those_of_the_whole_chat(model):
    """In a chat whose turns are tokenized as the model writes them: prompt + turn + end token + reply."""
    if not model.exists():
        pytest.skip("make model fetches it")
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "What is 3 * 4?"}, {"role": "assistant", "content": "calculator(3 * 4)"}]
    for text in ("result: 12", " two\nlines ", "", "<b>"):
        ids = encode(tokenizer, {"messages": chat[:1], "prefix": ""})
        turn = tokenizer.encode(chat[1]["content"], add_special_tokens=False)
        ids += [*turn, tokenizer.eos_token_id, *encode_reply(tokenizer, text)]
        whole = [*chat, {"role": "user", "content": text}]
        assert ids == encode(tokenizer, {"messages": whole, "prefix": ""}), text


def test_a_template_without_a_place_for_replies_is_refused():
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="no place for a reply: behind the model's turn it has 'THIRD'"):
        encode_reply(tokenizer, "more")


@pytest.fixture(scope="module")
def two_steps(talk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns") / "run"
    flags = small(folder, task=talk, save_every=1, eval_every=2, max_response_tokens=120, dtype="float32")
    return folder, run("grpo_multi_turn.py", *flags)


@pytest.mark.slow
def test_a_run_shows_turns_and_replies_apart(two_steps):
    folder, done = two_steps
    for row in metrics(folder):
        assert 1 < row["turns"] < 3 and 0 < row["tool_rate"] < 1 and row["sampler_gap"] < 1e-4
    assert "turns" in done.stdout and "  → Why?" in done.stdout
    for name in ("samples.jsonl", "test_samples.jsonl"):
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert any(row["replies"] for row in rows)
        for row in rows:
            assert row["response"] == row["turns"][-1] and set(row["replies"]) <= {"Why?"}
    kept = json.loads((folder / "tokens.json").read_text())["responses"]
    for one in kept:
        lengths = {len(one[name]) for name in ("tokens", "is_own", "old_logp", "new_logp", "advantages")}
        assert len(lengths) == 1 and one["is_own"][0] and one["is_own"][-1]
        assert all(own or not logp for own, logp in zip(one["is_own"], one["new_logp"]))
    assert any("Why" in "".join(one["tokens"]) for one in kept)


@pytest.mark.slow
def test_processes_whose_conversations_differ_in_length_make_the_same_first_update(two_steps, talk, tmp_path):
    """One prompt's conversations are in one process. The sampler's rounding depends on its batch (test_runs.py)."""
    flags = small(tmp_path / "run", task=talk, steps=1, eval_size=2, max_response_tokens=120, dtype="float32")
    run("grpo_multi_turn.py", *flags, processes=2)
    one, two = metrics(two_steps[0])[0], metrics(tmp_path / "run")[0]
    for key in ("turns", "tokens", "reward", "grad_norm", "entropy"):
        assert two[key] == pytest.approx(one[key], rel=0.1), key


def test_every_turn_of_every_row_has_a_seed_of_its_own(monkeypatch):
    """Otherwise equal conversations of a group would stay equal, and the group would teach nothing."""
    seeds = []

    def generate(prompts, params, **more):
        seeds.extend(of_prompt.seed for of_prompt in params)
        return [SimpleNamespace(outputs=[answer(text="8") for _ in range(of_prompt.n)]) for of_prompt in params]

    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    llm = SimpleNamespace(generate=generate, get_tokenizer=lambda: tokenizer)
    monkeypatch.setattr(grpo_multi_turn.sampler, "empty_prefix_cache", lambda llm: None)
    monkeypatch.setattr(grpo_multi_turn, "decode", lambda tokenizer, responses: ["8"] * len(responses))
    problems = [{"id": i, "answer": 9, "prompt_ids": [5 + i]} for i in range(2)]
    args = arguments(grpo_multi_turn, model=str(KK_TINY), max_turns=3)
    for step in (1, 2):
        found = grpo_multi_turn.converse(llm, guess, problems, step, args, n=4, temperature=1.0)
        assert [len(one.turns) for one in found] == [3] * 8 and {one.replies[0] for one in found} == {"higher"}
    assert len(seeds) == 2 * (2 + 8 + 8) == len(set(seeds))


def test_the_turns_of_a_conversation_by_value(monkeypatch):
    """Two rows of one problem, turns of two tokens. The second row's first turn is cut off. What vLLM is allowed, what
    the task sees, what the template writes between turns, and which tokens are the model's."""
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    end = tokenizer.eos_token
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }}" + end + "{% endfor %}{{ mark }}"
    between = tokenizer.encode(f"Why?{end}go on", add_special_tokens=False)
    allowed, seen = [], []

    def generate(prompts, params, **more):
        allowed.append([one.max_tokens for one in params])
        rows = [answer(2, finish_reason="length" if row == 1 else "stop") for row in range(sum(p.n for p in params))]
        return [SimpleNamespace(outputs=rows)]

    def decode(tokenizer, responses):
        return [f"turn {len(allowed)}"] * len(responses)

    def reply(turns, problem):
        seen.append(list(turns))
        return "Why?" if len(turns) < 3 else None

    llm = SimpleNamespace(generate=generate, get_tokenizer=lambda: tokenizer)
    monkeypatch.setattr(grpo_multi_turn.sampler, "empty_prefix_cache", lambda llm: None)
    monkeypatch.setattr(grpo_multi_turn, "decode", decode)
    options = {"max_turns": 5, "max_response_tokens": 100, "template_options": '{"mark": "go on"}'}
    args = arguments(grpo_multi_turn, model=str(KK_TINY), **options)
    task = SimpleNamespace(reply=reply)
    whole, cut = grpo_multi_turn.converse(llm, task, [{"id": 0, "answer": 9, "prompt_ids": [5]}], 1, args, n=2)
    used = 2 + len(between)
    assert allowed == [[100], [100 - used], [100 - 2 * used]]
    assert seen == [["turn 1"], ["turn 1", "turn 2"], ["turn 1", "turn 2", "turn 3"]]
    assert whole.ids == [5, 5, *between, 5, 5, *between, 5, 5] and whole.token_ids == [5] * 6
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length") and cut.turns == ["turn 1"]


def test_a_conversation_that_runs_out_of_turns_or_tokens_is_truncated():
    """By hand: add_replies to conversations whose last turn has ended."""
    tokenizer = AutoTokenizer.from_pretrained(KK_TINY)
    reply_ids = encode_reply(tokenizer, "error: the calculator takes one operation: calculator(2 + 3)")
    cases = [  # (turns allowed, tokens allowed, how the turn ended, whether it goes on, how the conversation ended)
        (2, 5 + len(reply_ids) + 1, "stop", True, "stop"),
        (1, 5 + len(reply_ids) + 1, "stop", False, "length"),
        (2, 5 + len(reply_ids), "stop", False, "length"),
        (2, 500, "length", False, "length"),
    ]
    for max_turns, max_tokens, finish, goes_on, ended in cases:
        args = grpo_multi_turn.Args(max_turns=max_turns, max_response_tokens=max_tokens)
        problem = {"answer": "6", "prompt_ids": [1]}
        one = grpo_multi_turn.Conversation(problem, 0, tools.Side(calculator, problem, 0))
        one.turns, one.ids, one.finish_reason = ["calculator(2 * 3 + 1)"], [7] * 5, finish
        assert grpo_multi_turn.add_replies([one], calculator, tokenizer, args) == [one] * goes_on
        assert one.finish_reason == ended and (len(one.ids) > 5) == goes_on


# -------------------------------------------------------------------------------------------------------------- tasks

USAGE = "error: the calculator takes one operation: calculator(2 + 3)"
CALLS = {
    "calculator(31 * 24)": "result: 744",
    "I ask: calculator( -3 - 12 )\n": "result: -15",
    "calculator(7+8)": "result: 15",
    **dict.fromkeys(["calculator(7 + 8", "calculator(7 + 8) is 15", "The answer is 15.", ""]),  # no reply
    **dict.fromkeys(["calculator()", "calculator(2 * 3 + 1)", "calculator(2 ** 9999999)"], USAGE),
    f"calculator({'9' * 13} * 2)": USAGE,
}
ANSWERS = {  # a turn: whether it is correct, and whether it has an answer
    "The answer is 1116.": (True, True),
    "31 * 36 = 1,116": (True, True),
    "1116 or 1117": (False, True),
    "calculator(0 + 1116)": (False, False),
    "-1116": (False, True),
    "none": (False, False),
    "": (False, False),
}


def test_what_the_calculator_replies_and_that_the_answer_is_the_last_number_and_no_call():
    for turn, reply in CALLS.items():
        assert calculator.reply(["calculator(1 + 1)", turn], {}) == reply, turn
    for turn, (correct, has_answer) in ANSWERS.items():
        found = calculator.score(turn, "1116")
        assert (found["reward"], found["correct"], found["format"]) == (float(correct), correct, has_answer), turn


def test_the_calculators_problems_can_be_solved_with_it_and_none_is_in_both_splits():
    seen = {}
    for split in ("train", "test"):
        problems = calculator.load(None, split, size=60, seed=split == "test", operations="1-3")
        seen[split] = {problem["messages"][-1]["content"] for problem in problems}
        assert {problem["category"] for problem in problems} == {"1", "2", "3"}
        for problem in problems:
            question = problem["messages"][-1]["content"]
            assert str(eval(question.removeprefix("What is ").removesuffix("?"))) == problem["answer"]
    assert not seen["train"] & seen["test"]
    for question, turns in calculator.EXAMPLES.values():  # the prompt's examples are what the calculator says
        for call, said in zip(turns[:-1:2], turns[1::2]):
            assert calculator.reply([call], {}) == said
        answer = str(eval(question.removeprefix("What is ").removesuffix("?")))
        assert calculator.score(turns[-1], answer)["correct"]


def play(number, choose):
    """The turns of a game in which choose(low, high) guesses."""
    low, high, turns = 1, guess.HIGHEST, []
    while True:
        turns.append(str(choose(low, high)))
        said = guess.reply(turns, {"answer": number})
        if said is None:
            return turns
        low, high = (int(turns[-1]) + 1, high) if said == "higher" else (low, int(turns[-1]) - 1)


def test_halving_wins_every_game_and_counting_up_a_third():
    halving = [play(n, lambda low, high: (low + high) // 2) for n in range(1, 16)]
    counting = [play(n, lambda low, high: low) for n in range(1, 16)]
    for games, wins, longest in ((halving, 15, 4), (counting, 5, 5)):
        assert sum(guess.score_conversation(turns, n)["correct"] for n, turns in enumerate(games, 1)) == wins
        assert max(map(len, games)) == longest


def test_the_reward_of_a_game():
    """For winning, and for the bits that each guess reveals on average."""
    for turns, number, won, chances in (  # of each turn: the chance of every reply, over the numbers that are left
        (["8"], 8, 1.0, [[7, 1, 7]]),
        (["8", "4", "6"], 6, 0.8, [[7, 1, 7], [3, 1, 3], [1, 1, 1]]),
        (["8", "12", "6"], 6, 0.8, [[7, 1, 7], [1], [5, 1, 1]]),
        (["8", "4", "2", "1", "3"], 5, 0.0, [[7, 1, 7], [3, 1, 3], [1], [1], [1]]),
        (["I guess 8"], 8, 0.0, [[1]]),
        (["8", ""], 3, 0.0, [[7, 1, 7], [1]]),
        (["15", "14", "13", "12", "11"], 10, 0.0, [[14, 1], [13, 1], [12, 1], [11, 1], [10, 1]]),
        (["100", "0"], 3, 0.0, [[1], [1]]),
    ):
        bits = 2 * sum(-n / sum(of) * math.log2(n / sum(of)) for of in chances for n in of) / math.log2(15)
        found = guess.score_conversation(turns, number)
        assert parts_of([found], "guess")[0] == pytest.approx([won, bits]) and found["correct"] == (won > 0)
        assert found["reward"] == pytest.approx(won + bits)
        assert scores_of(guess, [turns], [number]) == [found]


def halving_after(first):
    return lambda low, high: first if (low, high) == (1, guess.HIGHEST) else (low + high) // 2


def test_on_average_a_won_game_earns_all_bits_however_it_is_played():
    for first in (8, 5):
        games = [guess.score_conversation(play(n, halving_after(first)), n) for n in range(1, 16)]
        assert all(one["correct"] for one in games)
        assert sum(sum(one["parts"]["bits"]) for one in games) / 15 == pytest.approx(2)


def test_a_maze_by_hand():
    """A closed square east of the start; the shortest way goes around it. Another start has no way."""
    walls = [(2, 1), (3, 3), (4, 3)]
    answer = {"start": [1, 1], "walls": walls, "shortest": maze.shortest((1, 1), walls)}
    assert answer["shortest"] == 6 and maze.shortest((1, 1), [(2, 1), (1, 2)]) is None
    problem = {"answer": answer}
    turns = ["east", "south", "South.", "south", "east", "east", "east"]
    said = [maze.reply(turns[: k + 1], problem) for k in range(7)]
    assert said == ["wall, at 1,1", "at 1,2", "at 1,3", "at 1,4", "at 2,4", "at 3,4", None]
    assert [maze.state(turns[:k], problem) for k in range(4)] == [(1, 1), (1, 1), (1, 2), (1, 3)]
    found = maze.score_conversation(turns, answer)
    assert found == {"reward": 6 / 7, "correct": True, "format": True}
    assert maze.reply(["north-east"], problem) is None and not maze.score("north-east", answer)["format"]
    around = ["south", "north"] * 5
    assert maze.reply(around[:9], problem) and maze.reply(around, problem) is None
    assert maze.score_conversation(around, answer)["reward"] == 0


def test_every_maze_has_a_way_and_no_walls_are_in_both_splits():
    walls = {}
    for split in ("train", "test"):
        problems = maze.load(None, split, size=60, seed=split == "test")
        walls[split] = {str(problem["answer"]["walls"]) for problem in problems}
        for problem in problems:
            start = problem["answer"]["start"]
            assert problem["messages"][-1]["content"].endswith(f"at {start[0]},{start[1]}")
            assert maze.GOAL not in problem["answer"]["walls"] and start not in problem["answer"]["walls"]
            ways = {start}  # all squares that can be reached in so many moves
            for _ in range(problem["answer"]["shortest"]):
                assert maze.GOAL not in ways
                ways = {maze.moved(square, move, problem["answer"]["walls"]) for square in ways for move in maze.MOVES}
            assert maze.GOAL in ways
    assert not walls["train"] & walls["test"]
    shown = {"answer": {"start": [1, 1], "walls": [(2, 1)], "shortest": 6}}  # the prompt's walk is what the maze says
    said = [maze.reply(maze.WALK[1 : k + 1 : 2], shown) for k in (1, 3, 5)]
    assert said[:2] == maze.WALK[2:5:2] and maze.WALK[6].startswith(said[2])


def test_what_the_two_tools_of_facts_reply():
    for turn, reply in {
        "search(lamp)": "result: a lamp costs 64",
        "I search: search( Lamps )\n": "result: a lamp costs 64",
        "search(moon)": "error: nothing is known about 'moon'",
        "search()": "error: nothing is known about ''",
        "calculator(3 * 64 + 35)": "result: 227",
        "calculator(2+3*4)": "result: 14",
        "calculator(2 ** 9999999)": "error: the calculator takes numbers with + and *: calculator(2 * 11 + 32)",
        "calculator(5)": "error: the calculator takes numbers with + and *: calculator(2 * 11 + 32)",
        **dict.fromkeys(["search(lamp) is 64", "search(lamp", "They cost 227.", ""]),  # no call
    }.items():
        assert facts.reply(["search(rug)", turn], {}) == reply, turn


def test_the_reward_of_a_conversation_with_two_tools_by_hand():
    answer = {"value": 227, "needs": ["lamp", "chair", "calculator"]}
    right = ["search(lamp)", "search(chair)", "calculator(3 * 64 + 35)", "The answer is 227."]
    third = 0.5 / 3
    for turns, of_turns, correct in (
        (right, [third, third, third, 1.0], True),
        (["search(chair)", "search(chair)", "They cost 227"], [third, -0.1, 1.0], True),  # a guess, or by heart
        (["search(moon)", "calculator(1)", "search(rug)", "None."], [-0.1, -0.1, -0.1, 0.0], False),
        (["search(lamp)", "calculator(0 + 227)"], [third, -0.1], False),  # one price is missing; a call is no answer
        ([""], [0.0], False),
    ):
        found = facts.score_conversation(turns, answer)
        assert turn_rewards(found, len(turns)) == pytest.approx(of_turns) and found["correct"] == correct
        assert found["reward"] == pytest.approx(sum(of_turns))
    problem = {"messages": [{"content": "How much?"}]}
    assert facts.state([right[1], right[0]], problem) == facts.state(right[:2], problem)
    assert len({facts.state(right[:k], problem) for k in range(4)}) == 4


def test_the_questions_of_facts_can_be_answered_and_none_is_in_both_splits():
    seen = {}
    for split in ("train", "test"):
        problems = facts.load(None, split, size=60, seed=split == "test")
        seen[split] = {problem["messages"][-1]["content"] for problem in problems if problem["category"] == "two"}
        assert {problem["category"] for problem in problems} == {"one", "two"}
        for problem in problems:
            words = problem["messages"][-1]["content"].removesuffix("?").split()
            count = facts.COUNTS.get(words[3], 1)
            prices = [facts.PRICES[word.removesuffix("s")] for word in words if word.removesuffix("s") in facts.PRICES]
            assert problem["answer"]["value"] == count * prices[0] + sum(prices[1:])
            assert not set(facts.SHOWN) & set(problem["answer"]["needs"])
    assert not seen["train"] & seen["test"]
    for _, *turns in facts.EXAMPLES:  # the prompt's examples are what the tools say
        assert [facts.reply([call], {}) for call in turns[:-1:2]] == turns[1::2]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def reply(turns, problem): return 5",
            r"on '': TypeError: it must give a string or None, and gave 5",
        ),
        ("def reply(turns, problem): return problem['x']", r"reply\(\) fails in line 12 on '': KeyError"),
    ],
)
def test_a_reply_that_is_none_is_refused_before_anything_loads(code, message, tmp_path):
    path = tmp_path / "task.py"
    path.write_text(TALK + code + "\n")
    task = own.read_file(str(path))
    with pytest.raises(ValueError, match=message):
        own.check(str(path), task, own.load(str(path), task, None, "test", 4, 0), [(None, "test", 4, 0)], 60.0)
    sys.modules.pop(task.__name__)
