"""What the tables of options say, from the configurations of all commands."""

import re
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from msgspec import Struct
from pagewise_shared.config import (
    ExecutorConfig,
    GatewayConfig,
    GatewaysConfig,
    Option,
    SchedulerConfig,
    ServeConfig,
    UpConfig,
    options_of,
    vllm,
)
from pagewise_shared.config.options import GROUPS

COMMANDS: dict[str, type[Struct]] = {
    "serve": ServeConfig,
    "up": UpConfig,
    "gateways": GatewaysConfig,
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "executor": ExecutorConfig,
}
"""The configuration of each command; the first three are of ``pagewise``, the others are ``pagewise-NAME``."""

_ALL = "all"


def described() -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Each group of the help: its title, and a row for each option.

    The first one, without a title, has the options that ``pagewise serve`` has not.
    """
    kinds = list(options())
    titles = {name: title for title, names in GROUPS.items() for name in names}
    for title in ("", *GROUPS):
        yield (
            title,
            [
                (f"`{_shown(option)}`", ", ".join(commands), default_of(option), _meaning(option))
                for option, commands in kinds
                if titles.get(option.name, "API keys" if option.secret else "") == title
            ],
        )


def of_vllm() -> Iterator[tuple[str, str]]:
    """The options of ``vllm serve`` that are accepted under another name, or without an effect."""
    options = options_of(ServeConfig)
    same = {option.flag for option in options.values()}
    for name, (option_name, _) in vllm.ALIASES.items():
        if name not in same:
            option = options[option_name]
            yield f"`{name}`", f"`{option.variable if option.secret else option.flag}`"
    yield from ((f"`{name}`", "always on") for name in sorted(vllm.ALWAYS))
    for name, accepted in vllm.ONLY.items():
        yield f"`{name}`", "only " + ", ".join(f"`{each}`" for each in accepted)


def options() -> Iterator[tuple[Option, list[str]]]:
    """Each option with the commands that have it, in the order of the help."""
    order = [name for names in GROUPS.values() for name in names]
    found: list[tuple[Option, list[str]]] = []
    for command, config in COMMANDS.items():
        for option in options_of(config).values():
            for known, commands in found:
                if known == option:
                    commands.append(command)
                    break
            else:
                found.append((option, [command]))
    for option, commands in sorted(found, key=lambda one: order.index(one[0].name) if one[0].name in order else -1):
        yield option, [_ALL] if len(commands) == len(COMMANDS) else commands


def _shown(option: Option) -> str:
    if option.secret:
        return option.variable
    return "MODEL" if option.name == "model" else option.flag


def default_of(option: Option) -> str:
    """Its default, and what else it may be if that is one of a few words."""
    base = option.hint
    while get_args(base) and get_origin(base) is not Literal:
        base = get_args(base)[0]
    if get_origin(base) is Literal:
        others = [choice for choice in get_args(base) if choice != option.default]
        default = "none" if option.default is None else f"`{option.default}`"
        return f"{default} (or {', '.join(others)})"
    told = re.search(r"\(default: (.+)\)$", str(option.meta.get("text", "")))
    if told:
        return told[1]
    if option.default is None:
        return ""
    if isinstance(option.default, bool):
        return "yes" if option.default else "no"
    return f"`{option.default:g}`" if isinstance(option.default, float) else f"`{option.default}`"


def _meaning(option: Option) -> str:
    text = re.sub(r" \(default: .+\)$", "", str(option.meta.get("text", "")))
    more = option.meta.get("more")
    return f"{text}. {more}" if more else text
