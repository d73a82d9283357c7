"""Tell which side is wrong if sampler_gap is large: the sampler or the trainer.

    python tools/gap.py RUN        a run, or one of its checkpoints

Both get the checkpoint's weights as in the run: the trainer loads them; the sampler begins with --model's weights and
gets the others from the script's sync_weights; then once more, on a GPU after it has slept. Both compute
log-probabilities of the same sampled tokens, and so does a judge: transformers alone, in float32 on the CPU, without
compiled layers or shared prompts. The side that is far from the judge is wrong. Exit code 1 if one of them is.
"""

import dataclasses
import importlib
import sys
from itertools import combinations
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import checks, engine, files, flags, folders, memory, passes, processes, records
from runtime.chats import load_task
from tools import texts

NUM_PROBLEMS = 4
RESPONSES = 4  # per prompt
RESPONSE_TOKENS = 128  # at most: enough for a mean, and the judge is slow
STAGES = ("its first update", "sleep and another update")


def read(run):
    """Return (the run's script as a module, its settings with few and short responses, the checkpoint's folder).

    ValueError if there is none.
    """
    checkpoint = folders.to_resume(str(run))
    folder = folders.run_of(str(run))
    if checkpoint is None or not (folder / "run.json").exists():
        raise ValueError(f"{run} is not a run with a checkpoint")
    script = files.read_object(folder / "run.json")["script"]
    if not (Path(__file__).parents[1] / f"{script}.py").exists():
        raise ValueError(f"{script}.py, which made {run}, is not here")
    trainer = importlib.import_module(script)
    if not hasattr(trainer, "load_sampler"):
        raise ValueError(f"{run} is a run of {trainer.__name__}.py, which has no sampler")
    args = trainer.Args(**flags.of_resumed_run([f"--resume={folder}"], trainer.Args))
    args.max_response_tokens = min(args.max_response_tokens, RESPONSE_TOKENS)
    args.responses_per_prompt = RESPONSES
    args.run_dir = args.resume = ""
    return trainer, args, checkpoint


@torch.no_grad()
def judged(judge, batch, temperature):
    """Return the judge's log-probabilities of the response tokens, [N, T], zero elsewhere, computed row by row."""
    logp = torch.zeros(batch["ids"].shape)
    for row, (ids, mask) in enumerate(zip(batch["ids"], batch["mask"])):
        end = int(mask.nonzero().max()) + 1
        logits = judge(ids[None, :end]).logits[0, :-1].float() / temperature  # [end − 1, vocabulary]
        found = logits.log_softmax(-1).gather(-1, ids[1:end, None])[:, 0]  # from the second token on
        logp[row, 1:end] = found * mask[1:end]
    return logp


def measure(trainer, args, checkpoint):
    """Return, per stage of STAGES, the distances "sampler, trainer", "sampler, judge" and "trainer, judge".

    A distance is the mean absolute difference of log-probabilities over the response tokens, in nats.
    """
    tokenizer, _ = checks.check_model(args, passes.HEAD_CHUNK)
    _, problems, _ = load_task(args, tokenizer)
    asked = [problem for problem in problems[:NUM_PROBLEMS] for _ in range(RESPONSES)]
    llm = trainer.load_sampler(args)
    engine.set_num_threads(len(processes.own_cores()))  # for the judge: vLLM on a GPU leaves torch one thread
    policy = trainer.load_policy(dataclasses.replace(args, model=str(checkpoint)), trained=True)
    judge = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, trust_remote_code=False)
    found = []
    for step in range(1, 1 + len(STAGES)):
        if step > 1:
            engine.sleep(llm)
        trainer.sync_weights(policy, llm, args)
        responses = trainer.generate(
            llm, problems[:NUM_PROBLEMS], step, args,
            n=RESPONSES, temperature=args.temperature, logprobs=0, flat_logprobs=True,
        )  # fmt: skip
        batch = trainer.to_batch(asked, responses)
        trainer_logp, _ = trainer.log_probs(policy, batch, args)
        judge_logp = judged(judge, batch, args.temperature)
        logp = {"sampler": batch["sampler_logp"], "trainer": trainer_logp, "judge": judge_logp}  # [N, T] each
        distances = {}
        for one, other in combinations(logp, 2):
            distances[f"{one}, {other}"] = (logp[one] - logp[other])[batch["mask"]].abs().mean().item()
        found.append(distances)
    return found


def verdict(found, usual):
    """Interpret the distances in words; "" if nothing is wrong. usual: upper limit of correct distances, in nats."""
    for stage, distances in zip(STAGES, found):
        if not distances["trainer, judge"] <= usual:
            return (
                "the trainer is wrong: its Policy does not compute what transformers computes with these weights. If "
                "--no_compile closes the gap, torch.compile is to blame; otherwise the model's head (soft-capping, "
                "scaled logits)"
            )
        if not distances["sampler, judge"] <= usual:
            return (
                f"the sampler is wrong after {stage}: not all weights reach it, or sleep mode loses some of its "
                "memory. Another version of vLLM may help; please report the table of python -m tools.doctor"
            )
    return ""


def main(run: tyro.conf.Positional[Path]):
    with flags.errors_in_one_line():
        trainer, args, checkpoint = read(run)
        memory.keep_freed_memory()
        processes.start()
        found = measure(trainer, args, checkpoint)
    usual = records.USUAL_GAP[args.dtype]
    print(f"\nmean |difference of log-probabilities|, in nats, of {checkpoint}; usually below {usual}\n")
    rows = [[stage, *(f"{value:.2g}" for value in of_stage.values())] for stage, of_stage in zip(STAGES, found)]
    print(texts.table(["after", *found[0]], rows))
    words = verdict(found, usual)
    print(f"\n{words or 'both compute the same as the judge: nothing is wrong with these weights'}")
    processes.end()
    sys.exit(1 if words else 0)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n\n")[0])
