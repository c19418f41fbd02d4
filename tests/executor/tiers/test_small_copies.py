"""Copies in fewer bits: what comes back is near what left, once, and is nothing else's under any name."""

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagewise_executor.block_copies import CopyJob
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.host_copies import EXACT_SHARE
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import CopiedBlocks, Rows
from pagewise_kernels.cpu.small_blocks import SmallBlocks
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import DEVICE, DISK, HOST

from benchmarks.quantization.rounding import Rounding, to_int4, to_int8
from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.runners import build_runner, host_of, peers_at
from tests.executor.tiers.names import prefix
from tests.model_builders import build_model, model_fixture

DIM, BITS = 64, {"int8": 8, "int4": 4}
ROUNDING: dict[str, Rounding] = {"int8": to_int8, "int4": to_int4}
model_path = model_fixture("llama", seed=5, head_dim=32)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    need_cpu_kernels()


def rows_of(values: torch.Tensor) -> Rows:
    return values.flatten(1).contiguous().view(torch.uint8).numpy()


def random_blocks(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Blocks of 12 vectors, of which one is zero and one has numbers of one sign."""
    values = torch.randn(count, 12, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    values[:, 3], values[:, 4] = 0, 7 + values[:, 4] / 10
    return values


def there_and_back(blocks: SmallBlocks, rows: Rows) -> tuple[Rows, Rows, Any]:
    small, back = np.zeros((len(rows), blocks.num_bytes), np.uint8), np.zeros_like(rows)
    errors = blocks.shrink(rows, small)
    blocks.widen(small, back)
    return small, back, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BITS)
def test_numbers_that_come_back_are_those_of_the_formula(kind: str, dtype: torch.dtype) -> None:
    values = random_blocks(3, dtype)
    blocks = SmallBlocks(12 * DIM * dtype.itemsize, DIM, dtype, BITS[kind])  # type: ignore[arg-type]
    small, back, errors = there_and_back(blocks, rows_of(values))
    found = torch.from_numpy(back).view(dtype).view(values.shape)
    wanted = ROUNDING[kind](values.float()).to(dtype)
    off = (found.float() - wanted.float()).abs()
    assert off.max() <= (0.5 if kind == "int4" else 0.05)  # where a number lies between two levels, either may be taken
    assert (off > 1e-5).float().mean() < 0.01
    squares = [(part.float().square().sum((1, 2))) for part in (found - values, values)]
    assert errors == pytest.approx((squares[0] / squares[1]).sqrt().numpy(), rel=1e-3)
    assert 0.003 < errors.max() < (0.01 if kind == "int8" else 0.1)
    # A block that came back has nearly the same codes if it leaves again.
    again, _, more = there_and_back(blocks, back)
    assert (again != small).mean() < 0.03
    assert more.max() < 0.005


@pytest.mark.parametrize("kind", BITS)
def test_what_is_no_number_stays_none(kind: str) -> None:
    values = random_blocks(2)
    values[0, 2, 5], values[1, 1, 40] = float("nan"), float("inf")
    blocks = SmallBlocks(12 * DIM * 4, DIM, torch.float32, BITS[kind])  # type: ignore[arg-type]
    _, back, errors = there_and_back(blocks, rows_of(values))
    assert np.isnan(errors).all()
    found = torch.from_numpy(back).view(torch.float32).view(values.shape)
    assert not found[0, 2, 5].isfinite()
    assert not found[1, 1, 40].isfinite()


def test_blocks_of_other_sizes_are_refused() -> None:
    for size, dim, dtype, bits in (
        (100, 64, torch.float32, 8),
        (6400, 48, torch.float32, 4),
        (64, 8, torch.float16, 8),
    ):
        with pytest.raises(ValueError, match=r"are no vectors|no multiple of 32"):
            SmallBlocks(size, dim, dtype, bits)  # type: ignore[arg-type]


def test_files_have_either_size_and_bring_blocks_back(tmp_path: Path) -> None:
    """The second block is above the bound, and stays exact."""
    values = random_blocks(3)
    values[1, :, ::2] *= 1000
    rows, names = rows_of(values), prefix("a", 3)

    def disk(bound: float) -> DiskTier:
        blocks = SmallBlocks(rows.shape[1], DIM, torch.float32, 4)
        return DiskTier(tmp_path, "x", rows.shape[1], 2**20, SmallCopies(blocks, "int4", bound))

    errors = there_and_back(SmallBlocks(rows.shape[1], DIM, torch.float32, 4), rows)[2]
    first = disk(float(errors[[0, 2]].max()))
    assert errors[1] > errors[[0, 2]].max()
    assert first.store(names, rows) == [True] * 3
    assert first.copied == CopiedBlocks(small=2, above_bound=1)
    found = np.zeros_like(rows)
    assert disk(0.2).load([*names, *prefix("b", 1)], np.concatenate([found, found[:1]])) == [True] * 3 + [False]
    assert disk(0.2).load(names, found) == [True] * 3
    assert (found[1] == rows[1]).all()
    assert (found[0] != rows[0]).any()
    # Whether the copies of a tier are exact or smaller, it reads both, and only writes differ.
    mixed = disk(0.2)
    assert (mixed.dtype, mixed.block_bytes) == ("int4", mixed.small.num_bytes if mixed.small is not None else 0)
    mixed.write_as(None)
    more = prefix("c", 1)
    assert mixed.store(more, rows[:1]) == [True]
    assert (mixed.dtype, mixed.block_bytes, mixed.copied) == ("", 0, CopiedBlocks(exact=1))
    assert mixed.load([*names[:1], *more], found[:2]) == [True, True]
    assert (found[1] == rows[0]).all()
    assert (found[0] != rows[0]).any()
    # Without the option, a file of that size is no block.
    plain = DiskTier(tmp_path, "x", rows.shape[1], 2**20)
    assert plain.load(names, found) == [False, True, False]


def small_runner(path: Path, **options: object) -> ModelRunner:
    return build_runner(path, **({"kernels": "cpu", "tier_dtype": "int8"} | options))


def prompts_of(runner: ModelRunner, prompts: list[list[int]], **load: int) -> list[list[int]]:
    asked = [request(prompt, 8, f"r{i}") for i, prompt in enumerate(prompts)]
    run_requests(runner, asked, **load)  # type: ignore[arg-type]
    return [one.sequences[0].output_token_ids.tolist() for one in asked]


@pytest.mark.parametrize("bound", [0.2, 1e-6])
def test_blocks_of_the_host_are_smaller_or_exact(model_path: Path, bound: float) -> None:
    """With a bound that no block keeps, those for which there is room are exact, and the others are not there."""
    runner = small_runner(model_path, tier_error_bound=bound, host_memory="256KiB")
    exact = build_runner(model_path, kernels="cpu", host_memory="256KiB")
    host, pool = host_of(runner), runner._pool
    assert 2.8 < host.num_blocks / host_of(exact).num_blocks < 3.6
    assert prompts_of(runner, [list(range(5, 90))]) == prompts_of(exact, [list(range(5, 90))])
    blocks = np.arange(8, dtype=np.int32)
    there = pool.gather(blocks).copy()
    job = copies(runner, DEVICE, HOST, np.stack([blocks, blocks], axis=1))
    lost = set(np.frombuffer(job.bad, np.int32).tolist())
    back = copies(runner, HOST, DEVICE, np.stack([blocks, blocks + 20], axis=1))
    found = pool.gather(blocks + 20)
    bad = set((np.frombuffer(back.bad, np.int32) - 20).tolist())
    assert bad == lost, "what is not kept is told at once"
    rows = np.empty_like(there)
    assert host.read(blocks, rows) == [block not in bad for block in range(8)]
    kept = [block for block in range(8) if block not in bad]
    assert (rows[kept] == found[kept]).all()
    numbers, wanted = found[kept].view(np.float32), there[kept].view(np.float32)
    if bound == 0.2:
        assert not bad
        assert (numbers != wanted).any()
        assert np.abs(numbers - wanted).max() <= np.abs(wanted).max() / 250
    else:
        assert (numbers == wanted).all()
        assert len(kept) == min(8, host.num_blocks // EXACT_SHARE + 1)
    runner.close()
    exact.close()


def copies(runner: ModelRunner, source: int, target: int, pairs: Any) -> Any:
    """Make copies between the device and the host; return their confirmation."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    runner._copier.report_to(told.put)
    epoch = host_of(runner)._copies.epoch
    with torch.inference_mode():
        runner._copier.begin(epoch, 1000, [CopyJob(epoch, 1000, source, target, pairs.astype(np.int32))])
    return told.get(timeout=60)


def test_names_tell_smaller_copies_and_their_bounds_apart(model_path: Path, tmp_path: Path) -> None:
    """Peers compare the format of blocks, stores and the next process the content that it is a part of."""
    runners = [
        build_runner(
            model_path, exchange=peers_at(), kernels="cpu", disk_cache=str(tmp_path), host_folder=tmp_path, **options
        )
        for options in (
            {},
            {"tier_dtype": "int8"},
            {"tier_dtype": "int8", "tier_error_bound": 0.05},
            {"tier_dtype": "int4"},
        )
    ]
    assert len({runner.info.block_format for runner in runners}) == 4
    assert len({runner._copier.tiers[DISK].identity for runner in runners}) == 4
    assert len({runner.info.model_fingerprint for runner in runners}) == 1
    assert len({runner.info.bytes_per_block for runner in runners}) == 1
    for runner in runners:
        runner.close()


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("llama", {"tier_dtype": "int4"}, "no multiple of 32"),
        ("qwen3_next", {}, "states of recurrent layers"),
        ("gemma4", {}, "share blocks"),
    ],
)
def test_what_cannot_be_smaller_is_refused(family: str, options: dict[str, str], why: str, tmp_path: Path) -> None:
    build_model(family, tmp_path)
    with pytest.raises(ModelError, match=why):
        small_runner(tmp_path, **options)


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_windows_and_latents_come_back_too(family: str, tmp_path: Path) -> None:
    """In so little memory that sequences are preempted, and recovered from the host."""
    build_model(family, tmp_path)
    prompts = [list(range(start, start + 40)) for start in range(5, 45, 5)]
    runner = small_runner(tmp_path, num_blocks=40, host_memory="1MiB")
    found = prompts_of(runner, prompts)
    assert all(len(tokens) == 8 for tokens in found)
    runner.close()


def test_numbers_too_large_for_their_squares_do_not_seem_exact() -> None:
    blocks = SmallBlocks(12 * DIM * 4, DIM, torch.float32, 8)
    assert np.isnan(there_and_back(blocks, rows_of(random_blocks(1) * 1e25))[2]).all()


def test_exact_blocks_without_a_name_leave_their_room_when_the_executor_is_reset(model_path: Path) -> None:
    """Such as those with which times were measured."""
    runner = small_runner(model_path, tier_error_bound=1e-6, host_memory="256KiB")
    host, pool, blocks = host_of(runner), runner._pool, np.arange(8, dtype=np.int32)
    pool.scatter(blocks, rows_of(torch.randn(8, pool.bytes_per_block // 4)))
    copies(runner, DEVICE, HOST, np.stack([blocks, blocks], axis=1))
    assert host._copies.exact
    host.reset(7, keep=True)
    assert not host._copies.exact
    runner.close()
