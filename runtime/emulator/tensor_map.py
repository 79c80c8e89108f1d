"""Tensor maps on the host: what the emulator's copy engine reads where a GPU has the driver's opaque 128 bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...generator.errors import EmulatorError

BYTES = 128
#: Where the address of element 0 stands, so that a run can move it with the buffer.
BASE_OFFSET = 8
#: Bytes of a swizzle's span -> the driver's number for it (CU_TENSOR_MAP_SWIZZLE_*). 16: none.
SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}

_MAGIC = b"tnsormap"
_MAX_RANK = 5
_LAYOUT = struct.Struct(f"<8sQ4I{_MAX_RANK}I{_MAX_RANK}I{_MAX_RANK - 1}Q")


def encode_tensor_map(
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    element_bytes: int = 2,
    swizzle: int = 128,
) -> bytes:
    """The 128 bytes of a map of the tensor at `address`; sizes, byte strides and the box's sizes innermost first.

    `strides` begin with that of dimension 1: dimension 0 is dense. `swizzle` is the span in bytes, 16 for none. What a
    GPU's copy engine refuses is refused where a kernel uses the map. Raises EmulatorError for what it cannot state.
    """
    rank = len(sizes)
    if not 1 <= rank <= _MAX_RANK or len(box) != rank or len(strides) != rank - 1 or swizzle not in SWIZZLES:
        raise EmulatorError(
            f"A tensor map has 1 to {_MAX_RANK} sizes, as many box sizes, one stride less and a swizzle of"
            f" {', '.join(map(str, SWIZZLES))} bytes, but got {sizes}, {box}, {strides}, {swizzle}."
        )

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[1] * (count - len(values))]

    packed = _LAYOUT.pack(
        _MAGIC,
        address,
        rank,
        element_bytes,
        SWIZZLES[swizzle],
        0,
        *padded(sizes, _MAX_RANK),
        *padded(box, _MAX_RANK),
        *padded([stride & 0xFFFFFFFFFFFFFFFF for stride in strides], _MAX_RANK - 1),
    )
    return packed.ljust(BYTES, b"\0")
