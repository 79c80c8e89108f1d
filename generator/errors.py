"""Every exception flashsmith raises on purpose, in one tree.

A message has three parts: the rule, the values that broke it, and the remedy. `UsageError` and its children are the
caller's to mend (exit code 2 of the command line); every other `FlashsmithError` is exit code 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class FlashsmithError(Exception):
    """Root of the tree. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UsageError(FlashsmithError, ValueError):
    """An argument breaks a rule that the caller can check before calling."""

    exit_code = 2


class SpecError(UsageError):
    """An `AttentionSpec`, or a call that asks for one, is not a problem flashsmith can state."""


class ConfigError(UsageError):
    """A `KernelConfig` has an illegal value, or does not fit the spec or the architecture."""


class ArchError(UsageError):
    """The GPU architecture is unknown, or too old for every kernel family."""


class TraceError(UsageError):
    """A mask or score function cannot be turned into an expression graph."""


class TensorError(UsageError):
    """A tensor's dtype, device, shape or stride does not fit the call."""


class TensorTypeError(TensorError, TypeError):
    """What should be a tensor is none, or an array of a library whose arrays are not taken."""


class UnsupportedError(UsageError):
    """A legal request that this version does not implement; names what was found, what is needed and the way out."""


class RenderError(FlashsmithError):
    """A template could not be rendered to a clean kernel source: a fault of flashsmith."""


class MissingComponentError(FlashsmithError):
    """A library or tool that this step needs is not installed; the message names the remedy."""


class CompileError(FlashsmithError):
    """NVRTC or ptxas refused a kernel source. `log` holds the compiler's own words."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class BuildGateError(CompileError):
    """The kernel compiled, but its resource report breaks the build gate (spills, stack, C75xx)."""


class LaunchError(FlashsmithError):
    """The CUDA driver refused to load or launch a kernel. `code` is the CUresult."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class CaptureError(LaunchError):
    """The call would have to compile or load while a CUDA graph is being captured."""


class EmulatorError(FlashsmithError):
    """The emulator could not be built, or the kernel broke a rule while it ran. `report` holds the findings."""

    def __init__(self, message: str, *, report: str = "") -> None:
        super().__init__(message)
        self.report = report


class VerifyError(FlashsmithError):
    """A kernel's output differs from the reference by more than the tolerance rule allows."""


class StoreError(FlashsmithError):
    """A tuned-config file cannot be read or written, or breaks the schema."""


class TuneError(FlashsmithError):
    """The search ended without a right, timed (or predicted) candidate."""


def unknown_name_message(kind: str, name: str, known: Sequence[str]) -> str:
    """A message for an unknown name: "Unknown arch 'sm_91'. Did you mean 'sm_90'? Known: ..."."""
    close = get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known)}."
