"""One compile per key: threads, processes, and every field that must make another key."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_compile import (
    FAMILY,
    SPILLING_KERNEL,
    FakeConfig,
    FakeRender,
    FakeSpec,
    install_render,
    kept_files,
    kernel_text,
)

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import BuildGateError, CompileError, MissingComponentError
from flashsmith.runtime import compiler, driver, nvrtc, nvrtc_library
from flashsmith.runtime.cache import FOLDER
from flashsmith.runtime.compiler import CompiledKernel

SM_90 = ARCHS["sm_90"]
LOG = """\
ptxas info    : Function properties for scale
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
"""
COMPILER = nvrtc_library.Compiler(version="13.0", build="feedbeef", path="/lib/libnvrtc.so.13")


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_memory", {})
    monkeypatch.setattr(compiler, "_loaded_compiler", None)
    compiler._cache_at.cache_clear()
    yield tmp_path / "cache"
    compiler._cache_at.cache_clear()


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> FakeRender:
    """Rendering and NVRTC replaced by stand-ins; `render.calls` counts compiles."""

    def compile_to_cubin(text: str, target: str, *, name: str) -> nvrtc.Compilation:
        return nvrtc.Compilation(cubin=f"{target} {name} {text}".encode(), log=LOG, seconds=0.5)

    monkeypatch.setattr(nvrtc, "compile_to_cubin", compile_to_cubin)
    monkeypatch.setattr(nvrtc, "compiler", lambda: COMPILER)
    monkeypatch.setattr(compiler, "installed_compiler", lambda: COMPILER)
    return install_render(monkeypatch, FakeRender())


def compile_fake(spec: Any = None, config: Any = None, arch: Any = SM_90, **options: Any) -> CompiledKernel:
    return compiler.compile_kernel(spec or FakeSpec(), config or FakeConfig(), arch, family=FAMILY, **options)


def new_process() -> None:
    """What a new process starts with."""
    compiler.forget()
    compiler._loaded_compiler = None


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
            assert nvrtc_library.loaded_library() is None
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
        family = type(FAMILY)(name="other")
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
        entry = real(self, key)
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


def test_find_cached_never_compiles(render: FakeRender) -> None:
    spec: Any = FakeSpec()
    config: Any = FakeConfig()
    assert compiler.find_cached(spec, config, SM_90) is None
    compile_fake()
    new_process()
    found = compiler.find_cached(spec, config, SM_90)
    assert found is not None
    assert found.cached
    assert len(render.calls) == 1


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


# ---- Threads and processes ----


def test_threads_compile_one_key_once_and_other_keys_at_the_same_time(
    render: FakeRender, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = nvrtc.compile_to_cubin
    running, most = 0, 0
    guard = threading.Lock()

    def slow(*args: Any, **options: Any) -> Any:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        time.sleep(0.2)
        with guard:
            running -= 1
        return fast(*args, **options)

    monkeypatch.setattr(nvrtc, "compile_to_cubin", slow)
    results: list[CompiledKernel] = []
    configs = [FakeConfig(scale) for scale in range(4) for _ in range(4)]
    threads = [threading.Thread(target=lambda c=c: results.append(compile_fake(config=c))) for c in configs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16
    assert len(render.calls) == 4
    assert most > 1
    assert sum(not k.cached for k in results) == 4
    assert compiler._key_locks == {}


RACER = textwrap.dedent(
    """
    import errno, os, sys, time
    from pathlib import Path
    import pytest
    from helpers_compile import FAMILY, FakeConfig, FakeRender, FakeSpec, install_render
    from flashsmith.generator.arch import ARCHS
    from flashsmith.runtime import compiler, nvrtc, nvrtc_library
    import racer_constants as constants

    patch = pytest.MonkeyPatch()
    log = Path(sys.argv[1])

    def no_locks(self, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    def compile_to_cubin(text, target, *, name):
        with open(log, "a") as file:
            file.write("compiled\\n")
        time.sleep(0.3)
        return nvrtc.Compilation(b"cubin" * 1000, constants.LOG, 0.3)

    install_render(patch, FakeRender())
    if sys.argv[2] == "fake":
        patch.setattr(nvrtc, "compile_to_cubin", compile_to_cubin)
        patch.setattr(nvrtc, "compiler", lambda: constants.COMPILER)
        patch.setattr(compiler, "installed_compiler", lambda: constants.COMPILER)
    if sys.argv[3] == "nolock":
        import filelock
        patch.setattr(filelock.FileLock, "acquire", no_locks)
    go = float(sys.argv[4])
    time.sleep(max(0.0, go - time.time()))
    kernel = compiler.compile_kernel(FakeSpec(), FakeConfig(), ARCHS["sm_90"], family=FAMILY)
    print(kernel.cached, kernel.report.registers, len(kernel.cubin))
    """
)


@pytest.mark.parametrize(("kind", "lock", "count"), [("fake", "lock", 16), ("fake", "nolock", 6), ("real", "lock", 3)])
def test_processes_racing_on_one_key(tmp_path: Path, cache_folder: Path, kind: str, lock: str, count: int) -> None:
    """All succeed, one entry is left and nothing temporary; with locks, one compile. One race is through real NVRTC."""
    if kind == "real" and nvrtc_library.installed_compiler() is None:
        pytest.skip("needs CuPy and an NVRTC wheel")
    (tmp_path / "racer_constants.py").write_text(
        f"from flashsmith.runtime.nvrtc_library import Compiler\nLOG = {LOG!r}\nCOMPILER = {COMPILER!r}\n"
    )
    tests = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), tests, *sys.path])}
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-c", RACER, str(log), kind, lock, str(time.time() + 0.15 * count)]
    racers = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    outputs = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * count, outputs
    answers = [out.split() for out, _ in outputs]
    assert len({tuple(answer[1:]) for answer in answers}) == 1
    if lock == "lock":
        assert [answer[0] for answer in answers].count("False") == 1
        if kind == "fake":
            assert log.read_text().count("compiled") == 1
    names = kept_files(cache_folder)
    assert len(names) == 1 + 1 + 4, names
    assert not [name for name in names if ".tmp-" in name]
    (entry,) = compiler.kernel_cache().entries()
    assert entry.problem == ""


def test_a_fork_while_another_thread_compiles() -> None:
    """The child inherits a lock that nobody will release; it must not wait for it."""
    program = textwrap.dedent(
        """
        import os, threading, warnings
        warnings.simplefilter("ignore")
        from flashsmith.runtime import compiler
        lock = threading.Lock(); lock.acquire()
        compiler._key_locks["folder", "key"] = lock
        pid = os.fork()
        if pid == 0:
            os._exit(len(compiler._key_locks))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(compiler._key_locks) == 1
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True)


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
