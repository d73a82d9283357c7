"""Commands for people who train: compare, diff, watch, gap, doctor, merge. maintain/ has those of maintainers."""
