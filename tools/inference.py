"""What may be concluded from a few numbers: Student's t, Holm's procedure, a bootstrap of whole clusters.

Used by lab/verdicts.py and tools/words.py.
"""

import functools

import mpmath
import numpy

DRAWS = 2000  # of the bootstrap


def p_value(t, df):
    """The chance of a |t| at least that large under Student's distribution."""
    return float(mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True))


@functools.cache
def student(chance, df):
    """The t that |t| exceeds with this chance, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, df) > chance else (low, middle)
    return high


def holms_level(p_values, alpha):
    """The level at which Holm's procedure tests what it does not reject; all it rejects is below that, too.

    alpha: the chance, at most, that anything is rejected by luck.
    """
    rejected = 0
    for p in sorted(p_values):
        if p > alpha / (len(p_values) - rejected):
            break
        rejected += 1
    return alpha / max(1, len(p_values) - rejected)


def correlation(clusters, in_ranks=False, draws=None):
    """(Pearson's correlation, its standard error by bootstrap); (None, None) if a number is constant.

    clusters: [(x, y)], two lists of numbers each, such as those of a puzzle's responses. Whole clusters are drawn, as
    what one holds is not independent. in_ranks: the ranks among all numbers count, which gives Spearman's. draws: a
    list that gets the bootstrap's correlations.
    """
    sides = [numpy.concatenate([numpy.asarray(c[i], float) for c in clusters]) for i in (0, 1)]
    if any(len(set(side)) < 2 for side in sides):
        return None, None
    # Centred, so that the sums of squares keep their digits.
    x, y = ((of - of.mean()) / of.std() for of in (map(ranks, sides) if in_ranks else sides))
    ends = numpy.cumsum([len(c[0]) for c in clusters])[:-1]
    columns = [numpy.ones(len(x)), x, y, x * x, y * y, x * y]
    sums = numpy.array([[part.sum() for part in numpy.split(column, ends)] for column in columns])
    share = [1 / len(clusters)] * len(clusters)
    counts = numpy.random.default_rng(0).multinomial(len(clusters), share, DRAWS)
    n, x, y, xx, yy, xy = sums @ numpy.vstack([numpy.ones(len(clusters)), counts]).T
    with numpy.errstate(invalid="ignore"):
        found = numpy.nan_to_num((n * xy - x * y) / numpy.sqrt((n * xx - x * x) * (n * yy - y * y)))
    if draws is not None:
        draws.extend(found[1:])
    return float(found[0]), float(found[1:].std(ddof=1))


def ranks(values):
    """The ranks of the values, from 1; equal values share the mean of theirs."""
    _, places, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[places]
