"""Requests and their sequences, the waiting queue, and timelines. Recovery and scheduling build on them."""
