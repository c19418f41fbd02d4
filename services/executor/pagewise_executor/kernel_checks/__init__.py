"""Tries each Triton kernel that serving needs on a tiny problem, and compares its results with PyTorch's."""
