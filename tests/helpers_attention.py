"""Stand-ins for a GPU, so that the whole path of `flashsmith.attention` runs on CPU tensors."""

from __future__ import annotations

import struct
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from flashsmith.generator.arch import Arch, arch_from_name
from flashsmith.generator.families import family_named
from flashsmith.generator.families.base import Family, KernelConfig, layout_of
from flashsmith.generator.rendering import render
from flashsmith.generator.spec import AttentionSpec
from flashsmith.runtime.driver import ArgumentBuffer
from flashsmith.runtime.emulator.tensor_map import encode_tensor_map as host_encode


@dataclass
class Launch:
    """One launch as the driver would have seen it; `values` is the struct, decoded by name.

    A tensor map stands there as what a kernel without maps is given, `q`, `q_stride_b`, ..., and `q_sizes`, `q_box`.
    """

    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    stream: int
    values: dict[str, Any]
    spec: AttentionSpec
    config: KernelConfig


@dataclass
class FakeBackend:
    """A backend that records what is loaded and launched. `device` is current; tensors are on `cpu`, index 0."""

    arch_name: str = "sm_90"
    device: int = 0
    stream: int = 77
    capturing: bool = False
    tables: tuple[torch.Tensor, ...] = ()
    launches: list[Launch] = field(default_factory=list)
    loads: list[tuple[Any, ...]] = field(default_factory=list)
    guards: list[int] = field(default_factory=list)
    loaded: dict[Any, FakeKernel] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    __hash__ = object.__hash__

    def arch(self, device: int) -> Arch:
        return arch_from_name(self.arch_name)

    def device_name(self, device: int) -> str | None:
        return "Fake GPU"

    def current_device(self) -> int:
        return self.device

    def device_guard(self, device: int) -> Any:
        self.guards.append(device)
        return nullcontext()

    def current_stream(self, device: int) -> int:
        return self.stream

    def is_capturing(self) -> bool:
        return self.capturing

    def is_loaded(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> bool:
        return (spec, config) in self.loaded

    def sm_count(self, device: int) -> int:
        return 132

    def encode_tensor_map(
        self, address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
    ) -> bytes:
        return host_encode(address, sizes, strides, box)

    def default_config(self, spec: AttentionSpec, family: Family, device: int) -> KernelConfig:
        return family.default_config(spec, self.arch(device))

    def refusal(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> str:
        return ""

    def kernel(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> FakeKernel:
        with self.lock:
            if (spec, config) not in self.loaded:
                self.loads.append((spec, config, device))
                self.loaded[spec, config] = self.make(spec, config, family)
            return self.loaded[spec, config]

    def make(self, spec: AttentionSpec, config: KernelConfig, family: Family) -> FakeKernel:
        return FakeKernel(self, spec, config, family)


class FakeKernel:
    def __init__(self, backend: FakeBackend, spec: AttentionSpec, config: KernelConfig, family: Family) -> None:
        self.key = f"key of {config}"
        self.backend, self.spec, self.config = backend, spec, config
        self.fields = family.arguments(spec)

    def launch(self, grid: Any, threads: int, smem_bytes: int, stream: int, packed: ArgumentBuffer) -> None:
        values: dict[str, Any] = {}
        for argument, value in zip(self.fields, layout_of(self.fields).unpack(bytes(packed.data)), strict=True):
            values |= decoded_map(argument.name[0], value) if argument.is_tensor_map else {argument.name: value}
        self.backend.launches.append(Launch(grid, threads, smem_bytes, stream, values, self.spec, self.config))


def decoded_map(tensor: str, encoded: bytes) -> dict[str, Any]:
    """What the host's tensor map says of the tensor q, k, v or o; the emulator's layout, see `host_encode`."""
    magic, address, rank, element_bytes, swizzle, _, *rest = struct.unpack_from("<8sQ4I5I5I4Q", encoded)
    assert magic == b"tnsormap" and rank in (4, 5) and (element_bytes, swizzle) == (2, 3)
    sizes, box, strides = rest[:rank], rest[5 : 5 + rank], rest[10 : 9 + rank]
    values = {tensor: address, f"{tensor}_sizes": tuple(sizes), f"{tensor}_box": tuple(box)}
    axes = "shb" if rank == 4 else "hskb"  # k: from one group of heads to the next
    return values | {f"{tensor}_stride_{axis}": step // 2 for axis, step in zip(axes, strides, strict=True)}


@dataclass
class EmulatorBackend(FakeBackend):
    """A backend whose launches run in the CPU emulator. Captured tensors must be named in `tables`."""

    arch_name: str = "sm_80"

    __hash__ = object.__hash__

    def make(self, spec: AttentionSpec, config: KernelConfig, family: Family) -> FakeKernel:
        return EmulatedKernel(self, spec, config, family)


class EmulatedKernel(FakeKernel):
    def launch(self, grid: Any, threads: int, smem_bytes: int, stream: int, packed: ArgumentBuffer) -> None:
        from flashsmith.runtime.emulator.forward import buffer_of
        from flashsmith.runtime.emulator.run import HostBuffer, emulate

        super().launch(grid, threads, smem_bytes, stream, packed)
        values = self.backend.launches[-1].values
        batch = values["q_sizes"][-1] if "q_sizes" in values else values["num_heads_total"] // values["nheads"]
        nheads_k = values["nheads"] // values["group_size"]
        extents = {
            "q": (values["seqlen_q"], values["nheads"], self.spec.head_dim),
            "k": (values["seqlen_k"], nheads_k, self.spec.head_dim),
            "v": (values["seqlen_k"], nheads_k, self.spec.head_dim_v),
            "o": (values["seqlen_q"], values["nheads"], self.spec.head_dim_v),
        }
        buffers = []
        for name, (rows, heads, dim) in extents.items():
            steps = ((batch, "b"), (rows, "s"), (heads, "h"))
            last = sum((n - 1) * values[f"{name}_stride_{axis}"] for n, axis in steps)
            buffers.append(HostBuffer(values[name], 2 * (last + dim), name, name == "o"))
        if values["lse"]:
            buffers.append(HostBuffer(values["lse"], 4 * batch * values["nheads"] * values["seqlen_q"], "lse", True))
        if values.get("next_tile"):
            buffers.append(HostBuffer(values["next_tile"], 8, "next_tile", True))
        buffers += [buffer_of(table, f"table {i}") for i, table in enumerate(self.backend.tables)]
        source = render(self.spec, self.config, self.backend.arch(0), family=family_named(self.config.family))
        report = emulate(
            source, bytes(packed.data), grid=grid[0], threads=threads, smem_bytes=smem_bytes, buffers=tuple(buffers)
        )
        report.require_clean()


def randn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Reproducible normal values, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def qkv(
    *,
    b: int = 2,
    sq: int = 33,
    sk: int = 47,
    h: int = 4,
    hk: int = 2,
    d: int = 64,
    dv: int | None = None,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of one call, (batch, seqlen, nheads, head_dim)."""
    return (
        randn(b, sq, h, d, dtype=dtype, seed=seed, device=device),
        randn(b, sk, hk, d, dtype=dtype, seed=seed + 1, device=device),
        randn(b, sk, hk, dv or d, dtype=dtype, seed=seed + 2, device=device),
    )


@dataclass
class Device:
    """Where a case runs: "cuda", or "emulator", which takes CPU tensors through the same path as a GPU of `arch`."""

    name: str
    arch: str = "sm_80"

    @property
    def tensors(self) -> str:
        return "cuda" if self.name == "cuda" else "cpu"

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> Any:
        """`flashsmith.attention` there."""
        import flashsmith
        from flashsmith.runtime.attention import use_backend
        from flashsmith.runtime.captures import read_captures

        if self.name == "cuda":
            return flashsmith.attention(q, k, v, **call)
        captures = read_captures(*(call.get(name) for name in ("alibi_slopes", "mask_mod", "score_mod")))
        assert captures is not None
        with use_backend(EmulatorBackend(self.arch, tables=captures.tensors)):
            return flashsmith.attention(q, k, v, **call)

    def qkv(self, **sizes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return qkv(device=self.tensors, **sizes)

    def check(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of one call, held against the fp64 reference by the one tolerance rule."""
        out, lse = self.attention(q, k, v, return_lse=True, **call)
        assert_right(out, lse, q, k, v, **call)
        return out, lse


def assert_right(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any
) -> None:
    """Fails unless `out` and `lse` are what the call should give: shapes, dtypes, values."""
    from flashsmith.runtime.problem import problem_of
    from flashsmith.runtime.reference import attention_reference
    from flashsmith.runtime.tensors import dtype_name
    from flashsmith.runtime.verify import error_and_tolerance, lse_fault

    scale = call.pop("softmax_scale", None)
    dtype = dtype_name(q.dtype)
    assert dtype is not None
    problem = problem_of(dtype=dtype, head_dim=q.shape[3], head_dim_v=v.shape[3], **call)
    assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == q.dtype and out.device == q.device
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype == torch.float32
    error, allowed = error_and_tolerance(problem, q, k, v, out, softmax_scale=scale)
    assert error <= allowed, f"max|out - ref| = {error:.3e}, allowed {allowed:.3e}"
    _, exact = attention_reference(q, k, v, mask=problem.mask, score=problem.score, softmax_scale=scale)
    _, fault = lse_fault(lse, exact)
    assert not fault, fault
