"""Command-line tools: what people call, and no trainer needs."""
