"""Cases of recurrent layers: of Qwen3-Next 80B, Kimi-Linear 48B, Nemotron-H 8B and LFM2, for decodes and for chunks."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from pagewise_executor.kernel_checks.recurrent_problems import random_form
from pagewise_executor.models.triton_recurrence import kernels_of
from pagewise_kernels.recurrent import (
    FIELDS,
    BlockStates,
    ChunkPlan,
    Recurrence,
    ShortConvolution,
    convolve_short,
    recur,
)

from benchmarks.kernels.recurrent import SHAPES

_META = torch.device("meta")
_PAGE, _PAGES = 32768, 2400


def _plan(longer: bool) -> ChunkPlan:
    counts, firsts, chunks = (
        torch.empty(shape, dtype=torch.int32, device=_META) for shape in ((4,), (65,), (64, FIELDS))
    )
    return ChunkPlan(counts, firsts, chunks, longer)


def _states(dtype: torch.dtype, start: int) -> BlockStates:
    memory = torch.empty(64, _PAGE, dtype=torch.uint8, device=_META)
    return BlockStates(memory, torch.empty(8, _PAGES, dtype=torch.int32, device=_META), start, dtype)


def _recur(dtype: torch.dtype, kind: str, longer: bool) -> None:
    layer = kernels_of(random_form(kind, *SHAPES[kind]), _META)
    assert isinstance(layer, Recurrence)
    projected, states = torch.empty(256, layer.size, dtype=dtype, device=_META), layer.conv.shape[0] * layer.kept
    recur(layer, projected, _plan(longer), _states(dtype, 0), _states(torch.float32, states * dtype.itemsize))


def _short(dtype: torch.dtype, longer: bool) -> None:
    conv, factor, gate = torch.arange(6144).view(3, 2048)
    layer = ShortConvolution(torch.empty(2048, 3, device=_META), None, conv, factor, gate, kept=3)
    projected = torch.empty(256, 6144, dtype=dtype, device=_META)
    convolve_short(layer, projected, _plan(longer), _states(dtype, 0))


def recurrent_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases by name."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for longer, kind in ((False, "decode"), (True, "chunks")):
            if longer and dtype == torch.float32:  # it spills: see docs/limits.md
                continue
            for one in SHAPES:
                yield f"{one} {kind} {name}", partial(_recur, dtype, one, longer)
            yield f"short convolution {kind} {name}", partial(_short, dtype, longer)
