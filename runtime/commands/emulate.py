"""`flashsmith emulate`: the kernel of a problem on the CPU, checked rule by rule and against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .output import brief, console, print_json, table

if TYPE_CHECKING:
    from ..emulator.report import Report

EXAMPLES = (
    "flashsmith emulate --head-dim 64 --causal --seqlen 100",
    "flashsmith emulate -d 128 --window 64,0 --seqlen 65 --seqlen-k 200 --flavour race --schedule greedy",
)
_ALL = "all"


def command(
    head_dim: o.HeadDim = 128,
    head_dim_v: o.HeadDimV = 0,
    dtype: o.DType = "bf16",
    causal: o.Causal = False,
    window: o.Window = "",
    softcap: o.Softcap = 0.0,
    alibi: o.Alibi = False,
    mask_mod: o.MaskMod = "",
    score_mod: o.ScoreMod = "",
    arch: o.ArchName = "",
    family: o.FamilyName = "",
    seqlen: o.SeqlenQ = "100",
    seqlen_k: o.SeqlenK = "0",
    batch: Annotated[int, typer.Option("--batch", "-b", help="Batch.", min=1)] = 1,
    nheads: Annotated[int, typer.Option("--nheads", help="Heads of Q.", min=1)] = 2,
    nheads_k: Annotated[int, typer.Option("--nheads-k", help="Heads of K and V; 0: as Q's.", min=0)] = 0,
    settings: o.Settings = None,
    default: o.UseDefault = False,
    flavour: Annotated[
        str, typer.Option("--flavour", help="plain, race (finds missing barriers), asan (memory), or all.")
    ] = _ALL,
    schedule: Annotated[
        str, typer.Option("--schedule", help="round_robin, reverse, greedy, reverse_greedy or random.")
    ] = "greedy",
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the inputs and of the random schedule.", min=0, max=o.MAX_SEED)
    ] = 0,
    as_json: o.AsJson = False,
) -> None:
    """Run a kernel on the CPU and check it.

    Reports every rule that the kernel breaks, and its error against the fp64 reference; exit code 1 if it is not right.
    """
    import torch

    from ...generator.errors import UsageError, unknown_name_message
    from ..emulator.build import FLAVOURS
    from ..emulator.forward import emulate_forward
    from ..emulator.job import SCHEDULES
    from ..tensors import torch_dtype

    if flavour not in (*FLAVOURS, _ALL):
        raise UsageError(unknown_name_message("flavour", flavour, (*FLAVOURS, _ALL)))
    if schedule not in SCHEDULES:
        raise UsageError(unknown_name_message("schedule", schedule, SCHEDULES))
    shape = o.shape_from(seqlen, head_dim=head_dim, seqlen_k=seqlen_k, batch=batch, nheads=nheads, nheads_k=nheads_k)
    problem = o.problem_from(
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi=alibi,
        mask_mod=mask_mod,
        score_mod=score_mod,
    ).traced(nheads=shape.nheads)
    spec = problem.spec
    the_arch = o.arch_of(arch)
    the_family = o.family_of(spec, the_arch, family)
    config, origin = o.config_from(spec, the_arch, the_family, shape, settings=settings, use_default=default)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(size, generator=generator).to(torch_dtype(dtype))
        for size in (
            (shape.batch, shape.seqlen_q, shape.nheads, spec.head_dim),
            (shape.batch, shape.seqlen_k, shape.nheads_k, spec.head_dim),
            (shape.batch, shape.seqlen_k, shape.nheads_k, spec.head_dim_v),
        )
    )
    reports: list[Report] = []
    results = []
    for name in FLAVOURS if flavour == _ALL else (flavour,):
        out, _, report = emulate_forward(
            spec,
            config,
            the_arch,
            q,
            k,
            v,
            mask=problem.mask,
            score=problem.score,
            flavour=name,
            schedule=schedule,
            seed=seed,
        )
        reports.append(report)
        results.append(out)
    error, tolerance = _error_of(problem, q, k, v, results)
    right = error <= tolerance
    clean = all(report.clean for report in reports)
    if as_json:
        print_json(
            {
                "family": the_family.name,
                "spec": str(spec),
                "arch": the_arch.name,
                "shape": shape.to_dict(),
                "config": config.to_dict(),
                "config_source": origin,
                "right": right,
                "max_error": error if right else None,
                "tolerance": tolerance,
                "clean": clean,
                "reports": [report.to_dict() for report in reports],
            }
        )
    else:
        _show(f"{the_family.name} {spec} at {shape} for {the_arch}", brief(config.to_dict()), reports)
        verdict = "right" if right else "WRONG"
        console().print(f"max|out - reference| = {error:.3g}, allowed {tolerance:.3g}: {verdict}")
    if not (clean and right):
        raise typer.Exit(1)


def _error_of(problem: Any, q: Any, k: Any, v: Any, results: list[Any]) -> tuple[float, float]:
    """The largest error of the outputs against the fp64 reference (NaN counts as infinite), and what is allowed."""
    from ..verify import error_and_tolerance

    pairs = [error_and_tolerance(problem, q, k, v, out) for out in results]
    return max(error for error, _ in pairs), pairs[0][1]


def _show(title: str, config: str, reports: list[Report]) -> None:
    out = console()
    out.print(title, markup=False)
    out.print(f"config: {config}", markup=False)
    rows = [
        (
            report.flavour,
            report.schedule,
            len(report.findings),
            sum(report.bank_conflicts.values()),
            f"{report.seconds:.2f}",
        )
        for report in reports
    ]
    out.print(
        table(
            ("flavour", "schedule", "findings", "bank conflicts", "seconds"),
            rows,
            right=("findings", "bank conflicts", "seconds"),
        )
    )
    for report in reports:
        for finding in report.findings:
            out.print(str(finding), markup=False)
