"""The cycles of one launch of the Hopper forward, estimated from its config: for seeds and ranking, never for a claim.

One block per SM with W consumer warpgroups of 64 rows each. Per tile (K_j, V_j) of a block, in cycles of one SM:

- tensor    W * T,  T = 2 * 64 * B_c * (d + d_v) / 4096, head dims padded to 16: wgmma does 4096 FLOP a clock and SM;
- softmax   W * S,  S = 64 * B_c * (1 / 16 + `BESIDE` * fp32 / 128): 16 ex2 a clock and SM, and beside them 3.5
            (exact), 2.6 (wary) or 2.5 (optimistic) fp32 instructions per score at 128 lanes; the exact one also scales
            O_i; a score function adds its nodes;
- shared    W * (bytes of Q_i, K_j and V_j, which each warpgroup's products read once, and of P_ij, where it is written
            to shared memory and read there) / 128.

The slowest of these bounds the tile. Beside it stands the softmax that no product covers, `UNCOVERED` * S * (S / T)^2:
the less time products take, the less they can hide. Taking turns ("pingpong") covers more of it and costs
`TURN_CYCLES`. A single warpgroup has nobody to hide behind. `TILE_CYCLES` are barriers, branches and addresses. The
last four numbers are fitted to what an H200 prefers at head dims 64, 128 and 256; they are no hardware facts. Where
P_ij goes through shared memory, its warpgroup meets twice a tile: `P_CYCLES`, a guess until such a config is timed.

A config that packs the heads of a group has their rows in its tiles: as many fewer tiles load the keys.

A tile of rows starts with loads and a product alone, and ends with an epilogue: `PROLOGUE_CYCLES`, of which two buffers
of Q_i in a persistent block hide `HIDDEN`. The longest SM decides: equal tiles take whole waves; of unequal ones (a
mask) each SM gets its share of all work and a tail: half the longest tile where the order is fixed ("static"), a
quarter of the mean where the longest go first ("grid", "dynamic"). At head dims beyond 192 drawing costs `WIDE_DRAW`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...generator.spec import AttentionSpec

WGMMA_FLOPS = 4096
EX2_LANES = 16
FP32_LANES = 128
SMEM_BYTES = 128
L2_BYTES = 48
BESIDE = 0.5
FP32_PER_SCORE = {"exact": 3.5, "optimistic": 2.5, "wary": 2.6}
#: The part of S * (S / T)^2 that stays exposed, without and with turns.
UNCOVERED = {False: 0.25, True: 0.10}
ALONE = 0.6
TURN_CYCLES = 45.0
P_CYCLES = 90.0
TILE_CYCLES = 120.0
PROLOGUE_CYCLES = 3000.0
HIDDEN = 0.6
WIDE_DRAW = 1.04


@dataclass(frozen=True, slots=True)
class TileCost:
    """Cycles of one tile of keys in one block, the pipe that bounds it, and its bytes in and out of shared memory."""

    cycles: float
    bound_by: str
    smem_bytes: float


def tile_cost(spec: AttentionSpec, config: Any) -> TileCost:
    """The cost of one tile of `config`, a `ForwardSm90Config`."""
    depth, depth_v = _padded(spec.head_dim), _padded(spec.head_dim_v)
    warpgroups, scores = config.num_warpgroups, 64 * config.B_c
    tensor = 2 * scores * (depth + depth_v) / WGMMA_FLOPS
    fp32 = scores * (FP32_PER_SCORE[config.softmax] + (0 if spec.score is None else sum(1 for _ in spec.score.nodes)))
    if config.softmax == "exact":
        fp32 += 64 * depth_v
    softmax = scores / EX2_LANES + BESIDE * fp32 / FP32_LANES
    moved = warpgroups * 2.0 * (64 * depth + config.B_c * (depth + depth_v))
    shared = config.p_operand == "shared"
    if shared:
        moved += warpgroups * 2.0 * 2 * scores
    pipes = {
        "tensor cores": warpgroups * tensor,
        "softmax": warpgroups * softmax,
        "shared memory": moved / SMEM_BYTES,
        "L2": 2.0 * config.B_c * (depth + depth_v) / L2_BYTES,
    }
    bound_by = max(pipes, key=lambda name: pipes[name])
    exposed = UNCOVERED[config.pingpong] * softmax * (softmax / tensor) ** 2 + TURN_CYCLES * config.pingpong
    if warpgroups == 1:
        exposed = ALONE * min(softmax, tensor)
    return TileCost(pipes[bound_by] + exposed + TILE_CYCLES + P_CYCLES * shared, bound_by, moved)


def launch_cycles(spec: AttentionSpec, config: Any, row_tiles: Sequence[int], heads: int, sm_count: int) -> float:
    """Cycles of the SM that ends last; `row_tiles`: how many tiles of keys each block of rows of a head visits."""
    tile = tile_cost(spec, config).cycles
    hides: bool = config.q_stages == 2 and config.schedule != "grid"
    prologue = PROLOGUE_CYCLES * (1 - HIDDEN * hides)
    num_tiles = len(row_tiles) * heads
    longest, mean = max(row_tiles), sum(row_tiles) / len(row_tiles)
    # The first tile of an SM has nothing before it to hide behind.
    first = PROLOGUE_CYCLES - prologue
    share = num_tiles / min(num_tiles, sm_count)
    if longest == min(row_tiles):
        return -(-num_tiles // sm_count) * (longest * tile + prologue) + first
    tail = 0.5 * longest if config.schedule == "static" else 0.25 * mean
    cycles = max(float(longest), share * mean + tail) * tile + share * prologue + first
    wide = max(spec.head_dim, spec.head_dim_v) > 192
    return cycles * (WIDE_DRAW if wide and config.schedule == "dynamic" else 1.0)


def _padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16
