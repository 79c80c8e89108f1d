"""`flashsmith generate`: the CUDA source of one kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .output import print_json, print_text

EXAMPLES = (
    "flashsmith generate --head-dim 128 --causal --arch sm_90",
    "flashsmith generate -d 64 --window 1024,0 --set B_c=32 --section kernel",
    "flashsmith generate -d 96 --mask-mod my_masks.py:blocks --out kernel.cu",
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
    seqlen: o.SeqlenQ = "4k",
    settings: o.Settings = None,
    default: o.UseDefault = False,
    section: Annotated[str, typer.Option("--section", help="Print this part alone: header, types, kernel, ...")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file instead.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Write the CUDA source of the kernel for a problem."""
    from ...generator.errors import UsageError, unknown_name_message
    from ...generator.rendering import render

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
    shape = o.shape_from(seqlen, head_dim=head_dim)
    config, origin = o.config_from(spec, the_arch, the_family, shape, settings=settings, use_default=default)
    source = render(spec, config, the_arch, family=the_family)
    names = [part.name for part in source.sections]
    if section and section not in names:
        raise UsageError(unknown_name_message("section", section, names))
    text = source.section(section).text if section else source.text
    if out is not None:
        _write(out, text)
    if as_json:
        print_json(
            {
                "family": the_family.name,
                "spec": str(spec),
                "arch": the_arch.name,
                "config": config.to_dict(),
                "config_source": origin,
                "entry": source.entry,
                "digest": source.digest,
                "sections": names,
                "path": str(out) if out is not None else None,
                "text": text if out is None else None,
            }
        )
    elif out is None:
        print_text(text)
    else:
        print_text(f"{out}: {text.count(chr(10))} lines, {source}")


def _write(path: Path, text: str) -> None:
    from ...generator.errors import UsageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--out {path} cannot be written: {error.strerror}. Name a file in an existing folder."
        ) from None
