"""The KV pool in each of its layouts: the same blocks, wherever their bytes lie."""

import numpy as np
import psutil
import pytest
import torch
from pagewise_executor.kv.kv_pool import KVPool, bytes_per_block
from pagewise_executor.tiers.device import BlockHashes, DeviceTier
from pagewise_kernels.kv_layer import FP8, INT8
from pagewise_shared.errors import ModelError

EVEN, UNEVEN = [(2, 16), (2, 16)], [(2, 16), (1, 8), (4, 16)]


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN])
@pytest.mark.parametrize("layout", ["layers", "blocks"])
@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8, INT8])
def test_blocks_are_copied_and_come_back(
    shapes: list[tuple[int, int]],
    layout: str,
    triton: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    pool = KVPool(shapes, 7, 4, dtype, device, layout=layout, triton=triton)  # type: ignore[arg-type]
    assert pool.bytes_per_block == bytes_per_block(shapes, 4, dtype)
    tensors = [*pool.keys, *pool.values, *(tensor for scales in pool.scales if scales for tensor in scales)]
    assert len(tensors) == len(shapes) * (4 if dtype in (FP8, INT8) else 2)
    for (heads, dim), keys in zip(shapes, pool.keys, strict=True):
        assert keys.shape == (7, 4, heads, dim)
        assert keys.stride(3) == 1
        assert keys.stride()[1:3] == (heads * dim, dim)
    for number, tensor in enumerate(tensors):  # each slot of each tensor holds something of its own
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
        tensor.copy_(values.to(tensor.dtype))
    before = [tensor.float().clone() for tensor in tensors]
    staged = pool.gather(np.array([5, 1], np.int32))
    pool.scatter(np.array([0, 2], np.int32), staged)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.float()[[0, 2]], old[[5, 1]])
        assert torch.equal(tensor.float()[[1, 3, 4, 5, 6]], old[[1, 3, 4, 5, 6]])
    pool.copy_blocks(np.array([[3, 4], [6, 3]], np.int32))  # one is written that the other reads
    pool.copy_blocks(np.array([[1, 0]], np.int32))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.float()[[4, 3, 0]], old[[3, 6, 1]])


def test_a_device_that_has_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(ModelError, match=r"not enough memory on cpu for a KV pool of .*--kv-memory"):
        KVPool(EVEN, 10**12, 4, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(torch, "zeros", full)  # as a GPU does it
    with pytest.raises(ModelError, match=r"not enough memory on meta for a KV pool of .*--kv-memory"):
        KVPool(EVEN, 7, 4, torch.float32, torch.device("meta"))


def test_a_device_without_an_index_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    memory = torch.zeros(7 * bytes_per_block(EVEN, 4, torch.float32), dtype=torch.uint8)
    pool = KVPool(EVEN, 7, 4, torch.float32, torch.device("cuda"), memory=memory)
    assert pool.device == pool.over(memory, 7).device == torch.device("cuda", 3)


def test_a_new_pool_on_the_cpu_is_zero_and_takes_no_memory_yet() -> None:
    blocks = 2**18
    size = blocks * bytes_per_block(EVEN, 4, torch.float32)
    before = psutil.Process().memory_info().rss
    pool = KVPool(EVEN, blocks, 4, torch.float32, torch.device("cpu"))
    assert psutil.Process().memory_info().rss - before < size / 10
    last = np.array([blocks - 1], np.int32)
    assert not pool.gather(last).any()
    pool.scatter(last, np.ones((1, pool.bytes_per_block), np.uint8))
    assert pool.gather(last).all()


def test_blocks_are_written_from_a_frame_that_may_only_be_read(device: torch.device) -> None:
    pool = KVPool(EVEN, 7, 4, torch.float32, device)
    tier = DeviceTier(pool, BlockHashes(7, 4))
    frame = bytes(number % 251 for number in range(2 * pool.bytes_per_block))
    rows = np.frombuffer(frame, np.uint8).reshape(2, -1)
    blocks, read = np.array([5, 1], np.int32), np.empty_like(rows)
    tier.write(blocks, rows)
    assert tier.read(blocks, read) == [True, True]
    assert (read == rows).all()
