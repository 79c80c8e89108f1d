"""`CapturedObject`: a captured object, dict or callable while its function is traced.

Its attributes and items are captured values of their own: `config.window` a number, `layer.bias[h]` an element.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .purity import effect_error
from .refusals import trace_error
from .sites import source_site
from .values import Value

Wrap = Callable[[str, Any, Any], Any]
Remake = Callable[[Callable[..., Any]], Callable[..., Any]]
_BUILTIN_METHODS = types.BuiltinMethodType | types.MethodWrapperType
#: Methods of a captured dict, set, deque, ... that change nothing; those of a dict that give its values are below.
_PURE_METHODS = frozenset({
    "copy", "count", "index", "isdisjoint", "issubset", "issuperset", "union", "intersection", "difference",
    "symmetric_difference", "__contains__", "__eq__", "__ne__", "__len__", "__hash__", "__lt__", "__le__", "__gt__",
    "__ge__", "__and__", "__or__", "__sub__", "__xor__",
})  # fmt: skip


class CapturedObject:
    """Stands for `target`; `wrap(name, value, key)` makes captured values, `remake(function)` functions over them."""

    __slots__ = ("_name", "_remake", "_target", "_wrap")

    def __init__(self, name: str, target: Any, wrap: Wrap, remake: Remake) -> None:
        for slot, value in (("_name", name), ("_target", target), ("_wrap", wrap), ("_remake", remake)):
            object.__setattr__(self, slot, value)

    def __getattr__(self, name: str) -> Any:
        own = self._dict_method(name)
        if own is not None:
            return own
        value = getattr(self._target, name)
        if isinstance(value, types.MethodType):
            return self._bound(value)
        if isinstance(value, _BUILTIN_METHODS) and not isinstance(self._target, type | types.ModuleType):
            return checked_method(value)
        return self._wrap(name, value, ("attribute", id(self._target), name))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Value):
            key.__index__()  # raises: only a tensor can be indexed in the kernel
        name = key if isinstance(key, str) else f"{self._name}_{key}"
        return self._wrap(name, self._target[key], ("item", id(self._target), key))

    def _dict_method(self, name: str) -> Callable[..., Any] | None:
        """`get`, `keys`, `items` or `values` of a captured dict, over captured values."""
        target = self._target
        if not isinstance(target, dict):
            return None
        methods: dict[str, Callable[..., Any]] = {
            "get": lambda key, default=None: self[key] if key in target else default,
            "keys": lambda: tuple(target),
            "values": lambda: tuple(self[key] for key in target),
            "items": lambda: tuple((key, self[key]) for key in target),
        }
        return methods.get(name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(target_of(instance), self._target)

    def __subclasscheck__(self, subclass: Any) -> bool:
        return issubclass(target_of(subclass), self._target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        target = self._target
        if isinstance(target, type):
            return target(*args, **kwargs)
        method = target if isinstance(target, types.MethodType) else target.__call__
        call = self._bound(method) if isinstance(method, types.MethodType) else target
        return call(*args, **kwargs)

    def _bound(self, method: types.MethodType) -> Callable[..., Any]:
        """`method` made over, with its object (where that is this one) as this stand-in."""
        owner = method.__self__
        stand_in = self if owner is self._target else self._wrap(self._name, owner, ("owner", id(owner)))
        function = method.__func__
        made = self._remake(function) if isinstance(function, types.FunctionType) else function
        return lambda *args, **kwargs: made(stand_in, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self._target, "__next__"):
            raise trace_error(
                f"A mask or score function must have no side effects, but it draws from the iterator {self._name}."
                " Capture a tuple of its elements."
            )
        return (self._wrap(f"{self._name}_{i}", v, ("item", id(self._target), i)) for i, v in enumerate(self._target))

    def __len__(self) -> int:
        return len(self._target)

    def __contains__(self, item: Any) -> bool:
        return item in self._target

    def __bool__(self) -> bool:
        return bool(self._target)

    def __eq__(self, other: object) -> bool:
        return bool(self._target == (other._target if isinstance(other, CapturedObject) else other))

    def __hash__(self) -> int:
        return hash(self._target)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise trace_error(f"A mask or score function must have no side effects, but it assigns to {self._name}.{name}.")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise trace_error(f"A mask or score function must have no side effects, but it assigns to {self._name}[...].")

    def __delitem__(self, key: Any) -> NoReturn:
        raise trace_error(f"A mask or score function must have no side effects, but it deletes from {self._name}.")


def target_of(value: Any) -> Any:
    """The object that `value` stands for, or `value` itself."""
    return value._target if type(value) is CapturedObject else value


def checked_method(method: Any) -> Any:
    """`method`, a builtin method of a captured object. Raises TraceError where it may change the object."""
    name, owner = method.__name__, type(method.__self__)
    if name in _PURE_METHODS or owner in _IMMUTABLE:
        return method
    raise effect_error(f"{owner.__name__}.{name}()", source_site())


#: Every method of these gives a new object.
_IMMUTABLE = frozenset({str, bytes, int, float, bool, complex, tuple, frozenset, range, type(None)})
