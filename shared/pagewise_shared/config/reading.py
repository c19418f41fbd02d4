"""Reads options from the command line, the environment and the defaults."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from pagewise_shared.config.options import GROUPS
from pagewise_shared.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=Struct)

VARIABLE_PREFIX = "PAGEWISE_"
"""What the names of all environment variables begin with."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_config(
    config_type: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    environ: Mapping[str, str] | None = None,
) -> ConfigT:
    """Read a configuration from the command line, then the environment, then the defaults.

    Exits with code 2 and a line that names the option or variable if one is unusable (as argparse does).
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [OPTIONS] [MODEL]",
        description=description,
        epilog="Every option can be set by an environment variable too: --max-num-seqs is PAGEWISE_MAX_NUM_SEQS.",
        allow_abbrev=False,
    )
    hints = get_type_hints(config_type, include_extras=True)
    fields = {field.name: field for field in msgspec.structs.fields(config_type)}
    grouped = [(title, name) for title, names in GROUPS.items() for name in names if name in fields]
    groups = {title: parser.add_argument_group(title) for title, _ in grouped}
    titles = {name: title for title, name in grouped}
    # In the order of the groups; what is in none (the model) stands at the top.
    for name in [*(name for name in fields if name not in titles and name not in secrets(config_type)), *titles]:
        _add_argument(groups[titles[name]] if name in titles else parser, name, hints[name], fields[name].default)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    if (model := given.pop("model_argument", None)) is not None:
        given["model"] = model
    try:
        return build_config(config_type, given, os.environ if environ is None else environ)
    except ConfigError as error:
        parser.error(str(error))


def build_config(config_type: type[ConfigT], given: Mapping[str, Any], environ: Mapping[str, str]) -> ConfigT:
    """A configuration from option values by field name, environment variables, and defaults.

    Raises:
        ConfigError: a value is unusable; the text names the option or variable it came from.
    """
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(config_type):
        variable = VARIABLE_PREFIX + field.name.upper()
        if field.name in given:
            values[field.name] = _convert(given[field.name], field.type, _flag(field.name))
        elif environ.get(variable) and field.name in secrets(config_type):
            values[field.name] = environ[variable]
        elif environ.get(variable):
            values[field.name] = _convert(environ[variable], field.type, variable)
    if values.get("num_blocks") is not None and values.get("kv_memory") is not None:
        raise ConfigError("--num-blocks and --kv-memory both set the size of the KV pool: give one")
    for name in ("kv_memory", "host_memory", "host_bandwidth"):
        if values.get(name) is not None:
            parse_size(values[name])
    return config_type(**values)


def to_argv(config: Struct, target: type[Struct]) -> list[str]:
    """The options of ``config`` that ``target`` has too and that differ from its defaults, as arguments."""
    argv = []
    for field in msgspec.structs.fields(target):
        value = getattr(config, field.name, None)
        if value is None or value == field.default or field.name in secrets(target):
            continue
        if isinstance(value, bool):
            argv.append(_flag(field.name) if value else "--no-" + _flag(field.name)[2:])
        else:
            argv.append(f"{_flag(field.name)}={value}")
    return argv


def secrets(config_type: type[Struct]) -> list[str]:
    """Fields that are read from the environment alone."""
    hints = get_type_hints(config_type, include_extras=True)
    return [name for name, hint in hints.items() if any((meta.extra or {}).get("secret") for meta in _metas(hint))]


def secret_variables(config: Struct, target: type[Struct]) -> dict[str, str]:
    """The environment that tells ``target`` the secrets of ``config``; ``to_argv`` leaves them out."""
    values = {name: getattr(config, name, None) for name in secrets(target)}
    return {VARIABLE_PREFIX + name.upper(): value for name, value in values.items() if value is not None}


def parse_size(text: str) -> int:
    """Bytes in a size such as ``4GiB``, ``500MB`` or ``1073741824``.

    Raises:
        ConfigError: it is no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if match is None or match[2] == "I" or float(match[1]) <= 0:
        raise ConfigError(f"{text!r} is no size: write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _convert(value: Any, kind: Any, source: str) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error} (got {value!r})") from error


def _add_argument(parser: argparse._ActionsContainer, name: str, hint: Any, default: Any) -> None:
    help_text, metavar, choices = "", None, None
    for meta in _metas(hint):
        help_text = meta.description or help_text
        metavar = (meta.extra or {}).get("metavar", metavar)
    base = _base(hint)
    if get_origin(base) is Literal:
        choices = get_args(base)
    if default is not None and default is not False and "(default" not in help_text:
        help_text += f" (default: {default})"
    if name == "model":
        parser.add_argument("model_argument", nargs="?", metavar=metavar, help=help_text)
        parser.add_argument("--model", help=argparse.SUPPRESS)
    elif base is bool:
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None, help=help_text)
    else:
        parser.add_argument(_flag(name), metavar=metavar, choices=choices, help=help_text.replace("%", "%%"))


def _metas(hint: Any) -> list[Meta]:
    if get_origin(hint) is Annotated:
        return [*_metas(get_args(hint)[0]), *(meta for meta in hint.__metadata__ if isinstance(meta, Meta))]
    return []


def _base(hint: Any) -> Any:
    return _base(get_args(hint)[0]) if get_origin(hint) is Annotated else hint
