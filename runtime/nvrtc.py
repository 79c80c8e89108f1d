"""Kernel text to cubin, with NVRTC through CuPy's binding. Needs no GPU and no driver.

The text includes no header, so neither a CUDA toolkit nor its headers are looked for. The result is machine code for
one architecture and never PTX: a driver older than the compiler could not read that.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..generator.errors import CompileError, MissingComponentError
from .nvrtc_library import Compiler, compiler_at, cupy_cuda_major, installed_compiler, loaded_library

#: Options of every compile, beside the architecture. `-v` makes ptxas report registers, spills and stack.
OPTIONS: tuple[str, ...] = ("--std=c++17", "--ptxas-options=-v")

# nvrtcResult values (nvrtc.h).
_OUT_OF_MEMORY = 1
_INVALID_OPTION = 5
_COMPILATION = 6
_BUILTINS_MISSING = 7

_INSTALL = (
    'Install it with pip: "flashsmith[cuda13]" for a driver with CUDA 13 (580 or newer), "flashsmith[cuda12]" for one'
    " with CUDA 12. To compile only, without a GPU, either will do."
)
_TARGET = re.compile(r"sm_(\d+)[af]?$")


@dataclass(frozen=True, slots=True)
class Compilation:
    """What NVRTC made of one text: the machine code, the whole log, and how long it took."""

    cubin: bytes
    log: str
    seconds: float


def compile_to_cubin(text: str, target: str, *, name: str = "kernel.cu") -> Compilation:
    """The cubin of `text` for `target` ("sm_90", "sm_90a"). `name` is the file's name in messages.

    Raises CompileError with the log where the text does not compile, MissingComponentError where CuPy, NVRTC or its
    builtins are missing, or NVRTC is too old for `target`.
    """
    binding = _binding()
    _require_target(target)
    start = time.perf_counter()
    program = binding.createProgram(text, name, [], [])
    try:
        try:
            binding.compileProgram(program, [f"--gpu-architecture={target}", *OPTIONS, *_no_cache()])
        except binding.NVRTCError as error:
            raise _failure(error, binding.getProgramLog(program), name, target) from None
        return Compilation(
            _whole(binding.getCUBIN(program)), binding.getProgramLog(program), time.perf_counter() - start
        )
    finally:
        binding.destroyProgram(program)


@cache
def nvrtc_version() -> tuple[int, int]:
    """The version of the NVRTC that CuPy loads, e.g. (13, 0). Raises MissingComponentError."""
    major, minor = _binding().getVersion()
    return int(major), int(minor)


@cache
def supported_archs() -> tuple[int, ...]:
    """The architectures the loaded NVRTC compiles for: 80, 90, ... Raises MissingComponentError."""
    return tuple(sorted(int(arch) for arch in _binding().getSupportedArchs()))


@cache
def compiler() -> Compiler:
    """The loaded NVRTC. Loads it; `nvrtc_library.installed_compiler()` does not. Raises MissingComponentError."""
    major, minor = nvrtc_version()
    version = f"{major}.{minor}"
    path = loaded_library(major)
    found = compiler_at(path) if path else installed_compiler()
    if found is None:
        return Compiler(version=version, build=f"version {version}", path="")
    return Compiler(version=version, build=found.build, path=found.path)


def driver_mismatch(nvrtc: str, driver: tuple[int, int] | None) -> str | None:
    """Why a cubin of NVRTC `nvrtc` ("13.0") does not load on a driver of CUDA version `driver`; None if it does.

    Within one CUDA major version every cubin loads (CUDA Compatibility, "minor version compatibility"), and a newer
    driver loads older ones; a newer major version's cubins are refused. None too where either version is unknown.
    """
    if driver is None or not nvrtc:
        return None
    major = int(nvrtc.split(".")[0])
    if major <= driver[0]:
        return None
    return (
        f"A kernel compiled by NVRTC {nvrtc} needs a driver with CUDA {major}, but this driver has CUDA"
        f' {driver[0]}.{driver[1]}. Install "flashsmith[cuda{driver[0]}]" in place of "flashsmith[cuda{major}]",'
        " or update the driver."
    )


@cache
def _no_cache() -> tuple[str, ...]:
    """The option that keeps NVRTC from its own cache, whose hits come without ptxas's report; () where it has none."""
    binding = _binding()
    program = binding.createProgram("", "probe.cu", [], [])
    try:
        binding.compileProgram(program, ["--no-cache"])
    except binding.NVRTCError:  # NVRTC 12.4 knows no such option, and keeps no cache
        return ()
    finally:
        binding.destroyProgram(program)
    return ("--no-cache",)


def _whole(cubin: bytes) -> bytes:
    """`cubin` in whole 8-byte words, as NVRTC made it: CuPy's getCUBIN drops the last byte, which is 0."""
    return cubin + bytes(-len(cubin) % 8)


def _require_target(target: str) -> None:
    match = _TARGET.match(target)
    if match is None:
        raise CompileError(f"An NVRTC target must look like sm_90 or sm_90a, but got {target!r}. Name one of those.")
    known = supported_archs()
    if int(match[1]) not in known:
        raise MissingComponentError(
            f"NVRTC {'.'.join(map(str, nvrtc_version()))} does not compile for {target}; it knows"
            f" {', '.join(f'sm_{a}' for a in known)}. Install a newer NVRTC:"
            f" pip install --upgrade {_nvrtc_package()}"
        )


@cache
def _binding() -> Any:
    """CuPy's NVRTC module, with its library loaded."""
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise MissingComponentError(
            f"Compiling a kernel needs CuPy, which could not be imported ({error}). {_INSTALL}"
        ) from error
    try:
        nvrtc.getVersion()
    except (RuntimeError, ImportError, OSError, AttributeError) as error:
        # CuPy loads the library at the first call, and imports the rest of itself to find it.
        raise MissingComponentError(
            f"Compiling a kernel needs NVRTC, but CuPy could not load libnvrtc ({_first_line(error)})."
            f" Install it with: pip install {_nvrtc_package()}"
        ) from error
    return nvrtc


def _nvrtc_package() -> str:
    """The wheel that holds the libnvrtc which the installed CuPy loads."""
    return "nvidia-cuda-nvrtc-cu12" if cupy_cuda_major() == 12 else "nvidia-cuda-nvrtc"


def _failure(error: Any, log: str, name: str, target: str) -> CompileError | MissingComponentError:
    if error.status == _BUILTINS_MISSING:
        return MissingComponentError(
            f"NVRTC is incomplete: {_first_line(log)} It comes in the same wheel as libnvrtc. Install that again:"
            f" pip install --force-reinstall {_nvrtc_package()}"
        )
    lines = [line for line in log.splitlines() if "error" in line] or log.strip().splitlines() or [str(error)]
    shown = "\n".join(lines[:3])
    remedies = {
        _COMPILATION: "The text is at fault: for a generated kernel, please report it with its spec and config.",
        _INVALID_OPTION: "Install another NVRTC: this one does not know an option flashsmith passes.",
        _OUT_OF_MEMORY: "The host ran out of memory: compile fewer kernels at once.",
    }
    remedy = remedies.get(error.status, "Try another config, or another version of NVRTC.")
    return CompileError(f"NVRTC could not compile {name} for {target}:\n{shown}\n{remedy}", log=log)


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
