"""For the tests of generated Hopper kernels in the emulator: a case, its inputs, its run and its check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families.forward_sm90 import ForwardSm90Config
from flashsmith.runtime.emulator.forward import emulate_forward
from flashsmith.runtime.emulator.report import Report
from flashsmith.runtime.problem import Problem, problem_of
from flashsmith.runtime.reference import attention_reference
from flashsmith.runtime.verify import error_and_tolerance, lse_fault

ARCH = ARCHS["sm_90"]
FLAVOURS = (
    ("plain", "greedy"),
    ("plain", "random"),
    ("race", "round_robin"),
    ("race", "random"),
    ("asan", "reverse"),
)


def config(warpgroups: int, B_c: int, **other: Any) -> ForwardSm90Config:
    choices = {"num_stages": 2, "q_stages": 1, "softmax": "exact", "pingpong": False, "schedule": "grid"}
    choices |= {"p_operand": "registers", "pack_gqa": False, **other}
    return ForwardSm90Config(num_warpgroups=warpgroups, B_c=B_c, **choices)


@dataclass(frozen=True)
class Case:
    """Sizes of one call, its keyword arguments, and the config that computes it with `blocks` blocks at most."""

    seqlen_q: int
    seqlen_k: int
    config: ForwardSm90Config
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    head_dim: int = 64
    head_dim_v: int = 0
    dtype: str = "bf16"
    blocks: int = 1
    call: Mapping[str, Any] = field(default_factory=dict)


def problem_and_inputs(case: Case, factor: float = 1.0) -> tuple[Problem, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    problem = problem_of(dtype=case.dtype, head_dim=case.head_dim, head_dim_v=case.head_dim_v, **case.call)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    nheads, nheads_k = case.heads
    q = factor * torch.randn(case.batch, case.seqlen_q, nheads, case.head_dim)
    k = torch.randn(case.batch, case.seqlen_k, nheads_k, case.head_dim, dtype=dtype)
    v = torch.randn(case.batch, case.seqlen_k, nheads_k, problem.spec.head_dim_v, dtype=dtype)
    return problem, q.to(dtype), k, v


def emulate(case: Case, problem: Problem, *qkv: torch.Tensor, **options: Any) -> tuple[Any, Any, Report]:
    options = {"max_blocks": case.blocks, **options}
    return emulate_forward(problem.spec, case.config, ARCH, *qkv, mask=problem.mask, score=problem.score, **options)


def check(problem: Problem, *qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    error, allowed = error_and_tolerance(problem, *qkv, out)
    assert error <= allowed
    _, exact = attention_reference(*qkv, mask=problem.mask, score=problem.score)
    assert lse_fault(lse, exact)[1] == ""
