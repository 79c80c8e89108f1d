"""`build`: the simplest node for an operation.

Every rule keeps the value exactly (integers are mathematical integers; fp32 rules hold for infinities and NaN, except
that a zero's sign may be lost). The result does not depend on the process, so that equal functions hash equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .node import Node, const, make
from .ops import INT64_MAX, INT64_MIN, PYTHON_FUNCTIONS
from .tracing import current

TRUE, FALSE = const(True), const(False)
ZERO = const(0)


def build(op: str, *args: Node, like: Node | None = None) -> Node:
    """The simplest node that means `op` over `args`."""
    if all(a.is_const for a in args):
        folded = _fold(op, args)
        if folded is not None:
            return folded
    rule = _RULES.get(op)
    found = rule(*args) if rule is not None else None
    return found if found is not None else make(op, args)


def rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """`node` over new operands, simplified. Leaves, scalars and constants stay."""
    if node.op == "load":
        return make("load", args, node.value)
    return build(node.op, *args) if args else node


def _fold(op: str, args: tuple[Node, ...]) -> Node | None:
    value = PYTHON_FUNCTIONS[op](*(a.value for a in args))
    if isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        return None
    if isinstance(value, float) and math.isnan(value):
        return None
    return const(value)


def _is(node: Node, value: bool | int | float) -> bool:
    return node.is_const and type(node.value) is type(value) and node.value == value


def _int(node: Node) -> int | None:
    return node.value if node.is_const and type(node.value) is int else None


def split_offset(node: Node) -> tuple[Node, int]:
    """(x, c) with node = x + c and c constant, the outermost constant of a sum."""
    if node.op in ("add", "sub") and node.dtype == "int":
        c = _int(node.args[1])
        if c is not None and c != INT64_MIN:
            return node.args[0], c if node.op == "add" else -c
    return node, 0


def add_offset(node: Node, offset: int) -> Node:
    """node + offset, with one constant at the end."""
    base, c = split_offset(node)
    if abs(offset + c) > INT64_MAX:
        base, c = node, 0
    offset += c
    if offset == 0:
        return base
    folded = _fold("add", (base, const(offset))) if base.is_const else None
    if folded is not None:
        return folded
    return make("add", (base, const(offset))) if offset > 0 else make("sub", (base, const(-offset)))


def _add(a: Node, b: Node) -> Node | None:
    if a.dtype == "fp32":
        return a if _is(b, 0.0) else b if _is(a, 0.0) else None
    if a.is_const:
        a, b = b, a
    c = _int(b)
    if c is not None and c != INT64_MIN:
        return add_offset(a, c)
    if b.op == "neg":
        return build("sub", a, b.args[0])
    if a.op == "neg":
        return build("sub", b, a.args[0])
    if a.op == "sub" and a.args[1] is b:
        return a.args[0]
    if b.op == "sub" and b.args[1] is a:
        return b.args[0]
    return _hoist_offsets("add", a, b)


def _sub(a: Node, b: Node) -> Node | None:
    if a.dtype == "fp32":
        return a if _is(b, 0.0) else None
    c = _int(b)
    if c is not None and c != INT64_MIN:
        return add_offset(a, -c)
    if a is b:
        return ZERO
    if _is(a, 0):
        return build("neg", b)
    if b.op == "neg":
        return build("add", a, b.args[0])
    if a.op == "add" and b in a.args:
        return a.args[1] if a.args[0] is b else a.args[0]
    if a.op == "sub" and a.args[0] is b:
        return build("neg", a.args[1])
    if b.op == "sub" and b.args[0] is a:
        return b.args[1]
    if b.op == "add" and a in b.args:
        return build("neg", b.args[1] if b.args[0] is a else b.args[0])
    return _hoist_offsets("sub", a, b)


def _hoist_offsets(op: str, a: Node, b: Node) -> Node | None:
    """(x + 1) - (y + 2) as (x - y) - 1: constants of a sum meet at its end."""
    (x, c), (y, d) = split_offset(a), split_offset(b)
    total = c + d if op == "add" else c - d
    if (c == 0 and d == 0) or abs(total) > INT64_MAX:
        return None
    return add_offset(build(op, x, y), total)


def _neg(a: Node) -> Node | None:
    if a.op == "neg":
        return a.args[0]
    if a.op == "sub" and a.dtype == "int":
        return build("sub", a.args[1], a.args[0])
    return None


def _mul(a: Node, b: Node) -> Node | None:
    if a.is_const:
        a, b = b, a
    if a.dtype == "fp32":
        return a if _is(b, 1.0) else build("neg", a) if _is(b, -1.0) else make("mul", (a, b))
    c = _int(b)
    if c == 0:
        return ZERO
    if c == 1:
        return a
    if c == -1:
        return build("neg", a)
    return make("mul", (a, b))


def _div(a: Node, b: Node) -> Node | None:
    if b.is_const and isinstance(b.value, float) and b.value != 0 and math.isfinite(b.value):
        mantissa, exponent = math.frexp(b.value)
        # The reciprocal of a power of two is exact.
        if abs(mantissa) == 0.5 and abs(exponent) < 120:
            return build("mul", a, const(1.0 / b.value))
    return None


def _floordiv(a: Node, b: Node) -> Node | None:
    c = _int(b)
    if c == 1:
        return a
    if c is not None and c > 0 and a.range[0] >= 0 and a.range[1] < c:
        return ZERO
    return None


def _mod(a: Node, b: Node) -> Node | None:
    c = _int(b)
    if c in (1, -1):
        return ZERO
    if c is not None and a.range[0] >= 0 and a.range[1] < c:
        return a
    return None


def _min(a: Node, b: Node) -> Node | None:
    if a is b:
        return a
    if a.dtype == "fp32":
        return None
    if a.range[1] <= b.range[0]:
        return a
    return b if b.range[1] <= a.range[0] else None


def _max(a: Node, b: Node) -> Node | None:
    if a is b:
        return a
    if a.dtype == "fp32":
        return None
    if a.range[0] >= b.range[1]:
        return a
    return b if b.range[0] >= a.range[1] else None


def _abs(a: Node) -> Node | None:
    if a.op in ("neg", "abs"):
        return build("abs", a.args[0])
    if a.dtype == "int" and a.range[0] >= 0:
        return a
    return build("neg", a) if a.dtype == "int" and a.range[1] <= 0 else None


def _shl(a: Node, b: Node) -> Node | None:
    c = _int(b)
    return None if c is None or c > 62 else build("mul", a, const(1 << c))


def _shr(a: Node, b: Node) -> Node | None:
    return a if _int(b) == 0 else None


def _lt(a: Node, b: Node) -> Node | None:
    if a.dtype == "fp32":
        return None
    if a is b or a.range[0] >= b.range[1]:
        return FALSE
    return TRUE if a.range[1] < b.range[0] else _drop_offset("lt", a, b)


def _le(a: Node, b: Node) -> Node | None:
    if a.dtype == "fp32":
        return None
    if a is b or a.range[1] <= b.range[0]:
        return TRUE
    return FALSE if a.range[0] > b.range[1] else _drop_offset("le", a, b)


def _drop_offset(op: str, a: Node, b: Node) -> Node | None:
    """x < y + 1 as x <= y, and x + 1 <= y as x < y."""
    (x, c), (y, d) = split_offset(a), split_offset(b)
    if op == "lt" and d - c == 1:
        return build("le", x, y)
    if op == "le" and d - c == -1:
        return build("lt", x, y)
    if c and d and not y.is_const and abs(d - c) <= INT64_MAX:
        return build(op, x, add_offset(y, d - c))
    return None


def _eq(a: Node, b: Node) -> Node | None:
    if a.dtype == "fp32":
        return None
    if a is b:
        return TRUE
    return FALSE if a.range[1] < b.range[0] or b.range[1] < a.range[0] else None


def _ne(a: Node, b: Node) -> Node | None:
    equal = _eq(a, b)
    return None if equal is None else build("not", equal)


def _and(a: Node, b: Node) -> Node | None:
    if FALSE in (a, b) or _contradict(a, b):
        return FALSE
    if a is TRUE or a is b:
        return b
    if b is TRUE or (a.op == "and" and b in a.args) or (b.op == "or" and a in b.args):
        return a
    return b if (b.op == "and" and a in b.args) or (a.op == "or" and b in a.args) else None


def _or(a: Node, b: Node) -> Node | None:
    if TRUE in (a, b) or _contradict(a, b):
        return TRUE
    if a is FALSE or a is b:
        return b
    if b is FALSE or (a.op == "or" and b in a.args) or (b.op == "and" and a in b.args):
        return a
    return b if (b.op == "or" and a in b.args) or (a.op == "and" and b in a.args) else None


def _xor(a: Node, b: Node) -> Node | None:
    if a is b:
        return FALSE
    for x, y in ((a, b), (b, a)):
        if x.is_const:
            return build("not", y) if x.value else y
    return None


def _not(a: Node) -> Node | None:
    return negate(a)


def negate(node: Node) -> Node:
    """The negation of a bool node, pushed down to its comparisons."""
    trace = current()
    done: dict[Node, Node] = {} if trace is None else trace.negations
    stack = [node]
    while stack:
        inner = stack[-1]
        if inner in done:
            stack.pop()
            continue
        if inner.op not in ("and", "or"):
            done[inner] = _opposite(inner)
            continue
        missing = [x for x in inner.args if x not in done]
        if missing:
            stack.extend(reversed(missing))
            continue
        a, b = (done[x] for x in inner.args)
        done[inner] = negation = make("or" if inner.op == "and" else "and", (a, b))
        done[negation] = inner
    return done[node]


def _opposite(node: Node) -> Node:
    """The negation of a bool node that is no `and` or `or`."""
    a = node.args
    if node.is_const:
        return const(not node.value)
    if node.op == "not":
        return a[0]
    if node.op in ("eq", "ne"):
        return make("ne" if node.op == "eq" else "eq", a)
    if node.op in ("lt", "le") and a[0].dtype == "int":
        return make("le" if node.op == "lt" else "lt", (a[1], a[0]))
    return make("not", (node,))


def _contradict(a: Node, b: Node) -> bool:
    return a.op not in ("and", "or") and _opposite(a) is b


def _where(c: Node, a: Node, b: Node) -> Node | None:
    if c.is_const or a is b:
        return a if c.is_const and c.value else b
    if c.op == "not":
        return build("where", c.args[0], b, a)
    if a.dtype != "bool":
        return None
    if a.is_const:
        return build("or", c, b) if a.value else build("and", negate(c), b)
    if b.is_const:
        return build("or", negate(c), a) if b.value else build("and", c, a)
    return None


_RULES: dict[str, Callable[..., Node | None]] = {
    "add": _add, "sub": _sub, "neg": _neg, "mul": _mul, "div": _div, "floordiv": _floordiv, "mod": _mod,
    "min": _min, "max": _max, "abs": _abs, "shl": _shl, "shr": _shr,
    "lt": _lt, "le": _le, "eq": _eq, "ne": _ne,
    "and": _and, "or": _or, "xor": _xor, "not": _not, "where": _where,
}  # fmt: skip
