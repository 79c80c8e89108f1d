"""One compile per key: threads, processes, and every field that must make another key."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_compile import (
    COMPILER,
    FAMILY,
    LOG,
    SM_90,
    SPILLING_KERNEL,
    FakeConfig,
    FakeRender,
    FakeSpec,
    compile_fake,
    fresh_compiler,
    kept_files,
    kernel_text,
    new_process,
    quick_compiler,
)

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import BuildGateError, CompileError, MissingComponentError
from flashsmith.runtime import compiler, driver, nvrtc, nvrtc_library
from flashsmith.runtime.cache import FOLDER


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    fresh_compiler(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> FakeRender:
    return quick_compiler(monkeypatch)


# ---- Hits and misses ----


def test_the_second_call_and_the_second_process_hit(render: FakeRender, cache_folder: Path) -> None:
    first = compile_fake()
    second = compile_fake()
    new_process()
    third = compile_fake()
    assert len(render.calls) == 1
    assert [k.cached for k in (first, second, third)] == [False, True, True]
    assert replace(first, cached=True) == second == replace(third, seconds=first.seconds)
    assert first.entry == "scale"
    assert first.report.registers == 40
    assert (first.nvrtc_version, first.target, first.seconds) == ("13.0", "sm_90", 0.5)
    record = json.loads((cache_folder / FOLDER).glob("*/key.json").__next__().read_text())
    assert record["facts"]["nvrtc"] == "13.0"
    assert record["facts"]["spec"] == "fake"
    assert compiler.kernel_cache().entries()[0].problem == ""


def test_a_hit_imports_nothing_heavy(cache_folder: Path) -> None:
    """Written by one process, found by another, which loads no Jinja, CuPy, NumPy, torch, file lock or NVRTC."""
    program = textwrap.dedent(
        """
        import sys, time
        from helpers_compile import FAMILY, FakeConfig, FakeSpec, FakeRender, install_render
        from flashsmith.generator.arch import ARCHS
        from flashsmith.runtime import compiler, nvrtc_library
        if sys.argv[1] == "write":
            import pytest
            install_render(pytest.MonkeyPatch(), FakeRender())
        start = time.perf_counter()
        kernel = compiler.compile_kernel(FakeSpec(), FakeConfig(), ARCHS["sm_90"], family=FAMILY)
        milliseconds = 1e3 * (time.perf_counter() - start)
        assert kernel.cached == (sys.argv[1] == "read")
        if kernel.cached:
            names = ("jinja2", "cupy", "cupy_backends", "numpy", "torch", "filelock", "platformdirs")
            assert not [m for m in names if m in sys.modules]
            assert nvrtc_library.loaded_library(13) is None
            print(milliseconds)
        """
    )
    if nvrtc_library.installed_compiler() is None:
        pytest.skip("needs CuPy and an NVRTC wheel")
    tests = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    subprocess.run([sys.executable, "-c", program, "write"], env=env, check=True)
    times = [
        float(subprocess.run([sys.executable, "-c", program, "read"], env=env, check=True, capture_output=True).stdout)
        for _ in range(5)
    ]
    assert min(times) < 5.0, times


@pytest.mark.parametrize(
    "change",
    ["spec", "config", "arch", "family", "templates", "version", "compiler", "options"],
)
def test_a_changed_field_is_compiled_again(render: FakeRender, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    compile_fake()
    new_process()
    family = FAMILY
    arguments: dict[str, Any] = {"spec": FakeSpec(), "config": FakeConfig(), "arch": SM_90}
    if change == "spec":
        arguments["spec"] = FakeSpec("fake softcap")
    elif change == "config":
        arguments["config"] = FakeConfig(scale=3)
    elif change == "arch":
        arguments["arch"] = ARCHS["sm_80"]
    elif change == "family":
        family = type(FAMILY)(name="other", target=FAMILY.target)
    elif change == "templates":
        monkeypatch.setattr(compiler, "generator_digest", lambda: "another")
    elif change == "version":
        monkeypatch.setattr("flashsmith.__version__", "99")
    elif change == "compiler":
        other = replace(COMPILER, build="another")
        monkeypatch.setattr(compiler, "installed_compiler", lambda: other)
        monkeypatch.setattr(nvrtc, "compiler", lambda: other)
    else:
        monkeypatch.setattr(nvrtc, "OPTIONS", ("--std=c++20",))
    spec, config, arch = arguments.values()
    kernel = compiler.compile_kernel(spec, config, arch, family=family)
    assert not kernel.cached
    assert len(render.calls) == 2
    assert len(compiler.kernel_cache().entries()) == 2


def test_a_wrong_guess_of_the_compiler_is_put_right(render: FakeRender, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is kept under the compiler that made it, and found by the next process, which guesses wrong too."""
    wrong = replace(COMPILER, build="guessed")
    monkeypatch.setattr(compiler, "installed_compiler", lambda: wrong)
    compile_fake()
    assert compiler.kernel_cache().entries()[0].key["compiler"] == COMPILER.identity
    assert compile_fake().cached
    new_process()
    assert compile_fake().cached
    assert len(render.calls) == 1


def test_an_unknown_compiler_is_loaded(render: FakeRender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "installed_compiler", lambda: None)
    compile_fake()
    new_process()
    assert compile_fake().cached


def test_a_damaged_entry_is_compiled_again_and_replaced(render: FakeRender, cache_folder: Path) -> None:
    good = compile_fake()
    for name in ("kernel.cubin", "key.json", "checksum"):
        new_process()
        path = next((cache_folder / FOLDER).glob(f"*/{name}"))
        path.write_bytes(path.read_bytes()[:-30])
        again = compile_fake()
        assert not again.cached
        assert again.cubin == good.cubin
        new_process()
        assert compile_fake().cached


@pytest.mark.parametrize("broken", [{"report": None}, {"report": {"registers": 3}}, {"entry": None}, {"seconds": "x"}])
def test_facts_of_another_form_are_a_miss(
    render: FakeRender, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]
) -> None:
    compile_fake()
    new_process()
    real = compiler.KernelCache.load

    def load(self: Any, key: Any) -> Any:
        entry: Any = real(self, key)
        facts = {k: v for k, v in {**entry.facts, **broken}.items() if v is not None}
        return replace(entry, facts=facts)

    monkeypatch.setattr(compiler.KernelCache, "load", load)
    assert not compile_fake().cached


def test_without_a_usable_folder_kernels_live_in_this_process(
    render: FakeRender, monkeypatch: pytest.MonkeyPatch, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_folder.write_text("a file in the way")
    first = compile_fake()
    assert compile_fake() == replace(first, cached=True)
    compile_fake(config=FakeConfig(scale=5))
    assert len(render.calls) == 2
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


def test_memory_is_bounded(render: FakeRender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MEMORY_ENTRIES", 3)
    for scale in range(5):
        compile_fake(config=FakeConfig(scale))
    assert len(compiler._memory) == 3
    assert compile_fake(config=FakeConfig(0)).cached  # from disk
    assert len(render.calls) == 5


# ---- Gate and driver ----


def test_the_gate_holds_for_cached_kernels_too(render: FakeRender, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = LOG.replace("0 bytes spill stores", "12 bytes spill stores")
    monkeypatch.setattr(nvrtc, "compile_to_cubin", lambda *a, **k: nvrtc.Compilation(b"cubin", bad, 0.1))
    for _ in range(2):
        with pytest.raises(BuildGateError, match=r"fake FakeConfig.*12 bytes of spill stores"):
            compile_fake()
        new_process()
    assert compile_fake(gate=False).report.spill_store_bytes == 12
    assert len(render.calls) == 1  # a bad kernel is not compiled twice either


def test_a_failed_compile_is_not_kept(render: FakeRender, monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    good = nvrtc.compile_to_cubin

    def fail(*args: Any, **options: Any) -> Any:
        raise CompileError("no")

    monkeypatch.setattr(nvrtc, "compile_to_cubin", fail)
    with pytest.raises(CompileError, match="no"):
        compile_fake()
    assert kept_files(cache_folder) in ([], [FOLDER])
    assert compiler._key_locks == {}
    monkeypatch.setattr(nvrtc, "compile_to_cubin", good)
    assert not compile_fake().cached


def test_a_driver_too_old_is_found_before_compiling(render: FakeRender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuda_version", lambda: (12, 2))
    with pytest.raises(MissingComponentError, match=r"NVRTC 13\.0 needs a driver with CUDA 13.*flashsmith\[cuda12\]"):
        compile_fake()
    assert render.calls == []
    assert not compile_fake(run_here=False).cached  # for another machine
    with pytest.raises(MissingComponentError):
        compile_fake()  # nor is the cached one given to this driver
    monkeypatch.setattr(driver, "cuda_version", lambda: (13, 0))
    assert compile_fake().cached


# ---- Real NVRTC ----


def test_compile_text_is_real_and_uncached(cache_folder: Path) -> None:
    if nvrtc_library.installed_compiler() is None:
        pytest.skip("needs CuPy and an NVRTC wheel")
    source = FakeRender()(None, FakeConfig(), SM_90)
    kernel = compiler.compile_text(source)
    assert kernel.cubin[:4] == b"\x7fELF"
    assert not kernel.cached
    assert not cache_folder.exists()
    assert kernel.key == source.digest
    assert compiler.compile_text(source, target="sm_80").target == "sm_80"
    spilling = FakeRender(text=lambda config: SPILLING_KERNEL)(None, FakeConfig(), SM_90)
    with pytest.raises(BuildGateError, match="stack frame"):
        compiler.compile_text(spilling)
    assert compiler.compile_text(spilling, gate=False).report.spill_load_bytes > 0
    assert "scale" in kernel_text()
