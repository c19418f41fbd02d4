"""Page tables map the blocks that block tables name, after any changes, on the CPU and through the driver of a GPU."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagewise_executor.kv import page_tables
from pagewise_executor.kv.cuda_memory import CudaMemory
from pagewise_executor.kv.kv_pool import KVPool, Layout, bytes_per_block
from pagewise_executor.kv.page_tables import PageTables, PhysicalMemory, SharedMemory
from pagewise_shared.errors import ModelError

from tests.executor.cuda_driver import FakeDriver

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, ROWS, MAX_BLOCKS = 8, 12, 3, 6
EVEN, UNEVEN = [(2, 64), (2, 64)], [(2, 64), (1, 256)]
GRANULARITY = 2 * 4096
LAYOUTS: list[tuple[Layout, list[tuple[int, int]]]] = [("layers", EVEN), ("layers", UNEVEN), ("tokens", UNEVEN)]


def cuda_memory(size: int = 96 * GRANULARITY) -> CudaMemory:
    driver = FakeDriver(GRANULARITY, size)
    return CudaMemory(driver, CPU, driver.tensor_at)


def make_pool(memory: PhysicalMemory, shapes: list[tuple[int, int]], layout: Layout, block_size: int) -> KVPool:
    """A pool each of whose blocks holds its number."""
    whole = memory.allocate(NUM_BLOCKS * bytes_per_block(shapes, block_size, torch.float32))
    pool = KVPool(shapes, NUM_BLOCKS, block_size, torch.float32, CPU, layout=layout, memory=whole)
    for number, tensor in enumerate([*pool.keys, *pool.values]):
        tensor[:] = torch.arange(NUM_BLOCKS)[:, None, None, None] + 100 * number
    return pool


def num_maps() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


changes = st.one_of(
    st.tuples(
        st.integers(0, ROWS - 1),
        st.integers(0, MAX_BLOCKS - 1),
        st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=MAX_BLOCKS),
    ),
    st.tuples(  # neighbours, as a pool allocates them at first
        st.integers(0, ROWS - 1),
        st.integers(0, MAX_BLOCKS - 1),
        st.builds(lambda first, count: list(range(first, first + count)), st.integers(0, 6), st.integers(1, 6)),
    ),
    st.tuples(st.just("write"), st.integers(0, NUM_BLOCKS - 1), st.floats(-9, 9, width=32)),
)


@pytest.mark.parametrize(("layout", "shapes"), LAYOUTS)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@given(todo=st.lists(changes, max_size=25))
def test_a_row_reads_the_blocks_of_its_table(
    layout: Layout, shapes: list[tuple[int, int]], kind: str, todo: list[tuple[object, int, object]]
) -> None:
    memory: PhysicalMemory = SharedMemory() if kind == "cpu" else cuda_memory()
    pool = make_pool(memory, shapes, layout, BLOCK_SIZE if kind == "cpu" else 2 * BLOCK_SIZE)
    pages = PageTables(memory, pool, ROWS, MAX_BLOCKS)
    tables = np.full((ROWS, MAX_BLOCKS), -1, np.int32)
    for what, where, changed in todo:
        if what == "write":
            for tensor in (*pool.keys, *pool.values):
                tensor[where] = changed
        else:
            assert isinstance(what, int)
            assert isinstance(changed, list)
            blocks = np.array(changed[: MAX_BLOCKS - where], np.int32)
            tables[what, where : where + len(blocks)] = blocks
            pages.map(what, where, blocks)
        for row, table in enumerate(tables):
            context = pages.context(row)
            tensors = zip((*context.keys, *context.values), (*pool.keys, *pool.values), strict=True)
            for mapped, held in tensors:
                by_block = mapped.unflatten(0, (MAX_BLOCKS, pool.block_size))
                for index in np.flatnonzero(table >= 0).tolist():
                    assert torch.equal(by_block[index], held[table[index]])
    pages.close()
    memory.free()


def test_neighbours_are_mapped_by_one_call_and_nothing_is_mapped_twice() -> None:
    memory = SharedMemory()
    pool = make_pool(memory, EVEN, "layers", BLOCK_SIZE)
    pages, parts = PageTables(memory, pool, ROWS, MAX_BLOCKS), 4
    pages.map(0, 0, np.array([4, 5, 6, 2, 3], np.int32))
    assert (pages.num_calls, pages.num_mapped) == (2 * parts, 5)
    pages.map(0, 0, np.array([4, 5, 7, 2, 3], np.int32))
    assert (pages.num_calls, pages.num_mapped) == (3 * parts, 6)
    pages.map(0, 0, np.array([4, 5], np.int32))
    assert (pages.num_calls, pages.num_mapped) == (3 * parts, 6)


def test_rows_take_no_more_maps_than_was_counted_and_give_them_back() -> None:
    memory = SharedMemory()
    pool = make_pool(memory, EVEN, "layers", BLOCK_SIZE)
    before = num_maps()
    pages = PageTables(memory, pool, ROWS, MAX_BLOCKS)
    assert num_maps() - before <= 1
    for row in range(ROWS):
        pages.map(row, 0, np.array([9, 7, 5, 3, 1, 11], np.int32))  # the worst: there are no neighbours
    assert num_maps() - before <= 4 * ROWS * MAX_BLOCKS + 1
    assert torch.equal(pages.context(1).keys[0][: BLOCK_SIZE * 2], pool.keys[0][[9, 7]].flatten(0, 1))
    context = pages.context(2)
    pages.close()
    del pages
    gc.collect()
    assert torch.equal(context.keys[1][:BLOCK_SIZE], pool.keys[1][9]), "what is still in use stays mapped"
    del context
    gc.collect()
    assert num_maps() <= before


def test_what_is_not_mapped_cannot_be_read() -> None:
    code = "from pagewise_executor.kv.page_tables import SharedMemory; print(SharedMemory().reserve(4096).sum())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode < 0, "it is killed by a signal"


def test_tables_that_cannot_be_mapped_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory()
    for shapes, layout, step in ((EVEN, "layers", 8), ([(2, 24)], "layers", 64), ([(3, 64)], "tokens", 8)):
        pool = make_pool(memory, shapes, layout, 1)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=f"no whole number of pages of 4096: take a multiple of {step} as --block"):
            PageTables(memory, pool, ROWS, MAX_BLOCKS)
        PageTables(memory, make_pool(memory, shapes, layout, step), ROWS, MAX_BLOCKS)  # type: ignore[arg-type]
    pool = make_pool(memory, EVEN, "layers", BLOCK_SIZE)
    with pytest.raises(ModelError, match=r"256 rows and 100 blocks can take 102401 memory maps.*vm.max_map_count lea"):
        PageTables(memory, pool, 256, 100)
    pool = make_pool(memory, EVEN, "tokens", BLOCK_SIZE)
    PageTables(memory, pool, 256, 100)
    monkeypatch.setattr(page_tables, "_check_maps", lambda *_: None)
    with pytest.raises(ModelError, match="TiB of virtual addresses, which the system refuses"):
        PageTables(memory, pool, 2**20, 2**20)
    with pytest.raises(ModelError, match="not enough memory on cpu for a KV pool"):
        memory.allocate(2**60)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ModelError, match="needs Linux, not darwin"):
        SharedMemory()


# ---- the driver of a GPU ------------------------------------------------------------------------------------


def test_pages_of_a_gpu_are_mapped_one_by_one_and_made_accessible_together() -> None:
    memory = cuda_memory()
    driver = memory._driver
    pool = make_pool(memory, EVEN, "tokens", 16)  # 4 pages a block
    pages = PageTables(memory, pool, ROWS, MAX_BLOCKS)
    assert driver.calls["create"] == len(driver.mapped) == 48
    driver.calls.clear()
    pages.map(0, 0, np.array([3, 4, 5], np.int32))
    assert driver.calls == {"map": 12, "access": 1}
    pages.map(0, 1, np.array([7], np.int32))
    assert driver.calls == {"map": 12 + 4, "access": 2, "unmap": 4}
    assert set(driver.mapped) == driver.accessible
    pages.close()
    assert len(driver.mapped) == 48, "those of the pool as a whole"
    memory.free()
    assert not driver.mapped
    assert not driver.handles
    assert not driver.reserved


def test_a_pool_that_was_freed_can_be_allocated_in_another_size_under_the_tables_of_before() -> None:
    memory = cuda_memory()
    pool = make_pool(memory, EVEN, "tokens", 16)
    before = PageTables(memory, pool, ROWS, MAX_BLOCKS)
    before.map(0, 0, np.array([3, 4, 5], np.int32))
    del pool
    memory.free()
    assert not memory._driver.handles
    memory.allocate(96 * GRANULARITY)
    before.close()
    assert len(memory._driver.reserved) == 1


def test_a_gpu_without_room_is_named_and_keeps_nothing() -> None:
    memory = cuda_memory(4 * GRANULARITY)
    with pytest.raises(ModelError, match="not enough memory on cpu for a KV pool"):
        memory.allocate(5 * GRANULARITY)
    assert not memory._driver.handles
    assert len(memory.allocate(3 * GRANULARITY + 1)) == 3 * GRANULARITY + 1


def test_the_fake_refuses_what_the_driver_refuses() -> None:
    driver = FakeDriver(GRANULARITY, 4 * GRANULARITY)
    failed = (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
    access = driver.CUmemAccessDesc()
    access.flags, access.location = "readwrite", FakeDriver.CUmemAllocationProp().location
    access.location.type = "device"
    assert driver.cuMemAddressReserve(4096, GRANULARITY, 0, 0)[:1] == failed, "no multiple of the granularity"
    _, start = driver.cuMemAddressReserve(2 * GRANULARITY, GRANULARITY, 0, 0)
    _, handle = driver.cuMemCreate(GRANULARITY, None, 0)
    assert driver.cuMemMap(start + 4096, GRANULARITY, 0, handle, 0) == failed, "not aligned"
    assert driver.cuMemMap(start + 2 * GRANULARITY, GRANULARITY, 0, handle, 0) == failed, "not reserved"
    assert driver.cuMemSetAccess(start, GRANULARITY, [access], 1) == failed, "not mapped"
    assert driver.cuMemMap(start, GRANULARITY, 0, handle, 0) != failed
    assert driver.cuMemMap(start, GRANULARITY, 0, handle, 0) == failed, "mapped already"
    assert driver.cuMemSetAccess(start, 2 * GRANULARITY, [access], 1) == failed, "mapped in part"
    assert driver.cuMemAddressFree(start, 2 * GRANULARITY) == failed, "still mapped"
    assert driver.cuMemUnmap(start, 2 * GRANULARITY) == failed, "another size than was mapped"
    assert driver.cuMemUnmap(start, GRANULARITY) != failed
    assert driver.cuMemAddressFree(start, 2 * GRANULARITY) != failed
