"""Each rule of the engine catches the kernel that breaks it, at the line that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from helpers_emulator import FILE, line_of, run_small, small_kernel

from flashsmith.runtime.emulator.run import Report

ARGUMENTS = "const float* in; float* out; int n"
TILE = '  const u32 tile = smem_region(0, 2048, "tile");\n  const int t = thread_index();\n'
FILL = f"{TILE}  for (int i = 0; i < 4; ++i) st_shared_b32(tile + t * 16 + i * 4, 0);\n  barrier_sync();\n"

#: name -> (kind of the finding, part of its message, body). The line that must be named bears BUG.
BUGS: Mapping[str, tuple[str, str, str]] = {
    "shared store beyond its region": (
        "out-of-bounds",
        "bytes 2048 to 2051 of the shared-memory region 'tile', which has 2048",
        f"{TILE}  st_shared_b32(tile + 4 + t % 32 * 4 + 1920 * (t / 96), 0);  // BUG",
    ),
    "shared store below its region": (
        "out-of-bounds",
        "'next'",
        'smem_region(0, 2048, "tile");\n  const u32 next = smem_region(2048, 64, "next");\n'
        "  if (thread_index() == 5) st_shared_b32(next - 4, 0);  // BUG",
    ),
    "shared store between two adjacent regions": (
        "out-of-bounds",
        "bytes 64 to 67 of the shared-memory region 'a', which has 64",
        'const u32 a = smem_region(0, 64, "a");\n  smem_region(64, 64, "b");\n'
        "  if (thread_index() == 0) st_shared_b32(a + 64, 0);  // BUG",
    ),
    "shared store to address 0": (
        "out-of-bounds",
        "no region holds",
        "if (thread_index() == 9) st_shared_b32(0, 1);  // BUG",
    ),
    "region beyond the launch's shared memory": (
        "out-of-bounds",
        "but the launch has 16384",
        'smem_region(16000, 1024, "tile");  // BUG',
    ),
    "misaligned shared store": ("misaligned", "a multiple of 4", f"{TILE}  st_shared_b32(tile + 2, 0);  // BUG"),
    "misaligned row of ldmatrix": (
        "misaligned",
        "a multiple of 16",
        f"{FILL}  u32 r[4];\n  ldmatrix_x4(r, tile + t % 32 * 8);  // BUG",
    ),
    "read of what nothing wrote": (
        "uninitialised",
        "byte 16 of shared-memory region 'tile'",
        f"{TILE}  if (t == 0) st_shared_b32(tile, 0);\n  barrier_sync();\n  u32 r[4];\n"
        "  if (t == 1) ld_shared_v4(r, tile + 16);  // BUG",
    ),
    "read of a half-written chunk": (
        "uninitialised",
        "byte 0",
        f"{TILE}  if (t == 0) st_shared_b32(tile + 8, 0);\n  barrier_sync();\n  u32 r[4];\n"
        "  if (t == 1) ld_shared_v4(r, tile);  // BUG",
    ),
    "copy not waited for": (
        "in-flight",
        "has not been waited for",
        f"{TILE}  cp_async_16(tile + t * 16, args.in, 16);\n  cp_async_commit_group();\n  cp_async_wait_group<1>();\n"
        "  u32 r[4];\n  ld_shared_v4(r, tile + t * 16);  // BUG\n  cp_async_wait_group<0>();",
    ),
    "copy waited for but not committed": (
        "in-flight",
        "reads byte",
        f"{TILE}  cp_async_16(tile + t * 16, args.in, 16);\n  cp_async_wait_group<0>();\n"
        "  u32 r[4];\n  ld_shared_v4(r, tile + t * 16);  // BUG\n  cp_async_commit_group();\n"
        "  cp_async_wait_group<0>();",
    ),
    "store into a copy in flight": (
        "in-flight",
        "writes byte",
        f"{TILE}  cp_async_16(tile + t * 16, args.in, 16);\n  cp_async_commit_group();\n"
        "  st_shared_b32(tile + t * 16, 0);  // BUG\n  cp_async_wait_group<0>();",
    ),
    "copy in flight at the end": (
        "in-flight",
        "ended with 1 cp.async in flight, committed but not waited for",
        f"{TILE}  cp_async_16(tile + t * 16, args.in, 16);  // BUG\n  cp_async_commit_group();",
    ),
    "copy never committed": (
        "in-flight",
        "never committed",
        f"{TILE}  cp_async_16(tile + t * 16, args.in, 16);  // BUG",
    ),
    "copy of 17 bytes": ("operand", "0 to 16, but got 17", f"{TILE}  cp_async_16(tile, args.in, 17);  // BUG"),
    "copy from an odd address": (
        "misaligned",
        "a multiple of 16",
        f"{TILE}  cp_async_16(tile + t * 16, args.in + 1, 16);  // BUG\n  cp_async_commit_group();\n"
        "  cp_async_wait_group<0>();",
    ),
    "copy from beyond a buffer": (
        "out-of-bounds",
        "loads 16 bytes at byte 2048 of 'in', which has 2048 bytes",
        f"{TILE}  cp_async_16(tile + t * 16, args.in + 512, t == 3 ? 16 : 0);  // BUG\n  cp_async_commit_group();\n"
        "  cp_async_wait_group<0>();",
    ),
    "load from before a buffer": (
        "out-of-bounds",
        "byte -4 of 'in'",
        "if (thread_index() == 0) st_global_f32(args.out, ld_global_f32(args.in - 1));  // BUG",
    ),
    "load through the null pointer": (
        "out-of-bounds",
        "the null pointer",
        "if (thread_index() == 0) ld_global_f32(static_cast<const float*>(nullptr));  // BUG",
    ),
    "store beyond a buffer": (
        "out-of-bounds",
        "stores 4 bytes at byte 2048 of 'out', which has 2048 bytes",
        "st_global_f32(args.out + thread_index() * 4 + 4, 0.0f);  // BUG",
    ),
    "store to an input": (
        "read-only",
        "an input",
        "if (thread_index() == 0) st_global_f32(const_cast<float*>(args.in), 0.0f);  // BUG",
    ),
    "misaligned vector store": (
        "misaligned",
        "stores 16 bytes at byte 4 of 'out'",
        "const u32 r[4] = {};\n  if (thread_index() == 0) st_global_v4(args.out + 1, r);  // BUG",
    ),
    "lanes at different shuffles": (
        "divergence",
        "different warp-wide instructions",
        "float x = 0;\n  if (thread_index() % 32 < 7)\n    x = shfl_bfly_f32(x, 1);  // BUG\n  else\n"
        "    x = shfl_bfly_f32(x, 1);  // BUG",
    ),
    "lanes at different barriers": (
        "divergence",
        "different barriers",
        "if (thread_index() % 32 == 0)\n    barrier_sync();  // BUG\n  else\n    barrier_sync();  // BUG",
    ),
    "lanes at different reductions": (
        "divergence",
        "different warp-wide instructions",
        "if (thread_index() % 32 < 7)\n    redux_or_b32(1, ~0u);  // BUG\n  else\n    redux_or_b32(2, ~0u);  // BUG",
    ),
    "reduction that a lane skips": (
        "deadlock",
        f"31 wait at redux_or_b32 at {FILE}:13: threads 0-30; 97 have ended",
        "if (thread_index() != 31) redux_or_b32(1, ~0u);  // BUG",
    ),
    "shuffle with a lane mask of 32": ("operand", "0 to 31, but got 32", "shfl_bfly_f32(0.0f, args.n + 32);  // BUG"),
    "barrier that some threads skip": (
        "deadlock",
        f"96 wait at barrier_sync at {FILE}:13: threads 0-95; 32 have ended: threads 96-127",
        "if (thread_index() < 96) barrier_sync();  // BUG",
    ),
    "shuffle that a lane skips": (
        "deadlock",
        "31 wait at shfl_bfly_f32 at small.cu:13: threads 0-30; 97 have ended",
        "if (thread_index() != 31) shfl_bfly_f32(0.0f, 1);  // BUG",
    ),
}


def run(body: str, **options: Any) -> Report:
    arrays = {"in": np.zeros(512, np.float32), "out": np.zeros(512, np.float32)}
    return run_small(small_kernel(body, ARGUMENTS), arrays, (0,), **options)


@pytest.mark.parametrize("name", BUGS)
def test_a_broken_rule_is_found_at_its_line(name: str) -> None:
    kind, message, body = BUGS[name]
    text = small_kernel(body, ARGUMENTS)
    lines = {number for number, line in enumerate(text.lines, start=1) if "BUG" in line}
    report = run(body)
    first = report.findings[0]
    assert first.kind == kind, report
    assert message in first.message, report
    assert (first.file, first.line in lines) == (FILE, True), report
    assert "BUG" in first.code
    assert not report.clean


def test_one_finding_a_kind_and_place_and_the_rest_counted() -> None:
    report = run("st_global_f32(args.out + 1000000, 0.0f);")
    assert len(report.findings) == 1
    assert report.repeated == 127
    assert "far from every buffer" not in report.findings[0].message


def test_an_endless_loop_ends_at_the_time_limit() -> None:
    body = """  const int t = thread_index();
  barrier_sync();
  while (t == 40 && args.n == 0) asm volatile("");
  barrier_sync();"""
    report = run(body, time_limit=1)
    assert report.kinds == {"timeout"}
    assert "thread 40 (warp 1)" in report.findings[0].message


@pytest.mark.parametrize("flavour", ["plain", "race", "asan"])
def test_a_crash_is_a_finding(flavour: str) -> None:
    report = run("if (thread_index() == 3) *reinterpret_cast<volatile int*>(64) = 1;", flavour=flavour)
    assert not report.clean
    kinds = {"plain": {"crash"}, "race": {"out-of-bounds", "crash"}, "asan": {"address", "undefined"}}[flavour]
    assert report.kinds <= kinds, report
    assert report.findings


def test_integer_division_by_zero_is_a_finding() -> None:
    report = run("if (thread_index() == 3) st_global_f32(args.out, static_cast<float>(7 / args.n));")
    assert report.kinds == {"crash"}
    assert "division by zero" in report.findings[0].message


def test_a_kernel_that_breaks_no_rule_is_clean_and_counted() -> None:
    report = run(f"{FILL}  u32 r[4];\n  ldmatrix_x4(r, tile + t % 32 * 16);\n  st_global_v4(args.out + t * 4, r);")
    assert report.clean
    assert report.counters["ldmatrix_x4"] == 4  # once a warp
    assert report.counters["st_shared_b32"] == 512  # once a thread
    assert report.require_clean() is report
    assert line_of(small_kernel("  a;  // only", ARGUMENTS), "// only") == 13
