"""Attention over paged KV against a float64 oracle: small odd shapes interpreted on the CPU, real ones on a GPU."""

import dataclasses
import itertools
import random

import pytest
import torch
from pagewise_kernels.attention import (
    Chunk,
    DecodePlan,
    PrefillPlan,
    StaticPrefillPlan,
    decode_attention,
    prefill_attention,
)
from pagewise_kernels.attention.config import LARGEST_TILE
from pagewise_kernels.attention.kernel import UNIT_FIELDS
from pagewise_kernels.kv_layer import KVLayer, Scales
from pagewise_kernels.shapes import power_of_two

from tests.kernels.paged_case import SMALL, TOLERANCE, Case


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


@pytest.mark.parametrize(
    "name",
    ["plain", "group of 3", "window", "attention chunks", "fp8", "softcap", "sinks", "sinks, window and softcap"],
)
def test_the_deterministic_mode_equals_the_oracle_too(name: str, device: torch.device) -> None:
    case = dataclasses.replace(SMALL[name], lengths=(100, 3, 65))
    check_decode(case, device, deterministic=True)
    check_prefill(case, device, [30, 3, 1], deterministic=True)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["window", "window and softcap", "attention chunks", "block size 3, window"])
def test_tables_of_windows_may_be_rings(name: str, deterministic: bool, device: torch.device) -> None:
    """Results have the same bits as with whole tables, and unseen blocks are not there."""
    case = Case(block_size=3, window=20) if name == "block size 3, window" else SMALL[name]
    case = dataclasses.replace(case, lengths=(300, 150, 65, 16, 1))
    case.pool(device)
    sizes = [min(length, 21 - row) for row, length in enumerate(case.lengths)]
    decodes, chunks = case.queries(len(case.lengths)), case.queries(sum(sizes))
    whole = case.decode(decodes, deterministic), case.prefill(chunks, case.chunks(sizes), deterministic)
    seen = (case.window or case.attention_chunk or 0) + max(sizes) + LARGEST_TILE
    width = power_of_two(-(-seen // case.block_size) + 1)
    tables, case.tables = case.tables, torch.full((len(case.lengths), width), 2**30, dtype=torch.int32, device=device)
    for row, length in enumerate(case.lengths):
        blocks = -(-length // case.block_size)
        for block in range(max(0, blocks - width), blocks):
            case.tables[row, block % width] = tables[row, block]
    case.ring = True
    assert torch.equal(case.decode(decodes, deterministic), whole[0])
    assert torch.equal(case.prefill(chunks, case.chunks(sizes), deterministic), whole[1])
    case.tables = tables[:, :5].contiguous()
    with pytest.raises(ValueError, match="a power of two of entries, not 5"):
        case.decode(decodes)


@pytest.mark.parametrize("size", ["tiny", "large", "mixed"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_float8_of_any_size_fits_into_what_is_multiplied(size: str, deterministic: bool, device: torch.device) -> None:
    """Products are of float16, whose numbers lie between 6e-8 and 65,504: scales, weights and queries have to fit."""
    case = Case(heads=8, lengths=(70, 9), dtype=torch.bfloat16, fp8=True)
    case.pool(device)
    generator = torch.Generator().manual_seed(4)
    shape = case.scales.values.shape  # type: ignore[union-attr]
    exponent = {"tiny": torch.full(shape, -9.0), "large": torch.full(shape, 6.0)}
    factors = (10 ** exponent.get(size, torch.rand(shape, generator=generator) * 12 - 8)).to(device)
    case.scales.values.mul_(factors)  # type: ignore[union-attr]
    case.values = case.values * factors[..., None]
    case.scales.keys.mul_(1e-5)  # type: ignore[union-attr]
    case.keys = case.keys * 1e-5
    q = case.queries(2) * 1e5
    q[1] *= 1e-7
    decoded = case.decode(q, deterministic)
    chunks = [Chunk(row, length - 1, 1, row) for row, length in enumerate(case.lengths)]
    for result in (decoded, case.prefill(q, chunks, deterministic)):
        for row, length in enumerate(case.lengths):
            expected = case.expected(q[row : row + 1], row, length - 1)
            error = (result[row : row + 1].double() - expected).abs().amax(2) / expected.abs().amax(2)
            assert error.max() < 1e-2


@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_that_pad_a_batch_get_zeros(has_sinks: bool, device: torch.device) -> None:
    case = Case(lengths=(9, 0, 30, 0), has_sinks=has_sinks)
    case.pool(device)
    q = case.queries(4)
    plan = case.decode_plan()
    plan.plan(torch.tensor(case.lengths, dtype=torch.int32, device=device))
    out = torch.full_like(q, 7.0)
    decode_attention(q, case.layer, case.tables, plan, out=out, sinks=case.sinks)
    assert not out[[1, 3]].any()
    torch.testing.assert_close(out[2:3].double(), case.expected(q[2:3], 2, 29), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["plain", "window", "attention chunks", "sinks"])
def test_decodes_and_chunks_share_static_buffers(name: str, device: torch.device) -> None:
    """As in a CUDA graph of steps of 24 tokens, of which four may be decodes: two are, and five tokens pad."""
    case = SMALL[name]
    case.pool(device)
    size, decodes, lengths = 24, 2, torch.tensor([*case.lengths[:2], -1, -1], dtype=torch.int32, device=device)
    chunks = [Chunk(2, 19, 14, 2), Chunk(16, 9, 3, 4)]
    q, out = case.queries(size), torch.full((size, case.heads, case.head_dim), 7.0, device=device)
    inputs = torch.zeros(1 + size * UNIT_FIELDS + size, dtype=torch.int32, device=device)
    count, units, positions = inputs.split([1, size * UNIT_FIELDS, size])
    plan = StaticPrefillPlan(
        size, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, kv_dtype=case.stored[0].dtype,
        unit_count=count, units=units, positions=positions, window=case.window, attention_chunk=case.attention_chunk,
    )  # fmt: skip
    found = torch.from_numpy(plan.units_of(chunks, (19, 5)))
    count.fill_(len(found))
    units[: found.numel()] = found.ravel().to(device)
    positions.fill_(-1)
    for chunk in chunks:
        own = torch.arange(chunk.size, dtype=torch.int32) + chunk.start
        positions[chunk.first : chunk.first + chunk.size] = own.to(device)
    of_decodes = case.decode_plan()
    of_decodes.plan(lengths)
    given = {"softcap": case.softcap, "scale": case.scale, "sinks": case.sinks}
    decode_attention(q[:4], case.layer, case.tables, of_decodes, out=out[:4], **given)
    assert (out[decodes:] == 7).all(), "what is no decode is left alone"
    prefill_attention(q, case.layer, case.tables, plan, out=out, **given)
    assert not out[19:].any()
    parts = [Chunk(row, case.lengths[row] - 1, 1, row) for row in range(decodes)] + chunks
    for part in parts:
        own = slice(part.first, part.first + part.size)
        expected = case.expected(q[own], part.table, part.start)
        torch.testing.assert_close(out[own].double(), expected, atol=2e-5, rtol=2e-5)


def test_plans_of_another_device_are_refused(device: torch.device) -> None:
    """A handle would pass on an address that means nothing there."""
    case = Case()
    case.pool(device)
    plan, lengths = case.decode_plan(), torch.tensor(case.lengths, dtype=torch.int32, device=device)
    for given in ((lengths.to("meta"), None), (lengths, lengths.to("meta"))):
        with pytest.raises(ValueError, match="tensors lie on different devices"):
            plan.plan(*given)
    plan.units = plan.units.to("meta")
    with pytest.raises(ValueError, match="tensors lie on different devices"):
        decode_attention(case.queries(5), case.layer, case.tables, plan)


@pytest.mark.interpreted
def test_a_step_with_contexts_that_are_too_long_does_not_spoil_the_next_one() -> None:
    """Its units do not fit, so some parts of a query never come."""
    case = Case(lengths=(112, 112, 112))
    case.pool(torch.device("cpu"))
    plan = DecodePlan(
        max_queries=3, heads=4, kv_heads=2, head_dim=16, kv_dtype=torch.float32, device=torch.device("cpu"),
        deterministic=True, max_context=64,
    )  # fmt: skip
    q = case.queries(3)
    for lengths in ((80, 112, 60), (64, 60, 40)):
        plan.plan(torch.tensor(lengths, dtype=torch.int32))
        result = decode_attention(q, case.layer, case.tables, plan)
    for row, length in enumerate((64, 60, 40)):
        expected = case.expected(q[row : row + 1], row, length - 1)
        torch.testing.assert_close(result[row : row + 1].double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("fp8", "sinks"),
    [(False, False), *(pytest.param(*each, marks=pytest.mark.long) for each in ((True, False), (False, True)))],
)
def test_deterministic_results_do_not_depend_on_batch_or_chunking(fp8: bool, sinks: bool, device: torch.device) -> None:
    """Bit for bit: alone or among others, in one chunk or several, as a prefill or as a decode."""
    case = Case(heads=4, kv_heads=2, lengths=(90, 33, 64, 7), window=None, fp8=fp8, has_sinks=sinks)
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


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"q": torch.zeros(2, 3, 16)}, ValueError, "3 query heads cannot share 2 KV heads"),
        ({"q": torch.zeros(2, 4, 8)}, ValueError, "attention takes q"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float64)}, TypeError, "not torch.float64"),
        ({"q": torch.zeros(2, 4, 32)[..., ::2]}, ValueError, "next to each other"),
        ({"tables": torch.zeros(2, 9)}, TypeError, "block tables are int32"),
        ({"values": torch.zeros(19, 2, 4, 16).transpose(1, 2)}, ValueError, "keys and values have equal strides"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float16)}, TypeError, "like q"),
        ({"q": torch.zeros(9, 4, 16)}, ValueError, "the plan is for 4 queries"),
        ({"out": torch.zeros(3, 4, 16)}, ValueError, "out is torch.float32"),
        ({"sinks": torch.zeros(2)}, ValueError, "one for each of 4 heads"),
        ({"scale": 0.0}, ValueError, "scale of attention is positive, not 0.0"),
        ({"scales": Scales(torch.zeros(1), torch.zeros(1))}, TypeError, "KV in eight bits comes with scales"),
        ({"tables": torch.zeros(2, 9, dtype=torch.int32, device="meta")}, ValueError, "different devices: cpu, meta"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], error: type[Exception], said: str) -> None:
    case = Case(lengths=(9, 30))
    case.pool(torch.device("cpu"))
    given = {"q": case.queries(2), "keys": case.keys, "values": case.values, "tables": case.tables} | change
    pool = [given.pop(name) for name in ("keys", "values", "scales") if name in given]
    with pytest.raises(error, match=said):
        decode_attention(layer=KVLayer(*pool), plan=case.decode_plan(), **given)  # type: ignore[arg-type]


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
    "gpt-oss": Case(64, 8, 64, 16, (3000, 9, 700), dtype=torch.bfloat16, window=128, has_sinks=True),
    "gpt-oss, full": Case(64, 8, 64, 16, (3000, 9, 700), dtype=torch.bfloat16, has_sinks=True),
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


def test_kernels_of_static_plans_are_those_of_other_plans(device: torch.device) -> None:
    """They are compiled for pointers that are divisible by 16 bytes."""
    chunks = [Chunk(0, 5, 40, 1), Chunk(40, 0, 3, 0), Chunk(43, 2, 1, 2)]
    plan = PrefillPlan(chunks, heads=4, kv_heads=2, head_dim=64, kv_dtype=torch.float32, device=device)
    assert [each.data_ptr() % 16 for each in (plan.unit_count, plan.units, plan.positions)] == [0, 0, 0]
    assert plan.positions.tolist() == [*range(5, 45), 0, 1, 2, 2]
    assert plan.units.view(-1, UNIT_FIELDS)[:, 1].sum() == 44
    assert plan.unit_count.item() == len(plan.units) // UNIT_FIELDS
