"""Tokenizing, chat templates and incremental detokenizing."""
