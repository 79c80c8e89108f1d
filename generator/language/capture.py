"""`Captures`: a mask or score function made over so that its captured numbers and tensors are symbolic.

The function's code runs as it is; only the variables it captured (closure cells, globals it reads, default arguments)
are replaced, in a copy, by `Value` and `Table`. Helper functions it calls are made over in the same way.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import math
import numbers
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ..errors import TraceError
from . import functions
from .node import MAX_TABLE_DIMS, TABLE_DTYPES, ScalarSlot, TableSlot, is_slot_name, make
from .objects import CapturedObject, checked_method, target_of
from .ops import INT64_MAX, INT64_MIN, SCALAR_LIMIT, round_fp32
from .purity import Area, area_of, refuse_assignments, refused
from .refusals import trace_error
from .sites import source_site
from .tracing import noted
from .values import Table, Value

#: Element type names of torch, cupy and numpy, without their module.
_DTYPE_NAMES = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
    "int32": "int32", "int64": "int64", "uint8": "uint8", "bool": "bool",
}  # fmt: skip
#: Captured values of these types are constants of the graph: another one is another kernel.
_CONSTANTS = (bool, str, bytes, enum.Enum, Value, types.ModuleType, types.BuiltinFunctionType, type)
#: Functions of these are called as they are.
_LANGUAGE = __name__.rpartition(".")[0]
_FOREIGN = (Area.ARRAYS, Area.PURE)


class Captures:
    """The captured values met while one function is traced. `scalars` and `tables`: slot -> run-time value."""

    def __init__(self) -> None:
        self.scalars: dict[ScalarSlot, int | float] = {}
        self.tables: dict[TableSlot, Any] = {}
        self._names: set[str] = set()
        self._wrapped: dict[Any, Any] = {}

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` over symbolic captures. Raises TraceError where it cannot be made over."""
        if isinstance(fn, functools.partial):
            args = [self.wrap(f"arg_{i}", a, ("partial", id(fn), i)) for i, a in enumerate(fn.args)]
            keywords = {k: self.wrap(k, v, ("partial", id(fn), k)) for k, v in fn.keywords.items()}
            return functools.partial(self.function(fn.func), *args, **keywords)
        if not isinstance(fn, types.FunctionType):
            if not callable(fn) or isinstance(fn, types.BuiltinFunctionType | type):
                raise TraceError(
                    f"A mask or score must be a Python function, but got {type(fn).__qualname__}."
                    " Write `def mask(b, h, q_idx, kv_idx): return kv_idx <= q_idx`."
                )
            return self._object(type(fn).__name__, fn)
        if id(fn) in self._wrapped:
            return self._wrapped[id(fn)]  # type: ignore[no-any-return]
        if area_of(fn.__module__) is Area.LIBRARY:
            return refused(f"{fn.__module__}.{fn.__qualname__}()", source_site)
        refuse_assignments(fn.__code__)
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        scope: dict[str, Any] = dict(fn.__globals__)
        made = types.FunctionType(fn.__code__, scope, fn.__name__, None, cells)
        self._wrapped[id(fn)] = made  # before its captures: a function may call itself
        for name in _globals_read(fn.__code__):
            if name in fn.__globals__:
                scope[name] = self.wrap(name, fn.__globals__[name], ("global", id(fn.__globals__), name))
            elif name in _BUILTINS:
                scope[name] = _BUILTINS[name]
            elif name == "type":
                scope[name] = _Type(self._wrapped)
        for name, old, new in zip(fn.__code__.co_freevars, fn.__closure__ or (), cells, strict=True):
            try:
                contents = old.cell_contents
            except ValueError:  # an empty cell: the variable is not bound yet
                continue
            new.cell_contents = self.wrap(name, contents, ("cell", id(old)))
        made.__defaults__, made.__kwdefaults__ = self._defaults(fn)
        return made

    def _defaults(self, fn: types.FunctionType) -> tuple[tuple[Any, ...] | None, dict[str, Any] | None]:
        defaults = fn.__defaults__
        if defaults:
            names = fn.__code__.co_varnames[fn.__code__.co_argcount - len(defaults) : fn.__code__.co_argcount]
            defaults = tuple(self.wrap(n, v, ("default", id(fn), n)) for n, v in zip(names, defaults, strict=True))
        keywords = fn.__kwdefaults__
        if keywords:
            keywords = {n: self.wrap(n, v, ("default", id(fn), n)) for n, v in keywords.items()}
        return defaults, keywords

    def wrap(self, name: str, value: Any, key: Any) -> Any:
        """What stands for captured `value` in the traced function; `key` tells captured variables apart."""
        try:
            return self._wrap(name, value, key)
        except TraceError as error:
            raise noted(error) from None

    def _wrap(self, name: str, value: Any, key: Any) -> Any:
        if value is None or isinstance(value, _CONSTANTS):
            return self._constant(name, value)
        if isinstance(value, numbers.Real):
            if key not in self._wrapped:
                self._wrapped[key] = self._scalar(name, value)
            return self._wrapped[key]
        if _is_tensor(value):
            if id(value) not in self._wrapped:
                self._wrapped[id(value)] = self._table(name, value)
            return self._wrapped[id(value)]
        if isinstance(value, tuple | list):
            return tuple(self.wrap(f"{name}_{i}", v, (key, i)) for i, v in enumerate(value))
        if isinstance(value, types.FunctionType | functools.partial):
            module = getattr(value, "__module__", None)
            area = area_of(module)
            own = isinstance(module, str) and module.startswith(_LANGUAGE)
            return value if own or area in _FOREIGN else self.function(value)
        inline = getattr(value, "inline_into", None)  # a Traced
        if inline is not None:
            return inline(self)
        if hasattr(value, "dtype") and hasattr(value, "item"):  # a scalar of numpy that is no number: bool_
            return self.wrap(name, value.item(), key)
        return self._object(name, value)

    def _constant(self, name: str, value: Any) -> Any:
        """`value`, or what stands for a user's module or class: its attributes are captured values too."""
        if isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            return value if owner is None or isinstance(owner, type | types.ModuleType) else checked_method(value)
        if isinstance(value, types.ModuleType):
            return self._object(name, value) if area_of(value.__name__) is Area.USER else value
        if isinstance(value, type) and not issubclass(value, BaseException):
            return self._object(name, value) if area_of(value.__module__) is Area.USER else value
        return value

    def _object(self, name: str, value: Any) -> CapturedObject:
        if id(value) not in self._wrapped:
            self._wrapped[id(value)] = CapturedObject(name, value, self.wrap, self.function)
        return self._wrapped[id(value)]  # type: ignore[no-any-return]

    def _scalar(self, name: str, value: numbers.Real) -> Value:
        number, dtype = scalar_value(name, value)
        slot = ScalarSlot(self.unique(name), dtype)
        self.scalars[slot] = number
        return Value(make("scalar", (), slot))

    def _table(self, name: str, value: Any) -> Table:
        ndim = len(value.shape)
        if ndim > MAX_TABLE_DIMS:
            raise TraceError(f"A captured tensor may have at most {MAX_TABLE_DIMS} dimensions, but {name} has {ndim}.")
        slot = TableSlot(self.unique(name), table_dtype(name, value), ndim)
        self.tables[slot] = value
        return Table(slot)

    def unique(self, name: str) -> str:
        """`name` as an identifier of C++ that no other captured value has."""
        base = re.sub(r"[^A-Za-z0-9_]", "x", name).strip("_")[:16].rstrip("_") or "value"
        if not base[0].isalpha():
            base = f"v{base}"
        # The arguments of tables have such names.
        if re.search(r"_(stride|size)(_\d+)?\Z", base):
            base = f"{base}_v"
        found, count = base, 1
        while found in self._names:
            count += 1
            found = f"{base}_{count}"
        assert is_slot_name(found)
        self._names.add(found)
        return found


def scalar_value(name: str, value: numbers.Real) -> tuple[int | float, str]:
    """A captured number as a plain int or fp32-rounded float, and its slot's dtype. Raises TraceError."""
    if isinstance(value, numbers.Integral):
        number = int(value)
        if not INT64_MIN <= number <= INT64_MAX:
            raise TraceError(f"A captured integer must fit 64 bits, but {name} is {number}.")
        return number, "int32" if abs(number) <= SCALAR_LIMIT else "int64"
    if math.isnan(value):
        raise TraceError(f"A captured number must not be NaN, but {name} is. Check how it was computed.")
    return round_fp32(float(value)), "fp32"


def table_dtype(name: str, tensor: Any) -> str:
    """The element type of a captured tensor as TABLE_DTYPES names it. Raises TraceError."""
    text = str(tensor.dtype).rpartition(".")[2]
    if text not in _DTYPE_NAMES:
        raise TraceError(
            f"A captured tensor must be {', '.join(_DTYPE_NAMES)}, but {name} is {text}."
            f" Convert it before the function, for example to int32 or float32."
        )
    assert _DTYPE_NAMES[text] in TABLE_DTYPES
    return _DTYPE_NAMES[text]


def _instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, types.CodeType]]:
    for instruction in dis.get_instructions(code):
        yield instruction, code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _globals_read(code: types.CodeType) -> list[str]:
    reads = (i.argval for i, _ in _instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return list(dict.fromkeys(reads))


def _is_tensor(value: Any) -> bool:
    # numpy's scalars have all of this but assignment.
    return all(hasattr(value, name) for name in ("dtype", "shape", "__getitem__", "__setitem__"))


def _traced_or(python: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """`python` where no argument is traced, else `traced`."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs) if any(isinstance(a, Value | Table) for a in args) else python(*args, **kwargs)

    return choose


def _isinstance(value: Any, classes: Any) -> bool:
    asked = classes if isinstance(classes, tuple) else (classes,)
    if isinstance(value, Value | Table) and any(kind in _NUMBER_TYPES for kind in asked if isinstance(kind, type)):
        raise trace_error(
            "isinstance() of a traced value takes one branch for every index: it is a stand-in, no Python number."
            " b, h, q_idx and kv_idx are ints, and score is a float; remove the check."
        )
    return isinstance(target_of(value), classes)


_NUMBER_TYPES = frozenset({int, float, bool, complex, numbers.Number, numbers.Complex, numbers.Real, numbers.Rational,
                           numbers.Integral})  # fmt: skip


class _Type:
    """`type` inside a traced function: as Python's, but refused for traced values."""

    def __init__(self, wrapped: dict[Any, Any]) -> None:
        self._wrapped = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1:
            return type(*args, **kwargs)
        if isinstance(args[0], Value | Table):
            raise trace_error(
                "type() of a traced value takes one branch for every index: it is a stand-in, no Python number."
                " b, h, q_idx and kv_idx are ints, and score is a float; remove the check."
            )
        kind = type(target_of(args[0]))
        return self._wrapped.get(id(kind), kind)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(target_of(instance), type)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise trace_error(f"A mask or score function must have no side effects, but it calls {name}(). Remove it.")

    return refuse


_BUILTINS: dict[str, Callable[..., Any]] = {
    "min": _traced_or(builtins.min, lambda *args: functools.reduce(functions.minimum, args)),
    "max": _traced_or(builtins.max, lambda *args: functools.reduce(functions.maximum, args)),
    "isinstance": _isinstance,
    "float": _traced_or(builtins.float, functions.to_float),
    **{name: _refused(name) for name in ("print", "input", "open", "exec", "eval", "setattr", "globals", "breakpoint")},
}
