"""Tensor maps through libcuda: what a Hopper kernel's copy engine has to know of a tensor, as the driver encodes it."""

from __future__ import annotations

import ctypes
from typing import Any

from ..generator.errors import SpecError
from . import driver

# CUtensorMap: its size, and the values of cuTensorMapEncodeTiled's enumerations (cuda.h).
TENSOR_MAP_BYTES, _ALIGNMENT = 128, 64
_DTYPES = {"fp16": 6, "bf16": 9}
_NO_INTERLEAVE, _SWIZZLE_128B, _L2_PROMOTION_128B, _ZEROS_OUTSIDE = 0, 3, 2, 0


def encode_tensor_map(
    address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """The 128 bytes of a tiled tensor map with 128-byte swizzle and zeros outside (cuTensorMapEncodeTiled).

    `dtype` is fp16 or bf16; `sizes` and `box` count elements, innermost first; `strides` are bytes, of all dimensions
    but the innermost. A thread that never touched CUDA, which has no context, borrows one that is in use: a map is the
    same for all Hopper GPUs. Raises SpecError for another dtype, MissingComponentError without
    a driver, and LaunchError where the driver refuses the map.
    """
    if dtype not in _DTYPES:
        raise SpecError(f"A tensor map's dtype must be one of {', '.join(_DTYPES)}, but got {dtype!r}.")
    library = driver.started_library()
    storage = (ctypes.c_char * (TENSOR_MAP_BYTES + _ALIGNMENT))()
    start = -ctypes.addressof(storage) % _ALIGNMENT
    rank = len(sizes)
    arguments: tuple[Any, ...] = (
        ctypes.byref(storage, start),
        ctypes.c_int(_DTYPES[dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),  # every element of each dimension
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_L2_PROMOTION_128B),
        ctypes.c_int(_ZEROS_OUTSIDE),
    )
    code = library.cuTensorMapEncodeTiled(*arguments)
    if code == driver.INVALID_CONTEXT:
        with driver.on_device(None):
            code = library.cuTensorMapEncodeTiled(*arguments)
    driver.check(library, code, f"encoding a tensor map of sizes {sizes}, byte strides {strides} and box {box}")
    return storage.raw[start : start + TENSOR_MAP_BYTES]
