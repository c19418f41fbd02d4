"""Loads a model, or refuses it with the reason.

transformers is imported only for models that need it, because that takes seconds.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.attention.registry import Kernels
from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.devices import computes_bfloat16, why_no_gpu, why_unfit
from pagewise_executor.kv.kv_pool import KVShape
from pagewise_executor.kv.segment_mover import KeyRotation
from pagewise_executor.models.calibration import Calibration, read_text
from pagewise_executor.models.compilation import begin_compilation
from pagewise_executor.models.draft_model import DraftModel
from pagewise_executor.models.families import family_checkpoint, llama_checkpoint
from pagewise_executor.models.few_rows import choose_few_rows
from pagewise_executor.models.kernel_choice import candidates, choose_kernels
from pagewise_executor.models.key_rotations import UnknownRotationError, find_key_rotations
from pagewise_executor.models.latents import check_latents
from pagewise_executor.models.llama import LlamaCheckpoint
from pagewise_executor.models.llama_config import LlamaConfig
from pagewise_executor.models.long_rope import FixedRope
from pagewise_executor.models.mtp import MtpNames, add_mtp_layer
from pagewise_executor.models.preparation import prepare
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint, read_quantisation
from pagewise_executor.models.quantised_linear import has_exact_inputs
from pagewise_executor.models.recurrent import RecurrentLayer, check_recurrent
from pagewise_executor.models.recurrent_shards import connect_recurrent
from pagewise_executor.models.shard_settings import shard_config
from pagewise_executor.models.shards import Shards, UnknownShardError, connect
from pagewise_executor.models.support import attention_modules, attention_shape, check_supported, kv_sources
from pagewise_executor.models.transformers_loading import load_with_transformers, transformers_config
from pagewise_executor.models.trial import Tried, try_without_weights
from pagewise_executor.models.weight_files import Headers, checked_headers, first_line, weight_files
from pagewise_executor.models.weight_memory import check_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation_autoset"}


@dataclass(slots=True)
class LoadedModel:
    """A model that is ready to run, and its properties.

    ``attention``: the attention modules in layer order. ``layers``: their shapes. ``sources``: the layer whose K and V
    each layer reads, as ``kv_sources`` returns it; empty: each reads its own. ``kernels``: of attention and the
    small operations of fused layers. ``fallback``: the kernels, or a linear layer, are slower ones than preferred.
    ``rotations``: of the keys of each layer of the pool; empty if ``no_segments`` has the reason for which KV cannot be
    moved to other positions. ``recurrent``: the layers that keep states, in order. ``ranks``: hold a part of the model
    each; the model, ``layers`` and ``recurrent`` are this rank's, the other properties the whole model's. ``shards``:
    the division among ranks; None: there is one rank. ``rope``: the result of ``fix_rope``. ``draft``: drafts for the
    model, see ``add_draft_model``; its attention module is the last of ``attention``.
    """

    model: torch.nn.Module
    fingerprint: str
    weight_files: list[Path]
    vocab_size: int
    max_model_len: int
    device: torch.device
    dtype: torch.dtype
    attention: list[torch.nn.Module]
    layers: list[AttentionShape]
    kernels: Kernels
    fallback: bool = False
    rotations: list[KeyRotation] = field(default_factory=list)
    no_segments: str = ""
    ranks: Ranks = field(default_factory=Ranks)
    shards: Shards | None = None
    rope: FixedRope = FixedRope()  # noqa: RUF009 - it is frozen
    sources: list[int] = field(default_factory=list)
    recurrent: list[RecurrentLayer] = field(default_factory=list)
    draft: DraftModel | None = None

    @property
    def kv_layers(self) -> list[int]:
        """The layers that have K and V of their own, in order: the layers of the pool."""
        return sorted(set(self.sources)) or list(range(len(self.layers)))

    @property
    def shapes(self) -> list[KVShape]:
        """The shape of each layer of the pool."""
        return [self.layers[number].kv_shape for number in self.kv_layers]

    def block_format(self, kv_dtype: torch.dtype, kv_layout: str) -> str:
        """Return a hash of the properties that two executors must share to exchange blocks."""
        text = f"{self.shapes} {kv_dtype} {kv_layout} {self.kernels == 'triton'}"
        if kv_dtype != self.dtype:
            text += f" of {self.dtype}"
        if not self.ranks.alone:
            text += f" rank {self.ranks.rank} of {self.ranks.size}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_model(config: ExecutorConfig, ranks: Ranks = ALONE) -> LoadedModel:
    """Find, check and load the model that ``config`` names, or this rank's part of it.

    Raises:
        ModelError: the model cannot be found, read or run.
    """
    path = resolve_model(config.model, config.revision, remote_code=config.trust_remote_code)
    quantised = _kept(read_quantisation(config.model, path, config.kv_dtype), ranks)
    files = list(headers := checked_headers(weight_files(config.model, path)))
    device = choose_device(config)
    checkpoint = llama_checkpoint(config, path, headers, device, quantised)
    model_config: Any = checkpoint.config if checkpoint is not None else transformers_config(config, path)
    text, mtp = _checked_text(config, model_config, headers, checkpoint is None)
    dtype, vocab_size, max_model_len = choose_dtype(config, text), int(text.vocab_size), _max_model_len(config, text)
    skeleton, recurrent = _tried(config, model_config, dtype) if checkpoint is None else Tried(checkpoint.model, [])
    whole = copy.deepcopy(model_config)
    shard_config(config.model, text, ranks.size)
    able = candidates(config, device, dtype, quantised)
    sample = read_text(config, path, max_model_len)
    _log_device(config, device, dtype, len(files))
    check_weights(config, skeleton, headers, device, dtype, ranks.size, stored=_in_bits(quantised))
    compilation = begin_compilation(config, path, device, ranks) if able.kernels[0] == "triton" else None
    with errors_of_loading(config.model, device):
        stored = checkpoint or family_checkpoint(
            config, whole, headers, device, quantised, dtype, max_model_len, ranks, model_config, mtp
        )
        read = None
        if stored is not None:
            (model, shards), rope, read = stored.shard(ranks), stored.rope, partial(stored.read, dtype=dtype)
        else:
            model, shards, rope, recurrent = load_with_transformers(
                config, path, headers, whole, model_config, dtype, ranks, device, max_model_len, recurrent, mtp
            )
    attention = attention_modules(config.model, model, text)
    layers, sources = [attention_shape(module, text, dtype) for module in attention], kv_sources(attention, text)
    # A model without weights cannot run before they are read.
    found = _key_rotations(config.model, model, attention, device, checkpoint) if stored is checkpoint else None
    kernels, fallback = choose_kernels(config, able, layers)
    if kernels == "triton" and device.type == "cuda":
        from pagewise_executor.attention.prefill_choice import begin_choice

        begin_choice(config, device, layers)
    with errors_of_loading(config.model, device):
        calibration = Calibration(sample, dict(zip(attention, layers, strict=True))) if sample is not None else None
        fallback |= prepare(config, model, kernels, len(attention), max_model_len, device, read, ranks, calibration)
        if compilation is not None:
            compilation.wait()
        if device.type == "cuda":
            choose_few_rows(model)
        rotations, no_segments = found or _key_rotations(config.model, model, attention, device, None)
        connect(model, shards, vocab_size)
        connect_recurrent(model, shards, recurrent)
    return LoadedModel(
        model=model,
        fingerprint=fingerprint(path, files) + _variant(config, model, rope.length, calibration),
        weight_files=files, vocab_size=vocab_size, max_model_len=max_model_len, device=device, dtype=dtype,
        attention=attention, layers=layers, kernels=kernels, fallback=fallback,
        rotations=[rotation for layer, rotation in enumerate(rotations) if sources[layer] == layer],
        no_segments=no_segments, ranks=ranks, shards=shards, rope=rope, sources=sources, recurrent=recurrent,
    )  # fmt: skip


def _checked_text(
    config: ExecutorConfig, model_config: Any, headers: Headers, has_mtp: bool
) -> tuple[Any, MtpNames | None]:
    """Return the configuration of the language model; if its MTP layer is to draft, with this layer and its names.

    ``has_mtp``: such models may have one.

    Raises:
        ModelError: it is of a kind that is not served.
    """
    text = model_config.get_text_config(decoder=True)
    mtp = add_mtp_layer(config, text, headers, served=has_mtp)
    check_supported(config.model, model_config, text)
    check_latents(config, text)
    return text, mtp


def _tried(config: ExecutorConfig, model_config: Any, dtype: torch.dtype) -> Tried:
    """Try a model without weights.

    Raises:
        ModelError: it would not be served right.
    """
    trust = config.trust_remote_code
    found = try_without_weights(config.model, model_config, dtype, trust_remote_code=trust)
    if found.recurrent:
        check_recurrent(config)
    return found


def _kept(quantised: QuantisedCheckpoint | None, ranks: Ranks) -> QuantisedCheckpoint | None:
    """Return how weights are kept: of experts in MXFP4 each of several ranks reads its part in the model's type."""
    return None if quantised is not None and quantised.mxfp4 and not ranks.alone else quantised


def _in_bits(quantised: QuantisedCheckpoint | None) -> bool:
    """Return whether weights are stored in fewer bits than floats have."""
    return quantised is not None and not quantised.in_floats


def _key_rotations(
    name: str,
    model: torch.nn.Module,
    attention: list[torch.nn.Module],
    device: torch.device,
    checkpoint: LlamaCheckpoint | None,
) -> tuple[list[KeyRotation], str]:
    """Return the rotation of each layer's keys; or none, and the reason why segments cannot be moved.

    A part of a model that is not connected with other ranks has keys of its own, and need not wait for them.
    """
    if checkpoint is not None:
        return [KeyRotation(checkpoint.model.model.rotary_emb.inv_freq)] * len(attention), ""
    try:
        return find_key_rotations(model, attention, device), ""
    except UnknownRotationError as error:
        log.info("requests to %s cannot have segments: %s", name, error)
        return [], str(error)


@contextmanager
def errors_of_loading(name: str, device: torch.device) -> Iterator[None]:
    """Convert exceptions within to a ModelError with the ``name`` of the model that is loaded to ``device``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"not enough memory on {device} for the weights of {name}: end other programs that use it, or try "
            f"--quantization {'fp8' if device.type == 'cuda' else 'int8'}"
        ) from error
    except UnknownShardError as error:
        raise ModelError(f"{name}: {error}") from error
    except ModelError:
        raise
    except Exception as error:  # transformers raises plain exceptions of many kinds for a config.json that is wrong
        log.debug("%s cannot be loaded", name, exc_info=True)
        raise ModelError(f"{name} cannot be loaded: {first_line(error)}") from error


def _variant(
    config: ExecutorConfig, model: torch.nn.Module, length: int | None, calibration: Calibration | None
) -> str:
    """Return the end of the fingerprint. KV cannot be shared with an executor whose RoPE is fixed for another
    ``length``, whose weights are quantised otherwise, or whose GPU rounds inputs to FP8 where this one cannot.
    """
    name = "" if config.quantization == "none" else f"-{config.quantization}"
    if calibration is not None:
        name += f"-{calibration.name}"
    fixed = "" if length is None else f"-{length}"
    return fixed + name + "-exact-inputs" * has_exact_inputs(model)


def choose_device(config: ExecutorConfig) -> torch.device:
    """Return the device that ``--device`` asks for.

    Raises:
        ModelError: CUDA is asked for and there is no CUDA device, or torch has no code for it.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"--device cuda: {why_no_gpu() or 'torch sees no CUDA device here: --device cpu computes without one'}"
        )
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if not use_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := why_unfit(device):
        raise ModelError(reason)
    return device


def choose_dtype(config: ExecutorConfig, text: "LlamaConfig | PretrainedConfig") -> torch.dtype:
    """Return the type that ``--dtype`` asks for; auto is the model's own on CUDA and float32 on the CPU."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)  # type: ignore[no-any-return]
    if choose_device(config).type == "cpu":
        return torch.float32
    own = getattr(text, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def _log_device(config: ExecutorConfig, device: torch.device, dtype: torch.dtype, num_files: int) -> None:
    log.info("loading %s (%d weight files) as %s on %s", config.model, num_files, _name(dtype), device)
    if device.type == "cpu" and config.device == "auto" and (reason := why_no_gpu()):
        log.warning("the model is computed on the CPU: %s", reason)
    if device.type == "cpu" and (dtype == torch.float16 or (dtype == torch.bfloat16 and not computes_bfloat16())):
        log.warning("this CPU has no instructions for %s: --dtype float32 is faster, in more memory", _name(dtype))


def fingerprint(path: Path, files: list[Path]) -> str:
    """Return a short hash of the configuration and the weights (their headers, sizes, and a sample of their data)."""
    digest = hashlib.sha256()
    settings = {k: v for k, v in json.loads((path / "config.json").read_text()).items() if k not in _VOLATILE}
    digest.update(json.dumps(settings, sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            digest.update(f"{file.name} {size}".encode())
            for offset in (0, size // 3, 2 * size // 3, max(0, size - 65536)):
                stream.seek(offset)
                digest.update(stream.read(65536))
    return digest.hexdigest()[:16]


def _max_model_len(config: ExecutorConfig, text: object) -> int:
    own = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2048
    asked = None if config.max_model_len == "auto" else config.max_model_len  # ModelRunner limits it to the KV pool
    if asked is not None and asked > own:
        raise ModelError(f"--max-model-len {asked} is over the model's own limit of {own}")
    return int(asked or own)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
