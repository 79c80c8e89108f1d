"""Where a search starts: the default, stored winners, this run's earlier winners, the cost model's best, and an escape.

FlexAttention-like short lists lose where the list is wrong, and a ranking hides what it misjudges: a few configs are
therefore drawn from the whole space.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...generator.arch import Arch
from ...generator.errors import FlashsmithError
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec, ProblemShape
from ..store import nearest_records
from .cost_model import Estimate, estimate
from .gpus import GpuModel
from .search import escape_lane
from .tiles import TileCounter

STORED = 3
MODEL_TOP = 8
ESCAPE = 4


def space_at(
    family: Family, spec: AttentionSpec, space: Iterable[KernelConfig], shape: ProblemShape
) -> tuple[KernelConfig, ...]:
    """The configs of `space` that can run `shape`, in its order."""
    return tuple(config for config in space if family.shape_reason(spec, config, shape) is None)


def rank_by_model(
    family: Family,
    spec: AttentionSpec,
    space: Iterable[KernelConfig],
    *,
    arch: Arch,
    gpu: GpuModel,
    shape: ProblemShape,
    tiles: TileCounter,
    registers: dict[KernelConfig, int] | None = None,
) -> list[tuple[KernelConfig, Estimate]]:
    """The configs of `space` that have an estimate, fastest first; equal ones in the order of the space."""
    rows = []
    for order, config in enumerate(space):
        guess = estimate(
            family,
            spec,
            config,
            arch=arch,
            gpu=gpu,
            shape=shape,
            tiles=tiles,
            registers=(registers or {}).get(config),
        )
        if guess is not None:
            rows.append((guess.ms, order, config, guess))
    return [(config, guess) for _, _, config, guess in sorted(rows, key=lambda row: row[:2])]


def stored_configs(
    family: Family,
    spec: AttentionSpec,
    *,
    arch: Arch,
    device_name: str | None,
    shape: ProblemShape,
    user: Path | None = None,
) -> list[KernelConfig]:
    """The configs of the nearest tuned records, best first, as far as the family still accepts them.

    `user` replaces the folder of the user's own configs.
    """
    found: list[KernelConfig] = []
    for candidate in nearest_records(spec, arch, device_name, shape, family, user=user):
        try:
            config = family.config_type.from_dict(candidate.record.config)
            family.check(spec, config, arch)
            family.check_shape(spec, config, shape)
        except (FlashsmithError, ArithmeticError):
            continue
        if config not in found:
            found.append(config)
        if len(found) == STORED:
            break
    return found


def seeds_for(
    *,
    default: KernelConfig,
    stored: Sequence[KernelConfig],
    earlier: Sequence[KernelConfig],
    ranked: Sequence[KernelConfig],
    space: Sequence[KernelConfig],
    seed: int,
) -> list[KernelConfig]:
    """The configs to try first, each once, in the order of trust."""
    wanted = [default, *earlier, *stored, *diverse(ranked, MODEL_TOP), *escape_lane(space, ESCAPE, seed)]
    return list(dict.fromkeys(wanted))


def diverse(ranked: Sequence[KernelConfig], count: int) -> list[KernelConfig]:
    """The best of `ranked`, no two of which differ in a single choice alone, as long as there are enough."""
    chosen: list[KernelConfig] = []
    for config in ranked:
        if len(chosen) == count:
            break
        if all(_differences(config, other) > 1 for other in chosen):
            chosen.append(config)
    chosen += [config for config in ranked if config not in chosen][: count - len(chosen)]
    return chosen


def _differences(one: KernelConfig, other: KernelConfig) -> int:
    mine, theirs = one.to_dict(), other.to_dict()
    return sum(mine[name] != theirs.get(name) for name in mine)
