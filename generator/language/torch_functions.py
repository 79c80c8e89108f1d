"""torch's functions and tensor methods on traced values, by name: `torch.where(...)`, `score.tanh()`.

Nothing here imports torch: torch itself calls `Value.__torch_function__`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from . import functions
from .refusals import trace_error
from .values import Value, to_node

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "where": functions.where,
    "minimum": functions.minimum, "min": functions.minimum,
    "maximum": functions.maximum, "max": functions.maximum,
    "abs": functions.abs, "absolute": functions.abs,
    "exp": functions.exp, "log": functions.log, "tanh": functions.tanh, "sqrt": functions.sqrt,
    "exp2": lambda x: functions.exp(x * math.log(2.0)), "log2": lambda x: functions.log(x) * (1.0 / math.log(2.0)),
    "rsqrt": lambda x: 1.0 / functions.sqrt(x), "square": lambda x: x * x,
    "sigmoid": lambda x: 1.0 / (1.0 + functions.exp(-x)),
    "clamp": functions.clamp, "clip": functions.clamp,
    "clamp_min": lambda x, low: functions.clamp(x, low),
    "clamp_max": lambda x, high: functions.clamp(x, None, high),
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "div": operator.truediv, "true_divide": operator.truediv, "divide": operator.truediv,
    "floor_divide": operator.floordiv, "remainder": operator.mod,
    "logical_and": operator.and_, "logical_or": operator.or_, "logical_not": operator.invert,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_xor": operator.xor,
    "bitwise_not": operator.invert,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "float": functions.to_float,
}  # fmt: skip

#: torch's keyword arguments -> the language's.
_KEYWORDS = {"min": "low", "max": "high"}
_LISTED = "where, minimum, maximum, clamp, abs, exp, log, tanh, sqrt"

#: Methods of a traced value; a subset of the above that torch tensors have too.
_METHODS = frozenset(_FUNCTIONS) - {"where", "min", "max"}


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's `func` on traced values. Raises TraceError where the language has no such function."""
    special = getattr(func, "__name__", str(func))
    # A tensor's operators arrive under their special names: `tensor - traced` is `__sub__`, or `sub`.
    reflected = special.startswith("__r")
    name = special.strip("_").removeprefix("r") if reflected else special.strip("_")
    known = _FUNCTIONS.get(name)
    if known is None:
        raise trace_error(f"torch's {special} cannot be traced. The language has {_LISTED}, and Python's operators.")
    if "input" in kwargs:
        args = (kwargs["input"], *args)
    operands = [_plain(a) for a in (reversed(args) if reflected else args)]
    named = {_KEYWORDS.get(k, k): _plain(v) for k, v in kwargs.items() if k != "input"}
    try:
        return known(*operands, *(named.pop(k) for k in ("other",) if k in named), **named)
    except TypeError as error:
        raise trace_error(f"torch's {special} was called with arguments that cannot be traced: {error}.") from None


def method(value: Value, name: str) -> Callable[..., Any]:
    """`value.name` as a function. Raises TraceError where the language has no such method."""
    if name in _METHODS:
        known = _FUNCTIONS[name]
        return lambda *args, **kwargs: known(value, *args, **kwargs)
    if name == "item":
        raise trace_error(".item() of a traced value is not possible: its value is only known in the kernel.")
    raise trace_error(
        f"A traced value has no attribute {name!r}. Methods: {', '.join(sorted(_METHODS))}; or use Python's operators."
    )


def _plain(argument: Any) -> Any:
    # A captured 0-d tensor that reached torch unwrapped is a constant nobody could change later.
    if argument is None or isinstance(argument, bool | int | float | Value):
        return argument
    return Value(to_node(argument, "an argument of a torch function"))
