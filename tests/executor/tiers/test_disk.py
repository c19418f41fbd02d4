"""A disk that is shared, torn, full, read-only, corrupted or gone costs time, never a wrong block."""

import errno
import os
import random
import resource
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagewise_executor.tiers import disk as disk_module
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.disk_budgets import StoredFile, least_recently_used
from pagewise_shared.block_hash import BlockName, salt_tag, salt_tags
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import DISK, MemoryBudget, MemorySize, StoredBudget, StoredGone

from tests.executor.tiers.names import BLOCK_BYTES, content, empty, name_of, prefix

FILE_BYTES = 4096 + 8192


def open_disk(folder: Path, content: str = "x", most_blocks: int = 1000) -> DiskTier:
    return DiskTier(folder, content, BLOCK_BYTES, most_blocks * FILE_BYTES)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/??/*") if path.is_file()]


def check(disk: DiskTier, names: list[BlockName], there: list[bool]) -> None:
    rows = empty(len(names))
    assert disk.load(names, rows) == there
    for index, name in enumerate(names):
        if there[index]:
            assert (rows[index] == content([name])[0]).all()


def test_what_one_process_writes_another_reads(tmp_path: Path) -> None:
    names = prefix("a", 5)
    first, second = open_disk(tmp_path), open_disk(tmp_path)
    assert first.identity == second.identity != open_disk(tmp_path / "other").identity
    assert first.contains(names) == [False] * 5
    assert first.store(names, content(names)) == [True] * 5
    assert second.contains([*names, name_of("b")]) == [True] * 5 + [False]
    check(second, [*names, name_of("b")], [True] * 5 + [False])
    assert first.num_errors == second.num_errors == 0
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(tmp_path)), "KV tells what was asked"
    assert {path.stat().st_size for path in files(tmp_path)} == {FILE_BYTES}


def test_blocks_of_other_models_and_formats_are_not_found(tmp_path: Path) -> None:
    names = prefix("a", 2)
    one, other = open_disk(tmp_path, "one"), open_disk(tmp_path, "other")
    assert one.identity != other.identity
    one.store(names, content(names))
    assert other.contains(names) == [False, False]


@pytest.mark.parametrize("harm", ["cut", "empty", "grown", "byte", "other block"])
def test_what_is_not_as_it_was_written_is_not_read_and_goes(tmp_path: Path, harm: str) -> None:
    names = prefix("a", 3)
    disk = open_disk(tmp_path)
    disk.store(names, content(names))
    path, other = Path(disk._path(names[1])), Path(disk._path(names[2]))
    data = bytearray(path.read_bytes())
    if harm == "cut":
        path.write_bytes(data[:6000])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "byte":
        data[4096 + 77] ^= 1
        path.write_bytes(data)
    elif harm == "other block":
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(data + b"1")
    check(disk, names, [True, harm == "grown", True])
    assert path.exists() == (harm == "grown")
    assert disk.num_errors == (harm != "grown")
    assert disk.store(names, content(names)) == [True] * 3, "it is written anew"
    check(disk, names, [True] * 3)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), number=st.integers(1, 20))
def test_whatever_bytes_change_no_wrong_block_is_read(tmp_path: Path, seed: int, number: int) -> None:
    chance = random.Random(seed)
    names = prefix("a", 4)
    disk = open_disk(tmp_path)
    disk.store(names, content(names))
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        for _ in range(number):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
    rows = empty(4)
    for name, row, there in zip(names, rows, disk.load(names, rows), strict=True):
        assert not there or (row == content([name])[0]).all()


def test_a_writer_that_dies_leaves_nothing_that_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = open_disk(tmp_path)
    (name,) = prefix("a", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            disk.store([name], content([name]))
    (left,) = files(tmp_path)
    assert disk.contains([name]) == [False]
    os.utime(left, (time.time() - 7200,) * 2)
    open_disk(tmp_path, "another").store(prefix("b", 1), content(prefix("b", 1)))
    assert not left.exists(), "it is deleted when the folder is listed"


def test_the_bound_holds_over_all_who_write_and_all_models(tmp_path: Path) -> None:
    disks = [open_disk(tmp_path, model, most_blocks=20) for model in ("one", "one", "other")]
    for number in range(30):
        disk = disks[number % 3]
        disk._listed = float("-inf")  # else every five minutes: writes of others are not known before
        names = prefix(f"{number}", 3)
        assert disk.store(names, content(names)) == [True] * 3
        assert len(files(tmp_path)) <= 20
    assert len(files(tmp_path)) >= 15
    assert disks[2].contains(prefix("29", 3)) == [True] * 3, "the last ones are there"
    assert disks[0].contains(prefix("0", 3)) == [False] * 3


def test_deleted_blocks_are_reported(tmp_path: Path) -> None:
    disk, other = open_disk(tmp_path, most_blocks=10), open_disk(tmp_path, "other")
    told: list[StoredGone] = []
    disk.report = lambda message: told.append(message) if isinstance(message, StoredGone) else None
    names, more = prefix("a", 8), prefix("b", 8)
    other.store(more[:2], content(more[:2]))
    os.utime(other._path(more[1]), (1, 1))
    disk.store(names, content(names))
    disk.store(more, content(more))
    assert told == [], "no scheduler knows it"
    disk.reset(7, keep=True)
    left = [name for name in (*names, *more) if disk.contains([name]) == [True]]
    disk.delete(left[:1])
    more = prefix("c", 8)
    disk.store(more, content(more))
    gone = b"".join(message.hashes for message in told)
    assert {(message.epoch, message.tier) for message in told} == {(7, DISK)}
    assert gone.startswith(left[0].hash)
    hashes = {gone[at : at + 32] for at in range(0, len(gone), 32)}
    assert hashes == {name.hash for name in (*left, *more) if disk.contains([name]) == [False]}


def test_the_end_of_a_prefix_goes_before_its_beginning(tmp_path: Path) -> None:
    disk = open_disk(tmp_path, most_blocks=20)
    old, new = prefix("old", 8), prefix("new", 8)
    disk.store(old, content(old))
    disk.store(new, content(new))
    for age, name in enumerate(reversed(old)):  # the beginning was touched before the end: a read of the whole prefix
        os.utime(disk._path(name), (1000 + age, 1000 + age))
    more = prefix("more", 6)
    disk.store(more, content(more))
    assert disk.contains(new) == [True] * 8
    there = disk.contains(old)
    assert there == sorted(there, reverse=True)
    assert 2 <= sum(there) <= 4


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15), st.integers(0, 5)), unique_by=lambda file: file[0]))
def test_the_order_of_eviction_has_each_block_after_what_follows_it(triples: list[tuple[int, int, int]]) -> None:
    """Whatever the names say, also if they form circles."""
    found = [StoredFile(str(own), str(own), str(parent), used, 1) for own, parent, used in triples]
    order = least_recently_used(found)
    assert sorted(order) == sorted(found)
    place = {file.own: index for index, file in enumerate(order)}
    parents = {file.own: file.parent for file in found}
    for file in found:
        seen = {file.own}
        at = file.parent
        while at in parents and at not in seen:
            seen.add(at)
            at = parents[at]
        if at not in seen and file.parent in place:
            assert place[file.own] < place[file.parent]


def test_blocks_are_evicted_by_the_budgets_of_their_owners(tmp_path: Path) -> None:
    disk, other = open_disk(tmp_path, most_blocks=20), open_disk(tmp_path, "other", most_blocks=20)
    blocks = {owner: prefix(owner, 5) for owner in ("alice", "bob", "carol", "none")}

    def left(**budgets: MemoryBudget) -> dict[str, int]:
        """The blocks of each owner that stay of five when six more are written, of which some are the eldest."""
        for tier in (disk, other):
            tier.delete_salt(b"")
        for age, (owner, names) in enumerate(blocks.items()):
            tags = salt_tags(f"key:{owner}/own salt" if owner != "none" else None)
            tier = other if owner == "bob" else disk
            tier.store(names, content(names), {names[0].hash: tags})
            for name in names:
                os.utime(tier._path(name), (1000 + age, 1000 + age))
        disk.set_budgets([StoredBudget(salt_tag(f"key:{owner}"), each) for owner, each in budgets.items()])
        disk._used, more = 20 * FILE_BYTES, prefix("more", 6)
        disk.store(more, content(more))
        assert all(disk.contains(more))
        return {owner: sum((other if owner == "bob" else disk).contains(names)) for owner, names in blocks.items()}

    def budget(low: int = 0, high: int | None = None, least: int = 0) -> MemoryBudget:
        sizes = [MemorySize(FILE_BYTES * number) for number in (least, low)]
        return MemoryBudget(DISK, *sizes, None if high is None else MemorySize(FILE_BYTES * high))

    assert left() == {"alice": 0, "bob": 2, "carol": 5, "none": 5}
    assert left(carol=budget(high=2)) == {"alice": 0, "bob": 5, "carol": 2, "none": 5}
    assert left(bob=budget(high=1), carol=budget(high=5)) == {"alice": 1, "bob": 1, "carol": 5, "none": 5}
    assert left(alice=budget(low=5), bob=budget(low=3)) == {"alice": 5, "bob": 3, "carol": 0, "none": 4}
    assert left(alice=budget(least=2)) == {"alice": 2, "bob": 0, "carol": 5, "none": 5}
    half = MemoryBudget(DISK, MemorySize(share=1.0))
    assert left(alice=half, bob=half) == {"alice": 5, "bob": 5, "carol": 0, "none": 2}, "scaled to a quarter each"


def test_a_disk_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--disk-cache .*Not a directory|File exists"):
        open_disk(tmp_path / "file")
    with pytest.raises(ConfigError, match="--disk-memory: one KV block takes 12288 bytes, 0 are allowed"):
        open_disk(tmp_path, most_blocks=0)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 6,000 bytes, as on a disk that is full in the middle of a block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_block_that_was_written_in_part_is_not_there(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    names = prefix("a", 2)
    assert disk.store(names, content(names)) == [False, False]
    assert disk.contains(names) == [False, False]
    assert files(tmp_path) == []
    assert disk.num_errors == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_nothing_still_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    disk = open_disk(tmp_path)
    names, more = prefix("a", 10), prefix("b", 2)
    disk.store(names, content(names))

    def fail(*values: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        for function in ("writev", "utime", "unlink"):
            patch.setattr(disk_module.os, function, fail)
        assert disk.store(more, content(more)) == [False, False]
        assert disk.contains(names) == [True] * 10
        check(disk, names, [True] * 10)
        assert disk.num_errors >= 2
    assert disk.store(more, content(more)) == [True, True], "it works again"
    if code in (errno.ENOSPC, errno.EDQUOT):
        assert len(files(tmp_path)) <= 10, "and others have more room on it now"


def test_a_disk_that_cannot_be_read_costs_the_blocks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = open_disk(tmp_path)
    names = prefix("a", 3)
    disk.store(names, content(names))

    def fail(*values: object) -> int:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(disk_module.os, "preadv", fail)
    check(disk, names, [False] * 3)
    assert disk.num_errors == 3


def test_a_folder_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "cache")
    names = prefix("a", 2)
    disk.store(names, content(names))
    (tmp_path / "cache").rename(tmp_path / "gone")
    assert disk.contains(names) == [False, False]
    check(disk, names, [False, False])
    assert disk.store(names, content(names)) == [False, False]
    assert disk.store(names, content(names)) == [True, True]
    check(disk, names, [True, True])


def test_files_are_read_past_the_page_cache_where_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = open_disk(tmp_path)
    names = prefix("a", 2)
    disk.store(names, content(names))
    opened: list[int] = []
    open_file = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        opened.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not on this file system")
        return open_file(path, flags, mode)

    monkeypatch.setattr(disk_module.os, "open", refuse)
    check(disk, names, [True, True])
    assert any(flags & os.O_DIRECT for flags in opened)
    opened.clear()
    check(disk, names, [True, True])
    assert not any(flags & os.O_DIRECT for flags in opened), "it is not tried again"


OTHER_USER = 65534


def by_another_user(path: Path) -> None:
    os.chown(path, OTHER_USER, OTHER_USER)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@needs_root
def test_blocks_that_another_user_wrote_are_not_read(tmp_path: Path) -> None:
    """They have the right hash and checksum, as an attacker's would."""
    names = prefix("a", 3)
    disk = open_disk(tmp_path)
    disk.store(names, content(names))
    (path,) = (path for path in files(tmp_path) if names[1].hash.hex() in path.name)
    by_another_user(path)
    check(disk, names, [True, False, True])
    assert disk.num_errors == 1


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir(0o700)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="belongs to another user, or others can write to it"):
        open_disk(tmp_path)
    folder.chmod(0o2770)  # the group of a pod's volume
    open_disk(tmp_path)


@needs_root
def test_a_folder_that_another_user_made_first_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir(0o700)
    by_another_user(tmp_path / "x")
    with pytest.raises(ConfigError, match=r"--disk-cache .*belongs to another user"):
        open_disk(tmp_path)
