"""What a mask or score function has captured, as a key: equal keys mean that a trace made before still holds.

Tracing takes a millisecond; reading the captures takes about a microsecond. A call that repeats therefore compares the
captures and traces again only where one of them changed: a number by value, a tensor by dtype, shape and strides (its
contents and its address are read at launch).
"""

from __future__ import annotations

import dis
import functools
import numbers
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..generator.language import Traced, Value

#: Modules whose attributes do not change between calls: functions of them may be used inside a mask or score function.
_CONSTANT_MODULES = frozenset({"math", "operator", "torch", "numpy", "cupy", "flashsmith", "builtins"})
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Captures:
    """`key` identifies code and captured values; `tensors` are the captured tensors, in the key's order."""

    key: tuple[Any, ...]
    tensors: tuple[Any, ...]

    @property
    def wants_grad(self) -> bool:
        """Whether a captured tensor requires a gradient."""
        return any(getattr(tensor, "requires_grad", False) for tensor in self.tensors)


def read_captures(*functions: object) -> Captures | None:
    """The captures of `functions` (None entries allowed), or None if one holds something that cannot be compared.

    A tensor captured twice is told from two tensors of one kind: the key holds each tensor's first position.
    """
    parts: list[Any] = []
    tensors: list[Any] = []
    for function in functions:
        if not _read_value(function, parts, tensors, 0):
            return None
    return Captures(tuple(parts), tuple(tensors))


def _read_value(value: Any, parts: list[Any], tensors: list[Any], depth: int) -> bool:
    """Appends what identifies `value`; False where nothing can."""
    # The kinds of almost every call come first: this is read each time.
    kind = value.__class__
    if value is None:
        parts.append(None)
        return True
    if depth > _MAX_DEPTH:
        return False
    if kind is types.FunctionType:
        return _read_function(value, parts, tensors, depth + 1)
    if kind is int:
        parts.append((int, value))
        return True
    if hasattr(value, "data_ptr"):
        _read_tensor(value, parts, tensors)
        return True
    if kind in (str, types.BuiltinFunctionType, type):
        parts.append(value)
        # The attributes of a user's class may change between calls.
        return kind is not type or value.__module__.partition(".")[0] in _CONSTANT_MODULES
    if isinstance(value, numbers.Real):
        # 3, 3.0 and True are equal as keys, 0.0 and -0.0 too; their traces differ.
        parts.append((kind, repr(value)))
        return True
    if kind in (tuple, list):
        parts.append(len(value))
        return all(_read_value(item, parts, tensors, depth + 1) for item in value)
    if kind is types.ModuleType:
        parts.append(value.__name__)
        return value.__name__.partition(".")[0] in _CONSTANT_MODULES
    if kind is functools.partial:
        parts.append(tuple(value.keywords))
        return _read_value((value.func, value.args, tuple(value.keywords.values())), parts, tensors, depth + 1)
    if kind is Traced:
        parts.append(value.graph)
        return all(_read_value(item, parts, tensors, depth + 1) for item in (*value.scalars, *value.tables))
    if kind is Value:  # seqlen_q and the like, or an expression over them
        parts.append(value.node)
        return True
    if is_tensor_like(value):
        _read_tensor(value, parts, tensors)
        return True
    return False


def is_tensor_like(value: object) -> bool:
    """True for what a mask or score function may index: an array with dtype and shape (torch, CuPy, NumPy)."""
    # NumPy's scalars have all of this but assignment: they are numbers.
    return all(hasattr(value, name) for name in ("dtype", "shape", "__getitem__", "__setitem__"))


def _read_function(function: types.FunctionType, parts: list[Any], tensors: list[Any], depth: int) -> bool:
    parts.append(function.__code__)  # by value: the same text with the same captures is the same function
    values: list[Any] = list(function.__defaults__ or ())
    values += (value for _, value in sorted((function.__kwdefaults__ or {}).items()))
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # an empty cell: the tracer says which name
            return False
    if (function.__module__ or "").partition(".")[0] not in _CONSTANT_MODULES:
        space = function.__globals__
        # A name that is no global now is a builtin, or an error that the tracer reports.
        values += (space[name] for name in _global_names(function.__code__) if name in space)
    # A function may name itself.
    return all(value is function or _read_value(value, parts, tensors, depth) for value in values)


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that `code`, or code inside it, looks up as globals, each once."""
    names = _names_by_code.get(code)
    if names is None:
        if len(_names_by_code) >= 1024:
            _names_by_code.clear()
        names = _names_by_code[code] = tuple(dict.fromkeys(_walk_global_names(code)))
    return names


_names_by_code: dict[types.CodeType, tuple[str, ...]] = {}


def _walk_global_names(code: types.CodeType) -> Iterator[str]:
    yield from (str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _walk_global_names(constant)


def _read_tensor(tensor: Any, parts: list[Any], tensors: list[Any]) -> None:
    try:
        strides = tensor.stride() if hasattr(tensor, "stride") else tensor.strides
    except RuntimeError:  # a sparse tensor: refused before a launch
        strides = tensor.layout
    # Torch's negative bit: such a tensor is refused, also after one without it was taken.
    is_neg = getattr(tensor, "is_neg", None)
    negated = is_neg is not None and is_neg()
    device = getattr(tensor, "device", None)
    first = 0
    for other in tensors:
        if other is tensor:
            break
        first += 1
    # NumPy's and CuPy's dtype and device objects hash by value, as torch's do.
    parts.append((tensor.__class__, tensor.dtype, tuple(tensor.shape), strides, device, first, negated))
    tensors.append(tensor)
