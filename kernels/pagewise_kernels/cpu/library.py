"""Loads the library that fits this processor, and has memory for its results."""

import ctypes
import functools
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagewise_kernels.cpu.build import FOLDER, VARIANTS, Variant, machine

log = logging.getLogger(__name__)

_REMEDY = "python -m pagewise_kernels.cpu.build builds it, with ziglang"
Block = npt.NDArray[np.uint8]
_LEAST = 1 << 20
"""The C library keeps freed blocks below so many bytes: the results of decode steps are that small."""
_free: defaultdict[int, list[Block]] = defaultdict(list)
"""Free blocks by size, which is a power of two. Only pages that have been written take memory."""
_least_free: defaultdict[int, int] = defaultdict(int)
"""Of each size, how many have been free all the time since ``free_unused`` was called last."""

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
FUNCTIONS = {
    "pagewise_rms_norm": [
        _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, ctypes.c_float, ctypes.c_int, _LONG
    ],
    "pagewise_silu_mul": [_POINTER, _LONG, _POINTER, _LONG, _LONG, ctypes.c_int, _LONG],
    "pagewise_panel": [],
    "pagewise_linear": [
        _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG
    ],
    "pagewise_route": [
        _POINTER, _LONG, *[_POINTER] * 6, *[_LONG] * 7, ctypes.c_float, _LONG
    ],
    "pagewise_experts": [
        _POINTER, _LONG, *[_POINTER] * 4, *[ctypes.c_float] * 3, *[_POINTER] * 4, *[_LONG] * 6
    ],
    "pagewise_mixture": [
        _POINTER, _LONG, _POINTER, _POINTER, ctypes.c_float, *[_POINTER] * 7, *[ctypes.c_float] * 3, _POINTER, _POINTER,
        *[_LONG] * 5, ctypes.c_float, *[_LONG] * 4
    ],
    "pagewise_mxfp4_experts": [
        *[_POINTER] * 9, ctypes.c_float, ctypes.c_float, *[_POINTER] * 2, _LONG, _LONG, _LONG, _LONG
    ],
    "pagewise_int8_panel": [],
    "pagewise_int8_group": [],
    "pagewise_linear_int8": [
        _POINTER, _LONG, *[_POINTER] * 7, _LONG, _LONG, _LONG, _LONG
    ],
    "pagewise_linear_grouped": [_POINTER, _LONG, *[_POINTER] * 5, _LONG, _LONG, _LONG],
    "pagewise_quantised_experts": [*[_POINTER] * 10, *[ctypes.c_float] * 3, *[_LONG] * 7],
    "pagewise_half_layers_scratch": [_POINTER, _LONG, _LONG],
    "pagewise_half_layers": [_POINTER, _LONG, *[_POINTER] * 7, _LONG, _LONG],
    "pagewise_sizeof_half_layer": [],
    "pagewise_sizeof_attention": [],
    "pagewise_attend": [_POINTER],
    "pagewise_sizeof_recurrence": [],
    "pagewise_recur": [_POINTER],
    "pagewise_shrink": [_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, ctypes.c_int, ctypes.c_int, _POINTER],
    "pagewise_widen": [_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, ctypes.c_int, ctypes.c_int],
}  # fmt: skip
"""All functions that are called, with their arguments."""


_Fields = tuple[tuple[str, type[Any]], ...]


def _fields(*kinds: tuple[type[Any], str]) -> _Fields:
    """Return the fields of a structure, whose names are given by type."""
    return tuple((name, kind) for kind, names in kinds for name in names.split())


class AttentionArguments(ctypes.Structure):
    """``struct attention`` of attention.h, which paged attention reads its arguments from."""

    _fields_ = _fields(
        (_POINTER, "q k v out"),
        (_LONG, "q_token q_head k_token k_head v_token v_head"),
        (_POINTER, "keys values"),
        (_LONG, "key_block key_slot key_head value_block value_slot value_head"),
        (_POINTER, "key_scales value_scales"),
        (_LONG, "scale_block scale_slot scale_head"),
        (_POINTER, "slots tables"),
        (_LONG, "table_stride block_size tokens decodes num_chunks num_prefixes"),
        (_POINTER, "rows lengths chunks prefixes members"),
        (_LONG, "heads kv_heads dim value_dim bf16 window attention_chunk"),
        (ctypes.c_float, "scale softcap"),
        (_POINTER, "cos sin head_norm"),
        (ctypes.c_float, "norm_eps"),
        (ctypes.c_int32, "int4"),
        (_POINTER, "sinks"),
        (_LONG, "threads"),
    )


class WeightArguments(ctypes.Structure):
    """``struct weight`` of weight.h: a linear layer of any kind, of which these are the numbers."""

    FLOAT32, INT8, INT4, GROUPED = range(4)
    _fields_ = (
        ("kind", _LONG), ("ins", _LONG), ("outs", _LONG), ("parts", _POINTER * 6), ("numbers", _LONG * 5),
        ("factor", ctypes.c_float),
    )  # fmt: skip


class HalfLayerArguments(ctypes.Structure):
    """``struct half_layer`` of layer.c: a norm and the linear layers of attention or of a gated MLP."""

    _fields_ = (
        ("norm", _POINTER), ("eps", ctypes.c_float), ("first", WeightArguments), ("second", WeightArguments),
        ("attention", _POINTER),
    )  # fmt: skip


class RecurrenceArguments(ctypes.Structure):
    """``struct recurrence`` of recurrent.c, which recurrent layers read their arguments from."""

    _fields_ = _fields(
        (_POINTER, "projected conv_from times_from gate_from decay_from beta_from"),
        (_POINTER, "conv_weight conv_bias rate dt_bias skip norm_weight"),
        (_POINTER, "memory read written rows convolved outputs"),
        (_LONG, "num_rows row_stride num_pages page_bytes pages_per_block conv_start state_start"),
        (_LONG, "sequences tokens channels width kept conv_silu heads key_heads key value decay_by_key"),
        (_LONG, "inner values_from norm_size gate gate_first bf16"),
        (ctypes.c_float, "beta_scale eps dt_least dt_most"),
        (_LONG, "threads"),
        (_LONG, "next"),
    )


class LibraryMissingError(Exception):
    """The library was not built, or from other sources, or does not run here."""


class Library(ctypes.CDLL):
    """The functions of the library. ``variant``: that which was loaded. ``narrower``: this processor runs a wider one,
    which has not been built.
    """

    variant: Variant
    narrower: bool


@functools.cache
def load_library(folder: Path = FOLDER) -> Library:
    """Return the library in its widest variant that has been built and that this processor runs.

    Raises:
        LibraryMissingError: there is none, or it was built from other sources than these.
    """
    best, *narrower = _variants()
    built = next((one for one in (best, *narrower) if (folder / one.file).exists()), None)
    if built is None:
        raise LibraryMissingError(f"{folder / best.file} has not been built; {_REMEDY}")
    if built != best:
        missing = folder / best.file
        log.warning("%s has not been built, so %s is used, which is slower; %s", missing, built.file, _REMEDY)
    library = _open(folder / built.file)
    library.variant, library.narrower = built, built != best
    return library


def has_fast_products() -> bool:
    """Return whether the library's products are at least as fast as oneDNN's: with AVX2 and AVX-512 they are.

    Raises:
        LibraryMissingError: there is no library.
    """
    return load_library().variant.vec >= 8


def threads() -> int:
    """Return the number of threads to compute with: torch's."""
    return torch.get_num_threads()


def _variants() -> list[Variant]:
    """Return the variants that this processor runs, the best one first."""
    name = machine()
    if name is None:
        raise LibraryMissingError("the CPU operations are built for Linux with glibc on x86_64 and aarch64 only")
    # torch knows the capabilities of the processor and the operating system; ATEN_CPU_CAPABILITY limits them.
    widest = {"AVX2": 8, "AVX512": 16}.get(torch.backends.cpu.get_cpu_capability(), 4)
    vnni = widest == 16 and bool(torch.cpu.get_capabilities().get("avx512_vnni", False))
    return sorted((one for one in VARIANTS[name] if one.vec <= widest and one.vnni <= vnni), reverse=True)


def _open(path: Path) -> Library:
    """Load a library and check that it has the functions that these sources call, and their structure."""
    try:
        library = Library(str(path))
    except OSError as error:
        raise LibraryMissingError(f"{path} cannot be loaded: {error}") from error
    for name, argtypes in FUNCTIONS.items():
        try:
            getattr(library, name).argtypes = argtypes
        except AttributeError:
            raise LibraryMissingError(f"{path} is of another version, without {name}; {_REMEDY}") from None
    library.pagewise_half_layers_scratch.restype = _LONG  # other results fit into an int
    structures = {
        "attention": AttentionArguments, "half_layer": HalfLayerArguments, "recurrence": RecurrenceArguments,
    }  # fmt: skip
    for name, arguments in structures.items():
        size, expected = getattr(library, f"pagewise_sizeof_{name}")(), ctypes.sizeof(arguments)
        if size != expected:  # it would read and write past the structure
            raise LibraryMissingError(
                f"{path} is of another version, whose arguments of {name} have {size} bytes, not {expected}; {_REMEDY}"
            )
    return library


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor on the CPU with any contents. Its memory is used again when no view of it is left."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _LEAST:
        return torch.empty(shape, dtype=dtype)
    capacity = 1 << (size - 1).bit_length()
    blocks = _free[capacity]
    try:
        block = blocks.pop()  # the block that was freed last, so that surplus blocks are never taken
        _least_free[capacity] = min(_least_free[capacity], len(blocks))
    except IndexError:
        block = torch.empty(capacity, dtype=torch.uint8).numpy()
    view: npt.NDArray[Any] = block[:size]  # an object of its own, which lives as long as a storage in it
    weakref.finalize(view, blocks.append, block).atexit = False
    return torch.frombuffer(view, dtype=dtype).view(shape)


def free_unused() -> None:
    """Free the blocks that were not used since the last call: the largest prefill may not come again.

    May be called on any thread.
    """
    for capacity, blocks in list(_free.items()):
        del blocks[: _least_free[capacity]]
        _least_free[capacity] = len(blocks)
