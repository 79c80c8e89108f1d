"""`kv_bounds`: which keys a block of rows has to visit, and which every row of it sees, read off a mask's structure.

A comparison solved for kv_idx shows a row the keys on one side of an expression E. Over rows [q_first, q_last] E runs
from its low to its high bound: up to the high one some row may see a key, up to the low one every row does. `&`
intersects, `|` takes the hull.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .evaluate import evaluate_nodes
from .graph import Graph
from .interval import Intervals
from .node import Node, const, leaf, walk
from .rules import FALSE, TRUE, ZERO, build
from .simplify import simplify_node

_SEQLEN_K = leaf("seqlen_k")


@dataclass(frozen=True, slots=True)
class KvBounds:
    """Half-open key ranges of rows [q_first, q_last], as nodes: every visible key lies in the visit range, every row
    sees every key of the full range, and 0 <= visit_begin <= full_begin <= full_end <= visit_end <= seqlen_k.

    `exact`: the tiles of the visit range outside the full range need the mask, and no further classification pays.
    """

    graph: Graph
    visit_begin: Node
    visit_end: Node
    full_begin: Node
    full_end: Node
    exact: bool

    @property
    def nodes(self) -> tuple[Node, Node, Node, Node]:
        return self.visit_begin, self.visit_end, self.full_begin, self.full_end

    def values(
        self,
        *,
        b: int,
        h: int,
        q: tuple[int, int],
        seqlen_q: int,
        seqlen_k: int,
        nheads: int,
        scalars: Iterable[int | float] = (),
        tables: Iterable[Any] = (),
    ) -> tuple[int, int, int, int]:
        """(visit_begin, visit_end, full_begin, full_end) for rows `q` = (first, last), inclusive."""
        leaves = {
            "b": b, "h": h, "q_first": q[0], "q_last": q[1],
            "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "nheads": nheads,
        }  # fmt: skip
        slots = dict(zip(self.graph.scalars, scalars, strict=True))
        named = dict(zip(self.graph.tables, tables, strict=True))
        begin, end, full_begin, full_end = evaluate_nodes(self.nodes, leaves, slots, named)
        return begin, end, full_begin, full_end


@dataclass(frozen=True, slots=True)
class _Keys:
    """A range of keys [begin, end); None is unlimited on that side."""

    begin: Node | None = None
    end: Node | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a condition does to a row block: keys some row may see, keys every row sees, and whether that says all."""

    visit: _Keys
    full: _Keys
    exact: bool


_NOTHING = _Keys(ZERO, ZERO)
_EVERYTHING = _Keys()


@lru_cache(maxsize=1024)
def kv_bounds(graph: Graph) -> KvBounds:
    """The key ranges of a mask graph for a block of rows."""
    shape = _Shapes().of(graph.root)
    visit_begin = _clip(shape.visit.begin, ZERO, _SEQLEN_K, ZERO)
    visit_end = _clip(shape.visit.end, ZERO, _SEQLEN_K, _SEQLEN_K)
    visit_begin = build("min", visit_begin, visit_end)
    full_begin = full_end = visit_begin
    if shape.full != _NOTHING:
        full_begin = _clip(shape.full.begin, visit_begin, visit_end, visit_begin)
        full_end = _clip(shape.full.end, full_begin, visit_end, visit_end)
    return KvBounds(
        graph=graph,
        visit_begin=simplify_node(visit_begin),
        visit_end=simplify_node(visit_end),
        full_begin=simplify_node(full_begin),
        full_end=simplify_node(full_end),
        exact=shape.exact,
    )


def _clip(node: Node | None, low: Node, high: Node, unlimited: Node) -> Node:
    """`node` inside [low, high]; `unlimited` where there is no bound."""
    if node is None or node is unlimited:
        return unlimited
    return build("min", build("max", node, low), high)


class _Shapes:
    def __init__(self) -> None:
        self._rows = Intervals(vary=("q_idx",))
        self._tiles = Intervals()
        self._shapes: dict[Node, _Shape] = {}

    def of(self, node: Node) -> _Shape:
        for inner in walk(node):  # operands first, so that depth costs no recursion
            if inner.dtype == "bool" and inner not in self._shapes:
                self._shapes[inner] = self._shape(inner)
        return self._shapes[node]

    def _shape(self, node: Node) -> _Shape:
        if "kv_idx" not in node.leaves:
            return self._row_condition(node)
        if node.op in ("and", "or"):
            join = _intersection if node.op == "and" else _union
            return join(*(self._shapes[a] for a in node.args))
        if node.op == "where" and "kv_idx" not in node.args[0].leaves:
            return self._selection(*node.args)
        if node.op in ("lt", "le", "eq") and node.args[0].dtype == "int":
            return self._comparison(node)
        return self._undecided(node)

    def _undecided(self, node: Node) -> _Shape:
        """A condition that gives no range; exact if intervals know nothing of it either."""
        must, may = self._tiles.conditions(node)
        return _Shape(_EVERYTHING, _NOTHING, exact=must is FALSE and may is TRUE)

    def _row_condition(self, node: Node) -> _Shape:
        """A condition without kv_idx: all keys where it holds, none where it does not."""
        must, may = self._rows.conditions(node)
        none_or_all = (build("where", may, _SEQLEN_K, ZERO), build("where", must, _SEQLEN_K, ZERO))
        visit, full = (_Keys(None, None if end is _SEQLEN_K else end) for end in none_or_all)
        return _Shape(visit, full, exact=True)

    def _selection(self, condition: Node, a: Node, b: Node) -> _Shape:
        """One of two masks, chosen by a condition without kv_idx."""
        must, may = self._rows.conditions(condition)
        if must is not may:  # it may differ from row to row
            return self.of(build("or", build("and", condition, a), build("and", build("not", condition), b)))
        one, other = self.of(a), self.of(b)
        visit = _choose(must, one.visit, other.visit)
        return _Shape(visit, _choose(must, one.full, other.full), one.exact and other.exact)

    def _comparison(self, node: Node) -> _Shape:
        kv = leaf("kv_idx")
        left, right = node.args
        limit = right if left is kv else left
        if kv not in (left, right) or "kv_idx" in limit.leaves:
            return self._undecided(node)
        low, high = self._rows.of(limit)
        after = const(1) if node.op != "lt" else ZERO  # kv_idx <= E: keys up to E + 1
        before = const(1) if node.op == "lt" else ZERO  # E < kv_idx: keys from E + 1
        if node.op == "eq":
            visit = _Keys(low, _plus(high, after))
            full = _NOTHING if low is None or high is None else _Keys(high, _plus(low, after))
            return _Shape(visit, full, exact=low is not None and high is not None)
        if left is kv:
            return _Shape(_Keys(None, _plus(high, after)), _Keys(None, _plus(low, after, ZERO)), high is not None)
        full_begin = _plus(high, before, _SEQLEN_K)
        return _Shape(_Keys(_plus(low, before), None), _Keys(full_begin, None), low is not None)


def _plus(a: Node | None, b: Node, unknown: Node | None = None) -> Node | None:
    return unknown if a is None else build("add", a, b)


def _tighter(op: str, a: Node | None, b: Node | None) -> Node | None:
    return b if a is None else a if b is None else build(op, a, b)


def _looser(op: str, a: Node | None, b: Node | None) -> Node | None:
    return None if a is None or b is None else build(op, a, b)


def _choose(condition: Node, a: _Keys, b: _Keys) -> _Keys:
    begin = None if a.begin is b.begin is None else build("where", condition, a.begin or ZERO, b.begin or ZERO)
    end = None if a.end is b.end is None else build("where", condition, a.end or _SEQLEN_K, b.end or _SEQLEN_K)
    return _Keys(begin, end)


def _meet(a: _Keys, b: _Keys) -> _Keys:
    return _Keys(_tighter("max", a.begin, b.begin), _tighter("min", a.end, b.end))


def _intersection(a: _Shape, b: _Shape) -> _Shape:
    full = _NOTHING if _NOTHING in (a.full, b.full) else _meet(a.full, b.full)
    return _Shape(_meet(a.visit, b.visit), full, a.exact and b.exact)


def _union(a: _Shape, b: _Shape) -> _Shape:
    visit = _Keys(_looser("min", a.visit.begin, b.visit.begin), _looser("max", a.visit.end, b.visit.end))
    # Ranges open on the same side overlap, so their union is a range; of others either one is right, the union is not.
    if a.full.begin is None and b.full.begin is None:
        return _Shape(visit, _Keys(None, _looser("max", a.full.end, b.full.end)), a.exact and b.exact)
    if a.full.end is None and b.full.end is None:
        return _Shape(visit, _Keys(_looser("min", a.full.begin, b.full.begin), None), a.exact and b.exact)
    for x, y in ((a, b), (b, a)):
        if x.full == _NOTHING and x.visit == _EVERYTHING:
            return _Shape(_EVERYTHING, y.full, a.exact and b.exact)
    return _Shape(visit, a.full, exact=False)
