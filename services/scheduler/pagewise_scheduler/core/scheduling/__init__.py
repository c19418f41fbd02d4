"""Scheduling: requests, sequences, queues, the scheduler."""
