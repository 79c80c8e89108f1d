"""YAML in and out, for files that strangers may have written.

Only plain data comes in: maps with string keys, lists, strings, numbers, booleans and null. Tags, anchors, aliases,
repeated keys, deep nesting and large files are refused, so no code can run and no small file can grow into a large one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ..generator.errors import StoreError

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 4 << 20
MAX_DEPTH = 12
MAX_NODES = 400_000
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]{1,18}")


def parse_yaml(raw: bytes, *, where: str) -> Any:
    """The plain data of one YAML document. Raises StoreError that names `where`, the line and what is not allowed."""
    import yaml

    if len(raw) > MAX_BYTES:
        raise StoreError(
            f"{where}: a tuned-config file may have {MAX_BYTES} bytes, but has {len(raw)}. Split it by kernel family."
        )
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = yaml.compose(raw.decode("utf-8"), Loader=loader)
    except UnicodeDecodeError as error:
        raise StoreError(f"{where}: the file must be UTF-8 text: {error}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise StoreError(f"{where}: not a readable YAML document: {reason}. Restore it or delete it.") from None
    return _Converter(where).convert(node, 0)


def dump_yaml(data: Mapping[str, Any], *, comment: str) -> str:
    """`data` as YAML text under `comment`, leaves on one line each, keys in the given order."""
    import yaml

    base = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    dumper = type("_Dumper", (base,), {"ignore_aliases": lambda self, value: True})
    body = yaml.dump(data, Dumper=dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body


class _Converter:
    """Turns composed nodes into plain data; knows every node it has seen, so that an alias is noticed at once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: set[int] = set()

    def convert(self, node: yaml.Node | None, depth: int) -> Any:
        if node is None:
            return None
        if id(node) in self._seen:
            self._refuse(node, "anchors and aliases are not allowed; write the value out")
        self._seen.add(id(node))
        if len(self._seen) > MAX_NODES:
            self._refuse(node, f"at most {MAX_NODES} values are allowed")
        if depth > MAX_DEPTH:
            self._refuse(node, f"values may be nested {MAX_DEPTH} deep")
        if not isinstance(node.value, list):
            return self._scalar(node)
        if node.tag == f"{_TAG}seq":
            return [self.convert(child, depth + 1) for child in node.value]
        return self._mapping(node, depth)

    def _mapping(self, node: yaml.Node, depth: int) -> dict[str, Any]:
        if node.tag != f"{_TAG}map":
            self._refuse(node, f"the tag {node.tag!r} is not allowed")
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.convert(key_node, depth + 1)
            if not isinstance(key, str):
                self._refuse(key_node, f"a key must be a string, but got {key!r}")
            if key in result:
                self._refuse(key_node, f"the key {key!r} stands twice in one map")
            result[key] = self.convert(value_node, depth + 1)
        return result

    def _scalar(self, node: yaml.Node) -> str | int | float | bool | None:
        text: str = node.value
        match node.tag.removeprefix(_TAG):
            case "str":
                return text
            case "null":
                return None
            case "bool" if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case "int" if _INT.fullmatch(text):
                return int(text)
            case "float":
                return self._float(node, text)
        self._refuse(node, f"{text[:40]!r} with tag {node.tag!r} is not a plain string, number, boolean or null")

    def _float(self, node: yaml.Node, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self._refuse(node, f"{text[:40]!r} is not a finite number")
        return value

    def _refuse(self, node: yaml.Node, reason: str) -> NoReturn:
        raise StoreError(f"{self._where}, line {node.start_mark.line + 1}: {reason}.")
