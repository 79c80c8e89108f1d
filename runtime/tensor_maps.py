"""Tensor maps of a launch: what a Hopper kernel's copy engine has to know of each tensor, 128 bytes each.

A map holds the tensor's address, so it changes with the tensors of a call. Encoding one costs microseconds; a plan
keeps the maps of the addresses it has seen, joined per set of them, and a repeated call costs one dictionary lookup.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..generator.families.base import TensorMapField
from . import driver

if TYPE_CHECKING:
    import torch

#: Maps, and sets of addresses, that one plan keeps; all are dropped when there are more.
MAX_KEPT = 1024
#: Pairs of counters allocated at a time: 8 KiB. Each stream takes one, and each captured graph.
RESERVED_PAIRS = 1024
MAP_BYTES = 128
ELEMENT_BYTES = 2
#: Columns of one copy: the span of the 128-byte swizzle in 16-bit elements.
BOX_COLUMNS = 64

#: `encode(address, dtype, sizes, strides, box)`: the map's bytes. Sizes and box innermost first, strides in bytes.
Encoder = Callable[[int, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], bytes]


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor (batch, seqlen, nheads, head_dim) as a map sees it, but for its address."""

    position: int  # in (q, k, v, o)
    sizes: tuple[int, ...]  # head_dim, seqlen, nheads, batch; packed: head_dim, group, seqlen, nheads_k, batch
    strides: tuple[int, ...]  # of all but head_dim, in bytes
    box: tuple[int, ...]


def mapped_tensor(
    field: TensorMapField, shape: Sequence[int], strides: Sequence[int], *, group_size: int = 1
) -> MappedTensor:
    """The map of `field` for a tensor of (batch, seqlen, nheads, head_dim) and strides (batch, seqlen, nheads).

    Packed, `group_size` heads (a divisor of the field's rows) are side by side in a copy, then the next query's.
    """
    batch, seqlen, nheads, head_dim = shape
    by_batch, by_row, by_head = strides
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    rows: tuple[int, ...]
    if field.packed:
        sizes = (group_size, seqlen, nheads // group_size, batch)
        steps = (by_head, by_row, by_head * group_size, by_batch)
        rows = (group_size, field.rows // group_size, 1, 1)
    else:
        sizes, steps, rows = (seqlen, nheads, batch), (by_row, by_head, by_batch), (field.rows, 1, 1)
    return MappedTensor(
        position="qkvo".index(field.tensor),
        sizes=(head_dim, *sizes),
        # The stride of a dimension of size 1 is never used, but a map holds a legal one.
        strides=tuple(
            (step if size > 1 else head_dim) * ELEMENT_BYTES for size, step in zip(sizes, steps, strict=True)
        ),
        box=(BOX_COLUMNS, *rows),
    )


class TensorMaps:
    """The maps of one plan, in the order of its arguments, encoded once per tensor and address."""

    __slots__ = ("_dtype", "_encode", "_encoded", "_joined", "_tensors")

    def __init__(self, tensors: Sequence[MappedTensor], dtype: str, encode: Encoder) -> None:
        self._tensors = tuple(tensors)
        self._dtype = dtype
        self._encode = encode
        self._encoded: dict[tuple[MappedTensor, int], bytes] = {}
        self._joined: dict[tuple[int, int, int, int], bytes] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all maps."""
        return MAP_BYTES * len(self._tensors)

    def at(self, q: int, k: int, v: int, o: int) -> bytes:
        """The bytes of every map for tensors at these addresses. Any number of threads."""
        found = self._joined.get((q, k, v, o))
        return found if found is not None else self._join((q, k, v, o))

    def _join(self, addresses: tuple[int, int, int, int]) -> bytes:
        found = b"".join(self._map(tensor, addresses[tensor.position]) for tensor in self._tensors)
        if len(self._joined) >= MAX_KEPT:
            self._joined.clear()
        self._joined[addresses] = found
        return found

    def _map(self, tensor: MappedTensor, address: int) -> bytes:
        found = self._encoded.get((tensor, address))
        if found is None:
            found = self._encode(address, self._dtype, tensor.sizes, tensor.strides, tensor.box)
            if len(self._encoded) >= MAX_KEPT:
                self._encoded.clear()
            self._encoded[tensor, address] = found
        return found


class TileCounters:
    """Pairs of int32 on one device, 0 between launches: blocks draw their next tile from the first of a pair.

    Launches of one stream follow each other, so all plans share its pair; those of two streams may not. Each graph has
    pairs of its own, one per stream that was captured, since two graphs may run at once: `capture_id(stream)` tells
    captures apart, and where it says 0 each launch gets a pair. Pairs come from a reserve that is allocated before the
    first launch; a capture that finds it used up allocates one in the graph, which then sets it to 0 itself.
    """

    __slots__ = ("_by_capture", "_by_stream", "_capture_id", "_captured", "_device", "_free", "_lock", "_reserves")

    def __init__(self, device: torch.device, capture_id: Callable[[int], int] = lambda stream: 0) -> None:
        self._device = device
        self._capture_id = capture_id
        self._lock = threading.Lock()
        self._by_stream: dict[int, int] = {}
        self._by_capture: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._reserves: list[torch.Tensor] = []
        self._captured: list[torch.Tensor] = []

    def reserve(self) -> None:
        """Sees to it that pairs are left. Allocates and waits for the device now and then; never inside a capture."""
        with self._lock:
            if len(self._free) <= RESERVED_PAIRS // 2:
                self._allocate()

    def address(self, stream: int, capturing: bool) -> int:
        """The address of the pair for a launch on `stream`."""
        if not capturing:
            found = self._by_stream.get(stream)
            if found is not None:
                return found
        with self._lock:
            if capturing:
                return self._of_capture(stream)
            if stream not in self._by_stream:
                if not self._free:
                    self._allocate()
                self._by_stream[stream] = self._free.pop()
            return self._by_stream[stream]

    def _allocate(self) -> None:
        import torch

        pairs = torch.zeros(RESERVED_PAIRS, 2, dtype=torch.int32, device=self._device)
        if self._device.type == "cuda":
            # Other streams will use them, and nothing else would order those behind the zeros.
            torch.cuda.current_stream(self._device).synchronize()
        self._reserves.append(pairs)
        first, step = pairs.data_ptr(), pairs.stride(0) * pairs.element_size()
        self._free.extend(first + step * i for i in reversed(range(RESERVED_PAIRS)))

    def _of_capture(self, stream: int) -> int:
        key = self._capture_id(stream), stream
        found = self._by_capture.get(key) if key[0] else None
        if found is None:
            found = self._free.pop() if self._free else self._inside_a_graph()
            self._by_capture[key] = found
        return found

    def _inside_a_graph(self) -> int:
        import torch

        self._captured.append(torch.zeros(2, dtype=torch.int32, device=self._device))
        return self._captured[-1].data_ptr()


_counters: dict[int, TileCounters] = {}
_lock = threading.Lock()


def tile_counters(device: torch.device) -> TileCounters:
    """The counters that every plan of a GPU shares. On the CPU each plan has its own: a broken kernel may run there."""
    if device.type != "cuda":
        return TileCounters(device)
    with _lock:
        return _counters.setdefault(device.index or 0, TileCounters(device, driver.capture_id))
