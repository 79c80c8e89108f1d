"""Every environment variable flashsmith reads: its name, its meaning, and the function that reads it.

Nothing else in the package looks at `FLASHSMITH_*`. Each function reads the environment when it is called, so that a
test or a notebook may change a variable at any time. An empty value counts as unset.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ..generator.errors import UsageError, unknown_name_message

CACHE_DIR = "FLASHSMITH_CACHE_DIR"
CONFIG_DIR = "FLASHSMITH_CONFIG_DIR"
CXX = "FLASHSMITH_CXX"
LOG_LEVEL = "FLASHSMITH_LOG_LEVEL"
DEVICE = "FLASHSMITH_DEVICE"
LOCK_SECONDS = "FLASHSMITH_LOCK_SECONDS"

DEVICES = ("cuda", "emulator")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: `default` in words, `meaning` in one sentence."""

    name: str
    default: str
    meaning: str

    @property
    def value(self) -> str | None:
        """The variable's text in this process, or None where it is unset or empty."""
        return os.environ.get(self.name) or None


VARIABLES: tuple[Variable, ...] = (
    Variable(
        CACHE_DIR,
        "the user's cache folder, e.g. ~/.cache/flashsmith",
        "Where compiled kernels and emulator programs are kept.",
    ),
    Variable(
        CONFIG_DIR, "the user's config folder, e.g. ~/.config/flashsmith", "Where tuned configs of this user are kept."
    ),
    Variable(CXX, "g++, clang++ or c++ from PATH", "The C++ compiler that builds the CPU emulator."),
    Variable(LOG_LEVEL, "warning", f"How much the command line logs: {', '.join(LOG_LEVELS)}."),
    Variable(DEVICE, "cuda where there is a GPU, else emulator", f"Device of the commands: {' or '.join(DEVICES)}."),
    Variable(LOCK_SECONDS, "120", "Seconds to wait for another process that compiles the same kernel."),
)


def cache_dir() -> Path:
    """The absolute folder for compiled kernels and emulator objects. It may not exist, and is not made here."""
    return _folder(CACHE_DIR, "cache")


def config_dir() -> Path:
    """The absolute folder for this user's tuned configs. It may not exist, and is not made here."""
    return _folder(CONFIG_DIR, "config")


def cxx() -> str | None:
    """The C++ compiler the user asked for, or None to look for one."""
    return os.environ.get(CXX) or None


def log_level() -> int:
    """The `logging` level of the command line. Raises UsageError for an unknown name."""
    text = os.environ.get(LOG_LEVEL, "").strip().lower() or "warning"
    if text not in LOG_LEVELS:
        raise UsageError(unknown_name_message(LOG_LEVEL, text, LOG_LEVELS))
    return int(getattr(logging, text.upper()))


def device() -> str | None:
    """The device the user asked for, "cuda" or "emulator"; None where unset. Raises UsageError for another name."""
    text = os.environ.get(DEVICE, "").strip().lower()
    if text and text not in DEVICES:
        raise UsageError(unknown_name_message(DEVICE, text, DEVICES))
    return text or None


def lock_seconds() -> float:
    """Seconds to wait for another process's compile. Raises UsageError unless it is a number >= 0."""
    text = os.environ.get(LOCK_SECONDS, "").strip() or "120"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:  # NaN fails too
        raise UsageError(
            f"{LOCK_SECONDS} must be a number of seconds from 0 to 1000000, but got {text!r}. Unset it for 120."
        )
    return seconds


def _folder(variable: str, kind: str) -> Path:
    text = os.environ.get(variable)
    if text:
        return Path(os.path.abspath(os.path.expanduser(text)))
    path = _user_folder(kind)
    if path.is_absolute():
        return path
    # No HOME and no entry in the password database: a per-user name in the folder for temporary files. Whoever
    # made that folder first, the cache checks its owner before it trusts it.
    import tempfile

    uid = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()).absolute() / f"flashsmith-{uid}" / kind


def _user_folder(kind: str) -> Path:
    """What platformdirs says; on Linux by its rule (XDG) written out, which spares a first call 2 ms of import."""
    if sys.platform == "linux":
        base = os.environ.get(f"XDG_{kind.upper()}_HOME", "").strip()
        return Path(base if os.path.isabs(base) else os.path.expanduser(f"~/.{kind}")) / "flashsmith"
    import platformdirs

    find = platformdirs.user_cache_path if kind == "cache" else platformdirs.user_config_path
    return find("flashsmith", appauthor=False)
