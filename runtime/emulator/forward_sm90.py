"""The Hopper forward in the emulator: its arguments hold tensor maps, which the host encodes for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...generator.families.base import Family, layout_of
from ...generator.families.forward_sm90 import ForwardSm90Config
from ...generator.language.cuda import mod_argument_values, mod_table_arguments
from ...generator.spec import ProblemShape
from ..launch import LOG2_E, element_strides
from ..problem import Problem
from .job import HostBuffer
from .tensor_map import host_tensor_map

if TYPE_CHECKING:
    import torch

#: Rows of Q and O in one copy: those of a consumer warpgroup.
ROWS_OF_WARPGROUP = 64


@dataclass(frozen=True, slots=True)
class HopperLaunch:
    """One launch: the packed struct and its geometry, and the buffers beside the call's own tensors."""

    arguments: bytes
    grid: int
    threads: int
    smem_bytes: int
    counters: torch.Tensor

    def buffers(self) -> tuple[HostBuffer, ...]:
        return (HostBuffer(self.counters.data_ptr(), 8, "next_tile", True),)


def hopper_launch(
    problem: Problem,
    config: ForwardSm90Config,
    family: Family,
    shape: ProblemShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    max_blocks: int | None = None,
) -> HopperLaunch:
    """The launch for CPU tensors, of at most `max_blocks` blocks where the schedule lets a block take several tiles."""
    import torch

    counters = torch.zeros(2, dtype=torch.int32)
    values: dict[str, Any] = {
        "q_map": host_tensor_map(q, ROWS_OF_WARPGROUP),
        "k_map": host_tensor_map(k, config.B_c),
        "v_map": host_tensor_map(v, config.B_c),
        "o_map": host_tensor_map(out, ROWS_OF_WARPGROUP),
        "lse": lse.data_ptr(),
        "next_tile": counters.data_ptr(),
        "seqlen_q": shape.seqlen_q,
        "seqlen_k": shape.seqlen_k,
        "nheads": shape.nheads,
        "group_size": shape.gqa_ratio,
        "softmax_scale": softmax_scale,
        "softmax_scale_log2": softmax_scale * LOG2_E,
        **family.schedule_arguments(problem.spec, config, shape),
    }
    for prefix, traced in (("mask", problem.mask), ("score", problem.score)):
        if traced is None:
            continue
        values.update(mod_argument_values(prefix, traced))
        for argument, table in zip(mod_table_arguments(prefix, traced.graph), traced.tables, strict=True):
            values[argument.pointer] = _address(table)
            values.update(zip(argument.strides, element_strides(table), strict=True))
    fields = family.arguments(problem.spec)
    geometry = family.geometry(problem.spec, config, shape)
    grid = geometry.grid[0]
    if max_blocks is not None and config.schedule != "grid":
        grid = min(grid, max_blocks)
    return HopperLaunch(
        layout_of(fields).pack(*(values[field.name] for field in fields)),
        grid,
        geometry.threads,
        geometry.smem_bytes,
        counters,
    )


def _address(table: Any) -> int:
    return int(table.data_ptr() if hasattr(table, "data_ptr") else table.ctypes.data)
