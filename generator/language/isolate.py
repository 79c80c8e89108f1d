"""`isolate`: a comparison solved for kv_idx: `q_idx - kv_idx <= w` as `q_idx - w <= kv_idx`.

The side without kv_idx is the same for a whole row, so the compiler computes it once; and a comparison solved for
kv_idx tells which keys a row sees, which is what the loop bounds are made of.
"""

from __future__ import annotations

from .node import Node, const
from .ranges import fits_int32
from .rules import build

_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def isolate(node: Node) -> Node:
    """`node`, or if it compares integers and kv_idx occurs in one place of it, the same solved for kv_idx."""
    if node.op not in ("lt", "le", "eq", "ne") or "kv_idx" not in node.leaves or node.args[0].dtype != "int":
        return node
    left, right = node.args
    if ("kv_idx" in left.leaves) == ("kv_idx" in right.leaves):
        return node
    op = node.op
    if "kv_idx" in right.leaves:
        left, right, op = right, left, _FLIPPED[op]
    return _solve(op, left, right) or node


def _compare(op: str, left: Node, right: Node) -> Node:
    """`left op right` for op in lt, le, gt, ge, eq, ne."""
    if op in ("gt", "ge"):
        return build("lt" if op == "gt" else "le", right, left)
    return build(op, left, right)


def _solve(op: str, left: Node, right: Node) -> Node | None:
    """left op right with kv_idx in `left` alone: terms move to `right` while that stays in 32 bits."""
    moved = False
    while True:
        step = _move(op, left, right)
        if step is None or not fits_int32(step[2].range):
            break
        op, left, right = step
        moved = True
    if left.op == "abs":
        return _open_abs(op, left.args[0], right)
    if left.op == "floordiv":
        opened = _open_quotient(op, left.args[0], left.args[1], right)
        if opened is not None:
            return opened
    return _compare(op, left, right) if moved else None


def _move(op: str, left: Node, right: Node) -> tuple[str, Node, Node] | None:
    """One term of `left` without kv_idx brought to `right`, or None."""
    if left.op == "neg":
        return _FLIPPED[op], left.args[0], build("neg", right)
    if left.op not in ("add", "sub"):
        return None
    a, b = left.args
    if "kv_idx" not in b.leaves:
        return op, a, build("sub" if left.op == "add" else "add", right, b)
    if "kv_idx" not in a.leaves:
        if left.op == "add":
            return op, b, build("sub", right, a)
        return _FLIPPED[op], b, build("sub", a, right)
    return None


def _open_abs(op: str, x: Node, bound: Node) -> Node:
    """|x| op bound as two comparisons, each solved for kv_idx."""
    low = build("neg", bound)

    def compare(op: str, right: Node) -> Node:
        return _solve(op, x, right) or _compare(op, x, right)

    if op in ("lt", "le"):
        return build("and", compare(_FLIPPED[op], low), compare(op, bound))
    if op in ("gt", "ge"):
        return build("or", compare(_FLIPPED[op], low), compare(op, bound))
    # |x| == bound needs bound >= 0.
    possible = build("le", const(0), bound)
    if op == "eq":
        return build("and", possible, build("or", compare("eq", low), compare("eq", bound)))
    return build("or", build("not", possible), build("and", compare("ne", low), compare("ne", bound)))


def _open_quotient(op: str, x: Node, divisor: Node, bound: Node) -> Node | None:
    """x // divisor op bound, for a divisor that is always positive, as comparisons of x with multiples of it."""
    if divisor.range[0] <= 0 or "kv_idx" in divisor.leaves:
        return None
    first = build("mul", bound, divisor)  # the smallest x with x // divisor == bound
    after = build("add", first, divisor)  # the smallest x with x // divisor > bound
    if not fits_int32(first.range) or not fits_int32(after.range):
        return None

    def compare(op: str, right: Node) -> Node:
        return _solve(op, x, right) or _compare(op, x, right)

    if op in ("lt", "ge"):
        return compare(op, first)
    if op in ("le", "gt"):
        return compare("lt" if op == "le" else "ge", after)
    if op == "eq":
        return build("and", compare("ge", first), compare("lt", after))
    return build("or", compare("lt", first), compare("ge", after))
