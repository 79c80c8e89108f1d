"""The tensor map of a conformance case: stated once, encoded by the GPU's driver or for the engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ...generator.errors import LaunchError
from .tensor_map import BYTES, SWIZZLES, encode_tensor_map

_UINT16 = 1  # CU_TENSOR_MAP_DATA_TYPE_UINT16


@dataclass(frozen=True, slots=True)
class MapSpec:
    """A tensor of 16-bit elements in the array `array`; sizes, byte strides and box innermost first."""

    array: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def encode_for_engine(self, address: int) -> bytes:
        """The engine's 128 bytes for the tensor at `address`."""
        return encode_tensor_map(address, self.sizes, self.strides, self.box, swizzle=self.swizzle)

    def encode_for_gpu(self, address: int) -> bytes:
        """The driver's 128 bytes for the tensor at `address`. Raises LaunchError."""

        def array(kind: type[ctypes.c_uint32] | type[ctypes.c_uint64], values: Sequence[int]) -> ctypes.Array:  # type: ignore[type-arg]
            return (kind * max(1, len(values)))(*values)

        storage = ctypes.create_string_buffer(BYTES + 64)
        at = (ctypes.addressof(storage) + 63) // 64 * 64
        rank = len(self.sizes)
        code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            _UINT16,
            rank,
            ctypes.c_void_p(address),
            array(ctypes.c_uint64, self.sizes),
            array(ctypes.c_uint64, self.strides),
            array(ctypes.c_uint32, self.box),
            array(ctypes.c_uint32, (1,) * rank),
            0,  # no interleave
            SWIZZLES[self.swizzle],
            0,  # no promotion in L2
            0,  # zeros outside
        )
        if code != 0:
            raise LaunchError(
                f"cuTensorMapEncodeTiled must accept the conformance cases' maps, but gave {code}: {self}."
            )
        return ctypes.string_at(at, BYTES)
