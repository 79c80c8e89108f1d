"""The doctor: every piece named, with a remedy where one is missing, whatever else is broken."""

from __future__ import annotations

import errno
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import helpers_fake_cuda
import pytest

from flashsmith.generator.errors import MissingComponentError
from flashsmith.runtime import doctor, driver, nvrtc, nvrtc_library
from flashsmith.runtime.cache import FOLDER
from flashsmith.runtime.doctor import Check, diagnose
from flashsmith.runtime.nvrtc_library import Compiler

COMPILER = Compiler(version="13.0", build="feedbeef", path="/lib/libnvrtc.so.13")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No driver and a stand-in for NVRTC, unless a test says otherwise."""
    helpers_fake_cuda.install(monkeypatch, None)
    monkeypatch.setattr(nvrtc, "compile_to_cubin", lambda *a, **k: nvrtc.Compilation(b"", "", 0.0))
    monkeypatch.setattr(nvrtc, "supported_archs", lambda: (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121))
    monkeypatch.setattr(nvrtc, "compiler", lambda: COMPILER)
    monkeypatch.setattr(nvrtc_library, "installed_compiler", lambda: COMPILER)
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv("FLASHSMITH_CXX", raising=False)


def found(name: str) -> Check:
    return {check.name: check for check in diagnose()}[name]


def test_every_piece_is_checked_and_is_plain_data() -> None:
    checks = diagnose()
    assert [c.name for c in checks] == [
        "Python", "torch", "CuPy", "NVRTC", "driver", "GPU", "compiler and driver", "cache folder", "config folder",
        "C++ compiler", "variables",
    ]  # fmt: skip
    assert json.loads(json.dumps([c.to_dict() for c in checks]))[0]["status"] == "ok"
    for check in checks:
        assert check.status in ("ok", "warning", "missing")
        assert check.found
        assert check.needed
        assert bool(check.remedy) == (check.status != "ok"), check


def test_diagnose_makes_nothing(tmp_path: Path) -> None:
    diagnose()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = helpers_fake_cuda.build(tmp_path)
    helpers_fake_cuda.install(monkeypatch, fake)
    assert found("GPU 1").status == "ok"
    assert "NVIDIA Fake, compute capability 9.0, 132 SMs, 1024 GiB (sm_90)" in found("GPU 1").found
    assert found("driver").found.endswith("CUDA 13.0")
    assert found("compiler and driver").status == "ok"


@pytest.mark.parametrize("cc", [75, 61, 95])
def test_a_gpu_no_kernel_is_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cc: int) -> None:
    fake = helpers_fake_cuda.build(tmp_path)
    fake.cc = cc
    helpers_fake_cuda.install(monkeypatch, fake)
    check = found("GPU 0")
    assert check.status == "missing"
    assert f"{cc // 10}.{cc % 10}" in check.found
    assert "8.0" in check.needed


def test_a_driver_older_than_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = helpers_fake_cuda.build(tmp_path)
    fake.version = 12020
    helpers_fake_cuda.install(monkeypatch, fake)
    check = found("compiler and driver")
    assert check.status == "missing"
    assert "flashsmith[cuda12]" in check.remedy


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda name: None)
    assert found("CuPy").remedy == 'pip install "flashsmith[cuda13]"'
    monkeypatch.setattr(driver, "cuda_version", lambda: (12, 4))
    assert found("CuPy").remedy == 'pip install "flashsmith[cuda12]"'


def test_two_cupy_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda name: "14.0" if "cuda" in name else None)
    assert found("CuPy").status == "warning"
    assert found("CuPy").remedy == "pip uninstall cupy-cuda12x"


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise MissingComponentError("NVRTC is incomplete. Install it: pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(nvrtc, "compile_to_cubin", fail)
    assert found("NVRTC").status == "missing"
    assert "pip install nvidia-cuda-nvrtc" in found("NVRTC").remedy


def test_an_old_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "supported_archs", lambda: (75, 80, 86, 87, 89, 90))
    assert found("NVRTC").status == "warning"
    assert "sm_100" in found("NVRTC").found


@pytest.mark.parametrize("guess", [None, Compiler("12.4", "other", "/usr/local/cuda/lib64/libnvrtc.so.12")])
def test_another_nvrtc_first_on_the_path(monkeypatch: pytest.MonkeyPatch, guess: Compiler | None) -> None:
    monkeypatch.setattr(nvrtc_library, "installed_compiler", lambda: guess)
    assert found("NVRTC").status == "warning"


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert found("torch").status == "missing"
    assert found("torch").remedy == "pip install torch"


@pytest.mark.parametrize("place", ["cache", f"cache/{FOLDER}"])
def test_a_folder_others_may_write(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place).chmod(0o777)
    assert found("cache folder").status == "warning"
    assert "chmod go-w" in found("cache folder").remedy


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir()

    def refuse(**options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    check = found("config folder")
    assert "Read-only file system" in check.found
    assert "FLASHSMITH_CONFIG_DIR" in check.remedy


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    assert found("cache folder").status == "ok"
    assert list((tmp_path / "cache").iterdir()) == []


def test_cxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSMITH_CXX", "no-such-compiler")
    assert found("C++ compiler").status == "warning"
    assert "no-such-compiler" in found("C++ compiler").remedy
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("FLASHSMITH_CXX", str(broken))
    assert found("C++ compiler").status == "warning"
    assert "does not run" in found("C++ compiler").remedy
    words = tmp_path / "words"
    words.write_text('#!/bin/sh\necho "$1 of $#"\n')
    words.chmod(0o755)
    monkeypatch.setenv("FLASHSMITH_CXX", f"{words} first --last")
    assert found("C++ compiler").found == f"{words} first --last (first of 3)"


def test_wrong_and_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHSMITH_CACHEDIR", "/x")
    assert "FLASHSMITH_CACHEDIR" in found("variables").remedy
    monkeypatch.setenv("FLASHSMITH_DEVICE", "cuad")
    assert found("variables").status == "missing"


def test_a_check_that_breaks_does_not_hide_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(nvrtc, "supported_archs", explode)
    assert "boom" in found("NVRTC").found
    assert found("C++ compiler").status in ("ok", "warning")
