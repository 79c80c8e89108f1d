"""What other tunings tell about a bucket: winners of near specs and sizes, and times carried over by the cost model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...generator.arch import Arch
from ...generator.errors import FlashsmithError
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec, ProblemShape
from ..store import PACKAGED, bucket_distance, read_file, user_root
from ..store_files import files_of
from ..store_schema import SpecClass

#: What another mask, score or dtype counts in the distance of two specs, where an octave of a head dim counts 1.
OTHER_MASK = 0.75
OTHER_SCORE = 0.5
OTHER_DTYPE = 0.1
#: An octave of a size against one of a head dim.
SIZE_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Winner:
    """A config that won one bucket of one class of specs."""

    spec_class: SpecClass
    shape: ProblemShape
    config: KernelConfig


def class_distance(one: SpecClass, other: SpecClass) -> float:
    """How far two classes are apart: octaves of both head dims, and what else differs."""
    dims = ((one.head_dim, other.head_dim), (one.head_dim_v, other.head_dim_v))
    return (
        sum(abs(math.log2(a / b)) for a, b in dims)
        + OTHER_MASK * (one.mask != other.mask)
        + OTHER_SCORE * (one.score != other.score)
        + OTHER_DTYPE * (one.dtype != other.dtype)
    )


def nearest_winners(
    winners: Iterable[Winner],
    spec: AttentionSpec,
    shapes: Sequence[ProblemShape],
    *,
    family: Family,
    arch: Arch,
    count: int,
) -> list[KernelConfig]:
    """Up to `count` configs of `winners` that `spec` accepts, nearest in class and in size to any of `shapes` first."""
    key = SpecClass.of(spec)

    def distance(winner: Winner) -> float:
        size = min(bucket_distance(winner.shape, shape) for shape in shapes)
        return class_distance(key, winner.spec_class) + SIZE_WEIGHT * size

    found: dict[KernelConfig, None] = {}
    for winner in sorted(winners, key=distance):
        if len(found) == count:
            break
        if winner.config not in found and _is_valid(family, spec, winner.config, arch):
            found[winner.config] = None
    return list(found)


def stored_winners(family: Family, arch: Arch, *, root: Path | None = None) -> list[Winner]:
    """Every winner of `family` that is stored for GPUs of `arch`, of any problem; `root` replaces the user's folder."""
    found = []
    for folder in (root if root is not None else user_root(), PACKAGED):
        for path in files_of(folder, arch.name, family.name):
            for record in read_file(path).records:
                try:
                    config = family.config_type.from_dict(record.config)
                except FlashsmithError:
                    continue
                found.append(Winner(record.spec_class, record.bucket, config))
    return found


def carried_over(
    times: Mapping[ProblemShape, Mapping[KernelConfig, float]],
    shape: ProblemShape,
    estimate_ms: Callable[[KernelConfig, ProblemShape], float | None],
) -> list[KernelConfig]:
    """The configs timed at the nearest of some sizes, fastest first at `shape`: their times there, scaled by the model.

    `estimate_ms` is the cost model; where it has no answer a time is taken as it is.
    """
    if not times:
        return []
    near = min(times, key=lambda other: bucket_distance(other, shape))

    def guess(config: KernelConfig) -> float:
        here, there = estimate_ms(config, shape), estimate_ms(config, near)
        scale = here / there if here and there else 1.0
        return times[near][config] * scale

    return sorted(times[near], key=guess)


def _is_valid(family: Family, spec: AttentionSpec, config: KernelConfig, arch: Arch) -> bool:
    try:
        family.check(spec, config, arch)
    except (FlashsmithError, ArithmeticError):
        return False
    return True
