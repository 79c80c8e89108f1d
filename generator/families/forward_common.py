"""What the forward families share: sizes of padded rows, the arguments beside the tensors, and the order of tiles."""

from __future__ import annotations

from collections.abc import Iterable

from ..language.cuda import render_mods
from ..spec import AttentionSpec, ProblemShape
from .base import ArgumentField

SOFTMAX = ("exact", "optimistic")
#: Registers beside the accumulators that every compiled config was seen to need: addresses, strides, loop state.
OVERHEAD_REGISTERS = 24


def chunks_of(head_dim: int) -> int:
    """16-byte chunks of one row in shared memory: `head_dim` 16-bit elements, padded to the mma's 16."""
    return (head_dim + 15) // 16 * 2


def forward_arguments(
    spec: AttentionSpec, tensors: Iterable[ArgumentField], *, counts: Iterable[ArgumentField] = ()
) -> tuple[ArgumentField, ...]:
    """A forward kernel's arguments: `tensors` (8 bytes and more), sizes, scale, and what the mask and score read.

    `counts` are a family's own 4-byte counts, beside those of `tile_counts`.
    """
    mods = [ArgumentField(*argument) for argument in render_mods(spec.mask, spec.score).arguments]
    return (
        *tensors,
        *(field for field in mods if field.size == 8),
        ArgumentField("int", "seqlen_q", "rows of Q and O"),
        ArgumentField("int", "seqlen_k", "rows of K and V"),
        ArgumentField("int", "nheads", "heads of Q and O"),
        ArgumentField("int", "group_size", "nheads / nheads_k"),
        *counts,
        ArgumentField("int", "num_row_tiles", "T_r = ceil(seqlen_q / B_r)"),
        ArgumentField("int", "num_heads_total", "batch * nheads"),
        ArgumentField("int", "section_heads", "heads that run together, longest rows first"),
        ArgumentField("float", "softmax_scale", "factor of Q K^T"),
        ArgumentField("float", "softmax_scale_log2", "softmax_scale * log2(e)"),
        *(field for field in mods if field.size == 4),
    )


def tile_counts(spec: AttentionSpec, shape: ProblemShape, B_r: int, *, section_bytes: int) -> dict[str, int]:
    """The arguments that order the tiles: row tiles, all heads, and the heads of a section.

    The heads of a section run together; their keys and values take up to `section_bytes` of the L2 cache.
    """
    kv_bytes = 2 * shape.seqlen_k * (spec.head_dim + spec.head_dim_v)
    heads = section_bytes // max(kv_bytes, 1) * shape.gqa_ratio if shape.nheads else 0
    total = shape.batch * shape.nheads
    return {
        "num_row_tiles": -(-shape.seqlen_q // B_r),
        "num_heads_total": total,
        "section_heads": max(1, min(heads, total)),
    }
