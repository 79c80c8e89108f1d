"""Which functions a mask or score function may call: those known to have no effect and no state.

A function is traced twice and never runs again, so whatever it does beside computing its result is a mistake. `Guard`
sees each call before it happens. What it cannot see: item assignment, `del` and the methods of a list, dict or set on
an object that the function did not capture itself but got from a call (an attribute of a fresh object, say).
"""

from __future__ import annotations

import dis
import enum
import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..errors import TraceError
from .sites import site_text
from .tracing import noted

ARRAY_LIBRARIES = frozenset({"torch", "numpy", "cupy"})
#: Modules of the standard library whose functions compute a result and nothing else.
_PURE_MODULES = frozenset({
    "math", "cmath", "operator", "_operator", "functools", "_functools", "itertools", "numbers", "enum", "types",
    "typing", "abc", "_abc", "collections", "_collections", "_collections_abc", "dataclasses", "fractions", "bisect",
    "_bisect", "contextlib", "copy", "string", "re", "inspect", "builtins", "weakref", "_weakrefset",
})  # fmt: skip
_IMPURE_NAMES = {"_bisect": frozenset({"insort", "insort_left", "insort_right"})}
_PURE_BUILTINS = frozenset({
    "abs", "all", "any", "ascii", "bin", "callable", "chr", "dir", "divmod", "format", "getattr", "hasattr", "hash",
    "hex", "id", "isinstance", "issubclass", "iter", "len", "max", "min", "next", "oct", "ord", "pow", "repr", "round",
    "sorted", "sum", "vars", "__build_class__",
})  # fmt: skip
#: Functions of torch, numpy and cupy that draw numbers, or change or store something.
_IMPURE_ARRAYS = frozenset({
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson",
    "multinomial", "dropout", "seed", "initial_seed", "manual_seed", "copyto", "put", "place", "putmask", "fill",
    "save", "savez", "savez_compressed", "savetxt", "tofile", "load", "loadtxt", "fromfile", "seterr", "setflags",
    "set_printoptions", "set_default_dtype", "set_default_device", "set_default_tensor_type", "set_num_threads",
    "set_grad_enabled",
})  # fmt: skip
_IMPURE_ARRAY_MODULES = ("torch.serialization", "torch.random", "torch.hub", "torch.distributed", "torch.cuda",
                         "numpy.random", "cupy.random")  # fmt: skip


class Area(enum.Enum):
    """Whose code a module holds."""

    USER = enum.auto()
    OWN = enum.auto()
    ARRAYS = enum.auto()
    IMPORT = enum.auto()
    PURE = enum.auto()
    LIBRARY = enum.auto()


_OWN = __name__.partition(".")[0]
_areas: dict[str, Area] = {}


def area_of(module: object) -> Area:
    """The area of a module's name; what is no name, and `__main__`, is the user's."""
    if not isinstance(module, str):
        return Area.USER
    found = _areas.get(module)
    if found is None:
        if len(_areas) >= 4096:
            _areas.clear()
        found = _areas[module] = _area_of(module.partition(".")[0])
    return found


def _area_of(top: str) -> Area:
    if top == _OWN:
        return Area.OWN
    if top in ARRAY_LIBRARIES:
        return Area.ARRAYS
    if top in ("importlib", "_frozen_importlib", "_frozen_importlib_external"):
        return Area.IMPORT
    if top in _PURE_MODULES:
        return Area.PURE
    return Area.LIBRARY if top in sys.stdlib_module_names else Area.USER


def effect_error(what: str, site: str) -> TraceError:
    """The error of a call that may have an effect."""
    return noted(
        TraceError(
            f"A mask or score function must have no side effects, but it calls {what}, which is not known to have none"
            " (or to give the same each time). It is traced and never runs again: call it outside and capture the"
            f" result. Inside, use flashsmith.generator.language, math and operator.{site}"
        )
    )


class Guard:
    """A profile function for `sys.setprofile` that raises TraceError before a call with an effect."""

    __slots__ = ("_importing",)

    def __init__(self) -> None:
        self._importing: types.FrameType | None = None

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if self._importing is not None:  # what a module does while it is imported is its own affair
            if event == "return" and frame is self._importing:
                self._importing = None
        elif event == "c_call":
            if area_of(frame.f_globals.get("__name__")) is Area.USER and not _is_pure(arg):
                raise effect_error(_builtin_name(arg), site_text(frame.f_code.co_filename, frame.f_lineno))
        elif event == "call":
            self._python_call(frame)

    def _python_call(self, frame: types.FrameType) -> None:
        module = frame.f_globals.get("__name__")
        area = area_of(module)
        if area is Area.USER:
            refuse_assignments(frame.f_code, cells=False)
        elif area is Area.IMPORT:
            self._importing = frame
        elif area in (Area.LIBRARY, Area.ARRAYS):
            caller = frame.f_back
            if caller is None or area_of(caller.f_globals.get("__name__")) is not Area.USER:
                return
            name = frame.f_code.co_name
            if area is Area.LIBRARY or not _is_pure_array_function(str(module), name):
                raise effect_error(f"{module}.{name}()", site_text(caller.f_code.co_filename, caller.f_lineno))


@contextmanager
def guarded() -> Iterator[None]:
    """Within the block, calls in this thread that may have an effect raise TraceError.

    A profiler that cannot be put back (cProfile before Python 3.12) stays on, and calls go unwatched.
    """
    before = sys.getprofile()
    if before is not None and not callable(before):
        yield
        return
    # A finalizer of some other object, run by the collector here, is no call of the function.
    collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(Guard())
    try:
        yield
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()


def _is_pure(function: Any) -> bool:
    """Whether a builtin function or bound method is known to have no effect but on its own object."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
    elif owner is None:
        module = getattr(function, "__module__", None) or ""
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        module = kind.__module__
        if module in ("builtins", "collections"):
            return True  # a captured list, dict or set is a stand-in: this one is the function's own
    if module == "builtins":
        return name in _PURE_BUILTINS
    area = area_of(module)
    if area is Area.ARRAYS:
        return _is_pure_array_function(module, name)
    return area is Area.OWN or (area is Area.PURE and name not in _IMPURE_NAMES.get(module, ()))


def _is_pure_array_function(module: str, name: str) -> bool:
    in_place = name.endswith("_") and not name.startswith("_")
    return not in_place and name not in _IMPURE_ARRAYS and not module.startswith(_IMPURE_ARRAY_MODULES)


def _builtin_name(function: Any) -> str:
    owner, name = getattr(function, "__self__", None), function.__name__
    if isinstance(owner, types.ModuleType):
        return f"{owner.__name__}.{name}()"
    if owner is None:
        return f"{getattr(function, '__module__', None) or '?'}.{name}()"
    return f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}()"


def refused(what: str, site: Callable[[], str]) -> Callable[..., Any]:
    """A function that raises TraceError: stands for one with an effect, which may be named but not called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise effect_error(what, site())

    return refuse


def refuse_assignments(code: types.CodeType, *, cells: bool = True) -> None:
    """Raises TraceError where `code`, or a function inside it, assigns to a variable outside it, or to an attribute of
    one. `cells`: whether `code` is a whole function, whose free variables live outside it."""
    if (code, cells) in _checked:
        return
    for owner, instructions in _codes(code):
        for at, instruction in enumerate(instructions):
            target = _outside_target(code, instructions, at, cells)
            if target:
                line = instruction.positions.lineno if instruction.positions else None
                raise noted(
                    TraceError(
                        "A mask or score function must have no side effects, but it assigns to"
                        f" {target}, which lives outside it. It is traced once and never runs again; return the value"
                        f" instead.{site_text(owner.co_filename, line or owner.co_firstlineno)}"
                    )
                )
    if len(_checked) >= 4096:
        _checked.clear()
    _checked.add((code, cells))


_checked: set[tuple[types.CodeType, bool]] = set()


def _outside_target(code: types.CodeType, instructions: list[dis.Instruction], at: int, cells: bool) -> str:
    """The name outside of `code` that the instruction assigns to, or ""."""
    op, name = instructions[at].opname, str(instructions[at].argval)
    if op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
        return name
    if cells and op in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
        return name
    if op not in ("STORE_ATTR", "DELETE_ATTR"):
        return ""
    path = [name]
    for before in reversed(instructions[:at]):
        path.append(str(before.argval))
        if before.opname != "LOAD_ATTR":
            outside = before.opname == "LOAD_GLOBAL" or (cells and before.argval in code.co_freevars)
            return ".".join(reversed(path)) if outside else ""
    return ""


def _codes(code: types.CodeType) -> Iterator[tuple[types.CodeType, list[dis.Instruction]]]:
    yield code, list(dis.get_instructions(code))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
