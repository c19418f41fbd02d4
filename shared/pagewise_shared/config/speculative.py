"""The option of speculative decoding, by vLLM's names; ``docs/speculation.md`` describes it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from pagewise_shared.config.kinds import described
from pagewise_shared.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
"""The most tokens of a draft; and of the drafts of a step, together with one for each sequence that runs, unless
``max_num_seqs`` is more."""

_Few = Annotated[int, Meta(ge=1, le=32)]
_LOOKUP = "prompt_lookup_max", "prompt_lookup_min"
_SHORT = "ngram:"

SpeculativeOption = Annotated[
    str | None,
    described(
        "draft tokens that a sequence may go on with, and verify them in one step: ngram:K, or JSON as for vLLM "
        "(default: do not)",
        "CONFIG",
        '`ngram:K` is short for `{"method": "ngram", "num_speculative_tokens": K}`. [speculation.md](speculation.md) '
        "describes the other fields, and when it pays.",
    ),
    Meta(extra={"short": "--speculative"}),
]


class SpeculativeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drafted.

    Fields:
        method: "ngram": by looking up where the last tokens of a sequence stood before, in its prompt or its output.
        num_speculative_tokens: most tokens of a draft.
        prompt_lookup_max, prompt_lookup_min: how many of the last tokens are looked up: as many as are found again. If
            only one of them is asked for, the other equals it.
        disable_by_batch_size: with more sequences running on an executor than this, nothing is drafted.
    """

    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_SPECULATIVE_TOKENS)]
    method: Literal["ngram"] = "ngram"
    prompt_lookup_max: _Few = 4
    prompt_lookup_min: _Few = 3
    disable_by_batch_size: _Few = 2


def parse_speculative(text: str) -> SpeculativeConfig:
    """Parse the value of ``--speculative-config``.

    Raises:
        ConfigError: the value is neither ``ngram:K`` nor a JSON object of a ``SpeculativeConfig``.
    """
    name = "--speculative-config"
    try:
        short = text.startswith(_SHORT)
        wanted = {"num_speculative_tokens": text.removeprefix(_SHORT)} if short else msgspec.json.decode(text)
        for given, other in (_LOOKUP, _LOOKUP[::-1]):
            if isinstance(wanted, dict) and given in wanted:
                wanted.setdefault(other, wanted[given])
        config = msgspec.convert(wanted, SpeculativeConfig, strict=not short)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name}: {error} (got {text!r}; ngram:4 is an example)") from error
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(f"{name}: prompt_lookup_min is greater than prompt_lookup_max, {config.prompt_lookup_max}")
    return config


def check_speculative(values: Mapping[str, Any]) -> None:
    """Check the option, if it was given.

    Raises:
        ConfigError: it is unusable.
    """
    if values.get("speculative_config") is not None:
        parse_speculative(values["speculative_config"])
