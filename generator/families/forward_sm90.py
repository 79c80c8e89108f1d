"""Forward attention for Hopper (sm_90a): TMA copies, WGMMA products, one producer and up to four consumer warpgroups.

A thread block owns 64 rows per consumer warpgroup. One producer thread keeps K_j and V_j coming; the products
S_ij = Q_i K_j^T and, of the tile before, O_i += P V run while the other warpgroups compute their softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

from ..arch import MAX_THREADS_PER_BLOCK, Arch
from ..errors import ConfigError
from ..language import Graph
from ..language.bounds import kv_bounds
from ..language.rules import ZERO
from ..spec import AttentionSpec, ProblemShape
from .base import ArgumentField, Exclusion, Family, KernelConfig, LaunchGeometry, Resources, TensorMapField
from .forward_common import OVERHEAD_REGISTERS, chunks_of, forward_arguments, tile_counts

SOFTMAX = ("exact", "optimistic", "wary")
SCHEDULES = ("grid", "static", "dynamic")
P_OPERANDS = ("registers", "shared")
WARPGROUP_THREADS = 128
WARPGROUP_ROWS = 64
#: Consumer warpgroups -> registers per thread of (the producer, a consumer). With the launch's own registers times its
#: threads as the sum, setmaxnreg moves them from the producer to the consumers.
REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160), 4: (32, 112)}
#: Keys and values of the heads that run together take up to this much of the L2 cache, of which each half of an H200
#: keeps what it reads in its own.
SECTION_BYTES = 16 << 20
#: Of P_ij on its way to shared memory: 16 x 16 elements of a warp, and where they go.
P_REGISTERS = 8
#: Registers that P_ij must leave free to be nowhere but in registers.
AMPLE_REGISTERS = 16
#: TMA's limits on a stride in bytes (cuTensorMapEncodeTiled): a multiple of 16, below 2^40.
MAX_STRIDE_BYTES = 1 << 40
#: Packed rows are numbered by 32-bit integers, to the end of the last tile.
MAX_PACKED_ROWS = (1 << 31) - 256


@dataclass(frozen=True, slots=True, order=True)
class ForwardSm90Config(KernelConfig):
    """Choices of the Hopper forward.

    - `num_warpgroups` consumers of 64 rows each; `B_c` rows of K_j and V_j, a multiple of 16.
    - `num_stages`: buffers for K and for V.
    - `q_stages`: buffers for Q_i. 1: it is free for the next tile after this one's last S_ij, and O_i leaves from
      registers. 2: the next tile's is loaded a tile ahead, and O_i leaves through this one's.
    - `softmax`: "exact" takes each tile's row maximum; "optimistic" keeps the earlier one while nothing overflows, and
      redoes the tile where something would; "wary" takes it in the tiles that follow such a one.
    - `pingpong`: warpgroups take turns to issue their products.
    - `schedule`: "grid" gives a block one tile of rows, longest first; "static" spreads the tiles evenly over one block
      per SM; "dynamic" lets each of these draw the next tile, longest first, from a counter.
    - `p_operand`: where P_ij lies when O_i += P_ij V_j reads it. "registers", as the softmax left it; "shared": in a
      buffer of the warpgroup's own, which leaves registers for more columns of S_ij.
    - `pack_gqa`: the rows of a tile are (query, head) pairs, the heads of a query that share a KV head side by side, so
      that K_j and V_j are loaded once for all of them. Their number must divide 64.
    """

    family: ClassVar[str] = "forward_sm90"

    num_warpgroups: int
    B_c: int
    num_stages: int
    q_stages: int
    softmax: str
    pingpong: bool
    schedule: str
    p_operand: str
    pack_gqa: bool

    def __post_init__(self) -> None:
        if not 1 <= self.num_warpgroups <= max(REGISTERS):
            raise ConfigError(f"num_warpgroups must be from 1 to {max(REGISTERS)}, but got {self.num_warpgroups}.")
        if not 16 <= self.B_c <= 256 or self.B_c % 16:
            raise ConfigError(f"B_c must be a multiple of 16 from 16 to 256, but got {self.B_c}.")
        if self.num_stages < 2:
            raise ConfigError(f"num_stages must be at least 2, but got {self.num_stages}.")
        if self.q_stages not in (1, 2):
            raise ConfigError(f"q_stages must be 1 or 2, but got {self.q_stages}.")
        for name, value, known in (
            ("softmax", self.softmax, SOFTMAX),
            ("schedule", self.schedule, SCHEDULES),
            ("p_operand", self.p_operand, P_OPERANDS),
        ):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, but got {value!r}.")

    @property
    def B_r(self) -> int:
        return WARPGROUP_ROWS * self.num_warpgroups

    def heads_per_tile(self, shape: ProblemShape) -> int:
        return shape.gqa_ratio if self.pack_gqa else 1

    @property
    def stages_output(self) -> bool:
        """Whether O_i leaves through shared memory, over Q_i."""
        return self.q_stages > 1

    @property
    def threads(self) -> int:
        return WARPGROUP_THREADS * (self.num_warpgroups + 1)


#: What some arguments of a packed kernel hold, where it is not what `arguments` says.
PACKED_MEANINGS = {
    "num_tiles": "tiles of B_r rows of all KV heads",
    "num_row_tiles": "T_r = ceil(seqlen_q * group_size / B_r)",
    "num_heads_total": "batch * nheads_k",
    "section_heads": "KV heads that run together, longest rows first",
}


def packing_reason(group_size: int) -> str | None:
    """Why `group_size` heads of a KV head cannot be packed into one tile; None if they can."""
    if group_size > 1 and WARPGROUP_ROWS % group_size == 0:
        return None
    return (
        f"pack_gqa puts the heads of a KV head side by side: their number, nheads / nheads_k, must be more than 1 and"
        f" divide {WARPGROUP_ROWS}, but got {group_size}. Use pack_gqa=False."
    )


def rows_and_heads(config: ForwardSm90Config, shape: ProblemShape) -> ProblemShape:
    """`shape` as the tiles see it: packed, each KV head has the rows of its group, and there are no other heads."""
    if not config.pack_gqa:
        return shape
    rows = shape.seqlen_q * shape.gqa_ratio
    return ProblemShape(shape.batch, rows, shape.seqlen_k, shape.nheads_k, shape.nheads_k)


def tile_bytes(rows: int, chunks: int) -> int:
    """Bytes of `rows` rows in shared memory: parts of 64 columns, 128 bytes a row, whatever of them is used."""
    return rows * ((chunks + 7) // 8) * 128


class ForwardSm90(Family):
    """TMA + WGMMA forward for compute capability 9.0."""

    name = "forward_sm90"
    op = "forward"
    config_type = ForwardSm90Config
    entry = "flashsmith_forward_sm90"
    # A branch between a product's issue and its wait makes ptxas serialise the products (C7511).
    branch_free_mods = True
    sections = (
        ("header", "common/header.jinja"),
        ("types", "sm90/forward_types.jinja"),
        ("primitives", "sm90/primitives.jinja"),
        ("kernel", "sm90/forward.jinja"),
    )

    def unsupported_reason(self, spec: AttentionSpec, arch: Arch) -> str | None:
        if spec.op != "forward":
            return f"it does op 'forward', not {spec.op!r}."
        if arch.cc != (9, 0):
            return f"it needs compute capability 9.0 (WGMMA), {arch} has {arch.cc[0]}.{arch.cc[1]}."
        return None

    def layout_reason(self, strides: Mapping[str, tuple[int, ...]], shape: ProblemShape) -> str | None:
        sizes = {
            "q": (shape.batch, shape.seqlen_q, shape.nheads),
            "k": (shape.batch, shape.seqlen_k, shape.nheads_k),
            "v": (shape.batch, shape.seqlen_k, shape.nheads_k),
        }
        for name, of_tensor in strides.items():
            for size, stride in zip(sizes[name], of_tensor, strict=True):
                if size > 1 and not 0 < stride < MAX_STRIDE_BYTES // 2:
                    return f"its copy engine takes strides from 1 element to 1 TiB, but {name} has {of_tensor}."
        return None

    def target(self, arch: Arch) -> str:
        return f"{arch.name}a"

    def candidates(self, spec: AttentionSpec, arch: Arch) -> Iterator[ForwardSm90Config]:
        for values in product(
            (1, 2, 3, 4),
            (48, 64, 80, 96, 112, 128, 144, 160, 176, 192),
            (2, 3, 4),
            (1, 2),
            SOFTMAX,
            (False, True),
            SCHEDULES,
            P_OPERANDS,
            (False, True),
        ):
            config = ForwardSm90Config(*values)
            in_registers = self.resources(spec, replace(config, p_operand="registers"))
            # P_ij in shared memory costs its reads and a barrier or two a tile, and is worth them where registers are
            # short: for tiles that need it (192 columns instead of 128 for three warpgroups at head dim 64), and for
            # those that would fit otherwise but leave ptxas little room to mix the softmax with what else there is.
            if config.p_operand == "shared" and in_registers.registers + AMPLE_REGISTERS <= in_registers.register_cap:
                continue
            # Packing is for calls of few rows: small tiles, and choices that hardly matter there are left out.
            few = config.B_r <= 128 and config.schedule != "grid" and config.p_operand == "registers"
            if not config.pack_gqa or (few and config.softmax != "wary"):
                yield config

    def resources(self, spec: AttentionSpec, config: KernelConfig) -> Resources:
        assert isinstance(config, ForwardSm90Config)
        chunks, chunks_v = chunks_of(spec.head_dim), chunks_of(spec.head_dim_v)
        q_chunks = max(chunks, chunks_v) if config.stages_output else chunks
        q_bytes = config.num_warpgroups * config.q_stages * tile_bytes(WARPGROUP_ROWS, q_chunks)
        kv_bytes = config.num_stages * (tile_bytes(config.B_c, chunks) + tile_bytes(config.B_c, chunks_v))
        words = 2 * config.q_stages + 4 * config.num_stages + (0 if config.schedule == "grid" else 8)
        words += 0 if config.softmax == "exact" else 4 * config.num_warpgroups
        output, scores, probabilities = chunks_v * 4, config.B_c // 2, config.B_c // 4
        p_bytes = 0
        if config.p_operand == "shared":
            p_bytes = config.num_warpgroups * tile_bytes(WARPGROUP_ROWS, config.B_c // 8)
            probabilities = P_REGISTERS
        return Resources(
            threads=config.threads,
            smem_bytes=q_bytes + kv_bytes + p_bytes + 8 * words,
            registers=output + scores + probabilities + OVERHEAD_REGISTERS,
            register_cap=REGISTERS[config.num_warpgroups][1],
        )

    def exclusion(self, spec: AttentionSpec, config: KernelConfig, arch: Arch) -> Exclusion | None:
        assert isinstance(config, ForwardSm90Config)
        need = self.resources(spec, config)
        shared = config.p_operand == "shared"
        if need.threads > MAX_THREADS_PER_BLOCK:
            return Exclusion(
                "threads",
                f"num_warpgroups={config.num_warpgroups} needs {need.threads} threads; {arch} allows"
                f" {MAX_THREADS_PER_BLOCK} per block. Lower num_warpgroups.",
            )
        if need.smem_bytes > arch.smem_per_block:
            return Exclusion(
                "shared memory",
                f"num_warpgroups={config.num_warpgroups}, B_c={config.B_c}, num_stages={config.num_stages},"
                f" q_stages={config.q_stages}, p_operand={config.p_operand} need {need.smem_bytes} bytes of shared"
                f" memory; {arch} allows {arch.smem_per_block}. Lower B_c, num_stages or q_stages"
                f"{', or use p_operand=registers' * shared}.",
            )
        if need.registers > need.register_cap:
            return Exclusion(
                "registers",
                f"B_c={config.B_c} keeps {need.registers} registers a thread alive; num_warpgroups="
                f"{config.num_warpgroups} leaves a consumer {need.register_cap}. Lower B_c or num_warpgroups"
                f"{', or use p_operand=shared' * (not shared)}.",
            )
        if config.pingpong and config.num_warpgroups == 1:
            return Exclusion("pingpong", "pingpong needs two warpgroups to take turns. Use pingpong=False.")
        if config.schedule == "grid" and config.q_stages > 1:
            return Exclusion("q_stages", "A block with one tile of rows loads one Q_i. Use q_stages=1.")
        if spec.mask is None and config.schedule == "dynamic":
            return Exclusion("schedule", "Without a mask every block of rows takes equally long. Use schedule=static.")
        if config.pack_gqa:
            if spec.gqa_ratio is not None and (reason := packing_reason(spec.gqa_ratio)) is not None:
                return Exclusion("pack_gqa", reason)
            if spec.mask is not None and _tiles_depend_on_head(spec.mask):
                return Exclusion(
                    "pack_gqa",
                    "A tile of packed heads visits the same keys for all of them, but which keys the mask"
                    f" {spec.mask.describe()} shows depends on h. Use pack_gqa=False.",
                )
        return None

    def shape_reason(self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape) -> str | None:
        assert isinstance(config, ForwardSm90Config)
        if not config.pack_gqa:
            return None
        if shape.seqlen_q * shape.gqa_ratio > MAX_PACKED_ROWS:
            return (
                f"pack_gqa takes at most {MAX_PACKED_ROWS} rows of a KV head, but got {shape.seqlen_q} of each of"
                f" {shape.gqa_ratio} heads. Use pack_gqa=False."
            )
        return packing_reason(shape.gqa_ratio)

    def default_configs(self, spec: AttentionSpec, arch: Arch) -> tuple[ForwardSm90Config, ...]:
        schedule = "static" if spec.mask is None else "dynamic"
        configs = [ForwardSm90Config(*preferred, schedule, "registers", False) for preferred in _preferred(spec)]
        return tuple(config for config in configs if self.exclusion(spec, config, arch) is None)

    def arguments(self, spec: AttentionSpec) -> tuple[ArgumentField, ...]:
        tensors = (
            ArgumentField("TensorMap", "q_map", "(batch, nheads, seqlen_q, head_dim)"),
            ArgumentField("TensorMap", "k_map", "(batch, nheads_k, seqlen_k, head_dim)"),
            ArgumentField("TensorMap", "v_map", "(batch, nheads_k, seqlen_k, head_dim_v)"),
            ArgumentField("TensorMap", "o_map", "(batch, nheads, seqlen_q, head_dim_v)"),
            ArgumentField("void*", "o", "(batch, seqlen_q, nheads, head_dim_v), dense along head_dim_v"),
            ArgumentField("float*", "lse", "(batch, nheads, seqlen_q), or null"),
            ArgumentField("int*", "next_tile", "two counters, 0 before and after every launch"),
            ArgumentField("long long", "o_stride_b", "of the batch, in elements"),
            ArgumentField("long long", "o_stride_s", "of the rows"),
            ArgumentField("long long", "o_stride_h", "of the heads"),
        )
        return forward_arguments(
            spec, tensors, counts=(ArgumentField("int", "num_tiles", "tiles of B_r rows of all heads"),)
        )

    def tensor_maps(self, spec: AttentionSpec, config: KernelConfig) -> tuple[TensorMapField, ...]:
        assert isinstance(config, ForwardSm90Config)
        return (
            TensorMapField("q_map", "q", WARPGROUP_ROWS, config.pack_gqa),
            TensorMapField("k_map", "k", config.B_c),
            TensorMapField("v_map", "v", config.B_c),
            TensorMapField("o_map", "o", WARPGROUP_ROWS, config.pack_gqa),
        )

    def draws_tiles(self, config: KernelConfig) -> bool:
        assert isinstance(config, ForwardSm90Config)
        return config.schedule == "dynamic"

    def geometry(
        self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape, *, sm_count: int
    ) -> LaunchGeometry:
        assert isinstance(config, ForwardSm90Config)
        need = self.resources(spec, config)
        seen = rows_and_heads(config, shape)
        tiles = -(-seen.seqlen_q // config.B_r) * seen.batch * seen.nheads
        if tiles + sm_count >= 1 << 31:
            raise ConfigError(
                f"A launch takes at most 2147483647 tiles; {shape} with B_r={config.B_r} needs {tiles}."
                " Split the batch."
            )
        grid = tiles if config.schedule == "grid" else min(tiles, sm_count)
        return LaunchGeometry(grid=(grid, 1, 1), threads=need.threads, smem_bytes=need.smem_bytes)

    def schedule_arguments(self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape) -> Mapping[str, int]:
        assert isinstance(config, ForwardSm90Config)
        counts = tile_counts(spec, rows_and_heads(config, shape), config.B_r, section_bytes=SECTION_BYTES)
        return {"num_tiles": counts["num_row_tiles"] * counts["num_heads_total"], **counts}

    def render_context(self, spec: AttentionSpec, config: KernelConfig, arch: Arch) -> dict[str, Any]:
        assert isinstance(config, ForwardSm90Config)
        producer, consumer = REGISTERS[config.num_warpgroups]
        meanings = PACKED_MEANINGS if config.pack_gqa else {}
        return {
            "arguments": tuple(replace(f, meaning=meanings.get(f.name, f.meaning)) for f in self.arguments(spec)),
            "chunks": chunks_of(spec.head_dim),
            "chunks_v": chunks_of(spec.head_dim_v),
            "producer_registers": producer,
            "consumer_registers": consumer,
            # A mask that hides keys on the left too cuts tiles there.
            "left_edge": spec.mask is not None and kv_bounds(spec.mask).visit_begin is not ZERO,
            "mma": {"fp16": "f16", "bf16": "bf16"}[spec.dtype],
            "cvt": {"fp16": "f16", "bf16": "bf16"}[spec.dtype],
        }


def _tiles_depend_on_head(mask: Graph) -> bool:
    """Whether the keys that a tile visits, or leaves unmasked, may differ between heads."""
    bounds = kv_bounds(mask)
    # Where bounds do not say all, tiles are classified by the mask itself.
    deciding = bounds.nodes if bounds.exact else (*bounds.nodes, mask.root)
    return any("h" in node.leaves for node in deciding)


def _preferred(spec: AttentionSpec) -> tuple[tuple[int, int, int, int, str, bool], ...]:
    """(num_warpgroups, B_c, num_stages, q_stages, softmax, pingpong): an H200's fastest, then of fewer registers."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if widest <= 64:
        return ((4, 64, 3, 2, "wary", True), (3, 96, 2, 2, "optimistic", True), (2, 64, 2, 2, "exact", False))
    if widest <= 96:
        return ((3, 64, 3, 2, "optimistic", True), (2, 96, 2, 2, "optimistic", True), (2, 64, 2, 2, "exact", False))
    if widest <= 128:
        return ((2, 128, 2, 2, "optimistic", True), (2, 96, 2, 2, "optimistic", False), (2, 64, 2, 2, "exact", False))
    if widest <= 192:
        return ((2, 96, 2, 1, "optimistic", True), (2, 80, 2, 1, "optimistic", False), (2, 64, 2, 1, "exact", False))
    return ((2, 64, 2, 1, "optimistic", False), (2, 48, 2, 1, "optimistic", False), (2, 48, 2, 1, "exact", False))
