from __future__ import annotations

import time

import pytest
from helpers_tune import ARCH, FAMILY, SPACE, SPEC

from flashsmith.generator.errors import MissingComponentError
from flashsmith.runtime.tune.compile_pool import CompilePool


def pool(handler="compile_handler", **changes):
    return CompilePool(SPEC, ARCH, FAMILY, handler=f"helpers_tune:{handler}", **{"jobs": 2, **changes})


def pick(**wanted):
    plain = {"B_c": 48, "num_warps": 4, **wanted}
    return next(c for c in SPACE if all(getattr(c, name) == value for name, value in plain.items()))


def test_each_failure_costs_one_candidate_and_is_classed():
    good, spilled, crashed, hung = pick(), pick(B_c=64), pick(B_c=32), pick(num_warps=8)
    with pool(timeout=2.0) as compilers:
        found = {result.config: result for result in compilers.compile([hung, crashed, spilled, good])}
    assert {config: result.outcome for config, result in found.items()} == {
        good: "ok",
        spilled: "spill",
        crashed: "crash",
        hung: "timeout",
    }
    assert found[good].registers == 100


def test_what_was_compiled_once_is_remembered():
    good, crashed = pick(), pick(B_c=32)
    with pool() as compilers:
        list(compilers.compile([good, crashed]))
        started = time.perf_counter()
        assert [r.outcome for r in compilers.compile([crashed, good, good])] == ["crash", "ok"]
        assert time.perf_counter() - started < 0.1
        assert set(compilers.results) == {good, crashed}


def test_a_caller_that_stops_early_may_go_on_later():
    configs = [c for c in SPACE if c.B_c == 48 and c.num_warps != 8][:12]
    with pool() as compilers:
        next(compilers.compile(configs))
        assert {r.config for r in compilers.compile(configs)} == set(configs)


def test_a_missing_compiler_ends_the_run_with_its_message():
    with pool("missing_compiler_handler") as compilers, pytest.raises(MissingComponentError, match="Install it"):
        list(compilers.compile(SPACE[:4]))


def test_an_error_kills_the_workers_whatever_they_compile():
    good, hung = pick(), [c for c in SPACE if c.num_warps == 8 and c.B_c == 48][:3]
    compilers = pool(timeout=120.0)
    found = compilers.compile([good, *hung])
    assert next(found).config == good
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        found.throw(KeyboardInterrupt)
    with pytest.raises(StopIteration):
        next(found)
    assert time.monotonic() - started < 20
    assert set(compilers.results) == {good}


def test_closing_ends_what_a_forgotten_caller_left_running():
    good, hung = pick(), [c for c in SPACE if c.num_warps == 8 and c.B_c == 48][:3]
    with pool(timeout=120.0) as compilers:
        found = compilers.compile([good, *hung])
        next(found)
        started = time.monotonic()
    assert time.monotonic() - started < 20
    found.close()


def test_kernels_compile_for_real_and_the_gate_is_applied(monkeypatch):
    pytest.importorskip("cupy")
    good = FAMILY.default_config(SPEC, ARCH)
    with CompilePool(SPEC, ARCH, FAMILY, jobs=1, run_here=False) as compilers:
        (result,) = compilers.compile([good])
    assert result.outcome == "ok"
    assert 32 < result.registers <= 255
    assert result.smem_bytes == FAMILY.resources(SPEC, good).smem_bytes
