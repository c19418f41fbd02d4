"""Models: loading them, through transformers or without it, and making them fast."""
