"""Decode attention in PyTorch, beside the formula."""

from typing import Any

import pytest
import torch
from pagewise_executor.attention.backend import PagedLayer
from pagewise_executor.attention.decode import DecodeGroup, decode_gathered, decode_in_place


@pytest.mark.parametrize(
    ("window", "attention_chunk"),
    [*((window, None) for window in (None, 1, 7, 16, 100)), *((None, chunk) for chunk in (1, 7, 16, 100))],
)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_attention_in_place_is_attention(
    window: int | None, attention_chunk: int | None, softcap: float | None, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(0)
    block_size, dim = 4, 24
    keys, values = torch.randn(2, 64, block_size, kv_heads, dim)
    layer = PagedLayer(keys, values, attention_chunk=attention_chunk)
    lengths = torch.tensor([1, 4, 5, 30, 37])
    blocks = torch.randperm(64)[: 5 * 10].view(5, 10)
    q = torch.randn(5, heads, dim)

    def group() -> DecodeGroup:
        return DecodeGroup(torch.arange(5), blocks, lengths, longest=37)

    found = decode_in_place(q, layer, group(), 0.2, window, softcap)
    torch.testing.assert_close(found, decode_gathered(q, layer, group(), 0.2, window, softcap), rtol=1e-5, atol=1e-5)
    for row, length in enumerate(lengths.tolist()):
        first = max(0, length - window) if window else 0
        if attention_chunk:
            first = (length - 1) // attention_chunk * attention_chunk
        slots = [int(blocks[row, p // block_size]) * block_size + p % block_size for p in range(first, length)]
        for head in range(heads):
            k, v = (t.flatten(0, 1)[slots, head // (heads // kv_heads)].double() for t in (keys, values))
            scores = (k @ q[row, head].double()) * 0.2
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            torch.testing.assert_close(found[row, head].double(), scores.softmax(0) @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decode", [decode_in_place, decode_gathered])
def test_neither_a_poisoned_sequence_nor_what_memory_held_before_reaches_others(decode: Any) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 8, 4, 2, 16)
    keys[3] = float("nan")
    values[3] = float("inf")
    keys[2, 3] = values[2, 3] = float("nan")  # behind the tokens of the other sequence
    group = DecodeGroup(torch.arange(2), torch.tensor([[3, 0], [1, 2]]), torch.tensor([2, 7]), longest=7)
    layer = PagedLayer(keys, values)
    for _ in range(2):  # twice: the first pass must not change the second
        found = decode(torch.randn(2, 4, 16), layer, group, 0.25, None, None)
        assert not found[0].isfinite().any()
        assert found[1].isfinite().all()
