"""The KV of an executor with several groups of layers outlives its scheduler, and its KV on the host itself."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from pagewise_executor import group_choice
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_scheduler.core.memory.prefix_tree import ancestors, hash_of
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE, HOST, BlockCopies, RemoteTier, pack_int32s, unpack_int32s

from tests.executor.driver import arena_of
from tests.executor.inventories import PROMPTS, run_and_kill, serve
from tests.executor.played_groups import Played, play
from tests.executor.runners import build_runner, host_of
from tests.model_builders import model_fixture

PROMPT = PROMPTS[3]
LAST = len(PROMPT) // 8
FREE = 40

model_path = model_fixture("gemma3", seed=7)


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups also where the scheduler would not use them."""
    monkeypatch.setattr(group_choice, "_one_group", lambda *_: "")


def pairs(each: Iterable[tuple[int, int]]) -> bytes:
    return pack_int32s(chain.from_iterable(each))


def test_what_a_scheduler_has_kept_is_offered_with_its_content(model_path: Path) -> None:
    played = play(model_path, 1, host_memory=None)
    info = played.runner.info
    scheduler = Scheduler(
        num_blocks=info.num_blocks, block_size=info.block_size, max_num_seqs=4, max_num_batched_tokens=64,
        model_fingerprint=info.model_fingerprint, shape=arena_of(info, 64), epoch=1,
    )  # fmt: skip
    serve(played.runner, scheduler, 40)
    kv = scheduler.kv
    assert isinstance(kv, GroupedKVCacheManager)
    held: dict[tuple[int, BlockHash], int] = {}
    for node, snapshot in kv.windows[0].at.items():
        path = [hash_of(one) for one in ancestors(snapshot.node)][::-1]
        held |= {(1, path[at]): block for at, block in enumerate(snapshot.blocks, snapshot.first)}
        held |= {(0, hash_of(one)): one.block for one in ancestors(node)}
    assert len(held) > 2 * (60 + 40) // 8 * len(PROMPTS) * 0.8, "of prompts and answers"
    before = {key: played.content(key[0], block) for key, block in held.items()}
    found = played.offered()
    played.rejoin(keep=True)
    for (group, name), content in before.items():
        assert (played.content(group, found[group][DEVICE][name]) == content).all()
    played.runner.close()


def test_sequences_go_on_from_the_blocks_of_an_inventory(model_path: Path) -> None:
    played = play(model_path, 1, host_memory=None)
    played.compute(PROMPT)
    names = played.hashes(PROMPT)
    for _ in range(3):  # one session after the other
        full, windows = (held[DEVICE] for held in played.offered())
        assert set(full) == set(windows) == set(names), "the row has passed window blocks that nobody has overwritten"
        played.rejoin(keep=True)
        blocks = [full[name] for name in names]
        again = played.resume(PROMPT, blocks, (LAST - 1, [windows[names[-1]]]), FREE)
        assert again == pytest.approx(played.first, abs=1e-4)
    played.rejoin(keep=False)
    assert played.runner.inventory() is None
    played.runner.close()


def test_exactly_the_blocks_of_an_inventory_have_pages(model_path: Path) -> None:
    played = play(model_path, 1, host_memory=None)
    played.compute(PROMPT)
    found = played.offered()
    played.rejoin(keep=True)
    batch, info = played.runner._batch, played.runner.info
    assert isinstance(batch, GroupedBatch)
    pages = batch._maps[DEVICE]
    held = [
        pages.pages(group, np.arange(pages.num_blocks(group), dtype=np.int32))[:, 0].nonzero()[0].tolist()
        for group in range(2)
    ]
    assert held == [sorted(group[DEVICE].values()) for group in found]
    used = sum(len(blocks) * group.pages_per_block for blocks, group in zip(held, info.groups, strict=True))
    assert pages.num_free == info.num_pages - used
    # All other pages can be given to blocks.
    room = pages.num_free // info.groups[1].pages_per_block
    others = [block for block in range(pages.num_blocks(1)) if block not in held[1]][:room]
    played.copy(BlockCopies(DEVICE, DEVICE, pairs((held[1][0], block) for block in others), group=1))
    assert (played.content(1, others[-1]) == played.content(1, held[1][0])).all()
    played.runner.close()


def test_overwritten_blocks_are_not_offered(model_path: Path) -> None:
    played = play(model_path, 1, host_memory=None)
    blocks, windows = played.compute(PROMPT)
    names = played.hashes(PROMPT)
    # By another row, which leaves before its block is full, and by a copy of a block that has no name.
    new = played.begin(PROMPT[:5], [blocks[2]], (0, [windows[1]]))
    played.execute(joined=(new,), chunks=((0, 4),))
    played.copy(
        BlockCopies(DEVICE, DEVICE, pack_int32s([blocks[2], blocks[4]])),
        BlockCopies(DEVICE, DEVICE, pack_int32s([windows[1], windows[6]]), group=1),
    )
    played.execute(left=(0,))
    full, window = (held[DEVICE] for held in played.offered())
    assert set(full) == set(names) - {names[2], names[4]}
    assert set(window) == set(names) - {names[1], names[6]}
    # A block that its row has passed, before the row leaves.
    played.rejoin(keep=False)
    _, windows = played.compute(PROMPT, leave=False)
    played.copy(BlockCopies(DEVICE, DEVICE, pack_int32s([windows[6], windows[1]]), group=1))
    _, window = (held[DEVICE] for held in played.offered())
    assert set(window) >= set(names) - {names[1]}
    assert names[1] not in window
    played.runner.close()


def test_a_block_that_a_running_row_has_passed_is_known_on_the_host(model_path: Path) -> None:
    """Also if its pages go to another block, of the other group, in the plan that copies it."""
    played = play(model_path, 1)
    _, windows = played.compute(PROMPT, leave=False)
    name, content = played.hashes(PROMPT)[1], played.content(1, windows[1])
    new = played.begin(PROMPT[:5], [FREE], (0, [FREE]), row=1)
    freed = pack_int32s([DEVICE, 1, windows[1]])
    copies = BlockCopies(DEVICE, HOST, pack_int32s([windows[1], 3]), group=1)
    played.copy(copies, joined=(new,), chunks=((1, 4),), unmapped=freed)
    full, window = played.offered()
    assert list(window[HOST]) == [name]
    assert HOST not in full
    played.rejoin(keep=True)
    played.copy(BlockCopies(HOST, DEVICE, pack_int32s([window[HOST][name], FREE]), group=1))
    assert (played.content(1, FREE) == content).all()
    played.runner.close()


def test_a_host_is_found_again_with_the_blocks_of_all_groups(model_path: Path, tmp_path: Path) -> None:
    run_and_kill(model_path, tmp_path, "groups")
    played = Played(build_runner(model_path, host_folder=tmp_path, verify_copies=False))
    names = played.hashes(PROMPT)
    found = played.offered()
    assert [{tier: set(held) for tier, held in group.items()} for group in found] == [{HOST: set(names)}] * 2
    played.rejoin(keep=True)
    full, windows = (held[HOST] for held in found)
    batch, spoiled = played.runner._batch, windows[names[0]]
    assert isinstance(batch, GroupedBatch)
    page = batch._maps[HOST].pages(1, np.array([spoiled], np.int32))[0, 0]
    host_of(played.runner).memory.slot(int(page))[0] ^= 1
    told = played.copy(
        BlockCopies(HOST, DEVICE, pairs((full[name], at) for at, name in enumerate(names))),
        BlockCopies(HOST, DEVICE, pack_int32s([windows[names[-1]], 1, spoiled, 2]), group=1),
    )
    assert [(one.group, unpack_int32s(one.bad).tolist()) for one in told] == [(0, []), (1, [2])]
    resumed = played.resume(PROMPT, list(range(LAST)), (LAST - 1, [1]), FREE)
    again = played.offered()
    assert set(again[1][HOST]) == set(names), "what was loaded stays on the host"
    assert set(again[1][DEVICE]) == {names[-1]}
    played.rejoin(keep=False)
    played.compute(PROMPT)
    assert resumed == pytest.approx(played.first, abs=1e-4)
    played.runner.close()
    assert not list(tmp_path.iterdir()), "one that ends in order leaves nothing behind"


def test_other_executors_fetch_blocks_of_an_inventory(model_path: Path) -> None:
    lender, borrower = play(model_path, 5, host_memory=None), play(model_path, 2, host_memory=None)
    lender.compute(PROMPT)
    names, (full, window) = lender.hashes(PROMPT), (held[DEVICE] for held in lender.offered())
    lender.rejoin(keep=True)
    lender.execute()
    peer = RemoteTier(lender.runner.info.block_endpoint, lender.epoch, lender.step)
    told = borrower.copy(
        BlockCopies(DEVICE, DEVICE, pairs((full[name], at) for at, name in enumerate(names)), peer),
        BlockCopies(DEVICE, DEVICE, pack_int32s([window[names[-1]], 1]), peer, group=1),
    )
    assert [(one.group, one.bad) for one in told] == [(0, b""), (1, b"")]
    resumed = borrower.resume(PROMPT, list(range(LAST)), (LAST - 1, [1]), FREE)
    assert resumed == pytest.approx(lender.first, abs=1e-4)
    for one in (lender, borrower):
        one.runner.close()
