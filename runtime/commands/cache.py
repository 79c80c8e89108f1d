"""`flashsmith cache`: the compiled kernels on disk, and what the CPU emulator built."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .naming import short_problem
from .output import console, print_json, table

if TYPE_CHECKING:
    from rich.console import Console

    from ..cache import EntryInfo

EXAMPLES = ("flashsmith cache", "flashsmith cache --prune 200M", "flashsmith cache --clear")
_SIZE = re.compile(r"([0-9]{1,18})\s*([kKmMgG]?)[bB]?")
_COMMON = ("KiB", "age", "state", "key")
_SUMMARY = ("count", "KiB", "newest", "damaged")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything compiled.")] = False,
    prune: Annotated[str, typer.Option("--prune", help="Remove the oldest entries until this is left: 200M.")] = "",
    every: Annotated[bool, typer.Option("--all", help="List every entry, not groups of them.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """List, prune or clear compiled kernels and emulator programs."""
    from ..cache import excess
    from ..compiler import kernel_cache
    from ..emulator import object_cache

    kernels = kernel_cache()
    limit = parse_size(prune) if prune else None
    removed = [0, 0]
    if clear:
        removed = [kernels.clear(), object_cache.clear()]
    elif limit is not None:
        for entry in excess([*kernels.entries(), *object_cache.entries()], limit):
            if entry.path.parent == kernels.folder:
                removed[0] += kernels.remove(entry.path)
            else:
                removed[1] += object_cache.remove(entry.path)
    entries, programs = kernels.entries(), object_cache.entries()
    problem = kernels.problem()
    if as_json:
        print_json(
            {
                "folder": str(kernels.folder),
                "problem": problem,
                "removed": removed[0],
                "bytes": _total(entries),
                "entries": [{**_plain(e), "key": dict(e.key), "facts": dict(e.facts)} for e in entries],
                "emulator": {
                    "folder": str(object_cache.folder()),
                    "removed": removed[1],
                    "bytes": _total(programs),
                    "entries": [_plain(e) for e in programs],
                },
            }
        )
        return
    out = console()
    if problem:
        out.print(f"The cache cannot be used: {problem}", markup=False)
    changed = clear or limit is not None
    if changed:
        out.print(f"Removed {removed[0]} kernels and {removed[1]} programs of the emulator. Left:")
    if not every and not changed:
        _show_groups(out, entries, programs)
    if entries and every:
        rows = [
            (
                entry.key.get("family", "?"),
                entry.key.get("target", "?"),
                short_problem(entry.facts.get("spec", "?"), op=False),
                *_common(entry),
            )
            for entry in entries
        ]
        out.print(table(("family", "arch", "spec", *_COMMON), rows, right=("KiB", "age")))
    if programs and every:
        builds = [(entry.path.name.rpartition("-")[0], *_common(entry)) for entry in programs]
        out.print(table(("emulator", *_COMMON), builds, right=("KiB", "age")))
    out.print(f"{len(entries)} kernels, {_mebibytes(entries)} in {kernels.folder}", markup=False)
    out.print(
        f"{len(programs)} programs of the emulator, {_mebibytes(programs)} in {object_cache.folder()}", markup=False
    )


def _show_groups(out: Console, entries: Sequence[EntryInfo], programs: Sequence[EntryInfo]) -> None:
    """One line for the kernels of one family, architecture and spec, and one for each kind of emulator program."""
    groups: dict[tuple[str, ...], list[EntryInfo]] = {}
    for entry in entries:
        spec = short_problem(entry.facts.get("spec", "?"), op=False)
        groups.setdefault((entry.key.get("family", "?"), entry.key.get("target", "?"), spec), []).append(entry)
    if groups:
        rows = [(*key, *_summary(members)) for key, members in sorted(groups.items())]
        out.print(table(("family", "arch", "spec", *_SUMMARY), rows, right=_SUMMARY))
    groups = {}
    for entry in programs:
        groups.setdefault((entry.path.name.rpartition("-")[0],), []).append(entry)
    if groups:
        rows = [(*key, *_summary(members)) for key, members in sorted(groups.items())]
        out.print(table(("emulator", *_SUMMARY), rows, right=_SUMMARY))


def _summary(members: Sequence[EntryInfo]) -> tuple[str, str, str, str]:
    bad = sum(bool(entry.problem) for entry in members)
    return (
        str(len(members)),
        f"{_total(members) / 1024:.0f}",
        _age(max(entry.modified for entry in members)),
        str(bad) if bad else "-",
    )


def parse_size(text: str) -> int:
    """The bytes that "200M", "1g" or "4096" say. Raises UsageError."""
    from ...generator.errors import UsageError

    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--prune takes a size such as 200M or 1G, but got {text!r}.")
    return int(match[1]) * _UNITS[match[2].lower()]


def _age(modified: float) -> str:
    seconds = max(0.0, time.time() - modified)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _common(entry: EntryInfo) -> tuple[str, str, str, str]:
    """The columns that every entry has."""
    return f"{entry.nbytes / 1024:.0f}", _age(entry.modified), entry.problem or "ok", entry.path.name[-12:]


def _plain(entry: EntryInfo) -> dict[str, Any]:
    return {"path": str(entry.path), "bytes": entry.nbytes, "modified": entry.modified, "problem": entry.problem}


def _total(entries: Sequence[EntryInfo]) -> int:
    return sum(entry.nbytes for entry in entries)


def _mebibytes(entries: Sequence[EntryInfo]) -> str:
    return f"{_total(entries) / (1 << 20):.1f} MiB"
