"""`tune_many(requests)`: many specs measured in one run on one GPU, with one bench worker and one compile pool.

While the GPU times one spec, the pool compiles the next ones, in their order. The budget is shared out evenly over what
is left: a spec that needs less leaves more to the others, and what one did not reach is tried again when all had their
turn. A spec's records are in YAML as soon as it is done, and those of a spec that was interrupted too.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...generator.errors import TuneError
from ...generator.spec import ProblemShape
from ..store import save_records
from ..store_schema import Record, SpecClass
from ..variables import cache_dir
from .bench_client import Bench, Identity, WorkerBench
from .campaign_log import Left, campaign_id, left_by
from .campaign_plan import Plan, plan_of
from .campaign_spec import SpecRun
from .compile_ahead import HANDLER, CompileAhead, SpecPool, first_that_fits
from .gpus import GpuModel
from .job import Job
from .log import Trial, TrialLog, config_key
from .neighbours import Winner, nearest_winners
from .predicted import log_progress
from .records import current_provenance
from .request import BucketResult, Progress, ProgressFunction, TuneRequest, usable_cores
from .session import model_of, open_log, session_of, warm_up

logger = logging.getLogger("flashsmith.tune")

#: Configs that the search of one spec times at each explored size.
EXPLORE = 24
#: Winners of this run's other specs that a spec starts from.
NEIGHBOURS = 4
#: A spec that has not this many seconds left is not begun again.
LEAST_SECONDS = 0.5
#: Cores that compiling leaves to the bench worker and to this process.
RESERVED_CORES = 2


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """What a campaign found: its buckets in the order they were tuned, and the files written.

    `resumed` counts winners taken over from an interrupted run; `unreached` are buckets the budget left out; `failed`
    says of a bucket why it has no winner. `compiled` counts kernels, `outcomes` trials by class.
    """

    buckets: tuple[BucketResult, ...]
    paths: tuple[Path, ...]
    log: Path
    seconds: float
    compiled: int
    resumed: int = 0
    unreached: tuple[tuple[str, ProblemShape], ...] = ()
    failed: tuple[tuple[str, ProblemShape, str], ...] = ()
    outcomes: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def tune_many(
    requests: Sequence[TuneRequest],
    *,
    budget_s: float,
    explore: int = EXPLORE,
    progress: ProgressFunction | None = None,
    bench: Bench | None = None,
    compile_handler: str = HANDLER,
) -> CampaignResult:
    """The winners of `requests` (at least one; of one GPU, root and log), each already stored. Budgets of their own are
    not looked at: `budget_s` wall seconds are for all.

    Raises TuneError where nothing at all was tuned, StoreError where the YAML cannot be written, and
    MissingComponentError where there is no compiler. Ctrl-C keeps what was finished.
    """
    started = time.monotonic()
    plans = [plan_of(request, place=place, explore=explore) for place, request in enumerate(requests)]
    first = requests[0]
    path = first.log or cache_dir() / "tune" / f"many-{first.arch}-{campaign_id(requests)}.jsonl"
    jobs = first.jobs or max(1, usable_cores() - RESERVED_CORES)
    the_bench = bench if bench is not None else WorkerBench(first, plans[0].family, effort="quick")
    with (
        open_log(path, asked=first.log is not None) as log,
        _closing(the_bench),
        CompileAhead(first.arch, jobs=jobs, handler=compile_handler) as pool,
        ThreadPoolExecutor(1) as planner,
        ThreadPoolExecutor(1) as writer,
    ):
        campaign = _Campaign(plans, the_bench, pool, log, writer, log_progress(progress), started + budget_s)
        try:
            campaign.run(planner)
        finally:
            planner.shutdown(wait=False, cancel_futures=True)
            paths = campaign.stored()
        if not campaign.unreached and not campaign.failed:
            log.write({"kind": "end"})
        compiled = pool.compiled
    if not campaign.buckets and not campaign.resumed:
        raise TuneError(campaign.nothing())
    outcomes = Counter(trial.outcome for bucket in campaign.buckets for trial in bucket.trials)
    return CampaignResult(
        buckets=tuple(campaign.buckets),
        paths=paths,
        log=log.path,
        seconds=time.monotonic() - started,
        compiled=compiled,
        resumed=campaign.resumed,
        unreached=tuple(campaign.unreached),
        failed=tuple(campaign.failed),
        outcomes=dict(outcomes),
        notes=tuple(filter(None, (campaign.load,))),
    )


class _Campaign:
    """The state of one `tune_many`."""

    def __init__(
        self,
        plans: Sequence[Plan],
        bench: Bench,
        pool: CompileAhead,
        log: TrialLog,
        writer: ThreadPoolExecutor,
        progress: ProgressFunction,
        deadline: float,
    ) -> None:
        self._plans = plans
        self._bench = bench
        self._pool = pool
        self._log = log
        self._writer = writer
        self._progress = progress
        self._deadline = deadline
        self._winners: list[Winner] = []
        self._runs: dict[int, SpecRun] = {}
        #: Winners taken over from an interrupted run, by a plan's place.
        self._done: dict[int, dict[ProblemShape, Record]] = {}
        self._trials: dict[int, dict[ProblemShape, list[Trial]]] = {}
        self._saves: list[Future[Path]] = []
        self._unsaved: list[tuple[Plan, Record]] = []
        self._gpu_name = ""
        self._total = sum(len(plan.request.shapes) for plan in plans)
        self.buckets: list[BucketResult] = []
        self.resumed = 0
        self.load = ""

    def run(self, planner: ThreadPoolExecutor) -> None:
        for plan in self._plans:  # the GPU worker starts meanwhile
            self._pool.submit(plan.what, plan.family.default_configs(plan.spec, plan.request.arch)[:1])
        warm = planner.submit(warm_up)
        identity = self._bench.identity()
        self._gpu_name, self.load = identity.device.name, identity.load
        warm.result()
        provenance = current_provenance(driver=identity.driver)
        sessions = [session_of(p.request, p.spec, p.family, provenance, identity) for p in self._plans]
        self._resume(left_by(self._log.path, sessions))
        seeding = [planner.submit(self._seed, plan, identity) for plan in self._plans]
        for number, plan in enumerate(self._plans):
            if time.monotonic() >= self._deadline and (self.buckets or self.resumed):
                return
            if all(shape in self._done[plan.place] for shape in plan.request.shapes):
                continue
            seeding[number].result()
            self._runs[plan.place] = run = self._begin(plan, identity, sessions[number])
            self._tune(run, len(self._plans) - number)
        self._second_turn(sessions)

    def _second_turn(self, sessions: Sequence[Mapping[str, Any]]) -> None:
        """What the specs' shares did not suffice for, as long as there is time."""
        waiting = [run for run in self._runs.values() if run.pending]
        for number, run in enumerate(waiting):
            if self._deadline - time.monotonic() < LEAST_SECONDS:
                return
            self._log.write({"kind": "session", **sessions[run.plan.place]})
            self._tune(run, len(waiting) - number)

    @property
    def unreached(self) -> list[tuple[str, ProblemShape]]:
        """Buckets that the budget left out."""
        found = []
        for plan in self._plans:
            run = self._runs.get(plan.place)
            done = self._done.get(plan.place, {})
            pending = [shape for shape in plan.request.shapes if shape not in done] if run is None else run.pending
            found += [(str(plan.spec), shape) for shape in pending]
        return found

    @property
    def failed(self) -> list[tuple[str, ProblemShape, str]]:
        """Buckets without a winner, with the reason."""
        return [
            (str(run.plan.spec), shape, reason) for run in self._runs.values() for shape, reason in run.failed.items()
        ]

    def nothing(self) -> str:
        """Why there is no winner at all."""
        reason = self.failed[0][2] if self.failed else "The budget ended before the first bucket. Raise --budget."
        return f"Nothing was tuned. {reason}"

    def stored(self) -> tuple[Path, ...]:
        """The files written; waits until all records are in them. Raises StoreError."""
        self._save()
        return tuple(dict.fromkeys(save.result() for save in self._saves))

    def _seed(self, plan: Plan, identity: Identity) -> None:
        seeds = plan.find_seeds(model_of(plan.request, identity), identity.device.name)
        self._pool.submit(plan.what, seeds[: plan.explore])

    def _begin(self, plan: Plan, identity: Identity, session: Mapping[str, Any]) -> SpecRun:
        """The spec's run, with the winners that an interrupted one left."""
        request = plan.request
        pool = SpecPool(self._pool, plan.what)
        bench = self._bench.of(request, plan.family)
        default = first_that_fits(pool, plan.family.default_configs(plan.spec, request.arch))
        gpu: GpuModel = model_of(request, identity)
        job = Job(
            request,
            plan.spec,
            plan.family,
            plan.space,
            pool,
            bench,
            self._log,
            identity,
            current_provenance(driver=identity.driver),
            gpu,
            self._progress,
            default,
        )
        done = self._done[plan.place]
        run = SpecRun(plan, job, pool, [shape for shape in dict.fromkeys(request.shapes) if shape not in done])
        run.won.update({shape: plan.family.config_type.from_dict(record.config) for shape, record in done.items()})
        space = {config_key(config.to_dict()) for config in (*plan.space, default)}
        for shape in run.pending:
            run.resumed[shape] = [t for t in self._trials[plan.place].get(shape, ()) if t.key in space]
            for trial in run.resumed[shape]:
                if trial.outcome in ("crash", "timeout", "wrong"):
                    job.poisoned[plan.family.config_type.from_dict(trial.config)] = trial.outcome
        self._log.write({"kind": "session", **session})
        if not request.resume:
            self._log.write({"kind": "fresh"})
        return run

    def _resume(self, found: Mapping[str, Left]) -> None:
        """Takes over what an interrupted run of the same command left in the log."""
        for plan in self._plans:
            left = found[plan.spec.digest] if plan.request.resume else Left()
            done = {shape: record for shape, record in left.records.items() if shape in plan.request.shapes}
            self._done[plan.place], self._trials[plan.place] = done, left.trials
            self._unsaved += [(plan, record) for record in done.values()]
            self.resumed += len(done)

    def _tune(self, run: SpecRun, specs_left: int) -> None:
        """Tunes a spec's pending buckets within its share of the time that is left."""
        plan, now = run.plan, time.monotonic()
        deadline = now + max(0.0, self._deadline - now) / specs_left
        key = SpecClass.of(plan.spec)
        for shape, config in run.won.items():
            self._winners.append(Winner(key, shape, config))
        neighbours = nearest_winners(
            self._winners, plan.spec, plan.explored, family=plan.family, arch=plan.request.arch, count=NEIGHBOURS
        )
        try:
            for result in run.tune(deadline, neighbours=neighbours):
                self.buckets.append(result)
                self._winners.append(Winner(key, result.shape, result.config))
                self._unsaved.append((plan, result.record))
                self._progress(Progress("bucket", len(self.buckets) + self.resumed, self._total, words=str(plan.spec)))
        except TuneError as error:
            logger.warning("%s is left: %s", plan.spec, error)
            run.failed.update(dict.fromkeys(run.pending, str(error)))
            run.pending.clear()
        self._save()
        logger.info("%s: %d winners, %d buckets left.", plan.spec, len(run.won), len(run.pending))

    def _save(self) -> None:
        """Hands the new records to the writer's thread: the GPU need not wait for YAML."""
        waiting, self._unsaved = self._unsaved, []
        for plan in dict.fromkeys(plan.family.name for plan, _ in waiting):
            records = [record for owner, record in waiting if owner.family.name == plan]
            request = waiting[0][0].request
            self._saves.append(
                self._writer.submit(
                    save_records,
                    records,
                    arch=request.arch.name,
                    family=plan,
                    gpu=self._gpu_name,
                    root=request.root,
                )
            )


@contextmanager
def _closing(bench: Bench) -> Iterator[None]:
    try:
        yield
    finally:
        bench.close()
