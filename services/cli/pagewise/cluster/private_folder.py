"""A folder for secrets in the host's temporary folder. After a crash, the next such folder's maker removes it."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path


class PrivateFolder:
    """A folder that only its user can read, with a lock for the life of the process that made it.

    The lock marks it as in use for all processes, also in other PID namespaces, and excludes it from systemd's
    clean-up.
    """

    def __init__(self, prefix: str) -> None:
        """Make the folder, and remove folders with this prefix whose processes have died."""
        _remove_unlocked(prefix)
        self._path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock: int | None = None
        self.path()

    def path(self) -> Path:
        """Return the folder; a new, empty one if it was removed.

        Raises:
            OSError: it cannot be made, or another user's file is in its place.
        """
        # A cleaner may remove the folder between any two of these calls. The lock counts only if the locked folder is
        # the one at the path, so both are made again until it is.
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
        """Release the lock, so that the maker of the next folder removes this one."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _is_locked(self) -> bool:
        try:
            there = self._path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o077:
            raise PermissionError(f"{self._path} was removed, and another user's file is in its place")
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
