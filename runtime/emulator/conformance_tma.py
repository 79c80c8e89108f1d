"""The TMA cases of the conformance program: loads of 3 to 5 dimensions in every swizzle, and bulk groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import conformance_inputs as inputs
from .conformance_hopper_case import HopperCase
from .conformance_maps import MapSpec

#: Where boxes begin. Inner coordinates are multiples of 8 elements (16 bytes): the hardware faults on others.
_COORDINATES = (
    (0, 0, 0, 0, 0), (8, 1, 2, 1, 1), (-8, -2, -1, 0, 0), (64, 4, 4, 2, 1), (32, -1, 3, -1, 0), (-64, 0, 0, 0, 0),
    (72, 1, 1, 1, 1), (16, 6, 0, 0, 0), (0, 0, 5, 0, 0), (-16, 5, -1, 2, -1), (24, 2, 1, 1, 2), (40, 3, 4, -1, 1),
)  # fmt: skip
#: Ranks and swizzles of the loads and of the stores.
KINDS = tuple(itertools.product((3, 4, 5), (16, 32, 64, 128)))
#: Sizes of the loaded tensors by rank; 70 columns end inside 16 bytes.
_LOADED = {3: (70, 30, 6), 4: (72, 6, 5, 3), 5: (72, 6, 5, 3, 2)}

Starts = Sequence[tuple[int, ...]]


def tma_cases() -> list[HopperCase]:
    """Loads of boxes that touch the tensor, then of boxes that lie outside of it, then the groups of stores."""
    return [
        *(_load(rank, swizzle, touching=touching) for touching in (True, False) for rank, swizzle in KINDS),
        _groups(),
    ]


def starts(sizes: tuple[int, ...], box: tuple[int, ...], *, touching: bool) -> Starts:
    """Those of the coordinates at which a box of a tensor of `sizes` touches it, or those at which it does not."""
    rank = len(sizes)
    found = []
    for at in _COORDINATES:
        inside = all(-b < c < size for c, b, size in zip(at, box, sizes, strict=False))
        if inside == touching:
            found.append(at[:rank])
    return found


def map_of(array: str, sizes: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> MapSpec:
    """The map of a dense tensor of `sizes` in `array`, whose rows are padded to 16 bytes."""
    rows = -(-sizes[0] * 2 // 16) * 16
    return MapSpec(
        array, sizes, tuple(itertools.accumulate(sizes[1:-1], lambda a, b: a * b, initial=rows)), box, swizzle
    )


def box_of(rank: int, swizzle: int) -> tuple[int, ...]:
    """The box that is copied: as wide as the swizzle's span, or 64 bytes without one."""
    return (swizzle // 2 if swizzle > 16 else 32, 5, 2, 2, 1)[:rank]


def coordinates(rank: int) -> str:
    """The arguments of the instruction: block b's box begins at the b-th `rank` words of `args.in2`."""
    return ", ".join(f"static_cast<int>(ld_u32(args.in2 + block_index() * {rank} + {i}))" for i in range(rank))


def inputs_of(words: int, at: Starts) -> Callable[[], Mapping[str, Any]]:
    """Random `words`, and where each block's box begins."""

    def make() -> Mapping[str, Any]:
        import numpy as np

        return {"in": inputs.words(words), "in2": np.array(at, dtype=np.int32).reshape(-1).view(np.uint32)}

    return make


def _load(rank: int, swizzle: int, *, touching: bool) -> HopperCase:
    bound = map_of("in", _LOADED[rank], box_of(rank, swizzle), swizzle)
    at = starts(bound.sizes, bound.box, touching=touching)
    volume = 2 * math.prod(bound.box)
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
    tma_load_{rank}d(tile, args.map, {coordinates(rank)}, barrier);
  }}
  mbarrier_wait(barrier, 0);
  for (int i = lane; i < {volume // 4}; i += 128) st_u32(args.out + first + i, ld_shared_b32(tile + i * 4));
"""
    return HopperCase(
        f"tma_load_{rank}d swizzle {swizzle}" + ("" if touching else " outside"),
        body,
        inputs_of(bound.strides[-1] * bound.sizes[-1] // 4, at),
        blocks=len(at),
        items=volume // 4,
        note=f"boxes at {', '.join(map(str, at))}",
        map=bound,
        smem_bytes=volume + 16,
    )


def _groups() -> HopperCase:
    body = """\
  const u32 tiles = smem_region(0, 1024, "tiles");
  for (int i = lane; i < 256; i += 128) st_shared_b32(tiles + i * 4, ld_u32(args.in + i));
  fence_proxy_async();
  barrier_sync();
  if (lane == 0) {
    tma_store_3d(args.map, tiles, 0, 0, 0);
    bulk_commit_group();
    tma_store_3d(args.map, tiles + 512, 0, 0, 1);
    bulk_commit_group();
    bulk_wait_group_read<1>();  // the first tile has been read and may be written again
  }
  barrier_sync();
  st_shared_b32(tiles + lane * 4, ld_u32(args.in + 256 + lane));
  fence_proxy_async();
  barrier_sync();
  if (lane == 0) {
    tma_store_3d(args.map, tiles, 0, 0, 2);
    bulk_commit_group();
    bulk_wait_group_read<0>();
    bulk_wait_group<1>();
    bulk_wait_group<0>();
  }
"""
    return HopperCase(
        "bulk groups",
        body,
        lambda: {"in": inputs.words(384)},
        blocks=1,
        items=384,
        note="a tile is overwritten once its own group has been read, with a newer one in flight",
        map=map_of("out", (32, 8, 3), (32, 8, 1), 64),
        smem_bytes=1024,
    )
