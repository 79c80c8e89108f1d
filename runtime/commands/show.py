"""`flashsmith show`: the tuned records on this machine, and which one a call would use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o
from .naming import short_config, short_problem
from .output import console, print_json, table

if TYPE_CHECKING:
    from ..store import Record, Resolution

EXAMPLES = (
    "flashsmith show",
    "flashsmith show --arch sm_90 --head-dim 128",
    "flashsmith show -d 128 --why                          (why each length got its config)",
    "flashsmith show --call -d 128 --causal --seqlen 4k --arch sm_90",
    "flashsmith show --restamp tuned_configs/sm_90/nvidia-h200/forward_sm80.yaml",
)
#: What `--restamp` did with a record.
_STATES = {
    "fresh": "up to date",
    "same": "the same kernel: marked as up to date",
    "changed": "another kernel now: left as it was; measure it again",
    "unknown": "cannot be compared: left as it was; measure it again",
}


def command(
    head_dim: Annotated[int, typer.Option("--head-dim", "-d", help="Only this head dim; 0: all.")] = 0,
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
    gpu: Annotated[str, typer.Option("--gpu", help="A GPU's name; with --call: whose records to use.")] = "",
    call: Annotated[bool, typer.Option("--call", help="Show the config that one call of this problem uses.")] = False,
    stamp: Annotated[
        Path | None,
        typer.Option("--restamp", help="A tuned file: records whose kernel is still the same become up to date."),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Say of each record why its config won.")] = False,
    seqlen: o.SeqlenQ = "4k",
    seqlen_k: o.SeqlenK = "0",
    batch: o.Batch = 0,
    nheads: o.NHeads = 0,
    nheads_k: o.NHeadsK = 0,
    as_json: o.AsJson = False,
) -> None:
    """List tuned configs, or what one call uses."""
    if stamp is not None:
        _restamp(stamp, mask_mod, score_mod, as_json=as_json)
        return
    if call:
        head_dim = head_dim or 128
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
        )
        shape = o.shape_from(
            seqlen, head_dim=head_dim, seqlen_k=seqlen_k, batch=batch, nheads=nheads, nheads_k=nheads_k
        )
        _show_call(problem, shape, arch, gpu, family, as_json=as_json)
        return
    found = _all_records(o.arch_of(arch).name if arch else "", gpu, o.check_family(family), head_dim)
    if as_json:
        rows = [
            {"source": source, "path": str(path), "invalid": _fault(record, path) or None, **record.to_dict()}
            for source, path, record in found
        ]
        print_json({"records": rows})
        return
    if not found:
        console().print("No tuned configs. `flashsmith tune` makes some; calls use the defaults until then.")
        return
    for source, path in dict.fromkeys((source, path) for source, path, _ in found):
        _show_file(source, path, [record for _, other, record in found if other == path], why=why)


def _show_file(source: str, path: Path, records: Sequence[Record], *, why: bool) -> None:
    """A table of one file's records, if asked `why` each won, and why some of them cannot be used."""
    out = console()
    faults = [_fault(record, path) for record in records]
    rows = [
        (
            short_problem(record.problem, record.values, op=False),
            record.bucket,
            f"{record.time.median_ms:.4f}",
            f"{record.time.tflops:.0f}",
            "INVALID" if fault else record.status,
            short_config(record.config),
        )
        for record, fault in zip(records, faults, strict=True)
    ]
    title = f"{path.stem} on {path.parent.name} ({path.parent.parent.name}), {source}"
    columns = ("problem", "bucket", "ms", "TFLOP/s", "status", "config")
    out.print(table(columns, rows, title=title, right=("ms", "TFLOP/s")))
    for record in records if why else ():
        problem = short_problem(record.problem, record.values, op=False)
        out.print(f"{problem} at {record.bucket}: {_reasons(record)}", markup=False)
    for record, fault in zip(records, faults, strict=True):
        if fault:
            out.print(f"INVALID: {record.problem} at {record.bucket}: {fault}", markup=False)


def _reasons(record: Record) -> str:
    """Why the record's config won: the runner-up, the rule, and what sets the two apart."""
    parts = [record.tie_rule or "no rule was recorded"]
    if record.runner_up is not None:
        config, ms = record.runner_up
        parts.append(f"runner-up {short_config(config)} with {ms:.4f} ms")
    if record.default_ms:
        parts.append(f"default {record.default_ms:.4f} ms")
    return "; ".join(parts) + f". {record.why}".rstrip()


def _fault(record: Record, path: Path) -> str:
    """Why no call can use the record of the file at `path`, "" for a good one."""
    from ...generator.arch import arch_from_name
    from ...generator.errors import FlashsmithError
    from ...generator.families import family_named
    from ...generator.spec import AttentionSpec
    from ..problem import problem_of

    of = record.spec_class
    try:
        family = family_named(path.stem)
        config = family.config_type.from_dict(record.config)
        # Whichever mask and score it was: most rules of a config ask at most whether there is a mask.
        mask = problem_of(dtype="bf16", head_dim=64, causal=True).spec.mask if of.mask else None
        spec = AttentionSpec(of.op, of.dtype, of.head_dim, of.head_dim_v, mask, gqa_ratio=of.gqa_ratio or None)
        family.check(spec, config, arch_from_name(path.parent.parent.name))
    except (FlashsmithError, ArithmeticError) as error:
        return str(error) or type(error).__name__
    return ""


def _show_call(problem: Any, shape: Any, arch: str, gpu: str, family_name: str, *, as_json: bool) -> None:
    from ..store_choice import choose_config

    the_arch = o.arch_of(arch)
    name = gpu or o.gpu_name_of(the_arch)
    spec = problem.traced().spec
    family = o.family_of(spec, the_arch, family_name)
    resolution = choose_config(spec, the_arch, name, shape, family)
    if as_json:
        print_json(
            {
                "family": family.name,
                "spec": str(spec),
                "arch": the_arch.name,
                "gpu": name,
                "shape": shape.to_dict(),
                **_resolution_dict(resolution),
            }
        )
        return
    out = console()
    out.print(f"{family.name} {spec} at {shape} on {name or the_arch}", markup=False)
    out.print(f"config  {resolution.config}", markup=False)
    out.print(f"source  {resolution.source}" + (f" ({resolution.note})" if resolution.note else ""), markup=False)
    if resolution.record is not None:
        record = resolution.record
        out.print(
            f"record  {short_problem(record.problem, record.values)} at {record.bucket} on {record.device.name}:"
            f" {record.time.median_ms:.4f} ms, {record.time.tflops:.0f} TFLOP/s,"
            f" {record.status}, proved on {record.verified or 'nothing'}",
            markup=False,
        )
        out.print(f"why     {_reasons(record)}", markup=False)


def _restamp(path: Path, mask_mod: str, score_mod: str, *, as_json: bool) -> None:
    from ..tune.request import TuneProblem
    from ..tune.restamp import restamp

    spec = TuneProblem(mask_mod=mask_mod, score_mod=score_mod).traced().spec
    stamps = restamp(path, graphs=(spec.mask, spec.score))
    if as_json:
        rows = [
            {
                "problem": stamp.record.problem,
                "bucket": stamp.record.bucket.to_dict(),
                "state": stamp.state,
                "reason": stamp.reason,
                "remedy": stamp.remedy,
            }
            for stamp in stamps
        ]
        print_json({"path": str(path), "records": rows})
        return
    out = console()
    for stamp in stamps:
        words = _STATES[stamp.state]
        out.print(f"{stamp.record.problem} at {stamp.record.bucket}: {words}", markup=False)
        if stamp.remedy:
            out.print(f"    {stamp.reason}\n    {stamp.remedy}", markup=False)


def _resolution_dict(resolution: Resolution) -> dict[str, Any]:
    return {
        "config": resolution.config.to_dict(),
        "source": resolution.source,
        "stale": resolution.stale,
        "note": resolution.note,
        "record": resolution.record.to_dict() if resolution.record is not None else None,
    }


def _all_records(arch: str, gpu: str, family: str, head_dim: int) -> list[tuple[str, Path, Record]]:
    from ..store import PACKAGED, gpu_slug, read_file, user_root

    found = []
    for source, root in (("user", user_root()), ("packaged", PACKAGED)):
        for path in sorted(root.glob(f"{arch or '*'}/{gpu_slug(gpu) if gpu else '*'}/{family or '*'}.yaml")):
            for record in read_file(path).records:
                if head_dim in (0, record.spec_class.head_dim):
                    found.append((source, path, record))
    return found
