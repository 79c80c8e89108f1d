"""Stand-ins that compile in milliseconds: a spec, a config and a family of a hand-written kernel."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashsmith.runtime.cache import KernelKey

KERNEL = """\
struct Arguments {
  float* o;
  int n;
};

extern "C" __global__ void __launch_bounds__(128) scale(const __grid_constant__ Arguments args) {
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i < args.n) args.o[i] = SCALE * args.o[i];
}
"""

#: Holds more values across the barriers than the 32 registers that 2 blocks of 1024 threads leave.
SPILLING_KERNEL = """\
extern "C" __global__ void __launch_bounds__(1024, 2) scale(float* o) {
  float a[120];
#pragma unroll
  for (int i = 0; i < 120; ++i) a[i] = o[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 120; ++i) o[i * 1024 + threadIdx.x] = a[i] * a[(i * 7 + 3) % 120];
}
"""


def kernel_text(scale: float = 2.0) -> str:
    return KERNEL.replace("SCALE", f"{float(scale)!r}f")


@dataclass(frozen=True)
class FakeSpec:
    name: str = "fake"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FakeConfig:
    scale: int = 2
    family: str = "fake"

    def to_dict(self) -> dict[str, int]:
        return {"scale": self.scale}


FAMILY: Any = SimpleNamespace(name="fake")


@dataclass
class FakeRender:
    """In place of `generator.rendering.render`; `calls` counts the misses."""

    text: Callable[[Any], str] = lambda config: kernel_text(config.scale)
    calls: list[tuple[Any, Any]] = field(default_factory=list)

    def __call__(self, spec: Any, config: Any, arch: Any, *, family: Any = None) -> Any:
        self.calls.append((spec, config))
        text = self.text(config)
        return SimpleNamespace(entry="scale", text=text, arch=arch, digest=hashlib.sha256(text.encode()).hexdigest())


def install_render(patch: pytest.MonkeyPatch, render: FakeRender) -> FakeRender:
    patch.setitem(sys.modules, "flashsmith.generator.rendering", SimpleNamespace(render=render))  # type: ignore[arg-type]
    return render


def kernel_key(**changes: Any) -> KernelKey:
    values: dict[str, Any] = {
        "family": "fake",
        "spec": "5" * 64,
        "config": {"B_r": 128, "q_in_registers": True, "schedule": "linear"},
        "target": "sm_90",
        "generator": "9" * 64,
        "compiler": "NVRTC build abc",
        "options": ("--std=c++17",),
        "flashsmith": "0.1.0",
    }
    return KernelKey(**{**values, **changes})


def kept_files(root: Path) -> list[str]:
    """Every file and folder under a cache's root, save lock files, relative and sorted."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if "locks" not in p.parts)
