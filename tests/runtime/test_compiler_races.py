"""Threads, processes and forks that meet on one key."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers_compile import (
    FakeConfig,
    FakeRender,
    compile_fake,
    fresh_compiler,
    kept_files,
    quick_compiler,
)

from flashsmith.runtime import compiler, nvrtc, nvrtc_library
from flashsmith.runtime.compiler import CompiledKernel


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    fresh_compiler(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> FakeRender:
    return quick_compiler(monkeypatch)


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
    from helpers_compile import COMPILER, FAMILY, LOG, FakeConfig, FakeRender, FakeSpec, install_render
    from flashsmith.generator.arch import ARCHS
    from flashsmith.runtime import compiler, nvrtc, nvrtc_library

    patch = pytest.MonkeyPatch()
    log = Path(sys.argv[1])

    def no_locks(self, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    def compile_to_cubin(text, target, *, name):
        with open(log, "a") as file:
            file.write("compiled\\n")
        time.sleep(0.3)
        return nvrtc.Compilation(b"cubin" * 1000, LOG, 0.3)

    install_render(patch, FakeRender())
    if sys.argv[2] == "fake":
        patch.setattr(nvrtc, "compile_to_cubin", compile_to_cubin)
        patch.setattr(nvrtc, "compiler", lambda: COMPILER)
        patch.setattr(compiler, "installed_compiler", lambda: COMPILER)
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
    tests = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
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
