"""The file that tells the emulator's program what to run; main.cpp reads it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ...generator.errors import EmulatorError
from ...generator.families.base import ArgumentField
from .tensor_map import BASE_OFFSET

MAGIC = b"FLSHEMU2"
SCHEDULES = ("round_robin", "reverse", "greedy", "reverse_greedy", "random")


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Memory of this process that the kernel may use: `nbytes` from `address`. Stores need `writable`."""

    address: int
    nbytes: int
    name: str
    writable: bool = False

    def holds(self, pointer: int) -> bool:
        """Whether `pointer` points into the buffer or just behind it."""
        return self.address <= pointer <= self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Job:
    """One run: `arguments` is the packed struct, with 64-bit pointers at `pointer_offsets`."""

    arguments: bytes
    pointer_offsets: tuple[int, ...]
    buffers: tuple[HostBuffer, ...]
    threads: int
    smem_bytes: int
    blocks: range
    schedule: str
    seed: int
    grid: int

    def encode(self) -> bytes:
        """The job as bytes, with the buffers' present contents. Raises EmulatorError for a pointer into none."""
        for offset in self.pointer_offsets:
            (pointer,) = struct.unpack_from("=Q", self.arguments, offset)
            if pointer and not any(buffer.holds(pointer) for buffer in self.buffers):
                known = ", ".join(f"{b.name} {b.address:#x}+{b.nbytes}" for b in self.buffers) or "none"
                raise EmulatorError(
                    f"A pointer argument must lie in a registered buffer, but byte {offset} of the arguments holds"
                    f" {pointer:#x}; buffers: {known}. Add the buffer to `buffers`."
                )
        parts = [
            MAGIC,
            struct.pack(
                "=iiIIIIQqqqq",
                self.threads,
                self.smem_bytes,
                SCHEDULES.index(self.schedule),
                len(self.arguments),
                len(self.pointer_offsets),
                len(self.buffers),
                self.seed & 0xFFFFFFFFFFFFFFFF,
                self.blocks.start,
                self.blocks.stop,
                self.blocks.step,
                self.grid,
            ),
            self.arguments,
            struct.pack(f"={len(self.pointer_offsets)}I", *self.pointer_offsets),
        ]
        for buffer in self.buffers:
            name = buffer.name.encode()
            parts.append(struct.pack("=QQII", buffer.address, buffer.nbytes, buffer.writable, len(name)))
            parts.append(name)
            parts.append(ctypes.string_at(buffer.address, buffer.nbytes) if buffer.nbytes else b"")
        return b"".join(parts)

    def store_results(self, results: bytes) -> None:
        """Writes the contents of the writable buffers back to their addresses in this process."""
        at = 0
        for buffer in self.buffers:
            if buffer.writable:
                ctypes.memmove(buffer.address, results[at : at + buffer.nbytes], buffer.nbytes)
                at += buffer.nbytes


def pointer_offsets(fields: Sequence[ArgumentField]) -> tuple[int, ...]:
    """Byte offsets of the pointers among a kernel's arguments, those inside tensor maps included."""
    offsets, at = [], 0
    for field in fields:
        if field.is_pointer:
            offsets.append(at)
        elif field.ctype == "TensorMap":
            offsets.append(at + BASE_OFFSET)
        at += field.size
    return tuple(offsets)
