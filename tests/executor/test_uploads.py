"""Arrays travel together: many of them, of any type and shape, in one piece of memory."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagewise_executor import uploads
from pagewise_executor.uploads import Uploads, join_bytes, pack, packed_size, split_bytes, unpack

ARRAYS = st.lists(
    st.tuples(
        st.sampled_from([np.int64, np.int32, np.float32, np.uint8]),
        st.lists(st.integers(0, 5), min_size=1, max_size=2),
        st.integers(0, 250),
    ).map(lambda drawn: (np.arange(np.prod(drawn[1])) + drawn[2]).astype(drawn[0]).reshape(drawn[1])),
    min_size=1,
    max_size=6,
)


@given(ARRAYS)
def test_arrays_that_are_packed_are_found_again_at_aligned_places(arrays: list[np.ndarray]) -> None:
    memory = np.full(packed_size(arrays), 99, np.uint8)
    pack(arrays, memory)
    packed = torch.from_numpy(memory)
    found = unpack(packed, arrays)
    for array, tensor in zip(arrays, found, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.shape == array.shape
        assert tensor.numpy().tolist() == array.tolist()
        assert (tensor.data_ptr() - packed.data_ptr()) % 16 == 0 or not tensor.numel()


@given(ARRAYS)
def test_tensors_that_come_back_together_are_what_they_were(arrays: list[np.ndarray]) -> None:
    tensors = [torch.from_numpy(array) for array in arrays]
    found = split_bytes(join_bytes(tensors), tensors)
    for one, other in zip(tensors, found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_no_step_pins_memory_after_the_largest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin memory takes milliseconds in which the device waits for the host. Copies are slow here: each ends when it
    is waited for, and reads its buffer then, so one that is written over too early would bring the wrong values."""
    pinned: list[int] = []
    waiting: list[Any] = []

    class Event:
        def record(self) -> None:
            self.copy = copies.pop()
            waiting.append(self)

        def synchronize(self) -> None:
            if self in waiting:
                waiting.remove(self)
                source, target = self.copy
                target.copy_(source)

    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def allocate(*shape: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        pinned.append(int(np.prod(shape)))
        return torch.zeros(*shape, dtype=dtype)

    def to(source: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        copies.append((source, target := torch.zeros_like(source)))
        return target

    monkeypatch.setattr(uploads.torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    upload = Uploads(torch.device("cuda"))
    upload(np.zeros(10))  # a decode at the start
    upload(np.zeros(10_000))  # the largest step
    assert len(pinned) == 2
    sizes = [9_000, 3, 10_000, 500] * 20
    found = [upload(np.full(size, i)) for i, size in enumerate(sizes)]
    assert len(pinned) == 2, "a step has pinned memory"
    while waiting:
        waiting[0].synchronize()
    for i, (size, tensor) in enumerate(zip(sizes, found, strict=True)):
        assert tensor.shape == (size,)
        assert bool((tensor == i).all())
