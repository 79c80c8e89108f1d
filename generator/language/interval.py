"""Tile classes by interval arithmetic: is a tile of rows and keys empty, full, or mixed?

For every integer node the tile's smallest and largest value, and for every condition whether it *must* hold
everywhere and whether it *may* hold somewhere, are nodes again, over the leaves q_first, q_last, kv_first and kv_last
(inclusive). So one derivation serves Python (`classify_tile`) and the kernel (`cuda.render_mods`). Where nothing is
known the bound is None, must is false and may is true: never wrong, at worst mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Literal

from .evaluate import evaluate_nodes
from .graph import Graph
from .node import Node, TableSlot, const, leaf, walk
from .ranges import ANY
from .rules import FALSE, TRUE, ZERO, build
from .simplify import simplify_node

TileClass = Literal["empty", "full", "mixed"]

#: (low, high) of an integer; (must, may) of a bool; None is unknown.
Pair = tuple[Node | None, Node | None]
UNKNOWN: Pair = (None, None)

_TILE_BOUNDS = {"q_idx": ("q_first", "q_last"), "kv_idx": ("kv_first", "kv_last")}


class Intervals:
    """The pairs of nodes of one graph. `vary` names the indices that run over a range, the others are points.

    `table_bounds` gives (low, high) of a table's elements inside the tile. `read_tables` says whether a table read at
    a point may be used as it is.
    """

    def __init__(
        self,
        *,
        vary: tuple[str, ...] = ("q_idx", "kv_idx"),
        table_bounds: Mapping[str, tuple[int, int]] | None = None,
        read_tables: bool = True,
    ) -> None:
        self._vary = frozenset(vary)
        self._table_bounds = dict(table_bounds or {})
        self._read_tables = read_tables
        self._pairs: dict[Node, Pair] = {}

    def of(self, root: Node) -> Pair:
        """The pair of `root`: (low, high) of an integer, (must, may) of a bool."""
        for node in walk(root):
            if node not in self._pairs:
                self._pairs[node] = self._pair(node)
        return self._pairs[root]

    def conditions(self, root: Node) -> tuple[Node, Node]:
        """(must, may) of a bool node, simplified."""
        must, may = self.of(root)
        assert must is not None and may is not None
        return simplify_node(must), simplify_node(may)

    def _is_point(self, node: Node) -> bool:
        return node.leaves.isdisjoint(self._vary) and (self._read_tables or "load" not in node.leaves)

    def _pair(self, node: Node) -> Pair:
        if self._is_point(node):
            return node, node
        if node.dtype == "bool":
            return _truth(node, [self._pairs[a] for a in node.args])
        # A value that may have wrapped around 64 bits has no known interval.
        if node.dtype == "fp32" or (node.range == ANY and node.op != "load"):
            return UNKNOWN
        if node.op == "leaf":
            low, high = _TILE_BOUNDS[str(node.value)]
            return leaf(low), leaf(high)
        if isinstance(node.value, TableSlot):
            bounds = self._table_bounds.get(node.value.name)
            return UNKNOWN if bounds is None else (const(int(bounds[0])), const(int(bounds[1])))
        if node.op == "where":
            return _branches(*(self._pairs[a] for a in node.args))
        rule = _INTEGER_RULES.get(node.op)
        return UNKNOWN if rule is None else rule(*(self._pairs[a] for a in node.args))


@lru_cache(maxsize=1024)
def tile_conditions(
    graph: Graph, bounds: tuple[tuple[str, tuple[int, int]], ...] = (), read_tables: bool = True
) -> tuple[Node, Node]:
    """(must, may) of a mask over a tile of rows [q_first, q_last] and keys [kv_first, kv_last]."""
    return Intervals(table_bounds=dict(bounds), read_tables=read_tables).conditions(graph.root)


def classify_tile(
    graph: Graph,
    *,
    b: int,
    h: int,
    q: tuple[int, int],
    kv: tuple[int, int],
    seqlen_q: int,
    seqlen_k: int,
    nheads: int,
    scalars: Iterable[int | float] = (),
    tables: Iterable[Any] | None = None,
    table_bounds: Mapping[str, tuple[int, int]] | None = None,
) -> TileClass:
    """Whether no ("empty"), every ("full") or perhaps some ("mixed") pair of a row in `q` and a key in `kv` is seen.

    `q` and `kv` are (first, last), inclusive. `scalars` and `tables` are in slot order; a table that is not given is
    unknown unless `table_bounds[name]` gives the smallest and the largest of its elements that the tile reads.
    Never wrong; "mixed" where it cannot decide.
    """
    bounds = tuple(sorted((table_bounds or {}).items()))
    must, may = tile_conditions(graph, bounds, tables is not None)
    leaves = {
        "b": b, "h": h, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "nheads": nheads,
        "q_first": q[0], "q_last": q[1], "kv_first": kv[0], "kv_last": kv[1],
    }  # fmt: skip
    slots = dict(zip(graph.scalars, scalars, strict=True))
    named = dict(zip(graph.tables, tables, strict=True)) if tables is not None else {}
    must_hold, may_hold = evaluate_nodes((must, may), leaves, slots, named)
    if not may_hold:
        return "empty"
    return "full" if must_hold else "mixed"


def _truth(node: Node, args: list[Pair]) -> Pair:
    """(must, may) of a bool node over the pairs of its operands."""
    if node.op in ("lt", "le", "eq", "ne") and node.args[0].dtype == "int":
        return _compared(node.op, args[0], args[1])
    if node.op == "not":
        must, may = args[0]
        return _not(may), _not(must)
    if node.op in ("and", "or"):
        (must_a, may_a), (must_b, may_b) = args
        return _join(node.op, must_a, must_b), _join(node.op, may_a, may_b)
    if node.op == "xor":
        (must_a, may_a), (must_b, may_b) = args
        must = _join("or", _join("and", must_a, _not(may_b)), _join("and", _not(may_a), must_b))
        equal = _join("or", _join("and", must_a, must_b), _join("and", _not(may_a), _not(may_b)))
        return must, _not(equal)
    if node.op == "where":
        (must_c, may_c), (must_a, may_a), (must_b, may_b) = args
        # c & a | ~c & b
        must = _join("or", _join("and", must_c, must_a), _join("and", _not(may_c), must_b))
        must = _join("or", must, _join("and", must_a, must_b))
        may = _join("or", _join("and", may_c, may_a), _join("and", _not(must_c), may_b))
        return must, may
    return FALSE, TRUE


def _not(a: Node | None) -> Node:
    assert a is not None
    return build("not", a)


def _join(op: str, a: Node | None, b: Node | None) -> Node:
    assert a is not None and b is not None
    return build(op, a, b)


def _compared(op: str, a: Pair, b: Pair) -> Pair:
    (a_low, a_high), (b_low, b_high) = a, b
    if op in ("lt", "le"):
        return _known(op, a_high, b_low, FALSE), _known(op, a_low, b_high, TRUE)
    apart = build("or", _known("lt", a_high, b_low, FALSE), _known("lt", b_high, a_low, FALSE))
    same = build("and", _known("le", a_high, b_low, FALSE), _known("le", b_high, a_low, FALSE))
    return (same, build("not", apart)) if op == "eq" else (apart, build("not", same))


def _known(op: str, a: Node | None, b: Node | None, otherwise: Node) -> Node:
    return otherwise if a is None or b is None else build(op, a, b)


def _each(op: str, a: Node | None, b: Node | None) -> Node | None:
    return None if a is None or b is None else build(op, a, b)


def _branches(c: Pair, a: Pair, b: Pair) -> Pair:
    must, may = c
    assert must is not None and may is not None

    def pick(op: str, x: Node | None, y: Node | None) -> Node | None:
        if must is TRUE:
            return x
        if may is FALSE:
            return y
        if x is None or y is None:
            return None
        return build("where", must, x, build("where", may, build(op, x, y), y))

    return pick("min", a[0], b[0]), pick("max", a[1], b[1])


def _add(a: Pair, b: Pair) -> Pair:
    return _each("add", a[0], b[0]), _each("add", a[1], b[1])


def _sub(a: Pair, b: Pair) -> Pair:
    return _each("sub", a[0], b[1]), _each("sub", a[1], b[0])


def _neg(a: Pair) -> Pair:
    return tuple(None if x is None else build("neg", x) for x in (a[1], a[0]))  # type: ignore[return-value]


def _bitnot(a: Pair) -> Pair:
    return _sub((const(-1), const(-1)), a)


def _abs(a: Pair) -> Pair:
    low, high = a
    if low is None or high is None:
        return ZERO, None
    negated = build("neg", low), build("neg", high)
    return build("max", ZERO, build("max", low, negated[1])), build("max", high, negated[0])


def _mul(a: Pair, b: Pair) -> Pair:
    if b[0] is not b[1]:
        a, b = b, a
    corners = [_each("mul", x, y) for x in a for y in ((b[0],) if b[0] is b[1] else b)]
    if None not in corners and b[0] is b[1] and b[0] is not None:
        if b[0].range[0] >= 0:
            return corners[0], corners[1]
        if b[0].range[1] <= 0:
            return corners[1], corners[0]
    return _extremes(corners)


def _extremes(corners: list[Node | None]) -> Pair:
    low = high = corners[0]
    for corner in corners[1:]:
        low, high = _each("min", low, corner), _each("max", high, corner)
    return low, high


def _monotone(op: str) -> Callable[[Pair, Pair], Pair]:
    """The rule of an `op` that grows, or falls, with its first operand, for a second operand that is a point."""

    def rule(a: Pair, b: Pair) -> Pair:
        low, high = _each(op, a[0], b[0]), _each(op, a[1], b[1])
        if b[0] is not b[1] or low is None or high is None or b[0] is None:
            return UNKNOWN
        rising = op != "floordiv" or b[0].range[0] >= 0
        return (low, high) if rising else _extremes([low, high])

    return rule


def _mod(a: Pair, b: Pair) -> Pair:
    divisor = b[0]
    if divisor is None or divisor is not b[1]:
        return UNKNOWN
    least = build("min", ZERO, build("add", divisor, const(1)))
    most = build("max", ZERO, build("sub", divisor, const(1)))
    low, high = a
    if low is None or high is None:
        return least, most
    # Within one period the remainder grows with the dividend.
    one_period = build("eq", build("floordiv", low, divisor), build("floordiv", high, divisor))
    return (
        build("where", one_period, build("mod", low, divisor), least),
        build("where", one_period, build("mod", high, divisor), most),
    )


def _bitand(a: Pair, b: Pair) -> Pair:
    if b[0] is not b[1]:
        a, b = b, a
    mask = b[0]
    if mask is None or mask is not b[1] or mask.range[0] < 0:
        return UNKNOWN
    if mask.is_const and isinstance(mask.value, int) and mask.value & (mask.value + 1) == 0:
        period = const(mask.value + 1)
        return _mod(a, (period, period))
    return ZERO, mask


_INTEGER_RULES: dict[str, Callable[..., Pair]] = {
    "add": _add, "sub": _sub, "neg": _neg, "abs": _abs, "mul": _mul, "bitnot": _bitnot, "bitand": _bitand,
    "min": lambda a, b: (_each("min", a[0], b[0]), _each("min", a[1], b[1])),
    "max": lambda a, b: (_each("max", a[0], b[0]), _each("max", a[1], b[1])),
    "floordiv": _monotone("floordiv"), "shr": _monotone("shr"), "shl": _monotone("shl"), "mod": _mod,
}  # fmt: skip
