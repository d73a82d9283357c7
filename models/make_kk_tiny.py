"""Makes models/kk_tiny: a language model of one million parameters that begins to solve Knights & Knaves puzzles.

Supervised learning from scratch teaches it to write worked solutions of generated puzzles of 2 to 4 people. There are
two kinds of solutions. A careful one states everyone's claim in short, goes through the cases, judges the claims in
each case, and stops at the case in which all of them fit. A hasty one guesses. Three texts in ten are careful, so a
model that has learned both kinds is mostly wrong. Reinforcement learning can then find the kind that earns more reward.
Most sentences have several wordings, so that many tokens are unlikely but do not matter for the answer.

    python models/make_kk_tiny.py              makes the model
    python models/make_kk_tiny.py --measure    measures its accuracy
    python models/make_kk_tiny.py --draw_only  draws its learning curve again

It takes less than 20 minutes on a CPU with 2 cores. The folder then has a standard Hugging Face model and tokenizer
(transformers and vLLM load them), the learning curve loss.png, and its values loss.json.
"""

import json
import math
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
import tyro
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
from rewards import kk
from rewards.kk_solutions import (
    CASE,
    DRAW,
    DRAWN_END,
    OPENINGS,
    drawn,
    restate,
    retell,
    say,
    say_roles,
    solution,
    unmark,
)
from runtime import curves, machine
from runtime.chats import encode
from tools.plot import GREY

PROCESSES = 2
# The stages of the training, in order: (maximum of updates, texts per update, threshold). The next stage begins when
# the share of predictable words that the model predicts exceeds the threshold. A small model learns a skill suddenly,
# after a long time without progress. Exercises that are dense in the skill shorten this time from hours to minutes.
STAGES = {
    "roll call": (600, 64, 0.98),  # a person's role in a case
    "reasoning": (400, 24, 0.993),  # careful solutions without their puzzles
    "reading": (600, 24, 0.985),  # 4 in 5 texts: puzzles, then everyone's claim in short; the others as in "reasoning"
    "careful": (350, 24, 1.0),  # puzzles with solutions, four in five of them careful
    "mixture": (400, 24, 1.0),  # puzzles with careful or hasty solutions
}
DRAWN = 0.1  # weight in the loss of words that cannot be predicted, including those of the prompts
PEOPLE = [10, 8, 1]  # relative frequencies of puzzles of 2, 3 and 4 people
EVERY = 5  # the learning curve keeps one update in so many
SMOOTHING = 0.6  # of the learning curve's exponential average over the kept updates


@dataclass
class Args:
    """The model's training."""

    folder: Path = Path(__file__).parent / "kk_tiny"  # the model's folder
    lr: float = 3e-3  # AdamW's peak learning rate (embedding, norms); from "careful" on, a cosine decay to 0
    muon_lr: float = 0.01  # Muon's peak learning rate (matrices), with the same decay
    careful: float = 0.3  # share of careful texts in the last stage of the training
    seed: int = 0  # of everything
    measure: bool = False  # only measure the existing model
    draw_only: bool = False  # only draw loss.png from loss.json
    people: str = "2-4"  # numbers of people in the puzzles of --measure
    samples: int = 8  # responses to each puzzle of --measure


# --------------------------------------------------------------------------------------------------------------------
# Texts. Worked solutions are in rewards/kk_solutions.py.


def roll_call(rng):
    """A case without a puzzle, followed by the roles of some of its people in random order, as text."""
    names = rng.sample(kk.NAMES, rng.randint(2, 5))
    roles = [rng.random() < 0.5 for _ in names]
    again = rng.choices(list(zip(names, roles)), k=10)
    case = say(rng, CASE, who=drawn(say_roles(rng, names, roles)))
    return f" {case}" + "".join(f" {drawn(name)} {'honest' if knight else 'lying'};" for name, knight in again)


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer

END = "<|im_end|>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
# A text is split into these pieces; each may be a token.
PIECES = r"'s| ?\((?:\d|yes|no)\)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"
# The template leaves out the papers' system message. It is the same for every problem, and the model has only one task.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts):
    """A tokenizer with a token for each word of the texts (with and without a leading blank) and for each byte.

    Unknown words are split into bytes, so it can encode and decode any text.
    """
    pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    pieces = Counter(piece for text in texts for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    names = [before + name for name in kk.NAMES for before in ("", "Ġ")]  # Ġ: a blank in the vocabulary
    numbers = [f"Ġ{n}" for n in range(2, 10)]  # of people
    words = sorted(pieces.keys() | {*names, *numbers})
    vocabulary = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *words])
    model = models.BPE({word: i for i, word in enumerate(vocabulary)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens(["<|im_start|>", END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    return fast


# --------------------------------------------------------------------------------------------------------------------
# Training


def make_puzzles(seed):
    """Three lists of puzzles, of 2, 3 and 4 people. All are of the train split: trainers evaluate on none."""
    return [kk.generate(n, people, seed, "train") for people, n in (("2", 3000), ("3", 6000), ("4", 3000))]


def make_text(rng, stage, puzzles, args, tokenizer):
    """(token ids, their weights in the loss) of a random text of this stage; two lists of the same length."""
    prompt = []
    if stage == "roll call":
        text = roll_call(rng)
    else:
        puzzle = retell(rng, rng.choice(puzzles))
        if stage == "reasoning" or (stage == "reading" and rng.random() < 0.2):
            text = solution(rng, puzzle, True, most_cases=2, told=False)
        else:
            prompt = encode(tokenizer, puzzle)
            text = solution(rng, puzzle, rng.random() < (0.8 if stage == "careful" else args.careful), most_cases=4)
            if stage == "reading":
                text = f" {say(rng, *OPENINGS)}.{restate(rng, puzzle)}"
    is_drawn, now = [], False  # of each letter
    for letter in text:
        now = letter == DRAW or (now and letter != DRAWN_END)
        is_drawn += [] if letter in (DRAW, DRAWN_END) else [now]
    encoded = tokenizer(unmark(text), return_offsets_mapping=True)
    weights = [DRAWN if is_drawn[end - 1] else 1.0 for _, end in encoded["offset_mapping"]]
    return prompt + encoded["input_ids"] + [tokenizer.eos_token_id], [DRAWN] * len(prompt) + weights + [1.0]


def pad(texts):
    """(token ids [N, T], padded on the right, weights of the tokens in the loss [N, T], 0 for the padding)."""
    ids = torch.zeros(len(texts), max(len(text) for text, _ in texts), dtype=torch.long)
    all_weights = torch.zeros(ids.shape)
    for i, (text, weights) in enumerate(texts):
        ids[i, : len(text)], all_weights[i, : len(text)] = torch.tensor(text), torch.tensor(weights)
    return ids, all_weights


def learn(rank, args):
    """Trains in one of the processes. Each has one thread and its own texts; their gradients are averaged."""
    torch.set_num_threads(1)  # for such a small model, two processes are faster than two threads
    store = dist.TCPStore("localhost", args.port, PROCESSES, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    rng, shared = random.Random(f"{args.seed} {rank}"), random.Random(args.seed)
    puzzles = make_puzzles(args.seed)
    some = [puzzle for group in puzzles for puzzle in group[:1000]]
    teacher = random.Random(args.seed)
    texts = [message["content"] for puzzle in some for message in puzzle["messages"]]
    texts += [solution(teacher, puzzle, careful) for puzzle in some for careful in (True, False)]
    tokenizer = make_tokenizer([unmark(text) for text in [*texts, roll_call(teacher)]])
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, attn_implementation="eager",
        initializer_range=0.08,  # with the default of 0.02, for wide models, it learns to copy names much later
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    n_params = sum(p.numel() for p in model.parameters())
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.01)]  # needs at most half of AdamW's time
    optimizers += [torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)]
    losses, shares, ends, fallen = [], [], [], 0
    falling = STAGES["careful"][0] + STAGES["mixture"][0]
    most_updates = sum(most for most, *_ in STAGES.values())
    bar = tqdm(total=most_updates, desc=f"learning, {n_params / 1e6:.2f} M parameters", disable=rank > 0)
    for stage, (most, n_texts, enough) in STAGES.items():
        for _ in range(most):
            (group,) = shared.choices(puzzles, PEOPLE)  # one number of people per update reduces padding
            texts = [make_text(rng, stage, group, args, tokenizer) for _ in range(n_texts // PROCESSES)]
            texts.sort(key=lambda text: len(text[0]))
            n_tokens = sum(len(ids) for ids, _ in texts)
            count = torch.zeros(3)  # loss, number of predictable words, number of them that are predicted
            n_short = len(texts) * 3 // 4  # short and long texts in separate passes reduce padding
            for part in (texts[:n_short], texts[n_short:]):
                ids, weights = pad(part)
                real = weights[:, 1:] > 0  # [N, T - 1]
                with torch.autocast("cpu", torch.bfloat16, enabled=machine.has_fast_bfloat16()):
                    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[real]  # [n, D]
                    logits = model.lm_head(hidden).float()  # [n, V]
                targets, weights = ids[:, 1:][real], weights[:, 1:][real]  # [n]
                loss = cross_entropy(logits, targets, reduction="none") / n_tokens  # [n]
                (weights * loss).sum().backward()
                foreseen = logits.argmax(-1)[weights == 1] == targets[weights == 1]
                foreseeable = torch.tensor(len(foreseen))
                count += torch.stack([loss.detach().sum() / PROCESSES, foreseeable, foreseen.sum()])
            everything = torch.cat([count, *(p.grad.flatten() for p in model.parameters())])
            dist.all_reduce(everything)
            count, *gradients = everything.split([3, *(p.numel() for p in model.parameters())])
            for p, gradient in zip(model.parameters(), gradients):
                p.grad = gradient.view_as(p) / PROCESSES
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            losses.append(count[0].item())
            shares.append(count[2].item() / count[1].item())
            fallen += stage in ("careful", "mixture")
            share_of_lr = min(1, len(losses) / 30) * (1 + math.cos(math.pi * fallen / falling)) / 2
            for optimizer, lr in zip(optimizers, (args.muon_lr, args.lr)):
                for settings in optimizer.param_groups:
                    settings["lr"] = lr * share_of_lr
                optimizer.step()
                optimizer.zero_grad()
            recent = shares[ends[-1] if ends else 0 :][-20:]  # the latest updates of this stage
            bar.set_postfix_str(f"{stage}: loss {losses[-1]:.3f}, {fmean(recent):.3f} foreseen", refresh=False)
            bar.update()
            if len(recent) == 20 and fmean(recent) > enough:
                break
        ends.append(len(losses))
    if rank == 0:
        save(model, tokenizer, losses, shares, ends, args)
    dist.destroy_process_group()


def save(model, tokenizer, losses, shares, ends, args):
    args.folder.mkdir(parents=True, exist_ok=True)
    model.config._attn_implementation = None
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    write_curves(losses, shares, ends, args.folder)
    draw_curves(args.folder)


def write_curves(losses, shares, ends, folder):
    """Writes loss.json: loss and predicted share of one in EVERY updates, and the last update of each stage."""
    kept = {
        "every": EVERY,
        "ends": dict(zip(STAGES, ends)),
        "loss": [float(f"{value:.4g}") for value in losses[::EVERY]],
        "foreseen": [float(f"{value:.4g}") for value in shares[::EVERY]],
    }
    (folder / "loss.json").write_text(json.dumps(kept) + "\n")


def exponential_average(values, keep):
    """Each value's average with those before it, a value's weight shrinking by `keep` with every step; unbiased."""
    total, weight, averages = 0.0, 0.0, []
    for value in values:
        total = keep * total + value
        weight = keep * weight + 1
        averages.append(total / weight)
    return averages


def draw_curves(folder):
    """Draws loss.png from loss.json and returns the figure."""
    kept = json.loads((folder / "loss.json").read_text())
    last = max(kept["ends"].values())
    title = f"pale: every {kept['every']}th update; line: its exponential average ({SMOOTHING})"
    figure = curves.new_figure(9, 6.5, title)
    axes = figure.subplots(2, 1, sharex=True)
    titles = {"loss": "loss\n[nats a token]", "foreseen": "share foreseen\nof what can be"}
    for axis, (key, name) in zip(axes, titles.items()):
        updates = [1 + i * kept["every"] for i in range(len(kept[key]))]
        axis.plot(updates, kept[key], color=curves.COLOURS[0], alpha=0.35, lw=1)
        axis.plot(updates, exponential_average(kept[key], SMOOTHING), color=curves.COLOURS[0])
        axis.set(ylabel=name, xlim=(0, last))
        for end in kept["ends"].values():
            axis.axvline(end, color=GREY, lw=1, ls=":")
    axes[1].set_xlabel("update")
    begins = 0
    for stage, end in kept["ends"].items():
        middle = (begins + end) / 2
        above = {"xycoords": ("data", "axes fraction"), "xytext": (0, 5), "textcoords": "offset points"}
        axes[0].annotate(stage, (middle, 1), ha="center", va="bottom", fontsize="small", **above)
        begins = end
    return curves.save(figure, [folder / "loss.png"])


# --------------------------------------------------------------------------------------------------------------------
# Measurement


def measure(args):
    """Prints the table of the model's card, and as the last line the same as JSON: {people: {what: number}}.

    It samples args.samples responses at temperature 1 to 100 test puzzles of each number of people.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    options = {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
    dtype = "bfloat16" if machine.has_fast_bfloat16() else "float32"
    llm = LLM(str(args.folder), dtype=dtype, max_model_len=2048, kv_cache_memory_bytes=2**29, **options)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.folder)
    sampling = {"n": args.samples, "temperature": 1.0, "max_tokens": 1024, "logprobs": 0}
    found = {}
    for people in map(str, kk.parse_people(args.people)):
        puzzles = kk.generate(100, people, seed=0, split="test")
        prompts = [{"prompt_token_ids": encode(tokenizer, puzzle)} for puzzle in puzzles]
        # With the same seed, all puzzles would have the same first words.
        params = [SamplingParams(seed=1000 * args.seed + i * args.samples, **sampling) for i in range(len(prompts))]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rows = [(puzzle, response) for puzzle, output in zip(puzzles, outputs) for response in output.outputs]
        scores = [kk.score(response.text, puzzle["answer"]) for puzzle, response in rows]
        careful = [bool(re.match(r" [\w ]+ (cases|options)\.", response.text)) for _, response in rows]
        right = [score["correct"] for score in scores]
        probabilities = [
            math.exp(choice[token].logprob)
            for _, response in rows
            for token, choice in zip(response.token_ids, response.logprobs)
        ]
        found[people] = {
            "accuracy": fmean(right),
            "format": fmean(score["format"] for score in scores),
            "careful": fmean(careful),
            "accuracy of careful": fmean(r for r, c in zip(right, careful) if c),
            "accuracy of hasty": fmean(r for r, c in zip(right, careful) if not c),
            "tokens": fmean(len(response.token_ids) for _, response in rows),
            "cut off": fmean(response.finish_reason == "length" for _, response in rows),
            **{f"tokens with p ≤ {p}": fmean(q <= p for q in probabilities) for p in (0.25, 0.5, 0.75)},
        }
    print("| | " + " | ".join(f"{people} people" for people in found) + " |\n|---|" + "---|" * len(found))
    for what in found[people]:
        print(f"| {what} | " + " | ".join(f"{found[people][what]:.3g}" for people in found) + " |")
    print(json.dumps(found))


def main(args):
    if args.measure:
        return measure(args)
    if args.draw_only:
        if not (args.folder / "loss.json").exists():
            print(f"error: {args.folder} has no loss.json; it is written when the model is made", file=sys.stderr)
            sys.exit(2)
        return draw_curves(args.folder)
    started = time.perf_counter()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        args.port = free.getsockname()[1]
    torch.multiprocessing.spawn(learn, (args,), nprocs=PROCESSES)
    print(f"wrote {args.folder} after {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True, description=__doc__.split("\n\n")[0]))
