"""``pagewise completion``: lets a shell complete commands, options and their words, by argcomplete.

Commands with a configuration complete their options; other commands complete files.
"""

import argparse
from collections.abc import Iterable, Sequence

from argcomplete import autocomplete
from argcomplete.shell_integration import shellcode
from msgspec import Struct
from pagewise_shared.config import GatewaysConfig, ServeConfig, UpConfig
from pagewise_shared.config.reading import add_options

_CONFIGS: dict[str, type[Struct]] = {"serve": ServeConfig, "gateways": GatewaysConfig, "up": UpConfig}


def completion(arguments: Sequence[str]) -> int:
    """Print the script for a shell, which asks ``pagewise`` for completions; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="pagewise completion",
        description='Print a script that completes the command line: eval "$(pagewise completion bash)" in ~/.bashrc, '
        "the same with zsh in ~/.zshrc after compinit, or pagewise completion fish | source in config.fish.",
    )
    parser.add_argument("shell", choices=("bash", "fish", "zsh"))
    print(shellcode(["pagewise"], True, parser.parse_args(arguments).shell))
    return 0


def complete(commands: Iterable[str]) -> None:
    """Answer a shell that asks for completions, and end the process. ``commands``: of ``pagewise``."""
    parser = argparse.ArgumentParser(prog="pagewise", add_help=False)
    found = parser.add_subparsers()
    for name in commands:
        config = _CONFIGS.get(name)
        command = found.add_parser(name, add_help=config is not None)
        if config is not None:
            command.add_argument("--version", action="version")
            add_options(command, config)
    autocomplete(parser)
