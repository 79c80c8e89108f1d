"""Inputs of the conformance cases: fixed by their seeds, with the values where arithmetic is special.

Random integers and exact arithmetic alone: the same bits on every machine, so that a record can be replayed anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]

#: fp32 patterns that every unary case sees: zeros, subnormals, the ends of the range, infinities and NaN.
SPECIAL_F32 = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x00800001,
    0x3F7FFFFF, 0x3F800000, 0x3F800001, 0xBF800000, 0x3F000000, 0x40000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F000000,
    0x7E800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF,
)  # fmt: skip


def words(count: int, seed: int = 0) -> Words:
    """`count` random words."""
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def nothing() -> Words:
    """The array of an argument that a case does not use."""
    return np.zeros(4, dtype=np.uint32)


def rows_of_chunks(blocks: int, seed: int = 1) -> Words:
    """32 row numbers below 256 for each of `blocks` warps: in order for the first, all equal for the second, random."""
    rows = np.random.default_rng(seed).integers(0, 256, (blocks, 32), dtype=np.uint32)
    rows[0] = np.arange(32)
    rows[1] = 7
    return rows.reshape(-1)


def floats(count: int, low: float, high: float, seed: int = 2) -> Words:
    """The special patterns, then fp32 values uniform in [low, high)."""
    steps = np.random.default_rng(seed).integers(0, 2**24, count)
    values = (low + steps * ((high - low) / 2**24)).astype(np.float32).view(np.uint32)
    values[: len(SPECIAL_F32)] = SPECIAL_F32
    return values


def any_floats(count: int, seed: int = 3) -> Words:
    """The special patterns, then every kind of fp32 bit pattern: all exponents equally likely."""
    values = words(count, seed)
    values[: len(SPECIAL_F32)] = SPECIAL_F32
    return values


def float_pairs(count: int, seed: int = 4) -> tuple[Words, Words]:
    """Two operands: all pairs of the special patterns, then random patterns."""
    special = np.array(SPECIAL_F32, dtype=np.uint32)
    first, second = words(count, seed), words(count, seed + 1)
    pairs = len(special) ** 2
    first[:pairs], second[:pairs] = np.repeat(special, len(special)), np.tile(special, len(special))
    return first, second


def narrowing(count: int, mantissa_bits: int, seed: int = 5) -> Words:
    """fp32 patterns for rounding to a type with `mantissa_bits`: ties and their neighbours, small, huge and special."""
    rng = np.random.default_rng(seed)
    values = any_floats(count, seed)
    part = count // 4
    # Exponents -30 to 17, around the range of fp16, so that most do not overflow.
    exponents = rng.integers(127 - 30, 127 + 18, part, dtype=np.uint32)
    near = (words(part, seed + 100) & 0x807FFFFF) | exponents << 23
    values[part : 2 * part] = near
    lost = 23 - mantissa_bits
    ties = (near >> lost << lost) | (1 << (lost - 1))
    values[2 * part : 3 * part] = ties + rng.integers(-1, 2, part).astype(np.uint32)
    return values


def integer_pairs(count: int, seed: int = 6) -> tuple[Words, Words]:
    """Operands for // and %: signed words, the divisor never 0, nor -1 for the smallest integer."""
    rng = np.random.default_rng(seed)
    a = rng.integers(-(2**31), 2**31, count)
    b = rng.integers(-(2**31), 2**31, count)
    half = count // 2
    a[:half], b[:half] = rng.integers(-50, 50, half), rng.integers(-9, 9, half)
    b[b == 0] = 3
    b[b == -1] = -2
    return a.astype(np.int32).view(np.uint32), b.astype(np.int32).view(np.uint32)


def half_words(dtype: str, values: NDArray[np.float32]) -> Words:
    """Pairs of fp32 values as packed 16-bit floats, the first in the lower half."""
    if dtype == "f16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16).view(np.uint16)
    else:
        halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    return halves.reshape(-1).view(np.uint32)


def mma(dtype: str, kind: str, blocks: int = 16) -> tuple[Words, Words, Words]:
    """(A, B, C) fragments of `blocks` warps. Kinds: integers, real (in (-4, 4)), subnormal, special."""
    rng = np.random.default_rng([7, len(dtype), len(kind)])
    shapes = ((blocks, 32, 8), (blocks, 32, 4), (blocks, 32, 4))
    if kind == "integers":
        a, b, c = (rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes)
        c *= 100
    else:
        a, b, c = (rng.integers(-(2**23), 2**23, shape).astype(np.float32) / np.float32(2**21) for shape in shapes)
    if kind == "subnormal":
        # Around the type's smallest normal number, so that about half of A's elements are subnormal.
        a *= np.float32(2.0**-14 if dtype == "f16" else 2.0**-126)
        c *= np.float32(2.0**-14 if dtype == "f16" else 2.0**-125)
    a_words, b_words = half_words(dtype, a), half_words(dtype, b)
    if kind == "special":
        infinity, nan = (0x7C00, 0x7E00) if dtype == "f16" else (0x7F80, 0x7FC0)
        for fragment in (a_words, b_words):
            at = rng.choice(fragment.size, fragment.size // 128, replace=False)
            fragment[at] = (fragment[at] & 0xFFFF0000) | rng.choice([infinity, infinity | 0x8000, nan], at.size)
    return a_words, b_words, c.reshape(-1).view(np.uint32)
