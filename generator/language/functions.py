"""The functions of the language: `where`, `minimum`, `maximum`, `abs`, `exp`, `log`, `tanh`, `sqrt`.

They take traced values and Python numbers and give a traced value.
"""

from __future__ import annotations

from typing import Any

from .ops import INT64_MAX, INT64_MIN
from .refusals import trace_error
from .rules import build
from .values import Value, arithmetic, as_float, as_number, to_node, unify


def where(condition: Any, a: Any, b: Any) -> Value:
    """`a` where `condition` holds, else `b`; an int branch becomes fp32 if the other is."""
    c = to_node(condition, "the condition of where")
    if c.dtype != "bool":
        raise trace_error(f"The condition of where must be a bool, but got {c.dtype}. Compare it: `x != 0`.")
    x, y = to_node(a, "a branch of where"), to_node(b, "a branch of where")
    if x.dtype != y.dtype:
        x, y = unify(x, y)
    return Value(build("where", c, x, y))


def minimum(a: Any, b: Any) -> Value:
    """The smaller of `a` and `b`."""
    return arithmetic("min", "minimum", a, b)


def maximum(a: Any, b: Any) -> Value:
    """The larger of `a` and `b`."""
    return arithmetic("max", "maximum", a, b)


def abs(x: Any) -> Value:
    """The absolute value of `x`, int or fp32."""
    return Value(build("abs", as_number(to_node(x, "the argument of abs"))))


def exp(x: Any) -> Value:
    """e to the power `x`, fp32."""
    return _transcendental("exp", x)


def log(x: Any) -> Value:
    """The natural logarithm of `x`, fp32; -inf at 0, NaN below."""
    return _transcendental("log", x)


def tanh(x: Any) -> Value:
    """The hyperbolic tangent of `x`, fp32."""
    return _transcendental("tanh", x)


def sqrt(x: Any) -> Value:
    """The square root of `x`, fp32; NaN below 0."""
    return _transcendental("sqrt", x)


def to_float(x: Any) -> Value:
    """`x` as fp32: what `float(x)` means inside a traced function."""
    return Value(as_float(to_node(x, "the argument of float")))


def _transcendental(op: str, x: Any) -> Value:
    return Value(build(op, as_float(to_node(x, f"the argument of {op}"))))


def clamp(x: Any, low: Any = None, high: Any = None) -> Value:
    """`x` no smaller than `low` and no larger than `high`; None is no bound."""
    result = Value(to_node(x, "the argument of clamp"))
    if low is not None and low != INT64_MIN:
        result = maximum(result, low)
    if high is not None and high != INT64_MAX:
        result = minimum(result, high)
    return result
