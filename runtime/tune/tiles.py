"""How many tiles a kernel visits under a mask, and how many multiply-adds a call is worth.

The mask is evaluated at the corners of small squares of the score matrix (first batch and head): exact for causal masks
and windows of more than a square, close for others. Only estimates and TFLOP/s rest on it, never a kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ...generator.spec import AttentionSpec, ProblemShape
from .request import TuneProblem

if TYPE_CHECKING:
    import torch

#: Side of a square in rows and keys, at least; larger where more than `MAX_SQUARES` would lie side by side.
SQUARE = 16
MAX_SQUARES = 1024


class TileCounter:
    """Counts tiles of one problem at one shape; each tile size once."""

    def __init__(self, problem: TuneProblem, shape: ProblemShape) -> None:
        self._problem = problem
        self.shape = shape
        self._side = max(SQUARE, -(-max(shape.seqlen_q, shape.seqlen_k) // MAX_SQUARES))
        self._counts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._squares: torch.Tensor | None = None
        self._visible = 1.0
        self._ready = False

    def visited(self, B_r: int, B_c: int) -> tuple[int, ...]:
        """For each block of `B_r` rows, how many tiles of `B_c` keys hold a visible key."""
        key = (B_r, B_c)
        if key not in self._counts:
            self._counts[key] = self._count(B_r, B_c)
        return self._counts[key]

    def own_share(self, B_r: int, rows: int, B_c: int) -> float:
        """How much of the visits of blocks of `B_r` rows remains, from 0 to 1, where each part of `rows` rows skips the
        tiles of which it sees nothing itself; rows beyond the sequence skip all."""
        visits = sum(self.visited(B_r, B_c)) * (B_r // rows)
        return sum(self.visited(rows, B_c)) / visits if visits else 1.0

    def visible_share(self) -> float:
        """The part of the score matrix that the mask leaves visible: 1 without a mask, about 0.5 for causal."""
        self._prepare()
        return self._visible

    def flops(self, spec: AttentionSpec) -> float:
        """Floating-point operations: 2 * B * H * (d + d_v) * visible pairs; a causal square has half of all pairs."""
        problem = self._problem
        if not problem.mask_mod:
            from ..bench import BenchCase

            return BenchCase(
                self.shape, spec.dtype, spec.head_dim, spec.head_dim_v, problem.causal, problem.window_size
            ).flop
        pairs = self.shape.batch * self.shape.nheads * self.shape.seqlen_q * self.shape.seqlen_k
        return 2.0 * pairs * (spec.head_dim + spec.head_dim_v) * self.visible_share()

    def _count(self, B_r: int, B_c: int) -> tuple[int, ...]:
        self._prepare()
        row_tiles = -(-self.shape.seqlen_q // B_r)
        if self._squares is None:
            return (-(-self.shape.seqlen_k // B_c),) * row_tiles
        rows, keys = max(1, B_r // self._side), max(1, B_c // self._side)
        pooled = _pool(_pool(self._squares, rows, 0), keys, 1)
        per_block = pooled.sum(1).tolist()
        # Where whole squares are larger or smaller than a tile, they stand for as many tiles as have their width.
        scale = keys * self._side / B_c
        return tuple(
            int(per_block[min(i * B_r // (rows * self._side), len(per_block) - 1)] * scale) for i in range(row_tiles)
        )

    def _prepare(self) -> None:
        if self._ready:
            return
        self._ready = True
        shape, problem = self.shape, self._problem
        # What the mask does not depend on is left out, so that many specs and buckets share one evaluation.
        masked = TuneProblem(causal=problem.causal, window_size=problem.window_size, mask_mod=problem.mask_mod)
        nheads = shape.nheads if problem.mask_mod else 1
        self._visible, self._squares = _squares_of(masked, shape.seqlen_q, shape.seqlen_k, nheads, self._side)


@lru_cache(maxsize=64)
def _squares_of(
    problem: TuneProblem, seqlen_q: int, seqlen_k: int, nheads: int, side: int
) -> tuple[float, torch.Tensor | None]:
    """The visible share of the scores, and which squares hold a visible one; None: all do."""
    traced = problem.traced(nheads=nheads).mask
    if traced is None or not seqlen_q or not seqlen_k:
        return 1.0, None
    import torch

    from ..reference import Sizes, evaluate

    rows, keys = (_corners(length, side) for length in (seqlen_q, seqlen_k))
    zero = torch.zeros((1, 1), dtype=torch.int64)
    leaves = {"b": zero, "h": zero, "q_idx": rows[:, None], "kv_idx": keys[None, :]}
    visible = evaluate(
        traced.graph, leaves, Sizes(seqlen_q, seqlen_k, nheads), scalars=traced.scalars, tables=traced.tables
    )
    visible = visible.expand(len(rows), len(keys))
    # A key hidden from everybody leaves nothing to divide by; such a call is worth no operation.
    share = max(float(visible.double().mean()), 1e-9)
    return share, visible.reshape(len(rows) // 2, 2, len(keys) // 2, 2).any(3).any(1)


def _corners(length: int, side: int) -> torch.Tensor:
    """The first and the last index of each square along one side."""
    import torch

    first = torch.arange(0, length, side)
    last = torch.clamp(first + side - 1, max=length - 1)
    return torch.stack([first, last], dim=1).reshape(-1)


def _pool(squares: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """`squares` with each run of `count` along `dim` or-ed into one."""
    import torch

    size = squares.shape[dim]
    padding = -size % count
    if padding:
        shape = list(squares.shape)
        shape[dim] = padding
        squares = torch.cat([squares, torch.zeros(shape, dtype=torch.bool)], dim=dim)
    shape = [*squares.shape[:dim], -1, count, *squares.shape[dim + 1 :]]
    return squares.reshape(shape).any(dim + 1)
