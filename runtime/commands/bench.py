"""`flashsmith bench`: flashsmith against torch's scaled_dot_product_attention on this GPU, in one run."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .output import console, error_console, print_json, table

if TYPE_CHECKING:
    from ..bench import BenchCase, BenchResult

EXAMPLES = (
    "flashsmith bench --head-dims 64,128 --seqlens 1k,4k,16k",
    "flashsmith bench --head-dims 128 --causal --providers flashsmith,sdpa-flash --json",
)


def command(
    head_dims: Annotated[str, typer.Option("--head-dims", "-d", help="Head dims, such as 64,128,256.")] = "64,128,256",
    causal: Annotated[bool, typer.Option("--causal", help="Causal cases only.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Cases without a mask only.")] = False,
    dtype: o.DType = "bf16",
    seqlens: Annotated[
        str, typer.Option("--seqlens", "-n", help="Lengths; the batch is 16384 tokens over the length.")
    ] = "512,1k,2k,4k,8k,16k",
    providers: Annotated[str, typer.Option("--providers", help="Some of flashsmith, sdpa-flash, sdpa-cudnn, ...")] = "",
    budget: Annotated[float, typer.Option("--budget", help="Milliseconds of timing per provider and case.")] = 150.0,
    family: o.FamilyName = "",
    device: Annotated[str, typer.Option("--device", help="cuda, cuda:1, ...")] = "cuda",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the rows to this file as JSON, too.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Compare with torch's back ends on this GPU.

    One run, in turns and shuffled order, cold L2, outputs checked, clocks noted.
    """
    from ...generator.errors import MissingComponentError, UsageError, unknown_name_message
    from ..attention import only_family
    from ..bench import PROVIDERS, bench, standard_cases

    o.check_family(family)
    index = o.gpu_index(device)
    dims = o.parse_lengths(head_dims, name="--head-dims")
    masks = (False, True) if causal == full else (causal,)
    names = tuple(name.strip() for name in providers.split(",")) if providers else PROVIDERS
    cases = standard_cases(dims, dtype=dtype, causal=masks, seqlens=o.parse_lengths(seqlens))
    for name in names:
        if name not in PROVIDERS:
            raise UsageError(unknown_name_message("provider", name, PROVIDERS))
    for case in cases:
        _ = case.problem  # its head dim and dtype
    if not 0 < budget < math.inf:
        raise UsageError(f"--budget must be a positive number of milliseconds, but got {budget}.")
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise UsageError(f"--out {out} cannot be written. Name a file in an existing folder.")
    if o.gpu_info() is not None and o.gpu_info(index) is None:
        raise UsageError(f"--device {device} asks for a GPU that is not there: this machine has {o.gpu_count()}.")
    if o.gpu_info(index) is None:
        raise MissingComponentError(
            "`flashsmith bench` times kernels on a GPU, and none was found. Run it on a machine with one; `flashsmith"
            " doctor` says what is missing, `flashsmith tune --arch` predicts without."
        )
    say = None if as_json else _say
    with only_family(family) if family else nullcontext():
        result = bench(cases, providers=names, device=f"cuda:{index}", budget_ms=budget, progress=say)
    data = to_dict(result)
    if out is not None:
        _write(out, data)
    if as_json:
        print_json(data)
    else:
        show(result)


def to_dict(result: BenchResult) -> dict[str, Any]:
    """The rows, and the geometric mean of flashsmith's speed over each rival's."""
    rivals = _rivals(result)
    means = {name: result.geometric_mean(name) for name in rivals}
    return {**result.to_dict(), "geometric_mean": {n: None if math.isnan(v) else v for n, v in means.items()}}


def show(result: BenchResult) -> None:
    """Prints a table of TFLOP/s, the ratios, and the machine."""
    from ..bench import FLASHSMITH

    out = console()
    names = list(dict.fromkeys(row.provider for row in result.rows))
    cases: list[BenchCase] = list(dict.fromkeys(row.case for row in result.rows))
    notes = []
    rows = []
    for case in cases:
        cells = []
        for name in names:
            row = result.row(case, name)
            cells.append("-" if row is None or row.timing is None else f"{row.tflops:.0f}")
            if row is not None and row.note:
                notes.append(f"{case}: {name}: {row.note}")
        ratios = [result.ratio(case, rival) for rival in _rivals(result)]
        rows.append((case, *cells, *("-" if math.isnan(ratio) else f"{ratio:.2f}x" for ratio in ratios)))
    rivals = _rivals(result) if FLASHSMITH in names else []
    columns = ("TFLOP/s", *names, *(f"vs {rival}" for rival in rivals))
    out.print(table(columns, rows, right=columns[1:]))
    for rival in rivals:
        mean = result.geometric_mean(rival)
        if not math.isnan(mean):
            out.print(f"Geometric mean against {rival}: {mean:.3f}x")
    for note in notes:
        out.print(f"Note: {note}", markup=False)
    clocks = [row.timing.sm_clock_mhz for row in result.rows if row.timing is not None and row.timing.sm_clock_mhz]
    seen = f", SM clock {min(clocks)}-{max(clocks)} MHz" if clocks else ""
    out.print(", ".join(f"{name} {value}" for name, value in result.machine.items()) + seen, markup=False)


def _rivals(result: BenchResult) -> list[str]:
    from ..bench import FLASHSMITH

    names = list(dict.fromkeys(row.provider for row in result.rows))
    return [name for name in names if name != FLASHSMITH] if FLASHSMITH in names else []


def _say(case: BenchCase, rows: Any) -> None:
    times = ", ".join(f"{row.provider} {row.tflops:.0f}" for row in rows if row.timing is not None)
    error_console().print(f"{case}: {times or 'nothing ran'}", markup=False)


def _write(path: Path, data: dict[str, Any]) -> None:
    import json

    from ...generator.errors import UsageError

    try:
        path.write_text(json.dumps(data, indent=2), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--out {path} cannot be written: {error.strerror}. Name a file in an existing folder."
        ) from None
