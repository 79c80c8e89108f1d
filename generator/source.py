"""`KernelSource`: the text of one generated kernel, in named sections."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arch import Arch
    from .families.base import ArgumentField, KernelConfig
    from .spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the text. The section named "primitives" holds all PTX; the emulator swaps that one alone."""

    name: str
    text: str


@dataclass(frozen=True)
class KernelSource:
    """A self-contained CUDA C++ translation unit with one kernel, `entry`, that takes one `Arguments` by value."""

    entry: str
    family: str
    spec: AttentionSpec
    config: KernelConfig
    arch: Arch
    sections: tuple[Section, ...]
    arguments: tuple[ArgumentField, ...]

    @cached_property
    def text(self) -> str:
        """The whole file, as NVRTC compiles it and people read it."""
        return "\n".join(section.text for section in self.sections)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def section(self, name: str) -> Section:
        """The section called `name`; KeyError if there is none."""
        for section in self.sections:
            if section.name == name:
                return section
        raise KeyError(name)

    def __str__(self) -> str:
        return f"{self.family} {self.spec} {self.config} for {self.arch}"
