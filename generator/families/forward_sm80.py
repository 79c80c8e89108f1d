"""Forward attention for sm_80 and newer with cp.async, ldmatrix and mma.m16n8k16 (FlashAttention-2's loop order).

One thread block owns B_r rows of one head. Its warps split those rows; each warp reads every K_j and V_j.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from ..arch import (
    MAX_REGISTERS_PER_THREAD,
    MAX_THREADS_PER_BLOCK,
    REGISTERS_PER_SM,
    RESERVED_SMEM_PER_BLOCK,
    WARP_SIZE,
    Arch,
)
from ..errors import ConfigError
from ..spec import AttentionSpec, ProblemShape
from .base import ArgumentField, Exclusion, Family, KernelConfig, LaunchGeometry, Resources
from .forward_common import OVERHEAD_REGISTERS, SOFTMAX, chunks_of, forward_arguments, tile_counts

SCHEDULES = ("linear", "longest_first")
#: Keys and values of the heads that run together take up to this much of the L2 cache.
SECTION_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, order=True)
class ForwardSm80Config(KernelConfig):
    """Choices of the Ampere forward.

    - `B_r`, `B_c`: rows of Q_i and of K_j, V_j; multiples of 16.
    - `num_warps` divides B_r into 16, 32 or 64 rows a warp.
    - `num_stages`: buffers for K and for V; 1 alternates their copies, as FlashAttention-2 does.
    - `q_in_registers`: Q_i is read from shared memory once, not in every iteration.
    - `softmax`: "exact" takes each tile's row maximum; "optimistic" keeps the earlier one while nothing overflows.
    - `schedule`: "linear", or "longest_first" within sections of heads that share the L2 cache.
    - `min_blocks`: thread blocks per SM that the register allocation must allow.
    """

    family: ClassVar[str] = "forward_sm80"

    B_r: int
    B_c: int
    num_warps: int
    num_stages: int
    q_in_registers: bool
    softmax: str
    schedule: str
    min_blocks: int

    def __post_init__(self) -> None:
        for name in ("B_r", "B_c"):
            value = getattr(self, name)
            if value < 16 or value % 16:
                raise ConfigError(f"{name} must be a positive multiple of 16, but got {value}.")
        for name in ("num_warps", "num_stages", "min_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, but got {getattr(self, name)}.")
        if self.B_r % (16 * self.num_warps):
            raise ConfigError(
                f"B_r must be a multiple of 16 * num_warps, but got B_r={self.B_r}, num_warps={self.num_warps}."
                f" Use B_r={16 * self.num_warps} or fewer warps."
            )
        for name, value, known in (("softmax", self.softmax, SOFTMAX), ("schedule", self.schedule, SCHEDULES)):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, but got {value!r}.")

    @property
    def rows_per_warp(self) -> int:
        return self.B_r // self.num_warps

    @property
    def threads(self) -> int:
        return self.num_warps * WARP_SIZE


#: Tiles for head dims up to 128, by falling need of registers and shared memory.
_SMALL = ((128, 48, 4, 2, False, 1), (128, 32, 4, 2, False, 1), (128, 32, 4, 1, False, 1), (64, 32, 4, 1, False, 1))


def _preferred(spec: AttentionSpec) -> tuple[tuple[int, int, int, int, bool, int], ...]:
    """(B_r, B_c, num_warps, num_stages, q_in_registers, min_blocks), the fastest first on an H200 at length 4096.

    The later ones take fewer registers and less shared memory: a mask or score function that overflows the registers of
    the first still finds one that fits.
    """
    widest = max(spec.head_dim, spec.head_dim_v)
    if widest <= 64:
        return ((128, 48, 4, 2, False, 3), *_SMALL)
    if widest <= 128:
        return _SMALL
    return ((64, 32, 4, 2, True, 1), (64, 64, 4, 1, False, 1), (64, 32, 4, 1, False, 1), (32, 32, 2, 1, False, 1))


class ForwardSm80(Family):
    """cp.async + mma.m16n8k16 forward, on every architecture from sm_80."""

    name = "forward_sm80"
    op = "forward"
    config_type = ForwardSm80Config
    entry = "flashsmith_forward_sm80"
    sections = (
        ("header", "common/header.jinja"),
        ("types", "sm80/forward_types.jinja"),
        ("primitives", "sm80/primitives.jinja"),
        ("kernel", "sm80/forward.jinja"),
    )

    def unsupported_reason(self, spec: AttentionSpec, arch: Arch) -> str | None:
        if spec.op != "forward":
            return f"it does op 'forward', not {spec.op!r}."
        if arch.cc < (8, 0):
            return f"it needs compute capability 8.0 (cp.async), {arch} has {arch.cc[0]}.{arch.cc[1]}."
        return None

    def candidates(self, spec: AttentionSpec, arch: Arch) -> Iterator[ForwardSm80Config]:
        for B_r, num_warps, B_c, num_stages, q_in_registers, softmax, schedule, min_blocks in product(
            (32, 64, 128, 192, 256),
            (2, 4, 8),
            (32, 48, 64, 96, 128),
            (1, 2, 3),
            (False, True),
            SOFTMAX,
            SCHEDULES,
            (1, 2, 3, 4),
        ):
            if B_r % (16 * num_warps) == 0:
                yield ForwardSm80Config(B_r, B_c, num_warps, num_stages, q_in_registers, softmax, schedule, min_blocks)

    def resources(self, spec: AttentionSpec, config: KernelConfig) -> Resources:
        assert isinstance(config, ForwardSm80Config)
        chunks, chunks_v = chunks_of(spec.head_dim), chunks_of(spec.head_dim_v)
        q_bytes = config.B_r * max(chunks, chunks_v) * 16
        kv_bytes = config.num_stages * config.B_c * (chunks + chunks_v) * 16
        m_tiles = config.rows_per_warp // 16
        output = m_tiles * chunks_v * 4
        scores = m_tiles * config.B_c // 8 * 4
        statistics = m_tiles * 4
        # P_ij takes two 16-bit values a register. In exact softmax each S_ij register dies as its P_ij is made; the
        # optimistic one keeps S_ij whole until the tile is known to be right.
        probabilities = scores // 2 if config.softmax == "optimistic" else 0
        query = m_tiles * chunks * 2 if config.q_in_registers else 0
        cap = min(
            MAX_REGISTERS_PER_THREAD,
            REGISTERS_PER_SM // (config.threads * config.min_blocks) // 8 * 8,
        )
        return Resources(
            threads=config.threads,
            smem_bytes=q_bytes + kv_bytes,
            registers=output + scores + statistics + probabilities + query + OVERHEAD_REGISTERS,
            register_cap=cap,
        )

    def exclusion(self, spec: AttentionSpec, config: KernelConfig, arch: Arch) -> Exclusion | None:
        assert isinstance(config, ForwardSm80Config)
        need = self.resources(spec, config)
        if need.threads > MAX_THREADS_PER_BLOCK:
            return Exclusion(
                "threads",
                f"num_warps={config.num_warps} needs {need.threads} threads; {arch} allows {MAX_THREADS_PER_BLOCK}"
                " per block. Lower num_warps.",
            )
        if config.rows_per_warp > 64:
            return Exclusion(
                "rows per warp",
                f"B_r={config.B_r}, num_warps={config.num_warps} gives a warp {config.rows_per_warp} rows; its"
                " accumulators allow at most 64. Raise num_warps.",
            )
        if need.smem_bytes > arch.smem_per_block:
            return Exclusion(
                "shared memory",
                f"B_r={config.B_r}, B_c={config.B_c}, num_stages={config.num_stages} need {need.smem_bytes} bytes of"
                f" shared memory; {arch} allows {arch.smem_per_block}. Lower num_stages or B_c.",
            )
        if spec.mask is None and config.schedule == "longest_first":
            return Exclusion(
                "schedule",
                "schedule=longest_first, but without a mask every block of rows takes equally long. Use linear.",
            )
        if config.min_blocks > 1 and need.register_cap == MAX_REGISTERS_PER_THREAD:
            return Exclusion(
                "duplicate",
                f"min_blocks={config.min_blocks} leaves {need.register_cap} registers a thread, as min_blocks=1 does:"
                " the same kernel. Use min_blocks=1.",
            )
        if need.registers > need.register_cap:
            return Exclusion(
                "registers",
                f"B_r={config.B_r}, B_c={config.B_c}, num_warps={config.num_warps},"
                f" q_in_registers={config.q_in_registers}, softmax={config.softmax} keep {need.registers} registers a"
                f" thread alive; min_blocks={config.min_blocks} allows {need.register_cap}. Raise num_warps or lower"
                " B_c or min_blocks.",
            )
        resident = arch.blocks_per_sm(threads=need.threads, registers=need.registers, smem_bytes=need.smem_bytes)
        if config.min_blocks > resident:
            return Exclusion(
                "residency",
                f"min_blocks={config.min_blocks}, but {arch} holds {resident} blocks of {need.smem_bytes} bytes of"
                f" shared memory and {need.threads} threads. Lower min_blocks.",
            )
        return None

    def default_configs(self, spec: AttentionSpec, arch: Arch) -> tuple[ForwardSm80Config, ...]:
        schedule = "linear" if spec.mask is None else "longest_first"
        valid = []
        for B_r, B_c, num_warps, num_stages, q_in_registers, min_blocks in _preferred(spec):
            config = ForwardSm80Config(
                B_r, B_c, num_warps, num_stages, q_in_registers, "optimistic", schedule, min_blocks
            )
            if self.exclusion(spec, config, arch) is None:
                valid.append(config)
        # Two resident blocks hide each other's softmax; one that fills the SM comes after those that leave room.
        return tuple(sorted(valid, key=lambda config: not self._leaves_room(spec, config, arch)))

    def _leaves_room(self, spec: AttentionSpec, config: ForwardSm80Config, arch: Arch) -> bool:
        return 2 * (self.resources(spec, config).smem_bytes + RESERVED_SMEM_PER_BLOCK) <= arch.smem_per_sm

    def arguments(self, spec: AttentionSpec) -> tuple[ArgumentField, ...]:
        fields = [
            ArgumentField("const void*", "q", "(batch, seqlen_q, nheads, head_dim)"),
            ArgumentField("const void*", "k", "(batch, seqlen_k, nheads_k, head_dim)"),
            ArgumentField("const void*", "v", "(batch, seqlen_k, nheads_k, head_dim_v)"),
            ArgumentField("void*", "o", "(batch, seqlen_q, nheads, head_dim_v)"),
            ArgumentField("float*", "lse", "(batch, nheads, seqlen_q), or null"),
        ]
        for tensor in "qkvo":
            for axis, meaning in (("b", "batch"), ("s", "sequence"), ("h", "head")):
                fields.append(ArgumentField("long long", f"{tensor}_stride_{axis}", f"{tensor.upper()}, {meaning}"))
        return forward_arguments(spec, fields)

    def geometry(
        self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape, *, sm_count: int
    ) -> LaunchGeometry:
        assert isinstance(config, ForwardSm80Config)
        need = self.resources(spec, config)
        blocks = -(-shape.seqlen_q // config.B_r) * shape.batch * shape.nheads
        if blocks >= 1 << 31:
            raise ConfigError(
                f"A launch takes at most 2147483647 thread blocks; {shape} with B_r={config.B_r} needs {blocks}."
                " Split the batch."
            )
        return LaunchGeometry(grid=(blocks, 1, 1), threads=need.threads, smem_bytes=need.smem_bytes)

    def schedule_arguments(self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape) -> Mapping[str, int]:
        assert isinstance(config, ForwardSm80Config)
        return tile_counts(spec, shape, config.B_r, section_bytes=SECTION_BYTES)

    def render_context(self, spec: AttentionSpec, config: KernelConfig, arch: Arch) -> dict[str, Any]:
        assert isinstance(config, ForwardSm80Config)
        widths = (chunks_of(spec.head_dim), chunks_of(spec.head_dim_v))
        return {
            # Threads walk down the rows of a tile where a row's chunks divide their number, else spread over it.
            "walks": any(config.threads % width == 0 for width in widths),
            "spreads": any(config.threads % width for width in widths),
            # Where no score function can hide a key, tiles that need no mask have no empty rows.
            "two_exact": config.softmax == "exact" and spec.score is None,
            "chunks": chunks_of(spec.head_dim),
            "chunks_v": chunks_of(spec.head_dim_v),
            "mma": {"fp16": "f16", "bf16": "bf16"}[spec.dtype],
            "cvt": {"fp16": "f16", "bf16": "bf16"}[spec.dtype],
        }
