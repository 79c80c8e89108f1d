"""`trace_mask` and `trace_score`: a Python function as an expression graph and the values it captured."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import TraceError
from .capture import Captures
from .graph import MAX_NODES, Graph
from .node import Node, ScalarSlot, leaf, make, rewrite
from .purity import guarded
from .rules import rebuild
from .simplify import simplify
from .sites import site_text
from .tracing import tracing
from .values import Value, as_float, to_node

MASK_SIGNATURE = ("b", "h", "q_idx", "kv_idx")
SCORE_SIGNATURE = ("score", *MASK_SIGNATURE)


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A graph, and the captured values its slots stand for in this call.

    `scalars[i]` belongs to `graph.scalars[i]` (an int, or a float rounded to fp32), `tables[i]` to `graph.tables[i]`.
    Inside another mask or score function a captured `Traced` can be called like the function it came from.
    """

    graph: Graph
    scalars: tuple[int | float, ...] = ()
    tables: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Any:
        raise TraceError(
            f"A traced {self.graph.kind} can only be called inside another mask or score function that captures it."
            " Use flashsmith.generator.language.evaluate.evaluate(graph, ...) to compute its value."
        )

    def inline_into(self, captures: Captures) -> Callable[..., Value]:
        """This graph as a function of traced values, its captures added to `captures`."""
        slots: dict[Any, Any] = {}
        for scalar, number in zip(self.graph.scalars, self.scalars, strict=True):
            slots[scalar] = type(scalar)(captures.unique(scalar.name), scalar.dtype)
            captures.scalars[slots[scalar]] = number
        for table, tensor in zip(self.graph.tables, self.tables, strict=True):
            slots[table] = type(table)(captures.unique(table.name), table.dtype, table.ndim)
            captures.tables[slots[table]] = tensor
        names = MASK_SIGNATURE if self.graph.kind == "mask" else SCORE_SIGNATURE

        def inlined(*args: Any) -> Value:
            if len(args) != len(names):
                expected = ", ".join(names)
                raise TraceError(f"A traced {self.graph.kind} takes ({expected}), but got {len(args)} arguments.")
            leaves = {name: to_node(a, name) for name, a in zip(names, args, strict=True)}
            return Value(substitute(self.graph.root, leaves, slots))

        return inlined


def substitute(root: Node, leaves: dict[str, Node], slots: dict[Any, Any]) -> Node:
    """`root` with leaves and slots replaced."""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op == "leaf":
            return leaves.get(str(node.value), node)
        if node.op in ("scalar", "load"):
            return make(node.op, args, slots.get(node.value, node.value))
        return rebuild(node, args)

    return rewrite([root], change)[root]


def trace_mask(fn: Callable[..., Any] | Traced) -> Traced:
    """The mask `fn(b, h, q_idx, kv_idx) -> bool` as a graph (True: the key is seen). Raises TraceError."""
    return _trace(fn, "mask", MASK_SIGNATURE)


def trace_score(fn: Callable[..., Any] | Traced) -> Traced:
    """The score modification `fn(score, b, h, q_idx, kv_idx) -> fp32` as a graph. Raises TraceError."""
    return _trace(fn, "score", SCORE_SIGNATURE)


def _trace(fn: Callable[..., Any] | Traced, kind: str, names: tuple[str, ...]) -> Traced:
    if isinstance(fn, Traced):
        if fn.graph.kind != kind:
            raise TraceError(f"A {kind} is needed here, but got a traced {fn.graph.kind}. Swap mask_mod and score_mod.")
        return fn
    first = _trace_once(fn, kind, names)
    second = _trace_once(fn, kind, names)
    if first.graph != second.graph:
        raise TraceError(
            f"A {kind} function must give the same expression each time it runs, but two runs of {_name(fn)} gave"
            f" `{first.graph.describe()}` and `{second.graph.describe()}`. Take random numbers, counters and"
            " mutable state out of it."
        )
    return first


def _trace_once(fn: Callable[..., Any], kind: str, names: tuple[str, ...]) -> Traced:
    captures = Captures()
    made = captures.function(fn)
    _check_signature(fn, kind, names)
    arguments = [Value(leaf(name)) for name in names]
    with tracing() as trace:
        root, error = _run(lambda: _root_of(_call(made, arguments), kind, _name(fn)))
        graph = None if root is None or trace.errors else simplify(Graph(kind, root))
    if trace.errors and error is not trace.errors[0]:
        raise TraceError(
            f"{trace.errors[0]} {_name(fn)} caught this error, and what it computed then would hold for every index:"
            " take the `try` away."
        ) from None
    if isinstance(error, TraceError):
        raise error
    if graph is None:
        assert error is not None
        raise TraceError(
            f"The {kind} function {_name(fn)} raised {type(error).__name__} while it was traced: {error}."
            f" It may only compute with its arguments, numbers and elements of captured tensors.{_error_site(error)}"
        ) from error
    if len(graph.nodes) > MAX_NODES:
        raise TraceError(
            f"A {kind} function may have at most {MAX_NODES} operations, but {_name(fn)} has {len(graph.nodes)}."
            " Shorten its loops, or put precomputed values into a captured tensor."
        )
    _check_divisors(graph, captures, _name(fn))
    return Traced(
        graph,
        tuple(captures.scalars[slot] for slot in graph.scalars),
        tuple(captures.tables[slot] for slot in graph.tables),
    )


def _call(made: Callable[..., Any], arguments: list[Value]) -> Any:
    with guarded():
        return made(*arguments)


def _run(compute: Callable[[], Node]) -> tuple[Node | None, BaseException | None]:
    """(root, None), or (None, what was raised); a request to end the process is an error like others."""
    try:
        return compute(), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
        return None, error


def _check_divisors(graph: Graph, captures: Captures, name: str) -> None:
    for node in graph.nodes:
        divisor = node.args[1].value if node.op in ("floordiv", "mod") else None
        if isinstance(divisor, ScalarSlot) and captures.scalars[divisor] == 0:
            raise TraceError(
                f"`//` and `%` need a divisor other than 0, but {name} divides by {divisor.name}, which is 0."
            )


def _root_of(result: Any, kind: str, name: str) -> Node:
    if result is None:
        raise TraceError(f"A {kind} function must return a value, but {name} returned None. Add the `return`.")
    node = to_node(result, f"the result of {name}")
    if kind == "mask" and node.dtype != "bool":
        raise TraceError(
            f"A mask function must return a bool (True: the key is seen), but {name} returned {node.dtype}."
            " Compare it: `x != 0`."
        )
    if kind == "score" and node.dtype == "bool":
        raise TraceError(
            f"A score function must return a number, but {name} returned a bool."
            " Pass a condition as mask_mod, or write where(condition, score, -math.inf)."
        )
    return node if kind == "mask" else as_float(node)


def _check_signature(fn: Callable[..., Any], kind: str, names: tuple[str, ...]) -> None:
    try:
        inspect.signature(fn).bind(*names)
    except TypeError as error:
        raise TraceError(
            f"A {kind} function takes the positional arguments ({', '.join(names)}), but {_name(fn)} does not: {error}."
        ) from None


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _error_site(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = __file__.rpartition("/")[0]
    for frame in reversed(frames):
        if not frame.filename.startswith(own):
            return site_text(frame.filename, frame.lineno or 0)
    return ""
