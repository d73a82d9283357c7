"""Guess a number from 1 to 15 in five turns: the model guesses, and the reply is "higher" or "lower".

Halving the range wins every game in at most four turns. The prompt shows one game.

    python grpo_multi_turn.py --task guess --max_turns 5
"""

import math
import random
import re

HIGHEST = 15
TURNS = 5  # guesses per game
SIZE = {"train": 2000, "test": 60}
COST = 0.1  # per turn after the first
FOR_BITS = 2.0  # for all log2(15) bits; more than for winning, which needs luck, too
TOLD = f"Guess my number from 1 to {HIGHEST}. Answer with one number. I say higher or lower."
GAME = ["Guess.", "8", "higher", "11", "lower", "9", "right! A new number. Guess."]


def load(source, split: str, *, size=None, seed=0):
    """Return games: sampled at random for training, and every number equally often for testing."""
    if source:
        raise ValueError("guess makes its own games, and takes no --data or --test_data")
    rng = random.Random(f"{seed}/{split}")
    messages = [{"role": "system", "content": TOLD}]
    for i, text in enumerate(GAME):
        messages.append({"role": "assistant" if i % 2 else "user", "content": text})
    games = []
    for i in range(size or SIZE[split]):
        number = rng.randint(1, HIGHEST) if split == "train" else 1 + i % HIGHEST
        games.append({"messages": messages, "answer": number, "prefix": "", "category": "all"})
    return games


def guess_of(turn):
    """Return the number if the turn consists of nothing else, otherwise None."""
    found = re.fullmatch(r"\s*(\d{1,3})\.?\s*", turn)
    return int(found[1]) if found else None


def reply(turns, problem) -> str | None:
    """Say whether the number is higher or lower than the last guess; None if the game is over."""
    number = problem["answer"]
    guess = guess_of(turns[-1])
    if guess is None or guess == number or len(turns) == TURNS:
        return None
    return "higher" if guess < number else "lower"


def state(turns, problem):
    """Return what the player knows before the next turn: the lowest and the highest number that it can be."""
    return known(map(guess_of, turns), problem["answer"])


def known(guesses, number) -> tuple:
    """Return (low, high), where the number can be after these guesses and their replies."""
    low, high = 1, HIGHEST
    for guess in guesses:
        if guess is None:  # no number was guessed
            continue
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return low, high


def bits(known_range, guess) -> float:
    """Return the bits that a guess reveals on average, over the numbers that are left.

    Each of n numbers is equally likely. A reply that leaves m of them reveals log2(n / m) bits. A guess that earlier
    replies exclude reveals nothing.
    """
    low, high = known_range
    if guess is None or not low <= guess <= high:
        return 0.0
    n = high - low + 1
    left = [guess - low, 1, high - guess]  # the numbers left after "lower", "right!" and "higher"
    return sum(m / n * math.log2(n / m) for m in left if m > 0)


def score_conversation(turns, answer) -> dict:
    """Return a game's reward from all its turns: for winning, less with every turn; and for each turn's bits.

    A turn earns the average, and not the bits of the reply that came, which would pay for luck: the first guess 1
    reveals 3.9 bits if it is right, but 0.35 on average, and 8 reveals 1.29 on average. Over many games, both pay the
    same: log2(15) bits per game to a player who wins every game.
    """
    guesses = [guess_of(turn) for turn in turns]
    won = guesses[-1] == answer
    earned = [bits(known(guesses[:i], answer), guess) for i, guess in enumerate(guesses)]
    parts = {
        "won": 1 - COST * (len(turns) - 1) if won else 0.0,
        "bits": [FOR_BITS * one / math.log2(HIGHEST) for one in earned],
    }
    reward = parts["won"] + sum(parts["bits"])
    return {"reward": reward, "correct": won, "format": None not in guesses, "parts": parts}


def score(response, answer):
    """Score a game of one turn."""
    return score_conversation([response], answer)


def score_all(responses, answers) -> list:
    return [score(response, answer) for response, answer in zip(responses, answers)]
