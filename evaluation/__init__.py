"""The parts of evaluate.py: settings, problems, sampling, scores, tables."""

import runtime  # noqa: F401  # first: it says in one line which packages are missing
