"""Readings of the SMs' cycle counters in a kernel's own text, and the way from that text to a launch and back.

For `utilisation.py`. Each consumer warpgroup's first thread stores clock64() where the kernel begins and where it ends.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

import torch

from flashsmith.generator.errors import RenderError
from flashsmith.generator.families.base import Family, KernelConfig
from flashsmith.generator.source import KernelSource, Section
from flashsmith.generator.spec import AttentionSpec
from flashsmith.runtime import driver
from flashsmith.runtime.compiler import CompiledKernel
from flashsmith.runtime.device import CudaBackend, CudaKernel

#: The device's array of readings, long long [blocks][warpgroups][2]: at the entry, at the exit.
CLOCKS = "flashsmith_clocks"

# The volatile reads keep the compiler from computing at the entry, and keeping, what the exit needs.
_READING = f"""\
extern "C" {{
__device__ long long {CLOCKS}[BLOCKS][GROUPS][2];
}}

__device__ __forceinline__ void read_clock(int which) {{
  int thread, block;
  long long now;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  if (thread < 128 || thread % 128 != 0) return;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  {CLOCKS}[block][thread / 128 - 1][which] = now;
}}

"""
_ENTRY = re.compile(r'^extern "C" __global__ [^{;]*\{\n', re.MULTILINE)
_CONSUME = re.compile(r"^( *)consume\([^;]*\);\n", re.MULTILINE)


def with_clocks(source: KernelSource, *, blocks: int, groups: int) -> KernelSource:
    """`source` with a reading of the clock where its entry begins and behind its consumers. Raises RenderError."""
    text = source.section("kernel").text
    entry = _ENTRY.search(text)
    calls = [] if entry is None else list(_CONSUME.finditer(text, entry.end()))
    if entry is None or len(calls) != 1:
        raise RenderError(
            "Clock readings go to the beginning of the entry function and behind its only call of consume(...), but"
            f" the text of {source.family} has {len(calls)} such calls. Change `with_clocks` as the template changed."
        )
    (call,) = calls
    reading = _READING.replace("BLOCKS", str(blocks)).replace("GROUPS", str(groups))
    clocked = (
        text[: entry.start()] + reading + text[entry.start() : entry.end()] + "  read_clock(0);\n"
        + text[entry.end() : call.end()] + f"{call[1]}read_clock(1);\n" + text[call.end() :]
    )  # fmt: skip
    sections = tuple(Section(s.name, clocked) if s.name == "kernel" else s for s in source.sections)
    return replace(source, sections=sections)


class OneKernel(CudaBackend):
    """This process's GPUs, where every plan gets the kernel `compiled`."""

    def __init__(self, compiled: CompiledKernel) -> None:
        super().__init__()
        self.compiled = compiled
        self.function: driver.Function | None = None

    def kernel(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> CudaKernel:
        smem_bytes = family.resources(spec, config).smem_bytes
        self.function = driver.load_function(
            self.compiled.cubin, self.compiled.entry, smem_bytes=smem_bytes, device=device
        )
        return CudaKernel(self.compiled.key, self.function)

    def free(self) -> None:
        if self.function is not None:
            driver.unload(self.function)


def read_clocks(function: driver.Function, *, blocks: int, groups: int) -> torch.Tensor:
    """The latest launch's readings, int64 (blocks, groups, 2). Waits for the device."""
    library = driver.started_library()
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = torch.empty(blocks, groups, 2, dtype=torch.int64)
    with driver.on_device(function.device):
        code = library.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), function.module, CLOCKS.encode())
        driver.check(library, code, f"finding {CLOCKS}")
        driver.check(library, library.cuCtxSynchronize(), "waiting for a kernel")
        code = library.cuMemcpyDtoH_v2(
            ctypes.c_void_p(found.data_ptr()), address, ctypes.c_size_t(found.numel() * found.element_size())
        )
        driver.check(library, code, f"reading {CLOCKS}")
    return found
