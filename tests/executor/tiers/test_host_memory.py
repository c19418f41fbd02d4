"""Named host memory: one process holds it, and the next one finds its whole blocks."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
from pagewise_executor.tiers import host_memory
from pagewise_executor.tiers.host_memory import NamedMemory
from pagewise_shared.block_hash import BlockHash

NAME = BlockHash(bytes(range(32)))


def open_memory(folder: Path, content: str = "x", num_blocks: int = 8) -> NamedMemory:
    return NamedMemory(folder, content, num_blocks, 64, cuda=False)


def process_ends(memory: NamedMemory) -> None:
    """Release the lock, as the end of its process would."""
    fcntl.flock(memory._file, fcntl.LOCK_UN)


def test_named_memory_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    first, second = open_memory(tmp_path), open_memory(tmp_path)
    assert first.path != second.path
    first.slot(3)[:] = 7
    first.keep(3, NAME, 99)
    process_ends(first)
    third = open_memory(tmp_path)
    assert third.path == first.path
    assert third.names() == {3: NAME}
    assert third.is_inherited(3)
    assert third.checksum(3) == 99
    assert (third.slot(3) == 7).all()
    third.void(3)
    assert third.names() == {}
    assert third.checksum(3) is None


def test_named_memory_of_other_blocks_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = open_memory(tmp_path)
    first.keep(1, NAME, 1)
    process_ends(first)
    others = open_memory(tmp_path, "y"), open_memory(tmp_path, num_blocks=9)
    for other in others:
        assert other.names() == {}
    assert first.path.name in caplog.text, "whoever looks for memory is told where it is"
    for other in others:
        process_ends(other)
    caplog.clear()
    open_memory(tmp_path, "z")
    (record,) = caplog.records
    assert "holds 3 files" in record.getMessage()


def test_a_block_that_is_being_written_is_void(tmp_path: Path) -> None:
    first = open_memory(tmp_path)
    first.keep(1, NAME, 1)
    first.keep(2, None, 1)
    first.void(1)
    process_ends(first)
    second = open_memory(tmp_path)
    assert second.names() == {}
    assert second.checksum(2) == 1


def test_no_room_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        open_memory(tmp_path)
    assert not list(tmp_path.iterdir())


def test_memory_that_cannot_be_pinned_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    forgotten: list[bool] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            pinned.append(address)
            return 2 if len(pinned) == 3 else 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            pinned.remove(address)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 128)
    monkeypatch.setattr(host_memory, "_clear_cuda_error", lambda: forgotten.append(True))
    with pytest.raises(OSError, match="cannot pin host memory: error 2"):
        NamedMemory(tmp_path, "x", 8, 64, cuda=True)
    assert len(pinned) == 1, "what failed, and nothing else"
    assert forgotten
    assert not list(tmp_path.iterdir())


def forge(folder: Path, kind: str, others: Path) -> None:
    """Put a file of the right size, with a block that claims to be ``NAME``, under the name that comes next."""
    mine = open_memory(folder)
    mine.slot(3)[:] = 66
    mine.keep(3, NAME, 1)
    path = mine.path
    process_ends(mine)
    if kind == "another user's":
        os.chown(path, 65534, 65534)
    elif kind == "open to all":
        path.chmod(0o666)
    elif kind == "second name":
        os.link(path, others / "kept by the attacker")
    elif kind == "link":
        path.rename(others / "target")
        path.symlink_to(others / "target")
    else:
        path.unlink()
        os.mkfifo(path, 0o600) if kind == "pipe" else path.mkdir(0o700)


@pytest.mark.parametrize("kind", ["another user's", "open to all", "second name", "link", "pipe", "folder"])
def test_a_file_that_another_user_may_have_made_is_not_taken_over(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    folder = tmp_path / "shm"
    folder.mkdir(0o1777)
    forge(folder, kind, tmp_path)
    memory = open_memory(folder)
    assert memory.number == 1
    assert memory.names() == {}
    assert not any(memory.is_inherited(block) for block in range(8))
    assert "is not used as host memory" in caplog.text
    memory.slot(3)[:] = 7
    assert not (open_memory(folder).slot(3) == 7).any(), "no two executors share a file"


def test_the_umask_neither_opens_nor_closes_the_file(tmp_path: Path) -> None:
    for mask in (0, 0o777):
        before = os.umask(mask)
        try:
            memory = open_memory(tmp_path)
        finally:
            os.umask(before)
        assert memory.path.stat().st_mode & 0o777 == 0o600
