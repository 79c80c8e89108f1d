"""The race detector finds what no execution shows, whatever the schedule, and reports no race where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from helpers_emulator import FILE, run_small, small_kernel

from flashsmith.runtime.emulator.host_text import HostText
from flashsmith.runtime.emulator.run import SCHEDULES, Report

ARGUMENTS = "const float* in; float* out"
HEAD = '  const u32 tile = smem_region(0, 4096, "tile");\n  const int t = thread_index();\n  u32 r[4];\n'
STORE = "  for (int i = 0; i < 4; ++i) st_shared_b32(tile + t * 16 + i * 4, t);\n"

# Each pair: what orders the two accesses, and the same kernel without it.
PAIRS: Mapping[str, tuple[str, str, str]] = {
    "write, then another warp's read": (
        f"{HEAD}{STORE}@\n  ld_shared_v4(r, tile + (t + 32) % 128 * 16);\n  st_global_v4(args.out + t * 4, r);",
        "  barrier_sync();",
        "  warp_sync();",
    ),
    "write, then another lane's read": (
        f"{HEAD}{STORE}@\n  ld_shared_v4(r, tile + (t ^ 1) * 16);\n  st_global_v4(args.out + t * 4, r);",
        "  warp_sync();",
        "  shfl_bfly_f32(0.0f, 1);",  # a shuffle orders no memory
    ),
    "write, then another lane's read, with a reduction between": (
        f"{HEAD}{STORE}@\n  ld_shared_v4(r, tile + (t ^ 1) * 16);\n  st_global_v4(args.out + t * 4, r);",
        "  warp_sync();\n  redux_or_b32(t, ~0u);",
        "  redux_or_b32(t, ~0u);",  # it orders no memory either
    ),
    "read, then another warp's write": (
        f"{HEAD}{STORE}  barrier_sync();\n  ld_shared_v4(r, tile + (t + 32) % 128 * 16);\n@\n{STORE}"
        "  st_global_v4(args.out + t * 4, r);",
        "  barrier_sync();",
        "",
    ),
    "read by ldmatrix, then another lane's write": (
        f"{HEAD}{STORE}  barrier_sync();\n  ldmatrix_x4(r, tile + (t ^ 1) * 16);\n@\n{STORE}"
        "  st_global_v4(args.out + t * 4, r);",
        "  warp_sync();",
        "",
    ),
    "write, then another warp's write": (
        f"{HEAD}{STORE}@\n  st_shared_b32(tile + (t + 32) % 128 * 16, 0);",
        "  barrier_sync();",
        "",
    ),
    "copy, then another thread's read": (
        f"{HEAD}  cp_async_16(tile + t * 16, args.in + t * 4, 16);\n  cp_async_commit_group();\n@\n"
        "  ld_shared_v4(r, tile + (t + 32) % 128 * 16);\n  st_global_v4(args.out + t * 4, r);"
        "\n  cp_async_wait_group<0>();",
        "  cp_async_wait_group<0>();\n  barrier_sync();",
        "  barrier_sync();\n  cp_async_wait_group<0>();",  # waited for too late: after the barrier
    ),
    "read, then a copy over it": (
        f"{HEAD}{STORE}  barrier_sync();\n  ld_shared_v4(r, tile + (t + 32) % 128 * 16);\n@\n"
        "  cp_async_16(tile + t * 16, args.in + t * 4, 16);\n  cp_async_commit_group();\n  cp_async_wait_group<0>();\n"
        "  st_global_v4(args.out + t * 4, r);",
        "  barrier_sync();",
        "",
    ),
    "stores to one global address": (
        f"{HEAD}  if (t == 5) st_global_f32(args.out, 1.0f);\n@\n  if (t == 77) st_global_f32(args.out, 2.0f);",
        "  barrier_sync();",
        "",
    ),
}

# K/V double buffering in small: each tile is copied into the stage that was read in the iteration before.
DOUBLE_BUFFER = small_kernel(
    f"""{HEAD}
  cp_async_16(tile + t * 16, args.in + t * 4, 16);
  cp_async_commit_group();
  float sum = 0.0f;
  for (int j = 0; j < 8; ++j) {{
    const u32 here = tile + j % 2 * 2048;
    const u32 next = tile + (j + 1) % 2 * 2048;
    cp_async_wait_group<0>();
    barrier_sync();
    if (j + 1 < 8) cp_async_16(next + t * 16, args.in + (j + 1) * 512 + t * 4, 16);
    cp_async_commit_group();
    for (int i = 0; i < 128; i += 32) {{
      ldmatrix_x4(r, here + (i + t % 32) * 16);
      sum += static_cast<float>(r[0] & 0xffff);
    }}
    REUSE
  }}
  cp_async_wait_group<0>();
  st_global_f32(args.out + t, sum);""".replace("REUSE", ""),
    ARGUMENTS,
)
# One barrier an iteration too few: the copy for j + 1 starts while slow warps still read that stage.
EARLY_REUSE = small_kernel(
    f"""{HEAD}
  cp_async_16(tile + t * 16, args.in + t * 4, 16);
  cp_async_commit_group();
  float sum = 0.0f;
  for (int j = 0; j < 8; ++j) {{
    const u32 here = tile + j % 2 * 2048;
    const u32 next = tile + (j + 1) % 2 * 2048;
    if (j + 1 < 8) cp_async_16(next + t * 16, args.in + (j + 1) * 512 + t * 4, 16);
    cp_async_commit_group();
    cp_async_wait_group<1>();
    barrier_sync();
    for (int i = 0; i < 128; i += 32) {{
      ldmatrix_x4(r, here + (i + t % 32) * 16);
      sum += static_cast<float>(r[0] & 0xffff);
    }}
  }}
  cp_async_wait_group<0>();
  st_global_f32(args.out + t, sum);""",
    ARGUMENTS,
)


def run(text: HostText, **options: Any) -> tuple[Report, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {
        "in": rng.integers(0, 2**16, 8 * 512, dtype=np.uint32).view(np.float32),
        "out": np.zeros(512, np.float32),
    }
    return run_small(text, arrays, **options), arrays["out"]


@pytest.mark.parametrize("name", PAIRS)
def test_without_the_order_there_is_a_race_and_with_it_none(name: str) -> None:
    body, order, missing = PAIRS[name]
    good = small_kernel(body.replace("@", order), ARGUMENTS)
    bad = small_kernel(body.replace("@", missing), ARGUMENTS)
    for schedule in SCHEDULES:
        assert run(good, flavour="race", schedule=schedule)[0].clean, schedule
        report = run(bad, flavour="race", schedule=schedule)[0]
        assert "race" in report.kinds, (schedule, report)
        finding = next(finding for finding in report.findings if finding.kind == "race")
        assert finding.file == FILE
        assert finding.message.count(f"{FILE}:") == 2, finding  # both lines


def test_double_buffering_is_clean_under_every_schedule() -> None:
    outputs = []
    for schedule in SCHEDULES:
        for flavour in ("plain", "race"):
            report, out = run(DOUBLE_BUFFER, flavour=flavour, schedule=schedule)
            assert report.clean, report
            outputs.append(out)
    assert all(np.array_equal(out, outputs[0]) for out in outputs)
    assert outputs[0].any()


def test_a_stage_reused_too_early_is_a_race_under_every_schedule() -> None:
    for schedule in SCHEDULES:
        assert "race" in run(EARLY_REUSE, flavour="race", schedule=schedule)[0].kinds, schedule


def test_the_greedy_schedules_expose_in_plain_what_round_robin_hides() -> None:
    assert run(EARLY_REUSE, schedule="round_robin")[0].clean
    for schedule in ("greedy", "reverse_greedy"):
        report = run(EARLY_REUSE, schedule=schedule)[0]
        assert report.kinds == {"in-flight"}, (schedule, report)


def test_many_random_schedules_give_no_false_report() -> None:
    for seed in range(20):
        for flavour in ("plain", "race"):
            assert run(DOUBLE_BUFFER, flavour=flavour, schedule="random", seed=seed)[0].clean


def test_blocks_that_write_one_address_race() -> None:
    text = small_kernel("  if (thread_index() == 0) st_global_f32(args.out + block_index() / 2, 1.0f);", ARGUMENTS)
    report = run(text, flavour="race", grid=4)[0]
    assert report.kinds == {"race"}
    assert "in block 0" in report.findings[0].message
    own = small_kernel("  if (thread_index() == 0) st_global_f32(args.out + block_index(), 1.0f);", ARGUMENTS)
    assert run(own, flavour="race", grid=4)[0].clean


def test_plain_pointers_are_checked_too_and_named_by_line() -> None:
    body = """  const int t = thread_index();
  args.out[t / 2] = 1.0f;  // RACE
  if (t == 0) args.out[512] = 0.0f;  // BEYOND"""
    text = small_kernel(body, ARGUMENTS)
    report = run(text, flavour="race")[0]
    by_kind = {finding.kind: finding for finding in report.findings}
    assert by_kind["race"].code.endswith("// RACE")
    assert by_kind["out-of-bounds"].code.endswith("// BEYOND")
    assert "a plain store at small.cu:" in by_kind["race"].message


def test_another_threads_registers_may_not_be_touched() -> None:
    functions = "static int* shared_pointer;\n"
    body = """  int mine = thread_index();
  if (mine == 0) shared_pointer = &mine;
  barrier_sync();
  if (mine == 64) *shared_pointer = 1;  // BUG
  barrier_sync();
  st_global_f32(args.out + thread_index(), static_cast<float>(mine));"""
    text = small_kernel(body, ARGUMENTS, functions=functions)
    report = run(text, flavour="race")[0]
    assert report.kinds == {"race"}, report
    assert "the registers (the stack) of thread 0" in report.findings[0].message
