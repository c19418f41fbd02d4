"""Prefill attention by specialised warps: its source on threads, because nothing interprets Gluon."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pagewise_kernels.attention import Chunk, PrefillPlan
from pagewise_kernels.attention.specialised import SPECIALISED, specialised_error, specialised_prefill_attention
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.launch import watch_launches

from tests.kernels import oracles
from tests.kernels.gluon_threads import DeadlockError, launch, on_threads

KERNEL = "pagewise_kernels.attention.specialised_kernel"
CPU = torch.device("cpu")
BF16 = torch.bfloat16


@contextmanager
def launches(capability: int = 90) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The arguments and constants of launches on a device of ``capability``."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    watch_launches(lambda _, arguments, options: found.append((arguments, options)), capability)
    try:
        yield found
    finally:
        watch_launches(None)


def attended(
    chunks: list[Chunk],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    block_size: int = 16,
    programs: int = 3,
    dtype: torch.dtype = BF16,
    layers: int = 1,
    change: tuple[str, str] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of the kernel and of the oracle. Values that no chunk may read are NaN, or the number of no block."""
    generator = torch.Generator().manual_seed(3)
    lengths = [chunk.start + chunk.size for chunk in chunks]
    blocks = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(blocks) + 2, generator=generator).int()
    tables = torch.full((len(chunks), max(blocks) + 2), 10**6, dtype=torch.int32)
    whole = torch.full((2 * layers, len(order), block_size, kv_heads, dim), float("nan"), dtype=dtype)
    if layers > 1:  # each block has the K and V of all layers
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    keys, values = whole[-2:]
    q = torch.randn(sum(chunk.size for chunk in chunks), heads, dim, generator=generator).to(dtype)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for chunk, length, count in zip(chunks, lengths, blocks, strict=True):
        own, order = order[:count], order[count:]
        tables[chunk.table, :count] = own
        for pool in (keys, values):
            context = torch.full((count * block_size, kv_heads, dim), float("nan"))
            context[:length] = torch.randn(length, kv_heads, dim, generator=generator)
            pool[own.long()] = context.view(count, block_size, kv_heads, dim).to(dtype)
        rows = slice(chunk.first, chunk.first + chunk.size)
        clean = (torch.nan_to_num(pool) for pool in (keys, values))
        expected[rows] = oracles.attention(q[rows], *clean, own, chunk.start, scale=0.2)
    plan = PrefillPlan(
        chunks, heads=heads, kv_heads=kv_heads, head_dim=dim, kv_dtype=dtype, device=CPU, config=SPECIALISED
    )
    with launches() as found:
        out = specialised_prefill_attention(q, KVLayer(keys, values), tables, plan, scale=0.2)
    (arguments, constants), out[:] = found[0], float("nan")
    names = ("KV_HEADS", "GROUP", "BLOCK_SIZE", "BLOCK_STRIDE", "DIM", "TILE", "STAGES")
    with on_threads(KERNEL, change) as module:
        launch(
            module.specialised_prefill_kernel, programs, *arguments, **{name: constants[name] for name in names}
        )  # fmt: skip
    return out.double(), expected


ONE_LONG = [Chunk(0, 200, 150, 0)]


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        pytest.param([Chunk(0, 0, 300, 0)], {}, id="a whole prompt"),
        pytest.param([Chunk(0, 0, 128, 0)], {"programs": 1}, id="ends with a tile"),
        pytest.param([Chunk(0, 0, 1, 1), Chunk(1, 383, 70, 0), Chunk(71, 5, 20, 2)], {}, id="several chunks"),
        pytest.param(ONE_LONG, {"heads": 2, "kv_heads": 2, "dim": 128, "block_size": 32}, id="one query head"),
        pytest.param(ONE_LONG, {"heads": 7, "kv_heads": 1, "dtype": torch.float16}, id="seven query heads"),
        pytest.param(ONE_LONG, {"block_size": 256, "programs": 40}, id="large blocks, idle programs"),
        pytest.param(ONE_LONG, {"block_size": 32, "layers": 3}, id="blocks of several layers"),
    ],
)
def test_it_computes_attention(chunks: list[Chunk], options: dict[str, Any]) -> None:
    found, expected = attended(chunks, **options)
    assert float((found - expected).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            "            acc, weights = warpgroup_mma_wait(0, deps=[sums, new])\n"
            "            mbarrier.arrive(v_empty.index(before), count=1)\n",
            "            mbarrier.arrive(v_empty.index(before), count=1)\n            time.sleep(0.02)\n"
            "            acc, weights = warpgroup_mma_wait(0, deps=[sums, new])\n",
            id="values are given back while they are multiplied",
        ),
        pytest.param(
            "            mbarrier.wait(v_full.index(before), (count - 1) // STAGES % 2)\n            fence",
            "            fence",
            id="values are not waited for",
        ),
        pytest.param("mbarrier.wait(v_empty.index(stage), phase)", "pass", id="values are written over"),
        pytest.param("pool + at, mask=there", "pool + at, mask=there | True", id="what is not there is read"),
        pytest.param(
            "acc = acc * gl.expand_dims(gl.convert_layout(shrink, ROW_OF_SUMS), 1)", "pass", id="sums keep their unit"
        ),
        pytest.param("pred=begin + TILE < stop", "pred=True", id="keys are waited for that never come"),
        pytest.param("(count // STAGES + 1) % 2", "count // STAGES % 2", id="the first buffer is never free"),
        pytest.param(
            "acc = warpgroup_mma(weights, v_tiles.index(before), acc)\n        mb",
            "acc = warpgroup_mma(weights, v_tiles.index(before), acc)\n        0 and mb",
            id="the last values are never given back",
        ),
    ],
)  # fmt: skip
def test_threads_find_what_would_be_wrong_on_a_device(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Races, reads of missing data, and deadlocks: errors that the tests above cannot find."""
    monkeypatch.setattr("tests.kernels.gluon_threads._SECONDS", 0.5)
    change = (before, after.replace("time.sleep", "__import__('time').sleep"))
    for _ in range(5):  # a race needs an order in which it shows
        try:
            found, expected = attended([Chunk(0, 500, 200, 0)], programs=1, change=change)
        except (DeadlockError, AssertionError, IndexError):
            return
        if not float((found - expected).abs().max()) < 0.02:
            return
    pytest.fail("nothing was noticed")


def test_what_it_cannot_compute_is_refused() -> None:
    errors = {
        (32, 8, 128, 16, BF16): "",
        (28, 4, 128, 16, BF16): "",
        (32, 8, 64, 128, torch.float16): "",
        (32, 8, 96, 16, BF16): "heads of 96",
        (32, 8, 128, 48, BF16): "blocks of 48",
        (32, 8, 128, 8, BF16): "blocks of 8",
        (32, 8, 128, 256, BF16): "",
        (32, 8, 128, 16, torch.float32): "not in float32",
        (256, 1, 128, 16, BF16): "256 query heads",
    }
    with launches():
        for layer, error in errors.items():
            found = specialised_error(*layer, CPU)
            assert (error in found) if error else not found, layer
    with launches(80):
        assert "capability 9.0" in specialised_error(32, 8, 128, 16, BF16, CPU)
    q, pool, tables = torch.zeros(4, 4, 64, dtype=BF16), torch.zeros(4, 16, 2, 64, dtype=BF16), torch.zeros(1, 4).int()
    plan = PrefillPlan([Chunk(0, 0, 4, 0)], heads=4, kv_heads=2, head_dim=64, kv_dtype=BF16, device=CPU)
    with launches() as found, pytest.raises(ValueError, match="the plan is for another kernel"):
        specialised_prefill_attention(q, KVLayer(pool, pool), tables, plan)
    assert not found
