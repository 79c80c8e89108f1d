"""The C++ compiler that builds the emulator: which one, and what its binaries are called by."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache

from ...generator.errors import MissingComponentError
from .. import variables

#: Tried in this order where FLASHSMITH_CXX is unset.
COMPILERS = ("g++", "clang++", "c++")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C++ compiler: `command` as words, and `version`, its first line of `--version`."""

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version

    def __str__(self) -> str:
        return f"{' '.join(self.command)} ({self.version})"


def find_toolchain() -> Toolchain:
    """The compiler named by FLASHSMITH_CXX, or the first of g++, clang++ and c++ on PATH.

    Raises MissingComponentError where there is none, or where the one that was asked for does not run.
    """
    asked = variables.cxx()
    if asked is not None:
        try:
            words = tuple(shlex.split(asked))
        except ValueError as error:
            raise MissingComponentError(
                f"{variables.CXX} must be a command line, but {asked!r} is none: {error}. Correct its quotes."
            ) from None
        path = shutil.which(words[0]) if words else None
        if path is None:
            raise MissingComponentError(
                f"{variables.CXX} must name a C++ compiler, but {asked!r} is not found."
                f" Correct it, or unset it to use {', '.join(COMPILERS)} from PATH."
            )
        return _toolchain((path, *words[1:]))
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return _toolchain((path,))
    raise MissingComponentError(
        "The CPU emulator needs a C++17 compiler, but none of"
        f" {', '.join(COMPILERS)} is on PATH. Install g++ (Debian, Ubuntu: apt install g++) or clang++, or name one in"
        f" {variables.CXX}."
    )


@lru_cache(maxsize=8)
def _toolchain(command: tuple[str, ...]) -> Toolchain:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingComponentError(
            f"The C++ compiler {' '.join(command)} does not run: {error}. Name another one in {variables.CXX}."
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise MissingComponentError(
            f"The C++ compiler {' '.join(command)} does not run: `--version` ended with {done.returncode}."
            f" Name another one in {variables.CXX}."
        )
    return Toolchain(command, lines[0])
