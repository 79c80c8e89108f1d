"""`Graph`: a mask or score function as a directed acyclic graph of operations, and its plain-data form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, total_ordering
from typing import Any

from ..digest import digest_of
from ..errors import SpecError
from .node import (
    MAX_NODES,
    MAX_TABLE_DIMS,
    SCALAR_DTYPES,
    TABLE_DTYPES,
    Node,
    ScalarSlot,
    TableSlot,
    const,
    is_slot_name,
    leaf,
    make,
    walk,
)
from .ops import ARITY, INDEX_LEAVES, INT64_MAX, INT64_MIN, SIZE_LEAVES, TILE_LEAVES, fp32_text, result_dtype

__all__ = ["MAX_NODES", "Graph", "Node", "ScalarSlot", "TableSlot"]


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
        names = [slot.name for slot in self.scalars] + [slot.name for slot in self.tables]
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
        shift_is_wild = op in ("shl", "shr") and not (args[-1].range[0] >= 0 and args[-1].range[1] <= 63)
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
