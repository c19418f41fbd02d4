"""Attention over paged KV against a float64 oracle: small odd shapes interpreted on the CPU, real ones on a GPU."""

import dataclasses
import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from pagewise_kernels.attention import (
    CascadePlan,
    Chunk,
    DecodePlan,
    PrefillPlan,
    Scales,
    SharedPrefix,
    cascade_attention,
    decode_attention,
    prefill_attention,
)
from pagewise_kernels.kv_write import write_kv

from tests.kernels import oracles

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FP8 = torch.float8_e4m3fn


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
    heads_first: bool = False

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
        if self.fp8:
            stored = [torch.zeros(shape, device=device).to(FP8) for _ in range(2)]
            self.scales = Scales(*(torch.zeros(shape[:3], device=device) for _ in range(2)))
            flat = (t.flatten(0, 1) for t in (self.keys, self.values))
            write_kv(*flat, *stored, torch.arange(num_blocks * self.block_size, device=device), self.scales)
            self.stored = stored
            pairs = zip(stored, (self.scales.keys, self.scales.values), strict=True)
            self.keys, self.values = (s.float() * scale[..., None] for s, scale in pairs)
        else:
            self.stored = [self.keys, self.values]

    def queries(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        shape = (count, self.heads, self.head_dim)
        return torch.randn(shape, generator=generator).to(self.keys.device, self.dtype)

    def expected(self, q: torch.Tensor, sequence: int, start: int) -> torch.Tensor:
        return oracles.attention(
            q, self.keys, self.values, self.tables[sequence], start,
            scale=self.scale, softcap=self.softcap, window=self.window,
        )  # fmt: skip

    def decode_plan(self, deterministic: bool = False) -> DecodePlan:
        return DecodePlan(
            max_queries=len(self.lengths) + 2, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            kv_dtype=self.stored[0].dtype, device=self.keys.device, window=self.window, deterministic=deterministic,
            max_context=max(self.lengths),
        )  # fmt: skip

    def decode(self, q: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
        plan = self.decode_plan(deterministic)
        plan.plan(torch.tensor(self.lengths, dtype=torch.int32, device=q.device))
        return decode_attention(
            q, *self.stored, self.tables, plan, softcap=self.softcap, scale=self.scale, scales=self.scales
        )

    def prefill(self, q: torch.Tensor, chunks: list[Chunk], deterministic: bool = False) -> torch.Tensor:
        plan = PrefillPlan(
            chunks, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            kv_dtype=self.stored[0].dtype, device=q.device, window=self.window, deterministic=deterministic,
        )  # fmt: skip
        return prefill_attention(
            q, *self.stored, self.tables, plan, softcap=self.softcap, scale=self.scale, scales=self.scales
        )

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
    "window": Case(window=20, lengths=(100, 3, 65, 20, 21)),
    "window of one": Case(window=1),
    "softcap": Case(softcap=5.0, scale=0.7),
    "window and softcap": Case(window=7, softcap=20.0),
    "float16": Case(dtype=torch.float16),
    "bfloat16": Case(dtype=torch.bfloat16, heads=8),
    "heads before tokens": Case(heads_first=True),
    "fp8": Case(fp8=True, heads=8),
    "fp8, float16": Case(fp8=True, dtype=torch.float16, head_dim=24),
}


def check_decode(case: Case, device: torch.device, deterministic: bool = False) -> None:
    case.pool(device)
    q = case.queries(len(case.lengths))
    result = case.decode(q, deterministic)
    for row, length in enumerate(case.lengths):
        if length:
            expected = case.expected(q[row : row + 1], row, length - 1)
            torch.testing.assert_close(
                result[row : row + 1].double(), expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
            )


def check_prefill(case: Case, device: torch.device, sizes: list[int], deterministic: bool = False) -> None:
    case.pool(device)
    chunks = case.chunks(sizes)
    q = case.queries(sum(sizes))
    result = case.prefill(q, chunks, deterministic)
    for chunk in chunks:
        own = slice(chunk.first, chunk.first + chunk.size)
        expected = case.expected(q[own], chunk.table, chunk.start)
        torch.testing.assert_close(
            result[own].double(), expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
        )


@pytest.mark.parametrize("name", SMALL)
def test_decode_equals_the_oracle(name: str, device: torch.device) -> None:
    check_decode(SMALL[name], device)


@pytest.mark.parametrize("name", SMALL)
def test_prefill_equals_the_oracle(name: str, device: torch.device) -> None:
    case = SMALL[name]
    check_prefill(case, device, [min(length, 21 - row) for row, length in enumerate(case.lengths)])


@pytest.mark.parametrize("name", ["plain", "group of 3", "window", "fp8", "softcap"])
def test_the_deterministic_mode_equals_the_oracle_too(name: str, device: torch.device) -> None:
    case = dataclasses.replace(SMALL[name], lengths=(100, 3, 65))
    check_decode(case, device, deterministic=True)
    check_prefill(case, device, [30, 3, 1], deterministic=True)


def test_rows_that_pad_a_batch_get_zeros(device: torch.device) -> None:
    case = Case(lengths=(9, 0, 30, 0))
    case.pool(device)
    q = case.queries(4)
    plan = case.decode_plan()
    plan.plan(torch.tensor(case.lengths, dtype=torch.int32, device=device))
    out = torch.full_like(q, 7.0)
    decode_attention(q, *case.stored, case.tables, plan, out=out)
    assert not out[[1, 3]].any()
    torch.testing.assert_close(out[2:3].double(), case.expected(q[2:3], 2, 29), atol=2e-5, rtol=2e-5)


def test_deterministic_results_do_not_depend_on_batch_or_chunking(device: torch.device) -> None:
    """Bit for bit: alone or among others, in one chunk or several, as a prefill or as a decode."""
    case = Case(heads=4, kv_heads=2, lengths=(90, 33, 64, 7), window=None)
    case.pool(device)
    rng = random.Random(3)
    for row, length in enumerate(case.lengths):
        q = case.queries(length)
        whole = case.prefill(q, [Chunk(0, 0, length, row)], deterministic=True)
        cuts = sorted({0, length, *(rng.randrange(length) for _ in range(3))})
        chunks = [Chunk(start, start, stop - start, row) for start, stop in itertools.pairwise(cuts)]
        rng.shuffle(chunks)
        assert torch.equal(case.prefill(q, chunks, deterministic=True), whole)
        batch = case.queries(len(case.lengths))
        batch[row] = q[-1]
        assert torch.equal(case.decode(batch, deterministic=True)[row], whole[-1])


def check_cascade(case: Case, groups: list[tuple[list[int], int]], device: torch.device) -> None:
    """Sequences of a group share the blocks of their first so many tokens."""
    case.pool(device)
    for members, tokens in groups:
        case.tables[members, : tokens // case.block_size] = case.tables[members[0], : tokens // case.block_size].clone()
    rows = list(range(len(case.lengths)))[::-1]  # tables stand in another order than queries
    tables = case.tables.flip(0)
    q = case.queries(len(case.lengths))
    plan = CascadePlan(
        case.lengths, rows, [SharedPrefix(members, tokens) for members, tokens in groups], heads=case.heads,
        kv_heads=case.kv_heads, head_dim=case.head_dim, kv_dtype=case.stored[0].dtype, device=device,
    )  # fmt: skip
    result = cascade_attention(
        q, *case.stored, tables, plan, softcap=case.softcap, scale=case.scale, scales=case.scales
    )
    for row, length in enumerate(case.lengths):
        expected = case.expected(q[row : row + 1], row, length - 1)
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(result[row : row + 1].double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["plain", "group of 3", "softcap", "float16", "fp8", "heads before tokens"])
def test_cascade_equals_the_oracle(name: str, device: torch.device) -> None:
    case = dataclasses.replace(SMALL[name], lengths=(70, 41, 5, 66, 90, 33, 65, 1), block_size=8)
    check_cascade(case, [([0, 3, 4], 64), ([5, 1, 6], 32)], device)
    check_cascade(case, [], device)


@pytest.mark.gpu
def test_cascade_on_a_gpu(device: torch.device) -> None:
    case = Case(32, 8, 128, 16, tuple(1500 + 37 * i for i in range(40)), dtype=torch.bfloat16)
    check_cascade(case, [(list(range(0, 40, 2)), 1024), ([1, 5, 9, 13], 512)], device)


def test_prefixes_that_are_none_are_refused() -> None:
    given = {"heads": 4, "kv_heads": 2, "head_dim": 16, "kv_dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match="does not begin a context of 20"):
        CascadePlan([40, 20], [0, 1], [SharedPrefix([0, 1], 32)], **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="query 1 is in two"):
        CascadePlan([40, 40, 40], [0, 1, 2], [SharedPrefix([0, 1], 32), SharedPrefix([1, 2], 16)], **given)  # type: ignore[arg-type]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"q": torch.zeros(2, 3, 16)}, ValueError, "3 query heads cannot share 2 KV heads"),
        ({"q": torch.zeros(2, 4, 8)}, ValueError, "attention takes q"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float64)}, TypeError, "not torch.float64"),
        ({"q": torch.zeros(2, 4, 32)[..., ::2]}, ValueError, "next to each other"),
        ({"tables": torch.zeros(2, 9)}, TypeError, "block tables are int32"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float16)}, TypeError, "like q"),
        ({"q": torch.zeros(9, 4, 16)}, ValueError, "the plan is for 4 queries"),
        ({"out": torch.zeros(3, 4, 16)}, ValueError, "out is torch.float32"),
        ({"scales": Scales(torch.zeros(1), torch.zeros(1))}, TypeError, "float8 KV comes with scales"),
        ({"tables": torch.zeros(2, 9, dtype=torch.int32, device="meta")}, ValueError, "different devices: cpu, meta"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], error: type[Exception], said: str) -> None:
    case = Case(lengths=(9, 30))
    case.pool(torch.device("cpu"))
    given = {"q": case.queries(2), "keys": case.keys, "values": case.values, "tables": case.tables} | change
    with pytest.raises(error, match=said):
        decode_attention(plan=case.decode_plan(), **given)  # type: ignore[arg-type]


REAL = {
    "llama 8B": Case(32, 8, 128, 16, (1, 17, 1000, 4097, 8192), dtype=torch.bfloat16),
    "llama 8B, heads first": Case(32, 8, 128, 16, (1000, 4097), dtype=torch.bfloat16, heads_first=True),
    "llama 8B, fp16": Case(32, 8, 128, 16, (3000, 5), dtype=torch.float16),
    "llama 8B, fp32": Case(32, 8, 128, 16, (3000, 5)),
    "llama 8B, fp8": Case(32, 8, 128, 16, (3000, 5, 700), dtype=torch.bfloat16, fp8=True),
    "qwen 7B": Case(28, 4, 128, 16, (2222, 64), dtype=torch.bfloat16),
    "gemma 2": Case(8, 4, 256, 16, (5000, 300), dtype=torch.bfloat16, window=4096, softcap=50.0),
    "phi, head size 80": Case(32, 32, 80, 16, (2500, 9), dtype=torch.bfloat16),
    "phi 3, head size 96": Case(32, 32, 96, 16, (2500, 9), dtype=torch.bfloat16, window=2047),
    "mqa": Case(71, 1, 64, 32, (2500, 9), dtype=torch.bfloat16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", REAL)
def test_real_shapes_on_a_gpu(name: str, deterministic: bool, device: torch.device) -> None:
    case = REAL[name]
    check_decode(case, device, deterministic)
    check_prefill(
        case, device, [min(length, 700 - 300 * row) for row, length in enumerate(case.lengths[:3])], deterministic
    )


@pytest.mark.gpu
def test_deterministic_results_on_a_gpu_do_not_depend_on_batch_or_chunking(device: torch.device) -> None:
    case = Case(32, 8, 128, 16, (3000, 129, 2048, 7), dtype=torch.bfloat16)
    case.pool(device)
    for row, length in enumerate(case.lengths):
        q = case.queries(length)
        whole = case.prefill(q, [Chunk(0, 0, length, row)], deterministic=True)
        cuts = sorted({0, length, length // 3, length // 2 + 1, length - 1})
        chunks = [Chunk(start, start, stop - start, row) for start, stop in itertools.pairwise(cuts)]
        assert torch.equal(case.prefill(q, chunks, deterministic=True), whole)
        batch = case.queries(len(case.lengths))
        batch[row] = q[-1]
        assert torch.equal(case.decode(batch, deterministic=True)[row], whole[-1])
