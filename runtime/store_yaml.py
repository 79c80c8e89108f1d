"""YAML in and out, for files that strangers may have written.

Only plain data comes in: maps with string keys, lists, strings, numbers, booleans and null. Tags, anchors, aliases,
repeated keys, deep nesting and large files are refused, so no code can run and no small file can grow into a large one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..generator.errors import StoreError

MAX_BYTES = 4 << 20


def parse_yaml(raw: bytes, *, where: str) -> Any:
    """The plain data of one YAML document. Raises StoreError that names `where`, the line and what is not allowed."""
    import yaml

    from .yaml_events import EventReader

    if len(raw) > MAX_BYTES:
        raise StoreError(
            f"{where}: a tuned-config file may have {MAX_BYTES} bytes, but has {len(raw)}. Split it by kernel family."
        )
    try:
        events = yaml.parse(raw.decode("utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return EventReader(where, events).document()
    except UnicodeDecodeError as error:
        raise StoreError(f"{where}: the file must be UTF-8 text: {error}.") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{where}: not a readable YAML document: {reason}. Restore it or delete it.") from None


def dump_yaml(data: Mapping[str, Any], *, comment: str) -> str:
    """`data` as YAML text under `comment`, leaves on one line each, keys in the given order."""
    import yaml

    base = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    dumper = type("_Dumper", (base,), {"ignore_aliases": lambda self, value: True})
    body = yaml.dump(data, Dumper=dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body
