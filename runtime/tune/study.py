"""`tune(request)`: one problem, every bucket, measured on a GPU or predicted without one; winners go into YAML."""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...generator.families import choose_family
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec
from ..store import save_records
from ..store_files import store_records
from ..store_schema import ANY_GPU, Provenance
from .bench_client import Bench, WorkerBench
from .campaign_plan import plan_of
from .compile_ahead import CompileAhead, SpecPool, SpecToCompile, first_that_fits
from .compile_pool import CompilePool
from .gpus import gpu_model
from .job import Job
from .log import TrialLog, config_key, unfinished_trials
from .measured import tune_bucket
from .predicted import PredictJob, log_progress, predict
from .prover import Prover
from .records import current_provenance
from .request import BucketResult, ProgressFunction, TuneRequest, TuneResult
from .seeds import ESCAPE
from .session import log_path, model_of, open_log, session_of, warm_up

logger = logging.getLogger("flashsmith.tune")

__all__ = ["tune"]


def tune(request: TuneRequest, *, progress: ProgressFunction | None = None, bench: Bench | None = None) -> TuneResult:
    """The winners of `request`, each already stored.

    With `request.gpu` the candidates are timed there (or on `bench`); without, they are ranked by the cost model and
    the leaders proved on the emulator. Raises TuneError where no candidate is right or nothing could be tried,
    StoreError where the YAML cannot be written, and MissingComponentError where there is no compiler.
    """
    started = time.monotonic()
    problem = request.problem.traced()
    family = choose_family(problem.spec, request.arch, name=request.family or "").family
    space = family.space(problem.spec, request.arch)
    path = request.log or log_path(request, problem.spec, family)
    with open_log(path, asked=request.log is not None) as log:
        run = _measure if request.gpu or bench is not None else _predict
        return run(request, problem.spec, family, space, log, progress, bench, started)


def _measure(
    request: TuneRequest,
    spec: AttentionSpec,
    family: Family,
    space: tuple[KernelConfig, ...],
    log: TrialLog,
    progress: ProgressFunction | None,
    bench: Bench | None,
    started: float,
) -> TuneResult:
    the_bench = bench if bench is not None else WorkerBench(request, family)
    pool = _open_pool(request, spec, family)
    try:
        with ThreadPoolExecutor(1) as early:
            starting = early.submit(the_bench.identity)
            # Its process starts (torch, a CUDA context) while this one imports and the pool compiles the first kernels.
            defaults = family.default_configs(spec, request.arch)
            pool.submit(defaults[:1])
            warm_up()
            if not request.exhaustive:
                plan = plan_of(request, place=0, explore=request.num_jobs)
                pool.submit(plan.find_seeds(gpu_model(request.arch), None)[: plan.explore])
            identity = starting.result()
        provenance = current_provenance(driver=identity.driver)
        job = Job(
            request,
            spec,
            family,
            space,
            pool,
            the_bench,
            log,
            identity,
            provenance,
            model_of(request, identity),
            log_progress(progress),
            first_that_fits(pool, defaults),
        )
        buckets, saved = _measure_buckets(job, provenance, started)
    finally:
        the_bench.close()
        pool.close()
    trials = [trial for bucket in buckets for trial in bucket.trials]
    return TuneResult(
        buckets=tuple(buckets),
        path=saved,
        log=log.path,
        space=len(space),
        compiled=len(pool.results),
        status="measured",
        seconds=time.monotonic() - started,
        outcomes=dict(Counter(trial.outcome for trial in trials)),
        notes=(identity.load,) if identity.load else (),
    )


def _open_pool(request: TuneRequest, spec: AttentionSpec, family: Family) -> SpecPool:
    """The compile pool of one spec, its own."""
    pool = CompileAhead(request.arch, jobs=request.num_jobs)
    return SpecPool(pool, SpecToCompile(spec, family, 0), own=True)


def _measure_buckets(job: Job, provenance: Provenance, started: float) -> tuple[list[BucketResult], Path | None]:
    request = job.request
    session = session_of(request, job.spec, job.family, provenance, job.identity)
    space = {config_key(config.to_dict()) for config in (*job.space, job.default)}
    resumable = {
        shape: unfinished_trials(job.log.path, session, shape, space=space) if request.resume else []
        for shape in request.shapes
    }
    job.log.write({"kind": "session", **session})
    if not request.resume:
        job.log.write({"kind": "fresh"})
    buckets: list[BucketResult] = []
    saved: Path | None = None
    for number, shape in enumerate(request.shapes):
        resumed = resumable[shape]
        for trial in resumed:
            if trial.outcome in ("crash", "timeout", "wrong"):
                job.poisoned[job.family.config_type.from_dict(trial.config)] = trial.outcome
        if resumed:
            logger.info("Resumed %d trials of %s from %s.", len(resumed), shape, job.log.path)
        remaining = started + request.budget_s - time.monotonic()
        deadline = time.monotonic() + max(0.0, remaining) / (len(request.shapes) - number)
        earlier = [bucket.config for bucket in reversed(buckets)]
        result = tune_bucket(job, shape, earlier=earlier, resumed=resumed, deadline=deadline)
        buckets.append(result)
        saved = save_records(
            [result.record],
            arch=request.arch.name,
            family=job.family.name,
            gpu=job.identity.device.name,
            root=request.root,
        )
    return buckets, saved


def _predict(
    request: TuneRequest,
    spec: AttentionSpec,
    family: Family,
    space: tuple[KernelConfig, ...],
    log: TrialLog,
    progress: ProgressFunction | None,
    bench: Bench | None,
    started: float,
) -> TuneResult:
    del bench
    provenance = current_provenance()
    prover = Prover(request.problem, request.arch, family)
    with CompilePool(spec, request.arch, family, jobs=request.num_jobs, run_here=False) as pool:
        try:
            job = PredictJob(
                request,
                spec,
                family,
                space,
                pool,
                prover,
                log,
                gpu_model(request.arch, request.gpu_name),
                provenance,
                log_progress(progress),
            )
            log.write({"kind": "session", **session_of(request, spec, family, provenance, None)})
            buckets, outcomes = predict(job)
        finally:
            prover.close()
        compiled = len(pool.results)
    stored = store_records(
        [bucket.record for bucket in buckets],
        arch=request.arch.name,
        family=family.name,
        gpu=request.gpu_name or ANY_GPU,
        root=request.root,
        replace_predictions=not request.resume,
    )
    note = (
        f"compiled {compiled} of {len(space)} valid configs: the best by the cost model, the default, and"
        f" {ESCAPE} at random"
    )
    return TuneResult(
        buckets=tuple(buckets),
        path=stored.path,
        log=log.path,
        space=len(space),
        compiled=compiled,
        status="predicted",
        seconds=time.monotonic() - started,
        outcomes=outcomes,
        notes=(note,) if compiled < len(space) else (),
        kept=stored.kept,
    )
