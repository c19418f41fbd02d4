"""Blocks of states in the tiers below the device, and in inventories."""

from itertools import chain as chained
from pathlib import Path

import msgspec
import pytest
from pagewise_executor.tiers.block_names import chain
from pagewise_scheduler.server.executor_checks import checked_inventory
from pagewise_shared.block_hash import pack_names
from pagewise_shared.protocol import DEVICE, DISK, HOST, BlockCopies, Welcome, pack_int32s

from tests.executor.played_states import STATES, Family, PlayedStates, Row
from tests.model_builders import build_model

AT = 16


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    path = tmp_path_factory.mktemp("granitemoehybrid")
    build_model("granitemoehybrid", path, seed=7)
    return Family(path)


def with_snapshots(played: PlayedStates, family: Family, *at: int) -> Row:
    """A prompt of 21 tokens that was computed, with snapshots."""
    played.join(0, family.prompt(21))
    for number in at:
        played.switch(0, number)
    played.step({0: 21})
    return played.leave(0)


def pairs(sources: list[int], targets: list[int]) -> bytes:
    return pack_int32s(chained.from_iterable(zip(sources, targets, strict=True)))


def go_on(played: PlayedStates, family: Family, row: Row, blocks: list[int], states: int) -> None:
    """Check the tokens behind the first 16 tokens of a row, whose blocks are these now."""
    moved = Row(row.tokens, blocks, -1, snapshots={AT: states})
    fork = played.join(1, row.tokens[:AT] + family.prompt(3), shared=moved, at=AT)
    played.step({1: 3})
    for _ in range(5):
        played.step()
    played.leave(1)
    assert fork.sampled == family.generated(fork.tokens, len(fork.sampled))


def test_snapshots_go_to_the_host_and_come_back(family: Family) -> None:
    played = PlayedStates(family.path)
    row = with_snapshots(played, family, AT)
    before = played.content(STATES, row.snapshots[AT])
    held = row.blocks[:2]
    told = played.copy(
        BlockCopies(DEVICE, HOST, pairs(held, [4, 2])),
        BlockCopies(DEVICE, HOST, pairs([row.snapshots[AT]], [1]), group=STATES),
    )
    assert [one.bad for one in told] == [b"", b""]
    gone = [*(number for block in held for number in (DEVICE, 0, block)), DEVICE, STATES, row.snapshots[AT]]
    told = played.copy(
        BlockCopies(HOST, DEVICE, pairs([4, 2], [31, 30])),
        BlockCopies(HOST, DEVICE, pairs([1], [9]), group=STATES),
        unmapped=pack_int32s(gone),
    )
    assert [one.bad for one in told] == [b"", b""]
    assert (played.content(STATES, 9) == before).all()
    assert before.any()
    go_on(played, family, row, [31, 30], 9)
    played.runner.close()


def test_snapshots_have_names_on_disk(family: Family, tmp_path: Path) -> None:
    played = PlayedStates(family.path, host_memory=None, disk_cache=str(tmp_path))
    row = with_snapshots(played, family, AT)
    names = chain(played.root, pack_int32s(row.tokens[:AT]), 8)
    for source, target in ((DEVICE, DISK), (DISK, DEVICE)):
        full = ([0, 1], [31, 30]) if source == DISK else (row.blocks[:2], [0, 1])
        states = ([0], [9]) if source == DISK else ([row.snapshots[AT]], [0])
        told = played.copy(
            BlockCopies(source, target, pairs(*full), names=pack_names(names)),
            BlockCopies(source, target, pairs(*states), names=pack_names(names[1:]), group=STATES),
        )
        assert [one.bad for one in told] == [b"", b""]
    go_on(played, family, row, [31, 30], 9)
    played.runner.close()


def test_copies_inside_the_device(family: Family) -> None:
    played = PlayedStates(family.path)
    row = with_snapshots(played, family, AT)
    played.step(None, BlockCopies(DEVICE, DEVICE, pairs([row.snapshots[AT]], [9]), group=STATES))
    go_on(played, family, row, row.blocks, 9)
    assert "keep states" in played.runner.info.no_segments
    played.runner.close()


def test_what_was_switched_away_from_is_offered(family: Family) -> None:
    """Behind full blocks alone, and unless it was written again. Sequences go on from it when the scheduler is back."""
    played = PlayedStates(family.path, host_memory=None)
    row = with_snapshots(played, family, 8, 11, AT)
    played.step()
    names = played.hashes(row.tokens)
    spoiled = with_snapshots(played, family, 8)
    spoiled_names = played.hashes(spoiled.tokens)
    played.step(None, BlockCopies(DEVICE, DEVICE, pairs([row.states], [spoiled.snapshots[8]]), group=STATES))
    loading = Row(row.tokens, row.blocks, -1, snapshots={AT: 40})
    played.join(1, [*row.tokens[:AT], 7], shared=loading, at=AT)
    played.step()
    played.leave(1)  # before its states have come
    ends = played.join(0, family.prompt(23))
    played.step({0: 23})
    played.step()
    ends_names = played.hashes(ends.tokens + ends.sampled)
    info = msgspec.structs.replace(played.runner.info, inventory=played.runner.inventory())
    full, states = (group[DEVICE] for group in checked_inventory(info))
    assert set(full) == {*names, *spoiled_names, *ends_names[:3]}
    assert set(states) == {names[0], names[1], ends_names[2]}, "the last one is where a row has ended"
    played.rows.clear()
    played.epoch, played.number = 2, 0
    played.runner.reset(Welcome(2, 8, 256, keeps_blocks=True))
    go_on(played, family, row, [full[name] for name in names], states[names[1]])
    played.runner.close()
