"""Cases on the GPU in a process of its own, which a case may kill, hang or leave without a context."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from ...generator.errors import FlashsmithError, LaunchError
from .conformance_cases import every_case
from .conformance_gpu import cubin_of, gpu_target, open_gpu, run_on_gpu
from .conformance_kernels import Case

#: Seconds in which a worker must have started and opened the GPU.
START_SECONDS = 60.0
_SPAWN = multiprocessing.get_context("spawn")  # a forked process can use no GPU

Run = Callable[[Case, bytes, int], Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one case ended on the GPU.

    `status`: "ran" (with `words`), "crash" (`message` has the driver's words or the process's end), "timeout",
    "no cubin" (it does not compile) or "not run".
    """

    status: str
    words: Any = None
    message: str = ""


#: A GPU: the case, how many of its blocks to run, and the seconds it may take.
Gpu = Callable[[Case, int, float], Outcome]


class Worker:
    """A process that runs cases one after another; it is replaced after one that did not end well."""

    def __init__(self, run: Run = run_on_gpu, prepare: Callable[[], None] = open_gpu) -> None:
        self._run = run
        self._prepare = prepare
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def outcome(self, name: str, cubin: bytes, blocks: int, limit_s: float) -> Outcome:
        """How the first `blocks` blocks of the case `name` end. Raises LaunchError where no worker starts."""
        connection = self._connection or self._start()
        try:
            connection.send((name, cubin, blocks))
            if not connection.poll(limit_s):
                self.close()
                return Outcome("timeout", message=f"it had not ended after {limit_s:.1f} s")
            status, answer = connection.recv()
        except (EOFError, OSError):
            return Outcome("crash", message=f"the process of the GPU ended with status {self._ended()}")
        if status == "ran":
            return Outcome("ran", answer)
        self.close()  # an error may have cost it its context
        return Outcome("crash", message=answer)

    def close(self) -> None:
        """Ends the process, also one that hangs."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def _start(self) -> Connection:
        here, there = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(there, self._run, self._prepare), daemon=True)
        process.start()
        there.close()  # so that its end is seen here
        self._process, self._connection = process, here
        try:
            status, answer = here.recv() if here.poll(START_SECONDS) else ("", f"nothing within {START_SECONDS:g} s")
        except (EOFError, OSError):
            status, answer = "", f"the process ended with status {self._ended()}"
        if status != "ready":
            self.close()
            raise LaunchError(
                f"The process that runs cases must open the GPU, but: {answer} Check `flashsmith doctor` and whether"
                " another program holds the GPU."
            )
        return here

    def _ended(self) -> int | None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.join(10)
        return process.exitcode


def _serve(connection: Connection, run: Run, prepare: Callable[[], None]) -> None:
    """The worker's loop, until the other end closes."""
    try:
        prepare()
        cases = every_case()
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
        connection.send(("", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", None))
    while True:
        try:
            name, cubin, blocks = connection.recv()
        except EOFError:
            return
        try:
            answer = ("ran", run(cases[name], cubin, blocks))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this case's, and the parent reports it
            answer = ("crash", str(error) or type(error).__name__)
        connection.send(answer)


class WorkerGpu:
    """The GPU of this machine as a `Gpu`; the cases' machine code is made by many processes beforehand."""

    def __init__(self, cases: Sequence[Case], *, processes: int | None = None) -> None:
        self._worker = Worker()
        self._pool = ProcessPoolExecutor(processes or os.cpu_count() or 1, mp_context=_SPAWN)
        self._cubins: dict[str, Future[bytes]] = {}
        by_text: dict[tuple[str, str], Future[bytes]] = {}
        for case in cases:
            key = (case.text, gpu_target(case))
            if key not in by_text:
                by_text[key] = self._pool.submit(cubin_of, *key)
            self._cubins[case.name] = by_text[key]

    def __call__(self, case: Case, blocks: int, limit_s: float) -> Outcome:
        try:
            cubin = self._cubins[case.name].result(timeout=START_SECONDS)
        except TimeoutError:
            return Outcome("no cubin", message=f"NVRTC had not compiled it after {START_SECONDS:g} s")
        except (FlashsmithError, BrokenProcessPool) as error:
            return Outcome("no cubin", message=str(error))
        return self._worker.outcome(case.name, cubin, blocks, limit_s)

    def close(self) -> None:
        """Ends the worker and the compilers."""
        self._worker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def isolate(gpu: Gpu, case: Case, *, limit_s: float, deadline: float) -> str:
    """Which block of a case that crashed is the first to do so, in words; "" for a case of one block, or no time left.

    Blocks are taken for independent: with fewer of them, the others are not launched. `deadline` is of time.monotonic.
    """
    runs, crashes = 0, case.blocks
    while crashes - runs > 1:
        if time.monotonic() > deadline:
            return ""
        middle = (runs + crashes) // 2
        if gpu(case, middle, limit_s).status == "ran":
            runs = middle
        else:
            crashes = middle
    return f"; block {runs} of {case.blocks} is the first that does" if case.blocks > 1 else ""
