"""Commands for people who train: compare, diff, doctor, merge, watch. maintain/ has the maintainers' commands."""
