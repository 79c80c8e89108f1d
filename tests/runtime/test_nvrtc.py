"""NVRTC without a GPU: real compiles for every arch, and what each missing piece says."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers_compile import SPILLING_KERNEL, kernel_text

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import CompileError, MissingComponentError
from flashsmith.runtime import nvrtc, nvrtc_library
from flashsmith.runtime.gate import parse_report

needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None or nvrtc_library.installed_compiler() is None,
    reason="needs CuPy and an NVRTC wheel (flashsmith[cuda13] or [cuda12])",
)


@pytest.fixture(autouse=True)
def _fresh_binding() -> Any:
    for function in (nvrtc._binding, nvrtc.nvrtc_version, nvrtc.supported_archs, nvrtc.compiler, nvrtc._no_cache):
        function.cache_clear()
    yield
    for function in (nvrtc._binding, nvrtc.nvrtc_version, nvrtc.supported_archs, nvrtc.compiler, nvrtc._no_cache):
        function.cache_clear()


def fake_binding(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    class NVRTCError(RuntimeError):
        status = 6

    module = SimpleNamespace(
        NVRTCError=NVRTCError,
        getVersion=lambda: (12, 9),
        getSupportedArchs=lambda: (75, 80, 90),
        createProgram=lambda *a: 1,
        destroyProgram=lambda *a: None,
        getProgramLog=lambda *a: "",
    )
    for name, value in members.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", SimpleNamespace(nvrtc=module))  # type: ignore[arg-type]


# ---- Real compiles ----


@needs_nvrtc
@pytest.mark.parametrize("arch", list(ARCHS))
def test_every_arch_compiles_to_machine_code(arch: str) -> None:
    if ARCHS[arch].cc[0] * 10 + ARCHS[arch].cc[1] not in nvrtc.supported_archs():
        pytest.skip(f"this NVRTC does not know {arch}")
    found = nvrtc.compile_to_cubin(kernel_text(), arch)
    assert found.cubin[:4] == b"\x7fELF"
    assert b".target" not in found.cubin  # no PTX
    assert f"for '{arch}'" in found.log
    assert parse_report(found.log).registers > 0


@needs_nvrtc
def test_the_same_text_gives_the_same_bytes() -> None:
    one, two = (nvrtc.compile_to_cubin(kernel_text(), "sm_90").cubin for _ in range(2))
    assert one == two


@needs_nvrtc
def test_the_cubin_is_whole() -> None:
    cubin = nvrtc.compile_to_cubin(kernel_text(), "sm_90").cubin
    (sections_offset,) = struct.unpack_from("<Q", cubin, 0x28)
    section_size, section_count = struct.unpack_from("<HH", cubin, 0x3A)
    program_offset, program_size, program_count = (
        *struct.unpack_from("<Q", cubin, 0x20), *struct.unpack_from("<HH", cubin, 0x36),
    )  # fmt: skip
    ends = sections_offset + section_size * section_count, program_offset + program_size * program_count
    assert len(cubin) >= max(ends) and len(cubin) % 8 == 0


@needs_nvrtc
def test_nvrtcs_own_cache_is_kept_out() -> None:
    # Its hits come without ptxas's report, on which the build gate stands.
    expected = () if nvrtc.nvrtc_version() < (12, 8) else ("--no-cache",)
    assert nvrtc._no_cache() == expected


@needs_nvrtc
def test_a_real_spill_is_reported() -> None:
    found = parse_report(nvrtc.compile_to_cubin(SPILLING_KERNEL, "sm_90").log)
    assert found.spill_store_bytes > 0
    assert found.stack_bytes > 0


@needs_nvrtc
def test_a_text_that_does_not_compile_shows_its_first_errors() -> None:
    with pytest.raises(CompileError, match=r"mine\.cu\(1\): error: .*undefined") as caught:
        nvrtc.compile_to_cubin('extern "C" __global__ void k() { nothing = 1; }', "sm_90", name="mine.cu")
    assert "sm_90" in str(caught.value)
    assert "errors detected" in caught.value.log or "error detected" in caught.value.log


@needs_nvrtc
def test_headers_are_not_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "gone"))
    assert nvrtc.compile_to_cubin(kernel_text(), "sm_80").cubin


@needs_nvrtc
def test_the_guess_from_files_is_the_library_that_gets_loaded() -> None:
    guess = nvrtc_library.installed_compiler()
    loaded = nvrtc.compiler()
    assert guess is not None
    assert (guess.identity, guess.version) == (loaded.identity, loaded.version)
    assert loaded.version == "{}.{}".format(*nvrtc.nvrtc_version())


@needs_nvrtc
def test_the_guess_loads_nothing() -> None:
    program = textwrap.dedent(
        """
        import sys
        from flashsmith.runtime import nvrtc, nvrtc_library
        assert nvrtc_library.installed_compiler() is not None
        heavy = [m for m in ("cupy", "cupy_backends", "cuda", "numpy", "torch", "jinja2") if m in sys.modules]
        assert not heavy, heavy
        assert nvrtc_library.loaded_library(13) is None
        assert nvrtc_library.loaded_library(12) is None
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- Missing pieces ----


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(MissingComponentError, match=r'needs CuPy.*"flashsmith\[cuda13\]"'):
        nvrtc.compile_to_cubin(kernel_text(), "sm_90")


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, OSError])
def test_without_libnvrtc(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def version() -> None:
        raise kind('Failure finding "libnvrtc.so": no such file\nand more')

    fake_binding(monkeypatch, getVersion=version)
    monkeypatch.setattr(nvrtc, "cupy_cuda_major", lambda: 12)
    with pytest.raises(MissingComponentError, match="pip install nvidia-cuda-nvrtc-cu12") as caught:
        nvrtc.compile_to_cubin(kernel_text(), "sm_90")
    assert 'Failure finding "libnvrtc.so": no such file' in str(caught.value)
    assert "and more" not in str(caught.value)


@needs_nvrtc
def test_without_the_builtins_library(tmp_path: Path) -> None:
    """libnvrtc alone in a folder, as a broken installation has it; loaded first, so that CuPy takes it."""
    found = nvrtc_library.installed_compiler()
    assert found is not None
    alone = tmp_path / Path(found.path).name
    alone.symlink_to(found.path)
    program = textwrap.dedent(
        """
        import ctypes, sys
        ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
        from flashsmith.generator.errors import MissingComponentError
        from flashsmith.runtime import nvrtc
        try:
            nvrtc.compile_to_cubin('extern "C" __global__ void k() {}', "sm_90")
        except MissingComponentError as error:
            print(error)
        """
    )
    done = subprocess.run([sys.executable, "-c", program, str(alone)], capture_output=True, text=True, check=True)
    assert "libnvrtc-builtins" in done.stdout
    assert "--force-reinstall nvidia-cuda-nvrtc" in done.stdout


def test_an_nvrtc_too_old_for_the_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_binding(monkeypatch)
    with pytest.raises(MissingComponentError, match=r"NVRTC 12\.9 does not compile for sm_120; it knows sm_75, sm_80"):
        nvrtc.compile_to_cubin(kernel_text(), "sm_120")


@pytest.mark.parametrize("target", ["compute_90", "sm_90 --help", "", "90"])
def test_a_target_of_another_form(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    fake_binding(monkeypatch)
    with pytest.raises(CompileError, match="must look like sm_90"):
        nvrtc.compile_to_cubin(kernel_text(), target)


@pytest.mark.parametrize(("status", "says"), [(1, "memory"), (5, "option"), (6, "report it"), (11, "another version")])
def test_other_failures_have_a_remedy(monkeypatch: pytest.MonkeyPatch, status: int, says: str) -> None:
    destroyed = []
    fake_binding(monkeypatch, destroyProgram=destroyed.append)

    def fail(*args: Any) -> None:
        error = sys.modules["cupy_backends.cuda.libs"].nvrtc.NVRTCError("NVRTC_ERROR")
        error.status = status
        raise error

    sys.modules["cupy_backends.cuda.libs"].nvrtc.compileProgram = fail
    with pytest.raises(CompileError, match=says):
        nvrtc.compile_to_cubin(kernel_text(), "sm_90")
    assert destroyed == [1, 1]  # the probe of --no-cache, and the program that failed


# ---- The driver's age ----


@pytest.mark.parametrize(
    ("version", "driver", "fits"),
    [
        ("12.9", (12, 2), True),  # minor version compatibility: a cubin, not PTX
        ("12.4", (13, 0), True),
        ("13.5", (13, 0), True),
        ("13.0", (12, 9), False),
        ("13.0", None, True),
        ("", (12, 2), True),
    ],
)
def test_driver_mismatch(version: str, driver: tuple[int, int] | None, fits: bool) -> None:
    found = nvrtc.driver_mismatch(version, driver)
    assert (found is None) == fits
    if found is not None:
        assert "CUDA 12.9" in found
        assert '"flashsmith[cuda12]"' in found


# ---- Telling a library from its file ----


def elf_with_note(note: bytes) -> bytes:
    """A minimal 64-bit ELF file whose one program header is a note segment."""
    header = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<QQIHHH", 64, 0, 0, 64, 56, 1) + b"\0" * 6
    program = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(note), len(note), 4)
    return header + program + note


def note(kind: int, name: bytes, data: bytes) -> bytes:
    def padded(b: bytes) -> bytes:
        return b + b"\0" * (-len(b) % 4)

    return struct.pack("<III", len(name), len(data), kind) + padded(name) + padded(data)


def test_build_id_is_read_from_the_notes(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(elf_with_note(note(1, b"GNU\0", b"abcdef") + note(3, b"GNU\0", bytes.fromhex("feedbeef"))))
    assert nvrtc_library.build_id(str(file)) == "feedbeef"


@pytest.mark.parametrize("head", [b"", b"MZ", b"\x7fELF\x02\x01", elf_with_note(b""), elf_with_note(b"\xff" * 12)])
def test_without_a_build_id_the_content_counts(tmp_path: Path, head: bytes) -> None:
    one, two, three = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    one.write_bytes(head + bytes(200_000) + b"a")
    two.write_bytes(head + bytes(200_000) + b"b")
    three.write_bytes(head + bytes(200_000) + b"a")
    assert nvrtc_library.build_id(str(one)) != nvrtc_library.build_id(str(two))
    assert nvrtc_library.build_id(str(one)) == nvrtc_library.build_id(str(three))


def test_a_replaced_library_is_another_compiler(tmp_path: Path) -> None:
    path = tmp_path / "libnvrtc.so.13"
    path.write_bytes(b"first")
    (tmp_path / "libnvrtc-builtins.so.13.0").write_bytes(b"")
    before = nvrtc_library.compiler_at(str(path))
    path.unlink()
    path.write_bytes(b"second")
    after = nvrtc_library.compiler_at(str(path))
    assert before is not None
    assert after is not None
    assert before.version == after.version == "13.0"
    assert before.identity != after.identity


@pytest.mark.parametrize(
    ("layout", "major"),
    [("nvidia/cu13/lib", 13), ("nvidia/cuda_nvrtc/lib", 12)],
)
def test_the_wheels_are_found_on_sys_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, major: int
) -> None:
    folder = tmp_path / "site" / layout
    folder.mkdir(parents=True)
    (folder / f"libnvrtc.so.{major}").write_bytes(b"x")
    (folder / f"libnvrtc-builtins.so.{major}.4.127").write_bytes(b"x")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty"), str(tmp_path / "site")])
    monkeypatch.setattr(nvrtc_library, "cupy_cuda_major", lambda: major)
    found = nvrtc_library.installed_compiler()
    assert found is not None
    assert found.path.startswith(str(tmp_path))
    assert found.version == f"{major}.4"


def test_a_toolkit_is_found_through_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lib64"
    folder.mkdir()
    (folder / "libnvrtc.so.99.1.2").write_bytes(b"x")
    (folder / "libnvrtc.so.99").symlink_to("libnvrtc.so.99.1.2")
    monkeypatch.setattr(nvrtc_library, "cupy_cuda_major", lambda: 99)
    assert nvrtc_library.installed_compiler() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = nvrtc_library.installed_compiler()
    assert found is not None
    assert found.version == "99.1"
