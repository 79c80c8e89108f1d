"""Tuning without a GPU: the cost model ranks on the compiler's resource report, the emulator proves the leaders.

The whole valid space is ranked on the family's own resource model first; only the `max_compile` best (shared out among
the buckets, with the default and a few drawn from the whole space) are compiled. What comes out is marked "predicted".
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ...generator.errors import TuneError
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec, ProblemShape
from ..compiler import fitting_default
from ..store_schema import ANY_GPU, DeviceIdentity, Provenance
from .compile_pool import Compiled, CompilePool
from .cost_model import Estimate
from .gpus import GpuModel
from .log import Trial, TrialLog
from .prover import Prover
from .records import predicted_record
from .request import BucketResult, Progress, ProgressFunction, TuneRequest
from .search import escape_lane
from .seeds import ESCAPE, rank_by_model, space_at
from .tiles import TileCounter

logger = logging.getLogger("flashsmith.tune")

#: A predicted winner must beat the default by this much, or the default is kept: the model cannot see less.
PREDICTION_MARGIN = 0.03

Ranking = list[tuple[KernelConfig, Estimate]]


@dataclass
class PredictJob:
    """What the buckets of one predicted request share."""

    request: TuneRequest
    spec: AttentionSpec
    family: Family
    space: tuple[KernelConfig, ...]
    pool: CompilePool
    prover: Prover
    log: TrialLog
    gpu: GpuModel
    provenance: Provenance
    progress: ProgressFunction
    tiles: dict[ProblemShape, TileCounter] = field(default_factory=dict)
    proofs: dict[KernelConfig, str] = field(default_factory=dict)

    @cached_property
    def default(self) -> KernelConfig:
        """The config that a call without a record would use; always takes part."""
        return fitting_default(self.spec, self.request.arch, family=self.family, run_here=False)

    @property
    def device(self) -> DeviceIdentity:
        name = self.request.gpu_name or ANY_GPU
        return DeviceIdentity(name=name, cc=self.request.arch.cc, sm_count=self.gpu.sm_count)

    def rank(
        self, shape: ProblemShape, configs: tuple[KernelConfig, ...], registers: dict[KernelConfig, int]
    ) -> Ranking:
        """The estimates of those of `configs` that can run `shape`, fastest first."""
        return rank_by_model(
            self.family,
            self.spec,
            configs,
            arch=self.request.arch,
            gpu=self.gpu,
            shape=shape,
            tiles=self.tiles[shape],
            registers=registers,
        )


def predict(job: PredictJob) -> tuple[list[BucketResult], dict[str, int]]:
    """A winner by the cost model for every bucket, and how the compiled candidates fared."""
    shapes = job.request.shapes
    job.tiles.update({shape: TileCounter(job.request.problem, shape) for shape in shapes})
    first = {shape: job.rank(shape, job.space, {}) for shape in shapes}
    if not all(first.values()):
        raise TuneError(
            f"The kernel family {job.family.name} has no cost model, so nothing can be predicted for"
            f" {job.request.arch}. Tune on a GPU instead."
        )
    chosen = _choose(job, first)
    compiled: dict[KernelConfig, Compiled] = {}
    for result in job.pool.compile(chosen):
        compiled[result.config] = result
        job.progress(Progress("compile", len(compiled), len(chosen)))
    good = {config: c for config, c in compiled.items() if c.outcome == "ok"}
    if not good:
        example = next((c.message for c in compiled.values() if c.message), "")
        raise TuneError(f"None of {len(compiled)} candidates passed the build gate. {example}")
    ordered = tuple(config for config in job.space if config in good)
    buckets = [_bucket(job, shape, ordered, compiled) for shape in shapes]
    return buckets, dict(Counter(c.outcome for c in compiled.values()))


def _choose(job: PredictJob, rankings: dict[ProblemShape, Ranking]) -> list[KernelConfig]:
    """At most `max_compile` configs: default and escape lane, then the buckets' best in turn."""
    usable = {config for shape in rankings for config in space_at(job.family, job.spec, job.space, shape)}
    space = [config for config in job.space if config in usable]
    chosen = dict.fromkeys([job.default, *escape_lane(space, ESCAPE, job.request.seed)])
    for place in range(max(map(len, rankings.values()))):
        for ranking in rankings.values():
            if len(chosen) >= job.request.max_compile:
                return list(chosen)
            if place < len(ranking):
                chosen.setdefault(ranking[place][0])
    return list(chosen)


def _bucket(
    job: PredictJob, shape: ProblemShape, configs: tuple[KernelConfig, ...], compiled: dict[KernelConfig, Compiled]
) -> BucketResult:
    started = time.monotonic()
    ranking = job.rank(shape, configs, {config: compiled[config].registers for config in configs})
    by_config = dict(ranking)
    trials = tuple(_trial(str(job.spec), shape, compiled[c], by_config.get(c)) for c in compiled)
    for trial in trials:
        job.log.write({**trial.to_dict(), "kind": "prediction"})
    default = job.default
    candidates = [config for config, _ in ranking]
    rule = "fastest by the cost model"
    if default in by_config and by_config[default].ms <= ranking[0][1].ms * (1 + PREDICTION_MARGIN):
        candidates.insert(0, default)
        rule = "the default is kept: no prediction beats it by more than the model's margin"
    winner, proof = _first_right(job, shape, list(dict.fromkeys(candidates)))
    guess = by_config[winner]
    tied = tuple(c for c, g in ranking if c != winner and g.ms <= guess.ms * (1 + PREDICTION_MARGIN))
    record = predicted_record(
        job.request,
        job.spec,
        shape,
        config=winner,
        guess=guess,
        default_ms=by_config[default].ms if default in by_config else 0.0,
        ties=tied[:8],
        rule=rule,
        verified=proof,
        device=job.device,
        provenance=job.provenance,
        tiles=job.tiles[shape],
        compiled=len(compiled),
    )
    note = f"bound by {guess.bound_by}, {guess.blocks_per_sm} blocks per SM, {guess.waves:.1f} waves"
    if default not in by_config:
        note += f"; the default config is out ({compiled[default].outcome})"
    return BucketResult(shape, winner, record, trials, time.monotonic() - started, note=note)


def _first_right(job: PredictJob, shape: ProblemShape, candidates: list[KernelConfig]) -> tuple[KernelConfig, str]:
    """The first candidate that the emulator proves right, and how it was proved; at most `prove` are looked at."""
    if job.request.prove < 1:
        return candidates[0], ""
    failures = []
    for number, config in enumerate(candidates[: job.request.prove]):
        job.progress(Progress("prove", number, job.request.prove, shape))
        if config not in job.proofs:
            job.proofs[config] = job.prover.fault(config)
        if not job.proofs[config]:
            return config, "emulator"
        failures.append(f"{config}: {job.proofs[config]}")
        logger.warning("The emulator refuted %s: %s", config, job.proofs[config])
    raise TuneError(
        f"None of the {len(failures)} leading candidates for {job.spec} at {shape} ran right on the emulator, so"
        f" nothing was written. {failures[0]}"
    )


def _trial(spec: str, shape: ProblemShape, compiled: Compiled, guess: Estimate | None) -> Trial:
    return Trial(
        config=compiled.config.to_dict(),
        shape=shape,
        outcome=compiled.outcome,
        ms_median=round(guess.ms, 6) if guess is not None and compiled.outcome == "ok" else None,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        smem_bytes=compiled.smem_bytes,
        compile_s=compiled.seconds,
        message=compiled.message[:500],
        spec=spec,
    )


def log_progress(function: Callable[[Progress], None] | None) -> ProgressFunction:
    """`function`, or one that does nothing."""
    return function if function is not None else lambda progress: None
