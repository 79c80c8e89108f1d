"""`Node`: one operation of an expression graph, and the captured values it may stand for.

Nodes are interned: two nodes that mean the same operation on the same operands are the same object, so common
subexpressions are shared by construction and comparing graphs costs nothing.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from .ops import result_dtype, round_fp32
from .ranges import ANY, LEAF_RANGE, SCALAR_RANGES, TABLE_RANGES, Range, range_of

MAX_TABLE_DIMS = 8
#: Operations of one graph.
MAX_NODES = 4096
SCALAR_DTYPES = ("int32", "int64", "fp32")
#: dtype of a captured tensor -> type of its elements in the language.
TABLE_DTYPES = {
    "fp32": "fp32", "fp16": "fp32", "bf16": "fp32", "int32": "int", "int64": "int", "uint8": "int", "bool": "bool",
}  # fmt: skip

#: Short, so that a line of CUDA text can hold two of them.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,23}\Z")
_DERIVED_NAME = re.compile(r".*_(stride|size)_\d+\Z")


@dataclass(frozen=True, slots=True, order=True)
class ScalarSlot:
    """A captured number: a kernel argument whose value may change from call to call. dtype int32, int64 or fp32."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True, order=True)
class TableSlot:
    """A captured tensor: a pointer and `ndim` strides among the kernel's arguments. dtype is a key of TABLE_DTYPES."""

    name: str
    dtype: str
    ndim: int


Payload = bool | int | float | str | ScalarSlot | TableSlot | None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class Node:
    """One operation. Made by `make` alone, which interns it; equality is identity.

    `value` is a constant, a leaf's name or a slot. `range` bounds an integer node, `leaves` names what it depends on
    (leaf names, and "load" if it reads a table).
    """

    op: str
    dtype: str
    args: tuple[Node, ...]
    value: Payload
    range: Range
    leaves: frozenset[str]

    def __repr__(self) -> str:
        return f"<{self.op} {self.value if self.value is not None else ''} {self.dtype}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.op, self.args, self.value, self.dtype)

    @property
    def is_const(self) -> bool:
        return self.op == "const"


_interned: WeakValueDictionary[tuple[Any, ...], Node] = WeakValueDictionary()
_lock = threading.Lock()


def _renew_lock() -> None:
    """A forked child must not wait for a thread it does not have."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def make(op: str, args: tuple[Node, ...] = (), value: Payload = None, dtype: str | None = None) -> Node:
    """The one node of `op` over `args`. `dtype` is needed for constants alone. The operands' types must fit."""
    if dtype is None:
        dtype = _dtype_of(op, args, value)
    # repr tells 0.0 from -0.0 and 1 from True.
    key = (op, dtype, args, repr(value))
    with _lock:
        node = _interned.get(key)
        if node is None:
            leaves = frozenset().union(*(a.leaves for a in args)) | _own_leaves(op, value)
            node = Node(op, dtype, args, value, _range_of(op, args, value, dtype), leaves)
            _interned[key] = node
    return node


def _dtype_of(op: str, args: tuple[Node, ...], value: Payload) -> str:
    if op == "leaf":
        return "fp32" if value == "score" else "int"
    if isinstance(value, ScalarSlot):
        return "fp32" if value.dtype == "fp32" else "int"
    if isinstance(value, TableSlot):
        return TABLE_DTYPES[value.dtype]
    dtype = result_dtype(op, tuple(a.dtype for a in args))
    assert dtype is not None, f"{op} does not take {[a.dtype for a in args]}"
    return dtype


def _own_leaves(op: str, value: Payload) -> frozenset[str]:
    if op == "leaf":
        return frozenset((str(value),))
    return frozenset(("load",)) if op == "load" else frozenset()


def _range_of(op: str, args: tuple[Node, ...], value: Payload, dtype: str) -> Range:
    if dtype != "int":
        return ANY
    if op == "const":
        assert isinstance(value, int)
        return value, value
    if op == "leaf":
        return LEAF_RANGE
    if isinstance(value, ScalarSlot):
        return SCALAR_RANGES[value.dtype]
    if isinstance(value, TableSlot):
        return TABLE_RANGES[value.dtype]
    return range_of(op, tuple(a.range for a in args if a.dtype == "int"))


def const(value: bool | int | float) -> Node:
    """The node of a constant; floats are rounded to fp32."""
    if isinstance(value, bool):
        return make("const", value=value, dtype="bool")
    if isinstance(value, int):
        return make("const", value=value, dtype="int")
    return make("const", value=round_fp32(value), dtype="fp32")


def leaf(name: str) -> Node:
    """The node of an index, a size, the score or a tile's bound."""
    return make("leaf", value=name)


def walk(*roots: Node) -> list[Node]:
    """Every node under `roots` once, operands before users, in a fixed order."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)
    return order


def rewrite(roots: Iterable[Node], change: Callable[[Node, tuple[Node, ...]], Node]) -> dict[Node, Node]:
    """Every node under `roots` -> what `change(node, new operands)` makes of it, operands first."""
    done: dict[Node, Node] = {}
    for node in walk(*roots):
        done[node] = change(node, tuple(done[a] for a in node.args))
    return done


def is_slot_name(name: object) -> bool:
    """Whether `name` can name a captured value in the CUDA text."""
    return isinstance(name, str) and _NAME.match(name) is not None and _DERIVED_NAME.match(name) is None
