"""`flashsmith tune`: search a problem's configs; measured on the GPU, or predicted for an architecture without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .naming import short_config, short_problem
from .output import console, error_console, print_json, table

if TYPE_CHECKING:
    from ..tune.request import ProgressFunction, TuneResult

EXAMPLES = (
    "flashsmith tune --head-dim 128 --causal --dtype bf16 --seqlens 1k,4k,16k",
    "flashsmith tune -d 64 --causal --seqlens 1k,4k --arch sm_80        (no GPU: a prediction)",
    "flashsmith tune -d 128 --seqlens 4k --exhaustive --log d128.jsonl  (times every valid config once)",
)
#: A whole run on a GPU, unless said otherwise or exhaustive.
BUDGET_SECONDS = 60.0
#: Options that only a measurement, and that only a prediction, looks at.
_MEASURING = ("budget", "trials", "exhaustive")
_PREDICTING = ("gpu_name", "max_compile", "prove")
_PHASES = {"compile": "compiling", "time": "timing", "prove": "proving", "final": "final"}


def command(
    ctx: typer.Context,
    head_dim: o.HeadDim = 128,
    head_dim_v: o.HeadDimV = 0,
    dtype: o.DType = "bf16",
    causal: o.Causal = False,
    window: o.Window = "",
    softcap: o.Softcap = 0.0,
    alibi: o.Alibi = False,
    mask_mod: o.MaskMod = "",
    score_mod: o.ScoreMod = "",
    seqlens: Annotated[str, typer.Option("--seqlens", "-n", help="Lengths to tune for, such as 1k,4k,16k.")] = "4k",
    seqlen_k: o.SeqlenK = "0",
    batch: o.Batch = 0,
    nheads: o.NHeads = 0,
    nheads_k: o.NHeadsK = 0,
    arch: o.ArchName = "",
    family: o.FamilyName = "",
    device: Annotated[
        str, typer.Option("--device", help="cuda, cuda:1, ..., or emulator to predict; default: the first GPU.")
    ] = "",
    predict: Annotated[bool, typer.Option("--predict", help="Predict for --arch though there is a GPU.")] = False,
    gpu_name: Annotated[str, typer.Option("--gpu", help="With a prediction: the GPU model, as torch names it.")] = "",
    budget: Annotated[
        float | None, typer.Option("--budget", help="Seconds for the whole run on a GPU; 0: no limit; default: 60.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", help="Timed configs per length at most.", min=1)] = 60,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Time every valid config once.")] = False,
    max_compile: Annotated[int, typer.Option("--max-compile", help="With a prediction: configs compiled.", min=1)] = 96,
    prove: Annotated[
        int, typer.Option("--prove", help="With a prediction: leaders the emulator tries until one is right.", min=0)
    ] = 3,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Compile processes; 0: one per core.", min=0)] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search.", min=0, max=o.MAX_SEED)] = 0,
    log: Annotated[Path | None, typer.Option("--log", help="Trial log (JSON lines); default: in the cache.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the YAML; default: your own configs.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on with what earlier runs found, or start anew.")
    ] = True,
    as_json: o.AsJson = False,
) -> None:
    """Search the fastest right kernel, write it to YAML."""
    import math

    from ...generator.arch import arch_from_cc
    from ...generator.errors import UsageError
    from ..tune.request import TuneRequest
    from ..tune.study import tune

    index, info = (0, None) if predict else o.tuning_gpu(device, arch)
    the_arch = o.arch_of(arch) if arch or info is None else arch_from_cc(info.cc)
    _warn_of_ignored(ctx, predicting=info is None)
    shapes = tuple(
        o.shape_from(str(length), head_dim=head_dim, seqlen_k=seqlen_k, batch=batch, nheads=nheads, nheads_k=nheads_k)
        for length in o.parse_lengths(seqlens)
    )
    if budget is not None and not budget >= 0:
        raise UsageError(f"--budget must be a number of seconds >= 0, but got {budget}.")
    seconds = (math.inf if exhaustive else BUDGET_SECONDS) if budget is None else budget or math.inf
    request = TuneRequest(
        problem=o.problem_from(
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            causal=causal,
            window=window,
            softcap=softcap,
            alibi=alibi,
            mask_mod=mask_mod,
            score_mod=score_mod,
        ),
        shapes=shapes,
        arch=the_arch,
        gpu=f"cuda:{index}" if info is not None else "",
        gpu_name=gpu_name or None,
        family=o.check_family(family) or None,
        budget_s=seconds,
        trials=trials,
        seed=seed,
        exhaustive=exhaustive,
        max_compile=max_compile,
        prove=prove,
        jobs=jobs,
        root=o.folder(out),
        log=o.folder(log),
        resume=resume,
    )
    with progress_bar(quiet=as_json) as progress:
        result = tune(request, progress=progress)
    if as_json:
        print_json(to_dict(result))
    else:
        show(result)


def _warn_of_ignored(ctx: typer.Context, *, predicting: bool) -> None:
    """Says which of the options given do nothing."""
    names = _MEASURING if predicting else _PREDICTING
    given = [name for name in names if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if given:
        words = ", ".join(f"--{name.replace('_name', '').replace('_', '-')}" for name in given)
        what = "a prediction, which times nothing" if predicting else "a measurement on a GPU"
        o.logger.warning("%s: ignored by %s.", words, what)


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[ProgressFunction | None]:
    """A function that draws the search's steps on standard error; None where nobody looks."""
    if quiet or not error_console().is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=error_console(), transient=True) as bar:
        tasks: dict[Any, Any] = {}

        def advance(step: Any) -> None:
            key = (step.phase, step.shape)
            if key not in tasks:
                tasks[key] = bar.add_task("", total=step.total)
            best = f", best {step.best_ms:.4f} ms" if step.best_ms else ""
            words = f"{_PHASES.get(step.phase, step.phase)} {step.shape or ''}{best}"
            bar.update(tasks[key], completed=step.done, total=step.total, description=words)

        yield advance


def to_dict(result: TuneResult) -> dict[str, Any]:
    """The result as plain data."""
    return {
        "status": result.status,
        "path": str(result.path) if result.path else None,
        "kept": [record.to_dict() for record in result.kept],
        "log": str(result.log),
        "space": result.space,
        "compiled": result.compiled,
        "outcomes": dict(result.outcomes),
        "seconds": round(result.seconds, 2),
        "notes": list(result.notes),
        "buckets": [
            {
                "note": bucket.note,
                "trials": len(bucket.trials),
                "seconds": round(bucket.seconds, 2),
                **bucket.record.to_dict(),
            }
            for bucket in result.buckets
        ],
    }


def show(result: TuneResult) -> None:
    """Prints the table of winners and where they are."""
    out = console()
    measured = result.status == "measured"
    rows = []
    for bucket in result.buckets:
        record = bucket.record
        time = record.time
        spread = f" ±{50 * time.spread:.1f}%" if measured else ""
        baseline = "-"
        if record.baseline is not None:
            baseline = f"{record.baseline[1] / time.median_ms:.2f}x {record.baseline[0]}"
        rows.append(
            (
                record.bucket,
                f"{time.median_ms:.4f}{spread}",
                f"{time.tflops:.0f}",
                f"{record.default_ms / time.median_ms:.3f}x" if record.default_ms else "-",
                *((baseline,) if measured else ()),
                record.verified or "not proved",
                short_config(record.config),
            )
        )
    against = ("vs torch",) if measured else ()
    columns = ("bucket", "ms", "TFLOP/s", "vs default", *against, "proved on", "config")
    words = "measured" if measured else "predicted by the cost model, not measured"
    first = result.buckets[0].record
    problem = short_problem(first.problem, first.values)
    out.print(f"{problem} on {first.device.name if measured else _predicted_for(result)}: {words}", markup=False)
    out.print(table(columns, rows, right=("ms", "TFLOP/s", "vs default")))
    counts = ", ".join(f"{count} {name}" for name, count in sorted(result.outcomes.items()))
    out.print(f"{result.space} valid configs, {result.compiled} compiled ({counts}), {result.seconds:.0f} s.")
    for note in result.notes:
        out.print(f"Note: {note}.", markup=False)
    for bucket in result.buckets:
        ties = f"{len(bucket.record.ties)} tied" if bucket.record.ties else ""
        reasons = filter(None, (bucket.record.tie_rule, ties, bucket.note))
        out.print(f"{bucket.shape}: {'; '.join(reasons)}.", markup=False)
    for record in result.kept:
        strength = f", the best of {record.compiled} compiled configs" if record.status == "predicted" else ""
        out.print(f"Kept:    the {record.status} record of {record.bucket} in {result.path}{strength}", markup=False)
    if len(result.kept) < len(result.buckets):
        out.print(f"Written: {result.path}", markup=False)
    elif any(record.status == "predicted" for record in result.kept):
        out.print("Nothing was written. --fresh replaces stored predictions, stronger or not.")
    else:
        out.print("Nothing was written: a prediction does not replace what was measured.")
    out.print(f"Trials:  {result.log}", markup=False)


def _predicted_for(result: TuneResult) -> str:
    device = result.buckets[0].record.device
    arch = f"sm_{device.cc[0]}{device.cc[1]}"
    return f"{arch} (as {device.sm_count} SMs)" if device.name == "any" else f"{device.name} ({arch})"
