"""The Hopper part of the conformance program; here the barriers, registers, stmatrix, atomics and reductions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...generator.families.forward_sm90 import REGISTERS
from . import conformance_inputs as inputs
from .conformance_hopper_case import HopperCase
from .conformance_tma import tma_cases
from .conformance_tma_stores import store_cases, trapping_cases
from .conformance_wgmma import wgmma_cases


def hopper_cases() -> tuple[HopperCase, ...]:
    """Every case, in a fixed order; those that are expected to trap last."""
    others = (*tma_cases(), *store_cases(), *wgmma_cases(), *_barriers(), *_registers_and_rows())
    return (*others, *trapping_cases())


def _barriers() -> list[HopperCase]:
    phases = """\
  const u32 words = smem_region(0, 512, "words");
  const u32 barriers = smem_region(512, 16, "barriers");
  if (lane == 0) {
    mbarrier_init(barriers, 64);
    mbarrier_init(barriers + 8, 64);
    fence_mbarrier_init();
  }
  barrier_sync();
  mbarrier_wait(barriers, 1);  // the phase before the first counts as complete
  barrier_sync();              // before an arrival ends the first: the wait would then be for the second
  for (u32 turn = 0; turn < 5; ++turn) {
    if (lane < 64) {
      if (turn > 0) mbarrier_wait(barriers + 8, (turn - 1) & 1);
      st_shared_b32(words + lane * 4, ld_u32(args.in + turn * 64 + lane));
      mbarrier_arrive(barriers);
    } else {
      mbarrier_wait(barriers, turn & 1);
      st_u32(args.out + first + turn * 64 + lane - 64, ld_shared_b32(words + (127 - lane) * 4));
      mbarrier_arrive(barriers + 8);
    }
  }
"""
    named = """\
  const u32 words = smem_region(0, 512, "words");
  for (u32 turn = 0; turn < 5; ++turn) {
    if (lane < 64) {
      if (turn > 0) named_barrier_sync(2, 128);
      st_shared_b32(words + lane * 4, ld_u32(args.in + turn * 64 + lane));
      named_barrier_arrive(1, 128);
    } else {
      named_barrier_sync(1, 128);
      st_u32(args.out + first + turn * 64 + lane - 64, ld_shared_b32(words + (127 - lane) * 4));
      if (turn < 4) named_barrier_arrive(2, 128);
    }
  }
"""
    some = lambda: {"in": inputs.words(320)}  # noqa: E731
    return [
        HopperCase("mbarrier phases", phases, some, 1, 320, note="arrivals of 64 threads, five phases each way"),
        HopperCase("named barriers", named, some, 1, 320, note="sync and arrive of half a block each, five times"),
    ]


def _registers_and_rows() -> list[HopperCase]:
    rows = """\
  const u32 tile = smem_region(0, 8192, "tile");
  for (int i = lane; i < 2048; i += 128) st_shared_b32(tile + i * 4, 0);
  barrier_sync();
  u32 r[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) r[i] = ld_u32(args.in + first / 4 + lane * 4 + i);
  stmatrix_x4(tile + ld_u32(args.in2 + first / 16 + lane) * 16, r);
  barrier_sync();
  for (int i = lane; i < 2048; i += 128) st_u32(args.out + first + i, ld_shared_b32(tile + i * 4));
"""
    atomics = """\
  const int before = atomic_add_global_s32(reinterpret_cast<int*>(args.out), 3);
  if (lane == 0) st_global_s32(reinterpret_cast<int*>(args.out) + 1, (before + 1) % 3 == 0);  // -1 + 3 n
"""
    reduced = "  st_u32(args.out + first + lane, redux_or_b32(ld_u32(args.in + first + lane), ~0u));\n"
    shuffled = """\
  const u32 value = ld_u32(args.in + first + lane);
  st_u32(args.out + first + lane, shfl_bfly_b32(value, static_cast<int>(block_index())));
"""
    opaque = "  st_u32(args.out + first + lane, bits_of(opaque_f32(float_of(ld_u32(args.in + first + lane)))));\n"
    return [
        HopperCase("stmatrix_x4", rows, _rows_inputs, 4, 2048, note="rows at random, no two equal", smem_bytes=8192),
        *(_registers(consumers, *counts) for consumers, counts in REGISTERS.items()),
        HopperCase("atomic_add_global_s32, st_global_s32", atomics, dict, 1, 2, note="128 threads add 3 to -1"),
        HopperCase("redux_or_b32", reduced, _sparse_words, 16, 128, note="few bits a lane, another set each warp"),
        HopperCase("shfl_bfly_b32", shuffled, _sparse_words, 16, 128, note="lane masks 0 to 15, a block each"),
        HopperCase("opaque_f32", opaque, _sparse_words, 16, 128, note="bits come back as they were"),
    ]


def _registers(consumers: int, given: int, taken: int) -> HopperCase:
    threads = 128 * (consumers + 1)
    body = f"""\
  if (lane < 128) {{
    setmaxnreg_dec<{given}>();
    st_u32(args.out + first + lane, ld_u32(args.in + lane));
  }} else {{
    setmaxnreg_inc<{taken}>();
    st_u32(args.out + first + lane, ld_u32(args.in + lane) + static_cast<u32>(grid_size()));
  }}
"""
    return HopperCase(
        f"setmaxnreg, grid_size {threads} threads",
        body,
        lambda: {"in": inputs.words(threads)},
        3,
        threads,
        threads=threads,
        note=f"a warpgroup goes to {given} registers, {consumers} to {taken}",
    )


def _sparse_words() -> Mapping[str, Any]:
    words = inputs.words(2048, 21)
    for seed in range(22, 27):
        words = words & inputs.words(2048, seed)  # each bit is set in one lane of 64
    words[:64] = 0
    words[45] = 0x80000000
    return {"in": words}


def _rows_inputs() -> Mapping[str, Any]:
    import numpy as np

    rng = np.random.default_rng(11)
    rows = np.stack([rng.permutation(512)[:128] for _ in range(4)]).astype(np.uint32)
    return {"in": inputs.words(2048), "in2": rows.reshape(-1)}
