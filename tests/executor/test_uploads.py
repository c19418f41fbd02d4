"""Arrays travel together: many of them, of any type and shape, in one piece of memory."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagewise_executor.uploads import join_bytes, pack, packed_size, split_bytes, unpack

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
