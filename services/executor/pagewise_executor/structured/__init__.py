"""Structured output: keeps the tokens that are sampled within the grammars of their requests."""
