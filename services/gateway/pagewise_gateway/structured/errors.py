"""The error of grammars."""


class GrammarError(Exception):
    """A grammar cannot be used; the text says why."""
