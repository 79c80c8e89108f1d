"""From a spec and a config to a `CompiledKernel`: from this process, from the disk cache, or from NVRTC.

A hit renders nothing and loads neither Jinja nor CuPy nor NVRTC. A miss is compiled once: threads wait for each other
by key, processes by a file lock.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..generator.environment import generator_digest
from ..generator.errors import BuildGateError, MissingComponentError
from . import driver, nvrtc
from .cache import Entry, KernelCache, KernelKey
from .gate import ResourceReport, check_gate, parse_report
from .nvrtc_library import Compiler, installed_compiler
from .variables import cache_dir, lock_seconds

if TYPE_CHECKING:
    from ..generator.arch import Arch
    from ..generator.families.base import Family, KernelConfig
    from ..generator.source import KernelSource
    from ..generator.spec import AttentionSpec

#: Kernels kept in this process; the tuner compiles hundreds, of which the oldest are read from disk again.
MEMORY_ENTRIES = 512

_log = logging.getLogger("flashsmith.compiler")
_memory: dict[tuple[str, str], CompiledKernel] = {}
_key_locks: dict[tuple[str, str], threading.Lock] = {}
_loaded_compiler: Compiler | None = None
if hasattr(os, "register_at_fork"):
    # A lock that another thread held at the fork would never be released in the child.
    os.register_at_fork(after_in_child=_key_locks.clear)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code of one kernel for one architecture.

    `report` is ptxas's, `seconds` what NVRTC took when it was compiled, `cached` whether this call was spared that,
    `key` the cache key's digest (of the text, where there was no cache).
    """

    entry: str
    cubin: bytes
    report: ResourceReport
    nvrtc_version: str
    target: str
    seconds: float
    cached: bool
    key: str

    def __str__(self) -> str:
        where = "cached" if self.cached else f"compiled in {self.seconds:.2f} s"
        return f"{self.entry} for {self.target} by NVRTC {self.nvrtc_version}: {self.report} ({where})"


def compile_kernel(
    spec: AttentionSpec,
    config: KernelConfig,
    arch: Arch,
    *,
    family: Family | None = None,
    gate: bool = True,
    run_here: bool = True,
) -> CompiledKernel:
    """The machine code that solves `spec` with `config` on `arch`, compiled only where it is kept nowhere yet.

    `gate` refuses spills, stack frames and ptxas's performance advisories. `run_here` says that this machine's driver
    is to run it: then a compiler whose code that driver cannot load is refused before it compiles; False compiles for
    another machine.

    Raises ConfigError and UnsupportedError where the config or spec does not fit, CompileError (BuildGateError for
    the gate) and MissingComponentError.
    """
    family = family or _family_named(config.family)
    key = kernel_key(spec, config, arch, family=family)
    kernel = _recall(key)
    if kernel is None:
        kernel = _load_or_compile(key, spec, config, arch, family, run_here)
    if run_here:
        _require_driver_reads(kernel.nvrtc_version)
    if gate:
        check_gate(kernel.report, what=f"{family.name} {config}")
    return kernel


def fitting_default(spec: AttentionSpec, arch: Arch, *, family: Family, run_here: bool = True) -> KernelConfig:
    """The first of the family's default configs that passes the build gate with this compiler, the last if none does.

    A mask or score function takes registers, and another ptxas allocates them otherwise: a config that fits one kernel
    spills in the next. Compiles what the cache does not hold.
    """
    configs = family.default_configs(spec, arch)
    for config in configs:
        try:
            compile_kernel(spec, config, arch, family=family, run_here=run_here)
        except BuildGateError:
            continue
        return config
    return configs[-1]


def _find_cached(
    spec: AttentionSpec, config: KernelConfig, arch: Arch, *, family: Family | None = None
) -> CompiledKernel | None:
    """The kernel if this process or the disk cache has it, ungated; None where it would have to be compiled."""
    key = kernel_key(spec, config, arch, family=family)
    kernel = _recall(key)
    if kernel is None:
        kernel = _from_disk(_cache_at(cache_dir()), key)
        if kernel is not None:
            _remember(kernel)
    return kernel


def compile_text(source: KernelSource, *, target: str | None = None, gate: bool = True) -> CompiledKernel:
    """`source` compiled for `target` (its own arch by default), past every cache. Raises as `compile_kernel` does."""
    target = target or _family_named(source.family).target(source.arch)
    result = nvrtc.compile_to_cubin(source.text, target, name=f"{source.entry}.cu")
    report = parse_report(result.log)
    if gate:
        check_gate(report, what=str(source))
    version = nvrtc.compiler().version
    return CompiledKernel(
        source.entry, result.cubin, report, version, target, result.seconds, cached=False, key=source.digest
    )


def kernel_key(spec: AttentionSpec, config: KernelConfig, arch: Arch, *, family: Family | None = None) -> KernelKey:
    """The cache key of one kernel with the compiler of this environment. Loads no compiler if its file can be found."""
    from flashsmith import __version__

    return KernelKey(
        family=family.name if family is not None else config.family,
        spec=spec.digest,
        config=tuple(config.to_dict().items()),
        target=(family or _family_named(config.family)).target(arch),
        generator=generator_digest(),
        compiler=current_compiler().identity,
        options=nvrtc.OPTIONS,
        flashsmith=__version__,
    )


def current_compiler() -> Compiler:
    """The NVRTC that a compile would use: the loaded one, else the one whose file lies where CuPy looks.

    Raises MissingComponentError where there is none.
    """
    return _loaded_compiler or installed_compiler() or nvrtc.compiler()


def kernel_cache() -> KernelCache:
    """The disk cache in `FLASHSMITH_CACHE_DIR`, for listing and clearing."""
    return _cache_at(cache_dir())


def _remember(kernel: CompiledKernel) -> None:
    """Keeps `kernel` in this process, for calls with the same key and cache folder."""
    while len(_memory) >= MEMORY_ENTRIES:
        _memory.pop(next(iter(_memory)), None)
    _memory[str(cache_dir()), kernel.key] = replace(kernel, cached=True)


def forget() -> None:
    """Drops the kernels kept in this process, not those on disk."""
    _memory.clear()


def _family_named(name: str) -> Family:
    from ..generator.families import family_named

    return family_named(name)


def _load_or_compile(
    key: KernelKey, spec: AttentionSpec, config: KernelConfig, arch: Arch, family: Family, run_here: bool
) -> CompiledKernel:
    cache = _cache_at(cache_dir())
    place = (str(cache.root), key.digest)
    with _key_locks.setdefault(place, threading.Lock()):
        try:
            kernel = _find_cached(spec, config, arch, family=family)  # another thread may have been first
            if kernel is not None:
                return kernel
            actual = _load_compiler()
            if actual.identity != key.compiler:
                _log.info("The key was made for %s, but CuPy loaded %s from %s.", key.compiler, actual, actual.path)
                key = replace(key, compiler=actual.identity)
            if run_here:
                _require_driver_reads(actual.version)
            with cache.lock(key, seconds=lock_seconds()):
                # Another process may have compiled it while this one waited.
                kernel = _from_disk(cache, key)
                if kernel is None:
                    kernel = _compile(cache, key, spec, config, arch, family)
            _remember(kernel)
            return kernel
        finally:
            _key_locks.pop(place, None)


def _compile(
    cache: KernelCache, key: KernelKey, spec: AttentionSpec, config: KernelConfig, arch: Arch, family: Family
) -> CompiledKernel:
    from ..generator.rendering import render

    source = render(spec, config, arch, family=family)
    result = nvrtc.compile_to_cubin(source.text, key.target, name=f"{source.entry}.cu")
    kernel = CompiledKernel(
        entry=source.entry,
        cubin=result.cubin,
        report=parse_report(result.log),
        nvrtc_version=nvrtc.compiler().version,
        target=key.target,
        seconds=result.seconds,
        cached=False,
        key=key.digest,
    )
    facts = {
        "entry": kernel.entry,
        "nvrtc": kernel.nvrtc_version,
        "driver": driver.driver_version(),
        "seconds": round(kernel.seconds, 3),
        "spec": str(spec),
        "config": str(config),
        "report": kernel.report.to_dict(),
    }
    cache.store(key, Entry(source=source.text, cubin=kernel.cubin, facts=facts))
    _log.info("Compiled %s", kernel)
    return kernel


def _from_disk(cache: KernelCache, key: KernelKey) -> CompiledKernel | None:
    entry = cache.load(key)
    if entry is None:
        return None
    facts: Mapping[str, Any] = entry.facts
    try:
        return CompiledKernel(
            entry=str(facts["entry"]),
            cubin=entry.cubin,
            report=ResourceReport.from_dict(facts["report"]),
            nvrtc_version=str(facts["nvrtc"]),
            target=key.target,
            seconds=float(facts["seconds"]),
            cached=True,
            key=key.digest,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _log.info("Ignoring the cached kernel %s: its facts are of another form (%s).", key.folder, error)
        return None


def _recall(key: KernelKey) -> CompiledKernel | None:
    return _memory.get((str(cache_dir()), key.digest))


def _load_compiler() -> Compiler:
    global _loaded_compiler
    if _loaded_compiler is None:
        _loaded_compiler = nvrtc.compiler()
    return _loaded_compiler


def _require_driver_reads(nvrtc_version: str) -> None:
    problem = nvrtc.driver_mismatch(nvrtc_version, driver.cuda_version())
    if problem is not None:
        raise MissingComponentError(problem)


@lru_cache(maxsize=16)
def _cache_at(root: Path) -> KernelCache:
    return KernelCache(root)
