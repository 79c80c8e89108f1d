"""What is known of an integer node before the call: the smallest and the largest value it can take.

Indices and sizes lie in [0, 2^29), captured 32-bit scalars in [-2^30, 2^30]; the launcher and the tracer enforce both.
"""

from __future__ import annotations

from .ops import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, SCALAR_LIMIT, SIZE_LIMIT

Range = tuple[int, int]

ANY: Range = (INT64_MIN, INT64_MAX)
LEAF_RANGE: Range = (0, SIZE_LIMIT - 1)
SCALAR_RANGES: dict[str, Range] = {"int32": (-SCALAR_LIMIT, SCALAR_LIMIT), "int64": ANY}
TABLE_RANGES: dict[str, Range] = {"int32": (INT32_MIN, INT32_MAX), "int64": ANY, "uint8": (0, 255)}


def fits_int32(r: Range) -> bool:
    return r[0] >= INT32_MIN and r[1] <= INT32_MAX


def saturate(low: int, high: int) -> Range:
    """[low, high] if it fits 64 bits, else everything: the value may have wrapped."""
    return (low, high) if low >= INT64_MIN and high <= INT64_MAX else ANY


def range_of(op: str, args: tuple[Range, ...]) -> Range:
    """The range of integer operation `op` over operands in `args` (for `where`, the ranges of the two branches)."""
    a = args[0]
    if op == "neg":
        return saturate(-a[1], -a[0])
    if op == "abs":
        if a[0] >= 0:
            return a
        return saturate(max(0, -a[1]), max(-a[0], a[1]))
    if op == "bitnot":
        return ~a[1], ~a[0]
    b = args[1]
    if op == "where":
        return min(a[0], b[0]), max(a[1], b[1])
    if op == "add":
        return saturate(a[0] + b[0], a[1] + b[1])
    if op == "sub":
        return saturate(a[0] - b[1], a[1] - b[0])
    if op == "min":
        return min(a[0], b[0]), min(a[1], b[1])
    if op == "max":
        return max(a[0], b[0]), max(a[1], b[1])
    if op in ("mul", "shl"):
        factors = b if op == "mul" else (1 << b[0], 1 << b[1])
        products = [x * y for x in a for y in factors]
        return saturate(min(products), max(products))
    if op == "floordiv":
        return _floordiv(a, b)
    if op == "mod":
        return _mod(a, b)
    if op == "shr":
        shifted = [x >> s for x in a for s in b]
        return min(shifted), max(shifted)
    return _bitwise(op, a, b)


def _floordiv(a: Range, b: Range) -> Range:
    if b[0] > 0 or b[1] < 0:
        quotients = [x // y for x in a for y in b]
        return saturate(min(quotients), max(quotients))
    # x // 0 is 0, and no quotient is larger than the dividend.
    most = max(abs(a[0]), abs(a[1]))
    return saturate(-most, most)


def _mod(a: Range, b: Range) -> Range:
    if b[0] > 0 and a[0] >= 0 and a[1] < b[0]:
        return a
    return min(0, b[0] + 1), max(0, b[1] - 1)


def _bitwise(op: str, a: Range, b: Range) -> Range:
    if op == "bitand" and (a[0] >= 0 or b[0] >= 0):
        return 0, min(r[1] for r in (a, b) if r[0] >= 0)
    # Both operands fit in `bits` two's complement bits, so the result does.
    bits = max(_bits(a), _bits(b))
    low = 0 if a[0] >= 0 and b[0] >= 0 else -(1 << bits)
    return low, (1 << bits) - 1


def _bits(r: Range) -> int:
    return max(r[1].bit_length(), (~r[0]).bit_length() if r[0] < 0 else 0)
