"""`flashsmith cache`: the compiled kernels on disk."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from . import options as o
from .output import console, print_json, table

EXAMPLES = ("flashsmith cache", "flashsmith cache --prune 200M", "flashsmith cache --clear")
_SIZE = re.compile(r"([0-9]+)\s*([kKmMgG]?)[bB]?$")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove every compiled kernel.")] = False,
    prune: Annotated[str, typer.Option("--prune", help="Remove the oldest kernels until this is left: 200M.")] = "",
    as_json: o.AsJson = False,
) -> None:
    """List, prune or clear the compiled kernels on disk."""
    from ..compiler import kernel_cache

    kernels = kernel_cache()
    limit = parse_size(prune) if prune else None
    removed = 0
    if clear:
        removed = kernels.clear()
    elif limit is not None:
        removed = kernels.prune(limit)
    entries = kernels.entries()
    total = sum(entry.nbytes for entry in entries)
    problem = kernels.problem()
    if as_json:
        print_json(
            {
                "folder": str(kernels.folder),
                "problem": problem,
                "removed": removed,
                "bytes": total,
                "entries": [
                    {
                        "path": str(e.path),
                        "bytes": e.nbytes,
                        "modified": e.modified,
                        "problem": e.problem,
                        "key": dict(e.key),
                        "facts": dict(e.facts),
                    }
                    for e in entries
                ],
            }
        )
        return
    out = console()
    if problem:
        out.print(f"The cache cannot be used: {problem}", markup=False)
    if clear or limit is not None:
        out.print(f"Removed {removed} kernels.")
    if entries:
        rows = [
            (
                entry.key.get("family", "?"),
                entry.key.get("target", "?"),
                entry.facts.get("spec", "?"),
                f"{entry.nbytes / 1024:.0f}",
                _age(entry.modified),
                entry.problem or "ok",
                entry.path.name[-12:],
            )
            for entry in entries
        ]
        out.print(table(("family", "arch", "spec", "KiB", "age", "state", "key"), rows, right=("KiB", "age")))
    out.print(f"{len(entries)} kernels, {total / (1 << 20):.1f} MiB in {kernels.folder}", markup=False)


def parse_size(text: str) -> int:
    """The bytes that "200M", "1g" or "4096" say. Raises UsageError."""
    from ...generator.errors import UsageError

    match = _SIZE.match(text.strip())
    if match is None:
        raise UsageError(f"--prune takes a size such as 200M or 1G, but got {text!r}.")
    return int(match[1]) * _UNITS[match[2].lower()]


def _age(modified: float) -> str:
    seconds = max(0.0, time.time() - modified)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
