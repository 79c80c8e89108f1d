"""`diagnose()`: each piece flashsmith needs, what was found, and the way out. Data only; the command renders it."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from ..generator.arch import ARCHS, arch_from_cc
from ..generator.errors import FlashsmithError
from . import driver, nvrtc, nvrtc_library, variables
from .cache import KernelCache
from .emulator.toolchain import find_toolchain

OK, WARNING, MISSING = "ok", "warning", "missing"
_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Check:
    """One piece: `status` is "ok", "warning" (it works with a limit) or "missing" (what needs it fails).

    `found` and `needed` are in words; `remedy` is empty where nothing needs doing.
    """

    name: str
    status: str
    found: str
    needed: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def diagnose() -> list[Check]:
    """Every check, in the order in which a kernel comes to life. Starts CUDA if there is a driver. Raises nothing."""
    checks = [
        _guarded("Python", _python),
        _guarded("torch", _torch),
        _guarded("CuPy", _cupy),
        _guarded("NVRTC", _nvrtc),
        _guarded("driver", _driver),
    ]
    count = driver.device_count()
    checks += [_guarded(f"GPU {i}", partial(_gpu, i)) for i in range(count)] or [_no_gpu()]
    checks += [
        _guarded("compiler and driver", _compiler_and_driver),
        _guarded("cache folder", partial(_folder, "cache folder", variables.CACHE_DIR, variables.cache_dir())),
        _guarded("config folder", partial(_folder, "config folder", variables.CONFIG_DIR, variables.config_dir())),
        _guarded("C++ compiler", _cxx),
        _guarded("variables", _variables),
    ]
    return checks


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check that fails in a way nobody foresaw is itself a finding."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - the doctor must see the other patients
        return Check(name, MISSING, f"{type(error).__name__}: {error}", "a check that ends", "Please report this.")


def _python() -> Check:
    version = platform.python_version()
    found = f"{platform.python_implementation()} {version} on {platform.system()} {platform.machine()}"
    needed = f"Python {_PYTHON[0]}.{_PYTHON[1]} or newer"
    if sys.version_info < _PYTHON:
        return Check("Python", MISSING, found, needed, "Install a newer Python.")
    return Check("Python", OK, found, needed)


def _torch() -> Check:
    needed = "torch 2.4 or newer, with CUDA to run kernels on a GPU"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", MISSING, str(error), needed, "pip install torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    found = f"{torch.__version__} ({build})"
    if torch.version.cuda is None:
        remedy = "To run on a GPU, install a CUDA build of torch. Generating, compiling and emulating need none."
        return Check("torch", WARNING, found, needed, remedy)
    return Check("torch", OK, found, needed)


def _cupy() -> Check:
    needed = "a CuPy wheel (cupy-cuda12x or cupy-cuda13x), to compile"
    wheels = [w for w in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if _version_of(w)]
    if not wheels:
        return Check("CuPy", MISSING, "none", needed, _extra_remedy())
    found = ", ".join(f"{w} {_version_of(w)}" for w in wheels)
    if len(wheels) > 1:
        return Check("CuPy", WARNING, found, "one CuPy wheel alone", f"pip uninstall {' '.join(wheels[1:])}")
    return Check("CuPy", OK, found, needed)


def _nvrtc() -> Check:
    needed = "libnvrtc and its builtins, for the architectures flashsmith knows"
    try:
        # The smallest kernel: it also shows whether the builtins library is there.
        nvrtc.compile_to_cubin('extern "C" __global__ void probe() {}', "sm_80", name="probe.cu")
        known = nvrtc.supported_archs()
        loaded = nvrtc.compiler()
    except FlashsmithError as error:
        return Check("NVRTC", MISSING, "no working NVRTC", needed, str(error))
    unknown = [a.name for a in ARCHS.values() if a.cc[0] * 10 + a.cc[1] not in known]
    found = f"{loaded} at {loaded.path or 'an unknown place'}"
    if unknown:
        remedy = "Install a newer NVRTC if you need one of these."
        return Check("NVRTC", WARNING, f"{found}; not for {', '.join(unknown)}", needed, remedy)
    guess = nvrtc_library.installed_compiler()
    if guess is None or guess.identity != loaded.identity:
        other = "not found by its file" if guess is None else f"but {guess.path} comes first on the path"
        remedy = "Keep one CUDA installation in this environment: until then each first call loads NVRTC (0.3 s)."
        return Check("NVRTC", WARNING, f"{found}, {other}", needed, remedy)
    return Check("NVRTC", OK, f"{found}; {len(ARCHS)} of {len(ARCHS)} architectures", needed)


def _driver() -> Check:
    needed = "an NVIDIA driver, to run kernels on a GPU"
    version = driver.cuda_version()
    if version is None:
        remedy = "To run on a GPU, install the NVIDIA driver. The CPU emulator needs none."
        return Check("driver", WARNING, f"{driver.LIBRARY_NAMES[0]} not found", needed, remedy)
    return Check("driver", OK, f"{driver.driver_version()}, CUDA {version[0]}.{version[1]}", needed)


def _gpu(index: int) -> Check:
    info = driver.device_info(index)
    found = f"{info.name}, compute capability {info.cc[0]}.{info.cc[1]}, {info.sm_count} SMs"
    found += f", {info.memory_bytes / 2**30:.0f} GiB"
    needed = "compute capability 8.0 or newer"
    try:
        arch = arch_from_cc(info.cc)
    except FlashsmithError as error:
        return Check(f"GPU {index}", MISSING, found, needed, str(error))
    return Check(f"GPU {index}", OK, f"{found} ({arch})", needed)


def _no_gpu() -> Check:
    remedy = "Without one, kernels run on the CPU emulator: right, but slow. Check `nvidia-smi` if there should be one."
    return Check("GPU", WARNING, "none", "a GPU of compute capability 8.0 or newer", remedy)


def _compiler_and_driver() -> Check:
    needed = "a compiler whose machine code this driver loads"
    supported = driver.cuda_version()
    installed = nvrtc_library.installed_compiler()
    if supported is None or installed is None:
        return Check("compiler and driver", OK, "nothing to compare: one of them is missing", needed)
    version = installed.version or "{}.{}".format(*nvrtc.nvrtc_version())
    found = f"NVRTC {version}, driver with CUDA {supported[0]}.{supported[1]}"
    problem = nvrtc.driver_mismatch(version, supported)
    if problem is not None:
        return Check("compiler and driver", MISSING, found, needed, problem)
    return Check("compiler and driver", OK, found, needed)


def _folder(name: str, variable: str, path: Path) -> Check:
    """Whether `path` can be made, trusted and written: by writing, since modes do not tell it all."""
    needed = f"a folder of your own ({variable} names it)"
    remedy = f"Set {variable} to a folder that you can write."
    if not os.path.lexists(path):
        parent = next(p for p in path.parents if p.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            return Check(name, WARNING, f"{path} cannot be made in {parent}", needed, remedy)
        return Check(name, OK, f"{path} (will be made when it is needed)", needed)
    # The config folder holds text alone, and the cache looks at both of its levels.
    problem = KernelCache(path).problem()
    if problem is not None:
        return Check(name, WARNING, str(path), needed, problem)
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor-") as probe:
            probe.write(bytes(4096))
            probe.flush()
    except OSError as error:
        return Check(name, WARNING, f"{path} cannot be written ({error.strerror})", needed, remedy)
    return Check(name, OK, str(path), needed)


def _cxx() -> Check:
    needed = "g++ or clang++, for the CPU emulator"
    try:
        return Check("C++ compiler", OK, str(find_toolchain()), needed)
    except FlashsmithError as error:
        return Check("C++ compiler", WARNING, "none that works", needed, f"{error} Kernels on a GPU need none.")


def _variables() -> Check:
    """The variables that are set, and those whose value nobody can read."""
    needed = "legal values in FLASHSMITH_* variables"
    known = {v.name for v in variables.VARIABLES}
    present = {v.name: v.value for v in variables.VARIABLES if v.value is not None}
    found = ", ".join(f"{name}={value}" for name, value in present.items()) or "none set"
    unknown = sorted(name for name in os.environ if name.startswith("FLASHSMITH_") and name not in known)
    for read in (variables.log_level, variables.device, variables.lock_seconds):
        try:
            read()
        except FlashsmithError as error:
            return Check("variables", MISSING, found, needed, str(error))
    if unknown:
        remedy = f"Unset {', '.join(unknown)}: flashsmith reads {', '.join(sorted(known))}."
        return Check("variables", WARNING, found, needed, remedy)
    return Check("variables", OK, found, needed)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _extra_remedy() -> str:
    supported = driver.cuda_version()
    major = 12 if supported is not None and supported[0] <= 12 else 13
    return f'pip install "flashsmith[cuda{major}]"'
