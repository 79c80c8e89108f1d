"""Inputs of the wgmma cases: shared-memory images after the PTX ISA's layouts, apart from the engine's decoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .conformance_inputs import half_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Bytes of the swizzle's span -> the descriptor's mode.
MODES = {16: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Operand:
    """A 16-bit matrix (rows along M or N, columns along K) in shared memory.

    `image` holds 16-bit words; `descriptors[i]` is for columns 16 i to 16 i + 15, with the image at address 0.
    """

    image: NDArray[np.uint16]
    descriptors: tuple[int, ...]


def descriptor(start: int, lead: int, stride: int, span: int) -> int:
    """The 64-bit matrix descriptor; all in bytes."""
    return start >> 4 | (lead >> 4) << 16 | (stride >> 4) << 32 | MODES[span] << 62


def swizzled(address: NDArray[np.int64], span: int) -> NDArray[np.int64]:
    """The address a swizzle of `span` bytes moves each one to: 16-byte chunks exchanged by the 128-byte row."""
    return address ^ ((address >> 7 & (span // 16 - 1)) << 4)


def k_major(matrix: NDArray[np.uint16], span: int) -> Operand:
    """Rows of `span` bytes along K, 8 rows a group; columns beyond a span lie in the next block of all rows."""
    rows, columns = matrix.shape
    r, k = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    if span == 16:  # 8 x 8 matrices of 128 bytes, those of one 8-column strip behind one another
        address = k // 8 * rows * 16 + r * 16 + k % 8 * 2
        lead, stride = rows * 16, 128
        starts = [i * 2 * lead for i in range(columns // 16)]
    else:
        per_span = span // 2
        address = k // per_span * rows * span + r * span + k % per_span * 2
        lead, stride = 16, 8 * span
        steps = per_span // 16
        starts = [i // steps * rows * span + i % steps * 32 for i in range(columns // 16)]
    descriptors = tuple(descriptor(start, lead, stride, span) for start in starts)
    return Operand(_placed(matrix, address, span), descriptors)


def mn_major(matrix: NDArray[np.uint16], span: int) -> Operand:
    """Rows of k with `span` bytes along M or N, 8 a group; further elements lie in the next block of all k."""
    rows, columns = matrix.shape
    r, k = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    if span == 16:  # 8 x 8 matrices of 128 bytes: those of 8 k behind one another
        address = k // 8 * rows * 16 + r // 8 * 128 + k % 8 * 16 + r % 8 * 2
        lead, stride = rows * 16, 128
        step = 2 * lead
    else:
        per_span = span // 2
        address = r // per_span * columns * span + k * span + r % per_span * 2
        lead, stride = columns * span, 8 * span
        step = 16 * span
    descriptors = tuple(descriptor(i * step, lead, stride, span) for i in range(columns // 16))
    return Operand(_placed(matrix, address, span), descriptors)


def _placed(matrix: NDArray[np.uint16], address: NDArray[np.int64], span: int) -> NDArray[np.uint16]:
    address = swizzled(address, span)
    # Whole 8-row groups of 128-byte rows, so that the swizzle stays inside.
    image = np.zeros((int(address.max()) // 1024 + 1) * 512, dtype=np.uint16)
    image[address // 2] = matrix
    return image


def fragments_of_a(matrix: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """A (64, 16) as each thread's 4 registers (128, 4): mma's fragment of the warp's 16 rows."""
    lane = np.arange(128) % 32
    row = np.arange(128) // 32 * 16 + lane // 4
    column = lane % 4 * 2
    registers = [
        matrix[row + r % 2 * 8, column + r // 2 * 8].astype(np.uint32)
        | matrix[row + r % 2 * 8, column + r // 2 * 8 + 1].astype(np.uint32) << 16
        for r in range(4)
    ]
    return np.stack(registers, axis=1).astype(np.uint32)


def accumulators_of(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """D (64, N) as each thread's N / 2 registers (128, N / 2)."""
    thread, j = np.meshgrid(np.arange(128), np.arange(matrix.shape[1] // 2), indexing="ij")
    lane = thread % 32
    registers: NDArray[np.float32] = matrix[
        thread // 32 * 16 + lane // 4 + 8 * (j // 2 % 2), 8 * (j // 4) + lane % 4 * 2 + j % 2
    ]
    return registers


#: Columns of A and B in a case: four steps along K.
DEPTH = 64


@dataclass(frozen=True)
class Product:
    """One case: the arrays its kernel reads, the bytes of its operands in shared memory, and the matrices.

    `in` holds B's image, then A's image or, for A in registers, its fragments a step; `in2` a step the descriptors of A
    and B, two words each; `in3` the accumulators.
    """

    arrays: dict[str, NDArray[np.uint32]]
    a_bytes: int
    b_bytes: int
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    d: NDArray[np.float32]

    @property
    def steps(self) -> int:
        return DEPTH // 16


@lru_cache(maxsize=4)
def product(form: str, dtype: str, span: int, n: int, kind: str) -> Product:
    """The case of one instruction: D (64, n) += A (64, 64) B (n, 64)^T. Kinds: integers (exact), normal.

    Forms: "ss" (A in shared memory, B K-major), "ss_tb" (the same, B N-major), "rs" (A in registers, B N-major).
    """
    rng = np.random.default_rng([17, len(form), len(dtype), span, n, len(kind)])
    shapes = ((64, DEPTH), (n, DEPTH), (64, n))
    if kind == "integers":
        a, b, d = (rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes)
    else:
        a, b, d = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    a_bits, b_bits = (half_words(dtype, m.reshape(-1)).view(np.uint16).reshape(m.shape) for m in (a, b))
    b_operand = k_major(b_bits, span) if form == "ss" else mn_major(b_bits, span)
    if form != "rs":
        a_operand = k_major(a_bits, span)
        a_words, a_descriptors = a_operand.image.view(np.uint32), a_operand.descriptors
    else:
        a_words = np.concatenate([fragments_of_a(a_bits[:, k : k + 16]).reshape(-1) for k in range(0, DEPTH, 16)])
        a_descriptors = (0,) * (DEPTH // 16)
    pairs = np.array([*zip(a_descriptors, b_operand.descriptors, strict=True)], dtype=np.uint64)
    arrays = {
        "in": np.concatenate([b_operand.image.view(np.uint32), a_words]),
        "in2": np.ascontiguousarray(pairs).view(np.uint32).reshape(-1),
        "in3": accumulators_of(d).reshape(-1).view(np.uint32),
    }
    a_bytes = 0 if form == "rs" else a_words.nbytes
    b_bytes = b_operand.image.nbytes
    return Product(arrays, a_bytes, b_bytes, widened(dtype, a_bits), widened(dtype, b_bits), d)


def widened(dtype: str, bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The 16-bit floats as fp32."""
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
