"""One compile pool for many specs, which works ahead: while a GPU measures one spec, the next ones' kernels are built.

A kernel depends neither on lengths nor on the ratio of heads: what is compiled once serves every bucket of its spec,
and whoever launches it finds it in the disk cache.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...generator.arch import Arch
from ...generator.errors import MissingComponentError, TuneError
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec
from .compile_pool import COMPILE_SECONDS, Compiled, compile_handler, compile_once
from .process import WorkerCrashed, WorkerProcess

HANDLER = "flashsmith.runtime.tune.compile_ahead:compile_any_handler"
#: What somebody waits for goes before all that is compiled ahead.
URGENT = -1
#: Compiling gives way to the processes that measure.
NICENESS = 5

_Key = tuple[str, KernelConfig]


@dataclass(frozen=True, slots=True)
class SpecToCompile:
    """A spec, its kernel family, and its place in the order of the run: lower ones are compiled first."""

    spec: AttentionSpec
    family: Family
    place: int


class CompileAhead:
    """`jobs` worker processes for kernels of any spec on one architecture. What was asked for once is remembered.

    `submit` returns at once. An exception that no candidate would escape, such as a missing compiler, is raised to the
    next caller who waits.
    """

    def __init__(
        self, arch: Arch, *, jobs: int, timeout: float = COMPILE_SECONDS, run_here: bool = True, handler: str = HANDLER
    ) -> None:
        arguments = {"arch": arch.name, "run_here": run_here}
        self._workers = [WorkerProcess(handler, arguments) for _ in range(max(1, jobs))]
        self._timeout = timeout
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, SpecToCompile, KernelConfig]] = []
        self._asked = itertools.count()
        self._known: set[_Key] = set()
        self._taken: set[_Key] = set()
        self._done: dict[_Key, Compiled] = {}
        self._fatal: BaseException | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in self._workers
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    @property
    def compiled(self) -> int:
        """How many kernels were compiled, or failed to."""
        with self._changed:
            return len(self._done)

    def submit(self, what: SpecToCompile, configs: Sequence[KernelConfig], *, urgent: bool = False) -> None:
        """Asks for `configs` of one spec; those asked for already are only moved forward, if `urgent`."""
        priority = URGENT if urgent else what.place
        with self._changed:
            for config in dict.fromkeys(configs):
                key = (what.spec.digest, config)
                if key in self._taken or (key in self._known and not urgent):
                    continue
                self._known.add(key)
                heapq.heappush(self._queue, (priority, next(self._asked), what, config))
            self._changed.notify_all()

    def results(self, spec: AttentionSpec) -> dict[KernelConfig, Compiled]:
        """What became of every config of `spec` so far."""
        with self._changed:
            return {config: found for (digest, config), found in self._done.items() if digest == spec.digest}

    def compile(
        self, what: SpecToCompile, configs: Sequence[KernelConfig], *, deadline: float | None = None
    ) -> Iterator[Compiled]:
        """The results of `configs`, each as soon as it is known, finished ones first.

        With a `deadline` (on `time.monotonic`'s clock) those that are not known by then are left out.
        """
        self.submit(what, configs, urgent=True)
        missing = dict.fromkeys(configs)
        while missing:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._fatal is not None or self._closed or self._ready(what, missing) is not None,
                    None if deadline is None or math.isinf(deadline) else max(0.0, deadline - time.monotonic()),
                )
                if self._fatal is not None:
                    raise self._fatal
                config = self._ready(what, missing)
                if config is None:
                    if self._closed:
                        raise TuneError("The compile pool was closed.")
                    return
                found = self._done[what.spec.digest, config]
            del missing[config]
            yield found

    def close(self) -> None:
        """Ends the workers at once, whatever they compile. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ready(self, what: SpecToCompile, configs: dict[KernelConfig, None]) -> KernelConfig | None:
        return next((config for config in configs if (what.spec.digest, config) in self._done), None)

    def _serve(self, worker: WorkerProcess) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._fatal is not None or bool(self._queue))
                if self._closed or self._fatal is not None:
                    return
                _, _, what, config = heapq.heappop(self._queue)
                key = (what.spec.digest, config)
                if key in self._taken:
                    continue
                self._taken.add(key)
            message = {"spec": what.spec.to_dict(), "digest": what.spec.digest, "family": what.family.name}
            try:
                found = compile_once(worker, config, message, self._timeout)
            except (MissingComponentError, TuneError, WorkerCrashed) as error:
                with self._changed:
                    self._fatal = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._done[key] = found
                self._changed.notify_all()


class SpecPool:
    """One spec's view of a `CompileAhead`: what a `Job` needs of a pool. `own`: nobody else uses it."""

    def __init__(self, pool: CompileAhead, what: SpecToCompile, *, own: bool = False) -> None:
        self._pool = pool
        self._what = what
        self._own = own

    @property
    def results(self) -> dict[KernelConfig, Compiled]:
        return self._pool.results(self._what.spec)

    def submit(self, configs: Sequence[KernelConfig]) -> None:
        """Asks for `configs` before all that is compiled ahead, and returns at once."""
        self._pool.submit(self._what, configs, urgent=True)

    def compile(self, configs: Sequence[KernelConfig], *, deadline: float | None = None) -> Iterator[Compiled]:
        return self._pool.compile(self._what, configs, deadline=deadline)

    def close(self) -> None:
        """Ends the pool if it is this spec's own."""
        if self._own:
            self._pool.close()


def first_that_fits(pool: SpecPool, configs: Sequence[KernelConfig]) -> KernelConfig:
    """The first of a family's defaults that passes the build gate, the last if none does; the pool compiles them.

    The same config as `compiler.fitting_default` gives, without a compiler in this process.
    """
    for config in configs:
        if next(iter(pool.compile([config]))).outcome == "ok":
            return config
    return configs[-1]


def compile_any_handler(arch: str, run_here: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The child's function: compiles one config of any spec; messages {"spec", "digest", "family", "config"}."""
    import os

    if hasattr(os, "nice"):
        os.nice(NICENESS)
    handlers: dict[tuple[str, str], Callable[[dict[str, Any]], dict[str, Any]]] = {}

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        key = (message["digest"], message["family"])
        if key not in handlers:
            handlers[key] = compile_handler(message["spec"], arch, message["family"], run_here)
        return handlers[key](message)

    return handle
