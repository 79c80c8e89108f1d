"""What a kernel family is: its configs, exact resources, valid space, launch geometry, arguments and template.

A new family is a new file beside this one that defines a `Family`, a template, and a line in `families/__init__.py`.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from ..arch import Arch
from ..errors import ConfigError
from ..spec import AttentionSpec, ProblemShape

#: CUDA C++ type -> `struct` format code. Pointers are 64-bit.
_CODES = {"TensorMap": "128s", "long long": "q", "int": "i", "float": "f"}


@dataclass(frozen=True, slots=True)
class ArgumentField:
    """One member of the kernel's `struct Arguments`: its CUDA type, its name, and what it holds, for people."""

    ctype: str
    name: str
    meaning: str

    @property
    def is_pointer(self) -> bool:
        return self.ctype.endswith("*")

    @property
    def is_tensor_map(self) -> bool:
        return self.ctype == "TensorMap"

    @property
    def code(self) -> str:
        return "Q" if self.is_pointer else _CODES[self.ctype]

    @property
    def size(self) -> int:
        return struct.calcsize("=" + self.code)


@dataclass(frozen=True, slots=True)
class TensorMapField:
    """An argument that is a tensor map: of which tensor ("q", "k", "v", "o"), and the rows of one copy.

    `packed`: rows are (query, head of a KV head's group) pairs, the heads of a query side by side.
    """

    name: str
    tensor: str
    rows: int
    packed: bool = False


def layout_of(arguments: tuple[ArgumentField, ...]) -> struct.Struct:
    """The `struct.Struct` that packs `arguments` as the C++ compiler lays them out (the largest members come first)."""
    sizes = [field.size for field in arguments]
    assert sizes == sorted(sizes, reverse=True), "larger members must precede smaller ones"
    # The struct's size is a multiple of its largest member's alignment in C++.
    alignment = 64 if sizes[0] > 8 else 8
    return struct.Struct("=" + "".join(f.code for f in arguments) + f"{-sum(sizes) % alignment}x")


@dataclass(frozen=True, slots=True, order=True)
class KernelConfig:
    """Base of each family's tunable choices. Children are frozen dataclasses whose fields are int, bool or str."""

    family: ClassVar[str]

    def heads_per_tile(self, shape: ProblemShape) -> int:
        """The heads of Q whose rows one tile holds: 1, but for kernels that pack those of a KV head."""
        return 1

    def to_dict(self) -> dict[str, int | bool | str]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The config `to_dict` wrote. Raises ConfigError on unknown, missing or ill-typed values."""
        types = {f.name: {"int": int, "bool": bool, "str": str}[str(f.type)] for f in fields(cls)}
        wrong = sorted(set(data) ^ set(types))
        if wrong:
            raise ConfigError(
                f"A {cls.family} config has the keys {', '.join(types)}; unknown or missing: {', '.join(wrong)}."
            )
        for name, value in data.items():
            if type(value) is not types[name]:
                raise ConfigError(f"{name} of a {cls.family} config must be {types[name].__name__}, but got {value!r}.")
        return cls(**data)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.to_dict().items())


@dataclass(frozen=True, slots=True, order=True)
class Resources:
    """What one block of a config takes, known before compiling.

    `smem_bytes` is exact. `registers` is a lower bound per thread: values that are alive at once in the main loop.
    """

    threads: int
    smem_bytes: int
    registers: int
    register_cap: int


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Why a config is not in the space: a short class of reason, and the sentence with the values."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchGeometry:
    """Grid and block of one launch; `smem_bytes` of dynamic shared memory."""

    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int


class Family(abc.ABC):
    """A kernel family. Stateless; one instance each, in `families.FAMILIES`."""

    name: ClassVar[str]
    op: ClassVar[str]
    config_type: ClassVar[type[KernelConfig]]
    #: Section name -> template; "mods" comes from the spec's graphs and stands before "kernel".
    sections: ClassVar[tuple[tuple[str, str], ...]]
    entry: ClassVar[str]
    #: Whether masks and scores must be free of branches: then `&&` and `||` become `&` and `|` in their text.
    branch_free_mods: ClassVar[bool] = False

    @abc.abstractmethod
    def unsupported_reason(self, spec: AttentionSpec, arch: Arch) -> str | None:
        """Why this family cannot do `spec` on `arch`, or None if it can."""

    @abc.abstractmethod
    def candidates(self, spec: AttentionSpec, arch: Arch) -> Iterator[KernelConfig]:
        """Every config the family can state for `spec`, legal or not, in a fixed order."""

    @abc.abstractmethod
    def resources(self, spec: AttentionSpec, config: KernelConfig) -> Resources:
        """What `config` takes for `spec`."""

    @abc.abstractmethod
    def exclusion(self, spec: AttentionSpec, config: KernelConfig, arch: Arch) -> Exclusion | None:
        """Why `config` cannot run (or cannot win) for `spec` on `arch`; None if it is in the space."""

    @abc.abstractmethod
    def default_configs(self, spec: AttentionSpec, arch: Arch) -> tuple[KernelConfig, ...]:
        """The configs to use where nothing was tuned, all inside the space, at least one.

        The first is the default; a later one is taken where a mask or score function makes an earlier one spill.
        """

    def default_config(self, spec: AttentionSpec, arch: Arch) -> KernelConfig:
        """The first of `default_configs`."""
        return self.default_configs(spec, arch)[0]

    @abc.abstractmethod
    def arguments(self, spec: AttentionSpec) -> tuple[ArgumentField, ...]:
        """The members of the kernel's `struct Arguments`, in order."""

    def layout_reason(self, strides: Mapping[str, tuple[int, ...]], shape: ProblemShape) -> str | None:
        """Why this family cannot read tensors of these strides (elements; batch, seqlen, nheads), None if it can."""
        return None

    def shape_reason(self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape) -> str | None:
        """Why `config` cannot run a call of `shape`, in the form rule, values, remedy; None if it can, as most do."""
        return None

    def tensor_maps(self, spec: AttentionSpec, config: KernelConfig) -> tuple[TensorMapField, ...]:
        """The arguments that are tensor maps, in order; they are the first ones. None by default."""
        return ()

    def draws_tiles(self, config: KernelConfig) -> bool:
        """Whether blocks draw their tiles from a pair of counters, the argument `next_tile`; else that may be null."""
        return False

    def target(self, arch: Arch) -> str:
        """What the compiler is to generate code for: `arch`, or its variant with instructions of its own (sm_90a)."""
        return arch.name

    @abc.abstractmethod
    def geometry(
        self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape, *, sm_count: int
    ) -> LaunchGeometry:
        """Grid, block and shared memory of one launch on a GPU of `sm_count` SMs."""

    @abc.abstractmethod
    def schedule_arguments(self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape) -> Mapping[str, int]:
        """Values of the arguments that only this family knows (tile counts, sections), by name."""

    @abc.abstractmethod
    def render_context(self, spec: AttentionSpec, config: KernelConfig, arch: Arch) -> dict[str, Any]:
        """Names for the template, beside the common ones."""

    def space(self, spec: AttentionSpec, arch: Arch) -> tuple[KernelConfig, ...]:
        """Every valid config, in the fixed order of `candidates`."""
        return tuple(c for c in self.candidates(spec, arch) if self.exclusion(spec, c, arch) is None)

    def check_shape(self, spec: AttentionSpec, config: KernelConfig, shape: ProblemShape) -> None:
        """Raises ConfigError where `config` cannot run a call of `shape`."""
        reason = self.shape_reason(spec, config, shape)
        if reason is not None:
            raise ConfigError(reason)

    def check(self, spec: AttentionSpec, config: KernelConfig, arch: Arch) -> None:
        """Raises ConfigError where `config` is not in the space of `spec` on `arch`."""
        reason = self.unsupported_reason(spec, arch)
        if reason is not None:
            raise ConfigError(reason)
        excluded = self.exclusion(spec, config, arch)
        if excluded is not None:
            raise ConfigError(excluded.reason)
