"""Random masks in two forms (for the tracer, and for plain Python), and their CUDA text compiled for the host."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from flashsmith.generator import language
from flashsmith.generator.language import Traced
from flashsmith.generator.language.cuda import ModText, mod_argument_values, mod_table_arguments, render_mods

#: `struct` codes of the members of `struct Arguments`.
CODES = {"int": "i", "long long": "q", "float": "f"}


@dataclass
class RandomMask:
    """A mask as source text: `traced` for the tracer, `plain` for Python numbers; `captured` are its globals."""

    traced: str
    plain: str
    captured: dict[str, Any]

    def function(self) -> Callable[..., Any]:
        """The mask for `trace_mask`."""
        scope = {**vars(language), **self.captured}
        exec(f"def mask(b, h, q_idx, kv_idx):\n    return {self.traced}\n", scope)
        return scope["mask"]  # type: ignore[no-any-return]

    def oracle(self, seqlen_q: int, seqlen_k: int, nheads: int) -> Callable[[int, int, int, int], bool]:
        """The mask on plain integers, by Python's own operators."""
        scope = {**_PLAIN, **self.captured, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "nheads": nheads}
        exec(f"def mask(b, h, q_idx, kv_idx):\n    return {self.plain}\n", scope)
        return scope["mask"]  # type: ignore[no-any-return]


def _read(table: np.ndarray, *indices: int) -> int | bool:
    inside = tuple(min(max(i, 0), n - 1) for i, n in zip(indices, table.shape, strict=True))
    return table[inside].item()  # type: ignore[no-any-return]


_PLAIN: dict[str, Any] = {
    "where": lambda c, a, b: a if c else b,
    "minimum": min,
    "maximum": max,
    "read": _read,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
}

_LEAVES = ("q_idx", "kv_idx", "q_idx", "kv_idx", "b", "h", "seqlen_q", "seqlen_k", "nheads")


@dataclass
class MaskWriter:
    """Writes random masks; every choice comes from `random`, so that hypothesis can shrink it."""

    random: Random
    large: bool = False
    captured: dict[str, Any] = field(default_factory=dict)

    def mask(self, depth: int = 3) -> RandomMask:
        traced, plain = self._bool(depth)
        return RandomMask(traced, plain, dict(self.captured))

    def _bool(self, depth: int) -> tuple[str, str]:
        kind = self.random.randint(0, 9)
        if depth <= 0 or kind <= 4:
            return self._comparison(depth)
        (a, x), (b, y) = self._bool(depth - 1), self._bool(depth - 1)
        if kind in (5, 6):
            return f"({a} & {b})", f"({x} and {y})"
        if kind == 7:
            return f"({a} | {b})", f"({x} or {y})"
        if kind == 8:
            return f"(~{a})", f"(not {x})"
        c, z = self._bool(depth - 2)
        return f"where({c}, {a}, {b})", f"({x} if {z} else {y})"

    def _comparison(self, depth: int) -> tuple[str, str]:
        if self.random.randint(0, 11) == 0:
            return self._load("bool", depth)
        op = self.random.choice(["<", "<=", ">", ">=", "==", "!="])
        (a, x), (b, y) = self._int(depth), self._int(depth)
        if not any(c.isalpha() for c in a + b):  # literals alone would be Python's own bool
            b = y = "kv_idx"
        return f"({a} {op} {b})", f"({x} {op} {y})"

    def _int(self, depth: int) -> tuple[str, str]:
        kind = self.random.randint(0, 19)
        if depth <= 0 or kind <= 7:
            return self._atom(depth)
        if kind <= 13:
            op = self.random.choice("+--+*")
            (a, x), (b, y) = self._int(depth - 1), self._int(depth - 1)
            return f"({a} {op} {b})", f"({x} {op} {y})"
        (a, x), (b, y) = self._int(depth - 1), self._atom(0)
        if kind == 14:
            name = self.random.choice(["minimum", "maximum"])
            return f"{name}({a}, {b})", f"{name}({x}, {y})"
        if kind in (15, 16):
            divisor = self.random.choice(["2", "3", "8", "16", "-3", None])
            b, y = (divisor, divisor) if divisor else self._scalar()
            symbol, name = self.random.choice([("//", "floordiv"), ("%", "mod")])
            return f"({a} {symbol} {b})", f"{name}({x}, {y})"
        if kind == 17:
            return f"abs({a})", f"abs({x})"
        if kind == 18:
            c, z = self._comparison(0)
            return f"where({c}, {a}, {b})", f"({x} if {z} else {y})"
        form = self.random.choice(
            ["({} >> 2)", "({} << 3)", "({} & 7)", "({} & 6)", "(~{})", "(-{})", "({} ^ 5)", "({} | 3)"]
        )
        return form.format(a), form.format(x)

    def _atom(self, depth: int) -> tuple[str, str]:
        kind = self.random.randint(0, 9)
        if kind <= 5:
            name = self.random.choice(_LEAVES)
            return name, name
        if kind <= 7:
            number = str(self.random.randint(-4, 20))
            return f"({number})", f"({number})"
        if kind == 8 or depth <= 0:
            return self._scalar()
        return self._load("int", depth)

    def _scalar(self) -> tuple[str, str]:
        name = f"n{self.random.randint(0, 2)}"
        if name not in self.captured:
            choices = [-3, -1, 1, 2, 5, 9, 17]
            if self.large:
                choices += [1 << 30, (1 << 31) - 1, -(1 << 31), 1 << 40, -(1 << 40)]
            self.captured[name] = self.random.choice(choices)
        return name, name

    def _load(self, kind: str, depth: int) -> tuple[str, str]:
        dtype = self.random.choice(["bool"] if kind == "bool" else ["int32", "int64", "uint8"])
        ndim = self.random.randint(1, 2)
        name = f"t_{dtype}_{ndim}"
        if name not in self.captured:
            values = np.random.default_rng(self.random.randint(0, 99)).integers(0, 6, size=(40, 48)[:ndim])
            self.captured[name] = values.astype(dtype)
        indices = [self.random.choice(["b", "h", "q_idx", "kv_idx", None]) for _ in range(ndim)]
        pairs = [(i, i) if i else self._index(depth - 2) for i in indices]
        return f"{name}[{', '.join(a for a, _ in pairs)}]", f"read({name}, {', '.join(x for _, x in pairs)})"

    def _index(self, depth: int) -> tuple[str, str]:
        """Any integer that is not below 0 for every key."""
        a, x = self._int(depth)
        return f"maximum({a}, kv_idx - 9)", f"maximum({x}, kv_idx - 9)"


# ---- The CUDA text on the host ---------------------------------------------------------------

#: The primitives the text may call, in plain C++, and loops that run a mask over all pairs and tiles.
PRELUDE = r"""
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
typedef unsigned int u32;
typedef unsigned short u16;
struct KvRange { int visit_begin, visit_end, full_begin, full_end; };
constexpr int TILE_EMPTY = 0, TILE_MIXED = 1, TILE_FULL = 2;
float ld_global_f32(const float* p) { return *p; }
int ld_global_s32(const int* p) { return *p; }
long long ld_global_s64(const long long* p) { return *p; }
int ld_global_u8(const unsigned char* p) { return *p; }
float ld_global_bf16(const u16* p) { u32 x = u32(*p) << 16; float y; memcpy(&y, &x, 4); return y; }
float ld_global_f16(const u16* p) { _Float16 y; memcpy(&y, p, 2); return y; }
float max_f32(float a, float b) { return fmaxf(a, b); }
float min_f32(float a, float b) { return fminf(a, b); }
float abs_f32(float a) { return fabsf(a); }
float exp_f32(float a) { return expf(a); }
float log_f32(float a) { return logf(a); }
float tanh_f32(float a) { return tanhf(a); }
float sqrt_f32(float a) { return sqrtf(a); }
float negative_infinity() { return -INFINITY; }
template <class T> T floor_div(T a, T b) { return b ? a / b - (a % b && (a % b < 0) != (b < 0)) : 0; }
template <class T> T floor_mod(T a, T b) { return b ? a % b + (a % b && (a % b < 0) != (b < 0) ? b : 0) : 0; }
#define INTEGER(T, S) \
  T max_##S(T a, T b) { return a > b ? a : b; } \
  T min_##S(T a, T b) { return a < b ? a : b; } \
  T abs_##S(T a) { return a < 0 ? -a : a; } \
  T floor_div_##S(T a, T b) { return floor_div(a, b); } \
  T floor_mod_##S(T a, T b) { return floor_mod(a, b); }
INTEGER(int, s32)
INTEGER(long long, s64)
"""

_RUNNERS = r"""
extern "C" void mask_%(i)d(const m%(i)d::Arguments* args, int b, int h, int rows, int keys, unsigned char* seen) {
  for (int q = 0; q < rows; ++q)
    for (int k = 0; k < keys; ++k) seen[q * keys + k] = m%(i)d::mask_mod(*args, b, h, q, k);
}
extern "C" bool sees_%(i)d(const m%(i)d::Arguments* args, int b, int h, int q, int k) {
  return m%(i)d::mask_mod(*args, b, h, q, k);
}
extern "C" void range_%(i)d(const m%(i)d::Arguments* args, int b, int h, int first, int last, int* ends) {
  const KvRange r = m%(i)d::kv_range(*args, b, h, first, last);
  ends[0] = r.visit_begin; ends[1] = r.visit_end; ends[2] = r.full_begin; ends[3] = r.full_end;
}
extern "C" int classify_%(i)d(const m%(i)d::Arguments* args, int b, int h, int qf, int ql, int kf, int kl) {
  return m%(i)d::%(classify)s;
}
extern "C" float score_%(i)d(const m%(i)d::Arguments* args, float score, int b, int h, int q, int k) {
  return m%(i)d::%(score)s;
}
"""


class HostMods:
    """Masks and scores compiled by g++ with the undefined-behaviour sanitizer, one namespace each.

    `mods` are pairs (mask or None, score or None). Findings go to stderr as "runtime error".
    """

    def __init__(self, mods: Sequence[tuple[Traced | None, Traced | None]], folder: Path) -> None:
        self.mods = list(mods)
        self.texts: list[ModText] = []
        parts = [PRELUDE]
        for i, (mask, score) in enumerate(self.mods):
            text = render_mods(mask and mask.graph, score and score.graph)
            self.texts.append(text)
            parts.append(self._namespace(i, text))
        source, library = folder / "mods.cpp", folder / "mods.so"
        source.write_text("\n".join(parts))
        compiler = shutil.which("g++") or pytest.skip("needs g++ to run the emitted text on the host")
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused-function"]
        command += ["-Wno-unused-variable", "-fsanitize=undefined", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(library))

    def _namespace(self, i: int, text: ModText) -> str:
        members = [f"{ctype} {name};" for ctype, name in self._members(i)]
        functions = (text.mask_function, text.score_function, text.kv_range_function, text.classify_function)
        stubs = (
            ""
            if text.mask_function
            else (
                "bool mask_mod(const Arguments&, int, int, int, int) { return true; }\n"
                "KvRange kv_range(const Arguments&, int, int, int, int) { return {}; }\n"
            )
        )
        runners = _RUNNERS % {
            "i": i,
            "classify": "classify_tile(*args, b, h, qf, ql, kf, kl)" if text.needs_classify else "NO_CLASSIFY",
            "score": "score_mod(*args, score, b, h, q, k)" if text.score_function else "NO_SCORE",
        }
        body = "\n".join(f for f in functions if f)
        return (
            f"namespace m{i} {{\nconstexpr int NO_CLASSIFY = -1, NO_SCORE = 0;\n"
            f"struct Arguments {{ {' '.join(members)} }};\n{stubs}{body}}}\n{runners}"
        )

    def _members(self, i: int) -> list[tuple[str, str]]:
        own = [(ctype, name) for ctype, name, _ in self.texts[i].arguments]
        wide = [m for m in own if m[0] not in ("int", "float")]
        sizes = [("int", name) for name in ("seqlen_q", "seqlen_k", "nheads")]
        return wide + sizes + [m for m in own if m[0] in ("int", "float")]

    def pack(self, i: int, *, seqlen_q: int, seqlen_k: int, nheads: int) -> ctypes.Array[ctypes.c_char]:
        """`struct Arguments` of mod `i`, as the launcher packs it."""
        values: dict[str, Any] = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "nheads": nheads}
        for prefix, traced in zip(("mask", "score"), self.mods[i], strict=True):
            if traced is None:
                continue
            values.update(mod_argument_values(prefix, traced))
            for names, table in zip(mod_table_arguments(prefix, traced.graph), traced.tables, strict=True):
                values[names.pointer] = table.ctypes.data
                strides = [s // table.itemsize for s in table.strides]
                values.update(zip(names.strides, strides, strict=True))
        members = self._members(i)
        codes = "".join("Q" if ctype.endswith("*") else CODES[ctype] for ctype, _ in members)
        packed = struct.pack("=" + codes, *(values[name] for _, name in members))
        return ctypes.create_string_buffer(packed, len(packed) + 8)

    def seen(self, i: int, args: Any, b: int, h: int, rows: int, keys: int) -> np.ndarray:
        """mask_mod of mod `i` for every row and key."""
        out = np.zeros((rows, keys), dtype=np.uint8)
        self._call(f"mask_{i}", args, b, h, rows, keys, ctypes.c_void_p(out.ctypes.data))
        return out.astype(bool)

    def sees(self, i: int, args: Any, b: int, h: int, q: int, kv: int) -> bool:
        """mask_mod of mod `i` for one row and key."""
        function = getattr(self._library, f"sees_{i}")
        function.restype = ctypes.c_bool
        return bool(function(args, b, h, q, kv))

    def kv_range(self, i: int, args: Any, b: int, h: int, first: int, last: int) -> tuple[int, ...]:
        ends = (ctypes.c_int * 4)()
        self._call(f"range_{i}", args, b, h, first, last, ends)
        return tuple(ends)

    def classify(self, i: int, args: Any, b: int, h: int, q: tuple[int, int], kv: tuple[int, int]) -> int:
        """0 empty, 1 mixed, 2 full; -1 where the mod needs no classification."""
        return int(self._call(f"classify_{i}", args, b, h, *q, *kv))

    def score(self, i: int, args: Any, score: float, b: int, h: int, q: int, kv: int) -> float:
        function = getattr(self._library, f"score_{i}")
        function.restype = ctypes.c_float
        return float(function(args, ctypes.c_float(score), b, h, q, kv))

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(self._library, name)(*args)
