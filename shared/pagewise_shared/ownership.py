"""Checks of the owner and the mode of files and folders whose content a service trusts."""

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def foreign_writers(path: Path) -> str | None:
    """Return why another account of this machine can change ``path``; None if only its user and root can.

    A process of root accepts any owner, because root may read the files of a user, for instance in a container with a
    mounted folder. A read-only file system passes: Kubernetes mounts secrets with mode 1777 on one.

    Raises:
        OSError: ``path`` cannot be read.
    """
    status = path.stat()
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return None
    if os.geteuid() not in (0, status.st_uid) and status.st_uid != 0:
        return f"{path} belongs to the user {status.st_uid}, who can change it: give it to the user of this process"
    if status.st_mode & _OTHERS_WRITE:
        group = "its group" if not status.st_mode & stat.S_IWOTH else "every user of this machine"
        return f"{group} can change {path}: chmod go-w {path}"
    return None


def is_private_file(status: os.stat_result) -> bool:
    """Whether an open file is a regular file of this process's user, of mode 0600, with one name."""
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and stat.S_IMODE(status.st_mode) == 0o600
        and status.st_nlink == 1
    )
