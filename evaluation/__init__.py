"""The parts of evaluate.py: settings, problems, sampling, scores, tables."""
