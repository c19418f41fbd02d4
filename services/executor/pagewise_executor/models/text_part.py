"""The text part of a multimodal checkpoint, which is served without the modules for images, audio and video."""

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewise_executor.models.aliases import model_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

_COMPUTES_AS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Language models that transformers has as a part of a multimodal model alone, by model_type, and the causal LM that
computes the same for text: all three positions that they rotate by then equal the tokens' positions."""
_OF_TEXT = re.compile(r"^(model\.)?language_model\.(model\.)?")
_BARE = re.compile(r"^(model\.(embed_tokens|layers|norm)|lm_head)\.")


def text_part(model: str, config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration of the causal LM in a multimodal model, and log that it alone is served.

    Others are returned as they are. ``model``: its name for the log.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    part: Any = config.get_text_config(decoder=True)
    if part is config or config.is_encoder_decoder:
        return config
    if (kind := _COMPUTES_AS.get(part.model_type)) is not None:
        settings = {key: value for key, value in part.to_dict().items() if key not in ("model_type", "rope_parameters")}
        rope = {key: value for key, value in part.rope_parameters.items() if not key.startswith("mrope_")}
        settings["rope_parameters"] = rope
        part = CONFIG_MAPPING[kind](**settings)
    elif type(part) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    log.info(
        "%s is a multimodal model (%s): its text part alone is served (%s)", model, config.model_type, part.model_type
    )
    part.tie_word_embeddings = config.tie_word_embeddings
    part.architectures = config.architectures
    return part  # type: ignore[no-any-return]


def is_text_part(path: Path, config: "PretrainedConfig") -> bool:
    """Return whether ``config`` was made by ``text_part`` of the config.json in ``path``."""
    return model_type(path) != config.model_type


def text_name(name: str) -> str | None:
    """Return the name that a tensor of a multimodal checkpoint has in the causal LM; None: it is of another part."""
    bare = _OF_TEXT.sub("", name)
    if bare != name:
        return bare if bare.startswith("lm_head.") else f"model.{bare}"
    return name if _BARE.match(name) else None
