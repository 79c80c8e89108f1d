"""`evaluate`: a graph on plain numbers, by the definition of each operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .graph import Graph
from .node import Node, ScalarSlot, TableSlot, walk
from .ops import PYTHON_FUNCTIONS


def evaluate(
    graph: Graph,
    leaves: Mapping[str, Any],
    *,
    scalars: Iterable[Any] = (),
    tables: Iterable[Any] = (),
    functions: Mapping[str, Callable[..., Any]] = PYTHON_FUNCTIONS,
) -> Any:
    """The graph's value where its leaves (b, h, q_idx, kv_idx, score, seqlen_q, seqlen_k, nheads) are as given.

    `scalars` and `tables` are in slot order; tables are indexed `table[i, j]`, the indices clamped to their shape.
    fp32 operations are done in Python's double precision. `functions` may give each operation for another kind of
    number.
    """
    slots = dict(zip(graph.scalars, scalars, strict=True))
    named = dict(zip(graph.tables, tables, strict=True))
    return evaluate_nodes((graph.root,), leaves, slots, named, functions)[0]


def evaluate_nodes(
    roots: tuple[Node, ...],
    leaves: Mapping[str, Any],
    scalars: Mapping[ScalarSlot, Any],
    tables: Mapping[TableSlot, Any],
    functions: Mapping[str, Callable[..., Any]] = PYTHON_FUNCTIONS,
) -> tuple[Any, ...]:
    """The values of `roots`."""
    values: dict[Node, Any] = {}
    for node in walk(*roots):
        args = [values[a] for a in node.args]
        if node.op == "const":
            values[node] = node.value
        elif node.op == "leaf":
            values[node] = leaves[str(node.value)]
        elif isinstance(node.value, ScalarSlot):
            values[node] = scalars[node.value]
        elif isinstance(node.value, TableSlot):
            values[node] = _read(tables[node.value], args)
        else:
            values[node] = functions[node.op](*args)
    return tuple(values[root] for root in roots)


def _read(table: Any, indices: list[Any]) -> Any:
    inside = tuple(min(max(i, 0), size - 1) for i, size in zip(indices, table.shape, strict=True))
    element = table[inside]
    return element.item() if hasattr(element, "item") else element
