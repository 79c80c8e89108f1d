"""When a GPU's output and the engine's agree: to the bit where the instruction is defined so, else within a bound.

Outputs are arrays of 32-bit words. The bounds are those of the PTX ISA (approximate instructions) and of the CUDA
programming guide (library functions), plus half a unit for the engine's own rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

CANONICAL_NAN = 0x7FC00000


@dataclass(frozen=True, slots=True)
class Comparison:
    """`mismatches` words break the rule; `worst` is the largest difference in `unit`; `example` is one mismatch."""

    mismatches: int
    worst: float
    unit: str
    example: str = ""


class Rule(Protocol):
    """How two outputs of one case are compared."""

    @property
    def text(self) -> str:
        """The rule in words."""
        ...

    @property
    def exact(self) -> bool:
        """Whether equal `canonical` words are required, so that a digest of them can stand for the output."""
        ...

    def canonical(self, words: Any) -> Any:
        """The words with what the rule ignores made equal."""

    def compare(self, gpu: Any, engine: Any, arrays: Mapping[str, Any]) -> Comparison:
        """The comparison of two outputs for the inputs `arrays`."""
        ...


@dataclass(frozen=True, slots=True)
class BitRule:
    """The same bits; `any_nan`: every NaN equals every other."""

    any_nan: bool = False
    exact: bool = True

    @property
    def text(self) -> str:
        return "the same bits, one NaN as good as another" if self.any_nan else "the same bits"

    def canonical(self, words: Any) -> Any:
        if not self.any_nan:
            return words
        words = words.copy()
        words[(words & 0x7FFFFFFF) > 0x7F800000] = CANONICAL_NAN
        return words

    def compare(self, gpu: Any, engine: Any, arrays: Mapping[str, Any]) -> Comparison:
        different = self.canonical(gpu) != self.canonical(engine)
        return Comparison(int(different.sum()), float(different.sum()), "words", _example(different, gpu, engine))


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """fp32 results: |gpu - engine| <= relative * |engine| + absolute; NaN, infinities and zeros must agree in kind.

    `near_zero`: a magnitude below which any two results agree (flushed subnormals).
    """

    relative: float
    absolute: float = 0.0
    near_zero: float = 0.0
    exact: bool = False

    @property
    def text(self) -> str:
        return f"|gpu - engine| <= {self.relative:.3g} * |engine| + {self.absolute:.3g}; same NaN and infinities"

    def canonical(self, words: Any) -> Any:
        return words

    def compare(self, gpu: Any, engine: Any, arrays: Mapping[str, Any]) -> Comparison:
        import numpy as np

        g, e = _doubles(gpu), _doubles(engine)
        finite = np.isfinite(g) & np.isfinite(e)
        same_kind = (np.isnan(g) == np.isnan(e)) & ((g == e) | ~(np.isinf(g) | np.isinf(e)))
        with np.errstate(invalid="ignore"):
            difference = np.where(finite, np.abs(g - e), 0.0)
            bound = self.relative * np.abs(e) + self.absolute
        tiny = finite & (np.abs(g) <= self.near_zero) & (np.abs(e) <= self.near_zero)
        different = ~same_kind | (finite & (difference > bound) & ~tiny)
        scale = np.where(finite & (e != 0), np.abs(e), 1.0)
        worst = np.where(finite & ~tiny, difference / (scale if self.relative else 1.0), 0.0).max(initial=0.0)
        unit = "relative" if self.relative else "absolute"
        return Comparison(int(different.sum()), float(worst), unit, _example(different, gpu, engine))


@dataclass(frozen=True, slots=True)
class MmaRule:
    """mma with fp32 sums: both within 18 * 2^-23 * (|c| + sum |a b|) of the exact value.

    The hardware adds the products and c in groups of up to 16, aligned to the largest and truncated, in an order it
    does not promise: 2 groups of 9 terms lose up to a unit of 2^-23 each. The engine rounds after each product. Bits
    are therefore compared only where every order is exact (the integer cases).
    """

    dtype: str
    units: float = 18.0
    exact: bool = False

    @property
    def text(self) -> str:
        return f"both within {self.units:g} * 2^-23 * (|c| + sum |a b|) of the exact value; same NaN and infinities"

    def canonical(self, words: Any) -> Any:
        return words

    def compare(self, gpu: Any, engine: Any, arrays: Mapping[str, Any]) -> Comparison:
        import numpy as np

        exact, magnitude = exact_mma(self.dtype, arrays)
        different = np.zeros(exact.shape, dtype=bool)
        worst = 0.0
        for words in (gpu, engine):
            value = _doubles(words).reshape(exact.shape)
            finite = np.isfinite(exact)
            with np.errstate(invalid="ignore"):
                error = np.where(finite, np.abs(value - exact), 0.0)
                units = error / np.where(magnitude > 0, magnitude, 2.0**-149) * 2.0**23
            units = np.where(finite, units, 0.0)
            kind = np.where(np.isnan(exact), np.isnan(value), finite | (value == exact))
            different |= ~kind.astype(bool) | ~(units <= self.units)
            worst = max(worst, float(np.nan_to_num(units, nan=np.inf).max(initial=0.0)))
        unit = "2^-23 of the sum of magnitudes"
        return Comparison(int(different.sum()), worst, unit, _example(different, gpu, engine))


@dataclass(frozen=True, slots=True)
class TrapRule:
    """No output: the GPU must raise an illegal instruction, and the engine must report what says `finding`."""

    finding: str
    exact: bool = True

    @property
    def text(self) -> str:
        return f"traps: the GPU raises an illegal instruction, and the engine reports that {self.finding}"

    def canonical(self, words: Any) -> Any:
        return words

    def compare(self, gpu: Any, engine: Any, arrays: Mapping[str, Any]) -> Comparison:
        """For a GPU that did not trap, as that is what gives `gpu`: every word of it breaks the rule."""
        return Comparison(int(gpu.size), float(gpu.size), "words", "the GPU ran to the end, but should have trapped")


def exact_mma(dtype: str, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """(A B + C, |A| |B| + |C|) in fp64, as lane-ordered accumulators (block, lane, 4).

    The fragments are those of mma.m16n8k16 (PTX ISA): lane l, g = l / 4, q = 2 (l % 4).
    """
    import numpy as np

    a_words = arrays["in"].reshape(-1, 32, 4)
    b_words = arrays["in2"].reshape(-1, 32, 2)
    c = _doubles(arrays["in3"]).reshape(-1, 32, 4)
    blocks = a_words.shape[0]
    a, b = np.zeros((blocks, 16, 16)), np.zeros((blocks, 16, 8))
    rows, columns = np.zeros((32, 4), dtype=int), np.zeros((32, 4), dtype=int)
    for lane in range(32):
        g, q = lane // 4, 2 * (lane % 4)
        for r in range(4):
            rows[lane, r], columns[lane, r] = g + 8 * (r >> 1), q + (r & 1)
            for half in range(2):
                a[:, g + 8 * (r & 1), q + half + 8 * (r >> 1)] = _half(dtype, a_words[:, lane, r] >> (16 * half))
                if r < 2:
                    b[:, q + half + 8 * r, g] = _half(dtype, b_words[:, lane, r] >> (16 * half))
    with np.errstate(invalid="ignore"):
        product, magnitude = a @ b, np.abs(a) @ np.abs(b)
        return product[:, rows, columns] + c, magnitude[:, rows, columns] + np.abs(c)


def _doubles(words: Any) -> Any:
    """The words as fp32 values, widened. A signalling NaN is a NaN."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        return words.view(np.float32).astype(np.float64)


def _half(dtype: str, words: Any) -> Any:
    import numpy as np

    bits = (words & 0xFFFF).astype(np.uint32)
    if dtype == "bf16":
        return _doubles(bits << 16)
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def _example(different: Any, gpu: Any, engine: Any) -> str:
    import numpy as np

    found = np.flatnonzero(different.reshape(-1))
    if not found.size:
        return ""
    i = int(found[0])
    return f"word {i}: gpu {int(gpu[i]):#010x}, engine {int(engine[i]):#010x}"


BITS = BitRule()
NAN_OR_BITS = BitRule(any_nan=True)
