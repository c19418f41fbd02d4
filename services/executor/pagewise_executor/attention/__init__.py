"""Paged attention: one backend in PyTorch and one in Triton, and how transformers' models call them."""
