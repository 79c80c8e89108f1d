"""The TMA stores of the conformance program: boxes inside the tensor, over its end and beyond it, and before its start.

The last dimension is a slab for each block, so that no two blocks write the same words.
"""

from __future__ import annotations

import math

from .conformance_hopper_case import HopperCase
from .conformance_rules import BITS, Rule, TrapRule
from .conformance_tma import KINDS, Starts, box_of, coordinates, inputs_of, map_of

#: Sizes of the stored tensors but for the slabs.
_SIZES = {3: (72, 30), 4: (72, 6, 5), 5: (72, 6, 5, 3)}
#: A place inside each of them; the inner coordinate is a multiple of 16 bytes.
_INSIDE = (8, 1, 2, 1)
_TRAP = TrapRule("a TMA store begins at a negative coordinate")


def store_cases() -> list[HopperCase]:
    """Boxes inside the tensor, then over its end, then beyond it: each dimension on its own with a swizzle of 128."""
    made = []
    for rank, swizzle in KINDS:
        sizes, box = _SIZES[rank], box_of(rank - 1, swizzle)
        last = tuple(size - b for size, b in zip(sizes, box, strict=True))
        made.append(_store(rank, swizzle, "", [(0,) * (rank - 1), _within(sizes, box), last]))
    for rank, swizzle in KINDS:
        made.append(_store(rank, swizzle, " over the end", _over(_SIZES[rank], box_of(rank - 1, swizzle))))
    for rank, swizzle in KINDS:
        alone = swizzle == 128
        slabs = 2 if alone else 2 * rank
        beyond = [_beyond((*_SIZES[rank], slabs), (*box_of(rank - 1, swizzle), 1), d) for d in range(rank)]
        if alone:
            made += [_store(rank, swizzle, f" beyond the end of c{d}", at) for d, at in enumerate(beyond)]
        else:
            made.append(_store(rank, swizzle, " beyond the end", [at for starts in beyond for at in starts]))
    return made


def trapping_cases() -> list[HopperCase]:
    """A box before the tensor's start in each dimension: the GPU is expected to trap, which costs it its context."""
    sizes, box = _SIZES[4], box_of(3, 128)
    inside = (*_within(sizes, box), 0)
    starts = [tuple((-8 if d == 0 else -1) if i == d else c for i, c in enumerate(inside)) for d in range(4)]
    return [_store(4, 128, f" before the start of c{d}", [at], _TRAP) for d, at in enumerate(starts)]


def _within(sizes: tuple[int, ...], box: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(c, size - b) for c, size, b in zip(_INSIDE, sizes, box, strict=False))


def _over(sizes: tuple[int, ...], box: tuple[int, ...]) -> Starts:
    """About half of the box lies in the tensor: in one dimension, and in all of them."""
    half = [size - max(1, b // 2) for size, b in zip(sizes, box, strict=True)]
    inside = _within(sizes, box)
    one = [(*inside[:d], half[d], *inside[d + 1 :]) for d in range(len(sizes)) if box[d] > 1]
    return [*one, tuple(half)]


def _beyond(sizes: tuple[int, ...], box: tuple[int, ...], d: int) -> Starts:
    """The box begins where the tensor ends in dimension `d`, and further on; `sizes` and `box` have the slabs too."""
    inside = _within(sizes[:-1], box)
    return [(*inside[:d], c, *inside[d + 1 :]) for c in (sizes[d], sizes[d] + 2 * box[d])]


def _store(rank: int, swizzle: int, where: str, at: Starts, rule: Rule = BITS) -> HopperCase:
    """A block a box; a start without a slab gets the block's own."""
    sizes, box = _SIZES[rank], box_of(rank - 1, swizzle)
    at = [(*start, block)[:rank] for block, start in enumerate(at)]
    volume = 2 * math.prod(box)
    body = f"""\
  const u32 tile = smem_region(0, {volume}, "tile");
  for (int i = lane; i < {volume // 4}; i += 128) st_shared_b32(tile + i * 4, ld_u32(args.in + i));
  fence_proxy_async();
  barrier_sync();
  if (lane == 0) {{
    tma_store_{rank}d(args.map, tile, {coordinates(rank)});
    bulk_commit_group();
    bulk_wait_group_read<0>();
    bulk_wait_group<0>();
  }}
"""
    return HopperCase(
        f"tma_store_{rank}d swizzle {swizzle}{where}",
        body,
        inputs_of(volume // 4, at),
        blocks=len(at),
        items=math.prod(sizes) // 2,
        rule=rule,
        note=f"what lies outside is dropped, untouched words stay all ones; boxes at {', '.join(map(str, at))}",
        map=map_of("out", (*sizes, len(at)), (*box, 1), swizzle),
        smem_bytes=volume,
    )
