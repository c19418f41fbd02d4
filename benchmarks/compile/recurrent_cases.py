"""Cases of recurrent layers: of Qwen3-Next 80B, Kimi-Linear 48B, Nemotron-H 8B and LFM2, for decodes and for chunks."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from pagewise_kernels.cpu.recurrent import Places, Weights
from pagewise_kernels.recurrent import (
    FIELDS,
    BlockStates,
    ChunkPlan,
    Recurrence,
    ShortConvolution,
    convolve_short,
    recur,
)

_META = torch.device("meta")
_PAGE, _PAGES = 32768, 2400


def _floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=_META)


def _plan(longer: bool) -> ChunkPlan:
    counts, firsts, chunks = (
        torch.empty(shape, dtype=torch.int32, device=_META) for shape in ((4,), (65,), (64, FIELDS))
    )
    return ChunkPlan(counts, firsts, chunks, longer)


def _states(dtype: torch.dtype, start: int) -> BlockStates:
    memory = torch.empty(64, _PAGE, dtype=torch.uint8, device=_META)
    return BlockStates(memory, torch.empty(8, _PAGES, dtype=torch.int32, device=_META), start, dtype)


def _recur(
    dtype: torch.dtype, delta: bool, heads: int, groups: int, key: int, value: int, decays: int, longer: bool
) -> None:
    inner, channels = heads * value, heads * value + 2 * groups * key
    row = channels + inner + decays + heads
    places = Places(
        conv=torch.arange(channels), gate=torch.arange(inner), decay=torch.arange(row - decays, row),
        beta=torch.arange(heads) if delta else None,
    )  # fmt: skip
    weights = Weights(
        conv=_floats(channels, 4), conv_bias=None if delta else _floats(channels), a_log=_floats(heads),
        dt_bias=_floats(decays), skip=None if delta else _floats(heads), norm=_floats(inner),
        norm_size=value if delta else inner // groups, gate_first=not delta,
    )  # fmt: skip
    layer = Recurrence(weights, places, (heads, key, value) if delta else (heads, value, key), 4)
    projected = _floats(256, row, dtype=dtype)
    recur(layer, projected, _plan(longer), _states(dtype, 0), _states(torch.float32, 4 * channels * dtype.itemsize))


def _short(dtype: torch.dtype, longer: bool) -> None:
    conv, factor, gate = torch.arange(6144).view(3, 2048)
    layer = ShortConvolution(_floats(2048, 3), None, conv, factor, gate, kept=3)
    convolve_short(layer, _floats(256, 6144, dtype=dtype), _plan(longer), _states(dtype, 0))


def recurrent_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases by name."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for longer, kind in ((False, "decode"), (True, "chunks")):
            if longer and dtype == torch.float32:  # it spills: see docs/limits.md
                continue
            yield f"delta net {kind} {name}", partial(_recur, dtype, True, 32, 16, 128, 128, 32, longer)
            yield f"kda {kind} {name}", partial(_recur, dtype, True, 32, 32, 128, 128, 32 * 128, longer)
            yield f"mamba-2 {kind} {name}", partial(_recur, dtype, False, 128, 8, 128, 64, 128, longer)
            yield f"short convolution {kind} {name}", partial(_short, dtype, longer)
