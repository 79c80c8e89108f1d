"""`render_mods`: the CUDA text of a mask and a score modification, and the kernel arguments they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import TensorError
from .bounds import kv_bounds
from .cuda_text import COLUMNS, INDENT, TABLE_TYPES, Statements, index_kind
from .graph import Graph, TableSlot
from .interval import tile_conditions
from .rules import FALSE, TRUE, negate
from .simplify import simplify_node
from .trace import Traced

_SCALAR_CTYPES = {"int32": "int", "int64": "long long", "fp32": "float"}

_MASK_SIGNATURE = "bool mask_mod(const Arguments& args, int b, int h, int q_idx, int kv_idx)"
_SCORE_SIGNATURE = "float score_mod(const Arguments& args, float score, int b, int h, int q_idx, int kv_idx)"
_RANGE_SIGNATURE = "KvRange kv_range(const Arguments& args, int b, int h, int q_first, int q_last)"
_CLASSIFY_SIGNATURE = (
    "int classify_tile(const Arguments& args, int b, int h, int q_first, int q_last, int kv_first, int kv_last)"
)

_MASK_COMMENT = "// Whether row q_idx of head h in batch item b sees key kv_idx:"
_SCORE_COMMENT = "// The score (scaled, natural units) of row q_idx and key kv_idx:"
_RANGE_COMMENT = "// Keys that rows q_first to q_last have to visit, and keys that every one of them sees."
_CLASSIFY_COMMENT = "// Whether rows q_first to q_last see none, all or perhaps some of keys kv_first to kv_last."


@dataclass(frozen=True, slots=True)
class TableArguments:
    """The kernel's arguments for one captured tensor: its pointer, a stride per dimension, and a size per dimension
    whose index is only known in the kernel (None elsewhere)."""

    slot: TableSlot
    pointer: str
    strides: tuple[str, ...]
    sizes: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class ModText:
    """The functions a kernel calls for its mask and score ('' where it needs none), and what they read in `args`.

    `arguments` are (C++ type, name, meaning), 8-byte members first. `needs_classify`: `kv_range` alone does not tell
    which tiles of the visit range are empty or full, and `classify_tile` can.
    """

    arguments: tuple[tuple[str, str, str], ...]
    mask_function: str
    score_function: str
    kv_range_function: str
    classify_function: str
    needs_classify: bool


def render_mods(mask: Graph | None, score: Graph | None) -> ModText:
    """The CUDA text of both graphs; deterministic to the byte."""
    arguments: list[tuple[str, str, str]] = []
    for prefix, graph in (("mask", mask), ("score", score)):
        if graph is not None:
            arguments += _arguments(prefix, graph)
    arguments.sort(key=lambda argument: argument[0] in ("int", "float"))
    classify = "" if mask is None else _classify_function(mask)
    return ModText(
        arguments=tuple(arguments),
        mask_function="" if mask is None else _function(_MASK_COMMENT, _MASK_SIGNATURE, "mask", mask),
        score_function="" if score is None else _function(_SCORE_COMMENT, _SCORE_SIGNATURE, "score", score),
        kv_range_function="" if mask is None else _range_function(mask),
        classify_function=classify,
        needs_classify=bool(classify),
    )


def mod_table_arguments(prefix: str, graph: Graph) -> tuple[TableArguments, ...]:
    """The argument names of each captured tensor, in slot order. `prefix` is "mask" or "score"."""
    found = []
    for slot in graph.tables:
        name = f"{prefix}_{slot.name}"
        kinds = _index_kinds(graph, slot)
        sizes = tuple(f"{name}_size_{i}" if "size" in kinds[i] else None for i in range(slot.ndim))
        found.append(TableArguments(slot, name, tuple(f"{name}_stride_{i}" for i in range(slot.ndim)), sizes))
    return tuple(found)


def mod_argument_values(prefix: str, traced: Traced) -> dict[str, int | float]:
    """The values of all arguments of one mod but its pointers and strides: captured numbers, and tensors' sizes."""
    graph = traced.graph
    values: dict[str, int | float] = {
        f"{prefix}_{slot.name}": number for slot, number in zip(graph.scalars, traced.scalars, strict=True)
    }
    for arguments, table in zip(mod_table_arguments(prefix, graph), traced.tables, strict=True):
        for name, size in zip(arguments.sizes, table.shape, strict=True):
            if name is not None:
                values[name] = min(int(size), (1 << 31) - 1)
    return values


def check_tables(traced: Traced, *, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> None:
    """Raises TensorError where a captured tensor is no plain memory, or too small for the graph's indices."""
    limits = {"b": ("batch", batch), "h": ("nheads", nheads), "q_idx": ("seqlen_q", seqlen_q)}
    limits |= {"kv_idx": ("seqlen_k", seqlen_k), "size": ("its indices", 1)}
    for slot, table in zip(traced.graph.tables, traced.tables, strict=True):
        check_storage(f"The captured tensor {slot.name}", table)
        shape = tuple(int(n) for n in table.shape)
        if len(shape) != slot.ndim:
            raise TensorError(f"The captured tensor {slot.name} needs {slot.ndim} dimensions, but has shape {shape}.")
        for dimension, kinds in enumerate(_index_kinds(traced.graph, slot)):
            for kind in kinds:
                word, need = limits.get(kind) or (f"index {kind}", int(kind) + 1)
                if shape[dimension] < need:
                    raise TensorError(
                        f"Dimension {dimension} of the captured tensor {slot.name} must have at least {need} elements"
                        f" for {word}, but its shape is {shape}. Pass a larger tensor, or expand() it."
                    )


def check_storage(name: str, tensor: Any) -> None:
    """Raises TensorError unless the elements of `tensor` lie in memory as strides say: a kernel reads them raw."""
    layout = str(getattr(tensor, "layout", "strided")).rpartition(".")[2]
    if layout != "strided":
        raise TensorError(f"{name} must be a dense tensor, but its layout is {layout}. Call .to_dense() first.")
    if type(tensor).__name__ == "FakeTensor":
        raise TensorError(f"{name} must have data of its own, but it is a FakeTensor. Pass the tensor it stands for.")
    for bit in ("neg", "conj"):
        is_set = getattr(tensor, f"is_{bit}", None)
        if is_set is not None and is_set():
            raise TensorError(
                f"{name} must hold its values as they are, but torch's {'negative' if bit == 'neg' else 'conjugate'}"
                f" bit is set: its memory has the other sign. Pass tensor.resolve_{bit}()."
            )


def _index_kinds(graph: Graph, slot: TableSlot) -> list[list[str]]:
    """Per dimension of the table, how its indices are kept inside: see `index_kind`."""
    kinds: list[dict[str, None]] = [{} for _ in range(slot.ndim)]
    for node in graph.nodes:
        if node.value == slot:
            for dimension, index in enumerate(node.args):
                kinds[dimension][index_kind(index)] = None
    return [list(k) for k in kinds]


def _arguments(prefix: str, graph: Graph) -> Iterable[tuple[str, str, str]]:
    for table in mod_table_arguments(prefix, graph):
        slot = table.slot
        shape = f"{slot.dtype}, {slot.ndim} dimension{'s' if slot.ndim != 1 else ''}"
        yield f"const {TABLE_TYPES[slot.dtype][0]}*", table.pointer, f"{slot.name} of the {prefix}: {shape}"
        for dimension, name in enumerate(table.strides):
            yield "long long", name, f"{slot.name}, dimension {dimension}"
        for dimension, size in enumerate(table.sizes):
            if size is not None:
                yield "int", size, f"elements of {slot.name}, dimension {dimension}"
    for scalar in graph.scalars:
        yield _SCALAR_CTYPES[scalar.dtype], f"{prefix}_{scalar.name}", f"{scalar.name} of the {prefix}"


def _function(comment: str, signature: str, prefix: str, graph: Graph) -> str:
    statements = Statements(prefix, {graph.root: "result"})
    last = statements.expression(graph.root, around=f"{INDENT}return {{}};")
    return _text(_comment(comment, graph), signature, [*statements.lines, last])


def _text(comment: list[str], signature: str, body: list[str]) -> str:
    return "\n".join([*comment, *_head(signature), *body, "}"]) + "\n"


def _comment(comment: str, graph: Graph) -> list[str]:
    """The comment and the expression itself, broken between words."""
    lines = [comment, "//  "]
    for word in graph.describe().split(" "):
        if len(lines[-1]) + 1 + len(word) > COLUMNS:
            lines.append("//    ")
        lines[-1] += f" {word}"
    return lines


def _head(signature: str) -> list[str]:
    """The first lines of a function's definition: parameters broken and aligned as clang-format does."""
    text = f"__device__ __forceinline__ {signature} {{"
    column = text.index("(") + 1
    lines = []
    while len(text) > COLUMNS:
        cut = text.rfind(", ", 0, COLUMNS) + 1
        lines.append(text[:cut])
        text = " " * column + text[cut + 1 :]
    return [*lines, text]


def _range_function(mask: Graph) -> str:
    bounds = kv_bounds(mask)
    names = dict(zip(reversed(bounds.nodes), ("full_end", "full_begin", "visit_end", "visit_begin"), strict=True))
    statements = Statements("mask", names)
    ends = ", ".join(statements.named(node) for node in bounds.nodes)
    return _text([_RANGE_COMMENT], _RANGE_SIGNATURE, [*statements.lines, f"{INDENT}return KvRange{{{ends}}};"])


def _classify_function(mask: Graph) -> str:
    """'' where `kv_range` says all there is to say."""
    must, may = tile_conditions(mask)
    if kv_bounds(mask).exact or (must is FALSE and may is TRUE):
        return ""
    empty = simplify_node(negate(may))
    statements = Statements("mask", {empty: "is_empty", must: "is_full"})
    body = []
    if empty is not FALSE:
        last = statements.expression(empty, around=f"{INDENT}if ({{}}) return TILE_EMPTY;")
        body += [*statements.lines, last]
        statements.lines.clear()
    if must is FALSE:
        body.append(f"{INDENT}return TILE_MIXED;")
    else:
        around = f"{INDENT}return {{}} ? TILE_FULL : TILE_MIXED;"
        last = statements.expression(must, around=around, parenthesised_below=4)
        body += [*statements.lines, last]
    return _text([_CLASSIFY_COMMENT], _CLASSIFY_SIGNATURE, body)
