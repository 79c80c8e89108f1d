"""`Statements`: nodes as lines of CUDA C++, one line a named subexpression, in the repository's clang-format style.

An integer is computed in 32 bits where its range proves that nothing is lost, else in 64. Reads of tables are kept
inside the table whatever the index: rows and keys of a partly filled tile lie beyond the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

from .describe import BINARY
from .graph import Node, ScalarSlot, TableSlot, walk
from .ops import SIZE_LEAVES, fp32_text
from .ranges import fits_int32

COLUMNS = 100
INDENT = "  "

#: dtype of a table -> C++ type of its elements, primitive that reads one, C++ type of what it gives.
TABLE_TYPES = {
    "fp32": ("float", "ld_global_f32"), "fp16": ("u16", "ld_global_f16"), "bf16": ("u16", "ld_global_bf16"),
    "int32": ("int", "ld_global_s32"), "int64": ("long long", "ld_global_s64"),
    "uint8": ("unsigned char", "ld_global_u8"), "bool": ("unsigned char", "ld_global_u8"),
}  # fmt: skip

#: C++ operator and precedence, higher binds tighter.
_BINARY = {
    **{op: BINARY[op] for op in ("mul", "div", "add", "sub")},
    "shr": (">>", 9), "lt": ("<", 8), "le": ("<=", 8), "eq": ("==", 7), "ne": ("!=", 7), "xor": ("!=", 7),
    "bitand": ("&", 6), "bitxor": ("^", 5), "bitor": ("|", 4), "and": ("&&", 3), "or": ("||", 2),
}  # fmt: skip
#: C++ groups these as written, but readers and compilers want the parentheses.
_PARENTHESISED = {("or", "and"), *((o, i) for o in ("bitand", "bitor", "bitxor") for i in _BINARY if i != o)}
_UNARY, _ATOM, _TERNARY = 12, 20, 1
_FUNCTIONS = {"min", "max", "abs", "floordiv", "mod", "exp", "log", "tanh", "sqrt"}
_FUNCTION_NAMES = {"floordiv": "floor_div", "mod": "floor_mod"}

_PARAMETERS = {
    "args", "b", "h", "q_idx", "kv_idx", "score", "q_first", "q_last", "kv_first", "kv_last",
    "int", "long", "float", "bool", "const", "if", "return", "static_cast", "true", "false", "unsigned", "char",
    "for", "while", "do", "else", "new", "delete", "this", "auto", "double", "short", "signed", "void", "class",
    "struct", "union", "enum", "switch", "case", "default", "break", "continue", "goto", "register", "static",
    "template", "typename", "operator", "private", "public", "protected", "virtual", "using", "namespace", "try",
    "catch", "throw", "typedef", "extern", "inline", "volatile", "explicit", "export", "friend", "mutable", "sizeof",
    "and", "or", "not", "xor", "u16", "u32", "nullptr", "asm", "constexpr", "decltype", "noexcept", "alignas",
}  # fmt: skip


def ctype(node: Node) -> str:
    """The C++ type of a node's value."""
    if node.dtype == "int":
        return "int" if fits_int32(node.range) else "long long"
    return "bool" if node.dtype == "bool" else "float"


class Statements:
    """The lines of one function body. Add roots in order; `lines` then declares what they need.

    `prefix` ("mask" or "score") begins the names of the captured values in `args`.
    """

    def __init__(self, prefix: str, roots: Iterable[Node]) -> None:
        self.lines: list[str] = []
        self._prefix = prefix
        self._texts: dict[Node, tuple[str, int]] = {}
        self._taken = set(_PARAMETERS)
        self._counts: dict[str, int] = {}
        roots = tuple(roots)
        uses: dict[Node, int] = dict.fromkeys(roots, 0)
        for node in walk(*roots):
            for arg in node.args:
                uses[arg] = uses.get(arg, 0) + 1
        self._named = {n for n, count in uses.items() if n.args and (count > 1 or n.op == "load")}
        self._named |= {n for n in uses if n.op == "load"}
        self._loads = [n.value.name for n in uses if isinstance(n.value, TableSlot)]

    def name(self, node: Node, name: str) -> str:
        """Declares `node` as the constant `name`, unless it is an atom already; the text that stands for it."""
        text, precedence = self._expression(node, len(f"{INDENT}const {ctype(node)} {name} = ;"))
        if precedence == _ATOM and not text.endswith(")"):
            return text
        self.lines.append(f"{INDENT}const {ctype(node)} {name} = {text};")
        self._texts[node] = name, _ATOM
        self._taken.add(name)
        return name

    def expression(self, node: Node, *, room: int) -> str:
        """The text of `node` on one line beside `room` other characters; subexpressions are declared first."""
        return self._expression(node, room)[0]

    def _expression(self, node: Node, room: int) -> tuple[str, int]:
        for inner in walk(node):
            if inner in self._texts:
                continue
            self._texts[inner] = self._fitting(inner, room)
            if inner is not node and inner in self._named:
                self._declare(inner)
        return self._texts[node]

    def _fitting(self, node: Node, room: int) -> tuple[str, int]:
        """The text of `node`; its longest operands become constants until it fits."""
        # A declaration of its own needs the most room.
        room = max(room, len(f"{INDENT}const long long condition_100 = ;"))
        while True:
            text, precedence = self._render(node)
            operands = [a for a in dict.fromkeys(node.args) if a.args and self._texts[a][1] != _ATOM or len(self._texts[a][0]) > 40]
            operands = [a for a in operands if a.args and not self._is_name(a)]
            if len(text) + room <= COLUMNS or not operands:
                return text, precedence
            self._declare(max(operands, key=lambda a: len(self._texts[a][0])))

    def _is_name(self, node: Node) -> bool:
        return self._texts[node][0].isidentifier()

    def _declare(self, node: Node) -> None:
        text = self._texts[node][0]
        name = self._local_name(node)
        declaration = f"{INDENT}const {ctype(node)} {name} = {text};"
        self.lines.append(declaration)
        self._texts[node] = name, _ATOM

    def _local_name(self, node: Node) -> str:
        if isinstance(node.value, TableSlot):
            base = node.value.name
            numbered = self._loads.count(base) > 1 or base in self._taken
        else:
            base = {"bool": "condition", "int": "index", "fp32": "value"}[node.dtype]
            numbered = True
            if node.op == "sub" and [a.value for a in node.args] == ["seqlen_k", "seqlen_q"]:
                base, numbered = "diagonal", False  # the key position of row 0
        while True:
            self._counts[base] = self._counts.get(base, 0) + 1
            name = f"{base}_{self._counts[base]}" if numbered else base
            if name not in self._taken:
                self._taken.add(name)
                return name
            numbered = True

    def _render(self, node: Node) -> tuple[str, int]:
        value = node.value
        if isinstance(value, ScalarSlot):
            return f"args.{self._prefix}_{value.name}", _ATOM
        if isinstance(value, TableSlot):
            return self._load(node, value)
        if node.op == "const":
            return _constant(node)
        if node.op == "leaf":
            return f"args.{value}" if value in SIZE_LEAVES else str(value), _ATOM
        if node.op in _BINARY and not (node.op == "mod"):
            return self._binary(node)
        args = node.args
        if node.op == "where":
            condition, a, b = (self._inside(x, _TERNARY + 1) for x in args)
            return f"{condition} ? {a} : {b}", _TERNARY
        if node.op == "neg":
            return f"-{self._widened(node, args[0], _UNARY + 1)}", _UNARY
        if node.op in ("not", "bitnot"):
            return f"{'!' if node.op == 'not' else '~'}{self._inside(args[0], _UNARY)}", _UNARY
        if node.op == "to_fp32":
            return f"static_cast<float>({self._texts[args[0]][0]})", _ATOM
        if node.op == "shl":
            return self._shift_left(node)
        return self._call(node)

    def _binary(self, node: Node) -> tuple[str, int]:
        symbol, precedence = _BINARY[node.op]
        a, b = node.args
        right = precedence + 1
        # A sum or product of booleans or of the same operator needs no parentheses where the order does not matter.
        if node.op in ("and", "or") and b.op == node.op:
            right = precedence
        left_text = self._widened(node, a, precedence, node.op)
        return f"{left_text} {symbol} {self._inside(b, right, node.op)}", precedence

    def _call(self, node: Node) -> tuple[str, int]:
        a = node.args[0]
        if node.op in ("floordiv", "mod"):
            plain = self._plain_division(node)
            if plain is not None:
                return plain
        if node.dtype == "fp32":
            suffix = "f32"
        else:
            wide = "long long" in (ctype(node), *(ctype(x) for x in node.args))
            suffix = "s64" if wide else "s32"
        name = _FUNCTION_NAMES.get(node.op, node.op)
        assert node.op in _FUNCTIONS and a is not None
        return f"{name}_{suffix}({', '.join(self._texts[x][0] for x in node.args)})", _ATOM

    def _plain_division(self, node: Node) -> tuple[str, int] | None:
        """C++'s own operators where they agree with Python's: powers of two, and a dividend that is never negative."""
        a, b = node.args
        divisor = b.value
        if not b.is_const or not isinstance(divisor, int) or divisor <= 0:
            return None
        if divisor & (divisor - 1) == 0:
            if node.op == "floordiv":
                return f"{self._inside(a, 9, 'shr')} >> {divisor.bit_length() - 1}", 9
            return f"{self._inside(a, 6, 'bitand')} & {_constant(b)[0].replace(str(divisor), str(divisor - 1))}", 6
        if a.range[0] < 0:
            return None
        return f"{self._inside(a, 11)} {'/' if node.op == 'floordiv' else '%'} {_constant(b)[0]}", 11

    def _shift_left(self, node: Node) -> tuple[str, int]:
        """A product, because C++ leaves the shift of a negative number undefined."""
        a, b = node.args
        one = "1" if ctype(node) == "int" and b.range[1] <= 30 else "1LL"
        return f"{self._inside(a, 11)} * ({one} << {self._inside(b, 10)})", 11

    def _widened(self, node: Node, operand: Node, precedence: int, outer: str = "") -> str:
        """`operand` in parentheses if needed, as 64 bits where the result needs them and no operand has them."""
        arithmetic = node.op in ("add", "sub", "mul", "neg")
        if arithmetic and ctype(node) == "long long" and all(ctype(a) == "int" for a in node.args):
            return f"static_cast<long long>({self._texts[operand][0]})"
        return self._inside(operand, precedence, outer)

    def _inside(self, node: Node, precedence: int, outer: str = "") -> str:
        text, own = self._texts[node]
        clash = own != _ATOM and (outer, _symbol_op(node)) in _PARENTHESISED
        return f"({text})" if own < precedence or clash else text

    def _load(self, node: Node, slot: TableSlot) -> tuple[str, int]:
        name = f"args.{self._prefix}_{slot.name}"
        terms = [name]
        for dimension, index in enumerate(node.args):
            place = self._clamped(index, f"{name}_size_{dimension}")
            if place != "0":
                terms.append(f"{place} * {name}_stride_{dimension}")
        text = f"{TABLE_TYPES[slot.dtype][1]}({' + '.join(terms)})"
        return (f"{text} != 0", 7) if slot.dtype == "bool" else (text, _ATOM)

    def _clamped(self, index: Node, size: str) -> str:
        """`index` as a factor, never outside the table."""
        text = self._texts[index][0]
        kind = index_kind(index)
        if kind in ("b", "h") or kind.isdigit():
            return text
        if kind in ("q_idx", "kv_idx"):
            return f"min_s32({text}, args.{'seqlen_q' if kind == 'q_idx' else 'seqlen_k'} - 1)"
        suffix = "s32" if ctype(index) == "int" else "s64"
        if index.range[0] < 0:
            text = f"max_{suffix}({text}, 0)"
        return f"min_{suffix}({text}, {size} - 1)"


def index_kind(index: Node) -> str:
    """How an index of a table is kept inside: by the shape's check at launch ("b", "h", "q_idx", "kv_idx", a constant's
    digits), or by the size of the dimension, an argument of the kernel ("size")."""
    if index.op == "leaf" and index.value in ("b", "h", "q_idx", "kv_idx"):
        return str(index.value)
    if index.is_const and isinstance(index.value, int):
        return str(index.value)
    return "size"


def _symbol_op(node: Node) -> str:
    return node.op


def _constant(node: Node) -> tuple[str, int]:
    value = node.value
    if isinstance(value, bool):
        return ("true" if value else "false"), _ATOM
    if isinstance(value, int):
        if fits_int32((value, value)) and value != -(1 << 31):
            text = str(value)
        else:
            # The literal -2^63 does not exist.
            text = f"({value + 1}LL - 1)" if value == -(1 << 63) else f"{value}LL"
        return text, _ATOM if value >= 0 or text.startswith("(") else _UNARY
    assert isinstance(value, float)
    if value in (float("inf"), float("-inf")):
        return ("negative_infinity()", _ATOM) if value < 0 else ("-negative_infinity()", _UNARY)
    return f"{fp32_text(value)}f", _ATOM if value >= 0 else _UNARY
