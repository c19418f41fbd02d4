"""``pagewise completion``: scripts that let a shell complete commands, options and their words.

They are made from the declarations of the options. Commands that have no such declarations complete files.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from pagewise_shared.config import GatewaysConfig, ServeConfig, UpConfig, options_of
from pagewise_shared.config.reading import flags_of, words_of

_CONFIGS: dict[str, type[Struct]] = {"serve": ServeConfig, "gateways": GatewaysConfig, "up": UpConfig}

_BASH = """\
_pagewise() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" words="" before=""
  COMPREPLY=()
  case "$cur" in
    --*=*) prev="${{cur%%=*}}" before="${{cur%%=*}}=" cur="${{cur#*=}}" ;;  # zsh
    =) [ "$COMP_CWORD" -lt 3 ] || cur="" ;;  # bash takes the sign for a word
    *) [ "$prev" != = ] || prev="${{COMP_WORDS[COMP_CWORD-2]}}" ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}:$prev" in
{values}
    esac
    if [ -z "$words" ]; then
      case "${{COMP_WORDS[1]}}:$cur" in
{options}
      esac
    fi
  fi
  [ -z "$words" ] || COMPREPLY=($(compgen -P "$before" -W "$words" -- "$cur"))
}}
complete -o default -F _pagewise pagewise
"""


def completion(arguments: Sequence[str], commands: Iterable[str]) -> int:
    """Print the script for a shell; returns the process's exit code. ``commands``: of ``pagewise``."""
    parser = argparse.ArgumentParser(
        prog="pagewise completion",
        description='Print a script that completes the command line: eval "$(pagewise completion bash)" in ~/.bashrc, '
        "the same with zsh in ~/.zshrc after compinit, or pagewise completion fish | source in config.fish.",
    )
    parser.add_argument("shell", choices=sorted(_SCRIPTS))
    print(_SCRIPTS[parser.parse_args(arguments).shell](sorted(commands)), end="")
    return 0


def _bash(commands: list[str]) -> str:
    values = [
        f'      {name}:{flag}) words="{" ".join(words)}" ;;'
        for name, config in _CONFIGS.items()
        for flag, words in _words(config)
    ]
    options = [f'        {name}:-*) words="{" ".join(flags_of(config))}" ;;' for name, config in _CONFIGS.items()]
    return _BASH.format(commands=" ".join(commands), values="\n".join(values), options="\n".join(options))


def _zsh(commands: list[str]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(commands)


def _fish(commands: list[str]) -> str:
    lines = [f'complete -c pagewise -n __fish_use_subcommand -f -a "{" ".join(commands)}"']
    for name, config in _CONFIGS.items():
        within = f'complete -c pagewise -n "__fish_seen_subcommand_from {name}"'
        words = dict(_words(config))
        for flag in flags_of(config):
            kind, bare = ("-l", flag[2:]) if flag.startswith("--") else ("-o", flag[1:])
            lines.append(f"{within} {kind} {bare}" + (f' -x -a "{" ".join(words[flag])}"' if flag in words else ""))
    return "\n".join(lines) + "\n"


def _words(config: type[Struct]) -> list[tuple[str, tuple[str, ...]]]:
    """The options that take one of a few words, with these."""
    return [(option.flag, words) for option in options_of(config).values() if (words := words_of(option))]


_SCRIPTS: dict[str, Callable[[list[str]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
