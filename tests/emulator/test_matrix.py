"""Matrix instructions and number formats against NumPy, and the count of bank conflicts."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_emulator import line_of, run_small, small_kernel

from flashsmith.runtime.emulator.run import SCHEDULES

# C (64 x 64) = A (64 x 64) B^T (64 x 64): cp.async, swizzled shared memory, ldmatrix, mma, as in a forward kernel.
GEMM = """\
  const int t = thread_index();
  const int lane = t % 32;
  const u32 A = smem_region(0, 8192, "A");
  const u32 B = smem_region(8192, 8192, "B");
  for (int i = t; i < 512; i += 128) {
    cp_async_16(A + chunk_offset(i / 8, i % 8), args.a + i * 8, 16);
    cp_async_16(B + chunk_offset(i / 8, i % 8), args.b + i * 8, 16);
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  barrier_sync();
  float d[8][4] = {};
  for (int kk = 0; kk < 4; ++kk) {
    u32 a[4];
    ldmatrix_x4(a, A + chunk_offset(t / 32 * 16 + lane % 16, 2 * kk + lane / 16));
    for (int n = 0; n < 8; n += 2) {
      u32 b[4];
      ldmatrix_x4(b, B + chunk_offset(n * 8 + lane / 16 * 8 + lane % 8, 2 * kk + lane / 8 % 2));  // B
      mma_m16n8k16_f32_DTYPE(d[n], a, b[0], b[1]);
      mma_m16n8k16_f32_DTYPE(d[n + 1], a, b[2], b[3]);
    }
  }
  for (int n = 0; n < 8; ++n) {
    for (int e = 0; e < 4; ++e) {
      const int row = t / 32 * 16 + lane / 4 + e / 2 * 8;
      st_global_f32(args.out + row * 64 + n * 8 + lane % 4 * 2 + e % 2, d[n][e]);
    }
  }"""
SWIZZLED = "inline int chunk_offset(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }"
LINEAR = "inline int chunk_offset(int row, int chunk) { return row * 128 + chunk * 16; }"
SPECIAL = (0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 2.0**-25)
ARGUMENTS = "const u16* a; const u16* b; float* out"


def half_inputs(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bits of two matrices and their exact product A B^T."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    if dtype == "f16":
        bits = [m.astype(np.float16).view(np.uint16) for m in (a, b)]
        a, b = (m.view(np.float16).astype(np.float64) for m in bits)
    else:
        bits = [(m.view(np.uint32) >> 16).astype(np.uint16) for m in (a, b)]
        a, b = ((m.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for m in bits)
    return bits[0], bits[1], a @ b.T


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_tile_of_matrix_instructions_multiplies(dtype: str) -> None:
    text = small_kernel(GEMM.replace("DTYPE", dtype), ARGUMENTS, functions=SWIZZLED)
    a, b, exact = half_inputs(dtype)
    outputs = []
    for flavour, schedules in (("plain", SCHEDULES), ("race", ("round_robin", "random")), ("asan", ("greedy",))):
        for schedule in schedules:
            out = np.full((64, 64), np.nan, np.float32)
            report = run_small(text, {"a": a, "b": b, "out": out}, flavour=flavour, schedule=schedule)
            assert report.clean, report
            assert not report.bank_conflicts
            outputs.append(out)
    assert np.abs(outputs[0] - exact).max() < 1e-5
    assert all(np.array_equal(out, outputs[0]) for out in outputs)


def test_bank_conflicts_of_an_unswizzled_tile_are_counted_by_line() -> None:
    text = small_kernel(GEMM.replace("DTYPE", "f16"), ARGUMENTS, functions=LINEAR)
    a, b, _ = half_inputs("f16")
    report = run_small(text, {"a": a, "b": b, "out": np.zeros((64, 64), np.float32)})
    assert report.clean
    # 8 rows at one 16-byte column of 128-byte rows: 7 passes too many for each of 4 matrices.
    assert report.bank_conflicts[line_of(text, "// B")] == report.counters["ldmatrix_x4"] * 4 // 5 * 4 * 7


def test_equal_rows_do_not_conflict() -> None:
    body = """  const u32 tile = smem_region(0, 128, "tile");
  for (int i = 0; i < 32; ++i) st_shared_b32(tile + i * 4, i);
  warp_sync();
  u32 r[4];
  ldmatrix_x4(r, tile);
  st_global_v4(args.out + thread_index() * 4, r);"""
    report = run_small(small_kernel(body, "float* out"), {"out": np.zeros(128, np.float32)}, threads=32)
    assert report.clean
    assert not report.bank_conflicts


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_16_bit_pattern_widens_and_narrows_back(dtype: str) -> None:
    body = f"""  for (int i = thread_index(); i < 65536; i += 128) {{
    const float wide = ld_global_{dtype}(args.in + i);
    st_global_f32(args.wide + i, wide);
    u32 packed = cvt_rn_{dtype}x2_f32(wide, 1.0f);
    st_global_f32(args.narrow + i, *reinterpret_cast<float*>(&packed));
  }}"""
    bits = np.arange(65536, dtype=np.uint16)
    arrays = {"in": bits, "wide": np.zeros(65536, np.float32), "narrow": np.zeros(65536, np.float32)}
    text = small_kernel(body, "const u16* in; float* wide; float* narrow")
    assert run_small(text, arrays, writable=("wide", "narrow")).clean
    if dtype == "f16":
        expected = bits.view(np.float16).astype(np.float32)
    else:
        expected = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(arrays["wide"], expected)
    narrow = arrays["narrow"].view(np.uint32)
    assert set(narrow >> 16) == {0x3C00 if dtype == "f16" else 0x3F80}  # the second operand, in the upper half
    np.testing.assert_array_equal((narrow & 0xFFFF)[~np.isnan(expected)], bits[~np.isnan(expected)])
    assert set(narrow[np.isnan(expected)] & 0xFFFF) == {0x7FFF}


def test_narrowing_to_f16_rounds_as_numpy_does() -> None:
    rng = np.random.default_rng(2)
    values = (np.exp2(rng.uniform(-27, 17, 4096)) * rng.choice([-1, 1], 4096)).astype(np.float32)
    ties = ((values.view(np.uint32) >> 13 << 13) | 0x1000).view(np.float32)
    values = np.concatenate([values, ties, np.array(SPECIAL, np.float32)])
    body = """  for (int i = thread_index(); i < args.n; i += 128) {
    u32 packed = cvt_rn_f16x2_f32(ld_global_f32(args.in + i), 0.0f);
    st_global_f32(args.out + i, *reinterpret_cast<float*>(&packed));
  }"""
    out = np.zeros_like(values)
    text = small_kernel(body, "const float* in; float* out; int n")
    assert run_small(text, {"in": values, "out": out}, (values.size,)).clean
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out.view(np.uint32), values.astype(np.float16).view(np.uint16))
