"""Makes models/kk_tiny: a language model of one million parameters that begins to solve Knights & Knaves puzzles.

It learns, from nothing and by ordinary supervised learning, to write worked solutions of generated puzzles of 2 to 4
people. Its teachers are of two kinds. The careful one goes through the cases, judges each person's statement in each
of them, and stops at the case in which all fit; the hasty one guesses. Three texts in ten are careful, so that a model
that has learned to write both kinds is mostly wrong, and reinforcement learning has something to find: which of its
ways of thinking pays. Most sentences come in several wordings, so that many a token is improbable without mattering
for the answer.

    python models/make_kk_tiny.py              makes it
    python models/make_kk_tiny.py --measure    says how good it is

On a CPU with 2 cores it takes less than 20 minutes. The folder then holds an ordinary Hugging Face model and tokenizer
(transformers and vLLM load it) and loss.png, the learning curve.
"""

import itertools
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

import matplotlib
import torch
import torch.distributed as dist
import tyro
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))
from rewards import encode, kk
from tools.plot import COLOURS, exponential_average

matplotlib.use("Agg")
from matplotlib import pyplot

PROCESSES = 2
EXERCISES, CAREFUL = 0.14, 0.72  # up to which part of the training texts are exercises, and then careful only
PEOPLE = [12, 8, 0.2]  # how often puzzles of 2, 3 and 4 people come


@dataclass
class Args:
    """The model's training."""

    folder: Path = Path(__file__).parent / "kk_tiny"  # where the model goes
    updates: int = 1400  # optimizer updates
    batch_size: int = 24  # texts in an update
    lr: float = 3e-3  # AdamW's highest learning rate (embedding, norms); it rises at first and falls to 0 in a cosine
    muon_lr: float = 0.02  # Muon's (matrices), likewise
    careful: float = 0.3  # share of careful texts in the last part of the training
    seed: int = 0  # of everything
    measure: bool = False  # make nothing, but measure the model that is there


# --------------------------------------------------------------------------------------------------------------------
# Worked solutions. "|" separates wordings, the likelier first: choice k has the weight (k + 1) ** -1.5. The words are,
# where they can be, those of the six families that AR-Lopti counts (Table 5): analysis, statement, causal indicator,
# conclusion indicator, assumption, assertion.

OPENINGS = "Let us|I will|We can|Now", "check|consider|examine|analyze|look at", "the|all|these", "cases|options"
CASE = "Assume ~.|Suppose ~.|If ~, then:|Say ~:|Imagine ~.|Next ~:|Take ~."
JOIN = ",|and|while|but"
ITS = "statement|claim|remark|word"
MEANS = "means|says|gives|becomes|is"
TRUTH = "so|thus|hence|must be|therefore"
TRUE, FALSE = "true|right|correct", "false|wrong|untrue"
CLASH = ": impossible|, a contradiction|: no|, which fails|: that cannot be"
FOUND = "So|Thus|Hence|Therefore|Consequently|As a result", "this is it|it must be this|that is definite|all fits"
GUESS = "Well|Hmm|I guess|I think|Maybe|Perhaps|Probably|My guess is:"
REASON = "since|because|given that|as", "statement|claim|remark|word", "sounds|looks|seems|is", "odd|fine|honest|clear"
REASON_END = ".|, I think.|, I guess.|, I feel."


def say(rng, *slots):
    """One wording of every slot, joined by blanks."""
    words = []
    for slot in slots:
        choices = slot.split("|")
        words += rng.choices(choices, [(k + 1) ** -1.5 for k in range(len(choices))])
    return " ".join(words)


def say_roles(rng, names, roles):
    """All people with their roles: "Wei knight and Omar knave"."""
    text = ""
    for i, (name, knight) in enumerate(zip(names, roles)):
        join = say(rng, JOIN) if i else ""
        text += (join if join == "," else " " + join) if i else ""
        text += f" {name} {'knight' if knight else 'knave'}"
    return text.strip()


FORMS = {"and": "{} and {}", "or": "{} or {}", "->": "if {} then {}", "<=>": "{} iff {}"}


def judge(statement, names, roles, inner=False):
    """The statement in short. Each "X is a knave" becomes "X knight as knave (no)": what X is in this case, what was
    said of X, and whether that is so. Without the first of them the model learns the last only after very long."""
    op, *parts = statement
    if op == "not":
        ((kind, person),) = parts
        op, parts = {"telling-truth": "lying", "lying": "telling-truth"}[kind], [person]  # not a knave: a knight
    if op in ("telling-truth", "lying"):
        claims_knight = op == "telling-truth"
        role, holds = "knight" if claims_knight else "knave", roles[parts[0]] == claims_knight
        actual = "knight" if roles[parts[0]] else "knave"
        return f"{names[parts[0]]} {actual} as {role} {'(yes)' if holds else '(no)'}"
    text = FORMS[op].format(*(judge(part, names, roles, inner=True) for part in parts))
    return f"({text})" if inner else text


def judge_in_words(rng, speaker, statement, names, roles):
    """(sentence, fits): what the statement comes to in this case, and whether the speaker can have said it."""
    place = int("".join(str(int(role)) for role in roles), 2)  # the case's bit in kk's truth tables
    truth = bool(kk.table_of(statement, len(names)) >> place & 1)
    fits = truth == roles[speaker]
    text = f" {names[speaker]}'s {say(rng, ITS, MEANS)} {judge(statement, names, roles)}, "
    return text + say(rng, TRUTH, TRUE if truth else FALSE) + ("." if fits else say(rng, CLASH) + "."), fits


def careful_reasoning(rng, puzzle, most_cases=None):
    """Case analysis: goes round the assignments, up or down from any of them, until one agrees with all statements.

    Every sentence follows. most_cases: starts so near the solution that it is among so many cases.
    """
    names = puzzle["names"]
    text = " " + say(rng, *OPENINGS) + "."
    cases = list(itertools.product([True, False], repeat=len(names)))[:: rng.choice([1, -1])]
    found = cases.index(kk.solve(puzzle["statements"])[0])
    start = found - rng.randrange(most_cases or len(cases))
    for number in range(len(cases)):
        roles = cases[(start + number) % len(cases)]
        text += " " + say(rng, CASE).replace("~", say_roles(rng, names, roles))
        for speaker, statement in enumerate(puzzle["statements"]):
            sentence, fits = judge_in_words(rng, speaker, statement, names, roles)
            text += sentence
            if not fits:
                break
        else:
            return f"{text} {say(rng, *FOUND)}.", roles
    raise ValueError("no case agrees with all statements")


def exercise(rng):
    """Cases and judgements without a puzzle, to begin with: names, roles and statements are drawn at random."""
    names = rng.sample(kk.NAMES, rng.choice([2, 3]))
    text = ""
    for _ in range(3):
        roles = [rng.random() < 0.5 for _ in names]
        text += " " + say(rng, CASE).replace("~", say_roles(rng, names, roles))
        for _ in range(3):
            speaker = rng.randrange(len(names))
            statement = kk.make_statement(rng, speaker, len(names), 1)
            text += judge_in_words(rng, speaker, statement, names, roles)[0]
    return text


def hasty_reasoning(rng, puzzle):
    """A guess at random, with words around it."""
    names = puzzle["names"]
    roles = tuple(rng.random() < 0.5 for _ in names)
    why, its, looks, how = (say(rng, slot) for slot in REASON)
    text = f" {say(rng, GUESS)} {say_roles(rng, names, roles)}, {why} {rng.choice(names)}'s {its} {looks} {how}"
    return text + say(rng, REASON_END), roles


def solution(rng, puzzle, careful, most_cases=None):
    """What comes after the prompt, which ends in <think>: reasoning, then the answer in the papers' format."""
    reasoning, roles = careful_reasoning(rng, puzzle, most_cases) if careful else hasty_reasoning(rng, puzzle)
    people = enumerate(zip(puzzle["names"], roles), 1)
    answer = "\n".join(f"({i}) {name} is a {'knight' if knight else 'knave'}" for i, (name, knight) in people)
    return f"{reasoning}</think><answer> {answer}</answer>"


def retell(rng, puzzle):
    """The same puzzle with other names and in other words."""
    names = rng.sample(kk.NAMES, len(puzzle["names"]))
    quiz = kk.tell(rng, names, puzzle["statements"])
    return kk.make_item(quiz, names, list(puzzle["answer"].values()), puzzle["statements"])


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer

END = "<|im_end|>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
# What a text is cut into; each piece may be a token.
PIECES = r"'s| ?\((?:\d|yes|no)\)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"
# The papers' system message is the same for every problem, and this model knows no other task: it is left out.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts):
    """One token for every word of the texts (with and without a blank before it), and one for every byte.

    A word that is not among them is spelled out in bytes, so that any text can be encoded and decoded.
    """
    pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    pieces = Counter(piece for text in texts for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    names = [before + name for name in kk.NAMES for before in ("", "Ġ")]  # Ġ: how a blank is written in the vocabulary
    words = sorted(pieces.keys() | set(names))
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
    """Lists of puzzles of 2, 3 and 4 people, all of the train split: trainers evaluate on none of them."""
    return [kk.generate(n, people, seed, "train") for people, n in (("2", 3000), ("3", 6000), ("4", 3000))]


def make_text(rng, puzzles, careful, tokenizer):
    """Token ids of a prompt with its solution."""
    puzzle = retell(rng, rng.choice(puzzles))
    text = solution(rng, puzzle, rng.random() < careful, most_cases=4)
    return encode(tokenizer, puzzle) + tokenizer.encode(text + END)


def pad(rows):
    """Token ids [N, T], padded on the right; and [N, T], True on all but the padding."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        real[i, : len(row)] = True
    return ids, real


def learn(rank, args):
    """One of the processes, each with a thread and its own texts; their gradients are averaged."""
    torch.set_num_threads(1)  # so small a model keeps two processes busier than two threads
    store = dist.TCPStore("localhost", args.port, PROCESSES, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    rng, shared = random.Random(f"{args.seed} {rank}"), random.Random(args.seed)
    puzzles = make_puzzles(args.seed)
    some = [puzzle for group in puzzles for puzzle in group[:1000]]
    teacher = random.Random(args.seed)
    texts = [message["content"] for puzzle in some for message in puzzle["messages"]]
    texts += [solution(teacher, puzzle, careful) for puzzle in some for careful in (True, False)]
    tokenizer = make_tokenizer(texts)
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, attn_implementation="eager",
        initializer_range=0.08,  # with transformers' usual 0.02, meant for wide models, names are not copied for long
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    n_params = sum(p.numel() for p in model.parameters())
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=args.muon_lr, weight_decay=0.01)]  # in half of AdamW's time or less
    optimizers += [torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)]

    def share_of_lr(update):
        return min(1.0, (update + 1) / 30) * 0.5 * (1 + math.cos(math.pi * update / args.updates))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr) for optimizer in optimizers]
    yes, no = (tokenizer.convert_tokens_to_ids([word]) for word in ("Ġ(yes)", "Ġ(no)"))
    losses, judged = [], []
    bar = tqdm(range(args.updates), desc=f"learning, {n_params / 1e6:.2f} M parameters", disable=rank > 0)
    for update in bar:
        n_texts = args.batch_size // PROCESSES
        if update < EXERCISES * args.updates:
            rows = [tokenizer.encode("<think>" + exercise(rng) + END) for _ in range(n_texts)]
        else:
            careful = 1.0 if update < CAREFUL * args.updates else args.careful
            (group,) = shared.choices(puzzles, PEOPLE)  # of one number of people, so that there is little padding
            rows = [make_text(rng, group, careful, tokenizer) for _ in range(n_texts)]
        rows.sort(key=len)
        n_tokens, right, said, total = sum(map(len, rows)), 0, 0, 0.0
        for part in (rows[: n_texts // 2], rows[n_texts // 2 :]):  # the short and the long, for less padding
            ids, real = pad(part)
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[real[:, 1:]]  # [n, D]
                logits = model.lm_head(hidden).float()  # [n, V]
            targets = ids[:, 1:][real[:, 1:]]  # [n]
            loss = cross_entropy(logits, targets, reduction="sum") / n_tokens
            loss.backward()
            with torch.no_grad():  # where the text says yes or no: how often the model would have said it
                is_yes, is_no = (torch.isin(targets, torch.tensor(words)) for words in (yes, no))
                says_yes = logits[:, yes].logsumexp(-1) > logits[:, no].logsumexp(-1)
                right += (says_yes == is_yes)[is_yes | is_no].sum().item()
                said += (is_yes | is_no).sum().item()
                total += loss.item()
        losses.append(total)
        judged.append(right / said if said else math.nan)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(gradient)
        for p, part in zip(model.parameters(), gradient.split([p.numel() for p in model.parameters()])):
            p.grad = part.view_as(p) / PROCESSES
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if update % 10 == 0:
            right = [share for share in judged[-100:] if share == share]  # nan: a batch without judgements
            bar.set_postfix(loss=f"{fmean(losses[-100:]):.3f}", judged_right=f"{fmean(right):.3f}")
    if rank == 0:
        save(model, tokenizer, losses, judged, args)
    dist.destroy_process_group()


def save(model, tokenizer, losses, judged, args):
    args.folder.mkdir(parents=True, exist_ok=True)
    model.config._attn_implementation = None
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.to(torch.bfloat16).save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    judged = [1.0 if share != share else share for share in judged]
    for axis, values, title in zip(
        axes, (losses, judged), ("loss [nats a token]", "share of judgements that are right")
    ):
        axis.plot(values, color=COLOURS[0], alpha=0.25, lw=0.7)
        axis.plot(exponential_average(values, 0.98), color=COLOURS[0])
        axis.set(title=title, xlabel="update")
    figure.savefig(args.folder / "loss.png", dpi=90)


# --------------------------------------------------------------------------------------------------------------------
# How good it is


def measure(args):
    """Prints the table of the model's card, and as its last line the same as JSON: {people: {what: number}}.

    100 test puzzles of each number of people, 8 responses to each at temperature 1. Low, in the middle, high: shares of
    the sampled tokens whose probability is at most 0.25, at most 0.5, and at most 0.75.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    options = {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
    llm = LLM(str(args.folder), dtype="bfloat16", max_model_len=2048, kv_cache_memory_bytes=2**29, **options)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.folder)
    sampling = SamplingParams(n=8, temperature=1.0, max_tokens=1024, logprobs=0, seed=args.seed)
    found = {}
    for people in "234":
        puzzles = kk.generate(100, people, seed=0, split="test")
        prompts = [{"prompt_token_ids": encode(tokenizer, puzzle)} for puzzle in puzzles]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
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
    for what in found["2"]:
        print(f"| {what} | " + " | ".join(f"{found[people][what]:.3g}" for people in found) + " |")
    print(json.dumps(found))


def main(args):
    if args.measure:
        return measure(args)
    started = time.perf_counter()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        args.port = free.getsockname()[1]
    torch.multiprocessing.spawn(learn, (args,), nprocs=PROCESSES)
    print(f"wrote {args.folder} after {(time.perf_counter() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True, description=__doc__.split("\n\n")[0]))
