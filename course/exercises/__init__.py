"""What you write: a file for each lesson, and step.py. `python -m course.check 0` checks one."""
