"""Cases and known mistakes of lesson 15."""

import torch

from course.cases import Case, Exercise, bools, floats


def random_turns(rng):
    num_turns = torch.randint(1, 6, (5, 1), generator=rng)
    return {"rewards": torch.randn(5, 5, generator=rng), "mask": torch.arange(5) < num_turns, "gamma": 0.8}


def returns_of(rewards, mask, gamma):
    rewards, found = rewards.masked_fill(~mask, 0.0), torch.zeros_like(rewards)
    for k in range(rewards.shape[1]):
        found[:, k] = sum(gamma ** (j - k) * rewards[:, j] for j in range(k, rewards.shape[1]))
    return found


TURN_RETURNS = Exercise(
    "15.1",
    "turn_returns",
    cases=[
        # 1 after 3 turns, half as much per turn; 2 + 4/2, then 4. What stands outside the mask does not count.
        Case(
            {"rewards": floats([[0, 0, 1], [2, 4, 9]]), "mask": bools([[1, 1, 1], [1, 1, 0]]), "gamma": 0.5},
            floats([[0.25, 0.5, 1], [4, 4, 0]]),
        ),
        Case({"rewards": floats([[1, -1]]), "mask": bools([[1, 1]]), "gamma": 1.0}, floats([[0, -1]])),
    ],
    random=random_turns,
    padding="rewards",
    mistakes={
        "is the reward of each turn alone: later rewards are its merit, too": lambda r, m, g: r.masked_fill(~m, 0.0),
        "is the sum up to each turn: a turn earns what comes after it": (
            lambda r, m, g: r.masked_fill(~m, 0.0).cumsum(1) * m
        ),
        "has no discount": lambda r, m, g: returns_of(r, m, 1.0),
        "discounts a turn's own reward, too": lambda r, m, g: g * returns_of(r, m, g),
        "leaves out a turn's own reward": lambda r, m, g: returns_of(r, m, g) - r.masked_fill(~m, 0.0),
        "gives every turn the return of the first": (
            lambda r, m, g: returns_of(r, m, g)[:, :1].expand(m.shape).masked_fill(~m, 0.0)
        ),
        "discounts by the turn's number: γ counts the turns from here on": (
            lambda r, m, g: returns_of(r, m, g) * g ** torch.arange(m.shape[1])
        ),
    },
)


def random_states(rng):
    return {"returns": torch.randn(9, generator=rng), "states": torch.tensor([0, 1, 2, 0, 1, 0, 7, 0, 1])}


def by_state(judge):
    """A function of returns and states from judge(the returns in one state, all returns)."""

    def of_all(returns, states):
        found = torch.zeros_like(returns)
        for state in states.unique():
            found[states == state] = judge(returns[states == state], returns)
        return found

    return of_all


def normalised(found, correction=1):
    std = found.std(correction=correction) if len(found) > 1 else torch.ones(())
    return (found - found.mean()) / (std + 1e-6) if len(found) > 1 else torch.zeros_like(found)


STATE_ADVANTAGES = Exercise(
    "15.2",
    "state_advantages",
    cases=[
        # State 5: mean 2, deviations −1, 0, 1, standard deviation 1. State 3: mean 2, standard deviation √2.
        Case(
            {"returns": floats([1, 2, 3, 1, 3]), "states": torch.tensor([5, 5, 5, 3, 3])},
            floats([-1, 0, 1, -(0.5**0.5), 0.5**0.5]),
        ),
        Case({"returns": floats([4, 7, 4]), "states": torch.tensor([1, 2, 1])}, floats([0, 0, 0])),  # 7 is alone
    ],
    random=random_states,
    mistakes={
        "is normalised over all turns: only those with an equal state are compared": (
            lambda returns, states: normalised(returns)
        ),
        "does not divide by the standard deviation": by_state(lambda found, _: found - found.mean()),
        "does not subtract the mean": by_state(
            lambda found, _: normalised(found) + (found.mean() / (found.std() + 1e-6) if len(found) > 1 else 0.0)
        ),
        "std divides by the number of turns: it should be that minus 1": by_state(
            lambda found, _: normalised(found, correction=0)
        ),
        "a turn alone in its state keeps its return: with nothing to compare it gets 0": by_state(
            lambda found, _: normalised(found) if len(found) > 1 else found
        ),
        "the mean is of all turns": by_state(
            lambda found, every: (found - every.mean()) / (found.std() + 1e-6) if len(found) > 1 else 0 * found
        ),
        "has the wrong sign: a higher return is better": by_state(lambda found, _: -normalised(found)),
    },
)

EXERCISES = [TURN_RETURNS, STATE_ADVANTAGES]
