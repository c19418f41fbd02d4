"""The errors of grammars."""


class GrammarError(Exception):
    """A grammar cannot be used; the text gives the reason."""


class TooManyGrammarsError(Exception):
    """Too many grammars of an API key wait to be compiled."""
