"""Small kernels for the tests of the emulator: text over the primitives, run on numpy arrays."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsmith.generator.source import Section
from flashsmith.runtime.emulator.host_text import HostText, host_text_of
from flashsmith.runtime.emulator.run import HostBuffer, Report, emulate_text

FILE = "small.cu"


def small_kernel(body: str, arguments: str, *, functions: str = "") -> HostText:
    """A translation unit with one kernel: `arguments` are the members of its struct, pointers first."""
    members = "\n".join(f"  {member.strip()};" for member in arguments.split(";") if member.strip())
    types = f"typedef unsigned int u32;\ntypedef unsigned short u16;\nstruct Arguments {{\n{members}\n}};\n"
    entry = 'extern "C" __global__ void small(const __grid_constant__ Arguments args)'
    sections = (
        Section("types", types),
        Section("primitives", "// PTX\n"),
        Section("kernel", f"{functions}\n{entry} {{\n{body}\n}}\n"),
    )
    return host_text_of(sections, entry="small", file_name=FILE)


def line_of(text: HostText, fragment: str) -> int:
    """The only line of the kernel that holds `fragment`."""
    lines = [number for number, line in enumerate(text.lines, start=1) if fragment in line]
    assert len(lines) == 1, (fragment, lines)
    return lines[0]


def run_small(
    text: HostText,
    buffers: Mapping[str, np.ndarray],
    numbers: tuple[int, ...] = (),
    *,
    writable: tuple[str, ...] = ("out",),
    threads: int = 128,
    smem_bytes: int = 16384,
    grid: int = 1,
    **options: Any,
) -> Report:
    """Runs `text` with the arrays as its pointer arguments, in order, and `numbers` as the ints behind them."""
    addresses = [array.ctypes.data for array in buffers.values()]
    packed = struct.pack(f"={len(addresses)}Q{len(numbers)}i{4 * (len(numbers) % 2)}x", *addresses, *numbers)
    host_buffers = tuple(
        HostBuffer(array.ctypes.data, array.nbytes, name, name in writable) for name, array in buffers.items()
    )
    return emulate_text(
        text,
        packed,
        pointers=tuple(range(0, 8 * len(addresses), 8)),
        grid=grid,
        threads=threads,
        smem_bytes=smem_bytes,
        buffers=host_buffers,
        **options,
    )
