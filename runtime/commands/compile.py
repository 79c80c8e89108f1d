"""`flashsmith compile`: one kernel through NVRTC, and what the compiler reports of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .output import print_json, print_text

EXAMPLES = (
    "flashsmith compile --head-dim 128 --causal --arch sm_90",
    "flashsmith compile -d 256 --arch sm_86 --set B_c=32 --out kernel.cubin --json",
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
    gate: Annotated[bool, typer.Option("--gate/--no-gate", help="Refuse spills, stack frames and advisories.")] = True,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the cubin to this file.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Compile the kernel for a problem; needs no GPU."""
    from ...generator.errors import UsageError
    from ..compiler import compile_kernel, kernel_cache, kernel_key

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
    kernel = compile_kernel(spec, config, the_arch, family=the_family, gate=gate, run_here=False)
    need = the_family.resources(spec, config)
    resident = the_arch.blocks_per_sm(
        threads=need.threads, registers=kernel.report.registers, smem_bytes=need.smem_bytes
    )
    if out is not None:
        try:
            out.write_bytes(kernel.cubin)
        except OSError as error:
            raise UsageError(
                f"--out {out} cannot be written: {error.strerror}. Name a file in an existing folder."
            ) from None
    folder = kernel_cache().path_of(kernel_key(spec, config, the_arch, family=the_family))
    kept = folder.is_dir()
    report = kernel.report.to_dict()
    if as_json:
        print_json(
            {
                "family": the_family.name,
                "spec": str(spec),
                "arch": the_arch.name,
                "config": config.to_dict(),
                "config_source": origin,
                "entry": kernel.entry,
                "report": {**report, "static_smem_bytes": report.pop("smem_bytes")},
                "dynamic_smem_bytes": need.smem_bytes,
                "threads": need.threads,
                "blocks_per_sm": resident,
                "cubin_bytes": len(kernel.cubin),
                "seconds": round(kernel.seconds, 3),
                "cached": kernel.cached,
                "nvrtc": kernel.nvrtc_version,
                "key": kernel.key,
                "folder": str(folder) if kept else None,
                "path": str(out) if out is not None else None,
            }
        )
        return
    print_text(
        f"{the_family.name} {spec} for {the_arch}\n"
        f"config     {config} ({origin})\n"
        f"compiler   {kernel}\n"
        f"resources  {kernel.report.registers} registers, {need.threads} threads, {need.smem_bytes} bytes of shared"
        f" memory: {resident} blocks per SM\n"
        f"cubin      {len(kernel.cubin)} bytes in {out if out is not None else folder if kept else 'memory only'}"
    )
    for warning in kernel.report.warnings:
        print_text(f"warning    {warning}")
