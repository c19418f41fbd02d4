"""Structured output: makes grammars, which executors follow, of the requests' parameters."""
