"""Tensor maps of a launch: what a Hopper kernel's copy engine has to know of each tensor, 128 bytes each.

A map holds the tensor's address, so it changes with the tensors of a call. Encoding one costs microseconds; a plan
keeps the encoded maps of the sets of addresses it has seen, and a repeated call costs one dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..generator.families.base import TensorMapField

#: Sets of addresses whose maps one plan keeps; all are dropped when there are more.
MAX_KEPT = 256
ELEMENT_BYTES = 2
#: Columns of one copy: the span of the 128-byte swizzle in 16-bit elements.
BOX_COLUMNS = 64

#: `encode(address, dtype, sizes, strides, box)`: the map's bytes. Sizes and box innermost first, strides in bytes.
Encoder = Callable[[int, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], bytes]


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor (batch, seqlen, nheads, head_dim) as a map sees it, but for its address."""

    position: int  # in (q, k, v, o)
    sizes: tuple[int, ...]  # head_dim, seqlen, nheads, batch
    strides: tuple[int, ...]  # of seqlen, nheads, batch, in bytes
    box: tuple[int, ...]


def mapped_tensor(field: TensorMapField, shape: Sequence[int], strides: Sequence[int]) -> MappedTensor:
    """The map of `field` for a tensor of (batch, seqlen, nheads, head_dim) and strides (batch, seqlen, nheads)."""
    batch, seqlen, nheads, head_dim = shape
    by_batch, by_row, by_head = (stride * ELEMENT_BYTES for stride in strides)
    return MappedTensor(
        position="qkvo".index(field.tensor),
        sizes=(head_dim, seqlen, nheads, batch),
        strides=(by_row, by_head, by_batch),
        box=(BOX_COLUMNS, field.rows, 1, 1),
    )


class TensorMaps:
    """The maps of one plan, in the order of its arguments, encoded once per set of addresses."""

    __slots__ = ("_dtype", "_encode", "_encoded", "_tensors")

    def __init__(self, tensors: Sequence[MappedTensor], dtype: str, encode: Encoder) -> None:
        self._tensors = tuple(tensors)
        self._dtype = dtype
        self._encode = encode
        self._encoded: dict[tuple[int, ...], bytes] = {}

    def at(self, addresses: tuple[int, int, int, int]) -> bytes:
        """The bytes of every map for tensors q, k, v, o at `addresses`. Any number of threads."""
        found = self._encoded.get(addresses)
        if found is None:
            found = b"".join(
                self._encode(addresses[t.position], self._dtype, t.sizes, t.strides, t.box) for t in self._tensors
            )
            if len(self._encoded) >= MAX_KEPT:
                self._encoded.clear()
            self._encoded[addresses] = found
        return found


class TileCounters:
    """Two int32 on the device per stream, 0 between launches: blocks draw their next tile from the first.

    Launches of one stream follow each other, so they may share a pair; those of two streams may not. During a capture
    each launch gets a pair of its own, since two graphs may run at once.
    """

    __slots__ = ("_by_stream", "_captured", "_device")

    def __init__(self, device: Any) -> None:
        self._device = device
        self._by_stream: dict[int, Any] = {}
        self._captured: list[Any] = []

    def address(self, stream: int, *, capturing: bool) -> int:
        """The pair's address for a launch on `stream`."""
        counters = None if capturing else self._by_stream.get(stream)
        if counters is None:
            import torch

            counters = torch.zeros(2, dtype=torch.int32, device=self._device)
            if capturing:
                self._captured.append(counters)
            else:
                self._by_stream[stream] = counters
        return int(counters.data_ptr())
