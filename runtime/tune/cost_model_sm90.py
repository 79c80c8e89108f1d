"""The cycles of one launch of the Hopper forward, estimated from its config: for seeds and ranking, never for a claim.

One block per SM with W consumer warpgroups of 64 rows each; A of them have work in a tile on average, all of them
without a mask. Per tile (K_j, V_j) of a block, in cycles of one SM:

- products  A * T: wgmma does 4096 FLOP a clock and SM, head dims padded to 16. Each product also reads its operands at
            128 bytes a clock (P in shared memory too), which bounds Q_i K_j^T below 64 keys;
- softmax   A * S,  S = 64 * B_c * (1 / 16 + `BESIDE` * fp32 / 128): 16 ex2 a clock and SM, and beside them
            `FP32_PER_SCORE` at 128 lanes ("exact" takes the maximum, "optimistic" does a few tiles twice); a score
            function adds its nodes. "exact" also scales O_i, `RESCALE` * 64 * d_v / 128;
- chain     T + `ALONE` * S: a warpgroup waits for its own products before its softmax and the other way round, and
            alone it does not fill the softmax's pipes. "wary" adds the wait for its choice, `WARY_CYCLES`, and a turn
            ("pingpong") `TURN_CYCLES`. With two warpgroups this is close to the bound at head dims up to 128.

The three bound the tile together, as a p-norm: what is close to the slowest gets in its way, less so where warpgroups
take turns (`SHARPNESS`). Nor is it faster than the block's loads of K_j and V_j, `L2_BYTES` a clock. `TILE_CYCLES` are
barriers, branches and addresses; `COPY_CYCLES` is what a copy keeps waiting, half of it with a third buffer; a fourth
was slower (`FOURTH_CYCLES`). Under a mask, B_c other than a multiple of 64 was slower by the factor `UNEVEN`, whatever
the length; why is not known.

A tile of rows starts with loads and a product alone, and ends with an epilogue: `prologue_cycles`. The longest SM
decides: equal tiles take whole waves; of unequal ones (a mask) each SM gets its share of all work and a tail: half the
longest tile where the order is fixed ("static"), a quarter of the mean where the longest go first ("grid", "dynamic").

Fitted to tests/tune/measured/h200-forward-sm90.json, and to runs of earlier forms of the kernel, by relative times
within a case, but for the tails, which these hardly tell apart ("static" was never timed under a mask).
tests/tune/test_measured_sm90.py says how close they come. But for the pipes' rates the numbers below are no hardware
facts. Nothing here knows the clock that the power limit leaves to long calls.
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
#: What an SM gets from the L2 cache a clock, all of them at once.
L2_BYTES = 48.0
BESIDE = 0.5
FP32_PER_SCORE = {"exact": 3.5, "optimistic": 2.75, "wary": 2.5}
#: How much longer scaling O_i takes than its multiplications at full rate.
RESCALE = 3.0
#: How much longer softmax takes one warpgroup than its share of the pipes.
ALONE = 1.45
WARY_CYCLES = 190.0
TURN_CYCLES = 60.0
#: The p of the p-norm, without and with turns.
SHARPNESS = {False: 6.0, True: 11.0}
TILE_CYCLES = 90.0
COPY_CYCLES = 100.0
FOURTH_CYCLES = 25.0
UNEVEN = 1.05
#: A block's own start and end; what is left of it where one block does all tiles; and with a second buffer of Q_i.
START_CYCLES = {"grid": 3200.0, "one Q": 800.0, "two Q": 0.0}
#: Until the first K_j and V_j are there; buffers beyond the first shorten it like `COPY_CYCLES`.
FILL_CYCLES = 780.0
#: At which Q_i comes and O_i leaves, per clock and SM: about the memory's rate.
QO_BYTES = 16.0


@dataclass(frozen=True, slots=True)
class TileCost:
    """Cycles of one tile of keys in one block, the pipe that bounds it, and the bytes its products read."""

    cycles: float
    bound_by: str
    smem_bytes: float


def tile_cost(spec: AttentionSpec, config: Any, *, active: float = 1.0) -> TileCost:
    """The cost of one tile of `config`, a `ForwardSm90Config`, of which the share `active` of the warpgroups sees any.

    `bound_by`: "tensor cores", "shared memory", "softmax", "one warpgroup" (the chain of its products and softmax) or
    "L2 cache".
    """
    depth, depth_v = _padded(spec.head_dim), _padded(spec.head_dim_v)
    warpgroups, scores = config.num_warpgroups, 64 * config.B_c
    read_q_k, read_v = 2 * depth * (64 + config.B_c), 2 * depth_v * config.B_c
    q_k = (2 * scores * depth / WGMMA_FLOPS, read_q_k / SMEM_BYTES)
    p_v = (2 * scores * depth_v / WGMMA_FLOPS, read_v / SMEM_BYTES)
    if config.p_operand == "shared":
        p_v = (p_v[0], (read_v + 2 * scores) / SMEM_BYTES)
    products = max(q_k) + max(p_v)
    fp32 = FP32_PER_SCORE[config.softmax] + (0 if spec.score is None else sum(1 for _ in spec.score.nodes))
    softmax = scores * (1 / EX2_LANES + BESIDE * fp32 / FP32_LANES)
    if config.softmax == "exact":
        softmax += RESCALE * 64 * depth_v / FP32_LANES
    chain = products + ALONE * softmax + WARY_CYCLES * (config.softmax == "wary") + TURN_CYCLES * config.pingpong
    bounds = {
        "tensor cores" if products == q_k[0] + p_v[0] else "shared memory": active * warpgroups * products,
        "softmax": active * warpgroups * softmax,
        "one warpgroup": chain,
    }
    loads = 2 * config.B_c * (depth + depth_v) / L2_BYTES
    sharpness = SHARPNESS[config.pingpong]
    together = sum(cycles**sharpness for cycles in bounds.values()) ** (1 / sharpness)
    cycles = max(together, loads) + TILE_CYCLES + COPY_CYCLES / _ahead(config) + FOURTH_CYCLES * (config.num_stages > 3)
    if spec.mask is not None and config.B_c % 64:
        cycles *= UNEVEN
    bound_by = "L2 cache" if loads > together else max(bounds, key=lambda name: bounds[name])
    moved = read_q_k + read_v + (4 * scores if config.p_operand == "shared" else 0)
    return TileCost(cycles, bound_by, float(warpgroups * moved))


def prologue_cycles(spec: AttentionSpec, config: Any) -> float:
    """The cycles of a tile of rows beside its tiles of keys, as far as the tile before does not hide them."""
    start = "grid" if config.schedule == "grid" else "one Q" if config.q_stages == 1 else "two Q"
    moved: int = 2 * config.B_r * (_padded(spec.head_dim) + _padded(spec.head_dim_v))
    return START_CYCLES[start] + FILL_CYCLES / _ahead(config) + moved / QO_BYTES


def launch_cycles(
    spec: AttentionSpec, config: Any, row_tiles: Sequence[int], heads: int, sm_count: int, *, active: float = 1.0
) -> float:
    """Cycles of the SM that ends last.

    `row_tiles`: how many tiles of keys each block of rows of a head visits, in which the share `active` of the
    warpgroups has work.
    """
    tile = tile_cost(spec, config, active=active).cycles
    prologue = prologue_cycles(spec, config)
    num_tiles = len(row_tiles) * heads
    longest, mean = max(row_tiles), sum(row_tiles) / len(row_tiles)
    if longest == min(row_tiles):
        return -(-num_tiles // sm_count) * (longest * tile + prologue)
    share = num_tiles / min(num_tiles, sm_count)
    tail = 0.5 * longest if config.schedule == "static" else 0.25 * mean
    return max(float(longest), share * mean + tail) * tile + share * prologue


def _ahead(config: Any) -> int:
    """Tiles of keys that copies are ahead, as far as that pays."""
    return int(min(config.num_stages - 1, 2))


def _padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16
