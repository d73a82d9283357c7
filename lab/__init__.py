"""The lab: commands that test, on any model, the papers' claims about tokens. See README.md."""
