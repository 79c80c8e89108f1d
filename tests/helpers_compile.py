"""Stand-ins that compile in milliseconds: a spec, a config and a family of a hand-written kernel."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashsmith.generator.arch import ARCHS
from flashsmith.runtime import compiler, nvrtc
from flashsmith.runtime.cache import Entry, KernelKey
from flashsmith.runtime.compiler import CompiledKernel
from flashsmith.runtime.nvrtc_library import Compiler

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


FAMILY: Any = SimpleNamespace(name="fake", target=lambda arch: arch.name)


@dataclass
class FakeRender:
    """In place of `generator.rendering.render`; `calls` counts the misses."""

    text: Callable[[Any], str] = lambda config: kernel_text(config.scale)
    calls: list[tuple[Any, Any]] = field(default_factory=list)

    def __call__(self, spec: Any, config: Any, arch: Any, *, family: Any = None) -> Any:
        self.calls.append((spec, config))
        text = self.text(config)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return SimpleNamespace(entry="scale", text=text, arch=arch, family="forward_sm80", digest=digest)


def install_render(patch: pytest.MonkeyPatch, render: FakeRender) -> FakeRender:
    patch.setitem(sys.modules, "flashsmith.generator.rendering", SimpleNamespace(render=render))  # type: ignore[arg-type]
    return render


def kernel_key(**changes: Any) -> KernelKey:
    values: dict[str, Any] = {
        "family": "fake",
        "spec": "5" * 64,
        "config": (("B_r", 128), ("q_in_registers", True), ("schedule", "linear")),
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


ENTRY = Entry(source="// text é\n", cubin=b"\x7fELF" + bytes(range(256)) * 8, facts={"entry": "scale", "nvrtc": "13.0"})


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


SM_90 = ARCHS["sm_90"]
COMPILER = Compiler(version="13.0", build="feedbeef", path="/lib/libnvrtc.so.13")
LOG = """\
ptxas info    : Function properties for scale
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
"""


def fresh_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A process that has compiled nothing yet and keeps its kernels in `folder`."""
    patch.setenv("FLASHSMITH_CACHE_DIR", str(folder))
    patch.setattr(compiler, "_memory", {})
    patch.setattr(compiler, "_loaded_compiler", None)
    compiler._cache_at.cache_clear()


def quick_compiler(patch: pytest.MonkeyPatch) -> FakeRender:
    """Rendering and NVRTC replaced by stand-ins; the result's `calls` counts compiles."""

    def compile_to_cubin(text: str, target: str, *, name: str) -> nvrtc.Compilation:
        return nvrtc.Compilation(cubin=f"{target} {name} {text}".encode(), log=LOG, seconds=0.5)

    patch.setattr(nvrtc, "compile_to_cubin", compile_to_cubin)
    patch.setattr(nvrtc, "compiler", lambda: COMPILER)
    patch.setattr(compiler, "installed_compiler", lambda: COMPILER)
    return install_render(patch, FakeRender())


def compile_fake(spec: Any = None, config: Any = None, arch: Any = SM_90, **options: Any) -> CompiledKernel:
    spec, config = spec or FakeSpec(), config or FakeConfig()
    return compiler.compile_kernel(spec, config, arch, family=FAMILY, **options)


def new_process() -> None:
    """What a new process starts with: the disk alone."""
    compiler.forget()
    compiler._loaded_compiler = None
