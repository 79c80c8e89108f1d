"""What the Hopper cases of the conformance program share: the kernel's frame, its primitives, its tensor map."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from types import SimpleNamespace

from ...generator.digest import digest_of
from ...generator.environment import environment
from ...generator.source import Section
from .conformance_kernels import ENTRY, FUNCTIONS, Case, used_primitives
from .conformance_maps import MapSpec

THREADS = 128

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
  const u32* in2;
  const u32* in3;
  u32* out;
};
"""
_HOPPER_FUNCTIONS = """\
__device__ __forceinline__ u64 descriptor_at(u32 tile, const u32* descriptor) {
  const u64 high = ld_u32(descriptor + 1);
  return (high << 32 | ld_u32(descriptor)) + ((tile & 0x3ffff) >> 4);
}
"""
_WGMMA = re.compile(r"wgmma_m64n(\d+)k16_f32_(b?f16)_(ss_tb|ss|rs)")


@dataclass(frozen=True)
class HopperCase(Case):
    """As `Case`, for a block of 128 threads (`lane` counts them); `map` becomes `args.map`."""

    map: MapSpec | None = None
    smem_bytes: int = 4096  # pyright: ignore[reportIncompatibleMethodOverride]
    threads: int = THREADS  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def target(self) -> str:
        return "sm_90a"

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        kernel = (
            f"{FUNCTIONS}\n{_HOPPER_FUNCTIONS}\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, 1)\n'
            f"    {ENTRY}(const __grid_constant__ Arguments args) {{\n"
            f"  const int lane = thread_index();\n  const long long first = block_index() * {self.items};\n"
            f"{self.body}}}\n"
        )
        primitives = used_primitives(_primitives(kernel), kernel)
        return (Section("types", _TYPES), Section("primitives", primitives), Section("kernel", kernel))

    @cached_property
    def digest(self) -> str:
        """As of any case, and of the tensor map."""
        return super().digest if self.map is None else digest_of([super().digest, asdict(self.map)])

    def pointers(self) -> tuple[int, ...]:
        return (*((8,) if self.map else ()), 128, 136, 144, 152)

    def pack(self, addresses: Mapping[str, int], *, gpu: bool) -> bytes:
        image = bytes(128)
        if self.map is not None:
            address = addresses[self.map.array]
            image = self.map.encode_for_gpu(address) if gpu else self.map.encode_for_engine(address)
        packed = image + super().pack(addresses, gpu=gpu)
        return packed.ljust(192, b"\0")  # the struct's size is a multiple of its alignment


@cache
def _template(n: int, chunks_v: int, dtype: str, p_operand: str) -> str:
    context = {"config": SimpleNamespace(B_c=n, p_operand=p_operand), "chunks_v": chunks_v, "mma": dtype}
    return environment().get_template("sm90/primitives.jinja").render(context)


def _primitives(kernel: str) -> str:
    """The Hopper primitives, with the product that `kernel` uses, and TMA for 3 dimensions, which no kernel uses."""
    match = _WGMMA.search(kernel)
    n, dtype, form = (int(match[1]), match[2], match[3]) if match else (64, "bf16", "rs")
    text = _template(n, n // 8, dtype, "shared" if form == "ss_tb" else "registers")
    four = {name: _chunk(text, name) for name in ("tma_load_4d", "tma_store_4d")}
    return "\n\n".join([text, *(_of_rank(chunk, 3) for chunk in four.values())])


def _chunk(text: str, name: str) -> str:
    return next(chunk for chunk in text.split("\n\n") if f" {name}(" in chunk)


def _of_rank(chunk: str, rank: int) -> str:
    """The 4-dimensional TMA primitive as one of `rank` dimensions."""
    first = 3 if "load" in chunk else 2
    names, numbers = [f"c{i}" for i in range(rank)], [f"%{first + i}" for i in range(rank)]
    chunk = chunk.replace("_4d", f"_{rank}d").replace(".4d.", f".{rank}d.")
    chunk = re.sub(r"int c0,\s*int c1,\s*int c2,\s*int c3", ", ".join(f"int {name}" for name in names), chunk)
    chunk = re.sub(r"%\d, %\d, %\d, %\d\}", ", ".join(numbers) + "}", chunk)
    return re.sub(r'"r"\(c0\).*"r"\(c3\)', ", ".join(f'"r"({name})' for name in names), chunk, flags=re.DOTALL)
