"""Structured output: what requests ask for, as grammars that executors follow."""
