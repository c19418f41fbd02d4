"""Reads options from the command line, the environment and the defaults.

A configuration may be composed of others, as ``ServeConfig`` is of the services' configurations. The options of its
parts are its own. An option that several parts have is given once and applies to all of them.
"""

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from pagewise_shared.config import vllm
from pagewise_shared.config.checks import check
from pagewise_shared.config.options import (
    GROUPS,
    ExecutorConfig,
    GatewayConfig,
    GatewaysConfig,
    SchedulerConfig,
    ServeConfig,
    UpConfig,
)
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import printable
from pagewise_shared.version import package_version

ConfigT = TypeVar("ConfigT", bound=Struct)

VARIABLE_PREFIX = "PAGEWISE_"
"""The prefix of the names of all environment variables."""

_OTHER_VARIABLES = frozenset({"PAGEWISE_URL", "PAGEWISE_API_KEY", "PAGEWISE_HTTP_HOST", "PAGEWISE_HTTP_PORT"})
"""Variables that are not options: two of ``pagewise vmstat`` and ``pmap``, and two of ``compose.yaml``."""


class Option(NamedTuple):
    """One option of a command. ``hint``: its type with constraints; ``meta``: its help text and further annotations."""

    name: str
    hint: Any
    default: Any
    meta: Mapping[str, Any]

    @property
    def secret(self) -> bool:
        """Whether it is read from the environment only."""
        return bool(self.meta.get("environment_only"))

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return _flag(self.name)

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return VARIABLE_PREFIX + self.name.upper()


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
    parser.add_argument("--version", action="version", version=f"{prog} {package_version()}", help="print the version")
    add_options(parser, config_type)
    known = flags_of(config_type)
    vllm.add_flags(parser, known, options_of(config_type).keys())
    arguments, others = parser.parse_known_args(argv)
    if others:
        parser.error(vllm.unknown(others, known))
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if (model := given.pop("model_argument", None)) is not None:
        given["model"] = model
    try:
        return build_config(config_type, given, os.environ if environ is None else environ)
    except ConfigError as error:
        parser.error(str(error))


def add_options(parser: argparse.ArgumentParser, config_type: type[Struct]) -> None:
    """Add the options of a configuration in the order of their groups; the model, which has no group, comes first."""
    found = options_of(config_type)
    for option in found.values():
        if not option.secret and not any(option.name in names for names in GROUPS.values()):
            _add_argument(parser.add_argument, option)
    for title, names in GROUPS.items():
        if options := [found[name] for name in names if name in found]:
            group = parser.add_argument_group(title)
            for option in options:
                _add_argument(group.add_argument, option)


def build_config(config_type: type[ConfigT], given: Mapping[str, Any], environ: Mapping[str, str]) -> ConfigT:
    """Build a configuration from option values by field name, environment variables, and defaults.

    Raises:
        ConfigError: a value is unusable; the text names the option or variable it came from.
    """
    values: dict[str, Any] = {}
    for option in options_of(config_type).values():
        if option.name in given:
            values[option.name] = _convert(given[option.name], option.hint, option.flag)
        elif text := environ.get(option.variable):
            value = text.split() if _is_list(option.hint) else text
            values[option.name] = value if option.secret else _convert(value, option.hint, option.variable)
    check(values, loads_adapters=config_type is not SchedulerConfig)
    return _compose(config_type, values)


def options_of(config_type: type[Struct]) -> dict[str, Option]:
    """Return the options of a configuration by name, including the options of its parts."""
    found: dict[str, Option] = {}
    for name, hint, default in _fields(config_type):
        if (part := _part(hint)) is None:
            found[name] = Option(name, hint, default, _meta(hint))
            continue
        for option in options_of(part).values():
            if option.name not in _meta(hint).get("without", ()):
                same = found.setdefault(option.name, option)
                assert same == option, f"parts of {config_type.__name__} disagree about {option.name}"
    return found


def flags_of(config_type: type[Struct]) -> list[str]:
    """Return all names by which a command line takes the options of a configuration."""
    names = ["--help", "--version"]
    for option in options_of(config_type).values():
        if option.secret:
            continue
        names += [option.flag, *filter(None, [option.meta.get("short")])]
        if _base(option.hint) is bool:
            names.append(f"--no-{option.flag[2:]}")
    return names


def to_argv(config: Struct) -> list[str]:
    """Return the arguments that set the options of ``config`` which differ from the defaults, without secrets."""
    argv = []
    for option in options_of(type(config)).values():
        value = getattr(config, option.name)
        if value is None or value == option.default or option.secret:
            continue
        if isinstance(value, tuple):
            argv += [option.flag, *map(str, value)]
        elif isinstance(value, bool):
            argv.append(option.flag if value else "--no-" + option.flag[2:])
        else:
            argv.append(f"{option.flag}={value}")
    return argv


def secret_variables(config: Struct) -> dict[str, str]:
    """Return the environment variables that pass a service the secrets of ``config``, which ``to_argv`` leaves out."""
    values = {
        option.variable: getattr(config, option.name) for option in options_of(type(config)).values() if option.secret
    }
    return {variable: value for variable, value in values.items() if value is not None}


_OF_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)$")
"""Ends of the variables that it puts into every container for each of the cluster's services."""


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each ``PAGEWISE_*`` variable that nothing of Pagewise reads, with the name nearest to it.

    Variables that only other services read are not meant. Values do not appear: they may be secrets.
    """
    services: list[type[Struct]] = [
        SchedulerConfig,
        GatewayConfig,
        ExecutorConfig,
        GatewaysConfig,
        ServeConfig,
        UpConfig,
    ]
    known = {option.variable for service in services for option in options_of(service).values()} | _OTHER_VARIABLES
    warnings = []
    for name in sorted(environ):
        if not name.startswith(VARIABLE_PREFIX) or name in known or not environ[name]:
            continue
        if _OF_KUBERNETES.search(name):
            continue
        # Without the prefix, which would make all of them similar.
        endings = {each.removeprefix(VARIABLE_PREFIX) for each in known}
        near = difflib.get_close_matches(name.removeprefix(VARIABLE_PREFIX), sorted(endings), n=1)
        meant = f": did you mean {VARIABLE_PREFIX}{near[0]}?" if near else ""
        warnings.append(f"the environment variable {printable(name, 100)} is unknown and has no effect{meant}")
    return warnings


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _convert(value: Any, hint: Any, source: str) -> Any:
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        *others, last = _expected(hint) or [""]
        expected = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"{source} must be {expected} (got {value!r})" if last else f"{source}: {error}") from error


def _expected(hint: Any) -> list[str]:
    """Return the kinds of value and the words that an option of this type takes; empty: it takes any text."""
    base = _base(hint)
    constraints = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta)]
    if base is bool:
        return ["true", "false"]
    if base in (int, float):
        kind = "a whole number" if base is int else "a number"
        names = {"ge": "from", "gt": "above", "le": "to"}
        limits = [
            f"{text} {limit}"
            for meta in constraints
            for name, text in names.items()
            if (limit := getattr(meta, name)) is not None
        ]
        return [" ".join([kind, *limits])]
    if get_origin(base) is Literal:
        return list(get_args(base))
    return [each for part in get_args(base) for each in _expected(part)]


def _compose(config_type: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build a configuration from option values; each part gets the values of its own options."""
    own: dict[str, Any] = {}
    for name, hint, _ in _fields(config_type):
        if (part := _part(hint)) is None:
            own |= {name: values[name]} if name in values else {}
        else:
            taken = options_of(part).keys() - set(_meta(hint).get("without", ()))
            own[name] = _compose(part, {option: value for option, value in values.items() if option in taken})
    return config_type(**own)


def _fields(config_type: type[Struct]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, annotated type and default of each field."""
    hints = get_type_hints(config_type, include_extras=True)
    for field in msgspec.structs.fields(config_type):
        yield field.name, hints[field.name], field.default


def _part(hint: Any) -> type[Struct] | None:
    """Return the type of the configuration that a field holds, or None if the field is an option."""
    base = _base(hint)
    return base if isinstance(base, type) and issubclass(base, Struct) else None


def _add_argument(add: Callable[..., object], option: Option) -> None:
    help_text, metavar, base = option.meta.get("text", ""), option.meta.get("metavar"), _base(option.hint)
    choices = get_args(base) if get_origin(base) is Literal else None
    if (
        option.default is not None
        and option.default is not False
        and option.default != ()
        and "(default" not in help_text
    ):
        help_text += f" (default: {option.default})"
    if option.name == "model":
        add("model_argument", nargs="?", metavar=metavar, help=help_text)
        add("--model", help=argparse.SUPPRESS)
    elif base is bool:
        add(option.flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
    elif _is_list(option.hint):
        add(option.flag, metavar=metavar, nargs="+", help=help_text)
    else:
        flags = [option.flag, *filter(None, [option.meta.get("short")])]
        kind = vllm.reader(option.flag)
        add(*flags, type=kind, metavar=metavar, choices=choices, help=help_text.replace("%", "%%"))


def _is_list(hint: Any) -> bool:
    """Whether an option takes several values."""
    return get_origin(_base(hint)) is tuple


def _meta(hint: Any) -> dict[str, Any]:
    """Return the annotations of a type besides its constraints; ``text`` is the help text."""
    if get_origin(hint) is not Annotated:
        return {}
    found = _meta(get_args(hint)[0])
    for meta in hint.__metadata__:
        if isinstance(meta, Meta):
            found |= (meta.extra or {}) | ({"text": meta.description} if meta.description else {})
    return found


def _base(hint: Any) -> Any:
    return _base(get_args(hint)[0]) if get_origin(hint) is Annotated else hint
