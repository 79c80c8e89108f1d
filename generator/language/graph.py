"""`Graph`: a mask or score function as a directed acyclic graph of operations, and its plain-data form.

Nodes are interned: two nodes that mean the same operation on the same operands are the same object, so common
subexpressions are shared by construction and comparing graphs costs nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, total_ordering
from typing import Any
from weakref import WeakValueDictionary

from ..digest import digest_of
from ..errors import SpecError
from .ops import ARITY, INDEX_LEAVES, INT64_MAX, INT64_MIN, SIZE_LEAVES, TILE_LEAVES, fp32_text, result_dtype, round_fp32
from .ranges import ANY, LEAF_RANGE, SCALAR_RANGES, TABLE_RANGES, Range, range_of

MAX_NODES = 4096
MAX_TABLE_DIMS = 8
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


@total_ordering
@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """A traced function: `kind` "mask" (root bool) or "score" (root fp32).

    `scalars` and `tables` are its captured numbers and tensors, in the order of their first use: the order of
    `Traced.scalars` and `Traced.tables`. Equal graphs have equal `digest`, in any process. Raises SpecError where the
    root has the wrong type or two slots share a name.
    """

    kind: str
    root: Node

    def __post_init__(self) -> None:
        if self.kind not in ("mask", "score"):
            raise SpecError(f"A graph's kind must be 'mask' or 'score', but got {self.kind!r}.")
        wanted = "bool" if self.kind == "mask" else "fp32"
        if self.root.dtype != wanted:
            raise SpecError(f"A {self.kind} graph must give {wanted}, but its root gives {self.root.dtype}.")
        if self.kind == "mask" and "score" in self.root.leaves:
            raise SpecError("A mask graph must not use the score: a mask is decided by indices and captured values.")
        if not self.root.leaves.isdisjoint(TILE_LEAVES):
            raise SpecError("A traced graph must not use a tile's bounds.")
        names = [slot.name for slot in (*self.scalars, *self.tables)]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise SpecError(f"Captured values of a graph need distinct names, but {', '.join(repeated)} is repeated.")

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node once, operands before users."""
        return tuple(walk(self.root))

    @cached_property
    def scalars(self) -> tuple[ScalarSlot, ...]:
        return tuple(dict.fromkeys(n.value for n in self.nodes if isinstance(n.value, ScalarSlot)))

    @cached_property
    def tables(self) -> tuple[TableSlot, ...]:
        return tuple(dict.fromkeys(n.value for n in self.nodes if isinstance(n.value, TableSlot)))

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of `to_dict()`."""
        return digest_of(self.to_dict())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.kind == other.kind and self.root is other.root

    def __hash__(self) -> int:
        return hash((self.kind, self.root))

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return (self.kind, self.digest) < (other.kind, other.digest)

    def __repr__(self) -> str:
        return f"Graph({self.kind}: {self.describe()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Graph.from_dict, (self.to_dict(),)

    def describe(self) -> str:
        """The expression on one line, as a user would write it; very long ones are named by size and digest."""
        from .describe import describe

        return describe(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: nodes in order, each `[op, operand positions, value]`. `from_dict` reads it back."""
        place = {node: i for i, node in enumerate(self.nodes)}
        nodes = [[n.op, [place[a] for a in n.args], _plain(n)] for n in self.nodes]
        return {"kind": self.kind, "nodes": nodes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Graph:
        """The graph `to_dict` wrote. Raises SpecError for anything else, whoever wrote it."""
        if not isinstance(data, Mapping) or set(data) != {"kind", "nodes"}:
            raise SpecError("A graph is a mapping with the keys kind and nodes.")
        rows = data["nodes"]
        if not isinstance(rows, list | tuple) or not 0 < len(rows) <= MAX_NODES:
            raise SpecError(f"A graph's nodes must be a list of 1 to {MAX_NODES} entries.")
        nodes: list[Node] = []
        for row in rows:
            nodes.append(_node_from(row, nodes))
        if set(walk(nodes[-1])) != set(nodes):
            raise SpecError("Every node of a graph must be used by its last one.")
        return cls(kind=data["kind"], root=nodes[-1])


def _plain(node: Node) -> Any:
    value = node.value
    if isinstance(value, ScalarSlot):
        return [value.name, value.dtype]
    if isinstance(value, TableSlot):
        return [value.name, value.dtype, value.ndim]
    return fp32_text(value) if isinstance(value, float) else value


def _node_from(row: Any, earlier: list[Node]) -> Node:
    wrong = SpecError(f"A graph's node must be [op, operands, value] of a known operation, but got {row!r:.200}.")
    if not isinstance(row, list | tuple) or len(row) != 3:
        raise wrong
    op, positions, value = row
    if not isinstance(op, str) or not isinstance(positions, list | tuple):
        raise wrong
    if any(type(p) is not int or not 0 <= p < len(earlier) for p in positions):
        raise wrong
    args = tuple(earlier[p] for p in positions)
    if op in ARITY:
        # A shift by an amount that may leave [0, 63] has no meaning in C++.
        shift_is_wild = op in ("shl", "shr") and not (0 <= args[-1].range[0] and args[-1].range[1] <= 63)
        if len(args) != ARITY[op] or value is not None or shift_is_wild:
            raise wrong
        if result_dtype(op, tuple(a.dtype for a in args)) is None:
            raise wrong
        return make(op, args)
    if op == "load":
        slot = _table_from(value)
        if slot is None or len(args) != slot.ndim or any(a.dtype != "int" for a in args):
            raise wrong
        return make(op, args, slot)
    node = None if args else _leaf_from(op, value)
    if node is None:
        raise wrong
    return node


def _table_from(value: Any) -> TableSlot | None:
    if not isinstance(value, list | tuple) or len(value) != 3:
        return None
    name, dtype, ndim = value
    known = isinstance(dtype, str) and dtype in TABLE_DTYPES
    if not known or not is_slot_name(name) or type(ndim) is not int or not 0 <= ndim <= MAX_TABLE_DIMS:
        return None
    return TableSlot(name, dtype, ndim)


def _leaf_from(op: str, value: Any) -> Node | None:
    if op == "leaf" and isinstance(value, str) and value in (*INDEX_LEAVES, *SIZE_LEAVES, "score"):
        return leaf(value)
    if op == "scalar" and isinstance(value, list | tuple) and len(value) == 2:
        name, dtype = value
        if is_slot_name(name) and isinstance(dtype, str) and dtype in SCALAR_DTYPES:
            return make(op, (), ScalarSlot(name, dtype))
    if op == "const":
        if isinstance(value, bool) or (isinstance(value, int) and INT64_MIN <= value <= INT64_MAX):
            return const(value)
        if isinstance(value, str) and len(value) < 32:
            try:
                number = float(value)
            except ValueError:
                return None
            return None if number != number else const(number)
    return None


def is_slot_name(name: object) -> bool:
    """Whether `name` can name a captured value in the CUDA text."""
    return isinstance(name, str) and _NAME.match(name) is not None and _DERIVED_NAME.match(name) is None


def rewrite(roots: Iterable[Node], change: Any) -> dict[Node, Node]:
    """Every node under `roots` -> what `change(node, new operands)` makes of it, operands first."""
    done: dict[Node, Node] = {}
    for node in walk(*roots):
        done[node] = change(node, tuple(done[a] for a in node.args))
    return done
