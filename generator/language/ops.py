"""The operations of the mask and score language: their names, types and meaning in plain Python.

Three types: `bool`, `int` and `fp32`. Integers are exact while they fit 64 bits; the CUDA text computes in 32 bits
where it can prove that nothing is lost. `//` and `%` round towards minus infinity, as in Python.
"""

from __future__ import annotations

import math
import numbers
import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

#: Leaves and their type. The second group stands for the bounds of a tile and never occurs in a traced graph.
INDEX_LEAVES = ("b", "h", "q_idx", "kv_idx")
SIZE_LEAVES = ("seqlen_q", "seqlen_k", "nheads")
TILE_LEAVES = ("q_first", "q_last", "kv_first", "kv_last")

#: Every index and size is below this. 2^29 keys of 64 fp16 elements are 64 GiB for one head of K alone.
SIZE_LIMIT = 1 << 29
#: Captured integers up to this size are 32-bit arguments; larger ones are 64-bit. Sums with indices stay in 32 bits.
SCALAR_LIMIT = 1 << 30

_UNARY = {"neg", "abs", "exp", "log", "tanh", "sqrt", "to_fp32", "not", "bitnot"}
_ARITHMETIC = {"add", "sub", "mul", "min", "max"}
_INTEGER = {"floordiv", "mod", "bitand", "bitor", "bitxor", "shl", "shr"}
_TRANSCENDENTAL = {"exp", "log", "tanh", "sqrt"}
_COMPARE = {"lt", "le", "eq", "ne"}
_LOGICAL = {"and", "or", "xor"}

#: Number of operands of every operation that has some. `load` takes one per dimension of its table.
ARITY: dict[str, int] = {
    **dict.fromkeys(_UNARY, 1),
    **dict.fromkeys(_ARITHMETIC | _INTEGER | _COMPARE | _LOGICAL | {"div"}, 2),
    "where": 3,
}


def result_dtype(op: str, dtypes: tuple[str, ...]) -> str | None:
    """The type of `op` applied to operands of `dtypes`, or None if it does not take them."""
    first = dtypes[0]
    same = all(d == first for d in dtypes)
    number = first in ("int", "fp32")
    if op in _ARITHMETIC or op in ("neg", "abs"):
        return first if same and number else None
    if op in _INTEGER or op == "bitnot":
        return "int" if same and first == "int" else None
    if op == "div" or op in _TRANSCENDENTAL:
        return "fp32" if same and first == "fp32" else None
    if op == "to_fp32":
        return "fp32" if first == "int" else None
    if op in _COMPARE:
        return "bool" if same and number else None
    if op in _LOGICAL or op == "not":
        return "bool" if same and first == "bool" else None
    if op == "where":
        return dtypes[1] if first == "bool" and dtypes[1] == dtypes[2] else None
    return None


def round_fp32(value: float) -> float:
    """`value` rounded to the nearest fp32 (ties to even, overflow to infinity)."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def fp32_text(value: float) -> str:
    """The shortest decimal that reads back as the fp32 `value`: `0.1`, `1e-08`, `-inf`."""
    if not math.isfinite(value):
        return str(value)
    digits = 1
    while round_fp32(float(f"{value:.{digits}g}")) != value:
        digits += 1
    text = f"{value:.{digits}g}"
    return text if any(c in text for c in ".e") else text + ".0"


def _divide(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _log(x: float) -> float:
    if x > 0:
        return math.log(x)
    return -math.inf if x == 0 else math.nan


#: Every operation on plain Python numbers; `x // 0` and `x % 0` are 0, as in the generated kernels.
PYTHON_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "min": min,
    "max": max,
    "neg": operator.neg,
    "abs": abs,
    "exp": _exp,
    "log": _log,
    "tanh": math.tanh,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "to_fp32": float,
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
    "bitnot": operator.invert,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "xor": operator.xor,
    "not": operator.not_,
    "where": lambda c, a, b: a if c else b,
}


def number_text(value: object) -> str:
    """`value` for a message: its type and repr, shortened (Python refuses to print integers of many digits)."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def float_of(value: object) -> float | None:
    """A number (Python's, NumPy's, a fraction) as a float, infinite where it is beyond them; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if abs(value) == value else -math.inf
