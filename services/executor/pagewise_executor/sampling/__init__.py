"""Sampling: from logits to tokens and log-probabilities, keyed by seed and position."""
