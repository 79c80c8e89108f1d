"""From a decision to the record that goes into YAML."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...generator.arch import Arch
from ...generator.errors import MissingComponentError
from ...generator.families.base import KernelConfig
from ...generator.spec import AttentionSpec, ProblemShape
from ..store_schema import DeviceIdentity, Provenance, Record, SpecClass, Timing
from .reasons import Facts, facts_of, why
from .request import TuneRequest
from .tiles import TileCounter

if TYPE_CHECKING:
    from .bench_client import Final
    from .cost_model import Estimate
    from .finals import Decision, Finalist
    from .job import Job

DIGEST_CHARS = 16


def current_provenance(*, driver: str = "") -> Provenance:
    """What would make a number now: the generator's digest, flashsmith, NVRTC (if installed) and `driver`."""
    from flashsmith import __version__

    from ...generator.rendering import generator_digest
    from ..compiler import current_compiler

    try:
        nvrtc = current_compiler().version
    except MissingComponentError:
        nvrtc = ""
    return Provenance(generator=generator_digest()[:DIGEST_CHARS], flashsmith=__version__, nvrtc=nvrtc, driver=driver)


def kernel_digest(spec: AttentionSpec, config: KernelConfig, arch: Arch) -> str:
    """The SHA-256 of the kernel's text as it is generated now, cut as in a record's provenance. Raises as `render`."""
    from ...generator.families import family_named
    from ...generator.rendering import render

    return render(spec, config, arch, family=family_named(config.family)).digest[:DIGEST_CHARS]


def measured_record(job: Job, shape: ProblemShape, decision: Decision, final: Final, tiles: TileCounter) -> Record:
    """The record of a measured and verified winner."""
    winner, runner_up = decision.winner, decision.runner_up
    default = final.times.get(job.default)
    if winner.config not in job.digests:
        job.digests[winner.config] = kernel_digest(job.spec, winner.config, job.request.arch)
    return Record(
        spec_class=SpecClass.of(job.spec),
        bucket=shape,
        config=winner.config.to_dict(),
        status="measured",
        time=_timing(job.spec, shape, tiles, winner.ms_median, winner.ms_spread, winner.n),
        default_ms=(default.ms_median if default is not None else None) or 0.0,
        device=job.identity.device,
        provenance=replace(job.provenance, kernel=job.digests[winner.config]),
        verified="cuda",
        problem=str(job.spec),
        values=scalar_values(job.request),
        baseline=final.baseline,
        ties=tuple(tie.config.to_dict() for tie in decision.ties),
        tie_rule=decision.rule,
        runner_up=(runner_up.config.to_dict(), runner_up.ms_median) if runner_up is not None else None,
        why=_why(job, shape, decision, default.ms_median if default is not None else None, tiles),
    )


def _why(job: Job, shape: ProblemShape, decision: Decision, default_ms: float | None, tiles: TileCounter) -> str:
    """What sets the winner apart from the runner-up, in words."""
    winner, runner_up = decision.winner, decision.runner_up

    def facts(finalist: Finalist | None) -> Facts | None:
        if finalist is None:
            return None
        return facts_of(
            job.family,
            job.spec,
            finalist.config,
            arch=job.request.arch,
            gpu=job.gpu,
            shape=shape,
            tiles=tiles,
        )

    default = ""
    if winner.config == job.default:
        default = "winner"
    elif runner_up is not None and runner_up.config == job.default:
        default = "runner-up"
    elif default_ms is not None:
        default = f"{100 * (default_ms / winner.ms_median - 1):.1f} %"
    ahead = None if runner_up is None else runner_up.ms_median / winner.ms_median - 1
    return why(facts(winner), facts(runner_up), ahead=ahead, default=default)


def predicted_record(
    request: TuneRequest,
    spec: AttentionSpec,
    shape: ProblemShape,
    *,
    config: KernelConfig,
    guess: Estimate,
    default_ms: float,
    ties: tuple[KernelConfig, ...],
    rule: str,
    verified: str,
    device: DeviceIdentity,
    provenance: Provenance,
    tiles: TileCounter,
    compiled: int,
) -> Record:
    """The record of a winner by the cost model."""
    return Record(
        spec_class=SpecClass.of(spec),
        bucket=shape,
        config=config.to_dict(),
        status="predicted",
        time=_timing(spec, shape, tiles, guess.ms, 0.0, 0),
        default_ms=default_ms,
        device=device,
        provenance=replace(provenance, kernel=kernel_digest(spec, config, request.arch)),
        verified=verified,
        problem=str(spec),
        values=scalar_values(request),
        ties=tuple(tie.to_dict() for tie in ties),
        tie_rule=rule,
        compiled=compiled,
    )


def scalar_values(request: TuneRequest) -> dict[str, int | float] | None:
    """The numbers that the mask and score captured (a window, a softcap), by slot name; None if there are none."""
    problem = request.problem.traced()
    values: dict[str, int | float] = {}
    for traced in (problem.mask, problem.score):
        if traced is not None:
            values.update(zip((slot.name for slot in traced.graph.scalars), traced.scalars, strict=True))
    return values or None


def _timing(spec: AttentionSpec, shape: ProblemShape, tiles: TileCounter, ms: float, spread: float, n: int) -> Timing:
    moved = 2 * (spec.head_dim + spec.head_dim_v) * shape.batch
    moved *= shape.nheads * shape.seqlen_q + shape.nheads_k * shape.seqlen_k
    return Timing(median_ms=ms, spread=spread, n=n, tflops=tiles.flops(spec) / ms / 1e9, gbps=moved / ms / 1e6)
