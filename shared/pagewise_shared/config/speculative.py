"""The option of speculative decoding, by vLLM's names; ``docs/speculation.md`` describes it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from pagewise_shared.config.kinds import described
from pagewise_shared.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 64
"""The most tokens of a draft; and of the drafts of a step, together with one for each sequence that runs, unless
``max_num_seqs`` is more."""

MAX_PROPOSED_TOKENS = 16
"""The most tokens that a model drafts at a time."""

_DRAFT_MODELS = Literal["eagle3", "mtp"]
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
        "describes the other methods and fields, and when it pays. Executors draft with `mtp` and `eagle3`, the "
        "scheduler with `ngram`.",
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


class DraftModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that drafts beside the model that an executor serves.

    Fields:
        method: "mtp": the layer for multi-token prediction of the checkpoint itself. "eagle3": an EAGLE-3 head.
        model: the folder or hub id of the head.
        num_speculative_tokens: most tokens of a draft.
        disable_by_batch_size: with more sequences running on an executor than this, nothing is drafted; None: measured
            times alone decide.
    """

    method: _DRAFT_MODELS
    model: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_PROPOSED_TOKENS)] = 3
    disable_by_batch_size: Annotated[int, Meta(ge=1)] | None = None


def parse_speculative(text: str) -> SpeculativeConfig | DraftModelConfig:
    """Parse the value of ``--speculative-config``.

    Raises:
        ConfigError: the value is neither ``ngram:K`` nor a JSON object of one of the two types.
    """
    name = "--speculative-config"
    try:
        short = text.startswith(_SHORT)
        wanted = {"num_speculative_tokens": text.removeprefix(_SHORT)} if short else msgspec.json.decode(text)
        for given, other in (_LOOKUP, _LOOKUP[::-1]):
            if isinstance(wanted, dict) and given in wanted:
                wanted.setdefault(other, wanted[given])
        if isinstance(wanted, dict) and wanted.get("method") in get_args(_DRAFT_MODELS):
            return _with_model(msgspec.convert(wanted, DraftModelConfig), name)
        config = msgspec.convert(wanted, SpeculativeConfig, strict=not short)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name}: {error} (got {text!r}; ngram:4 is an example)") from error
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(f"{name}: prompt_lookup_min is greater than prompt_lookup_max, {config.prompt_lookup_max}")
    return config


def prompt_lookup(text: str | None) -> SpeculativeConfig | None:
    """Return how ``--speculative-config`` lets the scheduler look up drafts; None: it does not.

    Raises:
        ConfigError: see ``parse_speculative``.
    """
    found = parse_speculative(text) if text else None
    return found if isinstance(found, SpeculativeConfig) else None


def _with_model(config: DraftModelConfig, name: str) -> DraftModelConfig:
    if (config.method == "eagle3") != (config.model is not None):
        needs = "needs the model that drafts" if config.model is None else "has its model in the checkpoint: name none"
        raise ConfigError(f"{name}: the method {config.method} {needs}")
    return config


def check_speculative(values: Mapping[str, Any]) -> None:
    """Check the option, if it was given.

    Raises:
        ConfigError: it is unusable.
    """
    if values.get("speculative_config") is None:
        return
    parse_speculative(values["speculative_config"])
