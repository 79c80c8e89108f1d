"""Small Hopper kernels that break one rule each; the line at fault bears BUG. `test_hopper_engine.py` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A barrier at `full`, and room for a box of 8 rows at `tile`.
BARRIER = """\
  const u32 tile = smem_region(0, 16384, "tile");
  const u32 full = smem_region(16384, 16, "full");
  if (t == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  barrier_sync();
"""
LOAD = """\
  if (t == 0) {
    mbarrier_arrive_expect_tx(full, 1024);
    tma_load_4d(tile, args.map, 0, 0, 0, 0, full);
  }
"""
WRITE = """\
  for (int i = t; i < 4096; i += 128) st_shared_b32(tile + i * 4, 0);
"""
# A (64 rows, 64 columns) and B (64 rows) of zeros, ready for products.
OPERANDS = f"""\
  const u32 tile = smem_region(0, 16384, "tile");
{WRITE}  fence_proxy_async();
  barrier_sync();
  const u64 a = descriptor(tile, 16, 1024, 1), b = descriptor(tile + 8192, 16, 1024, 1);
  u32 P[4] = {{0, 0, 0, 0}};
  float d[32] = {{}};
"""
PRODUCT = "wgmma_m64n64k16_f32_bf16_ss(d, a, b, 0);"
STORE = "tma_store_4d(args.map, tile, 0, 0, 0, 0);"


@dataclass(frozen=True)
class Bug:
    """A body whose line with BUG must be named by a finding of `kind` that says `message`."""

    kind: str
    message: str
    body: str
    flavours: tuple[str, ...] = ("plain", "race")
    options: Mapping[str, Any] = field(default_factory=dict)


OUT = {"map_of": "out"}
BUGS: Mapping[str, Bug] = {
    # mbarriers
    "a wait that nobody ends": Bug(
        "deadlock",
        "mbarrier at byte 0 of shared-memory region 'full' is in phase 0 (parity 0), needs 1 of 1 arrivals and 0 bytes,"
        " 128 threads wait for parity 0",
        f"{BARRIER}  mbarrier_wait(full, 0);  // BUG",
    ),
    "a wait for bytes that nobody copies": Bug(
        "deadlock",
        "needs 0 of 1 arrivals and 64 bytes",
        f"{BARRIER}  if (t == 0) mbarrier_arrive_expect_tx(full, 64);\n  mbarrier_wait(full, 0);  // BUG",
    ),
    "an arrival too many": Bug(
        "barrier",
        "which has had all 1 arrivals of phase 0 and waits for 64 bytes",
        f"{BARRIER}  if (t == 0) mbarrier_arrive_expect_tx(full, 64);\n  barrier_sync();\n"
        "  if (t == 1) mbarrier_arrive(full);  // BUG",
    ),
    "a barrier that is none": Bug(
        "barrier",
        "nothing has initialised one there",
        f"{BARRIER}  if (t == 3) mbarrier_arrive(full + 8);  // BUG",
    ),
    "a barrier initialised twice": Bug(
        "barrier", "initialised twice", f"{BARRIER}  if (t == 3) mbarrier_init(full, 2);  // BUG"
    ),
    "a barrier overwritten": Bug(
        "barrier",
        "has been overwritten",
        f"{BARRIER}  if (t == 3) st_shared_b32(full + 4, 0);\n  barrier_sync();\n"
        "  if (t == 4) mbarrier_arrive(full);  // BUG",
    ),
    "a barrier used before the others know of it": Bug(
        "race",
        "not ordered after mbarrier_init",
        'const u32 full = smem_region(0, 16, "full");\n  if (t == 0) mbarrier_init(full, 1);\n'
        "  if (t == 32) mbarrier_arrive(full);  // BUG",
        ("race",),
    ),
    "misaligned barrier": Bug("misaligned", "a multiple of 8", f"{BARRIER}  mbarrier_wait(full + 4, 0);  // BUG"),
    "no arrivals": Bug(
        "operand", "1 to 1048575 arrivals", f"{BARRIER}  if (t == 0) mbarrier_init(full + 8, 0);  // BUG"
    ),
    "a parity of 2": Bug("operand", "0 or 1", f"{BARRIER}  mbarrier_wait(full, 2);  // BUG"),
    "too many bytes": Bug(
        "operand", "0 to 1048575 bytes", f"{BARRIER}  if (t == 0) mbarrier_arrive_expect_tx(full, 1 << 20);  // BUG"
    ),
    # TMA loads
    "the engine does not see the barrier": Bug(
        "fence",
        "no fence.mbarrier_init follows its initialisation by thread 0",
        BARRIER.replace("fence_mbarrier_init();", "")
        + LOAD.replace("full);\n  }", "full);  // BUG\n  }")
        + "  mbarrier_wait(full, 0);",
    ),
    "a load read before it has landed": Bug(
        "in-flight",
        "a TMA load into these bytes has not been waited for",
        f"{BARRIER}{LOAD}  barrier_sync();\n"
        "  if (t == 5) ld_shared_b32(tile + 512);  // BUG\n  mbarrier_wait(full, 0);",
        options={"schedule": "greedy"},
    ),
    "a load overwritten before it has landed": Bug(
        "in-flight",
        "writes byte 512",
        f"{BARRIER}{LOAD}  barrier_sync();\n"
        "  if (t == 5) st_shared_b32(tile + 512, 0);  // BUG\n  mbarrier_wait(full, 0);",
        options={"schedule": "greedy"},
    ),
    "a load that nobody waits for": Bug(
        "in-flight",
        "the block ended with 1 TMA loads in flight",
        f"{BARRIER}  if (t == 0) {{\n    mbarrier_arrive_expect_tx(full, 1024);\n"
        "    tma_load_4d(tile, args.map, 0, 0, 0, 0, full);  // BUG\n  }",
    ),
    "a load over what others still read": Bug(
        "race",
        "a read of the old value",
        f"{BARRIER}{LOAD}  mbarrier_wait(full, 0);\n  barrier_sync();\n  if (t == 0) ld_shared_b32(tile);\n"
        "  if (t == 100) {\n    mbarrier_arrive_expect_tx(full, 1024);\n"
        "    tma_load_4d(tile, args.map, 0, 0, 0, 0, full);  // BUG\n    mbarrier_wait(full, 1);\n  }",
        ("race",),
        {"schedule": "greedy"},
    ),
    "a load over an ordinary store without a fence": Bug(
        "race",
        "no fence.proxy.async lies between",
        f"{BARRIER}{WRITE}  barrier_sync();\n  if (t == 0) {{\n    mbarrier_arrive_expect_tx(full, 1024);\n"
        "    tma_load_4d(tile, args.map, 0, 0, 0, 0, full);  // BUG\n  }\n  mbarrier_wait(full, 0);",
        ("race",),
    ),
    "a load to a place that suits no swizzle": Bug(
        "misaligned",
        "a multiple of 1024",
        BARRIER + LOAD.replace("(tile,", "(tile + 128,").replace("full);\n  }", "full);  // BUG\n  }"),
    ),
    "a load beyond its region": Bug(
        "out-of-bounds",
        "bytes 16384 to 17407 of the shared-memory region 'tile'",
        BARRIER + LOAD.replace("(tile,", "(tile + 16384,").replace("full);\n  }", "full);  // BUG\n  }"),
    ),
    "an inner coordinate inside 16 bytes": Bug(
        "operand",
        "the innermost coordinate must be a multiple of 16 bytes",
        BARRIER + LOAD.replace("map, 0,", "map, -3,").replace("full);\n  }", "full);  // BUG\n  }"),
    ),
    "a map of other dimensions": Bug(
        "operand",
        "has 4 dimensions, but the instruction 3",
        f"{BARRIER}  if (t == 0) tma_load_3d(tile, args.map, 0, 0, 0, full);  // BUG",
    ),
    "a map that is none": Bug(
        "operand",
        "none that the host has encoded",
        "  TensorMap other;\n  other.opaque[0] = 1;\n  prefetch_tensormap(other);  // BUG",
    ),
    "a map beyond the tensor": Bug(
        "out-of-bounds",
        "byte 8192 of 'in', which has 8192 bytes",
        BARRIER
        + LOAD.replace("map, 0, 0,", "map, 0, 60,").replace("full);\n  }", "full);  // BUG\n  }")
        + "  mbarrier_wait(full, 0);",
        options={"sizes": (64, 80, 1, 1)},
    ),
    "a row wider than the swizzle": Bug(
        "operand",
        "within the swizzle's 64, but got 128",
        BARRIER + LOAD.replace("full);\n  }", "full);  // BUG\n  }"),
        options={"swizzle": 64},
    ),
    "strides inside 16 bytes": Bug(
        "operand",
        "multiples of 16 bytes, but got 120",
        BARRIER + LOAD.replace("full);\n  }", "full);  // BUG\n  }"),
        options={"strides": (120, 8192, 8192)},
    ),
    # TMA stores
    "a store that nobody waits for": Bug(
        "in-flight",
        "ended with 1 TMA stores in flight, not waited for",
        f"{BARRIER}{WRITE}  fence_proxy_async();\n  barrier_sync();\n  if (t == 0) {{\n    {STORE}  // BUG\n"
        "    bulk_commit_group();\n    bulk_wait_group_read<0>();\n  }",
        options=OUT,
    ),
    "a store that is not committed": Bug(
        "in-flight",
        "never committed",
        f"{BARRIER}{WRITE}  fence_proxy_async();\n  barrier_sync();\n  if (t == 0) {{\n    {STORE}  // BUG\n"
        "    bulk_wait_group<0>();\n  }",
        options=OUT,
    ),
    "a store whose source is overwritten": Bug(
        "in-flight",
        "overwrites byte 1020",
        f"{BARRIER}{WRITE}  fence_proxy_async();\n  barrier_sync();\n  if (t == 0) {{\n    {STORE}\n"
        "    bulk_commit_group();\n    st_shared_b32(tile + 1020, 1);  // BUG\n    bulk_wait_group<0>();\n  }",
        options=OUT,
    ),
    "a store without a fence": Bug(
        "race",
        "no fence.proxy.async lies between",
        f"{BARRIER}{WRITE}  barrier_sync();\n  if (t == 0) {{\n    {STORE}  // BUG\n    bulk_commit_group();\n"
        "    bulk_wait_group<0>();\n  }",
        ("race",),
        OUT,
    ),
    "a store of what others have not fenced": Bug(
        "race",
        "a write it reads",
        f"{BARRIER}{WRITE}  if (t == 0) fence_proxy_async();\n  warp_sync();\n  if (t == 0) {{\n    {STORE}  // BUG\n"
        "    bulk_commit_group();\n    bulk_wait_group<0>();\n  }",
        ("race",),
        OUT,
    ),
    "a store of what nothing wrote": Bug(
        "uninitialised",
        "byte 0 of shared-memory region 'tile'",
        f"{BARRIER}  if (t == 0) {{\n    {STORE}  // BUG\n    bulk_commit_group();\n    bulk_wait_group<0>();\n  }}",
        options=OUT,
    ),
    "a store that begins before the tensor": Bug(
        "operand",
        "a TMA store begins at a negative coordinate, on which the GPU traps: -2 in dimension 1",
        f"{BARRIER}{WRITE}  fence_proxy_async();\n  barrier_sync();\n  if (t == 0) {{\n"
        f"    {STORE.replace('0, 0, 0, 0', '0, -2, 0, 0')}  // BUG\n"
        "    bulk_commit_group();\n    bulk_wait_group<0>();\n  }",
        options=OUT,
    ),
    "a store into an input": Bug(
        "read-only",
        "of 'in', which has 8192 bytes, an input",
        f"{BARRIER}{WRITE}  fence_proxy_async();\n  barrier_sync();\n  if (t == 0) {{\n    {STORE}  // BUG\n"
        "    bulk_commit_group();\n    bulk_wait_group<0>();\n  }",
    ),
    "a store clipped inside 16 bytes": Bug(
        "operand",
        "must not be clipped inside 16 bytes",
        f"{BARRIER}{WRITE}  fence_proxy_async();\n  barrier_sync();\n  if (t == 0) {{\n    {STORE}  // BUG\n  }}",
        options={**OUT, "sizes": (60, 64, 1, 1)},
    ),
    "two stores to one place": Bug(
        "race",
        "a write it overwrites",
        f"{BARRIER}{WRITE}  fence_proxy_async();\n  barrier_sync();\n"
        f"  if (t % 32 == 0 && t < 64) {{\n    {STORE}  // BUG\n"
        "    bulk_commit_group();\n    bulk_wait_group<0>();\n  }",
        ("race",),
        OUT,
    ),
    # wgmma
    "no fence before the first product": Bug(
        "fence",
        "no wgmma.fence follows",
        f"{OPERANDS}  {PRODUCT}  // BUG\n  wgmma_commit_group();\n  wgmma_wait_group<0>();",
    ),
    "no fence after a wait": Bug(
        "fence",
        "after each wait",
        f"{OPERANDS}  wgmma_fence();\n  {PRODUCT}\n  wgmma_commit_group();\n  wgmma_wait_group<0>();\n"
        f"  {PRODUCT}  // BUG\n  wgmma_commit_group();\n  wgmma_wait_group<0>();",
    ),
    "a product that nobody waits for": Bug(
        "in-flight",
        "ended with 1 wgmma in flight, not waited for",
        f"{OPERANDS}  wgmma_fence();\n  {PRODUCT}  // BUG\n  wgmma_commit_group();",
    ),
    "a product that is not committed": Bug(
        "in-flight",
        "never committed",
        f"{OPERANDS}  wgmma_fence();\n  {PRODUCT}  // BUG\n  wgmma_wait_group<0>();",
    ),
    "an operand overwritten": Bug(
        "in-flight",
        "overwrites byte 8192",
        f"{OPERANDS}  wgmma_fence();\n  {PRODUCT}\n  wgmma_commit_group();\n"
        "  if (t == 0) st_shared_b32(tile + 8192, 0);  // BUG\n  wgmma_wait_group<0>();",
    ),
    "an operand overwritten by a warp that has waited, while others have not": Bug(
        "race",
        "a read of the old value",
        f"{OPERANDS}  wgmma_fence();\n  {PRODUCT}\n  wgmma_commit_group();\n  wgmma_wait_group<0>();\n"
        "  if (t == 0) st_shared_b32(tile + 8192, 0);  // BUG",
        ("race",),
    ),
    "accumulators written while in flight": Bug(
        "in-flight",
        "accumulators were written",
        f"{OPERANDS}  wgmma_fence();\n  {PRODUCT}\n  wgmma_commit_group();\n  d[5] = 1.0f;\n"
        "  wgmma_wait_group<0>();  // BUG",
    ),
    "registers of A written while in flight": Bug(
        "in-flight",
        "registers of A were written",
        f"{OPERANDS}  wgmma_fence();\n  wgmma_m64n64k16_f32_bf16_rs(d, P, b);\n  wgmma_commit_group();\n  P[2] = 7;\n"
        "  wgmma_wait_group<0>();  // BUG",
    ),
    "operands stored without a fence": Bug(
        "race",
        "no fence.proxy.async lies between",
        OPERANDS.replace("  fence_proxy_async();\n", "") + f"  wgmma_fence();\n  {PRODUCT}  // BUG\n"
        "  wgmma_commit_group();\n  wgmma_wait_group<0>();",
        ("race",),
    ),
    "an operand that nothing wrote": Bug(
        "uninitialised",
        "which nothing has written",
        OPERANDS.replace("i < 4096", "i < 4000")
        + f"  wgmma_fence();\n  {PRODUCT}  // BUG\n  wgmma_commit_group();\n  wgmma_wait_group<0>();",
    ),
    "an operand beyond its region": Bug(
        "out-of-bounds",
        "of B lies at byte 16384 of shared-memory region 'tile', which has 16384",
        OPERANDS.replace("tile + 8192", "tile + 9216")
        + f"  wgmma_fence();\n  {PRODUCT}  // BUG\n  wgmma_commit_group();\n  wgmma_wait_group<0>();",
    ),
    "descriptors that differ between lanes": Bug(
        "divergence",
        "must be uniform",
        f"{OPERANDS}  wgmma_fence();\n  wgmma_m64n64k16_f32_bf16_ss(d, a + t % 2, b, 0);  // BUG",
    ),
    "descriptors that differ between warps": Bug(
        "divergence",
        "the warps of one warpgroup execute different wgmma instructions",
        f"{OPERANDS}  wgmma_fence();\n  wgmma_m64n64k16_f32_bf16_ss(d, a, t < 96 ? b : b + 64, 0);  // BUG",
    ),
    # named barriers, registers, stmatrix, atomics
    "a named barrier that lacks a warp": Bug(
        "deadlock",
        "barrier 3 has 64 of 96 arrivals",
        "  if (t < 64) named_barrier_sync(3, 96);  // BUG",
    ),
    "arrivals alone": Bug(
        "barrier",
        "completes with arrivals alone",
        "  if (t < 32) named_barrier_arrive(3, 64);\n  barrier_sync();\n"
        "  if (t >= 96) named_barrier_arrive(3, 64);  // BUG",
    ),
    "an arrival that orders nothing for the one who arrives": Bug(
        "race",
        "st_shared_b32",
        '  const u32 word = smem_region(0, 16, "word");\n  if (t == 64) st_shared_b32(word, 1);\n'
        "  if (t < 32) named_barrier_arrive(3, 64);\n  if (t >= 64 && t < 96) named_barrier_sync(3, 64);\n"
        "  if (t == 0) st_shared_b32(word, 2);  // BUG",
        ("race",),
    ),
    "registers that are not there": Bug(
        "deadlock",
        "0 registers are free, each thread was launched with 168",
        "  if (t < 128) setmaxnreg_inc<176>();  // BUG",
        options={"threads": 384},
    ),
    "registers beyond the pool": Bug(
        "deadlock",
        "1280 registers are free, each thread was launched with 168",
        "  if (t < 128) {\n    setmaxnreg_dec<32>();\n  } else {\n    setmaxnreg_inc<240>();  // BUG\n  }",
        options={"threads": 384, "schedule": "greedy"},
    ),
    "registers that are no multiple of 8": Bug(
        "operand", "a multiple of 8 from 24 to 256", "  setmaxnreg_dec<100>();  // BUG"
    ),
    "a warpgroup of which one warp keeps its registers": Bug(
        "divergence",
        "not every warp of the warpgroup",
        "  if (t < 96) setmaxnreg_dec<56>();  // BUG",
    ),
    "rows of stmatrix inside 16 bytes": Bug(
        "misaligned",
        "a multiple of 16",
        f"{BARRIER}  const u32 r[4] = {{}};\n  stmatrix_x4(tile + t % 32 * 24, r);  // BUG",
    ),
    "an atomic on an input": Bug(
        "read-only",
        "an input",
        "  atomic_add_global_s32(reinterpret_cast<int*>(const_cast<u32*>(args.in)), 1);  // BUG",
    ),
}
