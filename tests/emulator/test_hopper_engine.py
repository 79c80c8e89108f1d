"""Each rule of the Hopper instructions: the engine catches the kernel that breaks it, at the line that breaks it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers_emulator import line_of
from helpers_hopper import FILE, hopper_kernel, run_hopper
from helpers_hopper_bugs import BARRIER, BUGS, LOAD, OPERANDS, PRODUCT, STORE, WRITE

from flashsmith.generator.errors import EmulatorError
from flashsmith.runtime.emulator.report import Report
from flashsmith.runtime.emulator.tensor_map import encode_tensor_map


def run(body: str, **options: Any) -> tuple[Report, np.ndarray, np.ndarray]:
    source = np.arange(2048, dtype=np.uint32)
    out = np.zeros(2048, dtype=np.uint32)
    return run_hopper(hopper_kernel(body), source, out, **options), source, out


@pytest.mark.parametrize("name", BUGS)
def test_a_broken_rule_is_found_at_its_line(name: str) -> None:
    bug = BUGS[name]
    line = line_of(hopper_kernel(bug.body), "// BUG")
    for flavour in bug.flavours:
        report, _, _ = run(bug.body, flavour=flavour, **bug.options)
        found = [f for f in report.findings if f.kind == bug.kind and bug.message in f.message]
        assert found, report
        assert (found[0].file, found[0].line) == (FILE, line), report


def test_the_fragments_that_the_bugs_are_made_of_are_clean() -> None:
    bodies = (
        f"{BARRIER}{LOAD}  mbarrier_wait(full, 0);\n  ld_shared_b32(tile + t * 4);",
        f"{OPERANDS}  wgmma_fence();\n  {PRODUCT}\n  wgmma_m64n64k16_f32_bf16_rs(d, P, b);\n  wgmma_commit_group();\n"
        "  wgmma_wait_group<0>();\n  barrier_sync();\n  if (t == 0) st_shared_b32(tile + 8192, 0);",
    )
    for body in bodies:
        for flavour in ("plain", "race", "asan"):
            assert run(body, flavour=flavour)[0].clean


def test_a_store_reaches_memory_at_its_own_wait() -> None:
    body = (
        f"{BARRIER}{WRITE}  fence_proxy_async();\n  barrier_sync();\n  if (t == 0) {{\n    {STORE}\n"
        "    bulk_commit_group();\n    bulk_wait_group_read<0>();\n    st_shared_b32(tile, 9);  // read already\n"
        "    const int before = ld_global_s32(reinterpret_cast<const int*>(args.out));\n    bulk_wait_group<0>();\n"
        "    st_global_s32(reinterpret_cast<int*>(args.out) + 1, before);\n  }"
    )
    source, out = np.arange(2048, dtype=np.uint32), np.full(2048, 5, dtype=np.uint32)
    report = run_hopper(hopper_kernel(body), source, out, map_of="out")
    assert report.clean, report
    assert out[:3].tolist() == [0, 5, 0]
    assert out[256:].tolist() == [5] * 1792


def test_accumulators_are_nan_until_the_wait() -> None:
    body = (
        f"{OPERANDS}  wgmma_fence();\n  {PRODUCT}\n  wgmma_commit_group();\n  const bool there = d[3] == d[3];\n"
        "  wgmma_wait_group<0>();\n"
        "  st_global_s32(reinterpret_cast<int*>(args.out) + 2 * t, there);\n"
        "  st_global_s32(reinterpret_cast<int*>(args.out) + 2 * t + 1, d[3] == 0.0f);"
    )
    report, _, out = run(body)
    assert report.clean, report
    assert out[:256].tolist() == [0, 1] * 128


def test_a_load_lands_only_when_somebody_needs_it() -> None:
    body = f"{BARRIER}{LOAD}  barrier_sync();\n  barrier_sync();\n  ld_shared_b32(tile);\n  mbarrier_wait(full, 0);"
    for schedule in ("round_robin", "reverse", "greedy", "reverse_greedy", "random"):
        assert run(body, schedule=schedule)[0].kinds == {"in-flight"}


def test_a_map_must_be_stated_whole() -> None:
    with pytest.raises(EmulatorError, match="as many box sizes, one stride less"):
        encode_tensor_map(0, (64, 8), (128, 8), (64, 8))
    with pytest.raises(EmulatorError, match="a swizzle of"):
        encode_tensor_map(0, (64, 8), (128,), (64, 8), swizzle=8)
