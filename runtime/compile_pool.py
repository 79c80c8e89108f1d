"""Many kernels compiled at once, each with a time limit: what the tuner runs before it measures anything.

The workers are plain child processes that read jobs and write results as lines of JSON. They are started afresh, not
forked (the parent may have used CUDA), run none of the caller's main module, and are killed when a job takes too long.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from ..generator.errors import BuildGateError, CompileError, FlashsmithError, MissingComponentError
from . import compiler
from .gate import ResourceReport, check_gate

if TYPE_CHECKING:
    from ..generator.arch import Arch
    from ..generator.families.base import KernelConfig
    from ..generator.spec import AttentionSpec

#: Seconds a worker may take to start Python and load NVRTC, beside the time limit of its first job.
_START_SECONDS = 60.0
_WORKER = "import sys; sys.path[:] = {path!r}; from flashsmith.runtime.compile_pool import main; main()"


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One kernel to compile."""

    spec: AttentionSpec
    config: KernelConfig
    arch: Arch


@dataclass(frozen=True, slots=True)
class CompileOutcome:
    """What became of a job. `failure` is "" for a kernel that passed the gate, else one of

    - "spill": it compiled (`kernel` is there) but breaks the build gate,
    - "compile": NVRTC refused it, "config": it is outside the family's space,
    - "timeout": it took longer than the limit, "crash": the worker died over it.
    """

    job: CompileJob
    kernel: compiler.CompiledKernel | None
    failure: str
    message: str
    seconds: float


#: `progress(outcome, done, total)`: called in the caller's thread after each job.
Progress = Callable[[CompileOutcome, int, int], None]


def default_workers() -> int:
    """One worker a CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_many(
    jobs: Iterable[CompileJob],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    time_limit: float = 60.0,
    run_here: bool = True,
    worker_program: str = _WORKER,
) -> list[CompileOutcome]:
    """The outcome of each job, in the order of `jobs`. Kernels that are cached already start no worker.

    At most `workers` processes (one a CPU by default) compile at a time; a job that takes more than `time_limit`
    seconds is given up and its worker replaced. Every kernel that compiles is kept in the cache, so that a search that
    was interrupted goes on where it was. `run_here` is that of `compile_kernel`.

    Raises MissingComponentError where CuPy or NVRTC is missing: then no job could do better. An interrupt (Ctrl-C) ends
    all workers before it goes on.
    """
    todo = list(jobs)
    outcomes: list[CompileOutcome | None] = [None] * len(todo)
    done = 0
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i, job in enumerate(todo):
        kernel = compiler.find_cached(job.spec, job.config, job.arch)
        if kernel is None:
            waiting.put(i)
            continue
        outcomes[i] = _gated(job, kernel, 0.0)
        done += 1
        if progress is not None:
            progress(_present(outcomes[i]), done, len(todo))
    missing = len(todo) - done
    finished: queue.SimpleQueue[tuple[int, CompileOutcome | FlashsmithError]] = queue.SimpleQueue()
    count = min(missing, workers or default_workers())
    pool = [_Worker(worker_program, run_here) for _ in range(count)]
    threads = [
        threading.Thread(target=_serve, args=(worker, todo, waiting, finished, time_limit), daemon=True)
        for worker in pool
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in range(missing):
            i, outcome = finished.get()
            if isinstance(outcome, FlashsmithError):
                raise outcome
            outcomes[i] = outcome
            done += 1
            if progress is not None:
                progress(outcome, done, len(todo))
    finally:
        for worker in pool:
            worker.close()
        for thread in threads:
            thread.join()
    return [_present(outcome) for outcome in outcomes]


def main() -> None:
    """A worker: one job a line on standard input, one result a line on standard output, until the input ends."""
    import signal

    from ..generator.arch import arch_from_name
    from ..generator.families import family_named
    from ..generator.spec import AttentionSpec

    # Ctrl-C reaches the whole process group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A library that prints must not break the protocol.
    results = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    os.dup2(2, 1)
    print("{}", file=results)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            family = family_named(job["family"])
            kernel = compiler.compile_kernel(
                AttentionSpec.from_dict(job["spec"]),
                family.config_type.from_dict(job["config"]),
                arch_from_name(job["arch"]),
                family=family,
                gate=False,
                run_here=job["run_here"],
            )
            answer = _kernel_to_dict(kernel)
        except FlashsmithError as error:
            kind = next(k for k, types in _KINDS if isinstance(error, types))
            answer = {"failure": kind, "message": str(error)}
        print(json.dumps(answer), file=results)


#: How a worker's exception is classed; the first match counts.
_KINDS: tuple[tuple[str, type[FlashsmithError]], ...] = (
    ("missing", MissingComponentError),
    ("compile", CompileError),
    ("config", FlashsmithError),
)


class _Worker:
    """One child process, started when its first job comes and again after it was killed."""

    def __init__(self, program: str, run_here: bool) -> None:
        self._code = program.format(path=sys.path)
        self._run_here = run_here
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._pending = b""
        self._closed = False
        self._lock = threading.Lock()

    def run(self, job: CompileJob, time_limit: float) -> dict[str, Any]:
        """The worker's answer; {"failure": "timeout" or "crash", "message": ...} where there is none."""
        request = {
            "spec": job.spec.to_dict(),
            "config": job.config.to_dict(),
            "family": job.config.family,
            "arch": job.arch.name,
            "run_here": self._run_here,
        }
        try:
            process = self._started()
            if process.stdin is None:
                raise BrokenPipeError
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = self._read(process, time_limit)
        except TimeoutError:
            self._stop()
            return {"failure": "timeout", "message": f"It did not compile within {time_limit:g} s."}
        except (OSError, ValueError) as error:
            words = self._last_words()
            code = self._stop()
            return {"failure": "crash", "message": f"The compiling process ended (exit code {code}): {words or error}"}
        return answer

    def close(self) -> None:
        """Ends the process at once, also while another thread waits for its answer."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()

    def reap(self) -> None:
        """Waits for the ended process and closes its pipes; called by the thread that used the worker."""
        self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _stop
        with self._lock:
            if self._closed:
                raise BrokenPipeError("the pool is closed")
            self._process = subprocess.Popen(
                [sys.executable, "-c", self._code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        self._pending = b""
        try:
            self._read(self._process, _START_SECONDS)  # the greeting
        except TimeoutError:
            raise BrokenPipeError(f"it did not start within {_START_SECONDS:g} s") from None
        return self._process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        """The next line of the worker as data. Raises TimeoutError, BrokenPipeError or ValueError."""
        if process.stdout is None:
            raise BrokenPipeError
        deadline = time.monotonic() + seconds
        descriptor = process.stdout.fileno()
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise BrokenPipeError("no answer")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError("the answer is no object")
        return answer

    def _last_words(self) -> str:
        """The end of what the worker wrote to standard error."""
        if self._errors is None:
            return ""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 2000))
        return self._errors.read().decode(errors="replace").strip()

    def _stop(self) -> int | None:
        process, self._process = self._process, None
        code = None
        if process is not None:
            process.kill()
            code = process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # unsent bytes of a dead worker
                        pipe.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        return code


def _serve(
    worker: _Worker,
    jobs: Sequence[CompileJob],
    waiting: queue.SimpleQueue[int],
    finished: queue.SimpleQueue[tuple[int, CompileOutcome | FlashsmithError]],
    time_limit: float,
) -> None:
    """One thread's work: jobs until none is waiting or the worker is closed."""
    try:
        while True:
            try:
                i = waiting.get_nowait()
            except queue.Empty:
                return
            start = time.perf_counter()
            answer = worker.run(jobs[i], time_limit)
            finished.put((i, _outcome(jobs[i], answer, time.perf_counter() - start)))
    finally:
        worker.reap()


def _outcome(job: CompileJob, answer: dict[str, Any], seconds: float) -> CompileOutcome | FlashsmithError:
    failure = answer.get("failure", "")
    if failure == "missing":
        return MissingComponentError(answer["message"])
    if failure:
        return CompileOutcome(job, None, failure, answer["message"], seconds)
    try:
        kernel = _kernel_from_dict(answer)
        compiler.remember(kernel)  # where no disk keeps it
        return _gated(job, kernel, seconds)
    except (KeyError, TypeError, ValueError) as error:
        return CompileOutcome(
            job, None, "crash", f"The compiling process answered with something else: {error}", seconds
        )


def _gated(job: CompileJob, kernel: compiler.CompiledKernel, seconds: float) -> CompileOutcome:
    try:
        check_gate(kernel.report, what=f"{job.config.family} {job.config}")
    except BuildGateError as error:
        return CompileOutcome(job, kernel, "spill", str(error), seconds)
    return CompileOutcome(job, kernel, "", "", seconds)


def _kernel_to_dict(kernel: compiler.CompiledKernel) -> dict[str, Any]:
    return {
        "entry": kernel.entry,
        "cubin": base64.b64encode(kernel.cubin).decode("ascii"),
        "report": kernel.report.to_dict(),
        "nvrtc_version": kernel.nvrtc_version,
        "target": kernel.target,
        "seconds": kernel.seconds,
        "cached": kernel.cached,
        "key": kernel.key,
    }


def _kernel_from_dict(data: dict[str, Any]) -> compiler.CompiledKernel:
    values = dict(data)
    values["cubin"] = base64.b64decode(values["cubin"], validate=True)
    values["report"] = ResourceReport.from_dict(values["report"])
    return compiler.CompiledKernel(**values)


def _present(outcome: CompileOutcome | None) -> CompileOutcome:
    assert outcome is not None
    return outcome
