"""libcuda through ctypes: devices, loading a cubin, launching a kernel. Importable where there is no driver.

Contexts are the devices' primary contexts, which torch and CuPy use too. A process that was forked after CUDA had
been used can use no GPU; every function here says so instead of crashing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..generator.errors import LaunchError, MissingComponentError

LIBRARY_NAMES: tuple[str, ...] = (
    ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")
)

# CUresult values that have a meaning of their own here (cuda.h).
_NOT_INITIALIZED = 3
_NO_DEVICE = 100
_INVALID_IMAGE = 200
INVALID_CONTEXT = 201
_NO_BINARY_FOR_GPU = 209
_UNSUPPORTED_PTX_VERSION = 222
_INVALID_HANDLE = 400
_WRONG_BINARY = (_INVALID_IMAGE, _NO_BINARY_FOR_GPU, _UNSUPPORTED_PTX_VERSION)

# CUdevice_attribute and CUfunction_attribute values (cuda.h).
_CLOCK_RATE, _SM_COUNT, _MEMORY_CLOCK_RATE, _L2_BYTES, _CC_MAJOR, _CC_MINOR = 13, 16, 36, 38, 75, 76
_FUNCTION_LOCAL_BYTES, _FUNCTION_REGISTERS, _FUNCTION_MAX_DYNAMIC_SMEM = 3, 4, 8
_CAPTURE_MODE_RELAXED = 2

_FORK_REMEDY = (
    "This process was forked from one that had already used CUDA, and a GPU cannot be used after that."
    ' Start it with multiprocessing\'s "spawn" method, or fork before the first use of the GPU.'
)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One GPU: `cc` is (major, minor), memory and L2 in bytes, clocks in kHz, `driver_version` such as "580.159.03"."""

    name: str
    cc: tuple[int, int]
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    sm_clock_khz: int
    memory_clock_khz: int
    driver_version: str


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel loaded on one device. It stays loaded until `unload`; a captured graph may hold it."""

    entry: str
    device: int
    smem_bytes: int
    registers: int
    local_bytes: int
    handle: ctypes.c_void_p
    module: ctypes.c_void_p
    context: ctypes.c_void_p


class ArgumentBuffer:
    """A kernel's by-value argument struct and the one-pointer array that the driver wants, made once and reused.

    `data` is a writable ctypes buffer, the given one or a new one of that many bytes; fill it with
    `Struct.pack_into(buffer.data, 0, ...)`. One thread at a time may fill and launch it: the driver copies the bytes
    during the launch. `stream` is the latest launch's, `stream_handle` the same as the driver wants it.
    """

    __slots__ = ("data", "pointers", "stream", "stream_handle")

    def __init__(self, data: int | ctypes.Array[ctypes.c_char]) -> None:
        self.data = (ctypes.c_char * data)() if isinstance(data, int) else data
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.data))
        self.stream, self.stream_handle = 0, ctypes.c_void_p(0)


_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_searched = False
_initialised = False
_forked = False
_contexts: dict[int, ctypes.c_void_p] = {}
#: cuLaunchKernel once a module has been loaded. Without `argtypes`, ctypes converts its 11 arguments twice as fast.
_launch_kernel: Any = None


def cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version the driver supports, e.g. (13, 0); None without a driver. Starts no CUDA."""
    library = _find_library()
    if library is None:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver_version() -> str:
    """The driver's own version such as "580.159.03", or "CUDA 13.0" where only that is known; "" without a driver."""
    supported = cuda_version()
    if supported is None:
        return ""
    try:
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue ..."; the open modules print other words.
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        words = [w for w in first.split() if w[:1].isdigit() and w.count(".") >= 1 and w.replace(".", "").isdigit()]
        return words[0]
    except (OSError, IndexError):
        return f"CUDA {supported[0]}.{supported[1]}"


def driver_available() -> bool:
    """Whether a driver is installed and at least one device can be used. Starts CUDA."""
    return device_count() > 0


def device_count() -> int:
    """The number of visible GPUs; 0 without a driver, and in a process forked after CUDA was used."""
    try:
        library = started_library()
    except (MissingComponentError, LaunchError):
        return 0
    count = ctypes.c_int()
    return count.value if library.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def device_info(index: int) -> DeviceInfo:
    """What GPU `index` is. Raises MissingComponentError without a driver, LaunchError for an unknown index."""
    library = started_library()
    device = _device(library, index)
    name = ctypes.create_string_buffer(256)
    check(library, library.cuDeviceGetName(name, 256, device), "cuDeviceGetName")
    memory = ctypes.c_size_t()
    check(library, library.cuDeviceTotalMem_v2(ctypes.byref(memory), device), "cuDeviceTotalMem")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        # A driver that has dropped an attribute reports an error: 0 is "not known".
        return value.value if library.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 else 0

    return DeviceInfo(
        name=name.value.decode(errors="replace"),
        cc=(attribute(_CC_MAJOR), attribute(_CC_MINOR)),
        sm_count=attribute(_SM_COUNT),
        memory_bytes=memory.value,
        l2_bytes=attribute(_L2_BYTES),
        sm_clock_khz=attribute(_CLOCK_RATE),
        memory_clock_khz=attribute(_MEMORY_CLOCK_RATE),
        driver_version=driver_version(),
    )


def load_function(cubin: bytes, entry: str, *, smem_bytes: int, device: int | None = None) -> Function:
    """The kernel `entry` of `cubin`, loaded on `device` and allowed `smem_bytes` of dynamic shared memory.

    `device` None takes the current one (device 0 where the thread has none). Legal while another stream, or this one,
    is being captured: loading is no part of the graph. Raises MissingComponentError without a driver, and LaunchError
    where the driver refuses the cubin or the shared memory.
    """
    global _launch_kernel
    library = started_library()
    if device is None:
        device = _current_device(library)
    context = _primary_context(library, device)
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    check(library, library.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        check(library, library.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {entry}")
        try:
            check(
                library,
                library.cuModuleGetFunction(ctypes.byref(handle), module, entry.encode()),
                f"finding {entry} in its cubin",
            )
            check(
                library,
                library.cuFuncSetAttribute(handle, _FUNCTION_MAX_DYNAMIC_SMEM, smem_bytes),
                f"giving {entry} {smem_bytes} bytes of dynamic shared memory",
            )
            # Reading an attribute also ends lazy loading: the first launch may be inside a capture.
            registers = _function_attribute(library, handle, _FUNCTION_REGISTERS)
            local_bytes = _function_attribute(library, handle, _FUNCTION_LOCAL_BYTES)
        except LaunchError:
            library.cuModuleUnload(module)
            raise
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    _launch_kernel = library.cuLaunchKernel
    return Function(entry, device, smem_bytes, registers, local_bytes, handle, module, context)


def unload(function: Function) -> None:
    """Frees the device memory of `function`, which must not be in use, nor in a graph that will run again."""
    library = started_library()
    with _pushed(library, function.context):
        check(library, library.cuModuleUnload(function.module), f"unloading {function.entry}")


def launch(
    function: Function,
    grid: tuple[int, int, int],
    threads: int,
    smem_bytes: int,
    stream: int,
    packed: ArgumentBuffer | ctypes.Array[ctypes.c_char],
) -> None:
    """Enqueues one launch on `stream` (a CUstream as an integer) and returns at once. Raises LaunchError.

    `packed` holds the bytes of the argument struct; the driver copies them before this returns. An `ArgumentBuffer`
    saves making the pointer array on each call.
    """
    buffer = packed if isinstance(packed, ArgumentBuffer) else ArgumentBuffer(packed)
    launcher(function)(grid, threads, smem_bytes, stream, buffer)


def launcher(function: Function) -> Callable[[tuple[int, int, int], int, int, int, ArgumentBuffer], None]:
    """`launch` of one function, for calls that repeat: `(grid, threads, smem_bytes, stream, packed)`."""
    handle = function.handle

    def launch_function(
        grid: tuple[int, int, int], threads: int, smem_bytes: int, stream: int, packed: ArgumentBuffer
    ) -> None:
        if stream != packed.stream:
            packed.stream, packed.stream_handle = stream, ctypes.c_void_p(stream)
        x, y, z = grid
        pointers = packed.pointers
        code = _launch_kernel(handle, x, y, z, threads, 1, 1, smem_bytes, packed.stream_handle, pointers, None)
        if code:
            _relaunch(code, function, grid, threads, smem_bytes, stream, pointers)

    return launch_function


def capture_id(stream: int) -> int:
    """The number of the capture into a graph that `stream` (a CUstream as an integer) is part of; 0 for none."""
    library = started_library()
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = library.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    return number.value if code == 0 and status.value else 0


@contextmanager
def on_device(index: int | None) -> Iterator[None]:
    """Makes GPU `index`'s primary context (None: any in use) current in this thread, and the former one afterwards."""
    library = started_library()
    with _pushed(library, _primary_context(library, next(iter(_contexts), 0) if index is None else index)):
        yield


def _relaunch(
    code: int,
    function: Function,
    grid: tuple[int, int, int],
    threads: int,
    smem_bytes: int,
    stream: int,
    pointers: Any,
) -> None:
    """A launch that failed with `code`: again in the function's own context if that was the fault, or LaunchError.

    A thread that never touched CUDA has no current context, and the current device need not be the tensors'.
    """
    library = started_library()
    current = ctypes.c_void_p()
    library.cuCtxGetCurrent(ctypes.byref(current))
    if code in (INVALID_CONTEXT, _INVALID_HANDLE) and current.value != function.context.value:
        with _pushed(library, function.context):
            code = _launch_kernel(
                function.handle, *grid, threads, 1, 1, smem_bytes, ctypes.c_void_p(stream), pointers, None
            )
    shape = f"grid {grid}, {threads} threads, {smem_bytes} bytes of shared memory (of {function.smem_bytes} allowed)"
    check(library, code, f"launching {function.entry} on device {function.device} with {shape}")


def _find_library() -> ctypes.CDLL | None:
    global _library, _searched
    if not _searched:
        with _lock:
            for name in LIBRARY_NAMES if not _searched else ():
                try:
                    _library = ctypes.CDLL(name)
                    break
                except OSError:
                    continue
            _searched = True
    return _library


def started_library() -> ctypes.CDLL:
    """libcuda after cuInit. Raises MissingComponentError without a driver, LaunchError where it cannot start."""
    global _initialised
    if _forked:
        raise LaunchError(_FORK_REMEDY, code=_NOT_INITIALIZED)
    library = _find_library()
    if library is None:
        raise MissingComponentError(
            f"Running a kernel needs the NVIDIA driver, but {LIBRARY_NAMES[0]} was not found. Install the driver, or"
            " use the CPU emulator: `flashsmith emulate`, or FLASHSMITH_DEVICE=emulator for the other commands."
        )
    if not _initialised:
        with _lock:
            check(library, library.cuInit(0), "starting CUDA")
            if not _initialised and hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_after_fork)
            _initialised = True
    return library


def _after_fork() -> None:
    global _forked, _launch_kernel

    def refuse(*_: Any) -> int:
        raise LaunchError(_FORK_REMEDY, code=_NOT_INITIALIZED)

    _forked = True
    _launch_kernel = refuse


def _device(library: ctypes.CDLL, index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    check(library, library.cuDeviceGet(ctypes.byref(device), index), f"finding GPU {index}")
    return device


def _current_device(library: ctypes.CDLL) -> int:
    device = ctypes.c_int()
    # No context in this thread means device 0, as for the CUDA runtime.
    return device.value if library.cuCtxGetDevice(ctypes.byref(device)) == 0 else 0


def _primary_context(library: ctypes.CDLL, index: int) -> ctypes.c_void_p:
    """Retained once per device and never released: torch's tensors live in it."""
    with _lock:
        if index not in _contexts:
            context = ctypes.c_void_p()
            code = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), _device(library, index))
            check(library, code, f"opening GPU {index}")
            _contexts[index] = context
        return _contexts[index]


@contextmanager
def _pushed(library: ctypes.CDLL, context: ctypes.c_void_p) -> Iterator[None]:
    check(library, library.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _function_attribute(library: ctypes.CDLL, handle: ctypes.c_void_p, number: int) -> int:
    value = ctypes.c_int()
    code = library.cuFuncGetAttribute(ctypes.byref(value), number, handle)
    check(library, code, "reading a kernel's attributes")
    return value.value


def check(library: ctypes.CDLL, code: int, doing: str) -> None:
    """Raises LaunchError that names what was being done, the driver's word for `code`, and a remedy if one is known."""
    if code == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(text))
    name = (text.value or b"unknown error").decode()
    library.cuGetErrorString(code, ctypes.byref(text))
    words = (text.value or b"").decode()
    raise LaunchError(f"CUDA failed while {doing}: {name} ({code}) {words}.{_remedy(code)}", code=code)


def _remedy(code: int) -> str:
    if code == _NOT_INITIALIZED:
        return " " + _FORK_REMEDY
    if code == _NO_DEVICE:
        return " No GPU is visible: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use the CPU emulator."
    if code in _WRONG_BINARY:
        return (
            f" The kernel was compiled for another GPU, or by a compiler newer than this driver ({driver_version()}):"
            " `flashsmith doctor` shows which."
        )
    return ""
