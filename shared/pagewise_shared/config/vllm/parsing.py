"""Lets a command line, and the constructor of ``LLM``, take the options of ``vllm serve``."""

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pagewise_shared.config.vllm import FLAGS
from pagewise_shared.errors import ConfigError

BY_NAME = {name: flag for flag in FLAGS for name in flag.names}
"""The options by each of their names."""


def reader(name: str) -> Callable[[str], Any]:
    """Return what reads a value of our option ``name``: also values that only vLLM has for it.

    A value that it cannot read stays a text, about which the option itself complains.
    """
    flag = BY_NAME.get(name)

    def read(text: str) -> Any:
        try:
            return text if flag is None else flag.read(text)
        except (ValueError, KeyError):
            return text

    return read


def add_flags(parser: argparse.ArgumentParser, known: Collection[str], options: Collection[str]) -> None:
    """Let a parser take vLLM's options, or refuse them with a reason.

    ``known``: names that it takes already, which mean the same. ``options``: our options that the command has.
    """
    for name, flag in BY_NAME.items():
        if name in known or (flag.option and flag.option not in options):
            continue
        hidden: dict[str, Any] = {"action": _Set, "dest": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(name, nargs=flag.nargs, **hidden)
        if name.startswith("--") and (flag.switch or False in flag.harmless):
            parser.add_argument(f"--no-{name[2:]}", nargs=0, **hidden)


class _Set(argparse.Action):
    """Sets what an option of vLLM means here."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, name: str | None = None
    ) -> None:
        assert name is not None
        negated = name not in BY_NAME
        flag = BY_NAME[f"--{name.removeprefix('--no-')}" if negated else name]
        try:
            found = flag.values((not negated) if self.nargs == 0 else values, name)
        except ConfigError as error:
            parser.error(str(error))
        for option, value in found.items():
            setattr(namespace, option, value)


def unknown(arguments: Sequence[str], known: Collection[str]) -> str:
    """Return what to say of arguments that a command does not have. ``known``: names of its options."""
    for name in (each.partition("=")[0] for each in arguments if each.startswith("-")):
        base = re.sub(r"(?<=\w)\..*|(?<=^-O)\d$", "", name)  # --compilation-config.mode and -O3 are of vLLM
        if base in BY_NAME:
            return f"{name}, an option of vLLM, is not there: {BY_NAME[base].text}"
        likely = [*known, *(each for each, flag in BY_NAME.items() if flag.accepted)]
        if near := difflib.get_close_matches(name, likely, n=1):
            return f"there is no option {name}: did you mean {near[0]}?"
    return f"unrecognized arguments: {' '.join(arguments)}"


def options_from(given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return keyword arguments with those of vLLM turned into our options.

    Names that neither has are left as they are. ``known``: the names of our options.

    Raises:
        ConfigError: an option of vLLM, or a value of it, is refused.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        flag_name = f"--{name.replace('_', '-')}"
        if name in known:
            found[name] = reader(flag_name)(value) if isinstance(value, str) else value
        elif (flag := BY_NAME.get(flag_name)) is not None:
            found |= flag.values(value if isinstance(value, bool | list) else str(value), name)
        else:
            found[name] = value
    return found
