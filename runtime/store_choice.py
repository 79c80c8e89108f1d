"""The config of a call, for `attention` and the command line alike: the nearest tuned one that the build gate passes.

A record made for another spec, or by another compiler, may name a config that spills in this kernel. It is passed over
for the next one, and at last for a default that fits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..generator.arch import Arch
from ..generator.errors import BuildGateError, CompileError, MissingComponentError
from ..generator.families.base import Family, KernelConfig
from ..generator.spec import AttentionSpec, ProblemShape
from .store import Resolution, resolve
from .store_reading import warn_once

#: Lengths are told apart by this many steps an octave when a config is looked up.
STEPS_PER_OCTAVE = 8

#: Why the build gate refuses a config for the spec at hand; "" for one that passes, and where nobody can tell.
Refusal = Callable[[KernelConfig], str]


def choose_config(
    spec: AttentionSpec,
    arch: Arch,
    device_name: str | None,
    shape: ProblemShape,
    family: Family,
    *,
    refusal: Refusal | None = None,
    default: Callable[[], KernelConfig] | None = None,
) -> Resolution:
    """The config that a call of `spec` at `shape` uses; lengths within an eighth of an octave share one answer.

    `refusal` and `default` (the first of the family's defaults that fits) ask this machine's compiler for code that
    need not run here, where they are not given.
    """
    return resolve(
        spec,
        arch,
        device_name,
        rounded_shape(shape),
        family,
        refusal=refusal or (lambda config: gate_refusal(spec, config, arch, family, run_here=False)),
        default=default or (lambda: default_that_fits(spec, arch, family)),
    )


def gate_refusal(spec: AttentionSpec, config: KernelConfig, arch: Arch, family: Family, *, run_here: bool) -> str:
    """Why the build gate refuses the kernel, "" if it passes. Compiles what the cache does not hold.

    Also "" where it cannot be compiled at all: whoever needs its machine code is told why.
    """
    from .compiler import compile_kernel
    from .gate import gate_reasons

    try:
        report = compile_kernel(spec, config, arch, family=family, gate=False, run_here=run_here).report
    except BuildGateError as error:
        return str(error)
    except (CompileError, MissingComponentError) as error:
        warn_once(f"{config} for {spec} is not held against the build gate: {error}", level=logging.INFO)
        return ""
    return "; ".join(gate_reasons(report))


def default_that_fits(spec: AttentionSpec, arch: Arch, family: Family) -> KernelConfig:
    """The first of the family's defaults that passes the build gate; the very first where it cannot be compiled."""
    from .compiler import fitting_default

    try:
        return fitting_default(spec, arch, family=family, run_here=False)
    except (CompileError, MissingComponentError) as error:
        config = family.default_config(spec, arch)
        warn_once(f"{config} for {spec} is not held against the build gate: {error}", level=logging.INFO)
        return config


def rounded_shape(shape: ProblemShape) -> ProblemShape:
    """`shape` with both lengths `rounded`."""
    return ProblemShape(shape.batch, rounded(shape.seqlen_q), rounded(shape.seqlen_k), shape.nheads, shape.nheads_k)


def rounded(length: int) -> int:
    """`length` to the nearest eighth of an octave, the same for every call; powers of two stay what they are."""
    if length < 2 * STEPS_PER_OCTAVE:
        return length
    octave = length.bit_length() - 1
    step = round((length / (1 << octave) - 1) * STEPS_PER_OCTAVE)
    return (1 << octave) + (step << octave) // STEPS_PER_OCTAVE
