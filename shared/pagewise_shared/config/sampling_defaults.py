"""The defaults of sampling parameters, which ``--generation-config`` and its override set."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from pagewise_shared.errors import ConfigError

Temperature = Annotated[float, Meta(ge=0, le=100)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-6, le=100)]
_OVERRIDE = "--override-generation-config"


class SamplingDefaults(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Values for parameters that a request does not give; None: the API's default.

    The names are the names of generation_config.json. vLLM takes the same parameters from the file.

    Fields:
        max_new_tokens: the number of output tokens, in all APIs but ``/v1/completions``, whose own default is 16.
    """

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None

    def values(self) -> dict[str, float]:
        """Return the values that are set, by name."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}


NAMES = tuple(field.name for field in fields(SamplingDefaults))


def parse_override(text: str | None) -> SamplingDefaults:
    """Parse the value of ``--override-generation-config``; None: it was not given.

    Raises:
        ConfigError: it is no JSON object, or has a name or a value that cannot be used.
    """
    if text is None:
        return SamplingDefaults()
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"{_OVERRIDE} is no JSON object: {error} (got {text!r})") from error
    for name in given:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
            raise ConfigError(f"{_OVERRIDE} cannot set {name!r}: {meant}")
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_OVERRIDE}: {error}") from error


def check_sampling_defaults(values: Mapping[str, Any]) -> None:
    """Check the override, if it was given.

    Raises:
        ConfigError: it is unusable.
    """
    parse_override(values.get("override_generation_config"))
