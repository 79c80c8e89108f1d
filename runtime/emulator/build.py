"""Builds the emulator: the engine once a flavour, and one program a kernel and flavour; both cached on disk.

The flavours:

- `plain`: the engine's own checks (bounds, poison, copies in flight, divergence, deadlock).
- `race`: also a race detector. The kernel is compiled with -fsanitize=thread, whose callbacks the engine defines.
- `asan`: also AddressSanitizer and UndefinedBehaviorSanitizer on the kernel's own arithmetic and arrays.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...generator.digest import digest_of
from ...generator.errors import EmulatorError, unknown_name_message
from .. import variables
from . import object_cache
from .host_text import HostText
from .toolchain import Toolchain, find_toolchain

HERE = Path(__file__).resolve().parent
PROGRAM, ENGINE = "kernel", "engine.o"
FLAVOURS = ("plain", "race", "asan")

#: Higher levels make kernels of unrolled loops slower to compile and hardly faster to run.
_KERNEL_FLAGS = ("-std=c++17", "-O1", "-g1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIE")
_ENGINE_FLAGS = ("-std=c++17", "-O2", "-fno-strict-aliasing", "-ffp-contract=off", "-fPIE")
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize=vptr")
_COMPILE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Flavour:
    """Compiler flags beside the common ones: for the engine, for the kernel, and for the link of both."""

    engine: tuple[str, ...]
    kernel: tuple[str, ...]
    link: tuple[str, ...]


_FLAVOURS = {
    "plain": Flavour(("-DEMULATOR_RACE=0", "-DEMULATOR_ASAN=0"), (), ()),
    # The link takes no -fsanitize=thread: the engine is the run-time library.
    "race": Flavour(("-DEMULATOR_RACE=1", "-DEMULATOR_ASAN=0"), ("-fsanitize=thread",), ()),
    "asan": Flavour(("-DEMULATOR_RACE=0", "-DEMULATOR_ASAN=1"), (*_SANITIZE, "-fno-omit-frame-pointer"), _SANITIZE),
}


def check_flavour(flavour: str) -> None:
    """Raises EmulatorError for a flavour that is none."""
    if flavour not in FLAVOURS:
        raise EmulatorError(unknown_name_message("flavour", flavour, FLAVOURS))


def kernel_program(text: HostText, flavour: str) -> Path:
    """The executable that runs `text` on the engine. Raises MissingComponentError and EmulatorError."""
    check_flavour(flavour)
    toolchain = find_toolchain()
    flags = _FLAVOURS[flavour]
    options = (*_KERNEL_FLAGS, *flags.kernel, *flags.link, *_ENGINE_FLAGS, *flags.engine)
    key = digest_of([*_identity(toolchain), text.text, *options])

    def build(folder: Path) -> None:
        engine = engine_object(flavour)
        (folder / "kernel.cpp").write_text(text.text)
        compile_flags = [*_KERNEL_FLAGS, *flags.kernel, f"-I{HERE}"]
        link = ["-pie", *flags.link, "kernel.o", str(engine)]
        _run(toolchain, [*compile_flags, "-c", "kernel.cpp"], folder, "kernel", output="kernel.o")
        _run(toolchain, link, folder, "program", output=PROGRAM)
        (folder / "kernel.o").unlink()

    return object_cache.cached(f"kernel-{flavour}", key, PROGRAM, build)


def engine_object(flavour: str) -> Path:
    """The engine, compiled for `flavour`. Raises MissingComponentError and EmulatorError."""
    check_flavour(flavour)
    toolchain = find_toolchain()
    flags = (*_ENGINE_FLAGS, *_FLAVOURS[flavour].engine)
    key = digest_of([*_identity(toolchain), *flags])

    def build(folder: Path) -> None:
        # One translation unit: the switch between fibers and the checks inline into the primitives.
        files = [name for name in _sources() if name.endswith(".cpp")]
        (folder / "engine.cpp").write_text("".join(f'#include "{name}"\n' for name in files))
        _run(toolchain, [*flags, f"-I{HERE}", "-c", "engine.cpp"], folder, "engine", output=ENGINE)

    return object_cache.cached(f"engine-{flavour}", key, ENGINE, build)


@cache
def _sources() -> dict[str, str]:
    """The engine's files and the host headers, by name."""
    return {path.name: path.read_text() for path in sorted(HERE.iterdir()) if path.suffix in (".cpp", ".h")}


@cache
def engine_digest() -> str:
    """Hex SHA-256 of the engine's sources."""
    return digest_of(_sources())


def _identity(toolchain: Toolchain) -> tuple[str, ...]:
    return (*toolchain.command, toolchain.version, engine_digest())


def _run(toolchain: Toolchain, arguments: list[str], folder: Path, what: str, *, output: str) -> None:
    """One call of the compiler in `folder` that makes the file `output`. Raises EmulatorError where it does not."""
    try:
        done = subprocess.run(
            [*toolchain.command, *arguments, "-o", output],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EmulatorError(
            f"The emulator's {what} must compile within {_COMPILE_SECONDS} s, but {toolchain} took longer."
        ) from None
    except OSError as error:
        raise EmulatorError(
            f"The emulator's {what} does not compile: {toolchain} does not run: {error}."
            f" Name another compiler in {variables.CXX}."
        ) from None
    if done.returncode == 0 and not (folder / output).is_file():
        raise EmulatorError(
            f"The emulator's {what} does not compile: {toolchain} ended without an error and wrote no {output}."
            f" Name a C++17 compiler in {variables.CXX}, or unset it to use the one on PATH.",
            report=done.stderr,
        )
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
        raise EmulatorError(
            f"The emulator's {what} does not compile with {toolchain}: {first}"
            " Outside its primitives a kernel is plain C++17 over constants and primitives.",
            report=done.stderr,
        )
