"""Walk through a maze of 4 × 4 squares: the model says north, south, east or west, and the reply says where it is.

The walls are not shown: the model finds them by walking into them. The goal is the square in the south-east. There is
one reward, at the end: the length of the shortest way over the number of turns. The prompt shows one walk.

    python gigpo.py --task rewards/maze.py --max_turns 10
"""

import hashlib
import random
import re

SIDE = 4
TURNS = 10  # moves per walk
NUM_WALLS = 3  # squares that are closed
NEAREST = 3  # moves that a walk needs at least
SIZE = {"train": 1000, "test": 60}
MOVES = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}  # column, row
GOAL = (SIDE, SIDE)
SQUARES = [(x, y) for y in range(1, SIDE + 1) for x in range(1, SIDE + 1)]
TOLD = "Walk to 4,4. Answer with north, south, east or west. I say where you are: column, row."
WALK = ["at 1,1", "east", "wall, at 1,1", "south", "at 1,2", "east", "at 2,2. A new walk"]


def load(source, split: str, *, size=None, seed=0):
    """Return mazes with a way to the goal. The walls alone decide whether a maze is for testing, for any seed."""
    if source:
        raise ValueError("maze makes its own problems, and takes no --data or --test_data")
    rng = random.Random(f"{seed}/{split}")
    problems = []
    while len(problems) < (size or SIZE[split]):
        start, *walls = rng.sample([one for one in SQUARES if one != GOAL], 1 + NUM_WALLS)
        walls.sort()
        is_test = hashlib.sha256(repr(walls).encode()).digest()[0] < 26  # one in ten
        length = shortest(start, walls)
        if length and length >= NEAREST and is_test == (split == "test"):
            answer = {"start": start, "walls": walls, "shortest": length}
            messages = [{"role": "system", "content": TOLD}]
            for i, text in enumerate([*WALK[:-1], f"{WALK[-1]}: at {start[0]},{start[1]}"]):
                messages.append({"role": "assistant" if i % 2 else "user", "content": text})
            problems.append({"messages": messages, "answer": answer, "prefix": "", "category": str(length)})
    return problems


def shortest(start, walls):
    """Return the number of moves on a shortest way to GOAL; None if there is no way."""
    reached = {start: 0}
    waiting = [start]
    while waiting:
        square = waiting.pop(0)
        for move in MOVES:
            after = moved(square, move, walls)
            if after not in reached:
                reached[after] = reached[square] + 1
                waiting.append(after)
    return reached.get(GOAL)


def moved(square, move, walls):
    """Return the square after a move; the same one if there is a wall or the edge."""
    after = (square[0] + MOVES[move][0], square[1] + MOVES[move][1])
    return after if after in SQUARES and after not in walls else square


def move_of(turn):
    """Return the move if the turn consists of nothing else, otherwise None."""
    found = re.fullmatch(r"\s*(north|south|east|west)\.?\s*", turn.lower())
    return found[1] if found else None


def walk(turns, answer):
    """Return the squares of a walk: the start, and the square after each turn. A turn that is no move stays."""
    walls = [tuple(wall) for wall in answer["walls"]]
    squares = [tuple(answer["start"])]
    for turn in turns:
        move = move_of(turn)
        squares.append(moved(squares[-1], move, walls) if move else squares[-1])
    return squares


def state(turns, problem):
    """Return the square: in a group, all walks go through the same maze."""
    return walk(turns, problem["answer"])[-1]


def reply(turns, problem) -> str | None:
    """Say where the model is, and whether there was a wall; None at the goal, and after a turn that is no move."""
    before, square = walk(turns, problem["answer"])[-2:]
    if move_of(turns[-1]) is None or square == GOAL or len(turns) == TURNS:
        return None
    return f"{'wall, ' if square == before else ''}at {square[0]},{square[1]}"


def score_conversation(turns, answer) -> dict:
    """Return 1 for a shortest way to the goal, less for a longer one, and 0 for a walk that ends elsewhere."""
    is_there = walk(turns, answer)[-1] == GOAL
    reward = answer["shortest"] / len(turns) if is_there else 0.0
    return {"reward": reward, "correct": is_there, "format": None not in map(move_of, turns)}


def score(response, answer):
    """Score a walk of one turn."""
    return score_conversation([response], answer)
