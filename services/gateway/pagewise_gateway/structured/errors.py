"""The errors of grammars."""


class GrammarError(Exception):
    """A grammar cannot be used; the text says why."""


class TooManyGrammarsError(Exception):
    """Too many grammars of an API key wait to be compiled."""
