"""Keys and values that overlap in memory are written and attended to like separate ones."""

import numpy as np
import pytest
import torch
from pagewise_kernels.attention import Chunk, DecodePlan, PrefillPlan, decode_attention, prefill_attention
from pagewise_kernels.cpu.attention import CpuStep
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.kv_write import write_kv

from tests.cpu_kernels import need_cpu_kernels

HEADS, KV_HEADS, HEAD_DIM, SHARED, BLOCK_SIZE, LENGTH = 4, 2, 32, 24, 4, 37
"""Of the vectors the last eight elements are of values alone, as many as the first ones of keys alone."""


class Case:
    """A sequence whose last ``new`` tokens are not in the pools yet, which are two: one as kernels usually get it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, new: int) -> None:
        generator = torch.Generator().manual_seed(1)
        blocks = -(-LENGTH // BLOCK_SIZE)
        table = torch.randperm(blocks + 2, generator=generator)[:blocks]
        positions = torch.arange(LENGTH - new, LENGTH)
        self.table = table.to(device, torch.int32)[None]
        self.slots = (table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).to(device)
        size = 2 * HEAD_DIM - SHARED
        pool = torch.randn(blocks + 2, BLOCK_SIZE, KV_HEADS, size, generator=generator).to(device, dtype)
        vectors = torch.randn(new, KV_HEADS, size, generator=generator).to(device, dtype)
        self.k, self.v = vectors[..., :HEAD_DIM], vectors[..., -HEAD_DIM:]
        self.overlapping = KVLayer(pool[..., :HEAD_DIM], pool[..., -HEAD_DIM:])
        self.apart = KVLayer(self.overlapping.keys.contiguous(), self.overlapping.values.contiguous())
        self.q = torch.randn(new, HEADS, HEAD_DIM, generator=generator).to(device, dtype)
        assert (self.overlapping.shared, self.apart.shared) == (SHARED, 0)

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(found, expected)
        for one, other in ((self.overlapping.keys, self.apart.keys), (self.overlapping.values, self.apart.values)):
            assert torch.equal(one, other)


@pytest.mark.parametrize("new", [1, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_in_c(dtype: torch.dtype, new: int) -> None:
    need_cpu_kernels()
    case = Case(torch.device("cpu"), dtype, new)
    decodes = np.arange(int(new == 1))
    chunks = np.array([[0, 0, LENGTH - new, new]] * (new > 1), np.int64).reshape(-1, 4)
    step = CpuStep(
        case.slots.numpy(), case.table.numpy(), decodes, decodes + LENGTH, chunks, block_size=BLOCK_SIZE
    )  # fmt: skip
    found, expected = (
        step.attend(case.q, case.k, case.v, layer, scale=0.3) for layer in (case.overlapping, case.apart)
    )
    case.check(found, expected)


@pytest.mark.parametrize("new", [1, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_kernels(dtype: torch.dtype, new: int, device: torch.device) -> None:
    case = Case(device, dtype, new)
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "kv_dtype": dtype, "device": device}
    found = []
    for layer in (case.overlapping, case.apart):
        write_kv(case.k, case.v, layer, case.slots)
        if new == 1:
            decodes = DecodePlan(max_queries=1, **shape)  # type: ignore[arg-type]
            decodes.plan(torch.tensor([LENGTH], dtype=torch.int32, device=device))
            found.append(decode_attention(case.q, layer, case.table, decodes, scale=0.3))
        else:
            chunks = PrefillPlan([Chunk(0, LENGTH - new, new, 0)], **shape)  # type: ignore[arg-type]
            found.append(prefill_attention(case.q, layer, case.table, chunks, scale=0.3))
    case.check(*found)
