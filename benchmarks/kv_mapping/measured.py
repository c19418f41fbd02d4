"""The cost of mapping on this machine, and of attention over block tables and over page tables, side by side."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from pagewise_executor.attention.backend import AttentionBackend, PagedLayer
from pagewise_executor.attention.cpu_attention import CpuBackend
from pagewise_executor.attention.mapped_attention import MappedBackend
from pagewise_executor.attention.torch_attention import TorchBackend
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.kv.kv_pool import KVPool, Layout, bytes_per_block
from pagewise_executor.kv.page_tables import PageTables, SharedMemory
from pagewise_shared.protocol import NewSequence, StepPlan, pack_int32s
from pagewise_shared.sampling import SamplingParams

from benchmarks.kv_mapping.granularity import HEAD_DIM, KV_HEADS, LAYERS

HEADS = 32
"""Query heads of Llama 3 8B."""
CPU = torch.device("cpu")


# ---- time to map --------------------------------------------------------------------------------------------


def map_times(size: int, present: int, calls: int = 2000) -> dict[str, float]:
    """Median microseconds of a call that maps ``size`` bytes at an address that had no memory, or other memory.

    ``present``: the process has at least so many other maps. Mapped memory has been written before.
    """
    memory, page = SharedMemory(), SharedMemory().page
    count = min(calls, 2**30 // size)
    memory.allocate(max(count * size, present * page)).fill_(1)
    others = memory.reserve(max(1, present) * page)
    for number in range(present):  # in reverse, because the kernel merges maps of neighbours
        memory.map(others.data_ptr() + number * page, (present - 1 - number) * page, page)
    addresses = memory.reserve(count * size)
    targets = addresses.data_ptr() + np.random.default_rng(0).permutation(count) * size
    found: dict[str, float] = {}
    for name, offsets in (("new", np.arange(count)[::-1] * size), ("replaced", np.arange(count) * size)):
        times = []
        for target, offset in zip(targets.tolist(), offsets.tolist(), strict=True):
            began = time.perf_counter_ns()
            memory.map(target, offset, size)
            times.append(time.perf_counter_ns() - began)
        found[name] = round(statistics.median(times) / 1e3, 2)
    return found


def block_times(layout: Layout, block_size: int, blocks: int = 300) -> dict[str, float]:
    """Median microseconds until a block of Llama 3 8B in bfloat16 is mapped, and the calls that it takes."""
    memory = SharedMemory()
    pool = _pool(memory, blocks, block_size, layout, LAYERS, torch.bfloat16)
    pages, times = PageTables(memory, pool, 1, blocks), []
    for index, block in enumerate(np.random.default_rng(0).permutation(blocks).astype(np.int32)):
        began = time.perf_counter_ns()
        pages.map(0, index, block[None])
        times.append(time.perf_counter_ns() - began)
    return {"calls": pages.num_calls // blocks, "us": round(statistics.median(times) / 1e3, 1)}


def _pool(
    memory: SharedMemory | MappedBackend, blocks: int, block_size: int, layout: Layout, layers: int, dtype: torch.dtype
) -> KVPool:
    """A pool of so many layers of Llama 3 8B, which is written once."""
    shapes = [(KV_HEADS, HEAD_DIM)] * layers
    whole = memory.allocate(blocks * bytes_per_block(shapes, block_size, dtype)).fill_(0)
    return KVPool(shapes, blocks, block_size, dtype, CPU, layout=layout, memory=whole)


# ---- attention ----------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """``rows`` sequences with ``context`` tokens in the pool, each of which computes ``queries`` more."""

    rows: int
    context: int
    queries: int


CASES = {
    "decode, 1 x 4,096": Case(1, 4096, 1),
    "decode, 16 x 512": Case(16, 512, 1),
    "prefill, 256 after 768": Case(1, 768, 256),
}
MEASURED_LAYERS = 8
"""Fewer than Llama 3 8B has, for the sake of memory."""
CONTENDERS = ("table", "mmu", "mmu, all layers", "table, operations in C")


def attention_times(case: Case, block_size: int, rounds: int) -> dict[str, float]:
    """Median milliseconds per layer of a step's attention, its preparation included, by contender; all in turns.

    They are CPU time of one thread, which other work on the machine makes longer by less than it does any other time.
    """
    torch.set_num_threads(1)
    per_row = -(-(case.context + case.queries) // block_size)
    blocks = np.random.default_rng(1).permutation(case.rows * per_row).astype(np.int32).reshape(case.rows, per_row)
    mapped = MappedBackend(CPU), MappedBackend(CPU)
    layouts: tuple[Layout, ...] = ("layers", "tokens")
    by_layer, together = (
        _pool(backend, blocks.size, block_size, layout, MEASURED_LAYERS, torch.float32)
        for backend, layout in zip(mapped, layouts, strict=True)
    )
    steps = [
        _step(case, blocks, by_layer, TorchBackend(CPU)),
        _step(case, blocks, by_layer, mapped[0]),
        _step(case, blocks, together, mapped[1]),
        _step(case, blocks, by_layer, CpuBackend(CPU)),
    ]
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    outputs = [step() for step in steps]  # warms up
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-3, atol=1e-4)
    for _ in range(rounds):
        for name, step in zip(CONTENDERS, steps, strict=True):
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    return {name: round(1e3 / MEASURED_LAYERS * statistics.median(own), 3) for name, own in times.items()}


def _step(
    case: Case, blocks: np.ndarray[Any, np.dtype[np.int32]], pool: KVPool, backend: AttentionBackend
) -> Callable[[], torch.Tensor]:
    """The function that computes the attention of one step in all layers. Everything is mapped when this returns."""
    length = case.context + case.queries
    batch = InputBatch(
        num_rows=case.rows, max_model_len=length, block_size=pool.block_size, pool_blocks=pool.num_blocks
    )
    backend.reset(batch, pool)
    rows, decodes = range(case.rows), case.queries == 1
    known = length - decodes  # a row decodes when it has computed all that was known of it
    tokens, greedy = pack_int32s([1] * known), SamplingParams(temperature=0.0)
    joined = tuple(NewSequence(row, tokens, known, known - case.queries, blocks[row].tobytes(), greedy) for row in rows)
    work = batch.apply(StepPlan(0, 1, joined=joined, chunks=tuple((row, case.queries) for row in rows)))
    backend.update_block_tables(work)
    if decodes:
        batch.advance(work)
        work = batch.apply(StepPlan(0, 2))
    random = torch.Generator().manual_seed(0)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    q, k, v = (
        torch.randn(case.rows * case.queries, heads, HEAD_DIM, generator=random)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    layers = [
        PagedLayer(keys, values, number=number)
        for number, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True))
    ]

    @torch.inference_mode()
    def compute() -> torch.Tensor:
        prepared = backend.prepare(work)
        for layer in layers:
            output = prepared.attend(layer, q, k, v, HEAD_DIM**-0.5)
        return output

    return compute
