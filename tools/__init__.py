"""Commands for people who train: compare, diff, watch, gap, doctor, merge. maintain/ has the maintainers' commands."""
