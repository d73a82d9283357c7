"""The parts of evaluate.py: what it asks a model, and how it counts and prints the answers."""
