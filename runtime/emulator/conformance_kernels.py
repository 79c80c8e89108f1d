"""The kernels of the conformance program: a small kernel a primitive, one text for the GPU and for the engine."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...generator.digest import digest_of
from ...generator.environment import environment
from ...generator.errors import EmulatorError
from ...generator.source import Section
from . import conformance_inputs as inputs
from .conformance_rules import BITS, NAN_OR_BITS, ErrorRule, MmaRule, Rule

ENTRY = "conformance"
SMEM_BYTES = 4096
_FUNCTION_NAME = re.compile(r"__forceinline__ [\w ]+?\b(\w+)\(")

_TYPES = """\
typedef unsigned int u32;
typedef unsigned short u16;
struct Arguments {
  const u32* in;
  const u32* in2;
  const u32* in3;
  u32* out;
};
"""
FUNCTIONS = """\
__device__ __forceinline__ u32 bits_of(float value) {
  union {
    float f;
    u32 u;
  } both;
  both.f = value;
  return both.u;
}
__device__ __forceinline__ float float_of(u32 bits) {
  union {
    float f;
    u32 u;
  } both;
  both.u = bits;
  return both.f;
}
__device__ __forceinline__ u32 ld_u32(const u32* p) {
  return static_cast<u32>(ld_global_s32(reinterpret_cast<const int*>(p)));
}
__device__ __forceinline__ void st_u32(u32* p, u32 value) {
  st_global_f32(reinterpret_cast<float*>(p), float_of(value));
}
"""


@dataclass(frozen=True)
class Case:
    """One kernel and its inputs. A block is one warp and writes `items` words of `out`, from the index `first` on.

    `body` sees `args.in`, `args.in2`, `args.in3` and `args.out` (words), `lane` and `first`. `rule` says when two
    outputs agree, `note` what the case is about.
    """

    name: str
    body: str
    make_inputs: Callable[[], Mapping[str, Any]]
    blocks: int
    items: int
    rule: Rule = BITS
    note: str = ""

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """The input arrays by name, in the order of the arguments."""
        made = self.make_inputs()
        return {name: made.get(name, inputs.nothing()) for name in ("in", "in2", "in3")}

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The text in sections, as a generated kernel has them."""
        kernel = (
            f'{FUNCTIONS}\nextern "C" __global__ void __launch_bounds__(32, 1)\n'
            f"    {ENTRY}(const __grid_constant__ Arguments args) {{\n"
            f"  const int lane = thread_index();\n  const long long first = block_index() * {self.items};\n"
            f"{self.body}}}\n"
        )
        return (
            Section("types", _TYPES),
            Section("primitives", used_primitives(_ampere_primitives(), kernel)),
            Section("kernel", kernel),
        )

    @property
    def threads(self) -> int:
        return 32

    @property
    def smem_bytes(self) -> int:
        return SMEM_BYTES

    @property
    def target(self) -> str:
        """What NVRTC compiles for; "" for the GPU's own architecture."""
        return ""

    def pointers(self) -> tuple[int, ...]:
        """Byte offsets of the addresses in what `pack` gives."""
        return (0, 8, 16, 24)

    def pack(self, addresses: Mapping[str, int], *, gpu: bool) -> bytes:
        """The kernel's `struct Arguments`, for the GPU or for the engine."""
        return struct.pack("=4Q", *(addresses[name] for name in ("in", "in2", "in3", "out")))

    @property
    def text(self) -> str:
        """The CUDA file."""
        return "\n".join(section.text for section in self.sections)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the text and the inputs: a recorded output of another digest says nothing about this case."""
        return digest_of([self.text, {name: array.tobytes().hex() for name, array in self.arrays.items()}])


def all_cases() -> tuple[Case, ...]:
    """Every case, in a fixed order."""
    return (*_matrices(), *_copies(), *_memory(), *_warp(), *_conversions(), *_functions(), *_integers())


def _ampere_primitives() -> str:
    return environment().get_template("sm80/primitives.jinja").render()


def used_primitives(primitives: str, kernel: str) -> str:
    """Those of `primitives` that `kernel` calls, directly or through one another: others may change without a rerun."""
    by_name: dict[str, str] = {}
    for chunk in primitives.split("\n\n"):
        names = _FUNCTION_NAME.findall(chunk)
        if len(names) > 1:  # the second would be missing from the text of the kernels that call it
            raise EmulatorError(f"A blank line must precede each primitive, but {names} follow without one. Add it.")
        if names:
            by_name[names[0]] = chunk
    used: set[str] = set()
    text = kernel
    while found := {name for name in re.findall(r"\b\w+\b", text) if name in by_name} - used:
        used |= found
        text = "\n".join(by_name[name] for name in found)
    return "\n\n".join(chunk for name, chunk in by_name.items() if name in used) + "\n"


def _matrices() -> list[Case]:
    cases = []
    for name in ("ldmatrix_x4", "ldmatrix_x4_trans"):
        body = f"""\
  const u32 tile = smem_region(0, 4096, "tile");
  for (int i = lane; i < 1024; i += 32) st_shared_b32(tile + i * 4, ld_u32(args.in + i));
  barrier_sync();
  u32 r[4];
  {name}(r, tile + ld_u32(args.in2 + first / 4 + lane) * 16);
  st_global_v4(args.out + first + lane * 4, r);
"""
        cases.append(
            Case(
                name,
                body,
                lambda: {"in": inputs.words(1024), "in2": inputs.rows_of_chunks(16)},
                blocks=16,
                items=128,
                note="rows in order, all equal, and at random",
            )
        )
    for dtype in ("f16", "bf16"):
        body = f"""\
  u32 a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) {{
    a[i] = ld_u32(args.in + first + lane * 4 + i);
    d[i] = float_of(ld_u32(args.in3 + first + lane * 4 + i));
  }}
  const u32* b = args.in2 + first / 2 + lane * 2;
  mma_m16n8k16_f32_{dtype}(d, a, ld_u32(b), ld_u32(b + 1));
  for (int i = 0; i < 4; ++i) st_u32(args.out + first + lane * 4 + i, bits_of(d[i]));
"""
        for kind, note in (
            ("integers", "sums of small integers are exact in any order"),
            ("real", "the order and the truncation of the sum are the hardware's own"),
            ("subnormal", "subnormal operands count in full"),
            ("special", "infinities and NaN among the operands"),
        ):
            make = _mma_inputs(dtype, kind)
            rule: Rule = BITS if kind == "integers" else MmaRule(dtype)
            cases.append(Case(f"mma_m16n8k16_f32_{dtype} {kind}", body, make, 16, 128, rule, note))
    return cases


def _mma_inputs(dtype: str, kind: str) -> Callable[[], Mapping[str, Any]]:
    return _named(lambda: inputs.mma(dtype, kind))


def _named(make: Callable[[], tuple[Any, ...]]) -> Callable[[], Mapping[str, Any]]:
    """`make`'s arrays under the names of the arguments."""
    return lambda: dict(zip(("in", "in2", "in3"), make(), strict=False))


def _copies() -> list[Case]:
    head = """\
  const u32 tile = smem_region(0, 1024, "tile");
  for (int i = lane; i < 256; i += 32) st_shared_b32(tile + i * 4, 0xffffffffu);
  barrier_sync();
"""
    read = "  ld_shared_v4(r, tile + {at});\n  st_global_v4(args.out + first + {to}, r);\n"
    one = """\
  cp_async_16(tile + lane * 16, args.in + first + lane * 4, {size});
  cp_async_commit_group();
  cp_async_wait_group<0>();
  u32 r[4];
"""
    groups = """\
  u32 r[4];
  cp_async_16(tile + lane * 16, args.in + first + lane * 4, 16);
  cp_async_commit_group();
  cp_async_16(tile + 512 + lane * 16, args.in + first + 128 + lane * 4, 16);
  cp_async_commit_group();
  cp_async_wait_group<1>();
"""
    own, other = {"at": "lane * 16", "to": "lane * 4"}, {"at": "512 + lane * 16", "to": "128 + lane * 4"}
    make = lambda: {"in": inputs.words(17 * 256), "in2": _counting(32) * 5 % 17}  # noqa: E731
    return [
        Case(
            "cp_async_16 by block",
            head + one.format(size="static_cast<int>(block_index())") + read.format(**own),
            make,
            blocks=17,
            items=128,
            note="src_bytes 0 to 16, a block each: that many from the source, the rest zero",
        ),
        Case(
            "cp_async_16 by lane",
            head + one.format(size="static_cast<int>(ld_u32(args.in2 + lane))") + read.format(**own),
            make,
            blocks=4,
            items=128,
            note="every lane its own src_bytes",
        ),
        Case(
            "cp_async_wait_group",
            head + groups + read.format(**own) + "  cp_async_wait_group<0>();\n" + read.format(**other),
            make,
            blocks=4,
            items=256,
            note="all but the newest groups have landed, for the thread that copied",
        ),
    ]


def _memory() -> list[Case]:
    elementwise = "  for (int i = lane; i < {n}; i += 32) st_u32(args.out + first + i, {value});\n"
    all_halves = lambda: {"in": (_counting(32768) * 2) | (_counting(32768) * 2 + 1) << 16}  # noqa: E731
    some = lambda: {"in": inputs.words(4096)}  # noqa: E731
    wide = """\
  for (int i = lane; i < 512; i += 32) {
    const long long value = ld_global_s64(reinterpret_cast<const long long*>(args.in + first) + i);
    st_u32(args.out + first + 2 * i, static_cast<u32>(value));
    st_u32(args.out + first + 2 * i + 1, static_cast<u32>(value >> 32));
  }
"""
    shared = """\
  const u32 tile = smem_region(0, 4096, "tile");
  for (int i = lane; i < 1024; i += 32) st_shared_b32(tile + (i ^ 21) * 4, ld_u32(args.in + first + i));
  warp_sync();
  for (int i = lane; i < 256; i += 32) {
    u32 r[4];
    ld_shared_v4(r, tile + (255 - i) * 16);
    st_global_v4(args.out + first + i * 4, r);
  }
"""
    halves = "bits_of(ld_global_{dtype}(reinterpret_cast<const u16*>(args.in) + first + i))"
    byte = "static_cast<u32>(ld_global_u8(reinterpret_cast<const unsigned char*>(args.in) + first + i))"
    f32 = "bits_of(ld_global_f32(reinterpret_cast<const float*>(args.in) + first + i))"
    return [
        Case("st_shared_b32, ld_shared_v4, st_global_v4", shared, some, 4, 1024),
        Case("ld_global_f32, st_global_f32", elementwise.format(n=1024, value=f32), some, 4, 1024),
        Case("ld_global_s32", elementwise.format(n=1024, value="ld_u32(args.in + first + i)"), some, 4, 1024),
        Case("ld_global_s64", wide, some, 4, 1024),
        Case("ld_global_u8", elementwise.format(n=1024, value=byte), some, 4, 1024),
        *(
            Case(
                f"ld_global_{dtype}",
                elementwise.format(n=1024, value=halves.format(dtype=dtype)),
                all_halves,
                64,
                1024,
                NAN_OR_BITS,
                note="all 65536 patterns",
            )
            for dtype in ("f16", "bf16")
        ),
    ]


def _counting(count: int) -> Any:
    import numpy as np

    return np.arange(count, dtype=np.uint32)


def _warp() -> list[Case]:
    shuffle = """\
  const float value = float_of(ld_u32(args.in + first + lane));
  st_u32(args.out + first + lane, bits_of(shfl_bfly_f32(value, static_cast<int>(block_index()))));
"""
    vote = """\
  const u32 odds = static_cast<u32>(block_index());
  const bool any = vote_any(ld_u32(args.in + first + lane) % 1024 < odds);
  st_u32(args.out + first + lane, any ? 1 : 0);
"""
    some = lambda: {"in": inputs.words(2048)}  # noqa: E731
    return [
        Case("shfl_bfly_f32", shuffle, some, 32, 32, note="lane masks 0 to 31, a block each"),
        Case("vote_any", vote, some, 64, 32, note="true for 0 to 63 of 1024 lanes"),
    ]


def _conversions() -> list[Case]:
    cases = []
    for dtype, mantissa in (("f16", 10), ("bf16", 7)):
        value = f"cvt_rn_{dtype}x2_f32(float_of(ld_u32(x)), float_of(ld_u32(args.in2 + first + i)))"
        make = _narrowing(mantissa)
        note = "ties, subnormals, overflow, NaN"
        cases.append(Case(f"cvt_rn_{dtype}x2_f32", _elementwise(value), make, 8, 1024, BITS, note))
    return cases


def _narrowing(mantissa_bits: int) -> Callable[[], Mapping[str, Any]]:
    return lambda: {
        "in": inputs.narrowing(8192, mantissa_bits),
        "in2": inputs.narrowing(8192, mantissa_bits, seed=9),
    }


def _functions() -> list[Case]:
    def unary(name: str, make: Callable[[], Mapping[str, Any]], rule: Rule, note: str) -> Case:
        return Case(name, _elementwise(f"bits_of({name}(float_of(ld_u32(x))))"), make, 4, 1024, rule, note)

    def ranged(low: float, high: float) -> Callable[[], Mapping[str, Any]]:
        return lambda: {"in": inputs.floats(4096, low, high)}

    any_value = lambda: {"in": inputs.any_floats(4096)}  # noqa: E731
    pairs = _named(lambda: inputs.float_pairs(4096))
    flushed = 2.0**-126
    cases = [
        unary("ex2_approx_f32", ranged(-160, 140), ErrorRule(2.0**-22 + 2.0**-24, near_zero=flushed), "ftz; 2^-22"),
        unary("lg2_approx_f32", any_value, ErrorRule(2.0**-22, 2.0**-22), "ftz; 2^-22 absolute in (0.5, 2)"),
        unary("rcp_approx_f32", any_value, ErrorRule(2.0**-22, near_zero=flushed), "ftz; 1 ulp"),
        unary("exp_f32", ranged(-110, 95), ErrorRule(2.0**-22, near_zero=flushed), "expf, at most 2 ulp"),
        unary("log_f32", any_value, ErrorRule(2.0**-22, 2.0**-25), "logf, 1 ulp"),
        unary("tanh_f32", ranged(-12, 12), ErrorRule(0.0, 4e-7), "the primitive's own formula: absolute 2e-7"),
        unary("sqrt_f32", any_value, NAN_OR_BITS, "correctly rounded"),
        unary("abs_f32", any_value, NAN_OR_BITS, ""),
    ]
    for name in ("max_f32", "min_f32"):
        value = f"bits_of({name}(float_of(ld_u32(x)), float_of(ld_u32(args.in2 + first + i))))"
        note = "all pairs of special values: NaN gives the other, +0 > -0"
        cases.append(Case(name, _elementwise(value), pairs, 4, 1024, NAN_OR_BITS, note))
    cases.append(Case("negative_infinity", _elementwise("bits_of(negative_infinity())"), dict, 1, 1024))
    return cases


def _integers() -> list[Case]:
    pairs = _named(lambda: inputs.integer_pairs(4096))
    y = "ld_u32(args.in2 + first + i)"
    cases = []
    for name in ("max_s32", "min_s32", "floor_div_s32", "floor_mod_s32"):
        value = f"static_cast<u32>({name}(static_cast<int>(ld_u32(x)), static_cast<int>({y})))"
        cases.append(Case(name, _elementwise(value), pairs, 4, 1024))
    cases.append(
        Case("abs_s32", _elementwise("static_cast<u32>(abs_s32(static_cast<int>(ld_u32(x))))"), pairs, 4, 1024)
    )
    value = "static_cast<u32>(abs_s64(static_cast<long long>(static_cast<int>(ld_u32(x))) * 1048573) >> 16)"
    cases.append(Case("abs_s64", _elementwise(value), pairs, 4, 1024))
    for name in ("max_s64", "min_s64", "floor_div_s64", "floor_mod_s64"):
        wide = f"static_cast<long long>(static_cast<int>(ld_u32(x))) * 1048573, static_cast<int>({y})"
        value = f"static_cast<u32>({name}({wide}) >> 16)"
        cases.append(Case(name, _elementwise(value), pairs, 4, 1024))
    return cases


def _elementwise(value: str) -> str:
    return (
        "  for (int i = lane; i < 1024; i += 32) {\n"
        "    const u32* x = args.in + first + i;\n"
        f"    st_u32(args.out + first + i, {value});\n"
        "  }\n"
    )
