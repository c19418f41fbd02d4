"""Models: loading them through transformers, and making them fast."""
