"""What the tests share: a tiny random model with a real tokenizer, and a way to run a trainer as a user does."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import prepared
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).parents[1]
KK_TINY = ROOT / "models" / "kk_tiny"
SMOLLM = ROOT / "models" / "SmolLM2-135M-Instruct"
DATA = ROOT.parent / "shared" / "data"  # the papers' data, where they are at hand
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # the tiny model is so small that a second thread only waits, and long where cores are shared
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Each of pytest's processes, with all the runs that it starts, keeps to its own cores: threads that wait for one
    # another in a loop take the other process's time.
    share = slice(int(worker[2:]), None, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[share] or [0])

# What runs longest is begun first, or one of pytest's processes would end alone.
LONGEST = """test_dapo test_every_script test_runs test_async test_evaluate test_course test_algorithms test_invariances
    test_gpu_path test_math test_tools test_lab test_site""".split()


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.module.__name__, len(LONGEST)))


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder):
    """Writes a Llama of 0.1 M parameters with a byte-level BPE tokenizer trained on puzzles; it loads in no time.

    A few seconds of learning by heart have taught it to write tags, often in the right order: so its responses differ
    in reward, and its probabilities spread from low to high.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    from rewards import kk
    from runtime.chats import encode

    texts = [message["content"] for puzzle in kk.generate(40, seed=1) for message in puzzle["messages"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    # What it learns to write: half the responses have all tags, half lack one.
    texts = ["so</think><answer>a knight</answer>", "hm</think>a knave</answer>"]
    prompts = [encode(fast, puzzle) for puzzle in kk.generate(6, "2-3", seed=2)]
    rows = [(prompt, [*fast.encode(text), 1]) for prompt in prompts for text in texts]
    learn_by_heart(model, rows, lr=3e-3, steps=100)
    model.generation_config.eos_token_id = 1
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def learn_by_heart(model, rows, lr, steps, max_grad_norm=float("inf"), enough=0.0):
    """Trains a model on rows of (prompt, response), each a list of tokens, until its loss is below enough.

    Gives the last loss. A response ends with the end token, which is also the padding.
    """
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = torch.full((len(rows), longest), rows[0][1][-1])
    labels = torch.full((len(rows), longest), -100)
    for i, (prompt, response) in enumerate(rows):
        ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels[i, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=labels).loss
        if loss < enough:
            break
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder, which pytest's processes share: one of them makes it."""
    folder = tmp_path_factory.getbasetemp()
    if worker:
        folder = folder.parent
    with FileLock(folder / "tiny_model.lock"):
        if not (folder / "tiny_model").exists():
            make_tiny_model(folder / "half").rename(folder / "tiny_model")
    return folder / "tiny_model"


def python(*words, **options):
    """Runs `python WORDS` from the repository's root; returns the finished process with its output."""
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600} | options
    return subprocess.run([sys.executable, *map(str, words)], **options)


def run(script, *flags, processes=1, check=True, timeout=1200, env=None, machines=1):
    """Runs a trainer like a user, from the repository's root; returns the finished process with its output."""
    done = prepared.run([script, *flags], processes, timeout, env, machines=machines)
    if check and done.returncode:
        raise AssertionError(f"{script} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done


def row_of_puzzle(item):
    """A generated puzzle of knights and knaves, as a file has it."""
    row = {"quiz": item["quiz"], "names": item["names"], "solution": list(item["answer"].values())}
    return row | {"statements": repr(item["statements"])}


@cache
def puzzles():
    """A file of 60 puzzles of 2 and 3 people. Reading it takes no time, and generating 4500 takes seconds."""
    from rewards import kk

    rows = [row_of_puzzle(item) for item in kk.generate(60, "2-3", seed=3)]
    return write_rows(Path(tempfile.mkdtemp(prefix="puzzles"), "train.jsonl"), rows)


def small(run_dir, **changes):
    """Flags of a run that takes seconds: of kk_tiny, whose hasty solutions fit in 48 tokens and no others."""
    flags = {
        "model": KK_TINY, "run_dir": run_dir, "steps": 2, "prompts_per_step": 4, "responses_per_prompt": 4,
        "max_response_tokens": 48, "eval_size": 4, "kv_cache_gb": 0.1, "micro_batch_tokens": 2000,
    }  # fmt: skip
    if "task" not in changes:
        flags["data"] = puzzles()
    return [word for key, value in (flags | changes).items() for word in (f"--{key}", str(value))]


def metrics(run_dir):
    """The rows of metrics.jsonl that belong to training steps."""
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward" in row]


def timeless(row):
    """A row without what can't repeat: times, rates and memory."""
    left_out = ("tokens_per_s", "peak_memory_gb")
    return {key: value for key, value in row.items() if not key.startswith("time/") and key not in left_out}


@pytest.fixture(scope="session")
def tokenizer():
    """kk_tiny's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(KK_TINY)


@pytest.fixture(scope="module")
def on_the_cpu():
    """Also where there is a GPU: what is compared to the last digits is compared on one kind of machine."""
    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            if isinstance(names.get("DEVICE"), torch.device):
                patch.setattr(module, "DEVICE", torch.device("cpu"))
                if "ON_GPU" in names:
                    patch.setattr(module, "ON_GPU", False)
        yield


@pytest.fixture(scope="module")
def batch(tiny_model):
    """Responses of the tiny model, with all that an update of grpo.py reads."""
    from helpers import make_batch

    return make_batch(tiny_model)


def write_rows(path, rows):
    """Writes Parquet, a JSON object in each line, or a JSON list, as the path's suffix says. Gives the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


def parse(trainer, *words):
    """The settings that a command line gives."""
    from runtime import flags

    return flags.read(list(words), trainer.Args, trainer.TASKS)[0]


def check_linear_time(function, text_of):
    """Twice the text takes less than 2.6 times as long, on any processor; what grows with its square takes 4 times.

    text_of: gives a text for a size. Half a millisecond is left for what does not grow. A busy machine gets
    three tries.
    """

    def seconds(size):
        times = []
        for _ in range(5):
            text, start = text_of(size), time.process_time()
            function(text)
            times.append(time.process_time() - start)
        return min(times)

    for _ in range(3):
        once, twice = seconds(500), seconds(1000)
        if twice < 2.6 * once + 5e-4:
            return
    raise AssertionError(f"{once:.6f} s, and {twice:.6f} s for twice the text")


def answer(num_tokens=1, text="", finish_reason="stop"):
    """A response as vLLM gives it, and generate with its text."""
    logprobs = SimpleNamespace(logprobs=[-1.0] * num_tokens)
    return SimpleNamespace(token_ids=[5] * num_tokens, logprobs=logprobs, text=text, finish_reason=finish_reason)


def step_of_main(trainer, args, batch, rewards, monkeypatch, calls=None):
    """One step of a trainer's main: (the metrics that it writes, the batch that it gives to update).

    batch: what the sampler gives (ids, mask, sampler_logp), and what forward passes would give of the policy (old_logp,
    entropy) and of the reference (ref_logp). rewards: those of the task. Nothing is loaded, sampled or trained. calls:
    a list, which gets the names of what main calls, in order.
    """
    calls = [] if calls is None else calls
    written, given, models = [], [], []
    problems = [{"id": 0, "category": "2"} for _ in rewards]
    responses = [answer(num_tokens) for num_tokens in batch["mask"].sum(1).tolist()]
    for response in responses if hasattr(trainer, "Conversation") else []:  # conversations of one turn
        response.turns, response.replies = [response.text], []
        response.side = SimpleNamespace(num_calls=0, num_errors=0)
    scores = [{"reward": float(reward), "correct": reward > 0, "format": True, "turns": []} for reward in rewards]
    for one, num_tokens in zip(scores, batch["mask"].sum(1).tolist()):
        one["turns"] = [(0, "start", num_tokens)]
    sampled = {key: batch[key] for key in ("ids", "mask", "sampler_logp")}

    def named(name, result=None):
        """What stands in for a function of this name."""

        def call(*arguments, **_):
            has_critic = type(arguments[-1]) is tuple  # ppo.py: the value model and its optimizer
            calls.append(f"{name} with critic" if has_critic else name)
            return result

        return call

    def load_policy(args, trained, kind=None):  # kind: of ppo.py
        models.append(torch.nn.Linear(2, 1))
        return models[-1]

    def log_probs(model, sampled, args, with_entropy=True):
        calls.append("policy" if model is models[0] else "reference")
        return (batch["old_logp"], batch["entropy"]) if model is models[0] else (batch["ref_logp"], None)

    def hinted_log_probs(*_):
        return batch["ref_logp"], (batch["ref_logp"] != batch["old_logp"]).any(1, keepdim=True)

    def update(policy, optimizer, to_update, step, args):
        calls.append("update")
        given.append(dict(to_update))
        to_update.update(old_logp=batch["old_logp"], entropy=batch["entropy"])  # as reinforce.py's does
        return {}

    files = ("open", "begin_step", "write_tokens", "write_samples", "close", "check_sync")
    files = {name: named(name) for name in files}
    run = SimpleNamespace(write=written.append, interrupted=lambda: False, **files)
    begun = (dataclasses.replace(args, steps=1), run, None, None, problems, [])
    stand_ins = {
        "load_sampler": lambda args: None, "load_policy": load_policy, "log_probs": log_probs, "update": update,
        "sync_weights": named("sync"), "evaluate": named("evaluate", {}), "score": lambda *_: scores,
        "next_problems": lambda *_: (problems, 0), "sample": named("sample", (sampled, responses)),
    }  # fmt: skip
    with monkeypatch.context() as patch:
        for name, stand_in in stand_ins.items():
            patch.setattr(trainer, name, stand_in)
        patch.setattr(trainer, "snapshot", lambda *_: None, raising=False)  # of those with a --lag
        patch.setattr(trainer, "check_sampler", named("check"), raising=False)  # grpo_async.py's
        patch.setattr(trainer, "hinted_log_probs", hinted_log_probs, raising=False)  # sdpo.py's
        for name in ("check_same", "compare"):
            patch.setattr(trainer.models, name, named("check"))
        patch.setattr(trainer.records, "begin", lambda *_: begun)
        for name, result in (("load", (0, 0)), ("save", None)):
            patch.setattr(trainer.checkpoints, name, named(name, result))
        patch.setattr(trainer.distributed, "end", lambda: calls.append("end"))
        for name in ("sleep", "fingerprint"):
            patch.setattr(trainer.sampler, name, lambda llm: None)
        trainer.main()
    return written[-1], given[0]


WORKER = """
import sys
from pathlib import Path
sys.path[:0] = {paths}
from runtime import distributed
from {module} import {function}
{function}(Path(sys.argv[1]))
distributed.end()
"""


def run_together(function, folder, processes=2, machines=1):
    """A test module's function(folder), in processes that can be connected as torchrun does it, without a GPU."""
    worker = Path(folder, "worker.py")
    paths = [str(ROOT), str(ROOT / "tests")]
    worker.write_text(WORKER.format(paths=paths, module=function.__module__, function=function.__name__))
    run(worker, folder, processes=processes, machines=machines, timeout=900, env={"CUDA_VISIBLE_DEVICES": ""})


# What every step's metrics have.
KEYS = """step reward reward_std accuracy format_rate response_tokens truncated_rate zero_std_rate entropy grad_norm
    sampler_gap weights_changed optimizer_steps tokens time/sample time/score time/logprob time/train time/sync
    time/step tokens_per_s peak_memory_gb""".split()


def data_of(folder):
    """{task: flags that name its files}."""
    math, countdown, hitab = folder / "math.json", folder / "countdown.json", folder / "hitab.json"
    math.write_text(json.dumps([{"problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(30)]))
    countdown.write_text(json.dumps([{"nums": [i, i + 1, 50], "target": 51 - 2 * i} for i in range(1, 20)]))
    table = {"texts": [["", "n"], ["all", "5"]], "top_header_rows_num": 1, "left_header_columns_num": 1}
    hitab.write_text(json.dumps([{"question": f"What is n + {i}?", "answer": 5 + i, "table": table} for i in range(9)]))
    return {"math": {"data": math, "test_data": math}, "countdown": {"data": countdown},
            "hitab": {"data": hitab, "test_data": hitab}}  # fmt: skip


def until(happens, seconds=120):
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.1)


def task_settings(task, data, **changes):
    fixed = {"task": task, "data": "", "test_data": "", "people": "2-3", "numbers": "3-4", "chat_template": "auto"}
    sizes = {"eval_size": 5, "max_prompt_tokens": 600, "seed": 0, "has_sampler": True, "score_timeout": 60.0}
    return SimpleNamespace(**fixed | sizes | data[task] | changes)


# What tasks with rewards of 0 and 1 give.
RIGHT = {"reward": 1.0, "correct": True, "format": True, "timed_out": False}
WRONG = {"reward": 0.0, "correct": False, "format": True, "timed_out": False}
MALFORMED = {"reward": 0.0, "correct": False, "format": False, "timed_out": False}

# A task with replies.
TALK = """
from rewards import kk

def load(source, split, *, size=None, seed=0):
    return kk.load(source, split, people="2", size=size or 60, seed=seed)

def reply(turns, problem):
    return "Why?" if len(turns[-1]) % 3 and len(turns) < 3 else None

def score(response, answer):
    return {**kk.score(response, answer), "reward": float(len(response) % 7)}
"""


def read_claim(text, names):
    """The statement of a puzzle's sentence, or of a worked solution's, read without the tables that they are from."""
    text = text.strip()
    if leaf := re.fullmatch(r"(\w+) (?:is )?(not )?(?:a )?(knight|knave)", text):
        claim = ("telling-truth" if leaf[3] == "knight" else "lying", names.index(leaf[1]))
        return ("not", claim) if leaf[2] else claim
    inner = re.findall(r"\(([^()]*)\)", text)  # is read on its own
    flat = re.sub(r"\([^()]*\)", "@", text)
    shapes = [
        ("and", r"both of these hold: (.+), and (.+)"),
        ("or", r"(.+), or (.+), or both"),
        ("<=>", r"(.+) (?:if and only if|exactly when|iff) (.+)"),
        ("->", r"if (.+) then (.+)|(.+) only if (.+)"),
        ("and", r"(.+) and (.+)"),
        ("or", r"(.+) or (.+)"),
    ]
    for op, shape in shapes:
        if match := re.fullmatch(shape, flat, re.IGNORECASE):
            parts = [inner.pop(0) if part == "@" else part for part in match.groups() if part]
            return (op, *(read_claim(part, names) for part in parts))
    raise AssertionError(f"cannot read {text!r}")
