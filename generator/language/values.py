"""`Value`: what a mask or score function computes with while it is traced, and the functions that take it."""

from __future__ import annotations

import math
import numbers
from typing import Any, NoReturn

from .node import MAX_NODES, Node, TableSlot, const, leaf, make
from .ops import INT64_MAX, INT64_MIN
from .refusals import BRANCH_REMEDY, Refusals, stand_in_text, trace_error
from .rules import build
from .tracing import current

_NUMPY_OPERATORS = {
    "add": "__add__", "subtract": "__sub__", "multiply": "__mul__", "divide": "__truediv__",
    "floor_divide": "__floordiv__", "remainder": "__mod__",
    "less": "__lt__", "less_equal": "__le__", "greater": "__gt__", "greater_equal": "__ge__",
    "equal": "__eq__", "not_equal": "__ne__",
}  # fmt: skip


#: Values a trace may make: some are dropped or folded, but a loop that never ends must not fill the memory.
MAX_VALUES = 4 * MAX_NODES


class Value(Refusals):
    """A symbolic bool, int or fp32. Python's operators on it build the expression graph."""

    __slots__ = ("node",)
    __hash__ = Refusals.__hash__

    def __init__(self, node: Node) -> None:
        self.node = node
        tracing = current()
        if tracing is not None:
            tracing.values += 1
            if tracing.values > MAX_VALUES:
                raise trace_error(
                    f"A mask or score function may have at most {MAX_NODES} operations, but this one has made"
                    f" {MAX_VALUES} by this line. Shorten its loops, or put precomputed values into a captured tensor."
                )

    def __repr__(self) -> str:
        return stand_in_text(f"<traced {self.node.dtype}>")

    def __add__(self, other: Any) -> Value:
        return arithmetic("add", "+", self, other)

    def __radd__(self, other: Any) -> Value:
        return arithmetic("add", "+", other, self)

    def __sub__(self, other: Any) -> Value:
        return arithmetic("sub", "-", self, other)

    def __rsub__(self, other: Any) -> Value:
        return arithmetic("sub", "-", other, self)

    def __mul__(self, other: Any) -> Value:
        return arithmetic("mul", "*", self, other)

    def __rmul__(self, other: Any) -> Value:
        return arithmetic("mul", "*", other, self)

    def __truediv__(self, other: Any) -> Value:
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return _divide(other, self)

    def __floordiv__(self, other: Any) -> Value:
        return _integer("floordiv", "//", self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return _integer("floordiv", "//", other, self)

    def __mod__(self, other: Any) -> Value:
        return _integer("mod", "%", self, other)

    def __rmod__(self, other: Any) -> Value:
        return _integer("mod", "%", other, self)

    def __lshift__(self, other: Any) -> Value:
        return _shift("shl", "<<", self, other)

    def __rlshift__(self, other: Any) -> Value:
        return _shift("shl", "<<", other, self)

    def __rshift__(self, other: Any) -> Value:
        return _shift("shr", ">>", self, other)

    def __rrshift__(self, other: Any) -> Value:
        return _shift("shr", ">>", other, self)

    def __and__(self, other: Any) -> Value:
        return _logical("and", "bitand", "&", self, other)

    def __rand__(self, other: Any) -> Value:
        return _logical("and", "bitand", "&", other, self)

    def __or__(self, other: Any) -> Value:
        return _logical("or", "bitor", "|", self, other)

    def __ror__(self, other: Any) -> Value:
        return _logical("or", "bitor", "|", other, self)

    def __xor__(self, other: Any) -> Value:
        return _logical("xor", "bitxor", "^", self, other)

    def __rxor__(self, other: Any) -> Value:
        return _logical("xor", "bitxor", "^", other, self)

    def __neg__(self) -> Value:
        return Value(build("neg", as_number(self.node)))

    def __pos__(self) -> Value:
        return Value(as_number(self.node))

    def __abs__(self) -> Value:
        return Value(build("abs", as_number(self.node)))

    def __invert__(self) -> Value:
        if self.node.dtype == "fp32":
            raise trace_error("`~` takes a bool or an int, but got fp32.")
        return Value(build("not" if self.node.dtype == "bool" else "bitnot", self.node))

    def __lt__(self, other: Any) -> Value:
        return arithmetic("lt", "<", self, other)

    def __le__(self, other: Any) -> Value:
        return arithmetic("le", "<=", self, other)

    def __gt__(self, other: Any) -> Value:
        return arithmetic("lt", ">", other, self)

    def __ge__(self, other: Any) -> Value:
        return arithmetic("le", ">=", other, self)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return _equality("eq", "==", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return _equality("ne", "!=", self, other)

    def __pow__(self, other: Any) -> Value:
        if type(other) is not int or not 1 <= other <= 8:
            shown = "a traced one" if isinstance(other, Value | Table) else repr(other)
            raise trace_error(f"`**` takes a literal exponent from 1 to 8, but got {shown}. Use exp and log.")
        result = self
        for _ in range(other - 1):
            result = result * self
        return result

    def __array_ufunc__(self, ufunc: Any, how: str, *inputs: Any, **kwargs: Any) -> Any:
        # numpy's scalars come here for their operators: `np.float32(2) * score`.
        operator = _NUMPY_OPERATORS.get(ufunc.__name__)
        if operator is None or how != "__call__":
            self.__float__()
        return getattr(Value(to_node(inputs[0])), operator)(inputs[1])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from .torch_functions import method

        return method(self, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .torch_functions import call

        return call(func, args, kwargs or {})


class Table:
    """A captured tensor while its function is traced: `table[i, j]` reads one element."""

    __slots__ = ("slot",)
    __hash__ = Refusals.__hash__

    def __init__(self, slot: TableSlot) -> None:
        self.slot = slot

    def __repr__(self) -> str:
        return stand_in_text(f"<captured tensor {self.slot.name}>")

    def __eq__(self, other: object) -> Any:
        return _equality("eq", "==", self, other)

    def __ne__(self, other: object) -> Any:
        return _equality("ne", "!=", self, other)

    def __getitem__(self, index: Any) -> Value:
        slot = self.slot
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != slot.ndim or any(i is Ellipsis or i is None or isinstance(i, slice) for i in indices):
            raise trace_error(
                f"A captured tensor is indexed with one int per dimension: {slot.name} has {slot.ndim}, but got"
                f" {len(indices)} index(es). Write {slot.name}[{', '.join('ijklmnop'[: slot.ndim]) or '()'}]."
            )
        nodes = []
        for i in indices:
            node = to_node(i, f"an index of {slot.name}")
            if node.dtype == "fp32":
                raise trace_error(f"An index of {slot.name} must be an int, but got fp32.")
            node = as_number(node)
            if node.range[1] < 0:
                raise trace_error(
                    f"An index of {slot.name} must be >= 0, but it is never above {node.range[1]}. Negative indices do"
                    " not count from the end here; write the position out."
                )
            nodes.append(node)
        return Value(make("load", tuple(nodes), slot))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise trace_error(f"A mask or score function must not write to the captured tensor {self.slot.name}.")

    def __bool__(self) -> NoReturn:
        raise trace_error(f"A branch depends on the captured tensor {self.slot.name}. {BRANCH_REMEDY}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise trace_error(
            f"Only elements of the captured tensor {self.slot.name} can be read inside a mask or score function, but"
            f" .{name} was asked for. Compute it outside the function and capture the result."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .torch_functions import call

        return call(func, args, kwargs or {})


def to_node(value: Any, role: str = "an operand") -> Node:
    """The node of a Value or a Python number. Raises TraceError for anything else."""
    if isinstance(value, Value):
        return value.node
    if isinstance(value, Table):
        if value.slot.ndim == 0:
            return make("load", (), value.slot)
        raise trace_error(
            f"The captured tensor {value.slot.name} was used as {role} without an index. Read one element of it:"
            f" {value.slot.name}[{', '.join('ijklmnop'[: value.slot.ndim])}]."
        )
    if isinstance(value, bool):
        return const(value)
    if isinstance(value, numbers.Integral):
        number = int(value)
        if not INT64_MIN <= number <= INT64_MAX:
            raise trace_error(f"An integer must fit 64 bits, but got {number}.")
        return const(number)
    if isinstance(value, numbers.Real):
        if math.isnan(value):
            raise trace_error("NaN is not a value a mask or score can use. Use -math.inf to hide a score.")
        return const(float(value))
    value = getattr(value, "_target", value)  # an object is named by its own type, not its stand-in's
    raise trace_error(
        "A mask or score function computes with its arguments, numbers and elements of captured tensors, but"
        f" {role} is a {type(value).__module__}.{type(value).__qualname__}. Capture a number, or a tensor in a variable"
        " of its own."
    )


def as_number(node: Node) -> Node:
    """`node`, with a bool as 0 or 1."""
    return build("where", node, const(1), const(0)) if node.dtype == "bool" else node


def as_float(node: Node) -> Node:
    """`node` as fp32."""
    node = as_number(node)
    if node.dtype == "fp32":
        return node
    return const(float(node.value)) if isinstance(node.value, int) else build("to_fp32", node)


def unify(a: Node, b: Node) -> tuple[Node, Node]:
    """Both as int, or both as fp32 if one of them is."""
    a, b = as_number(a), as_number(b)
    if a.dtype != b.dtype:
        return as_float(a), as_float(b)
    return a, b


def arithmetic(op: str, symbol: str, a: Any, b: Any) -> Value:
    """`a op b` for numbers, ints converted where the other is fp32."""
    return Value(build(op, *unify(to_node(a, f"an operand of `{symbol}`"), to_node(b, f"an operand of `{symbol}`"))))


def _equality(op: str, symbol: str, a: Any, b: Any) -> Value:
    x, y = to_node(a, f"an operand of `{symbol}`"), to_node(b, f"an operand of `{symbol}`")
    if x.dtype == y.dtype == "bool":
        different = build("xor", x, y)
        return Value(different if op == "ne" else build("not", different))
    return Value(build(op, *unify(x, y)))


def _divide(a: Any, b: Any) -> Value:
    x, y = to_node(a, "an operand of `/`"), to_node(b, "an operand of `/`")
    return Value(build("div", as_float(x), as_float(y)))


def _integer(op: str, symbol: str, a: Any, b: Any) -> Value:
    x, y = as_number(to_node(a)), as_number(to_node(b))
    if x.dtype == "fp32" or y.dtype == "fp32":
        raise trace_error(f"`{symbol}` takes ints, but got {x.dtype} and {y.dtype}. Use `/` for fp32.")
    if y.is_const and y.value == 0:
        raise trace_error(f"`{symbol}` by the constant 0 has no value.")
    return Value(build(op, x, y))


def _shift(op: str, symbol: str, a: Any, b: Any) -> Value:
    x, y = as_number(to_node(a)), as_number(to_node(b))
    if x.dtype == "fp32" or y.dtype == "fp32":
        raise trace_error(f"`{symbol}` takes ints, but got {x.dtype} and {y.dtype}.")
    if y.range[0] < 0 or y.range[1] > 63:
        raise trace_error(
            f"The amount of `{symbol}` must be known to lie in [0, 63], but it can be anything in"
            f" [{y.range[0]}, {y.range[1]}]. Write `x {symbol} (n & 63)`."
        )
    return Value(build(op, x, y))


def _logical(op: str, bit_op: str, symbol: str, a: Any, b: Any) -> Value:
    x, y = to_node(a, f"an operand of `{symbol}`"), to_node(b, f"an operand of `{symbol}`")
    if x.dtype == y.dtype and x.dtype != "fp32":
        return Value(build(op if x.dtype == "bool" else bit_op, x, y))
    raise trace_error(
        f"`{symbol}` takes two bools or two ints, but got {x.dtype} and {y.dtype}. It binds tighter than comparisons:"
        f" write `(a <= b) {symbol} (c < d)` with the parentheses."
    )


#: The sizes of the call, for use inside mask and score functions.
seqlen_q = Value(leaf("seqlen_q"))
seqlen_k = Value(leaf("seqlen_k"))
nheads = Value(leaf("nheads"))
