"""Generated forward kernels in the emulator: right and clean in every flavour, on ragged, masked and grouped shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import TensorError
from flashsmith.generator.families import families_for
from flashsmith.generator.families.base import KernelConfig
from flashsmith.generator.families.forward_sm80 import ForwardSm80Config
from flashsmith.runtime.emulator.forward import buffer_of, emulate_forward
from flashsmith.runtime.emulator.report import Report
from flashsmith.runtime.problem import Problem, problem_of
from flashsmith.runtime.reference import attention_reference
from flashsmith.runtime.verify import error_and_tolerance, lse_fault

ARCH = ARCHS["sm_80"]
FLAVOURS = (
    ("plain", "greedy"),
    ("plain", "random"),
    ("race", "round_robin"),
    ("race", "random"),
    ("asan", "round_robin"),
)


def config(B_r: int, B_c: int, warps: int, stages: int, **other: Any) -> ForwardSm80Config:
    choices = {"q_in_registers": False, "softmax": "exact", "schedule": "linear", "min_blocks": 1, **other}
    return ForwardSm80Config(B_r=B_r, B_c=B_c, num_warps=warps, num_stages=stages, **choices)


@dataclass(frozen=True)
class Case:
    """Sizes of one call, its keyword arguments, and the config that computes it."""

    seqlen_q: int
    seqlen_k: int
    config: ForwardSm80Config
    heads: tuple[int, int] = (1, 1)
    batch: int = 1
    head_dim: int = 64
    head_dim_v: int = 0
    dtype: str = "bf16"
    call: Mapping[str, Any] = field(default_factory=dict)


def document_ids(lengths: list[int], batch: int) -> torch.Tensor:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return ids.expand(batch, -1).contiguous().int()


DOCUMENTS = document_ids([30, 1, 40, 20], batch=1)


def same_document(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


SLOPES = torch.tensor([[0.5, 0.25], [0.125, 1.0]])

CASES: Mapping[str, Case] = {
    "one tile": Case(32, 32, config(32, 32, 2, 1)),
    "ragged rows and keys": Case(70, 101, config(64, 32, 4, 2)),
    "one row": Case(1, 129, config(64, 64, 4, 1), dtype="fp16"),
    "one key": Case(40, 1, config(32, 32, 2, 2, softmax="optimistic")),
    "groups of heads, batch": Case(33, 65, config(32, 32, 2, 2), heads=(6, 2), batch=2),
    "causal": Case(100, 100, config(64, 32, 4, 2, schedule="longest_first"), call={"causal": True}),
    "causal, more keys than rows": Case(50, 131, config(32, 32, 2, 3), call={"causal": True}),
    "causal, rows without a key": Case(150, 40, config(64, 32, 4, 2, softmax="optimistic"), call={"causal": True}),
    "window": Case(90, 150, config(32, 32, 2, 2, q_in_registers=True), call={"window_size": (20, 5)}),
    "window on top of causal, one stage": Case(
        90, 90, config(32, 48, 2, 1), dtype="fp16", call={"causal": True, "window_size": (33, -1)}
    ),
    "softcap, optimistic": Case(
        64, 200, config(64, 64, 2, 1, softmax="optimistic", q_in_registers=True), call={"softcap": 5.0}
    ),
    "ALiBi": Case(40, 70, config(32, 32, 2, 1), heads=(2, 1), batch=2, call={"alibi_slopes": SLOPES, "causal": True}),
    "documents, classified by tile": Case(91, 91, config(32, 32, 2, 2), call={"mask_mod": same_document}),
    "head dims that are no multiple of 16": Case(40, 70, config(32, 32, 2, 2), head_dim=72, head_dim_v=40),
    "wide values": Case(40, 50, config(32, 32, 2, 1), head_dim=32, head_dim_v=96, dtype="fp16"),
    "head dim 256": Case(40, 50, config(32, 32, 2, 1), head_dim=256),
    "head dim 8": Case(40, 50, config(32, 32, 2, 2), head_dim=8),
    "many warps": Case(140, 70, config(128, 32, 8, 3), head_dim=32),
}


def problem_and_inputs(case: Case) -> tuple[Problem, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    problem = problem_of(dtype=case.dtype, head_dim=case.head_dim, head_dim_v=case.head_dim_v, **case.call)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    nheads, nheads_k = case.heads
    q = torch.randn(case.batch, case.seqlen_q, nheads, case.head_dim, dtype=dtype)
    k = torch.randn(case.batch, case.seqlen_k, nheads_k, case.head_dim, dtype=dtype)
    v = torch.randn(case.batch, case.seqlen_k, nheads_k, problem.spec.head_dim_v, dtype=dtype)
    return problem, q, k, v


def emulate(
    problem: Problem, used: ForwardSm80Config, *qkv: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    return emulate_forward(problem.spec, used, ARCH, *qkv, mask=problem.mask, score=problem.score, **options)


def check(problem: Problem, *qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    error, allowed = error_and_tolerance(problem, *qkv, out)
    assert error <= allowed
    _, exact = attention_reference(*qkv, mask=problem.mask, score=problem.score)
    assert lse_fault(lse, exact)[1] == ""


@pytest.mark.parametrize("name", CASES)
def test_right_and_clean_in_every_flavour(name: str) -> None:
    case = CASES[name]
    problem, q, k, v = problem_and_inputs(case)
    outputs = []
    for flavour, schedule in FLAVOURS:
        out, lse, report = emulate(problem, case.config, q, k, v, flavour=flavour, schedule=schedule)
        assert report.clean, report
        assert not report.bank_conflicts, report.bank_conflicts
        outputs.append((out, lse))
    check(problem, q, k, v, out=outputs[0][0], lse=outputs[0][1])
    for out, lse in outputs[1:]:
        assert torch.equal(out, outputs[0][0])
        assert torch.equal(lse, outputs[0][1])


def test_many_random_schedules_give_no_false_report_and_the_same_bits() -> None:
    case = CASES["causal, more keys than rows"]
    problem, q, k, v = problem_and_inputs(case)
    first = None
    for seed in range(8):
        for flavour in ("plain", "race"):
            out, _, report = emulate(problem, case.config, q, k, v, flavour=flavour, schedule="random", seed=seed)
            assert report.clean, report
            first = out if first is None else first
            assert torch.equal(out, first)


@pytest.mark.parametrize("layout", ["heads first", "packed", "offset", "broadcast heads", "inner stride"])
def test_any_strides(layout: str) -> None:
    problem = problem_of(dtype="fp16", head_dim=32)
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 45, 2, 32, dtype=torch.float16) for _ in range(3))
    if layout == "heads first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "packed":
        q, k, v = torch.stack((q, k, v), dim=3).unbind(3)
    elif layout == "offset":  # 2 bytes off: copied, as the launcher does
        q, k, v = (torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape) for t in (q, k, v))
    elif layout == "broadcast heads":
        k, v = (t[:, :, :1].expand(-1, -1, 2, -1) for t in (k, v))
    else:
        q = torch.stack((q, q), dim=-1).flatten(-2)[..., ::2]
    out, lse, report = emulate(problem, config(32, 32, 2, 2), q, k, v)
    assert report.clean, report
    check(problem, q, k, v, out=out, lse=lse)


def test_the_softmax_scale_reaches_the_kernel() -> None:
    problem, q, k, v = problem_and_inputs(CASES["one tile"])
    out, _, report = emulate(problem, CASES["one tile"].config, q, k, v, softmax_scale=0.7)
    assert report.clean
    error, allowed = error_and_tolerance(problem, q, k, v, out, softmax_scale=0.7)
    assert error <= allowed
    assert error_and_tolerance(problem, q, k, v, out)[0] > 10 * allowed


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_empty_tensors(sizes: tuple[int, int]) -> None:
    problem = problem_of(dtype="bf16", head_dim=16)
    q = torch.randn(1, sizes[0], 1, 16, dtype=torch.bfloat16)
    k = torch.randn(1, sizes[1], 1, 16, dtype=torch.bfloat16)
    out, lse, report = emulate(problem, config(32, 32, 2, 1), q, k, k)
    assert report.clean
    assert out.shape == q.shape
    assert not out.any()
    assert torch.equal(lse, torch.full((1, 1, sizes[0]), -torch.inf))


def test_a_tensor_on_another_device_is_refused() -> None:
    problem = problem_of(dtype="bf16", head_dim=16)
    q = torch.zeros(1, 4, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(TensorError, match=r"takes CPU tensors, but k is on meta\. Pass k\.cpu\(\)"):
        emulate(problem, config(32, 32, 2, 1), q, q.to("meta"), q)


def test_a_buffer_spans_a_view_and_no_more() -> None:
    base = torch.zeros(4, 10, dtype=torch.float16)
    view = base[1:3, 2:5]
    buffer = buffer_of(view, "view")
    assert buffer.address == base.data_ptr() + 2 * 12
    assert buffer.nbytes == 2 * (10 + 3)
    flipped = base.numpy()[::-1]
    assert buffer_of(flipped, "flipped").address == base.data_ptr()
    assert buffer_of(flipped, "flipped").nbytes == 80
    assert buffer_of(base[:0], "empty").nbytes == 0


@lru_cache
def space_of(dtype: str, head_dim: int, head_dim_v: int) -> tuple[KernelConfig, ...]:
    spec = problem_of(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, causal=True).spec
    return families_for(spec, ARCH)[0].space(spec, ARCH)


@settings(max_examples=12, derandomize=True)
@given(
    data=st.data(),
    dtype=st.sampled_from(["fp16", "bf16"]),
    head_dim=st.sampled_from([8, 24, 64, 96, 128]),
    head_dim_v=st.sampled_from([16, 40, 64]),
    sizes=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3)]),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 40), st.integers(-1, 40)),
    schedule=st.sampled_from(["greedy", "reverse_greedy", "random"]),
)
def test_any_config_of_the_space_at_any_size(
    data: st.DataObject,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    sizes: tuple[int, int],
    heads: tuple[int, int],
    causal: bool,
    window: tuple[int, int],
    schedule: str,
) -> None:
    used = data.draw(st.sampled_from(space_of(dtype, head_dim, head_dim_v)))
    assert isinstance(used, ForwardSm80Config)
    # The schedule of the longest rows first is for masks alone.
    call = {"causal": causal, "window_size": window}
    if not causal and max(window) < 0:
        used = replace(used, schedule="linear")
    case = Case(*sizes, used, heads, 1, head_dim, head_dim_v, dtype, call)
    problem, q, k, v = problem_and_inputs(case)
    out, lse, report = emulate(problem, used, q, k, v, schedule=schedule)
    assert report.clean, report
    assert not report.bank_conflicts
    check(problem, q, k, v, out=out, lse=lse)
