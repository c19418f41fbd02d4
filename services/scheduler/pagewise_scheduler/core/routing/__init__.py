"""Routing: the placement of requests on executors, by their cached prefixes, queues and evictions, and migrations."""
