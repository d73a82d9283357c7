"""Lesson 8: a study of your own. Write the two functions, then run `python -m course.check 8`."""

import torch


def paired_difference(a, b):
    """(mean, standard error) of the differences a − b, two numbers.

    a, b: [seeds], of float; a[i] and b[i] were measured with the same seed. At least two seeds.

        standard error = std of the differences (ddof 1) / √seeds
                                (mean_and_error in lab/common.py, of the differences)

    Pay attention: the error comes from the differences. What a seed does to both cancels.
    """
    raise NotImplementedError


def bootstrap_interval(correct, repeats, generator):
    """(low, high): the 95 % interval of the accuracy over problems, by the percentile bootstrap.

    correct [problems], of bool: one answer to each problem. repeats: number of resamples.
    generator: a torch.Generator; all random numbers come from it.

    A resample draws as many problems as there are, with replacement. low and high are the 2.5 % and
    97.5 % quantiles of the resamples' accuracies (Efron 1979; Efron & Tibshirani 1993, Chapter 13).

    Pay attention: correct is of bool, and a mean needs floats. One call of torch.randint is enough.
    """
    raise NotImplementedError


# 8.3 (open)  What can three runs of 8 steps not tell? Take ACPO's difference in
# benchmarks/kk_tiny/clip.md, mean of evaluations 4 and 8. Compute its 95 % interval twice: with the
# row's own ± (× 4.30), and with the pooled error below the table (5 degrees of freedom: × 2.57). Do
# the two agree? Which do you believe, and why? Then plan a study: question, measure, seeds, test
# puzzles, steps. A plan's numbers are the interval, the seeds that an effect of a named size needs,
# and the runtime.
