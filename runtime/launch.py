"""From a problem, a config and the tensors' strides to a `Plan`: everything of a launch that does not change per call.

A plan holds the loaded kernel, its geometry and the packed `struct Arguments`; a launch writes the addresses and calls
the driver. Nothing is allocated on the device, nothing waits.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..generator.errors import CaptureError, UnsupportedError
from ..generator.families.base import ArgumentField, Family, KernelConfig, LaunchGeometry, layout_of
from ..generator.language.cuda import mod_argument_values, mod_table_arguments
from ..generator.spec import AttentionSpec, ProblemShape
from .device import Backend, Kernel
from .driver import ArgumentBuffer
from .problem import Problem
from .tensor_maps import TensorMaps, TileCounters, mapped_tensor, tile_counters
from .tensors import launch_strides
from .torch_internals import TensorCheck, allocator, never_alike

if TYPE_CHECKING:
    import torch

LOG2_E = 1.4426950408889634
#: The members that begin the forward's arguments; a launch writes them with one `pack_into`.
LEADING = ("q", "k", "v", "o", "lse")
#: ... and those behind the tensor maps of a kernel that has some.
BEHIND_MAPS = ("o", "lse", "next_tile")
_pack_leading = struct.Struct(f"={len(LEADING)}Q").pack_into
_pack_address = struct.Struct("=Q").pack_into


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What a call used: the kernel `family`, its `config`, and where that came from.

    - `source`: "user" or "packaged" (a tuned record of this bucket), "nearest" (one of another bucket, device or
      class), "default" (nothing tuned), or "given" (the caller's own).
    - `bucket`: the sizes the record was tuned at, "" for none. `note`: the store's remark, for people.
    - `cubin_key`: the cache key of the binary, "" where nothing was launched (empty tensors).
    """

    family: str
    config: KernelConfig
    source: str
    bucket: str
    cubin_key: str
    spec: str
    arch: str
    note: str = ""

    def __str__(self) -> str:
        bucket = f" tuned at {self.bucket}" if self.bucket else ""
        return f"{self.family} {self.config} ({self.source}{bucket}) for {self.spec} on {self.arch}"


class ArgumentLayout:
    """How one kernel's `struct Arguments` is laid out: names of the values in order, and the offset of each member."""

    __slots__ = ("_absent", "_names", "_struct", "offsets")

    def __init__(self, fields: Sequence[ArgumentField]) -> None:
        self._struct = layout_of(tuple(fields))
        self._names = tuple("" if field.is_pointer or field.is_tensor_map else field.name for field in fields)
        self._absent = tuple(b"" if field.is_tensor_map else 0 for field in fields)
        ends = accumulate(field.size for field in fields)
        self.offsets = {field.name: end - field.size for field, end in zip(fields, ends, strict=True)}

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The struct with every value in it and all addresses 0. Raises KeyError for a missing value."""
        return self._struct.pack(
            *(values[name] if name else absent for name, absent in zip(self._names, self._absent, strict=True))
        )


@lru_cache(maxsize=512)
def argument_layout(family: Family, spec: AttentionSpec) -> ArgumentLayout:
    """The layout of `family`'s arguments for `spec`; made once, since it takes rendering the spec's functions."""
    arguments = family.arguments(spec)
    maps = sum(field.is_tensor_map for field in arguments)
    leading = BEHIND_MAPS if maps else LEADING
    if tuple(field.name for field in arguments[maps : maps + len(leading)]) != leading:
        raise UnsupportedError(f"The addresses among the arguments of {family.name} must be {', '.join(leading)}.")
    return ArgumentLayout(arguments)


class ArgumentBlock:
    """The bytes of one kernel's `struct Arguments`, all but the addresses filled in, and where each address goes."""

    __slots__ = ("image", "offsets")

    def __init__(self, layout: ArgumentLayout, values: Mapping[str, int | float]) -> None:
        self.image = layout.pack(values)
        self.offsets = layout.offsets

    def new_buffer(self) -> ArgumentBuffer:
        """A fresh buffer for the driver with the image in it."""
        buffer = ArgumentBuffer(len(self.image))
        ctypes.memmove(buffer.data, self.image, len(self.image))
        return buffer


class Plan:
    """One launch, prepared. Threads may share a plan: each launch takes a packed buffer of its own from a pool.

    - `out_shape`, `out_strides`, `lse_shape`, `lse_strides`: of what the caller allocates, with `empty` if the plan's
      device is current.
    - `check`: accepts tensors like those of an earlier call; `never_alike` until a call has repeated.
    - `is_empty`: no row or no key exists; the output is 0 and the LSE -inf, and there is nothing to launch.
    - `given_tables`: the problem's tables, where `prepare` was not told in which order they will be given.
    """

    __slots__ = (
        "_free", "_grid", "_launch", "_maps", "_smem_bytes", "_tables", "_threads", "block", "check", "device",
        "device_index", "dtype", "empty", "given_tables", "is_empty", "lse_shape", "lse_strides", "out_shape",
        "out_strides", "record",
    )  # fmt: skip

    def __init__(
        self,
        *,
        record: PlanRecord,
        kernel: Kernel | None,
        geometry: LaunchGeometry | None,
        block: ArgumentBlock,
        shape: ProblemShape,
        head_dim_v: int,
        tables: Sequence[tuple[str, int, Callable[[Any], int]]],
        given_tables: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.record = record
        self.block = block
        self.out_shape = (shape.batch, shape.seqlen_q, shape.nheads, head_dim_v)
        self.lse_shape = (shape.batch, shape.nheads, shape.seqlen_q)
        self.out_strides, self.lse_strides = _dense_strides(self.out_shape), _dense_strides(self.lse_shape)
        self.empty = allocator(device)
        self.check: TensorCheck = never_alike
        self.given_tables = given_tables
        self.is_empty = kernel is None
        self.device_index = device.index or 0
        self.dtype = dtype
        self.device = device
        self._launch = kernel.launch if kernel is not None else None
        if geometry is not None:
            self._grid, self._threads, self._smem_bytes = geometry.grid, geometry.threads, geometry.smem_bytes
        self._tables = tuple((block.offsets[name], position, address) for name, position, address in tables)
        self._free = [block.new_buffer()]
        self._maps: TensorMaps | None = None

    def launch(self, q: int, k: int, v: int, o: int, lse: int, tables: Sequence[Any], stream: int) -> None:
        """Enqueues the kernel. `q` to `lse` are addresses (`lse` 0: not written), `tables` the captured tensors."""
        try:
            packed = self._free.pop()
        except IndexError:  # another thread is launching this plan
            packed = self.block.new_buffer()
        if self._maps is None:
            _pack_leading(packed.data, 0, q, k, v, o, lse)
        else:
            self._pack_maps(packed.data, self._maps.at(q, k, v, o), o, lse, stream)
        for offset, position, address in self._tables:
            _pack_address(packed.data, offset, address(tables[position]))
        assert self._launch is not None
        self._launch(self._grid, self._threads, self._smem_bytes, stream, packed)
        self._free.append(packed)

    def _pack_maps(self, data: ctypes.Array[ctypes.c_char], maps: bytes, o: int, lse: int, stream: int) -> None:
        raise NotImplementedError  # only a MappedPlan has maps


class MappedPlan(Plan):
    """A plan whose kernel reads its tensors through tensor maps, and may draw its tiles from a pair of counters."""

    __slots__ = ("_counters", "_is_capturing", "_pack_mapped")

    def map_tensors(
        self, maps: TensorMaps, counters: TileCounters | None, is_capturing: Callable[[], bool]
    ) -> MappedPlan:
        """This plan, with what its launches need: `counters` None for a kernel that draws no tiles."""
        self._maps = maps
        self._counters = counters
        self._is_capturing = is_capturing
        self._pack_mapped = struct.Struct(f"={maps.nbytes}sQQQ").pack_into
        return self

    def _pack_maps(self, data: ctypes.Array[ctypes.c_char], maps: bytes, o: int, lse: int, stream: int) -> None:
        # CUDA cannot capture the legacy default stream, which is 0: it is not asked whether it does.
        counters = 0 if self._counters is None else self._counters.address(stream, stream != 0 and self._is_capturing())
        self._pack_mapped(data, 0, maps, o, lse, counters)


def prepare(
    problem: Problem,
    config: KernelConfig,
    *,
    family: Family,
    shape: ProblemShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
    backend: Backend,
    captured: Sequence[Any] | None = None,
    source: str = "given",
    bucket: str = "",
    note: str = "",
) -> Plan:
    """The plan for tensors with the sizes and strides of `q`, `k` and `v` (already readable in place).

    `captured` are the tensors that `Plan.launch` will be given, the problem's tables among them; by default the
    tables themselves. Compiles and loads the kernel where that has not been done.

    Raises ConfigError for a config that cannot run the shape; CaptureError, before anything that CUDA forbids there,
    where a stream is being captured and the kernel is not loaded; CompileError, LaunchError and UnsupportedError.
    """
    spec, device = problem.spec, q.device.index or 0
    family.check_shape(spec, config, shape)
    empty = shape.batch * shape.nheads * shape.seqlen_q == 0 or shape.seqlen_k == 0
    kernel = geometry = None
    if not empty:
        geometry = family.geometry(spec, config, shape, sm_count=backend.sm_count(device))
        if geometry.grid[1:] != (1, 1):
            raise UnsupportedError(f"{family.name} asks for a grid {geometry.grid}; launches are one-dimensional.")
        kernel = _load(spec, config, family, device, backend)
    values = _values(problem, config, family, shape, q, k, v, softmax_scale)
    tables = problem.tables
    given, captured = ((), captured) if captured is not None else (tables, tables)
    record = PlanRecord(
        family=family.name,
        config=config,
        source=source,
        bucket=bucket,
        cubin_key="" if kernel is None else kernel.key,
        spec=str(spec),
        arch=str(backend.arch(device)),
        note=note,
    )
    maps = family.tensor_maps(spec, config)
    plan = (MappedPlan if maps else Plan)(
        record=record,
        kernel=kernel,
        geometry=geometry,
        block=ArgumentBlock(argument_layout(family, spec), values),
        shape=shape,
        head_dim_v=spec.head_dim_v,
        tables=[
            (name, _position(table, captured), _address_getter(table))
            for name, table in zip(_table_pointers(problem), tables, strict=True)
        ],
        given_tables=given,
        dtype=q.dtype,
        device=q.device,
    )
    if not isinstance(plan, MappedPlan):
        return plan
    inputs = zip("qkv", (q, k, v), strict=True)
    layouts: dict[str, tuple[Sequence[int], Sequence[int]]] = {
        name: (tuple(x.shape), launch_strides(x.shape, x.stride())) for name, x in inputs
    }
    layouts["o"] = plan.out_shape, _dense_strides(plan.out_shape)[:3]
    group_size = shape.gqa_ratio
    tensors = [mapped_tensor(field, *layouts[field.tensor], group_size=group_size) for field in maps]
    mapped = TensorMaps(tensors, spec.dtype, backend.encode_tensor_map)
    counters = tile_counters(q.device) if family.draws_tiles(config) and not empty else None
    if counters is not None and not backend.is_capturing():
        counters.reserve()
    return plan.map_tensors(mapped, counters, backend.is_capturing)


def _load(spec: AttentionSpec, config: KernelConfig, family: Family, device: int, backend: Backend) -> Kernel:
    if backend.is_capturing() and not backend.is_loaded(spec, config, family, device):
        raise CaptureError(
            f"A kernel cannot be loaded while a CUDA graph is being captured, and {family.name} {config} for {spec}"
            f" is not loaded on cuda:{device} yet. Warm up first: make the same call once before the capture."
        )
    return backend.kernel(spec, config, family, device)


def _values(
    problem: Problem,
    config: KernelConfig,
    family: Family,
    shape: ProblemShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float,
) -> dict[str, int | float]:
    """Every argument that is no address, by name."""
    values: dict[str, int | float] = {
        "seqlen_q": shape.seqlen_q,
        "seqlen_k": shape.seqlen_k,
        "nheads": shape.nheads,
        "group_size": shape.gqa_ratio,
        "softmax_scale": softmax_scale,
        "softmax_scale_log2": softmax_scale * LOG2_E,
    }
    out_sizes = (shape.batch, shape.seqlen_q, shape.nheads, problem.spec.head_dim_v)
    strides = {
        "q": launch_strides(q.shape, q.stride()),
        "k": launch_strides(k.shape, k.stride()),
        "v": launch_strides(v.shape, v.stride()),
        "o": _dense_strides(out_sizes)[:3],
    }
    for name, of_tensor in strides.items():
        for axis, stride in zip("bsh", of_tensor, strict=True):
            values[f"{name}_stride_{axis}"] = stride
    values.update(family.schedule_arguments(problem.spec, config, shape))
    for prefix, traced in (("mask", problem.mask), ("score", problem.score)):
        if traced is not None:
            values.update(mod_argument_values(prefix, traced))
            for argument, table in zip(mod_table_arguments(prefix, traced.graph), traced.tables, strict=True):
                values.update(zip(argument.strides, element_strides(table), strict=True))
    return values


def _table_pointers(problem: Problem) -> list[str]:
    return [
        argument.pointer
        for prefix, traced in (("mask", problem.mask), ("score", problem.score))
        if traced is not None
        for argument in mod_table_arguments(prefix, traced.graph)
    ]


def element_strides(table: Any) -> tuple[int, ...]:
    """The strides of a captured tensor in elements (torch counts elements, CuPy and NumPy bytes)."""
    if hasattr(table, "stride"):
        return tuple(table.stride())
    return tuple(stride // table.dtype.itemsize for stride in table.strides)


def _address_getter(table: Any) -> Callable[[Any], int]:
    if hasattr(table, "data_ptr"):
        return lambda tensor: int(tensor.data_ptr())
    if hasattr(getattr(table, "data", None), "ptr"):
        return lambda array: int(array.data.ptr)
    return lambda array: int(array.ctypes.data)


def _position(table: Any, captured: Sequence[Any]) -> int:
    return next(i for i, tensor in enumerate(captured) if tensor is table)


def _dense_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
