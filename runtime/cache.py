"""The disk cache of compiled kernels: one folder per key, whole or absent, checked before use.

    <cache dir>/kernels-v1/forward_sm80-sm_90-<32 hex digits of the key>/
        kernel.cu  kernel.cubin     the text and the machine code
        key.json                    the key field by field, the resource report, and where it came from
        checksum                    SHA-256 of the three (`sha256sum -c checksum` reads it)

An entry is filled in a temporary folder beside it and renamed. Whatever is wrong with an entry (missing, cut, flipped,
of another key, writable by others) is a miss. Whatever is wrong with the folder (read-only, full, another user's) means
that kernels live in this process alone, after one warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..generator.digest import digest_of
from . import private_folder

SCHEMA = 1
FOLDER = f"kernels-v{SCHEMA}"
_FILES = ("kernel.cu", "kernel.cubin", "key.json")
_TEMPORARY = ".tmp-"
#: A temporary folder this old was left by a process that died.
_STALE_SECONDS = 3600.0
_LIMITS = {"kernel.cu": 16 << 20, "kernel.cubin": 256 << 20, "key.json": 1 << 20, "checksum": 4096}
#: Another process may hold a file or be renaming the same folder (Windows, NFS): try again after these seconds.
_RETRIES = (0.01, 0.05, 0.25)

_log = logging.getLogger("flashsmith.cache")
_warned: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class KernelKey:
    """Everything a cubin depends on. Two calls with equal keys may share one; any other difference is a miss."""

    family: str
    #: Digest of the whole AttentionSpec: op, dtype, head dims, the graphs of mask and score, gqa_ratio.
    spec: str
    #: The KernelConfig's fields, each tuned number by name.
    config: tuple[tuple[str, int | bool | str], ...]
    #: The architecture as NVRTC spells it.
    target: str
    #: Digest of all templates and of the generator's code.
    generator: str
    #: Identity of the NVRTC library: its build id.
    compiler: str
    #: NVRTC's options beside the architecture.
    options: tuple[str, ...]
    flashsmith: str
    schema: int = SCHEMA

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over all fields."""
        return digest_of(self.to_dict())

    @property
    def folder(self) -> str:
        """The entry's folder name: short and ASCII, whatever the spec."""
        return f"{self.family}-{self.target}-{self.digest[:32]}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "config": dict(self.config), "options": list(self.options)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel as the cache holds it: `facts` is the readable rest of key.json (report, compiler, spec in words)."""

    source: str
    cubin: bytes
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry as `flashsmith cache` lists it. `problem` says what is wrong with it, or is empty.

    `key` and `facts` are those of a compiled kernel; what the emulator built has none.
    """

    path: Path
    nbytes: int
    modified: float
    key: Mapping[str, Any]
    facts: Mapping[str, Any]
    problem: str


class KernelCache:
    """The cache below `root`. Making one touches nothing; `root` and its folder appear at the first store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / FOLDER
        self._trusted = False

    def load(self, key: KernelKey) -> Entry | None:
        """The entry of `key`, or None for a miss. `source` is not read here: see `read_source`. Raises nothing."""
        if not self._may_read():
            return None
        path = self.folder / key.folder
        try:
            record, cubin = _read_entry(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.info("Ignoring the cached kernel %s: %s. It will be compiled again.", path, error)
            return None
        if record["key"] != key.to_dict():
            _log.info("Ignoring the cached kernel %s: it is another key's. It will be compiled again.", path)
            return None
        return Entry(source="", cubin=cubin, facts=record["facts"])

    def read_source(self, key: KernelKey) -> str | None:
        """The text of kernel.cu of `key`, or None where the entry is missing or broken."""
        path = self.folder / key.folder
        try:
            sums = _read_checksum(path) if self._may_read() else {}
            return _checked(path, "kernel.cu", sums).decode() if sums else None
        except (OSError, ValueError):
            return None

    def store(self, key: KernelKey, entry: Entry) -> bool:
        """Keeps `entry`; whether that worked. A valid entry that is there already stays. Raises nothing."""
        temporary = self.folder / f"{_TEMPORARY}{os.getpid()}-{os.urandom(6).hex()}"
        record = {"key": key.to_dict(), "facts": dict(entry.facts)}
        contents = {
            "kernel.cu": entry.source.encode(),
            "kernel.cubin": entry.cubin,
            "key.json": (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode(),
        }
        sums = "".join(f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in _FILES)
        try:
            if not self._may_write():
                return False
            private_folder.make_private(temporary)
            for name in _FILES:
                private_folder.write_new(temporary / name, contents[name])
            private_folder.write_new(temporary / "checksum", sums.encode())
            self._publish(temporary, key)
        except OSError as error:
            self._warn("write", f"{self.folder} cannot be written ({error.strerror or error}).")
            return False
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return True

    @contextmanager
    def lock(self, key: KernelKey, *, seconds: float) -> Iterator[bool]:
        """Holds the lock of `key` between processes; yields whether it was got within `seconds`.

        Without it (time out, a file system without locks, no writable folder) two processes may compile the same
        kernel; each then has a right one, and one of them is kept.
        """
        lock = None
        try:
            if self._may_write():
                from filelock import FileLock

                locks = self.folder / "locks"
                private_folder.make_private(locks)
                lock = FileLock(locks / f"{key.digest[:32]}.lock", timeout=seconds, mode=0o600)
                lock.acquire()
        except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
            _log.info("Compiling without the lock of %s: %s", key.folder, error)
            lock = None
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def path_of(self, key: KernelKey) -> Path:
        """The folder of `key`'s entry, whether or not it exists."""
        return self.folder / key.folder

    def entries(self) -> list[EntryInfo]:
        """Every entry, newest first, each fully checked. Empty where there is no cache."""
        found = [_describe(path) for path in self._folders() if not path.name.startswith(_TEMPORARY)]
        return sorted(found, key=lambda entry: (-entry.modified, entry.path.name))

    def remove(self, path: Path) -> bool:
        """Removes one entry's folder; whether it is gone. Raises nothing."""
        # A reader sees the whole entry or none, never a folder that is being emptied.
        hidden = self.folder / f"{_TEMPORARY}{os.getpid()}-{os.urandom(6).hex()}"
        try:
            os.rename(path, hidden)
        except OSError:
            return not path.exists()
        shutil.rmtree(hidden, ignore_errors=True)
        return True

    def clear(self) -> int:
        """Removes all entries, lock files and what dead processes left; how many entries went."""
        count = 0
        if self._may_read():
            shutil.rmtree(self.folder / "locks", ignore_errors=True)
        for path in self._folders():
            if path.name.startswith(_TEMPORARY):
                shutil.rmtree(path, ignore_errors=True)
            else:
                count += self.remove(path)
        return count

    def problem(self) -> str | None:
        """Why this cache cannot be used at all, with the remedy; None if it can be read or does not exist yet."""
        for path, shared in ((self.root, True), (self.folder, False)):
            if os.path.lexists(path):
                found = private_folder.folder_problem(path, shared=shared)
                if found is not None:
                    return found
        return None

    def _may_read(self) -> bool:
        if not self._trusted:
            if not os.path.lexists(self.folder):
                return False  # nothing to read; not final, since another process may make it
            found = self.problem()
            if found is not None:
                self._warn("read", found)
                return False
            self._trusted = True
        return True

    def _may_write(self) -> bool:
        if self._trusted:
            return True
        try:
            private_folder.make_private(self.root)
            # Nothing is made below a root that others can swap.
            found = self.problem()
            if found is not None:
                self._warn("read", found)
                return False
            private_folder.make_private(self.folder)
        except OSError as error:
            self._warn("write", f"{self.root} cannot be made or written ({error.strerror or error}).")
            return False
        return self._may_read()

    def _publish(self, temporary: Path, key: KernelKey) -> None:
        """Renames `temporary` to the entry of `key`, over a broken one if need be."""
        target = self.folder / key.folder
        for pause in (*_RETRIES, None):
            try:
                os.rename(temporary, target)
                break
            except OSError:
                if self.load(key) is not None:
                    return  # another process was first, and its kernel is as good
                if pause is None:
                    raise
                if os.path.lexists(target):
                    self.remove(target)
                else:
                    time.sleep(pause)
        self._sweep()

    def _sweep(self) -> None:
        """Removes temporary folders of processes that died while writing."""
        for path in self._folders():
            try:
                if path.name.startswith(_TEMPORARY) and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            except OSError:
                continue

    def _folders(self) -> list[Path]:
        if not self._may_read():
            return []
        try:
            return sorted(p for p in self.folder.iterdir() if p.name != "locks")
        except OSError:
            return []

    def _warn(self, kind: str, problem: str) -> None:
        if (str(self.root), kind) not in _warned:
            _warned.add((str(self.root), kind))
            _log.warning(
                "Compiled kernels are not kept on disk: %s Until then each process compiles its own"
                " (FLASHSMITH_CACHE_DIR names the folder).",
                problem,
            )


def excess(entries: Iterable[EntryInfo], max_bytes: int) -> list[EntryInfo]:
    """What must go so that the rest takes at most `max_bytes`: broken entries, then the oldest ones."""
    found: list[EntryInfo] = []
    kept = 0
    for entry in sorted(entries, key=lambda entry: (-entry.modified, entry.path.name)):
        kept += 0 if entry.problem else entry.nbytes
        if entry.problem or kept > max_bytes:
            found.append(entry)
    return found


def _read_entry(path: Path) -> tuple[dict[str, Any], bytes]:
    """key.json and the cubin of the entry in `path`, both checked. Raises OSError or ValueError."""
    sums = _read_checksum(path)
    try:
        record = json.loads(_checked(path, "key.json", sums))
    except RecursionError:
        raise ValueError("key.json is nested too deep") from None
    if not isinstance(record, dict) or set(record) != {"key", "facts"} or not isinstance(record["facts"], dict):
        raise ValueError("key.json has another form")
    return record, _checked(path, "kernel.cubin", sums)


def _read_checksum(path: Path) -> dict[str, str]:
    text = private_folder.read_trusted(path / "checksum", limit=_LIMITS["checksum"]).decode("ascii")
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
    if set(sums) != set(_FILES):
        raise ValueError("checksum does not name the three files")
    return sums


def _checked(path: Path, name: str, sums: Mapping[str, str]) -> bytes:
    data = private_folder.read_trusted(path / name, limit=_LIMITS[name])
    if hashlib.sha256(data).hexdigest() != sums[name]:
        raise ValueError(f"{name} does not match its checksum")
    return data


def _describe(path: Path) -> EntryInfo:
    key: Mapping[str, Any] = {}
    facts: Mapping[str, Any] = {}
    problem = ""
    nbytes, modified = 0, 0.0
    try:
        nbytes = sum(file.lstat().st_size for file in path.iterdir())
        modified = path.lstat().st_mtime
        record, _ = _read_entry(path)
        key, facts = record["key"], record["facts"]
        _checked(path, "kernel.cu", _read_checksum(path))
    except (OSError, ValueError) as error:
        problem = str(error)
    return EntryInfo(path, nbytes, modified, key, facts, problem)
