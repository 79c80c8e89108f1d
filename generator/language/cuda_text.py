"""`Statements`: the lines of a C++ function body that computes nodes, one line a named subexpression.

Lines fit the column limit, so that the text is what clang-format would make of it. Reads of tables are kept inside the
table whatever the index: rows and keys of a partly filled tile lie beyond the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from .cuda_expression import ATOM, Text, ctype, render_node, suffix
from .node import Node, TableSlot, leaf, walk
from .rules import build

COLUMNS = 100
INDENT = "  "

#: dtype of a table -> C++ type of its elements, primitive that reads one.
TABLE_TYPES = {
    "fp32": ("float", "ld_global_f32"), "fp16": ("u16", "ld_global_f16"), "bf16": ("u16", "ld_global_bf16"),
    "int32": ("int", "ld_global_s32"), "int64": ("long long", "ld_global_s64"),
    "uint8": ("unsigned char", "ld_global_u8"), "bool": ("unsigned char", "ld_global_u8"),
}  # fmt: skip

#: Names a local constant must not hide: parameters, the words of C++, and the functions it may call.
_TAKEN = """
args b h q_idx kv_idx score q_first q_last kv_first kv_last range u16 u32 int long float bool const if else return
static_cast true false unsigned char for while do new delete this auto double short signed void class struct union enum
switch case default break continue goto register static template typename operator private public protected virtual
using namespace try catch throw typedef extern inline volatile explicit export friend mutable sizeof and or not xor
nullptr asm constexpr decltype noexcept alignas alignof typeid bitand bitor compl thread_local static_assert wchar_t
const_cast dynamic_cast reinterpret_cast and_eq or_eq xor_eq not_eq char16_t char32_t friend
mask_mod score_mod kv_range classify_tile negative_infinity floor_div_s32 floor_div_s64 floor_mod_s32 floor_mod_s64
ld_global_f32 ld_global_f16 ld_global_bf16 ld_global_s32 ld_global_s64 ld_global_u8 max_f32 min_f32 abs_f32 exp_f32
log_f32 tanh_f32 sqrt_f32 max_s32 min_s32 abs_s32 max_s64 min_s64 abs_s64
"""
_DIAGONAL = build("sub", leaf("seqlen_k"), leaf("seqlen_q"))
#: Subexpressions that deserve a word. A row's position is that of the key on its diagonal, aligned bottom-right.
_WORDS: dict[Node, str] = {
    _DIAGONAL: "diagonal",
    build("add", leaf("q_idx"), _DIAGONAL): "position",
    build("add", leaf("q_first"), _DIAGONAL): "first_position",
    build("add", leaf("q_last"), _DIAGONAL): "last_position",
}
_KINDS = {"bool": "condition", "int": "index", "fp32": "value"}


class Statements:
    """Computes `roots` (node -> the name it gets if it gets one). `lines` grows as their texts are asked for.

    `prefix` ("mask" or "score") begins the names of the captured values in `args`.
    """

    def __init__(self, prefix: str, roots: Mapping[Node, str]) -> None:
        self.lines: list[str] = []
        self._prefix = prefix
        self._texts: dict[Node, Text] = {}
        self._root_names = dict(roots)
        self._taken = set(_TAKEN.split()) | set(roots.values())
        self._counts: dict[str, int] = {}
        nodes = walk(*roots)
        self._longest = "condition_" + "9" * len(str(2 * len(nodes)))
        uses = dict.fromkeys(nodes, 0)
        for node in nodes:
            for arg in node.args:
                uses[arg] += 1
        self._loads = [node for node in nodes if node.op == "load"]
        self._shared = {node for node, count in uses.items() if node.args and count > 1} | set(self._loads)

    def named(self, root: Node) -> str:
        """The text of `root` after a line that declares it; atoms like `0` and `args.seqlen_k` stand as they are."""
        self._visit(root)
        if root.args and not self._is_name(root):
            self._declare(root)
        return self._texts[root][0]

    def expression(self, root: Node, *, around: str, parenthesised_below: int = 0) -> str:
        """`around` with `{}` replaced by the text of `root`, on one line; what it needs is declared before.

        The text is put in parentheses where it binds less tightly than `parenthesised_below`.
        """
        self._visit(root)

        def line() -> str:
            text, precedence = self._texts[root]
            return around.replace("{}", text if precedence >= parenthesised_below else f"({text})")

        while len(line()) > COLUMNS and self._split(root):
            pass
        return line()

    def _visit(self, root: Node) -> None:
        """Gives every node under `root` a text, and the shared ones a line."""
        for node in walk(root):
            if node in self._texts:
                continue
            if node.op == "load":
                self._declare_load(node)
                continue
            self._texts[node] = render_node(node, self._texts, self._prefix)
            # Any text must fit a line of its own, for it may have to become one.
            room = COLUMNS - len(f"{INDENT}const {ctype(node)} {self._root_names.get(node, self._longest)} = ;")
            while len(self._texts[node][0]) > room and self._split(node):
                pass
            if node is not root and node in self._shared:
                self._declare(node)

    def _split(self, node: Node) -> bool:
        """Declares the operand of `node` with the longest text, and renders `node` over it; False if none is left."""
        operands = [a for a in node.args if not a.is_const and not self._is_name(a)]
        if not operands:
            return False
        self._declare(max(operands, key=lambda a: len(self._texts[a][0])))
        self._texts[node] = render_node(node, self._texts, self._prefix)
        return True

    def _is_name(self, node: Node) -> bool:
        return self._texts[node][0].isidentifier()

    def _declare(self, node: Node) -> None:
        name = self._root_names.get(node) or self._local_name(*self._wish(node))
        self.lines.append(f"{INDENT}const {ctype(node)} {name} = {self._texts[node][0]};")
        self._texts[node] = name, ATOM

    def _wish(self, node: Node) -> tuple[str, bool]:
        """The name a node would like, and whether it is worth a number from the start."""
        return (_WORDS[node], False) if node in _WORDS else (_KINDS[node.dtype], True)

    def _local_name(self, base: str, numbered: bool) -> str:
        name = base
        while numbered or name in self._taken:
            self._counts[base] = self._counts.get(base, 0) + 1
            name = f"{base}_{self._counts[base]}"
            numbered = False
        self._taken.add(name)
        return name

    def _declare_load(self, node: Node) -> None:
        """One line that reads an element of a table, or one a dimension where that is too long."""
        slot = node.value
        assert isinstance(slot, TableSlot)
        element, primitive = TABLE_TYPES[slot.dtype]
        table = f"args.{self._prefix}_{slot.name}"
        steps = [self._step(index, dimension, table) for dimension, index in enumerate(node.args)]
        name = self._load_name(node, slot)
        is_set = " != 0" if slot.dtype == "bool" else ""
        line = f"{INDENT}const {ctype(node)} {name} = {primitive}({' + '.join((table, *steps))}){is_set};"
        if len(line) <= COLUMNS:
            self.lines.append(line)
        else:
            start = f"{INDENT}const {element}* {name}_gmem = {table}"
            if steps and len(start) + len(f" + {steps[0]};") <= COLUMNS:
                start += f" + {steps.pop(0)}"
            self.lines.append(f"{start};")
            self.lines += [f"{INDENT}{name}_gmem += {step};" for step in steps]
            self.lines.append(f"{INDENT}const {ctype(node)} {name} = {primitive}({name}_gmem){is_set};")
        self._texts[node] = name, ATOM

    def _load_name(self, node: Node, slot: TableSlot) -> str:
        same_table = [n for n in self._loads if n.value == slot]
        if len(same_table) == 1:
            return self._local_name(slot.name if slot.name not in self._taken else f"{slot.name}_element", False)
        words = {"q_idx": "row", "kv_idx": "key"}
        own = [word for index, word in words.items() if index in node.leaves]
        return self._local_name("_".join((slot.name, *own)) if len(own) == 1 else slot.name, len(own) != 1)

    def _step(self, index: Node, dimension: int, table: str) -> str:
        """The offset along one dimension, never outside the table."""
        stride, last = f"{table}_stride_{dimension}", _last_index(index, f"{table}_size_{dimension}")
        text, precedence = self._texts[index]
        if last is None:
            return f"{text if precedence == ATOM else f'({text})'} * {stride}"
        s = suffix(index)

        def low(text: str) -> str:
            return f"max_{s}({text}, 0)" if index.range[0] < 0 else text

        place = f"min_{s}({low(text)}, {last})"
        # Beside the name of its pointer, `_gmem += ` and the indent.
        if len(place) <= COLUMNS - len(stride) - len(table) - 19:
            return f"{place} * {stride}"
        if len(self._index_line(index, self._longest, place)) > COLUMNS:  # one line a bound
            if index.args and not self._is_name(index):
                self._declare(index)
            place = f"min_{s}({self._declare_index(index, low(self._texts[index][0]))}, {last})"
        return f"{self._declare_index(index, place)} * {stride}"

    def _declare_index(self, index: Node, text: str) -> str:
        if text.isidentifier():
            return text
        name = self._local_name("index", True)
        self.lines.append(self._index_line(index, name, text))
        return name

    def _index_line(self, index: Node, name: str, text: str) -> str:
        return f"{INDENT}const {ctype(index)} {name} = {text};"


def _last_index(index: Node, size: str) -> str | None:
    """The last index of the dimension that `index` reads, or None where the launch has checked that it is inside."""
    kind = index_kind(index)
    if kind in ("q_idx", "kv_idx"):
        return f"args.{'seqlen_q' if kind == 'q_idx' else 'seqlen_k'} - 1"
    return f"{size} - 1" if kind == "size" else None


def index_kind(index: Node) -> str:
    """How an index of a table is kept inside: by the shape's check at launch ("b", "h", "q_idx", "kv_idx", a constant's
    digits), or by the size of the dimension, an argument of the kernel ("size")."""
    if index.op == "leaf" and index.value in ("b", "h", "q_idx", "kv_idx"):
        return str(index.value)
    if index.is_const and isinstance(index.value, int):
        return str(index.value)
    return "size"
