"""Blocks of several groups of layers in the tiers below the device, and at other executors: page by page."""

from pathlib import Path

import numpy as np
import pytest
from pagewise_executor import group_choice
from pagewise_executor.grouped_batch import GroupedBatch, page_name
from pagewise_shared.block_hash import BlockName, block_hash, pack_names, root_hash
from pagewise_shared.protocol import (
    DEVICE,
    DISK,
    HOST,
    BlockCopies,
    NewSequence,
    RemoteTier,
    pack_int32s,
    unpack_int32s,
)
from pagewise_shared.sampling import SamplingParams

from tests.executor.played_groups import Played, play
from tests.model_builders import model_fixture

SIZE = 8

model_path = model_fixture("gemma3", seed=7)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups also where the scheduler would not use them."""
    monkeypatch.setattr(group_choice, "_one_group", lambda *_: "")


def prefill(played: Played) -> dict[int, list[np.ndarray]]:
    """Compute two blocks of each group; returns their contents."""
    windows = ((0, pack_int32s([6, 2])),)
    tokens = pack_int32s(range(3, 3 + 2 * SIZE))
    new = NewSequence(0, tokens, 2 * SIZE, 0, pack_int32s([1, 4]), SamplingParams(temperature=0.0), windows=windows)
    played.execute(joined=(new,), chunks=((0, 2 * SIZE),))
    played.execute(left=(0,))
    return {0: [played.content(0, 1), played.content(0, 4)], 1: [played.content(1, 6), played.content(1, 2)]}


def named() -> bytes:
    """The names of two blocks that follow each other."""
    root = root_hash("model")
    first = block_hash(root, b"first")
    return pack_names([BlockName(first, root), BlockName(block_hash(first, b"second"), first)])


@pytest.mark.usefixtures("grouped")
def test_blocks_go_to_the_host_and_come_back(model_path: Path) -> None:
    played = play(model_path, 1)
    before = prefill(played)
    told = played.copy(
        BlockCopies(DEVICE, HOST, pack_int32s([1, 0, 4, 3])),
        BlockCopies(DEVICE, HOST, pack_int32s([6, 1, 2, 0]), group=1),
    )
    assert [(one.source, one.target, one.group, one.bad) for one in told] == [
        (DEVICE, HOST, 0, b""), (DEVICE, HOST, 1, b"")
    ]  # fmt: skip
    told = played.copy(
        BlockCopies(HOST, DEVICE, pack_int32s([3, 9, 0, 8])),
        BlockCopies(HOST, DEVICE, pack_int32s([0, 9, 1, 8]), group=1),
        unmapped=pack_int32s([DEVICE, 0, 1, DEVICE, 0, 4, DEVICE, 1, 6, DEVICE, 1, 2]),
    )
    assert [(one.source, one.target, one.bad) for one in told] == [(HOST, DEVICE, b"")] * 2
    for group, contents in before.items():
        for block, content in zip((8, 9), contents, strict=True):
            assert (played.content(group, block) == content).all()
            assert content.any()
    assert not played.runner._pool.gather(np.array([0], np.int32)).any(), "the null page"
    played.runner.close()


@pytest.mark.usefixtures("grouped")
def test_a_spoiled_page_spoils_its_block_alone(model_path: Path) -> None:
    played = play(model_path, 1)
    prefill(played)
    played.copy(BlockCopies(DEVICE, HOST, pack_int32s([6, 1, 2, 0]), group=1))
    batch = played.runner._batch
    assert isinstance(batch, GroupedBatch)
    page = int(batch._maps[HOST].pages(1, np.array([0], np.int32))[0, 3])
    played.runner._copier.tiers[HOST].memory.slot(page)[:9] ^= 0xFF  # type: ignore[attr-defined]
    (told,) = played.copy(BlockCopies(HOST, DEVICE, pack_int32s([1, 8, 0, 9]), group=1))
    assert unpack_int32s(told.bad).tolist() == [9]
    played.runner.close()


@pytest.mark.usefixtures("grouped")
def test_pages_have_names_on_disk(model_path: Path, tmp_path: Path) -> None:
    played = play(model_path, 1, host_memory=None, disk_cache=str(tmp_path))
    before = prefill(played)
    told = played.copy(
        BlockCopies(DEVICE, DISK, pack_int32s([1, 0, 4, 1]), names=named()),
        BlockCopies(DEVICE, DISK, pack_int32s([6, 0, 2, 1]), names=named(), group=1),
    )
    assert [one.bad for one in told] == [b"", b""]
    missing = pack_names([BlockName(block_hash(root_hash("other"), b""), root_hash("other"))])
    (told_missing,) = played.copy(BlockCopies(DISK, DEVICE, pack_int32s([0, 11]), names=missing, group=1))
    assert unpack_int32s(told_missing.bad).tolist() == [11]
    played.copy(
        BlockCopies(DISK, DEVICE, pack_int32s([1, 9, 0, 8]), names=named()),
        BlockCopies(DISK, DEVICE, pack_int32s([0, 8, 1, 9]), names=named(), group=1),
    )
    for group, contents in before.items():
        for block, content in zip((8, 9), contents, strict=True):
            assert (played.content(group, block) == content).all()
    played.runner.close()


@pytest.mark.usefixtures("grouped")
def test_other_executors_fetch_pages(model_path: Path) -> None:
    lender, borrower = play(model_path, 5, host_memory=None), play(model_path, 2, host_memory=None)
    before = prefill(lender)
    peer = RemoteTier(lender.runner.info.block_endpoint, 5, lender.step)
    borrower.copy(
        BlockCopies(DEVICE, DEVICE, pack_int32s([1, 20, 4, 21]), peer),
        BlockCopies(DEVICE, DEVICE, pack_int32s([6, 20, 2, 21]), peer, group=1),
    )
    for group, contents in before.items():
        for block, content in zip((20, 21), contents, strict=True):
            assert (borrower.content(group, block) == content).all()
    (told,) = borrower.copy(BlockCopies(DEVICE, DEVICE, pack_int32s([17, 22]), peer, group=1))
    assert unpack_int32s(told.bad).tolist() == [22], "the lender has no such pages"
    for one in (lender, borrower):
        one.runner.close()


def test_the_first_page_of_the_first_group_has_the_name_of_its_block() -> None:
    block = BlockName(block_hash(root_hash("model"), b"x"), root_hash("model"))
    names = [page_name(block, group, index) for group in range(3) for index in range(3)]
    assert names[0] == block
    assert all(name.parent == block.hash for name in names[1:])
    assert len({name.hash for name in names}) == len(names)
