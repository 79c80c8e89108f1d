"""Why a bucket got its config, in words: tiles, waves, keys visited and prologue of the winner beside the runner-up's.

Counts are exact; the share of the prologue is the cost model's. The words state what differs, they prove no cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...generator.arch import Arch
from ...generator.errors import ConfigError
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec, ProblemShape
from .cost_model import estimate
from .cost_model_sm90 import prologue_cycles, tile_cost
from .gpus import GpuModel
from .tiles import TileCounter

#: Differences smaller than these are not worth a word: parts of a wave, of the visited scores, of a block's time.
WAVES, VISITED, PROLOGUE = 0.03, 0.03, 0.02


@dataclass(frozen=True, slots=True)
class Facts:
    """What one config makes of one call.

    `tiles` blocks of `B_r` rows; `waves` of them on all SMs; `idle` is the part of the SMs' time in whole waves that no
    tile fills, None where a mask makes tiles unequal; `visited` tiles of `B_c` keys a block on average, and `surplus`,
    the scores computed over those visible, less one; `prologue`, the share of a block's time before and after its main
    loop, None where no model tells; `persistent` says that a block does more than one tile of rows.
    """

    B_r: int
    B_c: int
    tiles: int
    waves: float
    idle: float | None
    visited: float
    surplus: float
    prologue: float | None
    persistent: bool

    def __str__(self) -> str:
        idle = "" if self.idle is None else f" ({100 * self.idle:.0f} % idle)"
        prologue = "" if self.prologue is None else f", {100 * self.prologue:.0f} % prologue"
        return (
            f"{self.tiles} tiles of {self.B_r} rows in {self.waves:.1f} waves{idle},"
            f" {self.visited:.1f} tiles of {self.B_c} keys each ({100 * self.surplus:.0f} % beyond what is"
            f" visible){prologue}"
        )


def facts_of(
    family: Family,
    spec: AttentionSpec,
    config: KernelConfig,
    *,
    arch: Arch,
    gpu: GpuModel,
    shape: ProblemShape,
    tiles: TileCounter,
) -> Facts | None:
    """The facts of `config` at `shape`; None for a family without tiles of rows and keys, or an empty call."""
    values: Any = config
    B_r, B_c = getattr(values, "B_r", 0), getattr(values, "B_c", 0)
    if not B_r or not B_c or not shape.seqlen_q or not shape.seqlen_k:
        return None
    visits = tiles.visited(B_r, B_c)
    heads = shape.batch * shape.nheads
    count = len(visits) * heads
    guess = estimate(family, spec, config, arch=arch, gpu=gpu, shape=shape, tiles=tiles)
    resident = 1 if guess is None else guess.blocks_per_sm
    try:
        grid = family.geometry(spec, config, shape, sm_count=gpu.sm_count).grid[0]
    except ConfigError:
        return None
    slots = gpu.sm_count * resident
    waves = count / slots
    mean = sum(visits) / len(visits)
    scores = float(sum(visits)) * B_r * B_c
    visible = max(1.0, tiles.flops(spec) / (2.0 * heads * (spec.head_dim + spec.head_dim_v)))
    prologue = None
    if family.name == "forward_sm90":
        alone = prologue_cycles(spec, config)
        prologue = alone / (alone + mean * tile_cost(spec, config).cycles)
    return Facts(
        B_r=B_r,
        B_c=B_c,
        tiles=count,
        waves=waves,
        idle=1 - waves / -(-count // slots) if max(visits) == min(visits) else None,
        visited=mean,
        surplus=max(0.0, scores / visible - 1),
        prologue=prologue,
        persistent=grid < count,
    )


def why(winner: Facts | None, runner_up: Facts | None, *, ahead: float | None, default: str) -> str:
    """The winner's facts, by how much (`ahead`, relative; None: alone) it leads the runner-up, and what differs.

    `default` says where the default config stands: "winner", "runner-up", "" if unknown, or by how much it is behind.
    """
    parts = [] if winner is None else [str(winner)]
    if default == "winner":
        parts.append("It is the default")
    if ahead is not None:
        who = "the runner-up, the default" if default == "runner-up" else "the runner-up"
        # Among equals the rule may take one that is behind by less than the noise.
        lead = f"{100 * abs(ahead):.1f} % {'ahead of' if ahead >= 0 else 'behind'} {who}"
        if winner is not None and runner_up is not None:
            differs = _differences(winner, runner_up)
            lead += f", which has {', '.join(differs)}" if differs else ", which has the same tiles"
        parts.append(lead)
    if default not in ("", "winner", "runner-up"):
        parts.append(f"{default} ahead of the default")
    return "".join(f"{part}. " for part in parts).strip()


def _differences(winner: Facts, other: Facts) -> list[str]:
    """What the other has more or less of, the largest difference first."""
    found: list[tuple[float, str]] = []

    def add(name: str, mine: float | None, theirs: float | None, least: float) -> None:
        if mine is not None and theirs is not None and abs(theirs - mine) >= least:
            word = "more" if theirs > mine else "less"
            found.append((abs(theirs - mine), f"{word} {name} ({100 * theirs:.0f} % against {100 * mine:.0f} %)"))

    add("idle time in its waves", winner.idle, other.idle, WAVES)
    add("scores beyond the visible", winner.surplus, other.surplus, VISITED)
    add("prologue", winner.prologue, other.prologue, PROLOGUE)
    words = [text for _, text in sorted(found, reverse=True)]
    if winner.tiles != other.tiles:
        words.append(f"{other.tiles} tiles of rows")
    if winner.B_c != other.B_c:
        words.append(f"tiles of {other.B_c} keys")
    if winner.persistent != other.persistent:
        words.append("a block a tile" if winner.persistent else "one block an SM")
    return words
