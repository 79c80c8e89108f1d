"""What the emulator builds is kept, checked and shared; what others could have written is not used."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers_emulator import run_small, small_kernel

from flashsmith.runtime.emulator import build, object_cache

TEXT = small_kernel("  st_global_f32(args.out, 42.0f);", "float* out")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiler was called for."""
    made: list[str] = []
    original = build._run

    def counting(toolchain, arguments, folder, what, *, output):  # type: ignore[no-untyped-def]
        made.append(what)
        original(toolchain, arguments, folder, what, output=output)

    monkeypatch.setattr(build, "_run", counting)
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of the session's cache: a test of kernels in a cache of its own need not compile it again."""
    found = build.engine_object("plain")
    monkeypatch.setattr(build, "engine_object", lambda flavour: found)


def run() -> float:
    out = np.zeros(1, np.float32)
    assert run_small(TEXT, {"out": out}, threads=32).clean
    return float(out[0])


def test_a_program_is_built_once_and_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[str]
) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "with space and é"))
    assert run() == 42.0
    assert calls == ["engine", "kernel", "program"]
    assert run() == 42.0
    assert len(calls) == 3
    names = [path.name for path in object_cache.folder().iterdir()]
    entries = {name.rpartition("-")[0] for name in names if not name.startswith(".")}
    assert entries == {"engine-plain", "kernel-plain"}


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone", "no checksum"])
def test_a_damaged_program_is_built_again(
    damage: str, engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[str]
) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    run()
    product = build.kernel_program(TEXT, "plain")
    content = bytearray(product.read_bytes())
    if damage == "cut":
        product.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        product.write_bytes(content)
    elif damage == "empty":
        product.write_bytes(b"")
    elif damage == "gone":
        product.unlink()
    else:
        (product.parent / "checksum").unlink()
    assert run() == 42.0
    assert calls == ["kernel", "program"] * 2


def test_a_folder_that_others_may_write_to_is_not_used(
    engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(object_cache, "_fallback", None)
    planted = tmp_path / object_cache.FOLDER
    planted.mkdir()
    planted.chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="flashsmith.emulator"):
        assert run() == 42.0
        assert run() == 42.0
    assert list(planted.iterdir()) == []
    assert len(caplog.records) == 1
    assert "may be written by other users (mode 0777)" in caplog.text


def test_without_any_folder_programs_live_for_this_process(
    engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(blocked))
    monkeypatch.setattr(object_cache, "_fallback", None)
    assert run() == 42.0
    assert object_cache._fallback is not None
    assert blocked.read_text() == ""


def test_threads_build_a_program_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[str]) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    results: list[float] = []
    threads = [threading.Thread(target=lambda: results.append(run())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [42.0] * 4
    assert sorted(calls) == ["engine", "kernel", "program"]


def test_a_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))

    def failing(folder: Path) -> None:
        (folder / "half").write_text("")
        raise subprocess.SubprocessError("the disk is full")

    with pytest.raises(subprocess.SubprocessError):
        object_cache.cached("kernel-plain", "0" * 64, "kernel", failing)
    assert [path for path in (tmp_path / object_cache.FOLDER).iterdir() if path.is_dir()] == []


def test_a_program_of_another_machine_is_built_again(
    engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: list[str]
) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    run()
    product = build.kernel_program(TEXT, "plain")
    content = b"\x7fELF of another machine"
    product.write_bytes(content)
    (product.parent / "checksum").write_text(object_cache._sum_of(product))
    os.chmod(product, 0o700)
    assert run() == 42.0
    assert calls.count("kernel") == 2


def test_entries_are_listed_checked_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    assert object_cache.entries() == []
    made = [
        object_cache.cached("engine-race", f"{n}" * 64, "engine.o", lambda folder: (folder / "engine.o").touch())
        for n in range(3)
    ]
    for age, product in enumerate(made):
        os.utime(product.parent, (1000 - age, 1000 - age))
    (made[1].parent / "checksum").write_text("0" * 64)
    left = tmp_path / object_cache.FOLDER / ".tmp-1-dead"
    left.mkdir()
    found = object_cache.entries()
    assert [entry.path for entry in found] == [product.parent for product in made]
    assert [bool(entry.problem) for entry in found] == [False, True, False]
    assert object_cache.remove(found[0].path)
    assert object_cache.clear() == 2
    assert list((tmp_path / object_cache.FOLDER).iterdir()) == []


def test_a_folder_that_others_may_write_to_is_neither_listed_nor_cleared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    product = object_cache.cached("kernel-plain", "0" * 64, "kernel", lambda folder: (folder / "kernel").touch())
    object_cache.folder().chmod(0o777)
    assert object_cache.entries() == []
    assert object_cache.clear() == 0
    assert product.exists()
