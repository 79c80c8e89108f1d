"""The disk cache of what the emulator builds: a folder per key with one file and its checksum, whole or absent.

    <cache dir>/emulator-v1/<name>-<32 hex digits of the key>/{<product>, checksum, ...}

As for compiled kernels (runtime/cache.py), an entry is filled in a temporary folder and renamed, whatever is wrong with
one is a miss, and a folder that others may write to is not used: programs in it would run with this user's rights.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import private_folder, variables
from ..cache import EntryInfo

FOLDER = "emulator-v1"
_CHECKSUM = "checksum"
_TEMPORARY, _LOCK = ".tmp-", ".lock-"
_LIMIT = 512 << 20

_log = logging.getLogger("flashsmith.emulator")
_guard = threading.Lock()
_locks: dict[Path, threading.Lock] = {}
_fallback: Path | None = None


def cached(name: str, key: str, product: str, build: Callable[[Path], None]) -> Path:
    """The path of the file `product` of the entry `name` under the hex digest `key`, built where it is missing.

    `build(folder)` makes the file in the folder it is given; other files there are kept beside it. Threads build a
    product once; processes wait for one another for a bounded time, then build twice.
    """
    root = _root()
    entry = root / f"{name}-{key[:32]}"
    path = entry / product
    with _lock_of(entry), _process_lock(root, path):
        if _is_whole(path):
            return path
        temporary = root / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"
        private_folder.make_private(temporary)
        try:
            build(temporary)
            private_folder.write_new(temporary / _CHECKSUM, _sum_of(temporary / product).encode())
            _publish(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return path


def discard(product: Path) -> None:
    """Removes the entry of `product`, so that the next call builds it again."""
    shutil.rmtree(product.parent, ignore_errors=True)


def folder() -> Path:
    """Where products are kept in this process; it may not exist yet."""
    return variables.cache_dir() / FOLDER


def entries() -> list[EntryInfo]:
    """Every entry on disk, newest first, each checked. Empty where there is no cache, or where it is not used."""
    found = [_describe(path) for path in _paths() if not path.name.startswith((_TEMPORARY, _LOCK))]
    return sorted(found, key=lambda entry: (-entry.modified, entry.path.name))


def remove(entry: Path) -> bool:
    """Removes one entry's folder; whether it is gone. A program that runs goes on. Raises nothing."""
    hidden = entry.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}")
    try:
        os.rename(entry, hidden)
    except OSError:
        return not entry.exists()
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def clear() -> int:
    """Removes all entries, lock files and what dead processes left; how many entries went."""
    count = 0
    for path in _paths():
        if path.name.startswith(_LOCK):
            path.unlink(missing_ok=True)
        elif path.name.startswith(_TEMPORARY):
            shutil.rmtree(path, ignore_errors=True)
        else:
            count += remove(path)
    return count


def _paths() -> list[Path]:
    """What lies in the folder; nothing where others may have written to it."""
    for path, shared in ((variables.cache_dir(), True), (folder(), False)):
        if not os.path.lexists(path) or private_folder.folder_problem(path, shared=shared) is not None:
            return []
    try:
        return sorted(folder().iterdir())
    except OSError:
        return []


def _describe(entry: Path) -> EntryInfo:
    nbytes, modified, problem = 0, 0.0, ""
    try:
        nbytes = sum(file.lstat().st_size for file in entry.iterdir())
        modified = entry.lstat().st_mtime
        # Its build wrote one product, whose name is not in the entry's: the file that the checksum is of.
        files = [file for file in entry.iterdir() if file.name != _CHECKSUM]
        if not any(_is_whole(file) for file in files):
            problem = "no file matches the checksum"
    except OSError as error:
        problem = str(error)
    return EntryInfo(entry, nbytes, modified, {}, {}, problem)


def _root() -> Path:
    """The folder for entries: the user's, or a temporary one for this process where that cannot be used."""
    global _fallback
    cache, kept = variables.cache_dir(), folder()
    try:
        private_folder.make_private(cache)
        problem = private_folder.folder_problem(cache, shared=True)
        if problem is None:
            private_folder.make_private(kept)
            problem = private_folder.folder_problem(kept)
        if problem is None and not os.access(kept, os.W_OK):
            problem = f"{kept} cannot be written."
    except OSError as error:
        problem = f"{kept} cannot be made ({error.strerror or error})."
    if problem is None:
        return kept
    with _guard:
        if _fallback is None:
            _fallback = Path(tempfile.mkdtemp(prefix="flashsmith-emulator-"))
            atexit.register(shutil.rmtree, _fallback, ignore_errors=True)
            _log.warning(
                "What the emulator builds is not kept on disk: %s Until then each process builds its own"
                " (%s names the folder).",
                problem,
                variables.CACHE_DIR,
            )
        return _fallback


def _lock_of(entry: Path) -> threading.Lock:
    with _guard:
        return _locks.setdefault(entry, threading.Lock())


@contextmanager
def _process_lock(root: Path, product: Path) -> Iterator[None]:
    if _is_whole(product):
        yield
        return
    from filelock import FileLock

    lock = FileLock(root / f"{_LOCK}{product.parent.name}", timeout=variables.lock_seconds(), mode=0o600)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
        _log.info("Building without the lock of %s: %s", product.parent.name, error)
    try:
        yield
    finally:
        lock.release()


def _is_whole(product: Path) -> bool:
    try:
        expected = private_folder.read_trusted(product.parent / _CHECKSUM, limit=4096).decode()
        return expected == _sum_of(product)
    except (OSError, ValueError):
        return False


def _sum_of(path: Path) -> str:
    return hashlib.sha256(private_folder.read_trusted(path, limit=_LIMIT)).hexdigest()


def _publish(temporary: Path, product: Path) -> None:
    entry = product.parent
    try:
        os.rename(temporary, entry)
    except OSError:
        if _is_whole(product):
            return  # another process was first
        shutil.rmtree(entry, ignore_errors=True)
        os.rename(temporary, entry)
