"""`emulated_attention`: what `flashsmith.attention` computes, on CPU tensors, by the same kernel in the emulator."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import torch

from ..generator.arch import Arch, arch_from_name
from ..generator.errors import TensorError
from ..generator.families import choose_family
from ..generator.families.base import KernelConfig
from ..generator.language.cuda import check_tables
from ..generator.spec import ProblemShape
from .emulator.forward import emulate_forward
from .emulator.report import Report
from .preparation import problem_of_call
from .problem import Problem
from .store_choice import choose_config
from .tensors import check_alibi_slopes, check_inputs, check_no_gradient, readable

#: The keyword arguments of `attention` that state its problem.
_CALL = ("causal", "window_size", "softcap", "alibi_slopes", "softmax_scale", "mask_mod", "score_mod")
_OWN = ("return_lse", "arch", "config", "flavour", "schedule", "seed")


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
    _check_keywords(call)
    inputs = check_inputs(q, k, v)
    if call.get("alibi_slopes") is not None:
        check_alibi_slopes(call["alibi_slopes"], inputs, q.device)
    problem = problem_of_call(call, inputs)
    check_no_gradient(q, k, v, *problem.tables)
    _check_tables(problem, inputs.shape)
    if config is None:
        q, k, v = readable("q", q), readable("k", k), readable("v", v)
        strides = {name: tuple(tensor.stride()[:3]) for name, tensor in (("q", q), ("k", k), ("v", v))}
        family = choose_family(problem.spec, arch, strides=strides, shape=inputs.shape).family
        config = choose_config(problem.spec, arch, None, inputs.shape, family).config
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


def _check_keywords(call: dict[str, Any]) -> None:
    """Raises TypeError, as Python does, for a keyword that neither `attention` nor the emulator takes."""
    for name in call:
        if name not in _CALL:
            close = get_close_matches(name, (*_CALL, *_OWN), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" It takes {', '.join((*_CALL, *_OWN))}."
            raise TypeError(f"emulated_attention() got an unexpected keyword argument {name!r}.{hint}")


def _check_tables(problem: Problem, shape: ProblemShape) -> None:
    """Raises TensorError for a captured tensor that the launch on a GPU would refuse: see preparation.py."""
    for traced in (problem.mask, problem.score):
        if traced is None:
            continue
        check_tables(traced, batch=shape.batch, nheads=shape.nheads, seqlen_q=shape.seqlen_q, seqlen_k=shape.seqlen_k)
        for slot, table in zip(traced.graph.tables, traced.tables, strict=True):
            device = getattr(table, "device", "cpu")  # NumPy's arrays are on the CPU, too
            if getattr(device, "type", str(device)) != "cpu":
                raise TensorError(
                    f"The captured tensor {slot.name!r} must be on the CPU, as q, k and v are, but it is on {device}."
                    " Move it with .cpu()."
                )
