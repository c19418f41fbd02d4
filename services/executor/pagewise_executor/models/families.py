"""The families of Llama's structure, and the choice of checkpoints that are read without transformers."""

import logging
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.aliases import model_type
from pagewise_executor.models.llama import LlamaCheckpoint
from pagewise_executor.models.llama_config import Llama, LlamaConfig, Mistral, NotReadableError, Qwen2, Qwen3
from pagewise_executor.models.mtp import MtpNames
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint
from pagewise_executor.models.quantised_families import DIVIDED, FAMILIES, FamilyCheckpoint
from pagewise_executor.models.weight_files import Headers

log = logging.getLogger(__name__)

Families = Llama | Mistral | Qwen2 | Qwen3
"""A family is registered here."""

_IRRELEVANT = {
    "_name_or_path",
    "attention_dropout",
    "bos_token_id",
    "compression_config",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "is_llama_config",
    "pad_token_id",
    "quantization_config",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
}
"""Keys that do not change results: ``--dtype`` sets the type, the gateway knows the end tokens, and
``quantised_checkpoint.py`` reads the quantisation."""
_USUAL = {"pretraining_tp": 1, "rope_interleaved": False, "use_mrope": False}
"""Keys that change nothing as long as they have this value."""


def read_llama_config(path: Path) -> LlamaConfig:
    """Read config.json in the folder ``path``.

    Raises:
        NotReadableError: it has a key or a value that is not known here.
    """
    try:
        settings = msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise NotReadableError(f"config.json cannot be read: {error}") from error
    if (path / "adapter_config.json").exists():
        raise NotReadableError("it has an adapter")
    if settings.get("model_type") not in [family.__struct_config__.tag for family in get_args(Families)]:
        raise NotReadableError(f"its architecture is {settings.get('architectures')}")
    for key, usual in _USUAL.items():
        if settings.pop(key, usual) not in (usual, None):
            raise NotReadableError(f"config.json sets {key}")
    relevant = {key: value for key, value in settings.items() if key not in _IRRELEVANT}
    relevant["own_dtype"] = settings.get("dtype") or settings.get("torch_dtype")
    join_rope(relevant)
    try:
        found: LlamaConfig = msgspec.convert(relevant, Families)
    except msgspec.ValidationError as error:
        raise NotReadableError(f"config.json: {error}") from error
    return found


def join_rope(settings: dict[str, Any]) -> None:
    """Bring the two keys for RoPE in files of transformers 4 into the form of transformers 5.

    Raises:
        NotReadableError: they are of another form.
    """
    theta, scaling = settings.pop("rope_theta", None), settings.pop("rope_scaling", None)
    found = scaling or settings.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise NotReadableError(f"config.json: RoPE is described by {found!r}")
    rope = dict(found)
    kind = rope.pop("type", "default")
    rope.setdefault("rope_type", kind)
    if theta is not None:
        rope.setdefault("rope_theta", theta)
    settings["rope_parameters"] = rope


def llama_checkpoint(
    config: ExecutorConfig, path: Path, headers: Headers, device: torch.device, quantised: QuantisedCheckpoint | None
) -> LlamaCheckpoint | None:
    """Return the checkpoint if it can be loaded without transformers; else log the reason and return None.

    Raises:
        ModelError: the checkpoint is quantised, and cannot be loaded here, or by ``family_checkpoint``.
    """
    try:
        return LlamaCheckpoint(config.model, read_llama_config(path), headers, device, quantised)
    except NotReadableError as error:
        if quantised is None:
            log.info("transformers loads %s, which takes seconds more: %s", config.model, error)
        elif not quantised.mxfp4 and model_type(path) not in FAMILIES:
            raise _not_served(config, error) from error
        return None


def check_quantised(config: ExecutorConfig, path: Path) -> None:
    """Refuse the checkpoint in ``path``, whose linear layers are quantised, by its config.json alone.

    Raises:
        ModelError: such checkpoints of its family are not served, or not on so many ranks.
    """
    try:
        read_llama_config(path)
    except NotReadableError as error:
        if (kind := model_type(path)) not in FAMILIES:
            raise _not_served(config, error) from error
        if config.tensor_parallel > 1 and kind not in DIVIDED:
            raise _not_divided(config.tensor_parallel, str(kind)) from error


def family_checkpoint(
    config: ExecutorConfig,
    model_config: Any,
    headers: Headers,
    device: torch.device,
    quantised: QuantisedCheckpoint | None,
    dtype: torch.dtype,
    max_model_len: int,
    ranks: Ranks,
    part: Any = None,
    mtp: MtpNames | None = None,
) -> FamilyCheckpoint | None:
    """Return a quantised checkpoint of one of transformers' families; None: it is not quantised.

    ``model_config``: the content of config.json; ``part``: of a rank's part of the model. ``mtp``: the names of its MTP
    layer, if that is to draft.

    Raises:
        ModelError: it cannot be loaded here.
    """
    if quantised is None:
        return None
    if not ranks.alone and model_config.model_type not in DIVIDED:
        raise _not_divided(ranks.size, model_config.model_type)
    try:
        part = None if ranks.alone else part
        return FamilyCheckpoint(config.model, model_config, headers, device, quantised, dtype, max_model_len, part, mtp)
    except NotReadableError as error:
        raise _not_served(config, error) from error


def _not_divided(ranks: int, kind: str) -> ModelError:
    return ModelError(
        f"--tensor-parallel {ranks}: quantised checkpoints of {kind} are not divided among ranks, only checkpoints of "
        f"Llama, Mistral, Qwen2, Qwen3, {' and '.join(DIVIDED)}"
    )


def _not_served(config: ExecutorConfig, error: NotReadableError) -> ModelError:
    return ModelError(
        f"{config.model}: quantised checkpoints are served of Llama, Mistral, Qwen2 and Qwen3, where all that "
        f"config.json says is known, and of {', '.join(FAMILIES)}; this one is not: {error}"
    )
