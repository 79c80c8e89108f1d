"""Masks and scores put together: `and_masks`, `or_masks`, `compose_scores`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from ..errors import TraceError
from .capture import Captures
from .graph import Graph
from .node import Node, ScalarSlot, TableSlot, const, leaf
from .rules import build
from .simplify import simplify
from .trace import Traced, substitute, trace_mask, trace_score

Mod = Traced | Graph | Callable[..., Any]


@overload
def and_masks(*masks: Traced | Callable[..., Any]) -> Traced: ...
@overload
def and_masks(*masks: Graph) -> Graph: ...
def and_masks(*masks: Mod) -> Traced | Graph:
    """The mask that shows a key if all `masks` do; no masks at all show every key.

    Given graphs alone the result is a graph, otherwise a `Traced`; functions are traced. Captured values keep their
    names where they can and get a number where two clash.
    """
    return _combine("mask", masks, lambda roots: _fold("and", roots))


@overload
def or_masks(*masks: Traced | Callable[..., Any]) -> Traced: ...
@overload
def or_masks(*masks: Graph) -> Graph: ...
def or_masks(*masks: Mod) -> Traced | Graph:
    """The mask that shows a key if any of `masks` does; no masks at all show none."""
    return _combine("mask", masks, lambda roots: _fold("or", roots))


@overload
def compose_scores(*scores: Traced | Callable[..., Any]) -> Traced: ...
@overload
def compose_scores(*scores: Graph) -> Graph: ...
def compose_scores(*scores: Mod) -> Traced | Graph:
    """The score modification that applies `scores` from left to right; none at all leave the score as it is."""
    return _combine("score", scores, _chain)


def _fold(op: str, roots: list[Node]) -> Node:
    result = const(op == "and")
    for root in roots:
        result = build(op, result, root)
    return result


def _chain(roots: list[Node]) -> Node:
    score = leaf("score")
    for root in roots:
        score = substitute(root, {"score": score}, {})
    return score


def _combine(kind: str, mods: tuple[Mod, ...], join: Callable[[list[Node]], Node]) -> Traced | Graph:
    graphs_alone = bool(mods) and all(isinstance(m, Graph) for m in mods)
    captures = Captures()
    tensors: dict[tuple[int, str, int], TableSlot] = {}
    roots = []
    for mod in mods:
        graph = mod if isinstance(mod, Graph) else _traced(kind, mod).graph
        if graph.kind != kind:
            raise TraceError(f"A {kind} is needed here, but got a {graph.kind} graph.")
        scalars: tuple[Any, ...] = (0,) * len(graph.scalars)
        tables: tuple[Any, ...] = (None,) * len(graph.tables)
        if not isinstance(mod, Graph):
            traced = _traced(kind, mod)
            scalars, tables = traced.scalars, traced.tables
            graph = traced.graph
        slots: dict[Any, Any] = {}
        for scalar, number in zip(graph.scalars, scalars, strict=True):
            slots[scalar] = ScalarSlot(captures.unique(scalar.name), scalar.dtype)
            captures.scalars[slots[scalar]] = number
        for table, tensor in zip(graph.tables, tables, strict=True):
            # One tensor captured by two mods is one argument.
            key = (id(tensor), table.dtype, table.ndim)
            shared = None if tensor is None else tensors.get(key)
            slots[table] = shared or TableSlot(captures.unique(table.name), table.dtype, table.ndim)
            tensors[key] = slots[table]
            captures.tables[slots[table]] = tensor
        roots.append(substitute(graph.root, {}, slots))
    graph = simplify(Graph(kind, join(roots)))
    if graphs_alone:
        return graph
    return Traced(
        graph,
        tuple(captures.scalars[slot] for slot in graph.scalars),
        tuple(captures.tables[slot] for slot in graph.tables),
    )


def _traced(kind: str, mod: Any) -> Traced:
    return trace_mask(mod) if kind == "mask" else trace_score(mod)
