"""`flashsmith tune` for many problems at once: how their options are read, and what is printed of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from ...generator.errors import SpecError, UsageError
from . import options as o
from .naming import short_problem
from .output import console, error_console, print_json, table

if TYPE_CHECKING:
    from ..tune.campaign import CampaignResult
    from ..tune.request import ProgressFunction, TuneProblem, TuneRequest

_MASK = re.compile(r"none|causal|window:[^,:]*,[^,:]*")
_DIMS = re.compile(r"([0-9]{1,6})(?:/([0-9]{1,6}))?")
#: Buckets without a winner that are named one by one.
MAX_NAMED = 6


def parse_head_dims(texts: Sequence[str], *, head_dim_v: int = 0) -> tuple[tuple[int, int], ...]:
    """(head_dim, head_dim_v) of texts such as "64,192/128", each once; 0 stands for Q's. Raises SpecError."""
    found = []
    for text in ",".join(texts).split(","):
        match = _DIMS.fullmatch(text.strip())
        if match is None:
            raise SpecError(f"--head-dim takes numbers such as 128, or 192/128 with V's, but got {text!r}.")
        found.append((int(match[1]), int(match[2] or head_dim_v)))
    return tuple(dict.fromkeys(found))


def parse_masks(text: str) -> tuple[tuple[bool, str], ...]:
    """(causal, window) of a list such as "none,causal,window:1024,0", each once. Raises SpecError."""
    found = []
    place = 0
    while place <= len(text):
        match = _MASK.match(text, place)
        if match is None or text[match.end() : match.end() + 1] not in ("", ","):
            raise SpecError(
                f"--masks takes a list of none, causal and window:LEFT,RIGHT, but got {text!r}."
                " Use for example --masks none,causal,window:1024,0."
            )
        name, _, window = match[0].partition(":")
        o.parse_window(window)
        found.append((name == "causal", window))
        place = match.end() + 1
    return tuple(dict.fromkeys(found))


def parse_ratios(text: str, *, nheads_k: int = 0) -> tuple[int, ...]:
    """The ratios of "1,4,8", each once; (0,), for the heads as they are given, of "". Raises SpecError, UsageError."""
    if not text:
        return (0,)
    if nheads_k:
        raise UsageError("--gqa and --nheads-k state the same. Use one of them.")
    return o.parse_lengths(text, name="--gqa")


def problems_from(*, head_dims: Sequence[str], masks: str, head_dim_v: int = 0, **more: Any) -> list[TuneProblem]:
    """Every head dim with every mask; `more` are options of `options.problem_from`. Raises SpecError, UsageError."""
    given = [name for name in ("causal", "window", "mask_mod") if more.get(name)]
    if masks and given:
        raise UsageError(f"--masks and --{given[0].replace('_', '-')} both name masks. Put all of them into --masks.")
    chosen = parse_masks(masks) if masks else ((more["causal"], more["window"]),)
    problems = []
    for head_dim, of_v in parse_head_dims(head_dims, head_dim_v=head_dim_v):
        for causal, window in chosen:
            options = {**more, "causal": causal, "window": window}
            problems.append(o.problem_from(head_dim=head_dim, head_dim_v=of_v, **options))
    return list(dict.fromkeys(problems))


def tune_together(requests: Sequence[TuneRequest], *, budget_s: float, explore: int | None, as_json: bool) -> None:
    """Tunes all of `requests` in one run and prints what came out; exit code 1 where a bucket failed."""
    from ..tune.campaign import EXPLORE, tune_many

    with _bar(quiet=as_json) as progress:
        result = tune_many(requests, budget_s=budget_s, explore=explore or EXPLORE, progress=progress)
    if as_json:
        print_json(to_dict(result))
    else:
        show(result)
    if result.failed:
        raise typer.Exit(1)


def to_dict(result: CampaignResult) -> dict[str, Any]:
    """The result as plain data."""
    from .tune import bucket_dict

    return {
        "status": "measured",
        "paths": [str(path) for path in result.paths],
        "log": str(result.log),
        "compiled": result.compiled,
        "resumed": result.resumed,
        "outcomes": result.outcomes,
        "seconds": round(result.seconds, 2),
        "notes": list(result.notes),
        "unreached": [{"problem": words, "bucket": shape.to_dict()} for words, shape in result.unreached],
        "failed": [
            {"problem": words, "bucket": shape.to_dict(), "reason": reason} for words, shape, reason in result.failed
        ],
        "buckets": [bucket_dict(bucket) for bucket in result.buckets],
    }


def show(result: CampaignResult) -> None:
    """Prints a table of winners for each problem, and what was not reached."""
    from .tune import bucket_row

    out = console()
    columns = ("bucket", "ms", "TFLOP/s", "vs default", "vs torch", "proved on", "config")
    by_problem: dict[str, list[Any]] = {}
    for bucket in result.buckets:
        record = bucket.record
        by_problem.setdefault(short_problem(record.problem, record.values), []).append(record)
    for problem, records in by_problem.items():
        records.sort(key=lambda record: (record.bucket.gqa_ratio, record.bucket.seqlen_q))
        rows = [bucket_row(record) for record in records]
        out.print(table(columns, rows, title=problem, right=("ms", "TFLOP/s", "vs default")))
    counts = ", ".join(f"{count} {name}" for name, count in sorted(result.outcomes.items()))
    resumed = f" and {result.resumed} from an interrupted run" if result.resumed else ""
    out.print(
        f"{len(result.buckets)} winners{resumed}; {result.compiled} kernels compiled; trials: {counts};"
        f" {result.seconds:.0f} s.",
        markup=False,
    )
    for note in result.notes:
        out.print(f"Note: {note}.", markup=False)
    for words, shape, reason in result.failed[:MAX_NAMED]:
        out.print(f"Failed:  {short_problem(words)} at {shape}: {reason}", markup=False)
    if len(result.failed) > MAX_NAMED:
        out.print(f"Failed:  {len(result.failed) - MAX_NAMED} more", markup=False)
    if result.unreached:
        named = "; ".join(f"{short_problem(words)} at {shape}" for words, shape in result.unreached[:MAX_NAMED])
        more = f" and {len(result.unreached) - MAX_NAMED} more" if len(result.unreached) > MAX_NAMED else ""
        out.print(f"Not reached within --budget: {named}{more}. The same command goes on with them.", markup=False)
    for path in result.paths:
        out.print(f"Written: {path}", markup=False)
    out.print(f"Trials:  {result.log}", markup=False)


@contextmanager
def _bar(*, quiet: bool) -> Iterator[ProgressFunction | None]:
    """A function that draws the finished buckets of all on standard error; None where nobody looks."""
    if quiet or not error_console().is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("compiling", total=None)

        def advance(step: Any) -> None:
            if step.phase == "bucket":
                bar.update(task, completed=step.done, total=step.total, description=short_problem(step.words))
            elif step.best_ms:
                bar.update(task, description=f"{step.shape}, best {step.best_ms:.4f} ms")

        yield advance
