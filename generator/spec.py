"""`AttentionSpec`: which attention problem a kernel solves, and `ProblemShape`: how large one call of it is.

A spec holds what changes the kernel's text. Lengths, batch, heads, strides, the scale and captured values are run-time
arguments and live in `ProblemShape` or in the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from .digest import digest_of
from .errors import SpecError, unknown_name_message
from .language import Graph

OPS = ("forward",)
DTYPES = ("fp16", "bf16")
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


@dataclass(frozen=True, order=True)
class AttentionSpec:
    """One attention problem: O = softmax(score(Q K^T * softmax_scale), masked) V, per batch and head.

    - `head_dim` is the last dimension of Q and K, `head_dim_v` that of V and O: multiples of 8 up to 256.
    - `mask` and `score` are expression graphs traced from `mask_mod(b, h, q_idx, kv_idx)` and
      `score_mod(score, b, h, q_idx, kv_idx)`; None means no mask, and the scaled score as it is.
    - `gqa_ratio` is nheads / nheads_k where a kernel family fixes it at compile time; None reads it at run time.

    Raises SpecError where a value breaks its rule.
    """

    op: str = "forward"
    dtype: str = "bf16"
    head_dim: int = 128
    head_dim_v: int = 0
    mask: Graph | None = None
    score: Graph | None = None
    gqa_ratio: int | None = None

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise SpecError(unknown_name_message("op", str(self.op), OPS))
        if self.dtype not in DTYPES:
            raise SpecError(unknown_name_message("dtype", str(self.dtype), DTYPES))
        _check_head_dim("head_dim", self.head_dim)
        if self.head_dim_v == 0 and not isinstance(self.head_dim_v, bool):
            object.__setattr__(self, "head_dim_v", self.head_dim)
        _check_head_dim("head_dim_v", self.head_dim_v)
        _check_graph("mask", self.mask)
        _check_graph("score", self.score)
        if self.gqa_ratio is not None and (not _is_int(self.gqa_ratio) or self.gqa_ratio < 1):
            raise SpecError(
                f"gqa_ratio must be a positive integer or None, but got {self.gqa_ratio!r}."
                " Pass nheads // nheads_k, or None to read it at run time."
            )

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over the whole spec: equal for equal specs in any process."""
        return digest_of(self.to_dict())

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim_v == self.head_dim else f"d{self.head_dim}/{self.head_dim_v}"
        parts = [self.op, self.dtype, dims]
        if self.mask is not None:
            parts.append(f"mask[{self.mask.describe()}]")
        if self.score is not None:
            parts.append(f"score[{self.score.describe()}]")
        if self.gqa_ratio is not None:
            parts.append(f"gqa{self.gqa_ratio}")
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back to an equal spec."""
        return {
            "op": self.op,
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "mask": None if self.mask is None else self.mask.to_dict(),
            "score": None if self.score is None else self.score.to_dict(),
            "gqa_ratio": self.gqa_ratio,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """The spec that `to_dict` wrote. Raises SpecError on unknown or missing keys."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise SpecError(f"Unknown keys in a spec: {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
        values = dict(data)
        for name in ("mask", "score"):
            if values.get(name) is not None:
                values[name] = Graph.from_dict(values[name])
        return cls(**values)


@dataclass(frozen=True, slots=True, order=True)
class ProblemShape:
    """The sizes of one call: `batch`, `seqlen_q`, `seqlen_k`, `nheads` (of Q) and `nheads_k` (of K and V).

    `seqlen_q` and `seqlen_k` may be 0. Raises SpecError for negative sizes and for a ratio that is no integer.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k"):
            value = getattr(self, name)
            if not _is_int(value) or value < 0:
                raise SpecError(f"{name} must be an integer >= 0, but got {value!r}.")
        if self.nheads_k == 0 or self.nheads % self.nheads_k != 0:
            raise SpecError(
                f"nheads must be a multiple of nheads_k, but got nheads={self.nheads}, nheads_k={self.nheads_k}."
                " Repeat or drop heads so that the ratio is an integer."
            )

    @property
    def gqa_ratio(self) -> int:
        return self.nheads // self.nheads_k

    def __str__(self) -> str:
        heads = f"H{self.nheads}" if self.nheads == self.nheads_k else f"H{self.nheads}/{self.nheads_k}"
        lengths = f"N{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"N{self.seqlen_q} M{self.seqlen_k}"
        return f"B{self.batch} {lengths} {heads}"

    def to_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProblemShape:
        try:
            return cls(**data)
        except TypeError as error:
            raise SpecError(f"A problem shape needs {', '.join(f.name for f in fields(cls))}: {error}.") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_head_dim(name: str, value: object) -> None:
    if not _is_int(value) or not 0 < value <= MAX_HEAD_DIM or value % HEAD_DIM_STEP:  # type: ignore[operator]
        raise SpecError(
            f"{name} must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}, but got {value!r}."
            f" Zero-pad the last dimension of the tensors to the next multiple of {HEAD_DIM_STEP}."
        )


def _check_graph(name: str, graph: Graph | None) -> None:
    if graph is None:
        return
    if not isinstance(graph, Graph):
        raise SpecError(
            f"{name} must be a traced expression graph or None, but got {type(graph).__name__}."
            f" Trace the function first: flashsmith.generator.language.trace_{name}(function).graph."
        )
    if graph.kind != name:
        raise SpecError(f"{name} must be a {name} graph, but got a {graph.kind} graph. Swap mask and score.")
