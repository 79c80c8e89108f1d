"""For the tests of Hopper kernels: mutants of generated ones, and small ones over the primitives."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from helpers_mutants import Mutant

from flashsmith.generator.source import KernelSource, Section
from flashsmith.runtime.emulator.host_text import HostText, host_text_of
from flashsmith.runtime.emulator.run import HostBuffer, Report, emulate_text
from flashsmith.runtime.emulator.tensor_map import encode_tensor_map

#: Statements that order threads, copies, products or memory.
_ORDERING = re.compile(
    r"^(?P<indent> *(?:if \([^;{]*\) )?)"
    r"(?P<call>(?:\w*barrier_(?:sync|arrive|wait)\w*|warp_sync|fence_\w+|wgmma_(?:fence|commit_group|wait_group)"
    r"|bulk_(?:commit_group|wait_group(?:_read)?))(?:<\d>)?\([^;]*\));",
    re.MULTILINE,
)


def hopper_mutants(source: KernelSource) -> Iterator[Mutant]:
    """Every mutant of the kernel's section: a statement deleted, a wait for one group less, an announcement changed."""
    kernel = source.section("kernel").text
    first_line = source.text[: source.text.index(kernel)].count("\n") + 1
    for match in _ORDERING.finditer(kernel):
        call = match["call"]
        changes = [("delete", "")]
        if re.search(r"_wait_group(?:_read)?<", call):
            changes.append(("weaken", re.sub(r"<(\d)>", lambda m: f"<{int(m[1]) + 1}>", call)))
        if "expect_tx" in call:
            changes.append(("announce nothing in", re.sub(r"_expect_tx\((.*), [^,]*\)$", r"(\1)", call, flags=re.S)))
            changes.append(("announce 64 bytes less in", call[:-1] + " - 64)"))
        if call.startswith("mbarrier_wait"):
            changes.append(("wait for the other parity in", call[:-1] + " ^ 1)"))
        for verb, text in changes:
            mutated = kernel[: match.start()] + f"{match['indent']}{text};" + kernel[match.end() :]
            sections = tuple(replace(s, text=mutated) if s.name == "kernel" else s for s in source.sections)
            line = first_line + kernel.count("\n", 0, match.start())
            yield Mutant(replace(source, sections=sections), f"{verb} {' '.join(call.split())}", line)


FILE = "hopper.cu"
_TYPES = """\
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
struct alignas(64) TensorMap {
  u64 opaque[16];
};
struct Arguments {
  TensorMap map;
  const u32* in;
  u32* out;
};
"""
_FUNCTIONS = """\
u64 descriptor(u32 address, int lead, int stride, int mode) {
  const u32 low = ((address & 0x3ffff) >> 4) | lead >> 4 << 16;
  return static_cast<u64>(static_cast<u32>(stride >> 4) | static_cast<u32>(mode) << 30) << 32 | low;
}
"""


def hopper_kernel(body: str) -> HostText:
    """A kernel that sees `args.map`, `args.in`, `args.out`, `t` (its thread) and `descriptor`."""
    entry = 'extern "C" __global__ void small(const __grid_constant__ Arguments args)'
    sections = (
        Section("types", _TYPES),
        Section("primitives", "// PTX\n"),
        Section("kernel", f"{_FUNCTIONS}\n{entry} {{\n  const int t = thread_index();\n{body}\n}}\n"),
    )
    return host_text_of(sections, entry="small", file_name=FILE)


def run_hopper(
    text: HostText,
    source: np.ndarray,
    out: np.ndarray,
    *,
    map_of: str = "in",
    sizes: tuple[int, ...] = (64, 64, 1, 1),
    strides: tuple[int, ...] = (128, 8192, 8192),
    box: tuple[int, ...] = (64, 8, 1, 1),
    swizzle: int = 128,
    shift: int = 0,
    threads: int = 128,
    smem_bytes: int = 32768,
    **options: Any,
) -> Report:
    """Runs `text` with a tensor map of `source` or `out`, which begins `shift` bytes into it."""
    address = (source if map_of == "in" else out).ctypes.data + shift
    image = encode_tensor_map(address, sizes, strides, box, swizzle=swizzle)
    packed = (image + struct.pack("=2Q", source.ctypes.data, out.ctypes.data)).ljust(192, b"\0")
    return emulate_text(
        text,
        packed,
        pointers=(8, 128, 136),
        grid=1,
        threads=threads,
        smem_bytes=smem_bytes,
        buffers=(
            HostBuffer(source.ctypes.data, source.nbytes, "in", False),
            HostBuffer(out.ctypes.data, out.nbytes, "out", True),
        ),
        **options,
    )
