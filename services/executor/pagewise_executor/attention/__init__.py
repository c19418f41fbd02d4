"""Paged attention: in PyTorch and in Triton, and the way into transformers' models."""
