"""`emulate_forward`: forward attention of CPU tensors by a generated kernel that runs in the emulator."""

from __future__ import annotations

import ctypes
import struct
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...generator.arch import Arch
from ...generator.errors import TensorError
from ...generator.families import families_for
from ...generator.families.base import Family, KernelConfig
from ...generator.rendering import render
from ...generator.source import KernelSource
from ...generator.spec import AttentionSpec
from ..driver import ArgumentBuffer
from ..launch import ArgumentLayout, prepare
from ..problem import Problem
from ..tensors import check_inputs, check_softmax_scale, readable
from .job import HostBuffer
from .report import Finding, Report
from .run import TIME_LIMIT, emulate
from .tensor_map import encode_tensor_map

if TYPE_CHECKING:
    import torch

    from ...generator.language import Traced

#: The SMs of the GPU that launches are prepared for: those of an H200.
DEFAULT_SMS = 132
COUNTER_BYTES = 8


def emulate_forward(
    spec: AttentionSpec,
    config: KernelConfig,
    arch: Arch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Traced | None = None,
    score: Traced | None = None,
    softmax_scale: float | None = None,
    flavour: str = "plain",
    schedule: str = "round_robin",
    seed: int = 0,
    source: KernelSource | None = None,
    time_limit: int = TIME_LIMIT,
    max_blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """(out, lse, report): out (batch, seqlen_q, nheads, head_dim_v) as q, lse (batch, nheads, seqlen_q) fp32.

    `q`, `k`, `v` are CPU tensors (batch, seqlen, nheads, head_dim) of any strides; `mask` and `score` hold the run-time
    values of the spec's graphs. The arguments are packed, and unreadable inputs copied, by the very code that launches
    on a GPU. Outputs start as NaN. `source` replaces the rendered kernel (a test's mutant). `max_blocks` bounds the
    grid of a kernel whose blocks take tiles until none is left, so that each has several. Raises TensorError,
    SpecError, ConfigError, EmulatorError and MissingComponentError; what the kernel does wrong is in the report.
    """
    import torch

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.device.type != "cpu":
            raise TensorError(f"The emulator takes CPU tensors, but {name} is on {tensor.device}. Pass {name}.cpu().")
    shape = check_inputs(q, k, v).shape
    scale = check_softmax_scale(softmax_scale, spec.head_dim)
    family = _family_of(spec, config, arch)
    if source is None:
        source = render(spec, config, arch, family=family)
    q, k, v = readable("q", q), readable("k", k), readable("v", v)
    problem = Problem(spec, mask, score)
    backend = RecordingBackend(arch, DEFAULT_SMS if max_blocks is None else max_blocks)
    plan = prepare(problem, config, family=family, shape=shape, q=q, k=k, v=v, softmax_scale=scale, backend=backend)
    if plan.is_empty:
        return (
            q.new_zeros(plan.out_shape),
            torch.full(plan.lse_shape, -torch.inf),
            Report(flavour=flavour, schedule=schedule),
        )
    out = torch.full(plan.out_shape, torch.nan, dtype=q.dtype)
    lse = torch.full(plan.lse_shape, torch.nan)
    plan.launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), problem.tables, 0)
    launched = backend.launched[0]
    buffers = [buffer_of(tensor, name) for name, tensor in (("q", q), ("k", k), ("v", v))]
    buffers += [buffer_of(out, "o", writable=True), buffer_of(lse, "lse", writable=True)]
    buffers += [buffer_of(table, name) for name, table in _named_tables(problem)]
    counters = _counters(source, launched.arguments)
    buffers += [HostBuffer(address, COUNTER_BYTES, "next_tile", True) for address in counters]
    report = emulate(
        source,
        launched.arguments,
        grid=launched.grid,
        threads=launched.threads,
        smem_bytes=launched.smem_bytes,
        buffers=tuple(buffers),
        flavour=flavour,
        schedule=schedule,
        seed=seed,
        time_limit=time_limit,
    )
    for address in counters:
        left = ctypes.string_at(address, COUNTER_BYTES)
        if report.clean and any(left):
            found = Finding("state", f"a launch must leave next_tile at 0, but it holds {struct.unpack('=2i', left)}")
            report = replace(report, findings=(found,))
    return out, lse, report


def _named_tables(problem: Problem) -> list[tuple[str, Any]]:
    """(the name its function gives it, tensor) of each captured tensor; several names of one tensor are joined."""
    found: dict[int, tuple[dict[str, None], Any]] = {}
    for traced in (problem.mask, problem.score):
        for slot, table in zip(traced.graph.tables, traced.tables, strict=True) if traced is not None else ():
            found.setdefault(id(table), ({}, table))[0][slot.name] = None
    return [(" or ".join(names), table) for names, table in found.values()]


def _counters(source: KernelSource, arguments: bytes) -> tuple[int, ...]:
    """The address of the counter that blocks draw tiles from, in a kernel that has one."""
    offsets = ArgumentLayout(source.arguments).offsets
    if "next_tile" not in offsets:
        return ()
    (address,) = struct.unpack_from("=Q", arguments, offsets["next_tile"])
    return (address,) if address else ()


def buffer_of(array: Any, name: str, *, writable: bool = False) -> HostBuffer:
    """The memory that a CPU tensor or NumPy array spans, from its first element to its last."""
    if hasattr(array, "data_ptr"):
        address, item, strides = array.data_ptr(), array.element_size(), array.stride()
    else:
        address, item = array.ctypes.data, array.dtype.itemsize
        strides = tuple(stride // item for stride in array.strides)
    if 0 in array.shape:
        return HostBuffer(address, 0, name, writable)
    low = sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True) if s > 0)
    return HostBuffer(address + low * item, (high - low + 1) * item, name, writable)


@dataclass(frozen=True, slots=True)
class Launched:
    """One launch as the driver would have received it."""

    grid: int
    threads: int
    smem_bytes: int
    arguments: bytes


class RecordingBackend:
    """A `Backend` that keeps launches instead of running them: the emulator takes them from there."""

    def __init__(self, arch: Arch, sms: int = DEFAULT_SMS) -> None:
        self._arch = arch
        self._sms = sms
        self.launched: list[Launched] = []

    def arch(self, device: int) -> Arch:
        return self._arch

    def device_name(self, device: int) -> str | None:
        return None

    def sm_count(self, device: int) -> int:
        return self._sms

    def encode_tensor_map(
        self, address: int, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
    ) -> bytes:
        return encode_tensor_map(address, sizes, strides, box)

    def current_device(self) -> int:
        return 0

    def device_guard(self, device: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def current_stream(self, device: int) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def is_loaded(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> bool:
        return True

    def default_config(self, spec: AttentionSpec, family: Family, device: int) -> KernelConfig:
        return family.default_config(spec, self.arch(device))

    def refusal(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> str:
        return ""

    def kernel(self, spec: AttentionSpec, config: KernelConfig, family: Family, device: int) -> RecordedKernel:
        return RecordedKernel(self.launched)


class RecordedKernel:
    """The kernel a `RecordingBackend` gives out."""

    key = ""

    def __init__(self, launched: list[Launched]) -> None:
        self._launched = launched

    def launch(
        self, grid: tuple[int, int, int], threads: int, smem_bytes: int, stream: int, packed: ArgumentBuffer
    ) -> None:
        self._launched.append(Launched(grid[0], threads, smem_bytes, bytes(packed.data)))


def _family_of(spec: AttentionSpec, config: KernelConfig, arch: Arch) -> Family:
    for family in families_for(spec, arch):
        if isinstance(config, family.config_type):
            return family
    raise TensorError(f"No kernel family does {spec} on {arch} with a {type(config).__name__}.")
