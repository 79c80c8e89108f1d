"""`emulated_attention`: what `flashsmith.attention` computes, on CPU tensors, by the same kernel in the emulator."""

from __future__ import annotations

from typing import Any

import torch

from ..generator.arch import Arch, arch_from_name
from ..generator.families import choose_family
from ..generator.families.base import KernelConfig
from .emulator.forward import emulate_forward
from .emulator.report import Report
from .preparation import problem_of_call
from .store import resolve
from .tensors import check_alibi_slopes, check_inputs, readable


def emulated_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = False,
    arch: str | Arch = "sm_80",
    config: KernelConfig | None = None,
    flavour: str = "plain",
    schedule: str = "round_robin",
    seed: int = 0,
    **call: Any,
) -> Any:
    """What `attention(q, k, v, return_lse=return_lse, **call)` would return, computed on the CPU: slow, and checked.

    The kernel is the one that a GPU of `arch` would run, with `config` or the one its tuned records name; `flavour`,
    `schedule` and `seed` are the emulator's. Raises as `attention` does, MissingComponentError without a C++ compiler,
    and EmulatorError where the kernel breaks a rule.
    """
    out, lse, report = emulated_run(
        q, k, v, arch=arch, config=config, flavour=flavour, schedule=schedule, seed=seed, **call
    )
    report.require_clean()
    return (out, lse) if return_lse else out


def emulated_run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    arch: str | Arch = "sm_80",
    config: KernelConfig | None = None,
    flavour: str = "plain",
    schedule: str = "round_robin",
    seed: int = 0,
    **call: Any,
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """(out, lse, report) of `emulated_attention`, whatever the report says."""
    arch = arch_from_name(arch) if isinstance(arch, str) else arch
    inputs = check_inputs(q, k, v)
    if call.get("alibi_slopes") is not None:
        check_alibi_slopes(call["alibi_slopes"], inputs, q.device)
    problem = problem_of_call(call, inputs)
    if config is None:
        q, k, v = readable("q", q), readable("k", k), readable("v", v)
        strides = {name: tuple(tensor.stride()[:3]) for name, tensor in (("q", q), ("k", k), ("v", v))}
        family = choose_family(problem.spec, arch, strides=strides, shape=inputs.shape).family
        config = resolve(problem.spec, arch, None, inputs.shape, family).config
    return emulate_forward(
        problem.spec,
        config,
        arch,
        q,
        k,
        v,
        mask=problem.mask,
        score=problem.score,
        softmax_scale=call.get("softmax_scale"),
        flavour=flavour,
        schedule=schedule,
        seed=seed,
    )
