"""Reading files of tuned configs, fast and safely: one class of specs for a call, all of a file for people.

Nothing here raises for bad content: it is ignored, named in `problems` and logged once. What a file said is kept per
process until its time, size or inode change; between processes it is kept as an indexed copy (see `store_copy`).
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..generator.errors import StoreError
from .store_copy import Entry, Sections, load_copy, save_copy, split
from .store_schema import SCHEMA_VERSION, Record, SpecClass, record_from_dict
from .store_yaml import MAX_BYTES, parse_yaml

logger = logging.getLogger("flashsmith.store")

#: The time, size and inode of a file's content on disk.
_Identity = tuple[int, int, int]
_NOTHING = Sections({}, {}, b"[]")


@dataclass(frozen=True, slots=True)
class TunedFile:
    """What one file said: its good records, and one message for each thing that was ignored."""

    path: Path
    records: tuple[Record, ...]
    problems: tuple[str, ...] = ()
    usable: bool = True


@dataclass(slots=True)
class _Opened:
    """A file as far as this process has read it. `spare` are records among the entries that once were none."""

    identity: _Identity
    sections: Sections
    spare: tuple[tuple[int, Record], ...] = ()
    problem: str = ""
    by_class: dict[SpecClass, tuple[Record, ...]] = field(default_factory=dict)
    whole: TunedFile | None = None


#: Entries are replaced whole, so that threads need no lock: at worst two of them read the same.
_opened: dict[Path, _Opened] = {}
_warned: set[str] = set()


def read_class(path: Path, spec_class: SpecClass) -> tuple[Record, ...]:
    """The good records of one class in `path`, in its order; the others are not made. () where there are none."""
    opened = _open(path)
    if opened is None:
        return ()
    found = opened.by_class.get(spec_class)
    if found is None:
        records, problems = _records(lambda: opened.sections.entries(spec_class))
        _warn_of(path, problems)
        mine = sorted((*records, *opened.spare), key=lambda record: record[0])
        found = tuple(record for _, record in mine if record.spec_class == spec_class)
        opened.by_class[spec_class] = found
    return found


def read_file(path: Path, *, keep_copy: bool = True) -> TunedFile:
    """All that `path` says. `keep_copy` leaves an indexed copy for later readers of this very text."""
    opened = _open(path, keep_copy=keep_copy)
    if opened is None:
        return TunedFile(path, ())
    if opened.whole is None:
        if opened.problem:
            opened.whole = TunedFile(path, (), (opened.problem,), usable=False)
        else:
            records, problems = _records(opened.sections.all_entries)
            _warn_of(path, problems)
            opened.whole = TunedFile(path, tuple(record for _, record in records), tuple(problems))
    return opened.whole


def forget(path: Path | None = None) -> None:
    """Drops what this process remembers of `path`; without it, of all files and of messages already logged."""
    if path is not None:
        _opened.pop(path, None)
        return
    _opened.clear()
    _warned.clear()


def warn_once(message: str, *, level: int = logging.WARNING) -> None:
    """Logs `message` the first time this process meets it."""
    if message not in _warned:
        _warned.add(message)
        logger.log(level, "%s", message)


def _open(path: Path, *, keep_copy: bool = True) -> _Opened | None:
    """What is known of the file's present content; None where there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    identity = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = _opened.get(path)
    if known is not None and known.identity == identity:
        return known
    problems: list[str] = []
    try:
        if not stat.S_ISREG(status.st_mode):  # reading a named pipe would wait for its writer
            raise StoreError("it is no regular file")
        sections = _sections(path, keep_copy=keep_copy)
        _check_envelope(path, sections.envelope)
        spare, problems = _records(sections.other_entries)
        opened = _Opened(identity, sections, tuple(spare))
    except (OSError, StoreError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        opened = _Opened(identity, _NOTHING, problem=reason)
        warn_once(f"Ignored {path}: {reason}")
    _opened[path] = opened
    _warn_of(path, problems)
    return opened


def _sections(path: Path, *, keep_copy: bool) -> Sections:
    """The sections of the file from its copy, else from its YAML. Raises OSError and StoreError."""
    with open(path, "rb") as stream:
        raw = stream.read(MAX_BYTES + 1)
    sections = load_copy(raw)
    if sections is None:
        sections = split(parse_yaml(raw, where="the text"))
        if keep_copy:
            save_copy(raw, sections)
    return sections


def _check_envelope(path: Path, data: Mapping[str, Any]) -> None:
    """Raises StoreError where the file is of another schema, or does not belong at `path`."""
    if type(data.get("schema")) is not int or data["schema"] != SCHEMA_VERSION:
        raise StoreError(
            f"the schema must be {SCHEMA_VERSION}, but got {data.get('schema')!r}."
            " Tune again, or use the flashsmith version that wrote it."
        )
    unknown = sorted(set(data) - {"schema", "family", "arch", "gpu", "records"})
    if unknown:
        raise StoreError(f"unknown keys: {', '.join(unknown)}. Known: schema, family, arch, gpu, records.")
    if data.get("family") != path.stem or data.get("arch") != path.parent.parent.name:
        raise StoreError(
            f"family {data.get('family')!r} and arch {data.get('arch')!r} must be those of the path."
            " Move the file to <arch>/<gpu>/<family>.yaml."
        )
    if "records" in data:  # a list of them would be in sections
        raise StoreError("records must be a list.")


def _records(read: Callable[[], list[Entry]]) -> tuple[list[tuple[int, Record]], list[str]]:
    """The good records among the entries that `read` returns, with their numbers, and a message for each other."""
    records: list[tuple[int, Record]] = []
    problems: list[str] = []
    try:
        entries = read()
    except StoreError as error:
        return [], [str(error)]
    for number, entry in entries:
        try:
            records.append((number, record_from_dict(entry, where=f"record {number}")))
        except StoreError as error:
            problems.append(str(error))
    return records, problems


def _warn_of(path: Path, problems: list[str]) -> None:
    if problems:
        first, *others = problems
        more = f" ({len(others)} more like it)" if others else ""
        warn_once(f"Ignored part of {path}: {first}{more}")
