"""Paged attention in PyTorch: what a step has to know, decode and prefill, and the way into transformers' models."""
