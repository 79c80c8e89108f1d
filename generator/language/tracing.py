"""What is known in this thread while one function is traced: the errors met, the negations made, the values counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import TraceError
from .node import Node

Error = TypeVar("Error", bound=TraceError)


class Tracing:
    """One run of a function over traced values.

    - `errors`: every TraceError made so far, also those that the function caught.
    - `negations`: bool node -> its negation, so that negating again and again does not walk the graph each time.
    - `values`: traced values made so far.
    """

    __slots__ = ("errors", "negations", "values")

    def __init__(self) -> None:
        self.errors: list[TraceError] = []
        self.negations: dict[Node, Node] = {}
        self.values = 0


class _Current(threading.local):
    tracing: Tracing | None = None


_current = _Current()


def current() -> Tracing | None:
    """The trace that runs in this thread, or None."""
    return _current.tracing


@contextmanager
def tracing() -> Iterator[Tracing]:
    """Within the block, this thread traces."""
    outer, made = _current.tracing, Tracing()
    _current.tracing = made
    try:
        yield made
    finally:
        _current.tracing = outer


def noted(error: Error) -> Error:
    """`error`, remembered by the trace that runs: it fails even where the traced function catches the error."""
    found = _current.tracing
    if found is not None and not any(error is other for other in found.errors):
        found.errors.append(error)
    return error
