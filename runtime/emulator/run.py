"""`emulate(source, arguments, ...)`: runs a generated kernel on the CPU, in a process of its own, and reports."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from ...generator.errors import EmulatorError, unknown_name_message
from ...generator.source import KernelSource
from .. import variables
from . import build, object_cache
from .host_text import HostText, host_text
from .job import SCHEDULES, HostBuffer, Job, pointer_offsets
from .report import Finding, Outcome, Report, read_report

__all__ = ["SCHEDULES", "Finding", "HostBuffer", "Report", "emulate", "emulate_text"]

#: Seconds after which a run that has not ended is stopped and reported.
TIME_LIMIT = 120

# No leak search at exit, and no copy of each frame on the heap: fibers are abandoned after a finding.
_SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:exitcode=99:color=never",
    "UBSAN_OPTIONS": "print_stacktrace=0:halt_on_error=0:color=never",
}


def emulate(
    source: KernelSource,
    arguments: bytes,
    *,
    grid: int,
    threads: int,
    smem_bytes: int,
    buffers: tuple[HostBuffer, ...],
    flavour: str = "plain",
    schedule: str = "round_robin",
    seed: int = 0,
    blocks: range | None = None,
    time_limit: int = TIME_LIMIT,
) -> Report:
    """The report of running `grid` blocks of `source` one after another (or those in `blocks`).

    - `arguments`: the packed `struct Arguments`; its pointers point into `buffers`, memory of this process, which
      receives the results. An access outside of them is a finding.
    - `flavour`: "plain", "race" or "asan" (see build.py). `schedule`: the order in which threads run.

    Raises MissingComponentError without a C++ compiler, and EmulatorError where the kernel does not compile or a
    pointer lies in no buffer. What the kernel does wrong is a finding, no exception: see `Report.require_clean`.
    """
    return emulate_text(
        host_text(source),
        arguments,
        pointers=pointer_offsets(source.arguments),
        grid=grid,
        threads=threads,
        smem_bytes=smem_bytes,
        buffers=buffers,
        flavour=flavour,
        schedule=schedule,
        seed=seed,
        blocks=blocks,
        time_limit=time_limit,
    )


def emulate_text(
    text: HostText,
    arguments: bytes,
    *,
    pointers: tuple[int, ...],
    grid: int,
    threads: int,
    smem_bytes: int,
    buffers: tuple[HostBuffer, ...],
    flavour: str = "plain",
    schedule: str = "round_robin",
    seed: int = 0,
    blocks: range | None = None,
    time_limit: int = TIME_LIMIT,
) -> Report:
    """As `emulate`, for a text that belongs to no kernel family; `pointers` are byte offsets in `arguments`."""
    build.check_flavour(flavour)
    if schedule not in SCHEDULES:
        raise EmulatorError(unknown_name_message("schedule", schedule, SCHEDULES))
    if threads % 32 or not 0 < threads <= 1024:
        raise EmulatorError(
            f"A block must have whole warps and at most 1024 threads, but got {threads}. Use a multiple of 32."
        )
    chosen = range(grid) if blocks is None else blocks
    if len(chosen) and not (chosen.step > 0 and chosen[0] >= 0 and chosen[-1] < grid):
        raise EmulatorError(f"The blocks to run must be ascending and inside the grid of {grid}, but got {chosen}.")
    job = Job(arguments, pointers, buffers, threads, smem_bytes, chosen, schedule, seed, grid)
    encoded = job.encode()
    program = build.kernel_program(text, flavour)
    with tempfile.TemporaryDirectory(prefix="flashsmith-emulator-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(encoded)
        try:
            outcome = _run(program, folder, time_limit)
        except OSError:  # the cached program is none for this machine
            object_cache.discard(program)
            program = build.kernel_program(text, flavour)
            try:
                outcome = _run(program, folder, time_limit)
            except OSError as error:
                object_cache.discard(program)
                raise EmulatorError(
                    f"The emulator's program does not run: {error}. Name a C++17 compiler that builds programs for this"
                    f" machine in {variables.CXX}, or unset it."
                ) from None
        report = read_report(folder / "report", outcome, text, flavour=flavour, schedule=schedule)
        results = folder / "result"
        if results.exists():
            job.store_results(results.read_bytes())
    return report


def _run(program: Path, folder: Path, time_limit: int) -> Outcome:
    """How one process of the program ended. It stops itself after `time_limit` seconds; a hung one is killed."""
    started = time.perf_counter()
    command = [str(program), "job", "result", "report", str(max(1, time_limit))]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=time_limit + 30,
            env={**os.environ, **_SANITIZER_OPTIONS},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(program, -9, f"killed after {time_limit + 30} s", time_limit + 30.0)
    return Outcome(program, done.returncode, done.stderr, time.perf_counter() - started)
