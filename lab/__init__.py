"""The lab: commands that show on any model what the papers say about tokens. See README.md."""
