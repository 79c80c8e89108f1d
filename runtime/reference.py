"""Attention by its definition, in torch: the fp64 (or fp32) reference and the 16-bit one that sets the tolerance.

Masks and scores are evaluated from the very graphs that become CUDA text, element by element, on the tensors' device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..generator.language import Graph, Traced
from ..generator.language.graph import Node, ScalarSlot, TableSlot
from .tensors import check_softmax_scale

#: Elements of one chunk of S: 2^24 fp64 values are 128 MiB.
CHUNK_ELEMENTS = 1 << 24

#: Reads a table at index tensors of equal shape.
Load = Callable[[TableSlot, Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one call that a graph may use."""

    seqlen_q: int
    seqlen_k: int
    nheads: int


def evaluate(
    graph: Graph,
    leaves: Mapping[str, torch.Tensor],
    sizes: Sizes,
    *,
    scalars: Sequence[int | float] = (),
    tables: Sequence[Any] = (),
    dtype: torch.dtype = torch.float64,
    load: Load | None = None,
) -> torch.Tensor:
    """The graph's value for every combination of indices: bool for a mask, `dtype` for a score.

    `leaves` holds int64 tensors `b`, `h`, `q_idx`, `kv_idx` that broadcast together, and `score` for a score graph.
    Integers are exact in 64 bits, `//` and `%` are Python's, and 0 for a divisor of 0. A table is read at the nearest
    valid index, so that a branch not taken may index outside; `load` replaces the reading.
    """
    device = leaves["kv_idx"].device
    values: dict[Node, torch.Tensor] = {}
    by_scalar = dict(zip(graph.scalars, scalars, strict=True))
    read = load or _reader(dict(zip(graph.tables, tables, strict=True)), device, dtype)
    for node in graph.nodes:
        args = [values[arg] for arg in node.args]
        if node.op == "leaf":
            name = str(node.value)
            size = getattr(sizes, name, None)
            value = leaves[name] if size is None else torch.tensor(size, device=device)
        elif isinstance(node.value, ScalarSlot):
            value = _constant(by_scalar[node.value], node.dtype, device, dtype)
        elif isinstance(node.value, TableSlot):
            value = read(node.value, _broadcast(args))
        elif node.op == "const":
            assert isinstance(node.value, (bool, int, float))
            value = _constant(node.value, node.dtype, device, dtype)
        elif node.op == "to_fp32":
            value = args[0].to(dtype)
        else:
            value = _OPERATIONS[node.op](*args)
        values[node] = value
    return values[graph.root]


def _broadcast(args: list[torch.Tensor]) -> list[torch.Tensor]:
    broadcast: Any = torch.broadcast_tensors  # untyped in torch
    return list(broadcast(*args)) if args else []


def _constant(number: float, node_dtype: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    kind = {"bool": torch.bool, "int": torch.int64, "fp32": dtype}[node_dtype]
    return torch.tensor(number, dtype=kind, device=device)


def _reader(tables: Mapping[TableSlot, Any], device: torch.device, dtype: torch.dtype) -> Load:
    dense = {slot: torch.as_tensor(table, device=device) for slot, table in tables.items()}

    def read(slot: TableSlot, indices: Sequence[torch.Tensor]) -> torch.Tensor:
        table = dense[slot]
        inside = tuple(index.clamp(0, n - 1) for index, n in zip(indices, table.shape, strict=True))
        value = table[inside]
        if value.is_floating_point():
            return value.to(dtype)
        return value if value.dtype == torch.bool else value.long()

    return read


def _floor_division(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    quotient = torch.div(a, torch.where(b == 0, 1, b), rounding_mode="floor")
    return torch.where(b == 0, 0, quotient)


def _modulo(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b == 0, 0, torch.remainder(a, torch.where(b == 0, 1, b)))


_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.true_divide,
    "floordiv": _floor_division,
    "mod": _modulo,
    "min": torch.minimum,
    "max": torch.maximum,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "sqrt": torch.sqrt,
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "bitnot": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "not": torch.logical_not,
    "where": torch.where,
}


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Traced | None = None,
    score: Traced | None = None,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (batch, seqlen_q, nheads, head_dim_v) and LSE (batch, nheads, seqlen_q) by the definition, in `dtype`.

    Inputs as for `attention`, on any device. A row that sees no key has O 0 and LSE -inf. Memory beyond the result is
    bounded by chunks of rows. fp32 on a GPU is as exact as torch's matmul precision lets it be; fp64 does not depend
    on that.
    """
    scale = check_softmax_scale(softmax_scale, q.shape[3])

    def rows(q_rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = _scores(q_rows.to(dtype), k.to(dtype)) * scale
        s = _modified(s, first, q.shape[1], mask, score, dtype)
        p, lse = _softmax(s)
        return _weighted(p, v.to(dtype)), lse

    return _by_rows(q, k, v, rows, dtype)


def attention_16bit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Traced | None = None,
    score: Traced | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """O as torch computes it in the inputs' own 16-bit dtype: what a right kernel's error is measured by.

    K times the scale, S, P and O are each rounded to 16 bits; products accumulate in fp32, as the GPU's do (their
    16-bit factors are exact in TF32, too). A score function is evaluated in fp32 and its result rounded.
    """
    scale = check_softmax_scale(softmax_scale, q.shape[3])
    scaled_k = (k.float() * scale).to(k.dtype).float()

    def rows(q_rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        s = _scores(q_rows.float(), scaled_k).to(q.dtype).float()
        s = _modified(s, first, q.shape[1], mask, score, torch.float32).to(q.dtype).float()
        p, lse = _softmax(s)
        return _weighted(p.to(q.dtype).float(), v.float()), lse

    return _by_rows(q, k, v, rows, torch.float32)[0].to(q.dtype)


def _by_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen_q, nheads, _ = q.shape
    out = torch.zeros(batch, seqlen_q, nheads, v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((batch, nheads, seqlen_q), -torch.inf, dtype=dtype, device=q.device)
    if out.numel() == 0 or k.shape[1] == 0:
        return out, lse
    step = max(1, CHUNK_ELEMENTS // (batch * nheads * k.shape[1]))
    for first in range(0, seqlen_q, step):
        last = min(first + step, seqlen_q)
        out[:, first:last], lse[:, :, first:last] = rows(q[:, first:last], first)
    return out, lse


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Q K^T of (batch, rows, nheads, d) and (batch, seqlen_k, nheads_k, d): (batch, nheads, rows, seqlen_k)."""
    batch, rows, nheads, head_dim = q.shape
    nheads_k = k.shape[2]
    grouped = q.transpose(1, 2).reshape(batch, nheads_k, nheads // nheads_k * rows, head_dim)
    s = grouped @ k.permute(0, 2, 3, 1)
    return s.reshape(batch, nheads, rows, k.shape[1])


def _weighted(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """P V of (batch, nheads, rows, seqlen_k) and (batch, seqlen_k, nheads_k, d): (batch, rows, nheads, d)."""
    batch, nheads, rows, seqlen_k = p.shape
    nheads_k = v.shape[2]
    grouped = p.reshape(batch, nheads_k, nheads // nheads_k * rows, seqlen_k)
    out = grouped @ v.transpose(1, 2)
    return out.reshape(batch, nheads, rows, v.shape[3]).transpose(1, 2)


def _modified(
    s: torch.Tensor, first: int, seqlen_q: int, mask: Traced | None, score: Traced | None, dtype: torch.dtype
) -> torch.Tensor:
    """`s` after the score graph, -inf where the mask graph hides; its rows begin at `first`."""
    batch, nheads, rows, seqlen_k = s.shape
    sizes = Sizes(seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads=nheads)
    leaves = {
        "b": torch.arange(batch, device=s.device).view(-1, 1, 1, 1),
        "h": torch.arange(nheads, device=s.device).view(1, -1, 1, 1),
        "q_idx": torch.arange(first, first + rows, device=s.device).view(1, 1, -1, 1),
        "kv_idx": torch.arange(seqlen_k, device=s.device),
        "score": s,
    }
    if score is not None:
        s = evaluate(score.graph, leaves, sizes, scalars=score.scalars, tables=score.tables, dtype=dtype).expand_as(s)
    if mask is not None:
        seen = evaluate(mask.graph, leaves, sizes, scalars=mask.scalars, tables=mask.tables, dtype=dtype)
        s = s.masked_fill(~seen, -torch.inf)
    return s


def _softmax(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, LSE) of the rows of `s`; a row of -inf gives P 0 and LSE -inf."""
    m = s.amax(-1, keepdim=True)
    m = torch.where(m == -torch.inf, 0, m)
    e = (s - m).exp()
    l = e.sum(-1, keepdim=True)
    return e / torch.where(l == 0, 1, l), (l.log() + m).squeeze(-1)
