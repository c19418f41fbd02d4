"""The memory of the host tier, and the name and checksum of each of its blocks.

Named memory is a file in a memory file system. It outlives its process, so the next process finds the blocks of the one
before. A block is marked void before it is written, and marked with its name and checksum afterwards. So every block
that a killed process leaves behind is either whole or void.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.block_hash import HASH_BYTES
from pagewise_shared.ownership import is_private_file

from pagewise_executor.kv.kv_pool import Raw

log = logging.getLogger(__name__)

_PIECE_BYTES = 2**30
"""Pinned memory is allocated in pieces of about this size; no block spans two of them."""
_PAGE = 4096
_MOST_SEGMENTS = 256


class HostMemory:
    """``num_blocks`` blocks of ``bytes_per_block`` bytes, which end with this process, and a record of each. They are
    pinned if the device is a GPU.

    ``outlives``: the memory survives the process. ``blocks_per_piece``: the memory is pinned in pieces of so many
    blocks. ``name_bytes``: of the name of a block, which is its hash, or the label of a page. ``memory``: has
    ``memory_bytes``; None: it is allocated.

    Raises:
        OSError: the memory cannot be allocated or pinned.
    """

    outlives = False

    def __init__(
        self, num_blocks: int, bytes_per_block: int, cuda: bool, name_bytes: int = HASH_BYTES,
        memory: mmap.mmap | None = None,
    ) -> None:  # fmt: skip
        self.num_blocks, self.blocks_per_piece = num_blocks, _blocks_per_piece(bytes_per_block)
        if memory is None:
            size = memory_bytes(num_blocks, bytes_per_block, name_bytes)
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        content = np.frombuffer(memory, np.uint8)
        record = _record(name_bytes)
        self._records = content[: num_blocks * record.itemsize].view(record)
        self._inherited = set(np.flatnonzero(self._records["whole"]).tolist())
        blocks = content[len(content) - num_blocks * bytes_per_block :].reshape(num_blocks, bytes_per_block)
        self._blocks: Raw = _pin(blocks) if cuda else blocks

    def slot(self, block: int) -> Raw:
        """Return the memory of a block: uint8 [bytes_per_block]."""
        return self._blocks[block]

    def rows(self, first: int, count: int) -> Raw:
        """Return the memory of blocks that follow each other in one piece: uint8 [count, bytes_per_block]."""
        return self._blocks[first : first + count]

    def void(self, block: int) -> None:
        """Mark a block as void, before it is written."""
        self._records["whole"][block] = 0
        self._inherited.discard(block)

    def keep(self, block: int, name: bytes | None, checksum: int) -> None:
        """Mark a block as whole, after it was written. ``name``: None if its content is not known."""
        self._records["checksum"][block] = checksum
        if name is not None:
            self._records["name"][block] = np.frombuffer(name, np.uint8)
        self._records["whole"][block] = 1 if name is None else 2  # last, so that a killed process leaves it void

    def checksum(self, block: int) -> int | None:
        """Return the checksum that was kept with a block; None if it is void."""
        return int(self._records["checksum"][block]) if self._records["whole"][block] else None

    def is_inherited(self, block: int) -> bool:
        """Whether another process wrote the block, so that only its checksum proves that it is sound."""
        return block in self._inherited

    def name(self, block: int) -> bytes | None:
        """Return the name of a block; None if it has none, or is void."""
        return self._records["name"][block].tobytes() if self._records["whole"][block] == 2 else None

    def names(self) -> dict[int, bytes]:
        """Return the names of the blocks that have one."""
        named = np.flatnonzero(self._records["whole"] == 2).tolist()
        return {block: self._records["name"][block].tobytes() for block in named}

    def clear(self) -> None:
        """Mark all blocks as void."""
        self._records["whole"][:] = 0
        self._inherited.clear()

    def close(self) -> None:
        """Release the memory: neither this process nor the next one needs it."""


class NamedMemory(HostMemory):
    """Memory in a file in ``folder``, on which this process holds a lock.

    ``content`` names the model, the format and the geometry of the blocks. The first file of the same content that no
    process holds is taken over with its blocks; if there is none, a new one is made. ``number``: of the file that is
    tried first. Other users may write to ``folder``, and can foresee the names: a file is only taken over if it belongs
    to this user, who alone can read and write it; otherwise the next name is used.

    Raises:
        OSError: the file cannot be made, for instance for lack of room, or cannot be pinned.
    """

    outlives = True

    def __init__(
        self, folder: Path, content: str, num_blocks: int, bytes_per_block: int, cuda: bool, number: int = 0,
        name_bytes: int = HASH_BYTES,
    ) -> None:  # fmt: skip
        kind = hashlib.sha256(f"1 {content} {num_blocks} {bytes_per_block}".encode()).hexdigest()[:16]
        size = memory_bytes(num_blocks, bytes_per_block, name_bytes)
        self.number, self._file = _take(folder, kind, size, number)
        self.path = _path(folder, kind, self.number)
        try:
            super().__init__(num_blocks, bytes_per_block, cuda, name_bytes, mmap.mmap(self._file, size))
        except OSError:
            self.close()  # removes the file: the next process could not pin it either
            raise
        if self._inherited:
            log.info("took over %d blocks in %s from a process that is gone", len(self._inherited), self.path)
        others = sorted(one for one in folder.glob(f"{_prefix()}*") if not one.name.startswith(f"{_prefix()}{kind}"))
        if free := [one for one in others if _is_free(one)]:
            log.warning(
                "no process holds %d files in %s with blocks of other kinds, such as %s: remove what you need no more",
                len(free), folder, free[0].name,
            )  # fmt: skip

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._file)


def memory_bytes(num_blocks: int, bytes_per_block: int, name_bytes: int = HASH_BYTES) -> int:
    """Return the bytes of so many blocks, and of their records, which fill whole pages before them."""
    return -(-num_blocks * _record(name_bytes).itemsize // _PAGE) * _PAGE + num_blocks * bytes_per_block


def _record(name_bytes: int) -> np.dtype[np.void]:
    """The record of a block, with numbers at multiples of 8 bytes if the name has a multiple of 8 bytes."""
    return np.dtype([("whole", "<u8"), ("checksum", "<u8"), ("name", "u1", name_bytes)])


def _blocks_per_piece(bytes_per_block: int) -> int:
    return max(1, _PIECE_BYTES // bytes_per_block)


def _prefix() -> str:
    return f"pagewise-{os.getuid()}-"


def _path(folder: Path, kind: str, number: int) -> Path:
    return folder / f"{_prefix()}{kind}-{number}"


def _take(folder: Path, kind: str, size: int, first: int) -> tuple[int, int]:
    """Open and lock a file of that kind that no other process holds, and return its number, too. A new one is empty."""
    for number in [first, *(each for each in range(_MOST_SEGMENTS) if each != first)]:
        path = _path(folder, kind, number)
        file = _open_unheld(path)
        if file is None:
            continue
        try:
            if os.fstat(file).st_size != size:
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, size)  # reserved, so that no later write can fail for lack of room
        except OSError:
            path.unlink()
            os.close(file)
            raise
        return number, file
    raise OSError(f"{_MOST_SEGMENTS} executors, or other users, hold files of host memory in {folder}")


def _open_unheld(path: Path) -> int | None:
    """Open and lock a file, which is made if it does not exist; None if a process holds it or another user made it.

    Raises:
        OSError: the file cannot be made.
    """
    try:
        file = _open(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        # A symbolic link, a folder, a socket, or a file that this user may not open. The kernel's ``protected_regular``
        # answers EACCES to O_CREAT as well, so only the name can tell whether the folder refuses a new file.
        if not os.path.lexists(path):
            raise
        log.warning("%s is not used as host memory: another user may have made it (%s)", path, error.strerror)
        return None
    if not is_private_file(os.fstat(file)):
        log.warning("%s is not used as host memory: it is not a regular file of mode 0600 of this user alone", path)
    elif _lock(file):
        return file
    os.close(file)
    return None


def _is_free(path: Path) -> bool:
    try:
        file = _open_unheld(path)
    except OSError:
        return False
    if file is not None:
        os.close(file)
    return file is not None


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, flags | os.O_EXCL, 0o600)
        os.fchmod(descriptor, 0o600)  # the umask may have cleared bits
        return descriptor
    return os.open(path, flags | os.O_NONBLOCK, 0o600)  # without O_NONBLOCK, a pipe would wait for its other end


def _lock(file: int) -> bool:
    """Lock an open file unless another process has the lock. The kernel releases it when the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pin(blocks: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Pin the memory of ``blocks`` [num_blocks, bytes] for the GPU, piece by piece.

    Raises:
        OSError: the driver refuses; then nothing stays pinned.
    """
    per_piece = _blocks_per_piece(blocks.shape[1])
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pieces = [blocks[start : start + per_piece] for start in range(0, len(blocks), per_piece)]
    for number, piece in enumerate(pieces):
        if error := int(runtime.cudaHostRegister(piece.ctypes.data, piece.nbytes, 0)):
            for done in pieces[:number]:
                runtime.cudaHostUnregister(done.ctypes.data)
            _clear_cuda_error()
            raise OSError(f"the GPU's driver cannot pin host memory: error {error}")
    return torch.from_numpy(blocks)


def _clear_cuda_error() -> None:
    """Make torch read the pending CUDA error here. Otherwise its next kernel launch would report it as its own."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
