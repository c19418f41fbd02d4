"""Paged attention kernels and their helpers."""
