"""The indexed copy of a file of tuned configs: JSON, a line for each class of specs, in the cache directory.

A call asks for one class of the two dozen that a file holds, so a copy is read whole (a fraction of a millisecond) but
only the asked line is parsed. It is plain text:

    SHA-256 of all that follows
    {"file": all of the YAML but its records, "classes": [class, ...]}
    [[number of the record, record], ...]      one line for each class, in that order
    [[number, record], ...]                    last, what was no record when the copy was made

The copy is derived and never believed further than the YAML itself: its name is the SHA-256 of the YAML's bytes, so
another text has another copy; a copy that others may write, or whose own digest does not fit, is none, and a new one is
made; every record of it goes through `record_from_dict` when it is read, as it did when the copy was made.

Why it is not shipped beside the packaged YAML: parsing that costs 0.1 to 0.2 s once per installation, where a
first call also compiles its kernel for seconds; a shipped copy would double the data, put a line that nobody can review
into every change of a record, and be wrong after each edit by hand until somebody remembers to make it anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..generator.errors import StoreError
from . import private_folder, variables
from .store_schema import SpecClass, record_from_dict
from .store_yaml import MAX_BYTES

#: Folder of the copies below the cache directory; another layout takes another name.
FOLDER = "tuned-v2"
#: Every text of a file has its own copy, and a tuner at work writes many: only the newest are kept.
KEPT = 32
#: JSON has more quotes and escapes than YAML, and each class its line.
_MAX_BYTES = 3 * MAX_BYTES

#: A record's number in the file, and its plain data.
Entry = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Sections:
    """A file of tuned configs, split by class of specs; each part is JSON text that is parsed when it is asked for.

    `envelope` is what the file says beside its records; `rest` holds the entries that were no records.
    """

    envelope: Mapping[str, Any]
    classes: Mapping[str, bytes]
    rest: bytes

    def entries(self, spec_class: SpecClass) -> list[Entry]:
        """The entries of one class in the order of the file, [] where it has none. Raises StoreError."""
        line = self.classes.get(_key(spec_class))
        return [] if line is None else _entries(line)

    def other_entries(self) -> list[Entry]:
        """The entries that were no records when the file was split. Raises StoreError."""
        return _entries(self.rest)

    def all_entries(self) -> list[Entry]:
        """Every entry in the order of the file. Raises StoreError."""
        lines = (*self.classes.values(), self.rest)
        return sorted((entry for line in lines for entry in _entries(line)), key=lambda entry: entry[0])


def split(data: Any) -> Sections:
    """The sections of a file's plain data, each record checked by the schema. Raises StoreError where it is no map.

    Where `records` is no list, `envelope` holds it, and there are no sections.
    """
    if not isinstance(data, Mapping):
        raise StoreError(f"a tuned-config file must be a map with schema and records, but got {type(data).__name__}.")
    records = data.get("records")
    if not isinstance(records, list):
        return Sections({**data, "records": records}, {}, _line([]))
    classes: dict[str, list[Entry]] = {}
    rest: list[Entry] = []
    for number, entry in enumerate(records):
        try:
            record = record_from_dict(entry, where=f"record {number}")
        except StoreError:
            rest.append((number, entry))
        else:
            classes.setdefault(_key(record.spec_class), []).append((number, entry))
    envelope = {name: value for name, value in data.items() if name != "records"}
    return Sections(envelope, {key: _line(entries) for key, entries in classes.items()}, _line(rest))


def load_copy(raw: bytes) -> Sections | None:
    """The sections of the YAML `raw` from its copy; None where there is no whole copy that this user can trust."""
    path = copy_path(raw)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if private_folder.folder_problem(path.parent) is None:
            return from_bytes(private_folder.read_trusted(path, limit=_MAX_BYTES))
    return None


def save_copy(raw: bytes, sections: Sections) -> None:
    """Keeps `sections` as the copy of the YAML `raw`; where the cache directory cannot be used, nothing."""
    path = copy_path(raw)
    with contextlib.suppress(OSError):
        private_folder.make_private(path.parent.parent)
        if private_folder.folder_problem(path.parent.parent, shared=True) is not None:
            return
        private_folder.make_private(path.parent)
        if private_folder.folder_problem(path.parent) is not None:
            return
        _drop_oldest(path.parent)
        # Not synchronised with the disk: half a copy does not have its digest.
        temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
        try:
            private_folder.write_new(temporary, to_bytes(sections))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def copy_path(raw: bytes) -> Path:
    """Where the copy of the YAML `raw` is kept."""
    return Path(variables.cache_dir()) / FOLDER / f"{hashlib.sha256(raw).hexdigest()[:40]}.jsonl"


def to_bytes(sections: Sections) -> bytes:
    """The text of a copy, as the head of this module describes it."""
    head = {"file": sections.envelope, "classes": list(sections.classes)}
    body = b"\n".join((_json(head), *sections.classes.values(), sections.rest))
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def from_bytes(text: bytes) -> Sections:
    """The sections that `to_bytes` wrote. Raises ValueError where a byte is missing or another."""
    digest, *lines = text.split(b"\n")
    if digest != hashlib.sha256(memoryview(text)[len(digest) + 1 :]).hexdigest().encode():
        raise ValueError("the digest of a copy does not fit")
    first, *parts, rest = lines
    match parse_line(first):
        case {"file": dict() as envelope, "classes": [*classes]}:
            return Sections(envelope, dict(zip(map(str, classes), parts, strict=True)), rest)
    raise ValueError("a copy starts with its head")


def parse_line(line: bytes) -> Any:
    """The plain data of one line. Raises ValueError."""
    return json.loads(line)


def _entries(line: bytes) -> list[Entry]:
    try:
        return [(int(number), entry) for number, entry in parse_line(line)]
    except (ValueError, TypeError):  # whole, yet not as `split` writes it: by hand
        raise StoreError(f"its copy was changed. Remove {Path(variables.cache_dir()) / FOLDER}.") from None


def _line(entries: list[Entry]) -> bytes:
    return _json(entries)


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _key(spec_class: SpecClass) -> str:
    """The class as text; two classes differ in it."""
    return json.dumps(list(spec_class.to_dict().values()))


def _drop_oldest(folder: Path) -> None:
    """Leaves room for one more copy. Temporary files of writers that died count, too."""
    with os.scandir(folder) as found:
        files = sorted((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path) for entry in found)
    for _, path in files[: max(len(files) - KEPT + 1, 0)]:
        with contextlib.suppress(OSError):
            os.unlink(path)
