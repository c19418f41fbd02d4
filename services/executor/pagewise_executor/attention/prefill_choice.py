"""Chooses the kernel for the attention of prefill chunks: ``--attention`` names it, or it is the fastest."""

import functools
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from pagewise_kernels.kv_layer import KVLayer
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.attention.prefill_libraries import (
    ChunkTables,
    FlashAttention3,
    FlashInfer,
    PrefillLibrary,
)
from pagewise_executor.attention.registry import BACKENDS
from pagewise_executor.attention.specialised_prefill import SpecialisedPrefill, begin_trials
from pagewise_executor.devices import median_milliseconds
from pagewise_executor.uploads import Uploads

log = logging.getLogger(__name__)

_TOKENS = 4096
"""Of the chunk that is measured."""
_REPEATS = 5

LIBRARIES: dict[str, tuple[str, Callable[[int, torch.device], PrefillLibrary]]] = {
    "fa3": ("flash_attn_interface", FlashAttention3),
    "flashinfer": ("flashinfer", FlashInfer),
    "gluon": ("triton.experimental.gluon", SpecialisedPrefill),
}
"""By name: the module that must be installed, and the function that prepares the library."""
_OURS = "gluon"
"""It comes with the Triton kernels, so ``auto`` does not warn where it cannot compute a layer."""


def refuse_attention(config: ExecutorConfig, device: torch.device) -> None:
    """Check that the options allow the attention of the Triton kernels that ``--attention`` names.

    Raises:
        ModelError: they do not allow it.
    """
    error = ""
    if config.attention == "auto" or BACKENDS[config.attention].kernels != "triton":
        return
    if config.kernels not in ("auto", "triton") or (device.type == "cpu" and config.kernels == "auto"):
        error = "it needs the Triton kernels, which run on a GPU"
    elif config.attention in LIBRARIES:
        error = _options_error(config, device)
    if error:
        raise ModelError(f"--attention {config.attention}: {error}")


def begin_choice(config: ExecutorConfig, device: torch.device, shapes: Sequence[AttentionShape]) -> None:
    """Begin the trials that ``choose_prefill_library`` will wait for, while weights are read."""
    if config.attention in ("auto", _OURS) and not _options_error(config, device) and not _latents(shapes):
        begin_trials(shapes, config.block_size, device)


def choose_prefill_library(
    config: ExecutorConfig, device: torch.device, shapes: Sequence[AttentionShape], kv_dtype: torch.dtype
) -> tuple[PrefillLibrary | None, bool]:
    """Return the library for prefill chunks, None for the Triton kernel, and whether some layers cannot be computed.

    ``shapes``: of each layer. The Triton kernel computes layers that the library cannot compute. ``auto`` takes the
    fastest library or the Triton kernel.

    Raises:
        ModelError: a library is asked for by name, and cannot compute the model.
    """
    if config.attention == "triton" or _options_error(config, device):
        return None, False
    if _latents(shapes):
        if config.attention in LIBRARIES:
            raise ModelError(f"--attention {config.attention}: it does not attend to latents (MLA)")
        return None, False
    if config.attention not in LIBRARIES:
        return _choose_installed(shapes, kv_dtype, config.block_size, device)
    library, error = _prepared(config.attention, device, shapes, kv_dtype, config.block_size)
    if error:
        raise ModelError(f"--attention {config.attention}: {error}")
    log.info("attention of prompts: %s", config.attention)
    return library, False


def _choose_installed(
    shapes: Sequence[AttentionShape], kv_dtype: torch.dtype, block_size: int, device: torch.device
) -> tuple[PrefillLibrary | None, bool]:
    """Return the fastest of the libraries that are installed: see ``choose_prefill_library``."""
    unfit: list[str] = []
    found: dict[PrefillLibrary, str] = {}
    for name, (module, _) in LIBRARIES.items():
        if importlib.util.find_spec(module) is None:
            continue
        library, error = _prepared(name, device, shapes, kv_dtype, block_size)
        if library is not None:
            found[library] = error
        elif name == _OURS:
            log.info("attention of prompts: not gluon: %s", error)
        else:
            unfit.append(f"{name}: {error}")
    if unfit and not found:
        log.warning("attention of prompts: triton, because others cannot compute this: %s", "; ".join(unfit))
        return None, True
    library = _fastest(list(found), shapes, block_size, device) if found else None
    if library is None:
        return None, False
    if error := found[library]:
        log.warning("attention of prompts: %s, and Triton's where it cannot: %s", library.name, error)
        return library, library.name != _OURS
    log.info("attention of prompts: %s", library.name)
    return library, False


def _latents(shapes: Sequence[AttentionShape]) -> bool:
    return any(shape.latent for shape in shapes)


def _options_error(config: ExecutorConfig, device: torch.device) -> str:
    if device.type != "cuda":
        return f"it runs on a GPU, not on {device}"
    if config.deterministic:
        return "not with --deterministic, whose results come from one kernel"
    return "it does not read KV in fewer bits with scales" if config.kv_dtype != "auto" else ""


def _prepared(
    name: str,
    device: torch.device,
    shapes: Sequence[AttentionShape],
    kv_dtype: torch.dtype,
    block_size: int,
) -> tuple[PrefillLibrary | None, str]:
    """Return a library that can compute some layers, if it can, and why it cannot compute the others."""
    if kv_dtype != shapes[0].dtype:
        return None, f"KV is {kv_dtype}, and the model {shapes[0].dtype}"
    try:
        library = LIBRARIES[name][1](block_size, device)
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    errors = [library.try_out(shape) for shape in dict.fromkeys(shapes)]
    return (library if "" in errors else None), "; ".join(dict.fromkeys(filter(None, errors)))


def _fastest(
    libraries: Sequence[PrefillLibrary], shapes: Sequence[AttentionShape], block_size: int, device: torch.device
) -> PrefillLibrary | None:
    """Return the library with which the layers of a model take the least time; None if the Triton kernel is fastest.

    Layers that a library cannot compute take the time of the Triton kernel. A library whose measurement fails is not
    chosen.
    """
    kinds = Counter(shapes)
    times: dict[PrefillLibrary | None, float] = {}

    @functools.cache
    def measured(library: PrefillLibrary | None, shape: AttentionShape) -> float:
        return chunk_milliseconds(library, shape, block_size, device)

    try:
        for library in (None, *libraries):
            times[library] = sum(
                count * measured(library if library is not None and library.computes(shape) else None, shape)
                for shape, count in kinds.items()
            )
    except Exception as error:  # torch, a library or the device may raise anything
        log.warning("attention of prompts: the remaining libraries could not be measured (%s)", error)
    measurements = (f"{each.name if each else 'triton'} {milliseconds:.2f} ms" for each, milliseconds in times.items())
    log.info("attention of prompts of %d tokens, all layers: %s", _TOKENS, ", ".join(measurements))
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the KV pool is sized by the free memory
    return min(times, key=lambda each: times[each]) if times else None


@torch.inference_mode()
def chunk_milliseconds(
    library: PrefillLibrary | None, shape: AttentionShape, block_size: int, device: torch.device
) -> float:
    """Return the median time of the attention of one layer for a prompt, by a library or by the Triton kernel."""
    from pagewise_kernels.attention import Chunk, PrefillPlan, prefill_attention

    blocks = -(-_TOKENS // block_size)
    tables = np.random.default_rng(0).permutation(blocks).astype(np.int32)[None]
    q = torch.randn(_TOKENS, shape.heads, shape.head_dim, device=device, dtype=shape.dtype)
    keys, values = (
        torch.randn(blocks, block_size, shape.kv_heads, shape.head_dim, device=device, dtype=shape.dtype)
        for _ in range(2)
    )
    step = ChunkTables([Chunk(0, 0, _TOKENS, 0)], tables, block_size, Uploads(device))
    if library is not None:
        attend = library.plan(shape, step)
    else:
        plan = PrefillPlan(
            step.chunks, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, kv_dtype=shape.dtype,
            device=device, window=shape.window, attention_chunk=shape.attention_chunk,
        )  # fmt: skip
        on_device = torch.from_numpy(tables).to(device)

        layer = KVLayer(keys, values)
        sinks = torch.zeros(shape.heads, device=device) if shape.sinks else None

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return prefill_attention(q, layer, on_device, plan, scale=shape.scale, softcap=shape.softcap, sinks=sinks)

    attend(q, keys, values)  # compiles
    torch.cuda.synchronize(device)
    return median_milliseconds(lambda: attend(q, keys, values), _REPEATS)
