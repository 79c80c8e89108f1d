"""The wgmma cases of the conformance program: every N, both forms and types, the layouts, and the waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .conformance_hopper_case import HopperCase
from .conformance_layouts import product
from .conformance_rules import BITS, ErrorRule, Rule

#: Beyond what kernels use, every N in one type; B_c of the products with a K-major B, and the padded head dimensions of
#: those with an N-major one, in both types.
_KERNELS = {"ss": range(48, 193, 16), "rs": range(64, 257, 16), "ss_tb": range(64, 257, 16)}


def _products(forms: Iterable[str]) -> Iterator[tuple[str, str, int, int, str]]:
    """(form, dtype, span of the swizzle, N, inputs). Every N in the layout that kernels use, some in the others."""
    yield from ((form, "bf16", 128, n, "integers") for form in forms for n in range(8, 257, 8))
    yield from ((form, "f16", 128, n, "integers") for form in forms for n in sorted({64, 128, 256, *_KERNELS[form]}))
    yield from ((form, "bf16", span, n, "integers") for form in forms for span in (16, 32, 64) for n in (64, 192))
    yield from ((form, dtype, 128, 128, "normal") for form in forms for dtype in ("f16", "bf16"))


_PRODUCTS = (*_products(("ss", "rs")), *_products(("ss_tb",)))


def wgmma_cases() -> list[HopperCase]:
    """D (64, N) += A (64, 64) B (N, 64)^T for every instruction, then D that is not read, and two groups in flight."""
    return [*(_product(*chosen) for chosen in _PRODUCTS), *(_two_groups(dtype) for dtype in ("f16", "bf16"))]


def _product(form: str, dtype: str, span: int, n: int, kind: str) -> HopperCase:
    made = product(form, dtype, span, n, kind)
    a_bytes, b_bytes, steps = made.a_bytes, made.b_bytes, made.steps
    name = f"wgmma_m64n{n}k16_f32_{dtype}_{form}"
    a = "a[kk]" if form == "rs" else "descriptor_at(a_tile, args.in2 + kk * 4)"
    fetch = "" if form != "rs" else f"""\
  u32 a[{steps}][4];
#pragma unroll
  for (int i = 0; i < {4 * steps}; ++i) {{
    a[i / 4][i % 4] = ld_u32(args.in + {(a_bytes + b_bytes) // 4} + i / 4 * 512 + lane * 4 + i % 4);
  }}
"""  # fmt: skip
    body = f"""\
{_operands(a_bytes, b_bytes)}\
{fetch}\
  float d[{n // 2}];
#pragma unroll
  for (int j = 0; j < {n // 2}; ++j) d[j] = float_of(ld_u32(args.in3 + lane * {n // 2} + j));
  wgmma_guard(d);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < {steps}; ++kk) {{
    {name}(d, {a}, descriptor_at(b_tile, args.in2 + kk * 4 + 2){", 1" if form == "ss" else ""});
  }}
  wgmma_commit_group();
  wgmma_wait_group<0>();
  wgmma_guard(d);
#pragma unroll
  for (int j = 0; j < {n // 2}; ++j) st_u32(args.out + first + lane * {n // 2} + j, bits_of(d[j]));
"""
    # 64 products of two N(0, 1) and a sum N(0, 1): 18 units of 2^-23 of less than 64 in all.
    rule: Rule = BITS if kind == "integers" else ErrorRule(0.0, 18 * 64 * 2.0**-23)
    return HopperCase(
        f"{name} span {span} {kind}",
        body,
        _product_inputs(form, dtype, span, n, kind),
        blocks=1,
        items=64 * n,
        rule=rule,
        note=f"{'K' if form == 'ss' else 'N'}-major B, {steps} steps along K",
        smem_bytes=a_bytes + b_bytes,
    )


def _operands(a_bytes: int, b_bytes: int) -> str:
    """B, and A if it has bytes there, in shared memory and ready for products."""
    a_region = f'  const u32 a_tile = smem_region({b_bytes}, {a_bytes}, "a");\n' if a_bytes else ""
    store_a = (
        f"  for (int i = lane; i < {a_bytes // 4}; i += 128)"
        f" st_shared_b32(a_tile + i * 4, ld_u32(args.in + {b_bytes // 4} + i));\n"
        if a_bytes
        else ""
    )
    return f"""\
  const u32 b_tile = smem_region(0, {b_bytes}, "b");
{a_region}\
  for (int i = lane; i < {b_bytes // 4}; i += 128) st_shared_b32(b_tile + i * 4, ld_u32(args.in + i));
{store_a}\
  fence_proxy_async();
  barrier_sync();
"""


def _two_groups(dtype: str) -> HopperCase:
    made = product("ss", dtype, 128, 64, "integers")
    name = f"wgmma_m64n64k16_f32_{dtype}_ss"
    at = "descriptor_at(a_tile, args.in2 + kk * 4), descriptor_at(b_tile, args.in2 + kk * 4 + 2)"
    body = f"""\
{_operands(made.a_bytes, made.b_bytes)}\
  float d[32];
  float e[32];
#pragma unroll
  for (int j = 0; j < 32; ++j) d[j] = e[j] = float_of(ld_u32(args.in3 + lane * 32 + j));
  wgmma_guard(d);
  wgmma_guard(e);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < {made.steps}; ++kk) {name}(d, {at}, 1);
  wgmma_commit_group();
#pragma unroll
  for (int kk = 0; kk < {made.steps}; ++kk) {name}(e, {at}, kk != 0);
  wgmma_commit_group();
  wgmma_wait_group<1>();
  wgmma_guard(d);
#pragma unroll
  for (int j = 0; j < 32; ++j) st_u32(args.out + first + lane * 64 + j, bits_of(d[j]));
  wgmma_wait_group<0>();
  wgmma_guard(e);
#pragma unroll
  for (int j = 0; j < 32; ++j) st_u32(args.out + first + lane * 64 + 32 + j, bits_of(e[j]));
"""
    return HopperCase(
        f"wgmma groups {dtype}",
        body,
        _product_inputs("ss", dtype, 128, 64, "integers"),
        blocks=1,
        items=128 * 64,
        note="D + A B is read while A B, which does not read its D, may be in flight",
        smem_bytes=made.a_bytes + made.b_bytes,
    )


def _product_inputs(form: str, dtype: str, span: int, n: int, kind: str) -> Callable[[], Mapping[str, Any]]:
    return lambda: product(form, dtype, span, n, kind).arrays
