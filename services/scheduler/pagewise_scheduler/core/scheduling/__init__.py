"""Scheduling: admission, prefills, decodes, steps, and the scheduler of an executor."""
