"""What commands print: JSON for machines, or tables and text for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

#: Columns of tables in files and pipes, where COLUMNS says nothing.
WIDE = 200

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_json(data: Mapping[str, Any]) -> None:
    """Writes `data` as one JSON document to standard output."""
    print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def console() -> Console:
    """A console on standard output; as wide as COLUMNS, else wide where that is no terminal: whole lines."""
    from rich.console import Console

    result = Console(highlight=False, soft_wrap=True)
    if not result.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        result.width = WIDE
    return result


def error_console() -> Console:
    """A console on standard error, for progress and notes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def table(
    columns: Iterable[str], rows: Iterable[Sequence[object]], *, title: str | None = None, right: Iterable[str] = ()
) -> Table:
    """A table of text cells; the columns named in `right` are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    aligned = set(right)
    for column in columns:
        result.add_column(column, justify="right" if column in aligned else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(str(cell)) for cell in row))  # no markup: masks hold brackets
    return result


def print_text(text: str) -> None:
    """Writes `text` to standard output as it is."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def brief(config: Mapping[str, Any]) -> str:
    """A config on one line, its flags short."""
    parts = []
    for name, value in config.items():
        if value is True:
            parts.append(name)
        elif value is not False:
            parts.append(f"{name}={value}")
    return " ".join(parts)
