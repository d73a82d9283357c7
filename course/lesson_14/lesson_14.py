"""Lesson 14: imitation, then reinforcement. Write two functions, then `python -m course.check 14`.

N is the number of answers, P the number of puzzles. Answers to the same puzzle follow each other.
"""

import torch


def kept(rewards, group_size, most):
    """Which answers expert iteration learns, [N], bool.

    rewards: [N], 1 for a right answer and 0 for a wrong one. group_size: answers per puzzle.

    Right answers are kept, the first `most` of each puzzle: otherwise the easy puzzles, which are
    solved every time, would fill the data.

    Pay attention to the puzzles: each has a limit of its own.
    """
    raise NotImplementedError


def pass_at_k(num_right, num_samples, k):
    """pass@k, a number: the probability that at least one of k answers to a puzzle is right.

    num_right: [P], int64, the number of right answers to each puzzle, of num_samples. The mean over
    the puzzles of

        1 − C(num_samples − num_right, k) / C(num_samples, k)

    with binomial coefficients C (Chen et al., arXiv 2107.03374, eq. 1): k of the num_samples
    answers are drawn, each at most once, and the fraction is the probability that all are wrong.

    Pay attention to the mean: it is taken over pass@k of the puzzles, not over num_right.
    """
    raise NotImplementedError


# 14.3 (open)  If the kept answers of a round make one update, it is a step of a policy gradient. A
# share p of the answers is right (own_answers prints it). Write the weights of right and of wrong
# answers in expert iteration, and in reinforce.py, with p of your own round. Which baseline turns
# one into the other? Is the mean gradient the same, and the noise? What does `most` change?
