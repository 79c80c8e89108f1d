"""`describe`: a graph as one line of Python."""

from __future__ import annotations

from .graph import Graph
from .node import Node, ScalarSlot, TableSlot
from .ops import fp32_text

MAX_LENGTH = 200

#: op -> (Python operator, precedence). Higher binds tighter. Bool operators are Python's `&` and `|`.
BINARY = {
    "mul": ("*", 11), "div": ("/", 11), "floordiv": ("//", 11), "mod": ("%", 11), "add": ("+", 10), "sub": ("-", 10),
    "shl": ("<<", 9), "shr": (">>", 9), "bitand": ("&", 8), "bitxor": ("^", 7), "bitor": ("|", 6),
    "lt": ("<", 5), "le": ("<=", 5), "eq": ("==", 5), "ne": ("!=", 5), "and": ("&", 8), "xor": ("^", 7), "or": ("|", 6),
}  # fmt: skip
_PREFIX = {"neg": "-", "not": "~", "bitnot": "~"}
_UNARY_PRECEDENCE = 12
_ATOM = 20


def describe(graph: Graph) -> str:
    """The graph's expression on one line; a long one as its size and the head of its digest."""
    texts: dict[Node, tuple[str, int]] = {}
    for node in graph.nodes:
        text, precedence = _text(node, texts)
        if len(text) > MAX_LENGTH:
            return f"{graph.kind} of {len(graph.nodes)} nodes, {graph.digest[:12]}"
        texts[node] = text, precedence
    return texts[graph.root][0]


def _text(node: Node, texts: dict[Node, tuple[str, int]]) -> tuple[str, int]:
    value, args = node.value, [texts[a] for a in node.args]
    if isinstance(value, ScalarSlot):
        return value.name, _ATOM
    if isinstance(value, TableSlot):
        return f"{value.name}[{', '.join(t for t, _ in args) or '()'}]", _ATOM
    if isinstance(value, float):
        return fp32_text(value), _ATOM
    if not args:
        return str(value), _ATOM
    if node.op in _PREFIX:
        return _PREFIX[node.op] + _inside(args[0], _UNARY_PRECEDENCE), _UNARY_PRECEDENCE
    if node.op in BINARY:
        symbol, precedence = BINARY[node.op]
        # Comparisons do not chain: both sides of one are put in parentheses if they compare.
        left = precedence + 1 if precedence == 5 else precedence
        return f"{_inside(args[0], left)} {symbol} {_inside(args[1], precedence + 1)}", precedence
    name = {"to_fp32": "float", "min": "minimum", "max": "maximum"}.get(node.op, node.op)
    return f"{name}({', '.join(t for t, _ in args)})", _ATOM


def _inside(argument: tuple[str, int], precedence: int) -> str:
    text, own = argument
    return text if own >= precedence else f"({text})"
