"""The Hopper part of the conformance program: TMA, wgmma, mbarriers, named barriers, stmatrix; 128 threads a block."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

from ...generator.environment import environment
from ...generator.source import Section
from . import conformance_inputs as inputs
from .conformance_kernels import ENTRY, FUNCTIONS, Case, used_primitives
from .conformance_layouts import product
from .conformance_maps import MapSpec
from .conformance_rules import BITS, ErrorRule, Rule

THREADS = 128
#: The driver's compute capability that these cases need.
CC = "9.0"

_TYPES = """\
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
struct alignas(64) TensorMap {
  u64 opaque[16];
};
struct Arguments {
  TensorMap map;
  const u32* in;
  const u32* in2;
  const u32* in3;
  u32* out;
};
"""
_HOPPER_FUNCTIONS = """\
__device__ __forceinline__ u64 descriptor_at(u32 tile, const u32* descriptor) {
  const u64 high = ld_u32(descriptor + 1);
  return (high << 32 | ld_u32(descriptor)) + ((tile & 0x3ffff) >> 4);
}
"""
_WGMMA = re.compile(r"wgmma_m64n(\d+)k16_f32_(b?f16)_(ss|rs)")


@dataclass(frozen=True)
class HopperCase(Case):
    """As `Case`, for a block of 128 threads (`lane` counts them); `map` becomes `args.map`."""

    map: MapSpec | None = None
    smem_bytes: int = 4096  # pyright: ignore[reportIncompatibleMethodOverride]
    threads: int = THREADS  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def target(self) -> str:
        return "sm_90a"

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        kernel = (
            f"{FUNCTIONS}\n{_HOPPER_FUNCTIONS}\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, 1)\n'
            f"    {ENTRY}(const __grid_constant__ Arguments args) {{\n"
            f"  const int lane = thread_index();\n  const long long first = block_index() * {self.items};\n"
            f"{self.body}}}\n"
        )
        primitives = used_primitives(_primitives(kernel), kernel)
        return (Section("types", _TYPES), Section("primitives", primitives), Section("kernel", kernel))

    def pointers(self) -> tuple[int, ...]:
        return (*((8,) if self.map else ()), 128, 136, 144, 152)

    def pack(self, addresses: Mapping[str, int], *, gpu: bool) -> bytes:
        image = bytes(128)
        if self.map is not None:
            address = addresses[self.map.array]
            image = self.map.encode_for_gpu(address) if gpu else self.map.encode_for_engine(address)
        packed = image + super().pack(addresses, gpu=gpu)
        return packed.ljust(192, b"\0")  # the struct's size is a multiple of its alignment


def hopper_cases() -> tuple[HopperCase, ...]:
    """Every case, in a fixed order."""
    return (*_loads(), *_stores(), *_products(), *_barriers(), *_registers_and_rows())


@cache
def _template(n: int, chunks_v: int, dtype: str) -> str:
    context = {"config": SimpleNamespace(B_c=n), "chunks_v": chunks_v, "mma": dtype}
    return environment().get_template("sm90/primitives.jinja").render(context)


def _primitives(kernel: str) -> str:
    """The Hopper primitives, with the product that `kernel` uses, and TMA for 3 and 5 dimensions."""
    match = _WGMMA.search(kernel)
    n, dtype = (int(match[1]), match[2]) if match else (64, "bf16")
    text = _template(n, n // 8, dtype)
    four = {name: _chunk(text, name) for name in ("tma_load_4d", "tma_store_4d")}
    return "\n\n".join([text, *(_of_rank(chunk, rank) for chunk in four.values() for rank in (3, 5))])


def _chunk(text: str, name: str) -> str:
    return next(chunk for chunk in text.split("\n\n") if f" {name}(" in chunk)


def _of_rank(chunk: str, rank: int) -> str:
    """The 4-dimensional TMA primitive as one of `rank` dimensions."""
    first = 3 if "load" in chunk else 2
    names, numbers = [f"c{i}" for i in range(rank)], [f"%{first + i}" for i in range(rank)]
    chunk = chunk.replace("_4d", f"_{rank}d").replace(".4d.", f".{rank}d.")
    chunk = re.sub(r"int c0,\s*int c1,\s*int c2,\s*int c3", ", ".join(f"int {name}" for name in names), chunk)
    chunk = re.sub(r"%\d, %\d, %\d, %\d\}", ", ".join(numbers) + "}", chunk)
    return re.sub(r'"r"\(c0\).*"r"\(c3\)', ", ".join(f'"r"({name})' for name in names), chunk, flags=re.DOTALL)


# ---- TMA ---------------------------------------------------------------------------------------

#: Inner coordinates are multiples of 8 elements (16 bytes): the hardware faults on others.
_COORDINATES = (
    (0, 0, 0, 0, 0), (8, 1, 2, 1, 1), (-8, -2, -1, 0, 0), (64, 4, 4, 2, 1), (32, -1, 3, -1, 0), (-64, 0, 0, 0, 0),
    (72, 1, 1, 1, 1), (16, 6, 0, 0, 0), (0, 0, 5, 0, 0), (-16, 5, -1, 2, -1), (24, 2, 1, 1, 2), (40, 3, 4, -1, 1),
)  # fmt: skip


def _map(array: str, sizes: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> MapSpec:
    strides = [-(-sizes[0] * 2 // 16) * 16]
    for size in sizes[1:-1]:
        strides.append(strides[-1] * size)
    return MapSpec(array, sizes, tuple(strides), box, swizzle)


def _coordinates(rank: int) -> Any:
    import numpy as np

    return np.array([at[:rank] for at in _COORDINATES], dtype=np.int32).reshape(-1).view(np.uint32)


def _at(rank: int) -> str:
    return ", ".join(f"static_cast<int>(ld_u32(args.in2 + block_index() * {rank} + {i}))" for i in range(rank))


def _loads() -> list[HopperCase]:
    cases = []
    shapes = {3: (70, 30, 6), 4: (72, 6, 5, 3), 5: (72, 6, 5, 3, 2)}
    for rank, sizes in shapes.items():
        for swizzle in (16, 32, 64, 128):
            box = (swizzle // 2 if swizzle > 16 else 32, 5, 2, 2, 1)[:rank]
            bound = _map("in", sizes, box, swizzle)
            volume = 2
            for size in box:
                volume *= size
            body = f"""\
  const u32 tile = smem_region(0, {volume}, "tile");
  const u32 barrier = smem_region({volume}, 16, "barrier");
  if (lane == 0) {{
    prefetch_tensormap(args.map);
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }}
  barrier_sync();
  if (lane == 0) {{
    mbarrier_arrive_expect_tx(barrier, {volume});
    tma_load_{rank}d(tile, args.map, {_at(rank)}, barrier);
  }}
  mbarrier_wait(barrier, 0);
  for (int i = lane; i < {volume // 4}; i += 128) st_u32(args.out + first + i, ld_shared_b32(tile + i * 4));
"""
            words = bound.strides[-1] * sizes[-1] // 4
            cases.append(
                HopperCase(
                    f"tma_load_{rank}d swizzle {swizzle}",
                    body,
                    _tma_inputs(words, rank),
                    blocks=len(_COORDINATES),
                    items=volume // 4,
                    note="coordinates inside, negative, overhanging and outside",
                    map=bound,
                    smem_bytes=volume + 16,
                )
            )
    return cases


def _tma_inputs(words: int, rank: int) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"in": inputs.words(words), "in2": _coordinates(rank)}


def _stores() -> list[HopperCase]:
    cases = []
    blocks = len(_COORDINATES)
    for rank in (3, 4, 5):
        for swizzle in (16, 32, 64, 128):
            inner = {3: (72, 30), 4: (72, 6, 5), 5: (72, 6, 5, 3)}[rank]
            box = (swizzle // 2 if swizzle > 16 else 32, 5, 2, 2)[: rank - 1]
            bound = _map("out", (*inner, blocks), (*box, 1), swizzle)
            volume, items = 2, 1
            for size in box:
                volume *= size
            for size in inner:
                items *= size
            at = _at(rank - 1)
            body = f"""\
  const u32 tile = smem_region(0, {volume}, "tile");
  for (int i = lane; i < {volume // 4}; i += 128) st_shared_b32(tile + i * 4, ld_u32(args.in + i));
  fence_proxy_async();
  barrier_sync();
  if (lane == 0) {{
    tma_store_{rank}d(args.map, tile, {at}, static_cast<int>(block_index()));
    bulk_commit_group();
    bulk_wait_group_read<0>();
    bulk_wait_group<0>();
  }}
"""
            cases.append(
                HopperCase(
                    f"tma_store_{rank}d swizzle {swizzle}",
                    body,
                    _tma_inputs(volume // 4, rank - 1),
                    blocks=blocks,
                    items=items // 2,
                    note="what lies outside is dropped; untouched words stay all ones",
                    map=bound,
                    smem_bytes=volume,
                )
            )
    return cases


# ---- wgmma -------------------------------------------------------------------------------------

#: (form, dtype, span of the swizzle, N, inputs). Every N in the layout that kernels use, some in the others.
_PRODUCTS = (
    *((form, "bf16", 128, n, "integers") for form in ("ss", "rs") for n in range(8, 257, 8)),
    *((form, "f16", 128, n, "integers") for form in ("ss", "rs") for n in (64, 128, 256)),
    *((form, "bf16", span, n, "integers") for form in ("ss", "rs") for span in (16, 32, 64) for n in (64, 192)),
    *((form, dtype, 128, 128, "normal") for form in ("ss", "rs") for dtype in ("f16", "bf16")),
)  # fmt: skip


def _products() -> list[HopperCase]:
    cases = []
    for form, dtype, span, n, kind in _PRODUCTS:
        made = product(form, dtype, span, n, kind)
        a_bytes, b_bytes, steps = made.a_bytes, made.b_bytes, made.steps
        name = f"wgmma_m64n{n}k16_f32_{dtype}_{form}"
        a = "descriptor_at(a_tile, args.in2 + kk * 4)" if form == "ss" else "a[kk]"
        fetch = "" if form == "ss" else f"""\
  u32 a[{steps}][4];
#pragma unroll
  for (int i = 0; i < {4 * steps}; ++i) {{
    a[i / 4][i % 4] = ld_u32(args.in + {(a_bytes + b_bytes) // 4} + i / 4 * 512 + lane * 4 + i % 4);
  }}
"""  # fmt: skip
        a_region = f'  const u32 a_tile = smem_region({b_bytes}, {a_bytes}, "a");\n' if a_bytes else ""
        store_a = (
            f"  for (int i = lane; i < {a_bytes // 4}; i += 128)"
            f" st_shared_b32(a_tile + i * 4, ld_u32(args.in + {b_bytes // 4} + i));\n"
            if a_bytes
            else ""
        )
        body = f"""\
  const u32 b_tile = smem_region(0, {b_bytes}, "b");
{a_region}\
  for (int i = lane; i < {b_bytes // 4}; i += 128) st_shared_b32(b_tile + i * 4, ld_u32(args.in + i));
{store_a}\
  fence_proxy_async();
  barrier_sync();
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
        cases.append(
            HopperCase(
                f"{name} span {span} {kind}",
                body,
                _product_inputs(form, dtype, span, n, kind),
                blocks=1,
                items=64 * n,
                rule=rule,
                note=f"{'K' if form == 'ss' else 'N'}-major B, {steps} steps along K",
                smem_bytes=a_bytes + b_bytes,
            )
        )
    return cases


def _product_inputs(form: str, dtype: str, span: int, n: int, kind: str) -> Callable[[], Mapping[str, Any]]:
    return lambda: product(form, dtype, span, n, kind).arrays


# ---- Barriers, registers, stmatrix, atomics -----------------------------------------------------


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
    adjusted = """\
  if (lane < 128) {
    setmaxnreg_dec<56>();
    st_u32(args.out + first + lane, ld_u32(args.in + lane));
  } else {
    setmaxnreg_inc<200>();
    st_u32(args.out + first + lane, ld_u32(args.in + lane) + static_cast<u32>(grid_size()));
  }
"""
    atomics = """\
  const int before = atomic_add_global_s32(reinterpret_cast<int*>(args.out), 3);
  st_global_s32(reinterpret_cast<int*>(args.out) + 1, (before + 1) % 3 == 0);  // they all see -1 + 3 n
"""
    return [
        HopperCase("stmatrix_x4", rows, _rows_inputs, 4, 2048, note="rows at random, no two equal", smem_bytes=8192),
        HopperCase(
            "setmaxnreg, grid_size", adjusted, lambda: {"in": inputs.words(384)}, 3, 384, threads=384,
            note="one warpgroup gives registers, two take them",
        ),
        HopperCase("atomic_add_global_s32, st_global_s32", atomics, dict, 1, 2, note="128 threads add 3 to -1"),
    ]  # fmt: skip


def _rows_inputs() -> Mapping[str, Any]:
    import numpy as np

    rng = np.random.default_rng(11)
    rows = np.stack([rng.permutation(512)[:128] for _ in range(4)]).astype(np.uint32)
    return {"in": inputs.words(2048), "in2": rows.reshape(-1)}
