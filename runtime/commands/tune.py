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
    from ..store import Record
    from ..tune.request import BucketResult, ProgressFunction, TuneResult

EXAMPLES = (
    "flashsmith tune --head-dim 128 --causal --dtype bf16 --seqlens 1k,4k,16k",
    "flashsmith tune -d 64 --causal --seqlens 1k,4k --arch sm_80        (no GPU: a prediction)",
    "flashsmith tune -d 128 --seqlens 4k --exhaustive --log d128.jsonl  (times every valid config once)",
    "flashsmith tune -d 64,128,192/128 --masks none,causal,window:1024,0 --gqa 1,4,8 --seqlens 512,2k,8k --budget 300",
)
#: A whole run on a GPU, unless said otherwise or exhaustive: of one problem, and for each of many.
BUDGET_SECONDS = 60.0
BUDGET_SECONDS_EACH = 20.0
#: Options that only a measurement, and that only a prediction, looks at.
_MEASURING = ("budget", "trials", "exhaustive")
_PREDICTING = ("gpu_name", "max_compile", "prove")
_PHASES = {"compile": "compiling", "time": "timing", "prove": "proving", "final": "final"}


def command(
    ctx: typer.Context,
    head_dim: Annotated[
        list[str],
        typer.Option(
            "--head-dim",
            "-d",
            help="Head dims, multiples of 8 up to 256: one, or a list such as 64,128,192/128 (of Q and K / of V); may"
            " be repeated.",
        ),
    ] = ["128"],  # noqa: B006 - nobody changes it
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
    masks: Annotated[
        str, typer.Option("--masks", help="Several masks: a list of none, causal and window:LEFT,RIGHT.")
    ] = "",
    gqa: Annotated[str, typer.Option("--gqa", help="Ratios nheads / nheads_k to tune for, such as 1,4,8.")] = "",
    arch: o.ArchName = "",
    family: o.FamilyName = "",
    device: Annotated[
        str, typer.Option("--device", help="cuda, cuda:1, ..., or emulator to predict; default: the first GPU.")
    ] = "",
    predict: Annotated[bool, typer.Option("--predict", help="Predict for --arch though there is a GPU.")] = False,
    gpu_name: Annotated[str, typer.Option("--gpu", help="With a prediction: the GPU model, as torch names it.")] = "",
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget", help="Seconds for the whole run on a GPU; 0: no limit; default: 60, of many problems 20 each."
        ),
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
    from . import tune_many as many

    index, info = (0, None) if predict else o.tuning_gpu(device, arch)
    the_arch = o.arch_of(arch) if arch or info is None else arch_from_cc(info.cc)
    _warn_of_ignored(ctx, predicting=info is None)
    problems = many.problems_from(
        head_dims=head_dim,
        masks=masks,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=causal,
        window=window,
        softcap=softcap,
        alibi=alibi,
        mask_mod=mask_mod,
        score_mod=score_mod,
    )
    ratios = many.parse_ratios(gqa, nheads_k=nheads_k)
    together = info is not None and (len(problems) > 1 or len(ratios) > 1)
    if budget is not None and not budget >= 0:
        raise UsageError(f"--budget must be a number of seconds >= 0, but got {budget}.")
    if together and exhaustive:
        raise UsageError("--exhaustive times one problem at one ratio of heads. Name one head dim, mask and ratio.")
    usual = BUDGET_SECONDS_EACH * len(problems) if together else BUDGET_SECONDS
    seconds = (math.inf if exhaustive else usual) if budget is None else budget or math.inf
    requests = [
        TuneRequest(
            problem=problem,
            shapes=tuple(
                o.shape_from(
                    str(length),
                    head_dim=problem.head_dim,
                    seqlen_k=seqlen_k,
                    batch=batch,
                    nheads=nheads,
                    nheads_k=nheads_k,
                    gqa_ratio=ratio,
                )
                for ratio in ratios
                for length in o.parse_lengths(seqlens)
            ),
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
        for problem in problems
    ]
    if together:
        explore = trials if _was_given(ctx, "trials") else None
        many.tune_together(requests, budget_s=seconds, explore=explore, as_json=as_json)
        return
    results = []
    for request in requests:
        with progress_bar(quiet=as_json) as progress:
            results.append(tune(request, progress=progress))
        if not as_json:
            show(results[-1])
    if as_json:
        rows = [to_dict(result) for result in results]
        print_json(rows[0] if len(rows) == 1 else {"runs": rows})


def _was_given(ctx: typer.Context, name: str) -> bool:
    return getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _warn_of_ignored(ctx: typer.Context, *, predicting: bool) -> None:
    """Says which of the options given do nothing."""
    names = _MEASURING if predicting else _PREDICTING
    given = [name for name in names if _was_given(ctx, name)]
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
        "buckets": [bucket_dict(bucket) for bucket in result.buckets],
    }


def bucket_dict(bucket: BucketResult) -> dict[str, Any]:
    """One tuned bucket as plain data."""
    return {
        "note": bucket.note,
        "trials": len(bucket.trials),
        "seconds": round(bucket.seconds, 2),
        **bucket.record.to_dict(),
    }


def show(result: TuneResult) -> None:
    """Prints the table of winners and where they are."""
    out = console()
    measured = result.status == "measured"
    rows = [bucket_row(bucket.record) for bucket in result.buckets]
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


def bucket_row(record: Record) -> tuple[object, ...]:
    """A record's row of the table: bucket, time, speed, against the default and (measured) torch, proof, config."""
    time, measured = record.time, record.status == "measured"
    baseline = "-"
    if record.baseline is not None:
        baseline = f"{record.baseline[1] / time.median_ms:.2f}x {record.baseline[0]}"
    return (
        record.bucket,
        f"{time.median_ms:.4f}" + (f" ±{50 * time.spread:.1f}%" if measured else ""),
        f"{time.tflops:.0f}",
        f"{record.default_ms / time.median_ms:.3f}x" if record.default_ms else "-",
        *((baseline,) if measured else ()),
        record.verified or "not proved",
        short_config(record.config),
    )


def _predicted_for(result: TuneResult) -> str:
    device = result.buckets[0].record.device
    arch = f"sm_{device.cc[0]}{device.cc[1]}"
    return f"{arch} (as {device.sm_count} SMs)" if device.name == "any" else f"{device.name} ({arch})"
