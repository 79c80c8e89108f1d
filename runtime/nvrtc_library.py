"""Which libnvrtc this environment has, told from files alone.

Loading libnvrtc takes 100 to 300 ms, and a call that finds its kernel in the cache has no need of it; but the cache's
key holds the compiler. So the library is looked for where CuPy's loader looks, and named by the build id that its
linker wrote into it. After a real load, `nvrtc.compiler()` corrects a wrong guess.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_BUILTINS = re.compile(r"libnvrtc-builtins\.so\.(\d+\.\d+)")
_VERSIONED = re.compile(r"libnvrtc\.so\.(\d+\.\d+)")
_NOTE_SEGMENT = 4
_BUILD_ID_NOTE = 3


@dataclass(frozen=True, slots=True)
class Compiler:
    """One libnvrtc: `version` such as "13.0" ("" where only loading would tell), `build` its content's identity."""

    version: str
    build: str
    path: str

    @property
    def identity(self) -> str:
        """The compiler as a cache key holds it: equal for equal library files, wherever they lie."""
        return f"NVRTC build {self.build}"

    def __str__(self) -> str:
        return f"NVRTC {self.version or 'of unknown version'} (build {self.build[:12]})"


def cupy_cuda_major() -> int | None:
    """The CUDA major version of the installed CuPy wheel, 12 or 13; None for no CuPy, or one that does not say."""
    spec = find_spec("cupy")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            return int(json.loads((Path(folder) / ".data" / "_wheel.json").read_text())["cuda"].split(".")[0])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def installed_compiler() -> Compiler | None:
    """The libnvrtc that CuPy would load, or None where none is found. Loads nothing; well under 1 ms once warm."""
    major = cupy_cuda_major()
    for folder, number in _places((major,) if major else (13, 12)):
        path = os.path.join(folder, f"libnvrtc.so.{number}")
        found = compiler_at(path)
        if found is not None:
            return found
    return None


def compiler_at(path: str) -> Compiler | None:
    """The compiler in the library file `path`; None where it cannot be read."""
    try:
        stat = os.stat(path)
        return _compiler_at(path, stat.st_size, stat.st_mtime_ns)
    except OSError:
        return None


def loaded_library(major: int) -> str | None:
    """The path of the libnvrtc of CUDA `major` that is mapped into this process; None for no /proc, or none loaded.

    Another major version may be there too: torch brings the one it was built with.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                path = line.rstrip("\n").partition("/")[2]
                if os.path.basename(path).startswith(f"libnvrtc.so.{major}"):
                    return "/" + path
    except OSError:
        pass
    return None


def build_id(path: str) -> str:
    """The GNU build id of an ELF file, in hex; where it has none, a hash of its size, first and last 64 KiB."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:6] == b"\x7fELF\x02\x01":  # 64-bit, little-endian
            offset, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
            file.seek(offset)
            table = file.read(size * count)
            for i in range(len(table) // size if size else 0):
                kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", table, i * size)
                if kind == _NOTE_SEGMENT and length < 1 << 20:
                    file.seek(start)
                    found = _gnu_build_id(file.read(length))
                    if found:
                        return found
        file.seek(0, os.SEEK_END)
        length = file.tell()
        digest = hashlib.sha256(str(length).encode())
        for position in (0, max(0, length - 65536)):
            file.seek(position)
            digest.update(file.read(65536))
        return digest.hexdigest()[:40]


@lru_cache(maxsize=8)
def _compiler_at(path: str, size: int, mtime_ns: int) -> Compiler:
    return Compiler(version=_version_beside(path), build=build_id(path), path=path)


def _places(majors: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Folders that may hold libnvrtc with the major version beside each, in the order of CuPy's loader."""
    for major in majors:
        for entry in sys.path:
            yield os.path.join(entry, "nvidia", f"cu{major}", "lib"), major
            yield os.path.join(entry, "nvidia", "cuda_nvrtc", "lib"), major
    folders = [os.path.join(p, "lib") for p in (os.environ.get("CONDA_PREFIX"),) if p]
    folders += [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    folders += ["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/aarch64-linux-gnu"]
    folders += [os.path.join(os.environ[v], "lib64") for v in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(v)]
    for folder in folders:
        for major in majors:
            yield folder, major


def _version_beside(path: str) -> str:
    """ "13.0" from the name of the library itself, or of the one libnvrtc-builtins in its folder; "" if unclear."""
    match = _VERSIONED.match(os.path.basename(os.path.realpath(path)))
    if match:
        return match[1]
    versions = {m[1] for name in os.listdir(os.path.dirname(path)) if (m := _BUILTINS.match(name))}
    return versions.pop() if len(versions) == 1 else ""


def _gnu_build_id(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        name = notes[at + 12 : at + 12 + name_size]
        at += 12 + (name_size + 3) // 4 * 4
        if kind == _BUILD_ID_NOTE and name == b"GNU\0":
            return notes[at : at + size].hex()
        at += (size + 3) // 4 * 4
    return ""
