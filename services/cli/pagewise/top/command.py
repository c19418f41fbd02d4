"""The command itself, and its checks of the terminal and of the libraries that it needs."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from pagewise.client import CommandError, add_url


def top(arguments: Sequence[str]) -> int:
    """Run ``pagewise top`` until it is ended by ``q``; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="pagewise top",
        description="Show executors, their memory and the requests of a running server, full-screen. Its data are "
        "those of the console, so it needs an operator's key where there are API keys (PAGEWISE_API_KEY). NO_COLOR=1 "
        "shows it without colours.",
    )
    add_url(parser)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("textual") is None:
        raise CommandError("it needs textual: pip install 'pagewise[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise CommandError(
            "it needs a terminal that can place text, and TERM is dumb or this is a pipe: use `pagewise vmstat`"
        )
    from pagewise.top.app import Top

    return Top(options.url).run() or 0
