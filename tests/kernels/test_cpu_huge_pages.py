"""Memory for packed weights: zeros of its own, on huge pages."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from pagewise_kernels.cpu.huge_pages import zeros

SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 3)), min_size=1, max_size=20)


@given(shapes=SHAPES, dtype=st.sampled_from([torch.float32, torch.int8]))
def test_tensors_are_zeros_and_share_no_memory(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    tensors = [zeros(shape, dtype) for shape in shapes]
    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number + 1).all())


def test_more_than_a_chunk() -> None:
    large = zeros((1, (64 << 20) + 5), torch.int8)
    large[0, -1] = 1
    assert not large[0, :-1].any()


def test_large_tensors_lie_on_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has no huge pages")
    address, own = zeros((4 << 20,), torch.int8).data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.partition(" ")[0].partition("-")
        if last:
            own = int(first, 16) <= address < int(last, 16)
        elif own and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    pytest.fail("the tensor is in no mapping")
