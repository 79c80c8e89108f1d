"""Tuning on a GPU: seeds, search with racing, verified leaders, interleaved final, one record a bucket."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ...generator.errors import TuneError
from ...generator.families.base import KernelConfig
from ...generator.spec import ProblemShape
from ..store_schema import Record
from .bench_client import Final, Timed
from .compile_pool import Compiled
from .finals import Decision
from .job import Job
from .leaders import final_decision, verified_leaders
from .log import Trial
from .records import measured_record
from .request import BucketResult, Progress
from .search import Search
from .seeds import rank_by_model, seeds_for, space_at, stored_configs
from .tiles import TileCounter

logger = logging.getLogger("flashsmith.tune")

#: Proposals made, and compiled in parallel, at a time: at least this many, one a compile process if there are more.
BATCH = 8
#: Share of a bucket's time that the final keeps.
FINAL_SHARE = 0.2


def tune_bucket(
    job: Job, shape: ProblemShape, *, earlier: Sequence[KernelConfig], resumed: Sequence[Trial], deadline: float
) -> BucketResult:
    """The winner of one bucket. `deadline` is on `time.monotonic`'s clock. Raises TuneError if nothing is right."""
    started = time.monotonic()
    tiles = TileCounter(job.request.problem, shape)
    trials = list(resumed)
    search_ends = deadline - FINAL_SHARE * max(0.0, deadline - started)
    if job.request.exhaustive:
        _try_all(job, shape, trials, search_ends)
    else:
        _search(job, shape, tiles, earlier, trials, search_ends)
    leaders = verified_leaders(job, shape, trials)
    if not leaders:
        raise TuneError(
            f"A winner must match the reference, but none of {len(trials)} candidates for {job.spec} at {shape} did"
            f" ({summary(trials)}). Nothing was written; the trials are in {job.log.path}."
        )
    decision, final = final_decision(job, shape, leaders, trials)
    record = close_bucket(job, shape, decision, final, tiles)
    seconds = time.monotonic() - started
    return BucketResult(shape, decision.winner.config, record, tuple(trials), seconds, note=final.note)


def close_bucket(job: Job, shape: ProblemShape, decision: Decision, final: Final, tiles: TileCounter) -> Record:
    """The bucket's record, which is in the log when this returns."""
    record = measured_record(job, shape, decision, final, tiles)
    job.log.write(
        {
            "kind": "winner",
            "shape": shape.to_dict(),
            "config": decision.winner.config.to_dict(),
            "ms_median": decision.winner.ms_median,
            "rule": decision.rule,
            "record": record.to_dict(),
        }
    )
    return record


def _search(
    job: Job,
    shape: ProblemShape,
    tiles: TileCounter,
    earlier: Sequence[KernelConfig],
    trials: list[Trial],
    ends: float,
) -> None:
    request = job.request
    space = space_at(job.family, job.spec, job.space, shape)
    ranked = rank_by_model(job.family, job.spec, space, arch=request.arch, gpu=job.gpu, shape=shape, tiles=tiles)
    stored = stored_configs(job.family, job.spec, arch=request.arch, device_name=job.identity.device.name, shape=shape)
    seeds = seeds_for(
        default=job.default,
        stored=stored,
        earlier=earlier,
        ranked=[config for config, _ in ranked],
        space=space,
        seed=request.seed,
    )
    search = Search(space, seeds=seeds, seed=request.seed)
    for config, why in job.poisoned.items():
        search.tell(config, None)
        logger.debug("%s is not tried: %s", config, why)
    for trial in trials:
        search.tell(job.family.config_type.from_dict(trial.config), trial.ms_median)
    timed = sum(trial.outcome == "ok" for trial in trials)
    size = max(BATCH, request.num_jobs)
    upcoming: list[KernelConfig] = []
    # One batch is tried however little time there is.
    while timed < request.trials and (time.monotonic() < ends or not trials):
        batch = upcoming or search.ask_batch(min(size, request.trials - timed))
        upcoming = []
        if not batch:
            break
        for place, compiled in enumerate(job.pool.compile(batch)):
            best = search.best
            trial = one_trial(job, shape, compiled, best[1] if best else None)
            trials.append(trial)
            search.tell(compiled.config, trial.ms_median)
            timed += trial.outcome == "ok"
            best = search.best
            job.progress(Progress("time", timed, request.trials, shape, best[1] if best else None))
            if place == len(batch) // 2:
                # The next ones compile while the rest of these is timed.
                rest = len(batch) - place - 1
                upcoming = search.ask_batch(max(0, min(size, request.trials - timed - rest)))
                job.pool.submit(upcoming)


def _try_all(job: Job, shape: ProblemShape, trials: list[Trial], ends: float) -> None:
    known = {trial.key for trial in trials}
    space = space_at(job.family, job.spec, job.space, shape)
    rest = [config for config in space if tuple(sorted(config.to_dict().items())) not in known]
    best = min((trial.ms_median for trial in trials if trial.ms_median is not None), default=None)
    for compiled in job.pool.compile([config for config in rest if config not in job.poisoned]):
        # Nothing is raced: the log of an exhaustive run is the landscape itself.
        trial = one_trial(job, shape, compiled, None)
        trials.append(trial)
        if trial.ms_median is not None:
            best = min(best or trial.ms_median, trial.ms_median)
        job.progress(Progress("time", len(trials), len(space), shape, best))
        if time.monotonic() > ends:
            logger.warning("The budget ended after %d of %d configs; run again to go on.", len(trials), len(space))
            break


def one_trial(job: Job, shape: ProblemShape, compiled: Compiled, best_ms: float | None) -> Trial:
    """Times one compiled candidate, and logs what became of it before anything else happens."""
    if compiled.outcome == "ok":
        timed = job.bench.time(compiled.config, shape, best_ms=best_ms)
    else:
        timed = Timed(compiled.outcome, message=compiled.message)
    if timed.outcome in ("crash", "timeout", "wrong"):
        job.poisoned[compiled.config] = timed.outcome
    trial = Trial(
        config=compiled.config.to_dict(),
        shape=shape,
        outcome=timed.outcome,
        ms_median=timed.ms_median,
        ms_spread=timed.ms_spread,
        n=timed.n,
        raced=timed.raced,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        smem_bytes=compiled.smem_bytes,
        compile_s=compiled.seconds,
        message=timed.message[:500],
        spec=str(job.spec),
    )
    job.log.write(trial.to_dict())
    return trial


def summary(trials: Sequence[Trial]) -> str:
    """How many trials there are of each class, in words."""
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.outcome] = counts.get(trial.outcome, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
