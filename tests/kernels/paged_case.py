"""Problems of paged attention: a pool with random KV, and the oracle's results."""

import itertools
from dataclasses import dataclass

import torch
from pagewise_kernels.attention import Chunk, DecodePlan, PrefillPlan, decode_attention, prefill_attention
from pagewise_kernels.attention.config import LARGEST_TILE
from pagewise_kernels.kv_int4 import unpack
from pagewise_kernels.kv_layer import GROUP, INT4, RECORD, KVLayer, Scales
from pagewise_kernels.kv_write import write_kv

from tests.kernels import oracles

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FP8, INT8 = torch.float8_e4m3fn, torch.int8


@dataclass
class Case:
    """A pool with random KV. Sequence i has ``lengths[i]`` tokens of context; blocks lie in disorder."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    lengths: tuple[int, ...] = (1, 5, 33, 70, 17)
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    int8: bool = False
    int4: bool = False
    heads_first: bool = False
    has_sinks: bool = False
    attention_chunk: int | None = None
    ring: bool = False

    def pool(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        most = -(-max(self.lengths) // self.block_size)
        num_blocks = len(self.lengths) * most + 3
        shape = (num_blocks, self.block_size, self.kv_heads, self.head_dim)
        if self.heads_first:  # another order of strides, the same shape
            storage = (num_blocks, self.kv_heads, self.block_size, self.head_dim)
            self.keys, self.values = (
                torch.randn(storage, generator=generator).to(device, self.dtype).transpose(1, 2) for _ in range(2)
            )
        else:
            self.keys, self.values = (torch.randn(shape, generator=generator).to(device, self.dtype) for _ in range(2))
        self.tables = torch.randperm(num_blocks, generator=generator)[: len(self.lengths) * most]
        self.tables = self.tables.view(len(self.lengths), most).to(device, torch.int32)
        self.scales = None
        if self.fp8 or self.int8:
            stored = [torch.zeros(shape, device=device).to(FP8 if self.fp8 else INT8) for _ in range(2)]
            self.scales = Scales(*(torch.zeros(shape[:3], device=device) for _ in range(2)))
            flat = (t.flatten(0, 1) for t in (self.keys, self.values))
            layer = KVLayer(*stored, self.scales)
            write_kv(*flat, layer, torch.arange(num_blocks * self.block_size, device=device))
            self.stored = stored
            pairs = zip(stored, (self.scales.keys, self.scales.values), strict=True)
            self.keys, self.values = (s.float() * scale[..., None] for s, scale in pairs)
        elif self.int4:
            size = self.head_dim // GROUP * RECORD
            self.stored = [torch.zeros(*shape[:3], size, dtype=torch.uint8, device=device).view(INT4) for _ in range(2)]
            slots = torch.arange(num_blocks * self.block_size, device=device)
            write_kv(self.keys.flatten(0, 1), self.values.flatten(0, 1), KVLayer(*self.stored), slots)
            self.keys, self.values = map(unpack, self.stored)
        else:
            self.stored = [self.keys, self.values]
        self.layer = KVLayer(*self.stored, self.scales)

    def queries(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        shape = (count, self.heads, self.head_dim)
        return torch.randn(shape, generator=generator).to(self.keys.device, self.dtype)

    @property
    def sinks(self) -> torch.Tensor | None:
        """From heads whose sink has hardly a weight to heads of which it has nearly all."""
        return torch.linspace(-3, 9, self.heads).to(self.keys.device, self.dtype) if self.has_sinks else None

    def expected(self, q: torch.Tensor, sequence: int, start: int) -> torch.Tensor:
        return oracles.attention(
            q, self.keys, self.values, self.tables[sequence], start,
            scale=self.scale, softcap=self.softcap, window=self.window, sinks=self.sinks,
            attention_chunk=self.attention_chunk,
        )  # fmt: skip

    def decode_plan(self, deterministic: bool = False) -> DecodePlan:
        return DecodePlan(
            max_queries=len(self.lengths) + 2, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            kv_dtype=self.stored[0].dtype, device=self.keys.device, window=self.window, deterministic=deterministic,
            max_context=max(self.lengths), attention_chunk=self.attention_chunk,
        )  # fmt: skip

    def decode(self, q: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
        plan = self.decode_plan(deterministic)
        plan.plan(torch.tensor(self.lengths, dtype=torch.int32, device=q.device))
        given = {"softcap": self.softcap, "scale": self.scale, "sinks": self.sinks, "ring": self.ring}
        return decode_attention(q, self.layer, self.tables, plan, **given)

    def prefill(self, q: torch.Tensor, chunks: list[Chunk], deterministic: bool = False) -> torch.Tensor:
        plan = PrefillPlan(
            chunks, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            kv_dtype=self.stored[0].dtype, device=q.device, window=self.window, deterministic=deterministic,
            attention_chunk=self.attention_chunk,
        )  # fmt: skip
        given = {"softcap": self.softcap, "scale": self.scale, "sinks": self.sinks, "ring": self.ring}
        return prefill_attention(q, self.layer, self.tables, plan, **given)

    def chunks(self, sizes: list[int]) -> list[Chunk]:
        """The last ``sizes[i]`` tokens of each context, one after the other in the batch."""
        starts = itertools.accumulate(sizes, initial=0)
        return [
            Chunk(first, length - size, size, row)
            for row, (first, length, size) in enumerate(zip(starts, self.lengths, sizes, strict=False))
        ]


SMALL = {
    "plain": Case(),
    "one head": Case(heads=1, kv_heads=1, block_size=1),
    "group of 3": Case(heads=6, kv_heads=2, head_dim=32, block_size=8),
    "mqa, odd head size": Case(heads=5, kv_heads=1, head_dim=80, block_size=16, lengths=(40, 3)),
    "mha, odd head size": Case(heads=2, kv_heads=2, head_dim=96, lengths=(21, 9)),
    "block size 3": Case(block_size=3),
    "block size 32": Case(block_size=32, lengths=(33, 70, 1)),
    "window": Case(window=20, lengths=(100, 3, 65, 20, 21)),
    "window of one": Case(window=1),
    "attention chunks": Case(
        lengths=(3 * LARGEST_TILE + 5, LARGEST_TILE, LARGEST_TILE + 1, 2 * LARGEST_TILE - 1, 5),
        attention_chunk=LARGEST_TILE,
    ),
    "head size 512": Case(heads=2, kv_heads=1, head_dim=512, lengths=(21, 9)),
    "softcap": Case(softcap=5.0, scale=0.7),
    "window and softcap": Case(window=7, softcap=20.0),
    "float16": Case(dtype=torch.float16),
    "bfloat16": Case(dtype=torch.bfloat16, heads=8),
    "heads before tokens": Case(heads_first=True),
    "fp8": Case(fp8=True, heads=8),
    "sinks": Case(has_sinks=True, heads=8),
    "sinks, window and softcap": Case(has_sinks=True, window=20, softcap=5.0),
    "int8": Case(int8=True, heads=8, head_dim=32),
    "int8, bfloat16": Case(int8=True, dtype=torch.bfloat16, head_dim=24, window=20),
    "int4": Case(int4=True, heads=8, head_dim=32),
    "int4, odd head size, window": Case(int4=True, dtype=torch.bfloat16, head_dim=96, window=20),
    "sinks, fp8": Case(has_sinks=True, fp8=True, heads=8, dtype=torch.bfloat16),
    "fp8, float16": Case(fp8=True, dtype=torch.float16, head_dim=24),
}
