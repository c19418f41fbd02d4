"""Replays request traces on the scheduler core, under a virtual clock."""
