"""Compiles candidates in parallel processes: a compiler that crashes or hangs costs one candidate, not the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...generator.arch import Arch, arch_from_name
from ...generator.errors import MissingComponentError, TuneError
from ...generator.families import family_named
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec
from .process import WorkerCrashed, WorkerFailed, WorkerProcess, WorkerTimeout

HANDLER = "flashsmith.runtime.tune.compile_pool:compile_handler"
COMPILE_SECONDS = 60.0
#: Exceptions in the child that no other candidate would escape: the run ends with their message.
_FATAL = ("MissingComponentError", "ArchError", "ModuleNotFoundError", "ImportError")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of one candidate: `outcome` is ok, spill, compile, constraint, crash or timeout."""

    config: KernelConfig
    outcome: str
    registers: int = 0
    spill_bytes: int = 0
    smem_bytes: int = 0
    seconds: float = 0.0
    cached: bool = False
    message: str = ""


class CompilePool:
    """`jobs` worker processes for one spec on one architecture. What was compiled once is remembered.

    `run_here` says that this machine's driver is to run the kernels. An exception in `compile` (also Ctrl-C, but not a
    caller that stops asking) kills the workers, whatever they compile: the pool is then at its end.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        arch: Arch,
        family: Family,
        *,
        jobs: int,
        timeout: float = COMPILE_SECONDS,
        run_here: bool = True,
        handler: str = HANDLER,
    ) -> None:
        arguments = {"spec": spec.to_dict(), "arch": arch.name, "family": family.name, "run_here": run_here}
        self._workers = [WorkerProcess(handler, arguments) for _ in range(max(1, jobs))]
        self._timeout = timeout
        self._done: dict[KernelConfig, Compiled] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def results(self) -> dict[KernelConfig, Compiled]:
        """Every candidate compiled so far."""
        return dict(self._done)

    def compile(self, configs: Sequence[KernelConfig]) -> Iterator[Compiled]:
        """The results of `configs`, each as soon as it is known. Raises MissingComponentError where no compiler is."""
        wanted = list(dict.fromkeys(configs))
        for config in wanted:
            if config in self._done:
                yield self._done[config]
        missing: queue.SimpleQueue[KernelConfig] = queue.SimpleQueue()
        count = 0
        for config in wanted:
            if config not in self._done:
                missing.put(config)
                count += 1
        results: queue.SimpleQueue[Compiled | BaseException] = queue.SimpleQueue()
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._serve, args=(worker, missing, results), daemon=True)
            for worker in self._workers[:count]
        ]
        for thread in self._threads:
            thread.start()
        try:
            for _ in range(count):
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                self._done[result.config] = result
                yield result
        except GeneratorExit:  # the caller wants no more: let the running ones end, start none
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self._stop.set()
            self._join()

    def close(self) -> None:
        """Ends the workers at once, whatever they compile. May be called twice."""
        self._stop.set()
        for worker in self._workers:
            worker.kill()
        self._join()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _serve(
        self,
        worker: WorkerProcess,
        missing: queue.SimpleQueue[KernelConfig],
        results: queue.SimpleQueue[Compiled | BaseException],
    ) -> None:
        while not self._stop.is_set():
            try:
                config = missing.get_nowait()
            except queue.Empty:
                return
            try:
                results.put(self._one(worker, config))
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                results.put(error)
                return

    def _one(self, worker: WorkerProcess, config: KernelConfig) -> Compiled:
        return compile_once(worker, config, {}, self._timeout)


def compile_once(worker: WorkerProcess, config: KernelConfig, message: Mapping[str, Any], timeout: float) -> Compiled:
    """What `worker` makes of one candidate. Raises what no other candidate would escape: MissingComponentError where
    no compiler is, TuneError where the child cannot import what it needs."""
    try:
        reply = worker.request({**message, "config": config.to_dict()}, timeout=timeout)
    except WorkerTimeout as error:
        return Compiled(config, "timeout", message=str(error))
    except WorkerCrashed as error:
        return Compiled(config, "crash", message=str(error))
    except WorkerFailed as error:
        if error.kind == "MissingComponentError":
            raise MissingComponentError(str(error)) from None
        if error.kind in _FATAL:
            raise TuneError(f"Candidates cannot be compiled: {error.kind}: {error}") from None
        return Compiled(config, _class_of(error.kind), message=str(error))
    return Compiled(config=config, **reply)


def _class_of(kind: str) -> str:
    return {"BuildGateError": "spill", "ConfigError": "constraint"}.get(kind, "compile")


def compile_handler(
    spec: dict[str, Any], arch: str, family: str, run_here: bool
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The child's function: compiles one config into the disk cache and reports its resources."""
    from ...generator.errors import BuildGateError
    from ..compiler import compile_kernel
    from ..gate import check_gate

    the_spec = AttentionSpec.from_dict(spec)
    the_arch = arch_from_name(arch)
    the_family = family_named(family)

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        config = the_family.config_type.from_dict(message["config"])
        kernel = compile_kernel(the_spec, config, the_arch, family=the_family, gate=False, run_here=run_here)
        outcome, words = "ok", ""
        try:
            check_gate(kernel.report)
        except BuildGateError as error:
            outcome, words = "spill", str(error)
        return {
            "outcome": outcome,
            "registers": kernel.report.registers,
            "spill_bytes": kernel.report.spill_store_bytes + kernel.report.spill_load_bytes,
            "smem_bytes": the_family.resources(the_spec, config).smem_bytes,
            "seconds": round(kernel.seconds, 3),
            "cached": kernel.cached,
            "message": words,
        }

    return handle
