"""`flashsmith space`: the valid configs of a problem, and why the others are excluded."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as o
from .output import brief, console, print_json, table

EXAMPLES = (
    "flashsmith space --head-dim 128 --arch sm_86",
    "flashsmith space -d 256 --causal --arch sm_90 --list",
    "flashsmith space -d 256 --arch sm_86 --all --json",
)


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
    list_valid: Annotated[bool, typer.Option("--list", help="Print every valid config.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print every excluded config with its reason.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Show the valid configs, and why others are not."""

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
    spec = problem.traced().spec
    the_arch = o.arch_of(arch)
    the_family = o.family_of(spec, the_arch, family)
    valid, excluded = [], []
    for config in the_family.candidates(spec, the_arch):
        exclusion = the_family.exclusion(spec, config, the_arch)
        if exclusion is None:
            valid.append(config)
        else:
            excluded.append((config, exclusion))
    reasons: dict[str, list[str]] = {}
    for _, exclusion in excluded:
        reasons.setdefault(exclusion.kind, []).append(exclusion.reason)
    default = the_family.default_config(spec, the_arch)
    if as_json:
        data = {
            "family": the_family.name,
            "spec": str(spec),
            "arch": the_arch.name,
            "candidates": len(valid) + len(excluded),
            "valid": len(valid),
            "default": default.to_dict(),
            "excluded": {kind: {"count": len(texts), "example": texts[0]} for kind, texts in reasons.items()},
        }
        if list_valid:
            data["configs"] = [config.to_dict() for config in valid]
        if every:
            data["exclusions"] = [
                {"config": config.to_dict(), "kind": exclusion.kind, "reason": exclusion.reason}
                for config, exclusion in excluded
            ]
        print_json(data)
        return
    out = console()
    out.print(
        f"{the_family.name} {spec} for {the_arch}: {len(valid)} of {len(valid) + len(excluded)} configs are valid.",
        markup=False,
    )
    out.print(f"Default: {brief(default.to_dict())}", markup=False)
    if list_valid:
        for config in valid:
            out.print(brief(config.to_dict()), markup=False)
    if every:
        for config, exclusion in excluded:
            out.print(f"{brief(config.to_dict())}: {exclusion.kind}: {exclusion.reason}", markup=False)
    if reasons:
        rows = [(kind, len(texts), texts[0]) for kind, texts in reasons.items()]
        out.print(table(("excluded for", "configs", "the first of them"), rows, right=("configs",)))
