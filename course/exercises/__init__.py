"""What you write: lesson_0.py to lesson_8.py. `python -m course.check 0` checks the first."""
