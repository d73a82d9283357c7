"""Command-line tools, and the bookkeeping that every trainer shares."""
