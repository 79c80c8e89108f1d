"""Folders and files that nobody but this user (or root) can have written: what a binary may be loaded from.

A kernel that another user could have planted would run with this user's rights. So a folder is used only if its owner
is trusted and no one else may write to it, and each file is checked again through its open descriptor.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_HAS_OWNERS = hasattr(os, "geteuid")


def folder_problem(path: Path, *, shared: bool = False) -> str | None:
    """Why the existing folder `path` must not be used, with the remedy; None if it may.

    `shared` admits a folder where others may make entries of their own but not replace ours (the group may write, or
    the sticky bit is set, as for /tmp): fit to hold a private folder, not to hold binaries.
    """
    try:
        link = os.lstat(path)
        if stat.S_ISLNK(link.st_mode) and not _trusted_owner(link):
            return f"{path} is a link that another user made (uid {link.st_uid}). Name a folder of your own."
        found = os.stat(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}). Name a folder of your own."
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is no folder. Remove it, or name another one."
    if not _trusted_owner(found):
        return f"{path} belongs to another user (uid {found.st_uid}). Name a folder of your own."
    if not _HAS_OWNERS:
        return None
    mode = stat.S_IMODE(found.st_mode)
    open_to_all = mode & stat.S_IWOTH and not mode & stat.S_ISVTX
    if open_to_all if shared else mode & _OTHERS_WRITE:
        return f"{path} may be written by other users (mode {mode:04o}). Run: chmod go-w '{path}'"
    return None


def make_private(path: Path) -> None:
    """Makes the folder `path`, for this user alone, and the missing ones above it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not path.is_dir():
            raise


def read_trusted(path: Path, *, limit: int) -> bytes:
    """The bytes of the file `path`. Raises OSError where it is missing, a link, another user's, or above `limit`."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    # O_NONBLOCK: a planted pipe must not hang the reader.
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if not _trusted_owner(found) or (_HAS_OWNERS and found.st_mode & _OTHERS_WRITE):
            raise PermissionError(errno.EPERM, "another user may have written it", str(path))
        if found.st_size > limit:
            raise OSError(errno.EFBIG, f"more than {limit} bytes", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit + 1)
    finally:
        os.close(descriptor)


def write_new(path: Path, data: bytes) -> None:
    """Writes `data` to the new file `path`, readable by this user alone. Raises OSError, also where it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600), "wb") as file:
        file.write(data)


def _trusted_owner(found: os.stat_result) -> bool:
    """This user; or root, who can do anything anyway, and who fills the cache of a container image."""
    return not _HAS_OWNERS or found.st_uid in (os.geteuid(), 0)
