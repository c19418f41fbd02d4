"""The error of a command that cannot do its work."""


class CommandError(Exception):
    """``pagewise`` prints its text behind the name of the command, and ends with exit code 1."""
