"""Who wins a bucket: one rule, applied to interleaved timings of the verified leaders.

1. The noise of a comparison is the larger of `TIE_TOLERANCE` and the standard error of the two medians (relative).
2. Leaders within the noise of the fastest are tied with it.
3. The default config is kept if it is tied. Otherwise the tie goes to the least shared memory, then the fewest
   registers, then the first in the order of the space. The tie is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...generator.families.base import KernelConfig

#: Two medians closer than this are equal, whatever the samples say: run-to-run drift of one GPU (relative).
TIE_TOLERANCE = 0.005
#: Standard error of a median over that of a mean, normal samples: sqrt(pi / 2).
_MEDIAN_FACTOR = 1.2533
#: Quartile range over standard deviation, normal samples.
_QUARTILES = 1.349


@dataclass(frozen=True, slots=True)
class Finalist:
    """A verified config with its interleaved timing; `ms_spread` is the relative range between the quartiles."""

    config: KernelConfig
    ms_median: float
    ms_spread: float
    n: int
    smem_bytes: int = 0
    registers: int = 0
    order: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The winner, those tied with it, the words that say why, and the fastest of the others, None if there is none."""

    winner: Finalist
    ties: tuple[Finalist, ...]
    rule: str
    kept_default: bool
    runner_up: Finalist | None = None


def noise_between(one: Finalist, other: Finalist) -> float:
    """The relative difference of two medians that means nothing."""
    return max(TIE_TOLERANCE, math.hypot(_standard_error(one), _standard_error(other)))


def decide(finalists: Sequence[Finalist], default: KernelConfig | None) -> Decision:
    """The winner among `finalists` (at least one) against `default`, which may be absent if it failed."""
    fastest = min(finalists, key=lambda f: (f.ms_median, f.order))
    tied = [f for f in finalists if f.ms_median <= fastest.ms_median * (1 + noise_between(fastest, f))]
    kept = next((f for f in tied if f.config == default), None)
    if kept is not None:
        winner, rule = kept, "the default is kept: nothing beats it by more than the noise"
    else:
        winner = min(tied, key=lambda f: (f.smem_bytes, f.registers, f.order))
        rule = "fastest" if len(tied) == 1 else "tied within the noise: least shared memory, then registers, then order"
    others = tuple(f for f in sorted(tied, key=lambda f: (f.ms_median, f.order)) if f is not winner)
    rest = [f for f in finalists if f is not winner]
    runner_up = min(rest, key=lambda f: (f.ms_median, f.order), default=None)
    return Decision(winner, others, rule, kept is not None, runner_up)


def _standard_error(finalist: Finalist) -> float:
    if finalist.n < 2:
        return finalist.ms_spread
    return _MEDIAN_FACTOR * finalist.ms_spread / _QUARTILES / math.sqrt(finalist.n)
