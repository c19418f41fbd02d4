"""Requests and their sequences: what is asked for, and how far it has come. Recovery and scheduling build on them."""
