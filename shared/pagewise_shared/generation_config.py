"""Reads the sampling defaults and the additional end tokens of a model from generation_config.json."""

import logging
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from pagewise_shared.config import GatewayConfig
from pagewise_shared.config.sampling_defaults import NAMES, SamplingDefaults, parse_override
from pagewise_shared.errors import ConfigError, ModelError
from pagewise_shared.model_files import read_json, token_ids

log = logging.getLogger(__name__)

_FILE = "generation_config.json"


class GenerationConfig(Struct, frozen=True):
    """The sampling defaults and end tokens of a model, as the options and the file set them.

    Fields:
        defaults: values for parameters that requests do not give.
        limits_output: whether ``defaults.max_new_tokens`` is the most that a request may ask for, too.
        eos_token_ids: end tokens of a folder other than the model's.
    """

    defaults: SamplingDefaults = SamplingDefaults()
    limits_output: bool = False
    eos_token_ids: frozenset[int] = frozenset()

    def limited(self, wanted: int | None) -> int | None:
        """Return the maximum number of output tokens of a request. ``wanted``: its own; None: it gives none."""
        most = self.defaults.max_new_tokens if self.limits_output else None
        return wanted if wanted is None or most is None else min(wanted, most)

    def default_tokens(self, otherwise: int) -> int:
        """Return the maximum number of output tokens of a request that gives none. ``otherwise``: the maximum without
        this configuration."""
        most = self.defaults.max_new_tokens
        return otherwise if most is None else min(otherwise, most)


def folder_error(folder: str) -> str | None:
    """Return why a value of ``--generation-config`` cannot be used; None: it can."""
    if folder in ("auto", "vllm") or (Path(folder).expanduser() / _FILE).is_file():
        return None
    what = f"has no {_FILE}" if Path(folder).expanduser().is_dir() else "is no folder"
    return f"{folder} {what}; the other values are auto (the model's folder) and vllm (no defaults of the model)"


def read_generation_config(config: GatewayConfig, model: Path) -> GenerationConfig:
    """Return the configuration that ``--generation-config`` and ``--override-generation-config`` choose, and log its
    defaults. ``model``: the model's directory.

    As in vLLM, a number of tokens in the override or in a folder that was named limits all requests; a number in the
    model's own file is a default.

    Raises:
        ConfigError: there is no such folder, or the override is unusable.
        ModelError: the file cannot be read, or has a value that cannot be used.
    """
    source, override = config.generation_config, parse_override(config.override_generation_config)
    if (problem := folder_error(source)) is not None:
        raise ConfigError(f"--generation-config: {problem}")
    own = source in ("auto", "vllm")
    file = (model if own else Path(source).expanduser()) / _FILE
    content = read_json(file)
    defaults = SamplingDefaults() if source == "vllm" else _defaults(file, content)
    _log(defaults, file, override)
    return GenerationConfig(
        replace(defaults, **override.values()),
        limits_output=not own or override.max_new_tokens is not None,
        eos_token_ids=frozenset() if own else token_ids(content.get("eos_token_id")),
    )


def _defaults(file: Path, content: dict[str, Any]) -> SamplingDefaults:
    given = {name: content[name] for name in NAMES if content.get(name) is not None}
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: {error}; --generation-config vllm takes no defaults from it") from error


def _log(defaults: SamplingDefaults, file: Path, override: SamplingDefaults) -> None:
    origins = [(replace(defaults, **dict.fromkeys(override.values())), str(file))]
    origins.append((override, "--override-generation-config"))
    parts = [
        f"{', '.join(f'{name}={value:g}' for name, value in values.items())} from {origin}"
        for given, origin in origins
        if (values := given.values())
    ]
    if parts:
        log.info("sampling defaults of requests: %s", "; ".join(parts))
