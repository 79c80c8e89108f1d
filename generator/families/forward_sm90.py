"""Forward attention for Hopper (sm_90a): TMA copies, WGMMA products, one producer and up to four consumer warpgroups.

A thread block owns 64 rows per consumer warpgroup. One producer thread keeps K_j and V_j coming; the products of
S_ij = Q_i K_j^T and of the tile before, O_i += P V, run while the softmax of S_ij is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from ..arch import Arch
from ..errors import ConfigError
from ..language.cuda import render_mods
from ..spec import AttentionSpec, ProblemShape
from .base import ArgumentField, Exclusion, Family, KernelConfig, LaunchGeometry, Resources
from .forward_sm80 import SECTION_BYTES, chunks_of

SOFTMAX = ("exact", "optimistic")
SCHEDULES = ("static", "grid", "dynamic")
REGISTERS = {1: (56, 240), 2: (40, 232), 3: (32, 160), 4: (32, 112)}


@dataclass(frozen=True, slots=True, order=True)
class ForwardSm90Config(KernelConfig):
    family: ClassVar[str] = "forward_sm90"

    num_warpgroups: int
    B_c: int
    num_stages: int
    q_stages: int
    softmax: str
    pingpong: bool
    schedule: str

    @property
    def B_r(self) -> int:
        return 64 * self.num_warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.num_warpgroups + 1)


def part_bytes(rows: int, chunks: int) -> int:
    return rows * ((chunks + 7) // 8) * 128


class ForwardSm90(Family):
    name = "forward_sm90"
    op = "forward"
    config_type = ForwardSm90Config
    entry = "flashsmith_forward_sm90"
    sections = (
        ("header", "common/header.jinja"),
        ("types", "sm90/forward_types.jinja"),
        ("primitives", "sm90/primitives.jinja"),
        ("kernel", "sm90/forward.jinja"),
    )

    def unsupported_reason(self, spec: AttentionSpec, arch: Arch) -> str | None:
        if arch.cc != (9, 0):
            return f"it needs compute capability 9.0 (WGMMA), {arch} has {arch.cc[0]}.{arch.cc[1]}."
        return None

    def candidates(self, spec: AttentionSpec, arch: Arch) -> Iterator[ForwardSm90Config]:
        for values in product((1, 2, 3, 4), (32, 48, 64, 80, 96, 112, 128, 144, 160, 176), (2, 3), (1, 2), SOFTMAX, (False, True), SCHEDULES):
            yield ForwardSm90Config(*values)

    def resources(self, spec: AttentionSpec, config: KernelConfig) -> Resources:
        chunks, chunks_v = chunks_of(spec.head_dim), chunks_of(spec.head_dim_v)
        q = config.num_warpgroups * config.q_stages * part_bytes(64, max(chunks, chunks_v))
        kv = config.num_stages * (part_bytes(config.B_c, chunks) + part_bytes(config.B_c, chunks_v))
        barriers = 8 * (2 * config.q_stages + 4 * config.num_stages + (5 if config.schedule == "dynamic" else 0))
        registers = chunks_v * 4 + config.B_c // 2 + config.B_c // 4 + 24
        return Resources(config.threads, q + kv + barriers, registers, REGISTERS[config.num_warpgroups][1])

    def exclusion(self, spec, config, arch):
        need = self.resources(spec, config)
        if need.smem_bytes > arch.smem_per_block:
            return Exclusion("shared memory", f"needs {need.smem_bytes}")
        if need.registers > need.register_cap:
            return Exclusion("registers", f"needs {need.registers} of {need.register_cap}")
        if config.pingpong and config.num_warpgroups < 2:
            return Exclusion("pingpong", "one warpgroup has no partner")
        if config.schedule == "grid" and config.q_stages > 1:
            return Exclusion("q_stages", "one tile a block needs one buffer")
        return None

    def default_configs(self, spec, arch):
        return (ForwardSm90Config(2, 128, 2, 1, "optimistic", False, "grid"),)

    def arguments(self, spec: AttentionSpec) -> tuple[ArgumentField, ...]:
        fields = [
            ArgumentField("TensorMap", "q_map", "(batch, nheads, seqlen_q, head_dim)"),
            ArgumentField("TensorMap", "k_map", "(batch, nheads_k, seqlen_k, head_dim)"),
            ArgumentField("TensorMap", "v_map", "(batch, nheads_k, seqlen_k, head_dim_v)"),
            ArgumentField("TensorMap", "o_map", "(batch, nheads, seqlen_q, head_dim_v)"),
            ArgumentField("float*", "lse", "(batch, nheads, seqlen_q), or null"),
            ArgumentField("int*", "next_tile", "two counters, 0 before and after every launch"),
        ]
        mods = [ArgumentField(*argument) for argument in render_mods(spec.mask, spec.score).arguments]
        fields += [field for field in mods if field.size == 8]
        fields += [
            ArgumentField("int", "seqlen_q", "rows of Q and O"),
            ArgumentField("int", "seqlen_k", "rows of K and V"),
            ArgumentField("int", "nheads", "heads of Q and O"),
            ArgumentField("int", "group_size", "nheads / nheads_k"),
            ArgumentField("int", "num_tiles", "row tiles of all heads"),
            ArgumentField("int", "num_row_tiles", "T_r = ceil(seqlen_q / B_r)"),
            ArgumentField("int", "num_heads_total", "batch * nheads"),
            ArgumentField("int", "section_heads", "heads that run together, longest rows first"),
            ArgumentField("float", "softmax_scale", "factor of Q K^T"),
            ArgumentField("float", "softmax_scale_log2", "softmax_scale * log2(e)"),
        ]
        fields += [field for field in mods if field.size == 4]
        return tuple(fields)

    def geometry(self, spec, config, shape, sms=132):
        tiles = -(-shape.seqlen_q // config.B_r) * shape.batch * shape.nheads
        grid = tiles if config.schedule == "grid" else min(tiles, sms)
        return LaunchGeometry((grid, 1, 1), config.threads, self.resources(spec, config).smem_bytes)

    def schedule_arguments(self, spec, config, shape):
        kv_bytes = 2 * shape.seqlen_k * (spec.head_dim + spec.head_dim_v)
        heads = SECTION_BYTES // max(kv_bytes, 1) * shape.gqa_ratio
        total = shape.batch * shape.nheads
        rows = -(-shape.seqlen_q // config.B_r)
        return {"num_tiles": rows * total, "num_row_tiles": rows, "num_heads_total": total, "section_heads": max(1, min(heads, total))}

    def render_context(self, spec, config, arch) -> dict[str, Any]:
        producer, consumer = REGISTERS[config.num_warpgroups]
        return {
            "chunks": chunks_of(spec.head_dim),
            "chunks_v": chunks_of(spec.head_dim_v),
            "producer_registers": producer,
            "consumer_registers": consumer,
            "left_edge": spec.mask is not None and "full_begin, " in render_mods(spec.mask, None).kv_range_function,
            "mma": {"fp16": "f16", "bf16": "bf16"}[spec.dtype],
            "cvt": {"fp16": "f16", "bf16": "bf16"}[spec.dtype],
        }
