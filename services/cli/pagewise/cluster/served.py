"""What may not change while a deployment runs: executors that differ in it would give other tokens under one name."""

import json
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model

_ALWAYS = ("model", "revision", "quantization", "simulate")
_WHERE_QUANTISED = ("device", "kernels", "tensor_parallel")
"""These change how inputs of quantised layers are rounded (``docs/quantization.md``)."""
_LENGTH_DEPENDENT = ("dynamic",)
"""Types of RoPE whose frequencies follow from ``--max-model-len``."""


class Served(Struct, frozen=True, kw_only=True):
    """Options of executors by which the scheduler, or whoever compares tokens, tells one model from another.

    Every field has a default, because this may come from another version.
    """

    model: str = ""
    revision: str | None = None
    quantization: str = "none"
    simulate: bool = False
    max_model_len: int | str | None = None
    device: str = "auto"
    kernels: str = "auto"
    tensor_parallel: int = 1

    @classmethod
    def by(cls, config: ExecutorConfig) -> "Served":
        """Return what executors with these options serve."""
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__})


def difference(old: Served, new: Served, settings: Callable[[], Any]) -> str:
    """Return which option makes ``new`` another model than ``old``, with both values; empty if none does.

    ``settings``: returns what the model's config.json says. It is called only if the answer depends on it.

    Raises:
        ModelError, OSError, ValueError: what ``settings`` raises.
    """

    def first(names: tuple[str, ...]) -> str:
        name = next((name for name in names if getattr(old, name) != getattr(new, name)), None)
        if name is None:
            return ""
        flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        return f"{flag} {getattr(old, name)}, and not {getattr(new, name)}"

    if found := first(_ALWAYS):
        return found
    if new.simulate:
        return ""
    if (found := first(("max_model_len",))) and _has_length_dependent_rope(settings()):
        return f"{found} (on which the RoPE of this model depends)"
    if (found := first(_WHERE_QUANTISED)) and (new.quantization != "none" or _is_quantised(settings())):
        return f"{found} (on which the tokens of a quantised model depend)"
    return ""


def settings_of(served: Served) -> Any:
    """Return what a model's config.json says.

    Raises:
        ModelError: there is no such model here, or its config.json cannot be read.
    """
    path = resolve_model(served.model, served.revision, tokenizer_only=True) / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _is_quantised(settings: Any) -> bool:
    parts = [settings, settings.get("text_config") or {}]
    return any(part.get(name) for part in parts for name in ("quantization_config", "compression_config"))


def _has_length_dependent_rope(settings: Any) -> bool:
    """Whether any part of the settings is a RoPE of such a type; layers, and parts of a model, may have one each."""
    if isinstance(settings, list):
        return any(map(_has_length_dependent_rope, settings))
    if not isinstance(settings, dict):
        return False
    named = settings.get("rope_type"), settings.get("type")
    return any(name in _LENGTH_DEPENDENT for name in named) or any(map(_has_length_dependent_rope, settings.values()))
