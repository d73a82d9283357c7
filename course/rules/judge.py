"""Knights & Knaves with a learned judge as the reward, for docs/reward_models.md.

    python evaluate.py models/kk_tiny --suite kk --people 2-3 --samples 8 --temperature 1 --seed 5 --keep_responses
    python -m course.rules.judge evaluations/kk_kk_tiny_…_responses.jsonl      learns the judge from these responses
    python grpo.py --task course/rules/judge.py

The judge is a reward model of the simplest kind: a response's score is the sum of a weight for each of its words. It
reads neither the puzzle nor the answer. The weights maximise the likelihood of pairs (Bradley and Terry): of two
responses to one puzzle, P(the first is the right one) = sigmoid(score 1 − score 2).
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

from rewards import kk

WEIGHTS = Path(__file__).with_name("judge.json")
COMMON = 50  # a word with fewer occurrences in the training responses has no weight


def load(source, split, *, size=None, seed=0):
    return kk.load(source, split, people="2-3", size=size or 1000, seed=seed)


def words_of(response):
    return Counter(re.findall(r"[a-z']+", response.lower()))


def score(response, answer):
    """The judge pays. `correct` is of the rule, which the policy never sees."""
    weights = json.loads(WEIGHTS.read_text())["weights"]
    found = kk.score(response, answer, strict=True)
    reward = sum(weights.get(word, 0.0) * count for word, count in words_of(response).items())
    return {"reward": reward, "correct": found["correct"], "format": found["format"]}


def learn(responses):
    """Fit the weights to responses of evaluate.py (dictionaries). Returns (weights, accuracy on held-out pairs)."""
    import torch

    by_puzzle = {}
    for response in responses:
        by_puzzle.setdefault(response["problem"], {True: [], False: []})[response["correct"]].append(response)
    count = Counter(word for response in responses for word in words_of(response["response"]).elements())
    common = sorted(word for word, number in count.items() if number >= COMMON)
    pairs, is_test = [], []
    for problem, sides in by_puzzle.items():
        for right in sides[True]:
            for wrong in sides[False]:
                a, b = words_of(right["response"]), words_of(wrong["response"])
                pairs.append([a[word] - b[word] for word in common])
                is_test.append(problem % 5 == 0)  # a fifth of the puzzles is held out
    differences, is_test = torch.tensor(pairs).float(), torch.tensor(is_test)  # [pairs, words], [pairs]
    weights = torch.zeros(len(common), requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.01)
    for _ in range(500):
        loss = -torch.nn.functional.logsigmoid(differences[~is_test] @ weights).mean() + 0.01 * (weights**2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = ((differences[is_test] @ weights) > 0).float().mean().item()
    return dict(zip(common, weights.tolist())), accuracy


if __name__ == "__main__":
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    learned, right = learn(rows)
    best = dict(sorted(learned.items(), key=lambda pair: -pair[1]))
    WEIGHTS.write_text(json.dumps({"held-out pairs in order": right, "weights": best}, indent=1) + "\n")
    print(f"{right:.3f} of the held-out pairs in the right order; best words: {', '.join(list(best)[:8])}")
