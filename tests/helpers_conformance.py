"""What stands in for a GPU in the tests of the conformance program; the functions run in worker processes too."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from flashsmith.generator.errors import LaunchError
from flashsmith.runtime.emulator import conformance
from flashsmith.runtime.emulator.conformance_kernels import Case
from flashsmith.runtime.emulator.conformance_worker import Outcome

_calls = 0


def fake_words(case: Case) -> Any:
    """The engine's bits, but approximate results rounded another way, as a GPU does."""
    words = conformance.run_on_engine(case)
    return words if case.rule.exact else np.where(words & 0x7F800000 == 0x7F800000, words, words ^ 1)


def fake_gpu(case: Case, blocks: int, limit_s: float) -> Outcome:
    """A GPU on which every case runs."""
    return Outcome("ran", fake_words(case))


def no_gpu() -> None:
    """A worker's preparation where there is nothing to prepare."""


def broken_gpu() -> None:
    """A worker's preparation on a machine whose GPU cannot be used."""
    raise LaunchError("the driver is gone")


def run(case: Case, cubin: bytes, blocks: int) -> Any:
    """Runs in a worker: `cubin` says what happens; otherwise how many cases this process ran, as every word."""
    global _calls
    _calls += 1
    if cubin == b"die":
        os._exit(42)
    if cubin == b"hang":
        time.sleep(60)
    if cubin == b"illegal" or (cubin == b"block 5" and blocks > 5):
        raise LaunchError("CUDA failed while running it: CUDA_ERROR_ILLEGAL_INSTRUCTION (715)")
    return np.full(case.blocks * case.items, _calls, dtype=np.uint32)
