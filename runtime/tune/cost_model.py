"""The time of a config, estimated from its resources: for seeds, for ranking without a GPU, never for a claim.

The Hopper forward's model is in `cost_model_sm90.py`. Per tile (K_j, V_j) of one block, in cycles of one SM with b
resident blocks, W warps each (Ampere forward):

- tensor    ceil(b W / 4) * (mma per warp) * 2048 / (mma_fma / 4): each of the SM's 4 partitions has a tensor core;
- softmax   ceil(b W / 4) * (the slower of ex2 and fp32 + `BESIDE` of the other, for each waits for the other): 1 ex2
            and 3.5 fp32 instructions (exact) or 2.75 (optimistic) per score; the exact one also scales the O_i tile; a
            score function adds its nodes;
- issue     ceil(b W / 4) * instructions: mma, ldmatrix, cp.async, softmax, `LOOP_INSTRUCTIONS` of loop and addresses;
- shared    b * (bytes that ldmatrix reads + bytes that cp.async writes) / smem_bytes;
- L2        b * bytes of the tile / l2_bytes.

The slowest of these bounds the round. The work off that pipe, and `LATENCY_CYCLES` of dependent latencies (longer for
the exact softmax, whose weights wait for the row's maximum, and O_i for the weights), is hidden only by other warps of
the partition, w = ceil(b W / 4) in all, and never wholly:
round = slowest + (tensor + softmax - slowest + latency) * max(1 / w, LEAK). Too few stages expose `MEMORY_CYCLES`
beyond the time the copy has.

A launch takes whole waves of equal blocks, the last one at its own residency; unequal blocks (a mask) take
max(longest block, work / slots) plus a tail: half the longest block for "linear", a quarter of the mean for
"longest_first". Memory bandwidth is a floor. Registers come from the compiler's report where there is one, else
from the family's lower bound.

`LATENCY_CYCLES` and `LEAK` are fitted to tests/tune/measured/h200-d128-causal.jsonl, every config timed on an H200
(bf16, head dim 128, causal, B4 N4096 H16). Spearman's rank correlation with these times: 0.81 on the family's
registers (before the fit, with 300 cycles for both and a leak of 0.4, it was 0.66), 0.88 on the compiler's (0.67).
tests/tune/test_replay.py holds both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...generator.arch import Arch
from ...generator.families.base import Family, KernelConfig
from ...generator.families.forward_sm90 import REGISTERS, WARPGROUP_ROWS
from ...generator.language.bounds import kv_bounds
from ...generator.spec import AttentionSpec, ProblemShape
from .cost_model_sm90 import launch_cycles, tile_cost
from .gpus import GpuModel
from .tiles import TileCounter

PARTITIONS = 4
MMA_FMA = 16 * 8 * 16
LOOP_INSTRUCTIONS = 60
LATENCY_CYCLES = {"exact": 1500.0, "optimistic": 1000.0}
MEMORY_CYCLES = 700.0
PROLOGUE_CYCLES = 2500.0
#: What stays exposed of the work off the slowest pipe, however many warps there are.
LEAK = 0.3
BESIDE = 0.5
LAUNCH_MS = 0.003
FP32_PER_SCORE = {"exact": 3.5, "optimistic": 2.75}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated milliseconds of one call, with what it rests on: residency, waves, and the pipe that bounds it."""

    ms: float
    blocks_per_sm: int
    waves: float
    bound_by: str
    registers: int
    smem_bytes_per_flop: float


@dataclass(frozen=True, slots=True)
class _Round:
    """One tile of each of the blocks resident on an SM."""

    cycles: float
    bound_by: str


def estimate(
    family: Family,
    spec: AttentionSpec,
    config: KernelConfig,
    *,
    arch: Arch,
    gpu: GpuModel,
    shape: ProblemShape,
    tiles: TileCounter,
    registers: int | None = None,
) -> Estimate | None:
    """The estimate for `config`; None where it cannot be resident or run the shape, or its family has no cost model."""
    model = _MODELS.get(family.name)
    if model is None or family.shape_reason(spec, config, shape) is not None:
        return None
    values: Any = config
    # A tile of packed heads has the rows of fewer queries, once for all of the group.
    group = config.heads_per_tile(shape)
    row_tiles = tiles.visited(values.B_r // group, values.B_c)
    heads = shape.batch * shape.nheads // group
    found = model(_Case(family, spec, config, arch, gpu, tiles, row_tiles, heads, group, registers))
    if found is None or not sum(row_tiles):
        return None if found is None else replace(found, ms=LAUNCH_MS, waves=0.0, bound_by="launch")
    memory_ms = _compulsory_bytes(spec, shape) / (gpu.memory_gbps * 1e6)
    return replace(found, ms=max(found.ms + LAUNCH_MS, memory_ms))


@dataclass(frozen=True, slots=True)
class _Case:
    """One config at one shape: `row_tiles` counts the tiles that each block of rows of a head visits."""

    family: Family
    spec: AttentionSpec
    config: Any
    arch: Arch
    gpu: GpuModel
    tiles: TileCounter
    row_tiles: tuple[int, ...]
    heads: int
    group: int  # heads of Q whose rows a tile packs
    registers: int | None


def _forward_sm90(case: _Case) -> Estimate | None:
    config, spec = case.config, case.spec
    need = case.family.resources(spec, config)
    producer, consumer = REGISTERS[config.num_warpgroups]
    held = (producer + config.num_warpgroups * consumer) // (config.num_warpgroups + 1)
    resident = case.arch.blocks_per_sm(threads=need.threads, registers=held, smem_bytes=need.smem_bytes)
    if resident < 1:
        return None
    active = 1.0
    if spec.mask is not None and kv_bounds(spec.mask).exact:
        active = case.tiles.own_share(config.B_r // case.group, WARPGROUP_ROWS // case.group, config.B_c)
    tile = tile_cost(spec, config, active=active)
    cycles = 0.0
    if sum(case.row_tiles):
        cycles = launch_cycles(spec, config, case.row_tiles, case.heads, case.gpu.sm_count, active=active)
    flops = 2.0 * config.B_r * config.B_c * (spec.head_dim + spec.head_dim_v)
    return Estimate(
        ms=cycles / (case.gpu.clock_ghz * 1e6),
        blocks_per_sm=resident,
        waves=len(case.row_tiles) * case.heads / case.gpu.sm_count,
        bound_by=tile.bound_by,
        registers=case.registers or held,
        smem_bytes_per_flop=tile.smem_bytes / flops,
    )


def _forward_sm80(case: _Case) -> Estimate | None:
    spec, config, gpu, row_tiles = case.spec, case.config, case.gpu, case.row_tiles
    need = case.family.resources(spec, config)
    held = case.registers if case.registers else min(need.registers, need.register_cap)
    resident = case.arch.blocks_per_sm(threads=need.threads, registers=held, smem_bytes=need.smem_bytes)
    if resident < 1:
        return None
    num_blocks = len(row_tiles) * case.heads
    work, longest = sum(row_tiles) * case.heads, max(row_tiles, default=0)
    slots = gpu.sm_count * resident

    def block_cycles(blocks_on_sm: int, num_tiles: float) -> float:
        return num_tiles * _forward_sm80_round(spec, config, gpu, blocks_on_sm).cycles + PROLOGUE_CYCLES

    cycles = 0.0
    if len(set(row_tiles)) == 1:
        full, rest = divmod(num_blocks, slots)
        cycles = full * block_cycles(resident, longest)
        if rest:
            cycles += block_cycles(-(-rest // gpu.sm_count), longest)
    elif work:
        filled = min(resident, -(-num_blocks // gpu.sm_count))
        mean = work / num_blocks
        tail = 0.25 * mean if config.schedule == "longest_first" else 0.5 * longest
        rounds = max(float(longest), work / (gpu.sm_count * filled) + tail)
        one = _forward_sm80_round(spec, config, gpu, filled).cycles
        cycles = rounds * one + PROLOGUE_CYCLES * max(1.0, num_blocks / slots)
    flops = 4.0 * config.B_r * config.B_c * (spec.head_dim + spec.head_dim_v) / 2
    return Estimate(
        ms=cycles / (gpu.clock_ghz * 1e6),
        blocks_per_sm=resident,
        waves=num_blocks / slots,
        bound_by=_forward_sm80_round(spec, config, gpu, resident).bound_by,
        registers=held,
        smem_bytes_per_flop=_ldmatrix_bytes(spec, config) / flops,
    )


def _forward_sm80_round(spec: AttentionSpec, config: Any, gpu: GpuModel, resident: int) -> _Round:
    rates = gpu.rates
    chunks, chunks_v = _chunks(spec.head_dim), _chunks(spec.head_dim_v)
    rows = config.rows_per_warp
    m_tiles = rows // 16
    mma = m_tiles * (config.B_c // 8 * chunks // 2 + config.B_c // 16 * chunks_v)
    scores = rows * config.B_c / 32
    copied = config.B_c * (chunks + chunks_v) * 16
    read = _ldmatrix_bytes(spec, config)

    extra = sum(1 for graph in (spec.score,) if graph is not None for _ in graph.nodes)
    fp32 = scores * (FP32_PER_SCORE[config.softmax] + extra)
    if config.softmax == "exact":
        fp32 += rows * spec.head_dim_v / 32
    fp32_cycles = fp32 * 32 * PARTITIONS / rates.fp32_lanes
    ex2_cycles = scores * 32 * PARTITIONS / rates.mufu_lanes
    moves = read / config.num_warps / 512 + copied / config.threads / 16
    instructions = mma + moves + fp32 + scores + LOOP_INSTRUCTIONS

    lines = -(-resident * config.num_warps // PARTITIONS)
    tensor_one = mma * MMA_FMA * PARTITIONS / rates.mma_fma
    softmax_one = max(fp32_cycles, ex2_cycles) + BESIDE * min(fp32_cycles, ex2_cycles)
    pipes = {
        "tensor cores": lines * tensor_one,
        "softmax": lines * softmax_one,
        "issue": lines * instructions,
        "shared memory": resident * (read + copied) / rates.smem_bytes,
        "L2": resident * copied / rates.l2_bytes,
    }
    bound_by = max(pipes, key=lambda name: pipes[name])
    slowest = pipes[bound_by]
    # The copy has num_stages - 1 whole rounds, and half of this one, before its data is wanted.
    wait = max(0.0, MEMORY_CYCLES - (config.num_stages - 0.5) * slowest)
    beside = max(0.0, lines * (tensor_one + softmax_one) - slowest)
    return _Round(slowest + (beside + LATENCY_CYCLES[config.softmax] + wait) * max(1.0 / lines, LEAK), bound_by)


def _ldmatrix_bytes(spec: AttentionSpec, config: Any) -> float:
    """Bytes that one block's warps read from shared memory per tile."""
    chunks, chunks_v = _chunks(spec.head_dim), _chunks(spec.head_dim_v)
    query = 0 if config.q_in_registers else config.B_r * chunks * 16
    return float(config.num_warps * config.B_c * (chunks + chunks_v) * 16 + query)


def _compulsory_bytes(spec: AttentionSpec, shape: ProblemShape) -> float:
    rows = shape.batch * shape.nheads * shape.seqlen_q * (spec.head_dim + spec.head_dim_v)
    keys = shape.batch * shape.nheads_k * shape.seqlen_k * (spec.head_dim + spec.head_dim_v)
    return 2.0 * (rows + keys)


def _chunks(head_dim: int) -> int:
    return (head_dim + 15) // 16 * 2


#: Kernel family -> the estimate but for the launch and the memory's floor. Without an entry: searched without a prior.
_MODELS: dict[str, Callable[[_Case], Estimate | None]] = {"forward_sm80": _forward_sm80, "forward_sm90": _forward_sm90}
