"""Which config a call gets: the user's tuned records over the packaged ones, the nearest bucket, else the default.

`resolve` takes the best record of the kernel family on the architecture by, in this order:
1. the class: the same spec; without its score function; without its mask too; the other 16-bit dtype; the latter
   without mask and score;
2. the device: this GPU; another GPU of the architecture, or the architecture as such;
3. the distance of the bucket: the sum of |log2| ratios of seqlen_q, seqlen_k and batch * nheads, in octaves, and
   `RATIO_WEIGHT` of that of nheads / nheads_k, plus `STALE_OCTAVES` for a record of other templates, NVRTC or driver
   and `PREDICTED_OCTAVES` for a predicted one;
4. the user's file before the packaged one.
A record whose config the family no longer accepts, or whose kernel breaks the build gate for this spec, is passed over;
so is one tuned at lengths more than `REACH_OCTAVES` shorter than the call's, and one of other lengths whose blocks
would have over `EMPTY_ROWS` of their rows empty where the default's have fewer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..generator.arch import Arch
from ..generator.errors import FlashsmithError
from ..generator.families import choose_family
from ..generator.families.base import Family, KernelConfig
from ..generator.spec import AttentionSpec, ProblemShape
from .store_files import PACKAGED, files_of, gpu_slug, save_records, tuned_path, user_root
from .store_reading import forget, read_class, read_file, warn_once
from .store_schema import ANY_GPU, DeviceIdentity, Provenance, Record, SpecClass, Timing

__all__ = [
    "ANY_GPU",
    "PACKAGED",
    "Candidate",
    "DeviceIdentity",
    "Provenance",
    "Record",
    "Resolution",
    "SpecClass",
    "Timing",
    "bucket_distance",
    "forget",
    "gpu_slug",
    "nearest_records",
    "read_file",
    "resolve",
    "same_bucket",
    "save_records",
    "stale_reason",
    "tuned_path",
    "user_root",
]

Source = Literal["user", "packaged", "nearest", "default"]

#: A call belongs to a bucket if each of its three sizes is within this factor of two of the bucket's.
BUCKET_OCTAVES = 0.5
#: An octave of nheads / nheads_k counts as this much of one of a length: a kernel's work does not depend on it, only
#: how much of K and V comes from the L2 cache. A record of ratio 4 is in the bucket of a call of 1, one of 8 near it.
RATIO_WEIGHT = 0.25
STALE_OCTAVES = 0.5
PREDICTED_OCTAVES = 1.0
#: Winners at short lengths are chosen by what surrounds the main loop, which long lengths hardly see: beyond this many
#: octaves the default is taken. A choice, not yet measured side by side.
REACH_OCTAVES = 1.5
#: Of the rows of a call's blocks: 192 a block for 128 queries, say, leave a third empty. A choice, not measured.
EMPTY_ROWS = 0.25
#: After this many configs that break the build gate the default is taken: each has cost a compile.
MAX_REFUSED = 3
_OTHER_DTYPE = {"bf16": "fp16", "fp16": "bf16"}


@dataclass(frozen=True, slots=True)
class Resolution:
    """The config of a call, where it comes from, the record behind it (None for the default), and a note for people.

    `stale` says that the record was made by other templates, NVRTC or driver, or on another GPU: a good start for a
    search, not a proven winner.
    """

    config: KernelConfig
    source: Source
    record: Record | None = None
    note: str = ""
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A record that could serve a call: `rank` orders them (class, device, distance with penalties, user first)."""

    rank: tuple[int, int, float, int]
    record: Record
    path: Path
    stale: str
    source: Literal["user", "packaged"]

    @property
    def exact(self) -> bool:
        return self.rank[0] == 0


def resolve(
    spec: AttentionSpec,
    arch: Arch,
    device_name: str | None,
    shape: ProblemShape,
    family: Family | None = None,
    *,
    current: Provenance | None = None,
    user: Path | None = None,
    packaged: Path | None = None,
    refusal: Callable[[KernelConfig], str] | None = None,
    default: Callable[[], KernelConfig] | None = None,
) -> Resolution:
    """The config for one call of `spec` at `shape` on `arch`.

    `device_name` is the GPU's name, None for none in particular. `current` is compared with each record's provenance;
    by default its generator digest alone. `user` and `packaged` replace the two root directories. `refusal` says why
    a config's kernel breaks the build gate, and `default` makes the config of last resort; without them nothing is
    compiled (see `store_choice`). Raises UnsupportedError where no family does the spec.
    """
    family = family if family is not None else choose_family(spec, arch).family
    candidates = nearest_records(spec, arch, device_name, shape, family, current=current, user=user, packaged=packaged)
    refused: dict[KernelConfig, str] = {}
    usual = family.default_config(spec, arch)
    for candidate in candidates:
        config = _valid_config(candidate, spec, arch, family)
        if config is None or config in refused or not _reaches(candidate.record.bucket, shape):
            continue
        if family.shape_reason(spec, config, shape) is not None:  # tuned for another ratio of heads
            continue
        tuned_here = same_bucket(candidate.record.bucket, shape)
        if not tuned_here and _wastes_rows(config, usual, shape):
            continue
        reason = refusal(config) if refusal is not None else ""
        if not reason:
            found = _resolution(candidate, config, spec, shape, device_name)
            return replace(found, note="; ".join(filter(None, (found.note, _passed_over(refused)))))
        refused[config] = reason
        level = logging.WARNING if candidate.exact else logging.INFO
        warn_once(
            f"{spec}: a tuned config of {candidate.path} breaks the build gate here and is passed over: {config}:"
            f" {reason}. `flashsmith tune` finds one that fits.",
            level=level,
        )
        if len(refused) == MAX_REFUSED:
            break
    config = default() if default is not None else usual
    note = f"No tuned config for {spec} on {device_name or arch}; the default of {family.name} is used."
    if refused:
        note = f"No tuned config fits {spec} on {device_name or arch}; the default of {family.name} is used."
    warn_once(f"{note} `flashsmith tune` finds a faster one.", level=logging.INFO)
    return Resolution(config, "default", None, " ".join(filter(None, (note, _passed_over(refused)))))


def _passed_over(refused: Mapping[KernelConfig, str]) -> str:
    return "; ".join(f"passed over for the build gate: {config} ({reason})" for config, reason in refused.items())


def nearest_records(
    spec: AttentionSpec,
    arch: Arch,
    device_name: str | None,
    shape: ProblemShape,
    family: Family,
    *,
    current: Provenance | None = None,
    user: Path | None = None,
    packaged: Path | None = None,
) -> Iterator[Candidate]:
    """Every record that could serve, best first; also the search's seeds.

    Classes of specs are read in the order of their rank, none before its turn: most calls take the first candidate of
    the first class.
    """
    current = current if current is not None else _current_provenance()
    files = list(_files(arch, family, user, packaged))
    seen: set[SpecClass] = set()
    for level, spec_class in enumerate(_class_levels(SpecClass.of(spec))):
        if spec_class in seen:
            continue
        seen.add(spec_class)
        found: list[Candidate] = []
        for order, source, path in files:
            device_level = _device_level(path.parent.name, device_name)
            for record in read_class(path, spec_class):
                stale = stale_reason(record, current)
                penalty = STALE_OCTAVES * bool(stale) + PREDICTED_OCTAVES * (record.status == "predicted")
                rank = (level, device_level, bucket_distance(record.bucket, shape) + penalty, order)
                found.append(Candidate(rank, record, path, stale, source))
        yield from sorted(found, key=lambda candidate: candidate.rank)


def bucket_distance(one: ProblemShape, other: ProblemShape) -> float:
    """How far two shapes are apart: the sum of |log2| ratios of seqlen_q, seqlen_k and batch * nheads.

    That of nheads / nheads_k counts `RATIO_WEIGHT`.
    """
    return sum(_octaves(one, other))


def same_bucket(one: ProblemShape, other: ProblemShape) -> bool:
    """Whether two shapes are within `BUCKET_OCTAVES` of each other in each size."""
    return max(_octaves(one, other)) <= BUCKET_OCTAVES


def _reaches(bucket: ProblemShape, shape: ProblemShape) -> bool:
    """Whether a record of `bucket` may serve lengths as long as those of `shape`."""
    limit = 2**REACH_OCTAVES
    return shape.seqlen_q <= limit * max(bucket.seqlen_q, 1) and shape.seqlen_k <= limit * max(bucket.seqlen_k, 1)


def _wastes_rows(config: KernelConfig, default: KernelConfig, shape: ProblemShape) -> bool:
    """Whether blocks of `config` leave more than `EMPTY_ROWS` of their rows empty, and more than `default`'s."""

    def empty(one: Any) -> float:
        rows, B_r = shape.seqlen_q * int(one.heads_per_tile(shape)), int(one.B_r)
        return 1 - rows / max(-(-rows // B_r) * B_r, 1)

    return empty(config) > max(EMPTY_ROWS, empty(default))


def stale_reason(record: Record, current: Provenance) -> str:
    """What differs between the record's making and `current`, "" if nothing that both know."""
    pairs = (
        ("templates or generator", record.provenance.generator, current.generator),
        ("NVRTC", record.provenance.nvrtc, current.nvrtc),
        ("driver", record.provenance.driver, current.driver),
    )
    return ", ".join(f"other {name}" for name, old, new in pairs if old and new and old != new)


def _octaves(one: ProblemShape, other: ProblemShape) -> tuple[float, ...]:
    pairs = (
        (one.seqlen_q, other.seqlen_q),
        (one.seqlen_k, other.seqlen_k),
        (one.batch * one.nheads, other.batch * other.nheads),
    )
    ratio = RATIO_WEIGHT * abs(math.log2(max(one.gqa_ratio, 1) / max(other.gqa_ratio, 1)))
    return (*(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs), ratio)


def _class_levels(key: SpecClass) -> Iterator[SpecClass]:
    """The class itself, then the ones that may stand in for it, best first."""
    for dtype in (key.dtype, _OTHER_DTYPE.get(key.dtype, key.dtype)):
        for mask, score in ((key.mask, key.score), (key.mask, ""), ("", "")):
            yield SpecClass(key.op, dtype, key.head_dim, key.head_dim_v, mask, score, key.gqa_ratio)


def _device_level(slug: str, device_name: str | None) -> int:
    return 0 if slug == gpu_slug(device_name or "") else 1


def _files(
    arch: Arch, family: Family, user: Path | None, packaged: Path | None
) -> Iterator[tuple[int, Literal["user", "packaged"], Path]]:
    for path in files_of(user if user is not None else user_root(), arch.name, family.name):
        yield 0, "user", path
    for path in files_of(packaged if packaged is not None else PACKAGED, arch.name, family.name):
        yield 1, "packaged", path


def _current_provenance() -> Provenance:
    from ..generator.rendering import generator_digest

    return Provenance(generator=generator_digest()[:16], flashsmith="")


def _valid_config(candidate: Candidate, spec: AttentionSpec, arch: Arch, family: Family) -> KernelConfig | None:
    """The record's config if the family accepts it for this very spec; a refused one is logged once."""
    try:
        config = family.config_type.from_dict(candidate.record.config)
        family.check(spec, config, arch)
    except (FlashsmithError, ArithmeticError) as error:
        if candidate.exact:
            warn_once(f"Ignored a record of {candidate.path}: {error or type(error).__name__}")
        return None
    return config


def _resolution(
    candidate: Candidate, config: KernelConfig, spec: AttentionSpec, shape: ProblemShape, device_name: str | None
) -> Resolution:
    record = candidate.record
    notes = []
    if record.status == "predicted":
        notes.append("predicted by the cost model, not measured")
    if candidate.stale:
        notes.append(f"made with {candidate.stale}: tune again to confirm it")
    if candidate.rank[1]:
        notes.append(f"tuned for {record.device.name}")
    hit = candidate.exact and candidate.rank[1] == 0 and same_bucket(record.bucket, shape)
    if not candidate.exact:
        notes.append(f"tuned for {record.problem or 'another class'}")
    if not same_bucket(record.bucket, shape):
        notes.append(f"tuned at {record.bucket}")
    note = "; ".join(notes)
    source: Source = candidate.source if hit else "nearest"
    if not hit:
        message = f"{spec} at {shape}: nearest tuned config of {candidate.path} is used ({note})."
        warn_once(message, level=logging.INFO)
    stale = bool(candidate.stale) or bool(candidate.rank[1])
    return Resolution(config, source, record, note, stale)
