"""One conformance case on the GPU of this machine, through the driver alone: without torch a process starts fast."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .conformance_kernels import ENTRY, Case


def open_gpu() -> None:
    """Starts CUDA and opens the GPU's context. Raises MissingComponentError and LaunchError."""
    from .. import driver

    with driver.on_device(0):
        pass


def gpu_target(case: Case) -> str:
    """What NVRTC compiles `case` for on this GPU ("sm_90a"). Raises MissingComponentError."""
    from .. import driver

    major, minor = driver.device_info(0).cc
    return case.target or f"sm_{major}{minor}"


def cubin_of(text: str, target: str) -> bytes:
    """The machine code of a case's text, for pools of processes. Raises CompileError and MissingComponentError."""
    from ..nvrtc import compile_to_cubin

    return compile_to_cubin(text, target, name="conformance.cu").cubin


def run_on_gpu(case: Case, cubin: bytes, blocks: int) -> Any:
    """The words that the first `blocks` blocks of `case` write; all ones where none did.

    Raises LaunchError; after that the context, and so the process, may be of no more use.
    """
    import numpy as np

    from .. import driver

    library = driver.started_library()
    words = np.full(case.blocks * case.items, 0xFFFFFFFF, dtype=np.uint32)
    with driver.on_device(0), _memory(library, {**case.arrays, "out": words}) as addresses:
        packed = case.pack(addresses, gpu=True)
        function = driver.load_function(cubin, ENTRY, smem_bytes=case.smem_bytes, device=0)
        arguments = (ctypes.c_char * len(packed)).from_buffer_copy(packed)
        driver.launch(function, (blocks, 1, 1), case.threads, case.smem_bytes, 0, arguments)
        driver.check(library, library.cuCtxSynchronize(), f"running {case.name!r}")
        size = ctypes.c_size_t(words.nbytes)
        code = library.cuMemcpyDtoH_v2(ctypes.c_void_p(words.ctypes.data), ctypes.c_uint64(addresses["out"]), size)
        driver.check(library, code, f"reading what {case.name!r} wrote")
        driver.unload(function)
    return words


@contextmanager
def _memory(library: ctypes.CDLL, arrays: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """The addresses of copies of `arrays` in device memory, which are freed afterwards."""
    from .. import driver

    addresses: dict[str, int] = {}
    try:
        for name, array in arrays.items():
            address, size = ctypes.c_uint64(), ctypes.c_size_t(array.nbytes)
            driver.check(
                library, library.cuMemAlloc_v2(ctypes.byref(address), size), f"allocating {array.nbytes} bytes"
            )
            addresses[name] = address.value
            code = library.cuMemcpyHtoD_v2(address, ctypes.c_void_p(array.ctypes.data), size)
            driver.check(library, code, f"copying {array.nbytes} bytes to the GPU")
        yield addresses
    finally:
        for value in addresses.values():  # after an error there is nothing left to free: its code says nothing new
            library.cuMemFree_v2(ctypes.c_uint64(value))
