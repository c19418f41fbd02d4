"""Decides which checkpoints are read here, and not by transformers."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.families import read_llama_config
from pagewise_executor.models.llama import LlamaCheckpoint
from pagewise_executor.models.llama_config import NotReadableError
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint
from pagewise_executor.models.quantised_families import FAMILIES, FamilyCheckpoint
from pagewise_executor.models.weight_files import Headers

log = logging.getLogger(__name__)


def llama_checkpoint(
    config: ExecutorConfig, path: Path, headers: Headers, device: torch.device, quantised: QuantisedCheckpoint | None
) -> LlamaCheckpoint | None:
    """Return the checkpoint if it can be loaded without transformers; else say why in the log.

    Raises:
        ModelError: the checkpoint is quantised, and cannot be loaded here, or by ``family_checkpoint``.
    """
    try:
        return LlamaCheckpoint(config.model, read_llama_config(path), headers, device, quantised)
    except NotReadableError as error:
        if quantised is None:
            log.info("transformers loads %s, which takes seconds more: %s", config.model, error)
        elif json.loads((path / "config.json").read_text()).get("model_type") not in FAMILIES:
            raise _not_served(config, error) from error
        return None


def family_checkpoint(
    config: ExecutorConfig,
    model_config: Any,
    headers: Headers,
    device: torch.device,
    quantised: QuantisedCheckpoint | None,
    dtype: torch.dtype,
    max_model_len: int,
    ranks: Ranks,
) -> FamilyCheckpoint | None:
    """Return a quantised checkpoint of one of transformers' families; None: it is not quantised.

    ``model_config``: the content of config.json.

    Raises:
        ModelError: it cannot be loaded here.
    """
    if quantised is None:
        return None
    if not ranks.alone:
        raise ModelError(
            f"--tensor-parallel {ranks.size}: quantised checkpoints of {model_config.model_type} are not divided among "
            "ranks, those of Llama, Mistral, Qwen2 and Qwen3 are"
        )
    try:
        return FamilyCheckpoint(config.model, model_config, headers, device, quantised, dtype, max_model_len)
    except NotReadableError as error:
        raise _not_served(config, error) from error


def _not_served(config: ExecutorConfig, error: NotReadableError) -> ModelError:
    return ModelError(
        f"{config.model}: quantised checkpoints are served of Llama, Mistral, Qwen2 and Qwen3, where all that "
        f"config.json says is known, and of {', '.join(FAMILIES)}; this one is not: {error}"
    )
