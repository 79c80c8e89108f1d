"""The end of a bucket: the fastest configs are verified, timed in turns until the noise allows it, and decided on."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from ...generator.errors import TuneError
from ...generator.families.base import KernelConfig
from ...generator.spec import ProblemShape
from .bench_client import Final, Timed
from .finals import Decision, Finalist, decide, noise_between
from .job import Job
from .log import Trial
from .request import Progress

logger = logging.getLogger("flashsmith.tune")

#: A finalist's search time is within this factor of the best one's, or within `NOISE_WIDTH` standard errors of it.
FINAL_FACTOR = 1.08
NOISE_WIDTH = 2.0
#: At most this many, the default beside them.
FINALISTS = 6
#: The final is repeated while the two fastest cannot be told apart to this (relative), this often at most.
FINAL_NOISE = 0.01
FINAL_ROUNDS = 4


def verified_leaders(
    job: Job, shape: ProblemShape, trials: list[Trial], *, most: int = FINALISTS
) -> list[KernelConfig]:
    """The `most` fastest configs that are right, and the default if it is; a wrong one becomes a trial of its own."""
    timed = sorted((t for t in trials if t.ms_median is not None), key=lambda t: t.ms_median or 0.0)
    leaders: list[KernelConfig] = []
    best: Finalist | None = None
    for trial in timed:
        config = job.family.config_type.from_dict(trial.config)
        this = _finalist(job, config, trial, _timed_of(trial))
        if len(leaders) == most or (best is not None and this.ms_median > _limit(best, this)):
            break
        if is_right(job, trial, config, trials):
            leaders.append(config)
            best = best or this
            job.progress(Progress("prove", len(leaders), most, shape, best.ms_median))
    default = job.default
    if default not in leaders:
        trial_of_default = next((t for t in timed if t.config == default.to_dict()), None)
        if trial_of_default is not None and is_right(job, trial_of_default, default, trials):
            leaders.append(default)
    return leaders


def final_decision(
    job: Job,
    shape: ProblemShape,
    leaders: Sequence[KernelConfig],
    trials: Sequence[Trial],
    *,
    first: Final | None = None,
    baseline: bool = True,
    deadline: float = math.inf,
) -> tuple[Decision, Final]:
    """The winner among `leaders`, and their interleaved times; where those failed, the search's own times decide.

    `first` is a round that was timed already. With `baseline` the first round times torch's back ends too. After
    `deadline` (on `time.monotonic`'s clock) no other round begins.
    """
    by_key = {trial.key: trial for trial in trials if trial.ms_median is not None}
    of_config = {config: by_key[tuple(sorted(config.to_dict().items()))] for config in leaders}
    rounds: list[Final] = []
    finalists: list[Finalist] = []
    final = Final({})
    for turn in range(FINAL_ROUNDS):
        job.progress(Progress("final", turn, FINAL_ROUNDS, shape))
        if first is not None and not rounds:
            rounds.append(first)
        else:
            rounds.append(_round(job, leaders, rounds, shape, baseline=baseline and not rounds))
        final = _merged(rounds, leaders)
        times = {config: final.times.get(config) or _timed_of(of_config[config]) for config in leaders}
        finalists = [
            _finalist(job, config, of_config[config], timed)
            for config, timed in times.items()
            if timed.ms_median is not None and not timed.raced
        ]
        if not rounds[-1].times or _is_settled(finalists) or time.monotonic() > deadline:
            break
    if not finalists:
        raise TuneError(f"No finalist could be timed for {job.spec}: {final.note or 'all failed'}.")
    return decide(finalists, job.default), final


def _round(
    job: Job, leaders: Sequence[KernelConfig], rounds: Sequence[Final], shape: ProblemShape, *, baseline: bool
) -> Final:
    """Another round of those that no earlier one left as clearly slower."""
    raced = {config for final in rounds for config, timed in final.times.items() if timed.raced}
    left = [config for config in leaders if config not in raced]
    return job.bench.final(left, shape, keep=(job.default,), baseline=baseline)


def _is_settled(finalists: Sequence[Finalist]) -> bool:
    """Whether the two fastest are told apart, or are equal to within `FINAL_NOISE`."""
    if len(finalists) < 2:
        return True
    first, second = sorted(finalists, key=lambda finalist: finalist.ms_median)[:2]
    noise = noise_between(first, second)
    return noise <= FINAL_NOISE or second.ms_median > first.ms_median * (1 + 2 * noise)


def _merged(rounds: Sequence[Final], leaders: Sequence[KernelConfig]) -> Final:
    """The rounds as one: mean of the medians and of the spreads, all samples counted."""
    times = {}
    for config in leaders:
        found = [r.times[config] for r in rounds if config in r.times]
        medians = [timed.ms_median for timed in found if timed.ms_median is not None]
        if medians:
            spread = statistics.fmean(timed.ms_spread for timed in found)
            raced = any(timed.raced for timed in found)
            samples = sum(timed.n for timed in found)
            times[config] = Timed("ok", statistics.fmean(medians), spread, samples, raced)
    baselines = [r.baseline for r in rounds if r.baseline is not None]
    baseline = min(baselines, key=lambda pair: pair[1]) if baselines else None
    return Final(times, baseline, rounds[-1].note)


def _limit(best: Finalist, this: Finalist) -> float:
    return best.ms_median * max(FINAL_FACTOR, 1 + NOISE_WIDTH * noise_between(best, this))


def _timed_of(trial: Trial) -> Timed:
    return Timed("ok", trial.ms_median, trial.ms_spread, trial.n)


def _finalist(job: Job, config: KernelConfig, trial: Trial, timed: Timed) -> Finalist:
    assert timed.ms_median is not None
    return Finalist(
        config,
        timed.ms_median,
        timed.ms_spread,
        timed.n,
        trial.smem_bytes,
        trial.registers,
        job.order.get(config, len(job.order)),
    )


def is_right(job: Job, trial: Trial, config: KernelConfig, trials: list[Trial]) -> bool:
    """Whether `config` passes verification, once for all buckets; if not, `trial` is logged again as a failure."""
    if config in job.poisoned:
        return False
    if config not in job.verified:
        job.verified[config] = job.bench.verify(config)
    verdict = job.verified[config]
    if verdict.outcome == "ok":
        return True
    job.poisoned[config] = verdict.outcome
    logger.warning("%s may not win (%s): %s", config, verdict.outcome, verdict.message)
    failed = replace(trial, outcome=verdict.outcome, ms_median=None, message=verdict.message[:500])
    trials.append(failed)
    job.log.write(failed.to_dict())
    return False
