from __future__ import annotations

import time

import pytest
from helpers_campaign import COMPILES, HOPPER
from helpers_tune import ARCH

from flashsmith.generator.errors import MissingComponentError, TuneError
from flashsmith.generator.spec import AttentionSpec
from flashsmith.runtime.tune.compile_ahead import CompileAhead, SpecPool, SpecToCompile, first_that_fits

FIRST, SECOND = (SpecToCompile(AttentionSpec(head_dim=d), HOPPER, place) for place, d in enumerate((64, 128)))


def configs(*sizes):
    return [HOPPER.config_type(1, B_c, 2, 1, "exact", False, "grid", "registers", False) for B_c in sizes]


@pytest.fixture
def lines(tmp_path, monkeypatch):
    path = tmp_path / "compiles"
    path.write_text("")
    monkeypatch.setenv(COMPILES, str(path))
    return lambda: path.read_text().splitlines()


def pool(handler="compile_any_handler", jobs=1):
    return CompileAhead(ARCH, jobs=jobs, handler=f"helpers_campaign:{handler}")


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_it_compiles_without_being_waited_for_and_each_kernel_once(lines):
    with pool(jobs=2) as ahead:
        ahead.submit(FIRST, configs(48, 64))
        ahead.submit(SECOND, configs(64))
        wait_for(lambda: ahead.compiled == 3)
        assert {one.config for one in ahead.compile(FIRST, configs(64, 48, 80))} == set(configs(48, 64, 80))
        assert len(lines()) == 4
        assert set(ahead.results(SECOND.spec)) == set(configs(64))


def test_what_somebody_waits_for_goes_first_then_the_order_of_the_specs(lines):
    with pool("slow_compile_handler") as ahead:
        ahead.submit(SECOND, configs(48, 64))
        wait_for(lines)
        ahead.submit(SECOND, configs(80))
        ahead.submit(FIRST, configs(48))
        list(ahead.compile(SECOND, configs(96)))
        wait_for(lambda: ahead.compiled == 5)
    order = [(line.split()[0] == FIRST.spec.digest, line.split("B_c=")[1].split()[0]) for line in lines()]
    assert order == [(False, "48"), (False, "96"), (True, "48"), (False, "64"), (False, "80")]


def test_failures_are_classed_and_cost_one_candidate(lines):
    with pool() as ahead:
        found = {one.config.B_c: one.outcome for one in ahead.compile(FIRST, configs(176, 192, 64))}
    assert found == {176: "spill", 192: "crash", 64: "ok"}


def test_a_deadline_leaves_out_what_is_not_known(lines):
    with pool("slow_compile_handler") as ahead:
        list(ahead.compile(FIRST, configs(48)))
        found = list(ahead.compile(FIRST, configs(48, 64, 80), deadline=time.monotonic()))
        assert [one.config for one in found] == configs(48)


def test_a_missing_compiler_is_raised_to_whoever_waits(lines):
    with pool("missing_handler", jobs=2) as ahead:
        ahead.submit(FIRST, configs(48))
        for _ in range(2):
            with pytest.raises(MissingComponentError, match="NVRTC"):
                list(ahead.compile(FIRST, configs(64)))


def test_a_closed_pool_wakes_nobody_forever(lines):
    ahead = pool()
    ahead.close()
    with pytest.raises(TuneError, match="closed"):
        list(ahead.compile(FIRST, configs(48)))
    ahead.close()


def test_the_default_is_the_first_that_passes_the_gate(lines):
    with pool() as ahead:
        mine = SpecPool(ahead, FIRST)
        assert first_that_fits(mine, configs(176, 64)) == configs(64)[0]
        assert first_that_fits(mine, configs(176)) == configs(176)[0]
        mine.close()
        assert {one.outcome for one in mine.compile(configs(80))} == {"ok"}


def test_the_real_compiler_fills_the_disk_cache(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    from flashsmith.runtime.compiler import compile_kernel, forget

    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    config = HOPPER.default_config(FIRST.spec, ARCH)
    with CompileAhead(ARCH, jobs=1, run_here=False) as ahead:
        (found,) = ahead.compile(FIRST, [config])
    assert found.outcome == "ok" and found.registers > 0
    forget()
    assert compile_kernel(FIRST.spec, config, ARCH, family=HOPPER, run_here=False).cached
