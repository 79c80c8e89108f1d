"""The TMA cases of the conformance program: loads and stores of 3 to 5 dimensions in every swizzle, and bulk groups."""

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
_SWIZZLES = (16, 32, 64, 128)
#: Sizes of the loaded tensors by rank; 70 columns end inside 16 bytes.
_LOADED = {3: (70, 30, 6), 4: (72, 6, 5, 3), 5: (72, 6, 5, 3, 2)}
#: Sizes of the stored tensors but for the last one, a slab a block.
_STORED = {3: (72, 30), 4: (72, 6, 5), 5: (72, 6, 5, 3)}

Starts = Sequence[tuple[int, ...]]


def tma_cases() -> list[HopperCase]:
    """Loads and stores of boxes that touch the tensor, then of boxes that lie outside of it, then the groups."""
    kinds = [(rank, swizzle) for rank in (3, 4, 5) for swizzle in _SWIZZLES]
    return [
        *(_load(rank, swizzle, touching=touching) for touching in (True, False) for rank, swizzle in kinds),
        *(_store(rank, swizzle, touching=touching) for touching in (True, False) for rank, swizzle in kinds),
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


def _map(array: str, sizes: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> MapSpec:
    rows = -(-sizes[0] * 2 // 16) * 16
    return MapSpec(
        array, sizes, tuple(itertools.accumulate(sizes[1:-1], lambda a, b: a * b, initial=rows)), box, swizzle
    )


def _box(rank: int, swizzle: int) -> tuple[int, ...]:
    return (swizzle // 2 if swizzle > 16 else 32, 5, 2, 2, 1)[:rank]


def _at(rank: int) -> str:
    return ", ".join(f"static_cast<int>(ld_u32(args.in2 + block_index() * {rank} + {i}))" for i in range(rank))


def _inputs(words: int, at: Starts) -> Callable[[], Mapping[str, Any]]:
    def make() -> Mapping[str, Any]:
        import numpy as np

        return {"in": inputs.words(words), "in2": np.array(at, dtype=np.int32).reshape(-1).view(np.uint32)}

    return make


def _name(what: str, rank: int, swizzle: int, *, touching: bool) -> str:
    return f"tma_{what}_{rank}d swizzle {swizzle}" + ("" if touching else " outside")


def _load(rank: int, swizzle: int, *, touching: bool) -> HopperCase:
    bound = _map("in", _LOADED[rank], _box(rank, swizzle), swizzle)
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
    tma_load_{rank}d(tile, args.map, {_at(rank)}, barrier);
  }}
  mbarrier_wait(barrier, 0);
  for (int i = lane; i < {volume // 4}; i += 128) st_u32(args.out + first + i, ld_shared_b32(tile + i * 4));
"""
    return HopperCase(
        _name("load", rank, swizzle, touching=touching),
        body,
        _inputs(bound.strides[-1] * bound.sizes[-1] // 4, at),
        blocks=len(at),
        items=volume // 4,
        note=f"boxes at {', '.join(map(str, at))}",
        map=bound,
        smem_bytes=volume + 16,
    )


def _store(rank: int, swizzle: int, *, touching: bool) -> HopperCase:
    sizes, box = _STORED[rank], _box(rank - 1, swizzle)
    at = starts(sizes, box, touching=touching)
    bound = _map("out", (*sizes, len(at)), (*box, 1), swizzle)
    volume = 2 * math.prod(box)
    body = f"""\
  const u32 tile = smem_region(0, {volume}, "tile");
  for (int i = lane; i < {volume // 4}; i += 128) st_shared_b32(tile + i * 4, ld_u32(args.in + i));
  fence_proxy_async();
  barrier_sync();
  if (lane == 0) {{
    tma_store_{rank}d(args.map, tile, {_at(rank - 1)}, static_cast<int>(block_index()));
    bulk_commit_group();
    bulk_wait_group_read<0>();
    bulk_wait_group<0>();
  }}
"""
    return HopperCase(
        _name("store", rank, swizzle, touching=touching),
        body,
        _inputs(volume // 4, at),
        blocks=len(at),
        items=math.prod(sizes) // 2,
        note=f"what lies outside is dropped, untouched words stay all ones; boxes at {', '.join(map(str, at))}",
        map=bound,
        smem_bytes=volume,
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
        map=_map("out", (32, 8, 3), (32, 8, 1), 64),
        smem_bytes=1024,
    )
