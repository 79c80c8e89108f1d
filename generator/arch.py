"""The GPU architectures flashsmith generates for, and their limits.

Source of every number: CUDA C++ Programming Guide 13, table "Technical Specifications per Compute Capability", and for
shared memory the per-architecture tuning guides. Bytes are bytes, not KB; 1 KB = 1024 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ArchError, unknown_name_message

KIB = 1024

#: Shared memory the driver keeps for itself per resident block, sm_80 and newer (Ampere Tuning Guide, 1.4.2).
RESERVED_SMEM_PER_BLOCK = 1 * KIB
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255
REGISTERS_PER_SM = 64 * KIB
#: Registers are handed out per warp in units of 256, i.e. 8 per thread (CUDA occupancy calculator).
REGISTER_UNIT_PER_THREAD = 8
WARP_SIZE = 32


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """One compute capability: `name` as NVRTC spells it, shared memory in bytes, resident limits per SM."""

    name: str
    cc: tuple[int, int]
    smem_per_block: int
    smem_per_sm: int
    max_warps_per_sm: int
    max_blocks_per_sm: int

    def __str__(self) -> str:
        return self.name

    def blocks_per_sm(self, *, threads: int, registers: int, smem_bytes: int) -> int:
        """Blocks of `threads` threads, `registers` per thread and `smem_bytes` of shared memory resident on one SM."""
        warps = -(-threads // WARP_SIZE)
        per_thread = -(-registers // REGISTER_UNIT_PER_THREAD) * REGISTER_UNIT_PER_THREAD
        # Each of the 4 SM partitions holds a quarter of the registers, so a block's warps are spread in whole fours.
        warps_by_registers = 4 * (REGISTERS_PER_SM // 4 // (per_thread * WARP_SIZE)) if per_thread else 1 << 30
        return min(
            self.max_blocks_per_sm,
            self.max_warps_per_sm // warps,
            warps_by_registers // warps,
            self.smem_per_sm // (smem_bytes + RESERVED_SMEM_PER_BLOCK),
        )

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name}


def _arch(major: int, minor: int, smem_sm_kib: int, warps: int, blocks: int) -> Arch:
    return Arch(
        name=f"sm_{major}{minor}",
        cc=(major, minor),
        smem_per_block=(smem_sm_kib - 1) * KIB,
        smem_per_sm=smem_sm_kib * KIB,
        max_warps_per_sm=warps,
        max_blocks_per_sm=blocks,
    )


ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        _arch(8, 0, 164, 64, 32),
        _arch(8, 6, 100, 48, 16),
        _arch(8, 7, 164, 48, 16),
        _arch(8, 9, 100, 48, 24),
        _arch(9, 0, 228, 64, 32),
        _arch(10, 0, 228, 64, 32),
        _arch(10, 3, 228, 64, 32),
        _arch(11, 0, 228, 48, 24),
        _arch(12, 0, 100, 48, 24),
        _arch(12, 1, 100, 48, 24),
    )
}

_NAME = re.compile(r"sm_?(\d+)(\d)([af]?)$")


def arch_from_name(name: str) -> Arch:
    """The `Arch` called `name` ("sm_90"; "sm90", "90" and "9.0" are read too). Raises ArchError."""
    text = name.strip().lower().replace("compute_", "sm_")
    if text.replace(".", "").isdigit():
        text = f"sm_{text.replace('.', '')}"
    match = _NAME.match(text)
    if match is None:
        raise ArchError(unknown_name_message("arch", name, tuple(ARCHS)))
    return arch_from_cc((int(match[1]), int(match[2])))


def arch_from_cc(cc: tuple[int, int]) -> Arch:
    """The `Arch` of compute capability `cc`. Raises ArchError for older than 8.0 and for unknown ones."""
    if cc < (8, 0):
        raise ArchError(
            f"flashsmith's kernels need compute capability 8.0 or newer (cp.async and bf16 mma); found {cc[0]}.{cc[1]}."
            " Use torch.nn.functional.scaled_dot_product_attention on this GPU, or name an --arch of sm_80 or newer"
            " to generate for another one."
        )
    name = f"sm_{cc[0]}{cc[1]}"
    if name not in ARCHS:
        raise ArchError(unknown_name_message("arch", name, tuple(ARCHS)))
    return ARCHS[name]
