"""A folder for secrets in the host's temporary folder, which is removed at the latest by whoever makes the next one."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path


class PrivateFolder:
    """A folder that only its user can read, and that is locked while the process that has made it lives.

    The lock tells others that it is in use, those in other PID namespaces too, and keeps systemd's cleaner away.
    """

    def __init__(self, prefix: str) -> None:
        """Make the folder, and remove those with this prefix on this host whose processes have died."""
        _remove_unlocked(prefix)
        self._path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock: int | None = None
        self.path()

    def path(self) -> Path:
        """Return the folder, empty if it had to be made again because somebody had removed it.

        Raises:
            OSError: it cannot be made, or something of somebody else is in its place.
        """
        while not self._is_locked():
            with contextlib.suppress(FileExistsError):
                self._path.mkdir(mode=0o700, parents=True)
            self.release()
            with contextlib.suppress(FileNotFoundError):  # removed again
                self._lock = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self._path

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self._path, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Give up the lock: the next one who makes a folder removes this one."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_locked(self) -> bool:
        try:
            there = self._path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o077:
            raise PermissionError(f"{self._path} was removed, and something of somebody else is in its place")
        return self._lock is not None and os.path.samestat(os.fstat(self._lock), there)


def _remove_unlocked(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone since it was listed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:  # in use
            pass
        finally:
            os.close(lock)
