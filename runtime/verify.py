"""The one tolerance rule, and `verify_config`: no kernel wins, or ships, that has not passed it.

Rule: max|out - ref| <= 2 * max|ref16 - ref| + atol, where `ref` is fp64 and `ref16` is torch's own arithmetic in the
inputs' 16 bits (FlashAttention's rule; its baseline is no better than a right kernel). `atol` is the rounding of the
output itself, eps/2 * max|ref|, and 1e-5: on a handful of elements `ref16` may be right by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..generator.arch import Arch
from ..generator.errors import LaunchError, VerifyError
from ..generator.families import family_named
from ..generator.families.base import Family, KernelConfig
from ..generator.spec import AttentionSpec, ProblemShape
from .launch import prepare
from .problem import Problem
from .reference import attention_16bit, attention_reference
from .synthetic import synthetic_problem
from .tensors import check_inputs, check_softmax_scale, torch_dtype

if TYPE_CHECKING:
    from .device import CudaBackend

FACTOR = 2.0
ATOL = 1e-5
#: The LSE is fp32 throughout: its error is that of fp32 sums and of ex2.approx and lg2.approx.
LSE_ATOL, LSE_RTOL = 2e-4, 2e-5
#: Elements in front of and behind each output that the kernel must not touch.
GUARD = 1024

#: Runs a kernel on (q, k, v) for a problem: (out, lse, what is wrong with the run or "").
Run = Callable[[Problem, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, str]]


@dataclass(frozen=True, slots=True)
class Trial:
    """Sizes of one verification, and the layout of its inputs: "dense", or "strided" (heads before rows)."""

    shape: ProblemShape
    layout: str = "dense"

    def __str__(self) -> str:
        return f"{self.shape} {self.layout}"


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one trial: `fault` is "" if it passed."""

    trial: Trial
    error: float
    allowed: float
    lse_error: float
    fault: str = ""

    @property
    def ok(self) -> bool:
        return not self.fault

    def __str__(self) -> str:
        return f"{self.trial}: {self.fault or f'ok, error {self.error:.2e} of {self.allowed:.2e} allowed'}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a config is right, and each check that said so; checks stop at the first fault."""

    spec: AttentionSpec
    config: KernelConfig
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def worst(self) -> float:
        """The largest error as a part of what is allowed."""
        return max((check.error / check.allowed for check in self.checks), default=math.inf)

    def __str__(self) -> str:
        bad = [check for check in self.checks if not check.ok]
        head = "right" if self.ok else "wrong"
        return f"{self.config} for {self.spec} is {head}: {'; '.join(map(str, bad or self.checks))}"

    def require_ok(self) -> Verdict:
        """This verdict, if it is good. Raises VerifyError with the first fault otherwise."""
        if not self.ok:
            raise VerifyError(f"A kernel must match the reference. {self}. Choose another config, and report this one.")
        return self


def allowed_error(exact: torch.Tensor, rough: torch.Tensor) -> float:
    """The right-hand side of the rule, from the fp64 and the 16-bit reference."""
    if exact.numel() == 0:
        return ATOL
    rounding = torch.finfo(rough.dtype).eps / 2 * float(exact.abs().max())
    return FACTOR * float((rough.double() - exact).abs().max()) + rounding + ATOL


def max_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """max|out - exact|; infinite for a NaN, or where one is infinite and the other not."""
    if out.numel() == 0:
        return 0.0
    difference = (out.double() - exact.double()).abs()
    difference = torch.where(out.double() == exact.double(), 0.0, difference)  # -inf - -inf is NaN
    return math.inf if bool(difference.isnan().any()) else float(difference.max())


def error_and_tolerance(
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    softmax_scale: float | None = None,
) -> tuple[float, float]:
    """(max|out - ref|, what the rule allows) for one output; the error is infinite if `out` holds a NaN."""
    mods: dict[str, Any] = {"mask": problem.mask, "score": problem.score, "softmax_scale": softmax_scale}
    exact, _ = attention_reference(q, k, v, **mods)
    return max_error(out, exact), allowed_error(exact, attention_16bit(q, k, v, **mods))


def lse_fault(lse: torch.Tensor, exact: torch.Tensor) -> tuple[float, str]:
    """(max|lse - exact| where both are finite, what is wrong or ""): -inf must stand where it belongs."""
    if lse.numel() == 0:
        return 0.0, ""
    empty = exact == -math.inf
    if not torch.equal(lse == -math.inf, empty):
        return math.inf, "the LSE is -inf elsewhere than for the rows that see no key"
    error = max_error(lse.masked_fill(empty, 0.0), exact.masked_fill(empty, 0.0))
    bound = LSE_ATOL + LSE_RTOL * float(exact.masked_fill(empty, 0.0).abs().max())
    return error, "" if error <= bound else f"the LSE is off by {error:.2e}, {bound:.2e} is allowed"


def trials_for(config: KernelConfig, *, thorough: bool) -> tuple[Trial, ...]:
    """Sizes that reach every part of a kernel: ragged and whole tiles, one row, more rows than keys, every stage.

    `thorough` is for a GPU; the emulator gets the same kinds, smaller. A config that packs the heads of a group gets
    groups that it can pack.
    """
    B_r, B_c = int(getattr(config, "B_r", 64)), int(getattr(config, "B_c", 64))
    stages = int(getattr(config, "num_stages", 1))
    whole = (stages + 2) * B_c
    packed = bool(getattr(config, "pack_gqa", False))
    if not thorough:
        return (
            Trial(ProblemShape(1, B_r + 5, whole + 3, 2, 1)),
            Trial(ProblemShape(1, B_c + 9, B_c - 7, *((4, 1) if packed else (1, 1))), "strided"),
        )
    return (
        Trial(ProblemShape(2, B_r + B_r // 2 + 1, whole + 3, 4, 2)),
        Trial(ProblemShape(1, 2 * B_r + 5, B_c - 7, 4 if packed else 3, 1), "strided"),
        Trial(ProblemShape(3, 1, whole - 1, 16 if packed else 6, 2)),
        Trial(ProblemShape(1, 2 * B_r, 2 * whole, *((64, 1) if packed else (2, 2))), "strided"),
        Trial(ProblemShape(2, 515, 1030, 2, 1)),
    )


def verify_config(
    problem: Problem | AttentionSpec,
    config: KernelConfig,
    arch: Arch,
    *,
    device: str = "cuda",
    family: Family | None = None,
    trials: Sequence[Trial] | None = None,
    seed: int = 0,
    flavour: str = "plain",
    schedule: str = "greedy",
) -> Verdict:
    """Whether `config`'s kernel computes the spec, on `device` ("cuda", "cuda:1", or "emulator").

    Inputs are normal, surrounded by NaN that must not be read; outputs start as NaN between guards; each trial runs
    twice and must give the same bits. Captured numbers take values that matter at these sizes, captured tensors are
    made to fit; a trial with the problem's own numbers follows where it has some. Raises CompileError, LaunchError and
    EmulatorError where no kernel could run.
    """
    if isinstance(problem, AttentionSpec):
        problem = Problem(problem)
    family = family or family_named(config.family)
    emulated = device == "emulator"
    chosen = tuple(trials) if trials is not None else trials_for(config, thorough=not emulated)
    where = torch.device("cpu" if emulated else device)
    numbers: list[Problem | None] = [None] * len(chosen)
    if trials is None and any(traced is not None and traced.scalars for traced in (problem.mask, problem.score)):
        chosen, numbers = (*chosen, chosen[0]), [*numbers, problem]
    checks: list[Check] = []
    with _runner(config, arch, family, emulated, flavour, schedule) as run:
        for turn, (trial, given) in enumerate(zip(chosen, numbers, strict=True)):
            made = synthetic_problem(problem.spec, trial.shape, device=where, seed=seed + turn, numbers=given)
            checks.append(_check(run, made, trial, where, seed + turn, repeat=not emulated))
            if not checks[-1].ok:
                break
    return Verdict(problem.spec, config, tuple(checks))


def _check(run: Run, problem: Problem, trial: Trial, device: torch.device, seed: int, *, repeat: bool) -> Check:
    q, k, v = inputs_of(problem.spec, trial, device=device, seed=seed)
    mods: dict[str, Any] = {"mask": problem.mask, "score": problem.score}
    exact, exact_lse = attention_reference(q, k, v, **mods)
    allowed = allowed_error(exact, attention_16bit(q, k, v, **mods))
    out, lse, fault = run(problem, q, k, v)
    error = max_error(out, exact)
    lse_error, wrong_lse = lse_fault(lse, exact_lse)
    check = Check(trial, error, allowed, lse_error)
    if fault:
        return replace(check, fault=fault)
    if not error <= allowed:
        return replace(check, fault=f"the output is off by {error:.2e}, {allowed:.2e} is allowed")
    if wrong_lse:
        return replace(check, fault=wrong_lse)
    if repeat:
        again, lse_again, fault = run(problem, q, k, v)
        if fault or not (_same_bits(out, again) and _same_bits(lse, lse_again)):
            return replace(check, fault=fault or "a second run gave other bits")
    return check


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.view(bits), other.view(bits))


def inputs_of(
    spec: AttentionSpec, trial: Trial, *, device: torch.device, seed: int = 0, surround: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal q, k, v of a trial: views into buffers of NaN with `surround` more rows behind each batch item."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = trial.shape, torch_dtype(spec.dtype)
    found = []
    for rows, heads, dim in (
        (shape.seqlen_q, shape.nheads, spec.head_dim),
        (shape.seqlen_k, shape.nheads_k, spec.head_dim),
        (shape.seqlen_k, shape.nheads_k, spec.head_dim_v),
    ):
        values = torch.randn(shape.batch, rows, heads, dim, generator=generator).to(device=device, dtype=dtype)
        sizes = (shape.batch, rows + surround, heads, dim)
        if trial.layout == "strided":
            whole = torch.full((sizes[0], sizes[2], sizes[1], sizes[3]), math.nan, dtype=dtype, device=device)
            view = whole.transpose(1, 2)[:, :rows]
        else:
            view = torch.full(sizes, math.nan, dtype=dtype, device=device)[:, :rows]
        found.append(view.copy_(values))
    q, k, v = found
    return q, k, v


@contextmanager
def _runner(
    config: KernelConfig, arch: Arch, family: Family, emulated: bool, flavour: str, schedule: str
) -> Iterator[Run]:
    """A block in which its value runs one config's kernel; what was loaded for it is unloaded at the end."""
    if emulated:
        yield partial(_emulate, config, arch, flavour, schedule)
        return
    from .device import CudaBackend

    backend = CudaBackend()
    try:
        yield partial(_on_gpu, config, family, backend)
    finally:
        with suppress(LaunchError):  # a kernel that broke the context has already said so
            backend.unload()


def _emulate(
    config: KernelConfig,
    arch: Arch,
    flavour: str,
    schedule: str,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, str]:
    from .emulator.forward import emulate_forward

    out, lse, report = emulate_forward(
        problem.spec, config, arch, q, k, v, mask=problem.mask, score=problem.score, flavour=flavour, schedule=schedule
    )
    return out, lse, "" if report.clean else f"the emulator reports {report.findings[0]}"


def _on_gpu(
    config: KernelConfig,
    family: Family,
    backend: CudaBackend,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, str]:
    plan = prepare(
        problem,
        config,
        family=family,
        shape=check_inputs(q, k, v).shape,
        q=q,
        k=k,
        v=v,
        softmax_scale=check_softmax_scale(None, problem.spec.head_dim),
        backend=backend,
    )
    out, out_guards = guarded(plan.out_shape, q.dtype, q.device)
    lse, lse_guards = guarded(plan.lse_shape, torch.float32, q.device)
    addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream(q.device)
        plan.launch(*addresses, problem.tables, stream.cuda_stream)
        stream.synchronize()
    touched = any(not bool(guard.isnan().all()) for guard in (*out_guards, *lse_guards))
    return out, lse, "the kernel wrote outside of its outputs" if touched else ""


def guarded(
    sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A contiguous tensor of NaN, and the `GUARD` elements of NaN in front of and behind it."""
    count = math.prod(sizes)
    whole = torch.full((count + 2 * GUARD,), math.nan, dtype=dtype, device=device)
    return whole[GUARD : GUARD + count].view(*sizes), (whole[:GUARD], whole[GUARD + count :])
