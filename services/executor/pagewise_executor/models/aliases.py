"""Models whose config.json names code of their own, though transformers has their layers under another name."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewise_shared.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

ALIASES = {"kimi_k2": "deepseek_v3"}
"""The model_type of transformers that computes the same, by the model_type of config.json."""
_USUAL: dict[str, Any] = {
    "ep_size": 1,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Settings of the models' own code that have this value, as transformers has them."""
_WITHOUT_EFFECT = {
    "architectures", "auto_map", "aux_loss_alpha", "dtype", "model_type", "quantization_config", "rope_scaling",
    "rope_theta", "seq_aux", "torch_dtype", "transformers_version",
}  # fmt: skip
"""Settings for training, and settings that transformers reads for all models."""


def model_type(path: Path) -> str | None:
    """Return the model_type by which transformers knows the model in the folder ``path``; None: it has none."""
    found = _settings(path).get("model_type")
    return ALIASES.get(found, found) if isinstance(found, str) else None


def config_of_alias(model: str, path: Path) -> "PretrainedConfig | None":
    """Return the configuration of a model with an alias, and log the alias; None: it has none.

    Raises:
        ModelError: it has settings that the model of the other name does not know.
    """
    settings = _settings(path)
    own, kind = settings.get("model_type"), model_type(path)
    if kind is None or own == kind:
        return None
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    known = vars(made()).keys() | made.attribute_map.keys() | set(made.attribute_map.values()) | _WITHOUT_EFFECT
    unknown = sorted(key for key, value in settings.items() if key not in known and _USUAL.get(key) != value)
    if unknown:
        raise ModelError(f"{model} cannot be computed as {kind}: its config.json ({own}) sets {', '.join(unknown)}")
    log.info("%s (model_type %s) is computed as %s, without its own code", model, own, kind)
    found: PretrainedConfig = made.from_dict(
        {key: value for key, value in settings.items() if key not in ("auto_map", "model_type")}
    )
    return found


def _settings(path: Path) -> dict[str, Any]:
    """Return the content of config.json, or nothing if it cannot be read, which its other readers report."""
    try:
        found = json.loads((path / "config.json").read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
