"""Whole runs, as a user starts them: real vLLM, real torch, on the CPU."""

import importlib
import json
import os
import re
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import prepared
import pytest
import torch
from conftest import (
    DATA,
    KEYS,
    KK_TINY,
    ROOT,
    SMOLLM,
    make_tiny_model,
    metrics,
    puzzles,
    python,
    run,
    small,
)
from safetensors.torch import load_file
from transformers import Qwen2Config

from runtime import flags, processes
from tools import family

bit_for_bit = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU sums may be added up in another order")
PACE = {"lr": 5e-4, "prompts_per_step": 8}  # of the runs that are compared: fast enough to see the tiny model learn


def weights(run_dir, step):
    return load_file(Path(run_dir, f"checkpoints/step_{step:06d}/model.safetensors"))


@pytest.fixture(scope="session")
def four_steps(tmp_path_factory):
    """A run of grpo.py over four steps, without interruption."""
    run_dir = tmp_path_factory.mktemp("four_steps") / "run"
    finished = run("grpo.py", *small(run_dir, steps=4, save_every=2, **PACE))
    return run_dir, finished


def test_a_run_leaves_everything_it_promises(four_steps):
    run_dir, finished = four_steps
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert not [key for key in (*KEYS, "kl", "clip_rate") if row.get(key) is None]
        parts = sorted(row[key] for key in ("accuracy_2", "accuracy_3") if key in row)  # by number of people
        assert parts[0] <= row["accuracy"] <= parts[-1]
    everything = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["step"] for row in everything if {"eval/accuracy", "eval/accuracy_2"} <= row.keys()]
    assert evaluated == [0, 4]  # before the first step and after the last
    args = json.loads((run_dir / "args.json").read_text())
    config = json.loads((run_dir / "checkpoints/step_000004/config.json").read_text())
    assert args["lr"] == PACE["lr"] and args["dtype"] == config["dtype"]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {"prompt", "response", "answer", "reward", "correct", "format"} <= samples[0].keys()
    assert {sample["step"] for sample in samples} == {1, 2, 3, 4}
    assert list((run_dir / "tensorboard").glob("events*"))
    assert (run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((run_dir / "run.json").read_text())["script"] == "grpo"
    assert "test accuracy" in finished.stdout and "0.9 M parameters" in finished.stdout


def test_training_raises_the_reward(four_steps):
    """Only hasty solutions are done within 48 tokens, and what is done earns more than −3: it learns to be hasty."""
    first, *rewards = [row["reward"] for row in metrics(four_steps[0])]
    assert sum(rewards) / len(rewards) > first + 0.2, (first, rewards)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes need two GPUs, or none")
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_do_the_same_first_step_and_go_on_as_one(four_steps, torchrun, tmp_path):
    """Same prompts and seeds. The sampler's rounding depends on its batch, so that a token may rarely differ."""
    run("grpo.py", *small(tmp_path / "run", steps=2, **PACE), processes=2, torchrun=torchrun)
    one, two = metrics(four_steps[0])[0], metrics(tmp_path / "run")[0]
    for key in ("reward", "reward_std", "format_rate", "zero_std_rate", "truncated_rate"):
        assert two[key] == pytest.approx(one[key], abs=0.2), key
    for key in ("entropy", "response_tokens", "tokens", "grad_norm"):
        assert two[key] == pytest.approx(one[key], rel=0.1), key
    assert two["kl"] == 0 and two["weights_changed"] > 0
    first = [(folder / "samples.jsonl").read_text().splitlines()[0] for folder in (tmp_path / "run", four_steps[0])]
    assert json.loads(first[0])["prompt"] == json.loads(first[1])["prompt"]
    tested = [(folder / "test_samples.jsonl").read_text() for folder in (tmp_path / "run", four_steps[0])]
    ids = [[json.loads(line)["id"] for line in text.splitlines()] for text in tested]
    assert ids[0] == ids[1][: len(ids[0])] and {0, 1} <= {*ids[0]}  # of all processes, in order


def wait_for(condition, process, log, seconds=600):
    deadline = time.time() + seconds
    while not condition():
        assert process.exitcode is None and time.time() < deadline, log.read_text()[-3000:]
        time.sleep(0.005)


def test_a_kill_in_a_save_leaves_the_last_good_checkpoint_and_a_signal_in_a_save_acts_after_it(tmp_path):
    """The run that is killed is resumed, and gets SIGTERM in its first save: twice at once, as torchrun hands on a
    Ctrl-C that the terminal has already sent to everyone."""
    log, folder = tmp_path / "log", tmp_path / "run" / "checkpoints"
    flags = small(tmp_path / "run", steps=100_000, save_every=1, keep_checkpoints=1000)
    process = prepared.start(["grpo.py", *flags], log, log)
    wait_for(lambda: len(list(folder.glob("step_??????"))) == 2, process, log)
    wait_for(lambda: list(folder.glob("*.tmp")), process, log)
    process.kill()
    process.join()
    (unfinished,) = folder.glob("*.tmp")
    unfinished.rename(folder / "step_999999.tmp")  # not to be taken for that of the next process
    last = int(max(folder.glob("step_??????")).name[-6:])

    process = prepared.start(["grpo.py", "--resume", tmp_path / "run"], log, log)
    wait_for(lambda: list(folder.glob(f"step_{last + 1:06d}.tmp")), process, log)
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
    process.join(300)
    output = log.read_text()
    assert process.exitcode == 0 and f"stopped by SIGTERM after step {last + 1}:" in output, output[-3000:]
    assert f"--resume {tmp_path / 'run'}" in output and not list(folder.glob("*.tmp"))
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, last + 2))
    assert max(folder.iterdir()).name == f"step_{last + 1:06d}"


def test_a_run_whose_output_has_no_reader_ends_with_a_checkpoint_and_a_line_in_its_folder(tmp_path):
    """As with `| head`."""
    pipe, log, folder = tmp_path / "pipe", tmp_path / "log", tmp_path / "run"
    os.mkfifo(pipe)
    process = prepared.start(["grpo.py", *small(folder, steps=100_000, save_every=1000)], pipe, log)
    with open(pipe) as reader:
        assert any("tok/s" in line for line in reader), log.read_text()[-3000:]
    process.join(300)
    assert process.exitcode == 0, log.read_text()[-3000:]
    ended = re.match(
        rf"stopped by a broken standard output after step (\d+): {folder}\n", (folder / "ended.txt").read_text()
    )
    assert (folder / "checkpoints" / f"step_{int(ended[1]):06d}" / "trainer_state.json").exists()
    assert "a broken standard output: the run ends after this step" in log.read_text()


# A sync that changes nothing moved such a model's log-probabilities by 9 nats on an AMD EPYC without AVX-512. Trainers
# end with their message on sampler_gap there.
needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2",
    reason="vLLM 0.32 computes layers with biases wrongly after a reload on a processor without AVX-512",
)


@bit_for_bit
@pytest.mark.parametrize(
    "kind", ["kk_tiny", pytest.param("untied", marks=pytest.mark.slow), pytest.param("qwen2", marks=needs_avx512)]
)
def test_after_a_sync_the_sampler_is_a_fresh_engine_of_the_same_weights(kind, tmp_path):
    """Ids and log-probabilities, to the last bit: weights are changed, handed over and saved; a new process loads.

    And the log-probabilities are the policy's. Qwen2, the default's kind on a GPU, has biases, which vLLM loads apart
    from the weights. The model is small, so its sampler has one thread, and while it sleeps the trainer has all.
    """
    model = KK_TINY
    if kind == "untied":
        model = make_tiny_model(tmp_path / "model", tied=False)
    if kind == "qwen2":
        model = make_tiny_model(tmp_path / "model", config_class=Qwen2Config)
    worker = tmp_path / "worker.py"
    worker.write_text(f"""
import os, sys
os.sched_setaffinity(0, range(os.cpu_count()))
import torch
sys.path.insert(0, {str(ROOT)!r})
import grpo
from runtime.chats import load_task
from transformers import AutoTokenizer
folder, what = sys.argv[1:]
args = grpo.Args(model=folder, data={str(puzzles())!r}, max_prompt_tokens=600, max_response_tokens=24, kv_cache_gb=0.1,
                 responses_per_prompt=4, eval_size=2, gradient_checkpointing=False, compile=False, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(folder)
problems = [problem for problem in load_task(args, tokenizer)[1][:8] for _ in range(4)]  # of each response
llm = grpo.load_sampler(args)
policy = grpo.load_policy(args, trained=True)
assert torch.get_num_threads() == 1
before = grpo.sample(llm, problems, 1, args)[1]
if what == "change":
    grpo.engine.sleep(llm)
    assert torch.get_num_threads() == os.cpu_count()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-2)
    for i, p in enumerate(policy.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    optimizer.step()
    torch.manual_seed(0)
    for name, p in policy.named_parameters():
        if name.endswith(".bias"):
            p.data += torch.randn_like(p)
    grpo.sync_weights(policy, llm, args)
    assert torch.get_num_threads() == 1
    args.run_dir = {str(tmp_path / "run")!r}
    grpo.checkpoints.save(policy, optimizer, tokenizer, 1, 0, args)
batch, responses = grpo.sample(llm, problems, 1, args)
texts = [response.text for response in responses]
if what == "change":
    assert texts != [response.text for response in before]
    gap = (grpo.log_probs(policy, batch, args)[0] - batch["sampler_logp"]).abs().max().item()
    assert gap < 1e-3, gap
torch.save((batch, texts), {str(tmp_path)!r} + "/" + what)
""")
    for folder, what in [(model, "change"), (tmp_path / "run/checkpoints/step_000001", "fresh")]:
        run(worker, folder, what, env={"PYTHONPATH": str(ROOT)})
    (synced, synced_texts), (fresh, fresh_texts) = (torch.load(tmp_path / what) for what in ("change", "fresh"))
    assert synced_texts == fresh_texts
    assert all(torch.equal(synced[key], fresh[key]) for key in fresh)
    assert synced["mask"].sum() > 100 and synced["sampler_logp"].min() < -0.5
    biases = [weight for name, weight in weights(tmp_path / "run", 1).items() if name.endswith(".bias")]
    assert len(biases) == (6 if kind == "qwen2" else 0) and all(weight.all() for weight in biases)


BAD = [  # (flags, of which the first word may be a script; what is said)
    ("--alpha 1.5", "--alpha is 1.5"),
    ("--responses_per_prompt 100000000", "--responses_per_prompt is 100000000; it must be"),
    ("--resume=", "--resume is empty"),
    ("--resume nowhere", "does not go with --resume"),  # small() has a --run_dir
    ("--task countdown --numbers 1e400", "numbers must be like 3-4"),
    ("--kv_cache_gb 5000", "GiB of memory"),
    ("--kv_cache_gb 0.0001", "--kv_cache_gb is 0.0001; one sequence of 304 tokens"),
    ("--max_response_tokens 4000", "takes only 2048 tokens"),
    ("--prompts_per_step 62", "there are 60 training problems"),
    ("--prompts_per_step 3", "must be a multiple of 2"),
    ("--max_prompt_tokens 10", "--max_prompt_tokens is 10"),
    ("--model models/nowhere", "models/nowhere is not a model folder"),
    ("--data nothing.jsonl", "there is no such file"),
    ("--people 9", "people must be"),
    ("--track", "pip install wandb"),
    ("--lopti_stages high,high", "invalid choice"),
    ("--task chess", "--task is 'chess'; it must be one of kk, math, countdown"),
    ("--gym chain_sum", "--gym is of --task gym, not of kk"),
    ('--template_options {"thinking":0}', "the model's chat template does not use 'thinking'; it uses none"),
    ("--eval_samples 4 --eval_temperature 0", "--eval_samples is 4, but greedy responses are all alike"),
    ("--lora_rank -1", "--lora_rank is -1; it must be 0 or greater"),
    ("--lora_alpha 16", "--lora_alpha is 16.0, but there is no LoRA"),
    ("--lora_rank 8 --lora_alpha 0", "--lora_alpha is 0.0; it must be greater than 0"),
    ("grpo_kl --kl_coef 0", "--kl_coef is 0.0; it must be greater than 0"),
    ("opd", "--teacher is missing: it takes the folder of the model to learn from"),
]


@pytest.fixture
def refused(monkeypatch, capsys):
    """A function that runs a script's main, which ends with exit code 2 before vLLM is loaded: (its one message)."""

    def start(script, *flags):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have loaded it in this process
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(script).main()
        assert ended.value.code == 2 and "vllm" not in sys.modules
        return re.sub(r"[\s│]+", " ", capsys.readouterr().err)

    return start


@pytest.mark.parametrize(("flags", "says"), BAD)
def test_bad_input_ends_with_one_message_before_anything_loads(flags, says, refused, tmp_path):
    if flags == "--track" and find_spec("wandb"):
        pytest.skip("wandb is installed here")
    words = flags.split()
    script = "grpo_ar_lopti" if words[0].startswith("--") else words.pop(0)
    assert says in refused(script, *small(tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()


def test_a_resume_with_another_input_is_refused_before_anything_loads(four_steps, refused):
    about = four_steps[0] / "run.json"
    written = about.read_text()
    about.write_text(written.replace(json.loads(written)["sizes"]["digest"], "0"))
    try:
        assert "the problems have changed since the run began" in refused(
            "grpo", "--resume", four_steps[0], "--steps", 5
        )
    finally:
        about.write_text(written)


def test_more_processes_than_test_problems_are_refused(refused, tmp_path, monkeypatch):
    """sft.py, for one, can't make a batch of no examples."""
    monkeypatch.setattr(processes, "WORLD_SIZE", 3)
    flags = small(tmp_path / "run", eval_size=2, max_response_tokens=640)
    assert "2 test problems for 3 processes" in refused("grpo", *flags)


def test_a_model_that_the_hub_does_not_hand_out(tmp_path):
    flags = [*small(tmp_path / "run"), "--model", "nobody/nothing"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}  # huggingface_hub reads it when it is imported
    finished = python("grpo.py", *flags, env=environment)
    assert finished.returncode == 2 and "error: --model nobody/nothing can't be loaded" in finished.stderr
    assert finished.stdout.count("\n") == finished.stderr.count("\n") == 1


def test_help_explains_every_flag():
    for script in family.family():
        trainer = importlib.import_module(script)
        _, helps = flags.read_sources(trainer.Args)
        assert all(helps[name] for name in trainer.Args.__dataclass_fields__), script


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM.exists(), reason="no models/SmolLM2-135M-Instruct: make model gets it")
def test_end_to_end_on_a_real_model(tmp_path):
    """SmolLM2-135M-Instruct; on the papers' puzzles where they are at hand."""
    data = ["--data", str(DATA / "kk" / "train_3to7.parquet")] if (DATA / "kk").exists() else []
    sizes = {"prompts_per_step": 2, "responses_per_prompt": 2, "eval_size": 2, "max_response_tokens": 16}
    flags = small(tmp_path / "run", model=SMOLLM, steps=1, kv_cache_gb=0.5, **sizes)
    run("grpo_ar_lopti.py", *flags, *data)
    (row,) = metrics(tmp_path / "run")
    assert row["kl"] == 0 and 0 < row["sampler_gap"] < 0.1 and 0 < row["entropy"] < 5
    coarse = json.loads((tmp_path / "run" / "args.json").read_text())["dtype"] == "bfloat16"  # hides small changes
    assert 0 < row["weights_changed"] < (0.1 if coarse else 1) and row["peak_memory_gb"] < 12
    assert (tmp_path / "run/checkpoints/step_000001/model.safetensors").stat().st_size > 250e6
