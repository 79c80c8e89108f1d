"""One spec of a campaign: a search at a short and a long length, then the other buckets re-time what won nearby.

At two of the lengths (`explored_shapes`) seeds and proposals of a search are timed, with racing. While the GPU times
one batch, the next compiles. Every other bucket compares, interleaved, the default, the winners of the nearest finished
buckets and the configs whose times the cost model carries over best. Whoever may win was verified, once for all of a
spec's buckets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...generator.errors import TuneError
from ...generator.families.base import KernelConfig
from ...generator.spec import ProblemShape
from ..store import bucket_distance
from .bench_client import Final, Timed
from .campaign_plan import Plan
from .compile_ahead import SpecPool
from .cost_model import estimate
from .job import Job
from .leaders import final_decision, is_right, verified_leaders
from .log import Trial, config_key
from .measured import close_bucket, one_trial, summary
from .neighbours import carried_over
from .request import BucketResult, Progress
from .search import Search, escape_lane

#: Part of a spec's time that the search at the explored sizes may take.
EXPLORE_SHARE = 0.45
#: Part of the explored configs that are seeds, and rounds in which the search proposes the others.
SEEDS = 0.6
ROUNDS = 2
#: A config this many times slower than the best at one explored size is not timed at the other.
HOPELESS = 1.5
#: Verified leaders of an explored bucket, and configs that another bucket compares, at most.
LEADERS = 4
RETIMED = 5
#: Configs drawn from the whole space where none of the explored ones is right.
LAST_RESORT = 12
#: Winners of finished buckets that another bucket takes along.
NEAR_WINNERS = 3
#: Seconds that one config takes of a comparison, before any was made.
FIRST_PACE = 0.12


@dataclass
class SpecRun:
    """The state of one spec's buckets: `pending` are those not tuned yet, `failed` says why some have no winner."""

    plan: Plan
    job: Job
    pool: SpecPool
    pending: list[ProblemShape]
    #: Trials of an interrupted run, by size.
    resumed: dict[ProblemShape, list[Trial]] = field(default_factory=dict)
    won: dict[ProblemShape, KernelConfig] = field(default_factory=dict)
    failed: dict[ProblemShape, str] = field(default_factory=dict)
    #: Milliseconds of each config at the explored sizes.
    times: dict[ProblemShape, dict[KernelConfig, float]] = field(default_factory=dict)
    pace: float = FIRST_PACE
    _estimates: dict[tuple[KernelConfig, ProblemShape], float | None] = field(default_factory=dict)

    def tune(self, deadline: float, *, neighbours: Sequence[KernelConfig] = ()) -> Iterator[BucketResult]:
        """Each bucket as soon as it has a winner; those that `deadline` leaves out stay `pending`.

        `neighbours` are winners of other specs. However little time there is, one bucket is tuned.
        """
        explored = [shape for shape in self.plan.explored if shape in self.pending]
        if explored:
            trials = {shape: list(self.resumed.get(shape, ())) for shape in explored}
            now = time.monotonic()
            self._explore(explored, trials, neighbours, now + EXPLORE_SHARE * max(0.0, deadline - now))
            for shape in explored:
                yield from self._guarded(shape, partial(self._explored_bucket, shape, trials[shape], deadline))
        while self.pending:
            now = time.monotonic()
            if now >= deadline and (self.won or self.failed):
                return
            shape = self._next()
            share = max(0.0, deadline - now) / len(self.pending)
            yield from self._guarded(shape, partial(self._retimed_bucket, shape, now, share))

    def _guarded(self, shape: ProblemShape, tune: Callable[[], BucketResult]) -> Iterator[BucketResult]:
        """The bucket's result; a bucket without a winner is noted, not raised."""
        self.pending.remove(shape)
        try:
            result = tune()
        except TuneError as error:
            self.failed[shape] = str(error)
            return
        self.won[shape] = result.config
        yield result

    def _next(self) -> ProblemShape:
        """The pending size nearest to a finished one, those of the first ratio of heads first."""
        first = self.plan.request.shapes[0].gqa_ratio
        order = {shape: place for place, shape in enumerate(self.plan.request.shapes)}

        def rank(shape: ProblemShape) -> tuple[bool, float, int]:
            near = min((bucket_distance(shape, other) for other in self.won), default=0.0)
            return shape.gqa_ratio != first, near, order[shape]

        return min(self.pending, key=rank)

    def _explore(
        self,
        shapes: Sequence[ProblemShape],
        trials: dict[ProblemShape, list[Trial]],
        neighbours: Sequence[KernelConfig],
        ends: float,
    ) -> None:
        """Fills `trials` with those of the seeds and of some proposals at each of `shapes`."""
        job, most = self.job, self.plan.explore
        seeds = list(dict.fromkeys([job.default, *neighbours, *self.plan.seeds]))[: max(1, round(SEEDS * most))]
        self.pool.submit(seeds)
        searches = {shape: Search(job.space, seed=job.request.seed) for shape in shapes}
        for shape, search in searches.items():
            for trial in trials[shape]:
                search.tell(job.family.config_type.from_dict(trial.config), trial.ms_median)
        count = max(0, most - len(seeds)) // (ROUNDS * len(shapes))
        wanted = {shape: list(seeds) for shape in shapes}
        for turn in range(ROUNDS + 1):
            proposals: list[KernelConfig] = []
            for shape in shapes:
                if not turn and shape != shapes[0]:
                    wanted[shape] = self._hopeful(seeds, trials[shapes[0]])
                self._try(shape, wanted[shape], searches[shape], trials[shape], ends)
                if turn < ROUNDS and time.monotonic() < ends:
                    proposals += searches[shape].ask_batch(count)
                    self.pool.submit(proposals)  # they compile while the next size is timed
            wanted = dict.fromkeys(shapes, proposals)
        for shape in shapes:
            self.times[shape] = {
                job.family.config_type.from_dict(trial.config): trial.ms_median
                for trial in trials[shape]
                if trial.ms_median is not None and not trial.raced
            }

    def _try(
        self,
        shape: ProblemShape,
        configs: Sequence[KernelConfig],
        search: Search,
        trials: list[Trial],
        ends: float,
    ) -> None:
        """Times those of `configs` that were not tried, as they are compiled. The very first is, however late it is."""
        job = self.job
        known = {trial.key for trial in trials}
        wanted = [c for c in dict.fromkeys(configs) if c not in job.poisoned and config_key(c.to_dict()) not in known]
        first = [] if trials else wanted[:1]
        for batch, limit in ((first, None), (wanted[len(first) :], ends)):
            if limit is not None and time.monotonic() > limit:
                return
            for compiled in self.pool.compile(batch, deadline=limit):
                best = search.best
                trial = one_trial(job, shape, compiled, best[1] if best else None)
                trials.append(trial)
                search.tell(compiled.config, trial.ms_median)
                best = search.best
                job.progress(Progress("time", len(trials), self.plan.explore, shape, best[1] if best else None))
                if limit is not None and time.monotonic() > limit:
                    return

    def _hopeful(self, seeds: Sequence[KernelConfig], trials: Sequence[Trial]) -> list[KernelConfig]:
        """The seeds without those that failed or were far behind at another size, the fastest there first."""
        times = {t.key: t.ms_median for t in trials}
        best = min((ms for ms in times.values() if ms is not None), default=0.0)

        def ms_of(config: KernelConfig) -> float:
            key = config_key(config.to_dict())
            return (times[key] or float("inf")) if key in times else best

        ordered = sorted(seeds, key=ms_of)
        return [c for c in ordered if ms_of(c) <= HOPELESS * best or c == self.job.default]

    def _explored_bucket(self, shape: ProblemShape, trials: list[Trial], deadline: float) -> BucketResult:
        started = time.monotonic()
        leaders = verified_leaders(self.job, shape, trials, most=LEADERS)
        if not leaders:
            # What the seeds have in common is wrong here: other defaults, and some of everything.
            job, plan = self.job, self.plan
            others = list(plan.family.default_configs(plan.spec, job.request.arch))
            others += escape_lane(job.space, LAST_RESORT, job.request.seed + 1)
            self._try(shape, others, Search(job.space), trials, math.inf)
            leaders = verified_leaders(job, shape, trials, most=LEADERS)
        return self._decided(shape, leaders, trials, started, deadline, first=None, baseline=True)

    def _retimed_bucket(self, shape: ProblemShape, started: float, seconds: float) -> BucketResult:
        """The best of a few configs, in one interleaved comparison."""
        job = self.job
        count = int(min(RETIMED, max(2, seconds / self.pace)))
        trials = list(self.resumed.get(shape, ()))
        candidates = self._candidates(shape, count)
        untimed = {config: self._trial(shape, config, Timed("wrong")) for config in candidates}
        right = [config for config in candidates if is_right(job, untimed[config], config, trials)]
        first: Final | None = None
        if right:
            first = job.bench.final(right, shape, keep=(job.default,), baseline=False)
            made = [self._trial(shape, config, timed) for config, timed in first.times.items()]
            job.log.write(*(trial.to_dict() for trial in made))
            trials += made
        if right and not trials_with_times(trials, right):
            # One of them ended the worker: alone, each shows whether it was that one.
            first = None
            trials += [one_trial(job, shape, self.pool.results[config], None) for config in right]
            right = [config for config in right if config not in job.poisoned and trials_with_times(trials, [config])]
        self.pace = 0.7 * self.pace + 0.3 * (time.monotonic() - started) / max(1, len(candidates))
        return self._decided(shape, right, trials, started, started + seconds, first=first, baseline=False)

    def _decided(
        self,
        shape: ProblemShape,
        leaders: Sequence[KernelConfig],
        trials: list[Trial],
        started: float,
        deadline: float,
        *,
        first: Final | None,
        baseline: bool,
    ) -> BucketResult:
        job = self.job
        if not leaders:
            raise TuneError(
                f"A winner must match the reference, but none of {len(trials)} candidates for {job.spec} at {shape} did"
                f" ({summary(trials)}). The trials are in {job.log.path}."
            )
        decision, final = final_decision(job, shape, leaders, trials, first=first, baseline=baseline, deadline=deadline)
        record = close_bucket(job, shape, decision, final, self.plan.tiles_of(shape))
        seconds = time.monotonic() - started
        return BucketResult(shape, decision.winner.config, record, tuple(trials), seconds, note=final.note)

    def _candidates(self, shape: ProblemShape, count: int) -> list[KernelConfig]:
        """The default and up to `count` - 1 others that compiled, the most promising first."""
        job = self.job
        near = [self.won[s] for s in sorted(self.won, key=lambda other: bucket_distance(other, shape))]
        near = list(dict.fromkeys(near))
        carried = carried_over(self.times, shape, self._estimate_ms)
        # Turn by turn, so that neither source crowds the other out.
        mixed = [config for pair in zip(near[:NEAR_WINNERS], carried, strict=False) for config in pair]
        wanted = dict.fromkeys([job.default, *mixed, *near[:NEAR_WINNERS], *carried, *self.plan.seeds])
        usable = [config for config in wanted if config not in job.poisoned]
        found: list[KernelConfig] = []
        for config in usable:
            if len(found) == count:
                break
            known = self.pool.results.get(config)
            if known is None and not found:
                known = next(iter(self.pool.compile([config])))
            if known is not None and known.outcome == "ok":
                found.append(config)
        return found

    def _estimate_ms(self, config: KernelConfig, at: ProblemShape) -> float | None:
        """The cost model's milliseconds, computed once."""
        job, key = self.job, (config, at)
        if key not in self._estimates:
            guess = estimate(
                job.family,
                job.spec,
                config,
                arch=job.request.arch,
                gpu=job.gpu,
                shape=at,
                tiles=self.plan.tiles_of(at),
            )
            self._estimates[key] = guess.ms if guess is not None else None
        return self._estimates[key]

    def _trial(self, shape: ProblemShape, config: KernelConfig, timed: Timed) -> Trial:
        job = self.job
        built = self.pool.results[config]
        return Trial(
            config=config.to_dict(),
            shape=shape,
            outcome=timed.outcome,
            ms_median=timed.ms_median,
            ms_spread=timed.ms_spread,
            n=timed.n,
            raced=timed.raced,
            registers=built.registers,
            spill_bytes=built.spill_bytes,
            smem_bytes=built.smem_bytes,
            compile_s=built.seconds,
            spec=str(job.spec),
        )


def trials_with_times(trials: Sequence[Trial], configs: Sequence[KernelConfig]) -> bool:
    """Whether each of `configs` has a time among `trials`."""
    timed = {trial.key for trial in trials if trial.ms_median is not None}
    return all(config_key(config.to_dict()) in timed for config in configs)
