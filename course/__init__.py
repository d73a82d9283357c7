"""The course: lessons, exercises that check themselves, and a notebook. See README.md."""
