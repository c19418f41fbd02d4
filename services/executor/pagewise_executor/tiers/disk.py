"""The disk tier: a folder with one file for each block, named by its hash.

Executors of one machine share the folder, and executors of several machines share a network mount. A block is written
under a temporary name and then renamed, so two executors may write the same block at once, and a checksum finds a block
that a crash has cut off. Another user who may write to the folder (/tmp, or a mount that several users share) could put
blocks there, so only files of the executor's own user are read. The name of a file has the hashes of its block and of
the block before it, so eviction needs only a listing to know the order of blocks. The first block of a prefix has the
tags of its cache salt in its header.
"""

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from threading import Lock

import numpy as np
from pagewise_shared.block_hash import HASH_BYTES, SALT_TAG_BYTES, BlockHash, BlockName, root_hash
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import DISK, StoredBudget

from pagewise_executor.tiers.block_names import (
    HEADER_BYTES,
    SALTS_BYTES,
    SCRATCH,
    descendants,
    fingerprint_of,
    header,
    is_sound,
    of_salt,
    short_hash,
    stored_bytes,
)
from pagewise_executor.tiers.disk_budgets import StoredFile, bounds_of, in_order
from pagewise_executor.tiers.hashed import NO_SALTS, HashedTier
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import Rows

_PAGE = 4096
"""The alignment that O_DIRECT needs, and the offset of a block's content in its file."""
_READERS = 4
_TEMPORARY = ".new"
_ABANDONED_SECONDS = 3600.0
_ROOM = 0.9
"""Once the folder is full, files are deleted until it holds this part of its bound."""
_LISTED_SECONDS = 300.0
"""How often the folder is listed, because others write there too."""


class DiskTier(HashedTier):
    """A folder of blocks.

    ``content``: the model and format of these blocks (``content_name``); ``folder`` may hold blocks of others, too.
    ``most_bytes``: the bound of the folder; each executor that writes there keeps to it. ``small``: see ``HashedTier``.
    """

    def __init__(
        self, folder: Path, content: str, bytes_per_block: int, most_bytes: int, small: SmallCopies | None = None
    ) -> None:
        """Make the folder if it is not there.

        Raises:
            ConfigError: the folder cannot be made, not one block fits, or another user owns the subfolder.
        """
        self._root, self._folder = folder, folder / content
        self._most_bytes = most_bytes
        self._file_bytes = _PAGE + -(-bytes_per_block // _PAGE) * _PAGE
        if most_bytes < self._file_bytes:
            raise ConfigError(f"--disk-memory: one KV block takes {self._file_bytes} bytes, {most_bytes} are allowed")
        self._numbers = count()
        self._lock = Lock()
        self._used, self._listed = 0, float("-inf")
        self._budgets: Sequence[StoredBudget] = ()
        self._direct = getattr(os, "O_DIRECT", 0)
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)  # KV reveals the prompts
            _check_own(self._folder.stat(), self._folder)
            for number in range(256):
                (self._folder / f"{number:02x}").mkdir(exist_ok=True)
            super().__init__("disk", bytes_per_block, f"{_identity(folder)} {content}", small)
        except OSError as error:
            raise ConfigError(f"--disk-cache {folder}: {error}") from error
        self._readers = ThreadPoolExecutor(_READERS, "read disk")

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Return for each block whether its file is there, and set the time of its last use."""
        return [self._touch(name) for name in names]

    def _touch(self, name: BlockName) -> bool:
        path = self._path(name)
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:  # it cannot be touched on a disk that is read-only
            return os.path.exists(path)
        return True

    def load(self, names: Sequence[BlockName], rows: Rows) -> list[bool]:
        """Read blocks into ``rows``, by several threads. Return for each whether it was there and is sound."""
        return list(self._readers.map(self._load_one, names, rows))

    def _load_one(self, name: BlockName, row: Rows) -> bool:
        path = self._path(name)
        content = _aligned(self._file_bytes)
        try:
            there = self._fill(path, content)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.failed("a block cannot be read: %s", error)
            return False
        begin = content[:HEADER_BYTES].tobytes()
        stored = content[_PAGE : _PAGE + stored_bytes(begin)] if there > _PAGE else content[:0]
        whole = there >= _PAGE + len(stored)  # bytes behind the content were not read
        sound = whole and is_sound(begin, name, stored) and self.restore(stored, row)
        with suppress(OSError):  # on a disk that is read-only
            (os.utime if sound else os.unlink)(path)
        if not sound:
            self.failed("%s is corrupt: its checksum does not match", path)
        return sound

    def _fill(self, path: str, content: Rows) -> int:
        """Read a file; return how many bytes of it there are.

        The read bypasses the page cache if the file system supports it: KV memory has the block afterwards, so a second
        copy in the page cache would be waste.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | self._direct)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = 0
            descriptor = os.open(path, os.O_RDONLY)
        try:
            _check_own(os.fstat(descriptor), path)
            done = 0
            while done < self._file_bytes:  # usually one read is enough
                got = os.preadv(descriptor, [content[done:].data], done)
                if not got:
                    break
                done += got
        finally:
            os.close(descriptor)
        return done

    def store(self, names: Sequence[BlockName], rows: Rows, salts: Mapping[BlockHash, bytes] = NO_SALTS) -> list[bool]:
        """Write blocks that are not there, then evict if the folder is full. Return for each whether it is there."""
        written = [
            # Blocks that measure how long writing takes are written again.
            (name.parent != SCRATCH and self._touch(name)) or self._store_one(name, row, salts.get(name.hash, b""))
            for name, row in zip(names, rows, strict=True)
        ]
        self._make_room()
        return written

    def _store_one(self, name: BlockName, row: Rows, salt: bytes) -> bool:
        path = self._path(name)
        temporary = f"{path}.{uuid.getnode():x}.{os.getpid()}.{next(self._numbers)}{_TEMPORARY}"
        stored = self.stored(name, row)
        start = (header(name, stored) + salt).ljust(_PAGE, b"\0")
        content = [start, stored.tobytes(), bytes(-len(stored) % _PAGE)]
        size = sum(map(len, content))
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if os.writev(descriptor, content) != size:
                    raise OSError(errno.ENOSPC, "a block was written in part")
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            self.failed("a block cannot be written: %s", error)
            if isinstance(error, FileNotFoundError):  # the folder has vanished, and may be wanted again
                with suppress(OSError):
                    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._most_bytes = min(self._most_bytes, max(self._file_bytes, int(self._used * _ROOM)))
            return False
        with self._lock:
            self._used += size
        return True

    def delete(self, names: Iterable[BlockName]) -> int:
        """Delete the files of blocks. Return how many there were.

        Raises:
            OSError: a file cannot be deleted.
        """
        return self._unlink(map(self._path, names))

    def delete_salt(self, tag: bytes) -> int:
        """Delete the files of the blocks of a ``salt_tag``, or all (empty). Return how many there were.

        Raises:
            OSError: a file cannot be read or deleted.
        """
        files: dict[str, list[StoredFile]] = {}
        for file in _list(self._folder):
            files.setdefault(file.own, []).append(file)
        parents = {own: each[0].parent for own, each in files.items()}
        chosen = of_salt(parents, lambda owns: (_salt_of(files[own][0].path) for own in owns), tag)
        return self._unlink(file.path for own in chosen for file in files[own])

    def _report_gone(self, paths: Iterable[str]) -> None:
        names = (Path(path) for path in paths)
        own = [path.name.partition(".")[0] for path in names if path.parent.parent == self._folder]
        self.gone(DISK, [bytes.fromhex(digits) for digits in own if len(digits) == 2 * HASH_BYTES])

    def _unlink(self, paths: Iterable[str]) -> int:
        paths = [*paths]
        sizes = _unlink(paths)
        self._report_gone(paths)
        with self._lock:
            self._used = max(0, self._used - sum(sizes))
        return len(sizes)

    def set_budgets(self, budgets: Sequence[StoredBudget]) -> None:
        """Evict by these budgets from now on."""
        self._budgets = budgets

    def close(self) -> None:
        """Void all jobs, and end all threads."""
        super().close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _path(self, name: BlockName) -> str:
        digits = name.hash.hex()
        return f"{self._folder}/{digits[:2]}/{digits}.{short_hash(name.parent)}"

    # ---- the bound -----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Delete the least recently used blocks if the folder is full; a lock file lets one process do so at a time.

        A use of a block is a use of all blocks before it, so the end of a prefix is deleted before its beginning.
        """
        now = time.monotonic()
        if self._used <= self._most_bytes and now - self._listed < _LISTED_SECONDS:
            return
        try:
            with open(self._root / "lock", "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                files = list(chain.from_iterable(map(_list, self._root.glob("*/"))))
                used = sum(file.size for file in files)
                if used > self._most_bytes:
                    deleted: list[str] = []
                    for file in in_order(files, bounds_of(self._budgets, self._most_bytes), _owner_of):
                        if used <= self._most_bytes * _ROOM:
                            break
                        with suppress(FileNotFoundError):
                            os.unlink(file.path)
                        deleted.append(file.path)
                        used -= file.size
                    self._report_gone(deleted)
                self._used, self._listed = used, now
        except BlockingIOError:  # another process deletes blocks now
            self._listed = now
        except OSError as error:
            self.failed("blocks cannot be deleted: %s", error)


def _list(folder: Path) -> Iterator[StoredFile]:
    """List the blocks of one content. Delete temporary files that a process has left behind."""
    for number in range(256):
        with suppress(FileNotFoundError), os.scandir(folder / f"{number:02x}") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    own, _, parent = entry.name.partition(".")
                    if not entry.name.endswith(_TEMPORARY):
                        own = own[: len(parent)]
                        where = folder.name
                        yield StoredFile(
                            entry.path, f"{where} {own}", f"{where} {parent}", found.st_mtime_ns, found.st_size
                        )
                    elif time.time() - found.st_mtime > _ABANDONED_SECONDS:
                        os.unlink(entry.path)


def wipe(folder: Path, salt: str | None) -> int:
    """Delete all blocks of requests with a cache salt, of every model; returns how many there were.

    Raises:
        OSError: a file cannot be deleted, or the folder not be read.
    """
    num_wiped = 0
    for content in folder.glob("*.*/"):
        paths: dict[str, list[str]] = {}
        parents: dict[str, str] = {}
        for file in _list(content):
            paths.setdefault(file.own, []).append(file.path)
            parents[file.own] = file.parent
        root = f"{content.name} {short_hash(root_hash(fingerprint_of(content.name), salt))}"
        num_wiped += len(_unlink(path for own in descendants(parents, [root]) for path in paths[own]))
    return num_wiped


def _unlink(paths: Iterable[str]) -> list[int]:
    """Delete files; return the sizes of the files that existed."""
    sizes = list[int]()
    for path in paths:
        with suppress(FileNotFoundError):
            size = os.stat(path).st_size
            os.unlink(path)
            sizes.append(size)
    return sizes


def _salt_of(path: str) -> bytes:
    """Return the ``salt_tags`` in a file; nothing if it is gone."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        return file.read(HEADER_BYTES + SALTS_BYTES)[HEADER_BYTES:]
    return b""


def _owner_of(path: str) -> bytes:
    """Return the tag of the owner in a file: the one after the tag of all salts."""
    with suppress(OSError):  # then it has no owner that is known
        return _salt_of(path)[SALT_TAG_BYTES : 2 * SALT_TAG_BYTES].strip(b"\0")
    return b""


def _check_own(status: os.stat_result, path: str | Path) -> None:
    """Check that this process's user alone can change a file or folder, except for a group that it was given.

    Raises:
        PermissionError: another user can.
    """
    if status.st_uid != os.geteuid() or status.st_mode & 0o002:
        raise PermissionError(f"{path} belongs to another user, or others can write to it")


def _aligned(size: int) -> Rows:
    """Return ``size`` bytes of memory that begin at a multiple of the page size."""
    memory = np.empty(size + _PAGE, np.uint8)
    start = -memory.ctypes.data % _PAGE
    return memory[start : start + size]


def _identity(folder: Path) -> str:
    """Return an identity of a folder, which does not depend on the path of its mount. The first process makes it."""
    file = folder / "identity"
    with suppress(FileExistsError), open(file, "x") as new:
        new.write(uuid.uuid4().hex)
    for _ in range(50):
        if text := file.read_text().strip():
            return text
        time.sleep(0.01)  # another process has just made it
    return str(folder.resolve())
