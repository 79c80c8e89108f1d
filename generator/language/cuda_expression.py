"""`render_node`: one operation as a C++ expression over the texts of its operands.

An integer is computed in 32 bits where its range proves that nothing is lost, else in 64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .node import Node, ScalarSlot
from .ops import SIZE_LEAVES, fp32_text
from .ranges import fits_int32

#: A C++ expression and its precedence, higher binds tighter.
Text = tuple[str, int]

ATOM, _UNARY, _PRODUCT, _SUM, _SHIFT, _TERNARY = 20, 12, 11, 10, 9, 1
_BINARY = {
    "mul": ("*", _PRODUCT), "div": ("/", _PRODUCT), "add": ("+", _SUM), "sub": ("-", _SUM), "shr": (">>", _SHIFT),
    "lt": ("<", 8), "le": ("<=", 8), "eq": ("==", 7), "ne": ("!=", 7), "xor": ("!=", 7),
    "bitand": ("&", 6), "bitxor": ("^", 5), "bitor": ("|", 4), "and": ("&&", 3), "or": ("||", 2),
}  # fmt: skip
_FUNCTIONS = {"floordiv": "floor_div", "mod": "floor_mod", "min": "min", "max": "max", "abs": "abs",
              "exp": "exp", "log": "log", "tanh": "tanh", "sqrt": "sqrt"}  # fmt: skip
#: Operators whose operands, if they are of a looser kind than a product, are put in parentheses for the reader.
_MIXES_BADLY = {"shr", "bitand", "bitxor", "bitor", "xor", "eq", "ne"}


def ctype(node: Node) -> str:
    """The C++ type of a node's value."""
    if node.dtype == "int":
        return "int" if fits_int32(node.range) else "long long"
    return "bool" if node.dtype == "bool" else "float"


def suffix(*nodes: Node) -> str:
    """The suffix of the primitive that takes and gives `nodes`: f32, s64 or s32."""
    types = {ctype(node) for node in nodes}
    return "f32" if "float" in types else "s64" if "long long" in types else "s32"


def render_node(node: Node, texts: Mapping[Node, Text], prefix: str) -> Text:
    """The expression of any node but a table's read. Captured numbers are `args.<prefix>_<name>`."""
    args = node.args
    if isinstance(node.value, ScalarSlot):
        return f"args.{prefix}_{node.value.name}", ATOM
    if node.op == "const":
        return _constant(node)
    if node.op == "leaf":
        return f"args.{node.value}" if node.value in SIZE_LEAVES else str(node.value), ATOM
    if node.op in _BINARY:
        return _binary(node, texts)
    if node.op == "where":
        condition = _inside(args[0], 4, texts)
        branches = " : ".join(_inside(x, _TERNARY + 1, texts) for x in args[1:])
        return f"{condition} ? {branches}", _TERNARY
    if node.op == "neg":
        return f"-{_widened(node, args[0], _UNARY + 1, texts)}", _UNARY
    if node.op in ("not", "bitnot"):
        return f"{'!' if node.op == 'not' else '~'}{_inside(args[0], _UNARY, texts)}", _UNARY
    if node.op == "to_fp32":
        return f"static_cast<float>({texts[args[0]][0]})", ATOM
    if node.op == "shl":
        # A product, because C++ leaves the shift of a negative number undefined.
        one = "1" if ctype(node) == "int" and args[1].range[1] <= 30 else "1LL"
        return f"{_inside(args[0], _PRODUCT, texts)} * ({one} << {_inside(args[1], _SUM, texts)})", _PRODUCT
    plain = _plain_division(node, texts) if node.op in ("floordiv", "mod") else None
    if plain is not None:
        return plain
    operands = ", ".join(texts[a][0] for a in args)
    return f"{_FUNCTIONS[node.op]}_{suffix(node, *args)}({operands})", ATOM


def _binary(node: Node, texts: Mapping[Node, Text]) -> Text:
    symbol, precedence = _BINARY[node.op]
    a, b = node.args
    left, right = precedence, precedence + 1
    if node.op in _MIXES_BADLY:
        left = right = _PRODUCT
    elif node.op in ("and", "or"):
        left = right = precedence if node.op == "and" else 4
        left, right = (precedence if x.op == node.op else max(4, left) for x in (a, b))
    return f"{_widened(node, a, left, texts)} {symbol} {_inside(b, right, texts)}", precedence


def _plain_division(node: Node, texts: Mapping[Node, Text]) -> Text | None:
    """C++'s own operators where they agree with Python's: powers of two, and a dividend that is never negative."""
    a, b = node.args
    divisor = b.value
    if not b.is_const or not isinstance(divisor, int) or not 0 < divisor < 1 << 31:
        return None
    if divisor & (divisor - 1) == 0:
        dividend = _inside(a, _PRODUCT, texts)
        if node.op == "floordiv":
            return f"{dividend} >> {divisor.bit_length() - 1}", _SHIFT
        return f"{dividend} & {divisor - 1}", 6
    if a.range[0] < 0:
        return None
    return f"{_inside(a, _PRODUCT, texts)} {'/' if node.op == 'floordiv' else '%'} {divisor}", _PRODUCT


def _widened(node: Node, operand: Node, precedence: int, texts: Mapping[Node, Text]) -> str:
    """`operand`, as 64 bits where the result needs them and no operand has them."""
    widens = node.op in ("add", "sub", "mul", "neg") and ctype(node) == "long long"
    if widens and all(ctype(a) == "int" for a in node.args):
        return f"static_cast<long long>({texts[operand][0]})"
    return _inside(operand, precedence, texts)


def _inside(node: Node, precedence: int, texts: Mapping[Node, Text]) -> str:
    text, own = texts[node]
    return text if own >= precedence else f"({text})"


def _constant(node: Node) -> Text:
    value = node.value
    if isinstance(value, bool):
        return ("true" if value else "false"), ATOM
    if isinstance(value, int):
        if value == -(1 << 63):
            return f"({value + 1}LL - 1)", ATOM  # the literal 2^63 does not exist
        text = str(value) if fits_int32((value, value)) and value != -(1 << 31) else f"{value}LL"
        return text, ATOM if value >= 0 else _UNARY
    assert isinstance(value, float)
    if math.isinf(value):
        return ("negative_infinity()", ATOM) if value < 0 else ("-negative_infinity()", _UNARY)
    return f"{fp32_text(value)}f", _UNARY if math.copysign(1.0, value) < 0 else ATOM
