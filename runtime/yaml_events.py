"""Plain data from the events of a YAML parser; `store_yaml` says what is refused and why.

A module of its own, so that PyYAML is imported only where a file has no copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import yaml
from yaml.resolver import Resolver

from ..generator.errors import StoreError

MAX_DEPTH = 12
MAX_NODES = 400_000
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]{1,18}")
#: One of `yaml.events`; their type stubs do not say which members they have.
_Event = Any


class EventReader:
    """Builds plain data from the parser's events, and refuses what is not allowed before anything is built of it.

    No tree of nodes stands between: on a file of hundreds of records that, and the collector's walks over it, cost more
    than all the rest.
    """

    def __init__(self, where: str, events: Iterator[_Event]) -> None:
        self._where = where
        self._next = events.__next__
        self._resolver: Any = Resolver()
        self._count = 0
        #: The values of plain scalars already met: a file repeats its words hundreds of times.
        self._plain: dict[str, str | int | float | bool | None] = {}

    def document(self) -> Any:
        """The data of the only document, None where there is none."""
        self._next()  # the start of the stream
        if isinstance(self._next(), yaml.StreamEndEvent):
            return None
        result = self._value(self._next(), 0)
        self._next()  # the end of the document
        event = self._next()
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(event, "not a readable YAML file: it must be a single document. Restore it or delete it")
        return result

    def _value(self, event: _Event, depth: int) -> Any:
        if event.anchor is not None:  # of an alias, too
            self._refuse(event, "anchors and aliases are not allowed; write the value out")
        self._count += 1
        if self._count > MAX_NODES:
            self._refuse(event, f"at most {MAX_NODES} values are allowed")
        if depth > MAX_DEPTH:
            self._refuse(event, f"values may be nested {MAX_DEPTH} deep")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(event, depth)
        self._check_tag(event, f"{_TAG}seq")
        result = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            result.append(self._value(event, depth + 1))
        return result

    def _mapping(self, event: _Event, depth: int) -> dict[str, Any]:
        self._check_tag(event, f"{_TAG}map")
        result: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                self._refuse(event, f"a key must be a string, but got {key!r}")
            if key in result:
                self._refuse(event, f"the key {key!r} stands twice in one map")
            result[key] = self._value(self._next(), depth + 1)
        return result

    def _check_tag(self, event: _Event, allowed: str) -> None:
        if event.tag not in (None, "!", allowed):
            self._refuse(event, f"the tag {event.tag!r} is not allowed")

    def _scalar(self, event: _Event) -> str | int | float | bool | None:
        text: str = event.value
        if event.tag not in (None, "!"):
            return self._typed(event, event.tag)
        if not event.implicit[0]:  # quoted
            return text
        if text not in self._plain:
            self._plain[text] = self._typed(event, self._tag_of(text))
        return self._plain[text]

    def _tag_of(self, text: str) -> str:
        """The tag that YAML gives a plain scalar."""
        tag: str = self._resolver.resolve(yaml.ScalarNode, text, (True, False))
        return tag

    def _typed(self, event: _Event, tag: str) -> str | int | float | bool | None:
        text: str = event.value
        match tag.removeprefix(_TAG):
            case "str":
                return text
            case "null":
                return None
            case "bool" if text.lower() in ("true", "false"):
                return text.lower() == "true"
            case "int" if _INT.fullmatch(text):
                return int(text)
            case "float":
                return self._float(event, text)
        self._refuse(event, f"{text[:40]!r} with tag {tag!r} is not a plain string, number, boolean or null")

    def _float(self, event: _Event, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self._refuse(event, f"{text[:40]!r} is not a finite number")
        return value

    def _refuse(self, event: _Event, reason: str) -> NoReturn:
        raise StoreError(f"{self._where}, line {event.start_mark.line + 1}: {reason}.")
