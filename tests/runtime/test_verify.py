"""The tolerance rule, and that a wrong kernel does not pass it."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import dataclasses
import math
from contextlib import contextmanager

import pytest
import torch

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.errors import VerifyError
from flashsmith.generator.families import family_named
from flashsmith.generator.spec import AttentionSpec, ProblemShape
from flashsmith.runtime import verify
from flashsmith.runtime.problem import problem_of
from flashsmith.runtime.reference import attention_reference
from flashsmith.runtime.verify import (
    Trial,
    error_and_tolerance,
    guarded,
    inputs_of,
    lse_fault,
    max_error,
    trials_for,
    verify_config,
)

FAMILY = family_named("forward_sm80")
ARCH = arch_from_name("sm_90")
SPEC = AttentionSpec(dtype="bf16", head_dim=64)
CONFIG = FAMILY.default_config(SPEC, ARCH)


def right(problem, q, k, v):
    out, lse = attention_reference(q, k, v, mask=problem.mask, score=problem.score)
    return out.to(q.dtype), lse.float(), ""


def verdict_of(run, problem=SPEC, monkeypatch=None, **kwargs):
    """verify_config with `run` in the place of the kernel, twice a trial as on a GPU."""

    @contextmanager
    def runner(*_):
        yield run

    monkeypatch.setattr(verify, "_runner", runner)
    return verify_config(problem, CONFIG, ARCH, device="cpu", **kwargs)


def test_a_right_kernel_passes_every_trial(monkeypatch):
    seen = []

    def run(problem, q, k, v):
        seen.append((tuple(q.shape), tuple(k.shape), q.stride(1) > q.stride(2)))
        return right(problem, q, k, v)

    problem = problem_of(dtype="bf16", head_dim=64, causal=True, window_size=(4096, -1), softcap=30.0)
    verdict = verdict_of(run, problem, monkeypatch)
    assert verdict.ok and verdict.require_ok() is verdict and 0 < verdict.worst < 1
    assert len(verdict.checks) == len(trials_for(CONFIG, thorough=True)) + 1 and len(seen) == 2 * len(verdict.checks)
    assert {dense for _, _, dense in seen} == {True, False}
    assert any(q[1] > k[1] for q, k, _ in seen), "rows that see no key"
    assert any(q[1] == 1 for q, _, _ in seen)
    assert any(q[2] > k[2] for q, k, _ in seen), "grouped heads"


def faulty(change):
    def run(problem, q, k, v):
        out, lse, fault = right(problem, q, k, v)
        return change(out.clone(), lse.clone(), q, k, v, fault)

    return run


def half_written(out, lse, q, k, v, fault):
    out[:, out.shape[1] // 2 :] = math.nan
    return out, lse, fault


def last_key_lost(out, lse, q, k, v, fault):
    out, lse = attention_reference(q, k[:, :-1], v[:, :-1])
    return out.to(q.dtype), lse.float(), fault


def one_row_shifted(out, lse, q, k, v, fault):
    out[:, 0] = out[:, -1] + 0.05
    return out, lse, fault


def lse_in_base_two(out, lse, q, k, v, fault):
    return out, lse * math.log2(math.e), fault


def lse_never_infinite(out, lse, q, k, v, fault):
    lse[0, 0, 0] = -math.inf
    return out, lse, fault


def guard_touched(out, lse, q, k, v, fault):
    return out, lse, "the kernel wrote outside of its outputs"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (half_written, "the output is off by inf"),
        (last_key_lost, "the output is off by"),
        (one_row_shifted, "the output is off by"),
        (lse_in_base_two, "the LSE is off by"),
        (lse_never_infinite, "the LSE is -inf elsewhere"),
        (guard_touched, "outside of its outputs"),
    ],
    ids=lambda x: x.__name__ if callable(x) else None,
)
def test_a_wrong_kernel_does_not(monkeypatch, change, words):
    verdict = verdict_of(faulty(change), monkeypatch=monkeypatch)
    assert not verdict.ok and len(verdict.checks) == 1 and words in str(verdict)
    with pytest.raises(VerifyError, match=r"must match the reference.*B_r=.* is wrong: B2 N"):
        verdict.require_ok()


def test_other_bits_in_the_second_run_are_a_fault(monkeypatch):
    turn = []

    def run(problem, q, k, v):
        turn.append(0)
        out, lse, _ = right(problem, q, k, v)
        if len(turn) % 2 == 0:
            out[0, 0, 0, 0] += 2**-10
        return out, lse, ""

    assert "other bits" in str(verdict_of(run, monkeypatch=monkeypatch))


def test_an_empty_verdict_is_not_good(monkeypatch):
    assert not verdict_of(right, monkeypatch=monkeypatch, trials=()).ok


def test_inputs_lie_in_nan():
    trial = Trial(ProblemShape(2, 5, 7, 4, 2))
    for layout in ("dense", "strided"):
        q, k, v = inputs_of(SPEC, dataclasses.replace(trial, layout=layout), device=torch.device("cpu"), surround=3)
        assert torch.isfinite(q).all() and torch.isfinite(k).all() and torch.isfinite(v).all()
        around = k.as_strided((k.untyped_storage().nbytes() // 2,), (1,), 0)
        assert int(around.isnan().sum()) == 2 * 3 * 2 * 64


def test_guards_surround_an_output():
    out, (before, behind) = guarded((2, 3), torch.float16, torch.device("cpu"))
    assert out.isnan().all() and out.is_contiguous() and out.data_ptr() % 16 == 0
    assert before.data_ptr() + 2 * before.numel() == out.data_ptr()
    assert behind.data_ptr() == out.data_ptr() + 2 * out.numel()


def test_errors_count_nan_and_infinity():
    inf, nan = math.inf, math.nan
    assert max_error(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])) == inf
    assert max_error(torch.tensor([1.0, -inf]), torch.tensor([1.0, -inf])) == 0
    assert max_error(torch.tensor([1.0, inf]), torch.tensor([1.0, -inf])) == inf
    assert max_error(torch.tensor([]), torch.tensor([])) == 0
    assert lse_fault(torch.tensor([-inf, 1.0]), torch.tensor([-inf, 1.0])) == (0.0, "")
    assert "elsewhere" in lse_fault(torch.tensor([-inf, 1.0]), torch.tensor([0.0, 1.0]))[1]
    assert "off by" in lse_fault(torch.tensor([nan]), torch.tensor([1.0]))[1]


def test_error_and_tolerance_of_one_output():
    q, k, v = inputs_of(SPEC, Trial(ProblemShape(1, 20, 30, 2, 1)), device=torch.device("cpu"))
    problem = problem_of(dtype="bf16", head_dim=64, causal=True)
    out, _, _ = right(problem, q, k, v)
    error, allowed = error_and_tolerance(problem, q, k, v, out)
    assert 0 < error < allowed < 0.1
    assert error_and_tolerance(problem, q, k, v, out * math.nan)[0] == math.inf


@pytest.mark.parametrize("call", [{}, {"causal": True, "softcap": 20.0}])
def test_a_real_kernel_on_the_emulator(call):
    problem = problem_of(dtype="fp16", head_dim=32, **call)
    config = FAMILY.default_config(problem.spec, ARCH)
    verdict = verify_config(problem, config, ARCH, device="emulator")
    assert verdict.ok, str(verdict)


def test_a_kernel_with_a_fault_on_the_emulator(monkeypatch):
    from flashsmith.runtime.emulator import forward

    rendered = forward.render

    def mutant(*args, **kwargs):
        source = rendered(*args, **kwargs)
        old, new = "args.softmax_scale_log2", "(1.1f * args.softmax_scale_log2)"
        assert old in source.section("kernel").text
        sections = tuple(
            dataclasses.replace(s, text=s.text.replace(old, new)) if s.name == "kernel" else s for s in source.sections
        )
        return dataclasses.replace(source, sections=sections)

    monkeypatch.setattr(forward, "render", mutant)
    spec = AttentionSpec(dtype="fp16", head_dim=32)
    verdict = verify_config(spec, FAMILY.default_config(spec, ARCH), ARCH, device="emulator")
    assert not verdict.ok and "off by" in str(verdict)
