"""The one Jinja environment, and the digest of everything that decides a generated text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import RenderError

if TYPE_CHECKING:
    from jinja2 import Environment

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
TEMPLATE_ROOT = PACKAGE_ROOT / "templates"


def _finalize(value: Any) -> Any:
    """Refuses values whose Python spelling is not C++ (None, True, 1e-05); the `cpp` filter prints those."""
    if value is None or isinstance(value, bool | float):
        raise RenderError(f"A template printed the Python value {value!r}; use the cpp filter.")
    return value


def cpp(value: bool | int | float | str) -> str:
    """`value` as a C++ literal: true, 3, 0.125f."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value!r}f"
    return str(value)


def fill(items: Iterable[str], indent: int, *, width: int = 100, quote: bool = False) -> str:
    """`items` joined by ", " in lines of at most `width` columns, the later ones indented by `indent`.

    With `quote`, each line is a C++ string literal of its own, as a long operand list of inline PTX needs.
    """
    lines: list[str] = [""]
    room = width - indent - (3 if quote else 1)
    for item in items:
        if lines[-1] and len(lines[-1]) + 2 + len(item) > room:
            lines[-1] += ","
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + item
    if quote:
        lines = [f'"{line} "' if index + 1 < len(lines) else f'"{line}"' for index, line in enumerate(lines)]
    return ("\n" + " " * indent).join(lines)


@cache
def environment() -> Environment:
    """The environment every template is rendered in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(TEMPLATE_ROOT),
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["cpp"] = cpp
    env.filters["fill"] = fill
    return env


@cache
def generator_digest() -> str:
    """Hex SHA-256 over every template and every generator module.

    It is part of each cache key: a changed template or a changed emitter never meets an old binary, and a hit needs no
    rendering.
    """
    digest = hashlib.sha256()
    files = [*TEMPLATE_ROOT.rglob("*.jinja"), *(PACKAGE_ROOT / "generator").rglob("*.py")]
    for path in sorted(files, key=lambda p: p.relative_to(PACKAGE_ROOT).as_posix()):
        digest.update(path.relative_to(PACKAGE_ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
