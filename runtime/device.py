"""Where kernels run: the `Backend` a launch is prepared for, and the one for this process's GPUs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..generator.arch import Arch, arch_from_cc
from ..generator.errors import BuildGateError
from ..generator.families.base import Family, KernelConfig
from ..generator.spec import AttentionSpec
from . import driver, driver_maps
from .driver import ArgumentBuffer

log = logging.getLogger("flashsmith.device")

#: `launch(grid, threads, smem_bytes, stream, packed)`: enqueues on the raw stream, copies the packed arguments.
LaunchFunction = Callable[[tuple[int, int, int], int, int, int, ArgumentBuffer], None]


class Kernel(Protocol):
    """A kernel ready to launch on one device. `key` names its binary (the cache key of the cubin)."""

    @property
    def key(self) -> str: ...
    @property
    def launch(self) -> LaunchFunction: ...


class Backend(Protocol):
    """Where kernels run: a GPU through the driver, the CPU emulator, or a test's stand-in."""

    def arch(self, device: int) -> Arch: ...
    def device_name(self, device: int) -> str | None: ...
    def current_device(self) -> int: ...
    def device_guard(self, device: int) -> AbstractContextManager[Any]: ...
    def current_stream(self, device: int) -> int: ...
    @property
    def is_capturing(self) -> Callable[[], bool]: ...
    def is_loaded(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> bool: ...
    def kernel(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> Kernel: ...
    def default_config(self, spec: AttentionSpec, family: Family, device: int) -> KernelConfig: ...
    def refusal(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> str: ...
    def sm_count(self, device: int) -> int: ...
    def encode_tensor_map(
        self, address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
    ) -> bytes: ...


class CudaBackend:
    """The GPUs of this process: torch's current device and stream, kernels through the compiler, cache and driver."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Any, ...], CudaKernel] = {}
        self._locks: dict[tuple[Any, ...], threading.Lock] = {}
        self._archs: dict[int, tuple[Arch, str, int]] = {}

    def arch(self, device: int) -> Arch:
        return self._identity(device)[0]

    def device_name(self, device: int) -> str | None:
        return self._identity(device)[1]

    def _identity(self, device: int) -> tuple[Arch, str, int]:
        if device not in self._archs:
            import torch

            properties = torch.cuda.get_device_properties(device)
            arch = arch_from_cc((properties.major, properties.minor))
            self._archs[device] = (arch, str(properties.name), int(properties.multi_processor_count))
        return self._archs[device]

    def current_device(self) -> int:
        import torch

        return int(torch.cuda.current_device())

    def device_guard(self, device: int) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.device(device)

    def current_stream(self, device: int) -> int:
        import torch

        return int(torch.cuda.current_stream(device).cuda_stream)

    @property
    def is_capturing(self) -> Callable[[], bool]:
        """Torch's own question: a plan keeps it, since each of its launches may ask."""
        import torch

        internal: Callable[[], bool] | None = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
        return internal or torch.cuda.is_current_stream_capturing

    def is_loaded(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> bool:
        return (spec, config, family.name, device) in self._kernels

    @property
    def loaded(self) -> int:
        """How many kernels are loaded."""
        return len(self._kernels)

    def unload(self) -> None:
        """Frees every kernel that was loaded; none may be running, or be part of a graph that will run again."""
        while self._kernels:
            driver.unload(self._kernels.popitem()[1].function)

    def kernel(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> CudaKernel:
        """The loaded kernel; compiled and loaded by the first caller, once per device. Any number of threads."""
        key = (spec, config, family.name, device)
        found = self._kernels.get(key)
        if found is not None:
            return found
        with self._locks.setdefault(key, threading.Lock()):
            if key not in self._kernels:
                self._kernels[key] = load_kernel(spec, config, family, self.arch(device), device)
            return self._kernels[key]

    def sm_count(self, device: int) -> int:
        return self._identity(device)[2]

    def encode_tensor_map(
        self, address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
    ) -> bytes:
        return driver_maps.encode_tensor_map(address, dtype, sizes, strides, box)

    def default_config(self, spec: AttentionSpec, family: Family, device: int) -> KernelConfig:
        """The family's first default that does not spill here."""
        from .compiler import fitting_default

        return fitting_default(spec, self.arch(device), family=family)

    def refusal(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> str:
        """Why the build gate refuses the kernel here, "" if it passes."""
        from .store_choice import gate_refusal

        return gate_refusal(spec, config, self.arch(device), family, run_here=True)


class CudaKernel:
    """A function of a loaded cubin on one device."""

    __slots__ = ("_launch", "function", "key")

    def __init__(self, key: str, function: driver.Function) -> None:
        self.key = key
        self.function = function
        self._launch: LaunchFunction = driver.launcher(function)

    @property
    def launch(self) -> LaunchFunction:
        """The driver's launch of this function; a `Plan` keeps it, so that a call goes through no Python in between."""
        return self._launch


def load_kernel(spec: AttentionSpec, config: KernelConfig, family: Family, arch: Arch, device: int) -> CudaKernel:
    """A kernel compiled (or found in the cache) and loaded on `device`, kept by nobody else: see `driver.unload`.

    A kernel that breaks the build gate is right, though slower than it could be: that is logged, not refused.
    """
    from .compiler import compile_kernel
    from .gate import check_gate

    compiled = compile_kernel(spec, config, arch, family=family, gate=False)
    try:
        check_gate(compiled.report, what=f"{family.name} {config} for {spec}")
    except BuildGateError as error:
        log.warning("%s The kernel runs, but slower than another config might: `flashsmith tune` finds one.", error)
    smem_bytes = family.resources(spec, config).smem_bytes
    function = driver.load_function(compiled.cubin, compiled.entry, smem_bytes=smem_bytes, device=device)
    return CudaKernel(compiled.key, function)
