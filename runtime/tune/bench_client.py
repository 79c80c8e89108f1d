"""Timing and verifying candidates on one GPU, in a worker process that may crash, hang or lose its context."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...generator.families.base import Family, KernelConfig
from ...generator.spec import ProblemShape
from ..store_schema import DeviceIdentity
from .process import WorkerCrashed, WorkerFailed, WorkerProcess, WorkerTimeout
from .request import TuneRequest

logger = logging.getLogger("flashsmith.tune")

HANDLER = "flashsmith.runtime.tune.bench_worker:bench_handler"
IDENTITY_SECONDS = 120.0
FINAL_SECONDS = 60.0
_CLASS_OF = {
    "VerifyError": "wrong",
    "LaunchError": "launch",
    "ContextLost": "crash",
    "ConfigError": "constraint",
    "BuildGateError": "spill",
    "CompileError": "compile",
}


@dataclass(frozen=True, slots=True)
class Timed:
    """One config's time at one shape; `outcome` says why there is none. `ms_spread` is relative."""

    outcome: str
    ms_median: float | None = None
    ms_spread: float = 0.0
    n: int = 0
    raced: bool = False
    message: str = ""


@dataclass(frozen=True, slots=True)
class Final:
    """Interleaved times of the finalists, and the fastest torch back end in the same rounds: (name, ms) or None."""

    times: Mapping[KernelConfig, Timed]
    baseline: tuple[str, float] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """The GPU at hand, its driver, and what else uses it at the moment ("" if nothing was seen)."""

    device: DeviceIdentity
    driver: str
    load: str = ""


class Bench(Protocol):
    """What the search needs of a GPU. Implementations: `WorkerBench`, and recorded or invented ones in tests."""

    def identity(self) -> Identity: ...
    def time(self, config: KernelConfig, shape: ProblemShape, *, best_ms: float | None) -> Timed: ...
    def verify(self, config: KernelConfig) -> Timed: ...
    def final(self, configs: Sequence[KernelConfig], shape: ProblemShape) -> Final: ...
    def close(self) -> None: ...


class WorkerBench:
    """A `Bench` in a child process; a candidate that ends it, or outlives its time limit, is classed and left."""

    def __init__(self, request: TuneRequest, family: Family, *, handler: str = HANDLER) -> None:
        arguments = {"problem": request.problem.to_dict(), "family": family.name, "device": request.gpu}
        self._worker = WorkerProcess(handler, arguments)
        self._seconds = request.trial_seconds

    def identity(self) -> Identity:
        reply = self._worker.request({"do": "identity"}, timeout=IDENTITY_SECONDS)
        major, minor = reply["device"]["cc"]
        device = {**reply["device"], "cc": (major, minor)}
        return Identity(DeviceIdentity(**device), str(reply["driver"]), str(reply.get("load", "")))

    def time(self, config: KernelConfig, shape: ProblemShape, *, best_ms: float | None) -> Timed:
        message = {"do": "time", "config": config.to_dict(), "shape": shape.to_dict(), "best_ms": best_ms}
        return self._guarded(message, self._seconds)

    def verify(self, config: KernelConfig) -> Timed:
        """`outcome` "ok" if the config is right on every verification shape."""
        return self._guarded({"do": "verify", "config": config.to_dict()}, max(self._seconds, 60.0))

    def final(self, configs: Sequence[KernelConfig], shape: ProblemShape) -> Final:
        message = {"do": "final", "configs": [c.to_dict() for c in configs], "shape": shape.to_dict()}
        try:
            reply = self._worker.request(message, timeout=FINAL_SECONDS + self._seconds)
        except (WorkerCrashed, WorkerTimeout, WorkerFailed) as error:
            logger.warning("The interleaved final failed: %s", error)
            return Final({}, None, f"no interleaved final: {error}")
        times = {config: Timed(**row) for config, row in zip(configs, reply["times"], strict=True)}
        baseline = reply.get("baseline")
        return Final(times, (str(baseline[0]), float(baseline[1])) if baseline else None, str(reply.get("note", "")))

    def close(self) -> None:
        self._worker.close()

    def _guarded(self, message: Mapping[str, Any], seconds: float) -> Timed:
        try:
            return Timed(**self._worker.request(message, timeout=seconds))
        except WorkerTimeout as error:
            return Timed("timeout", message=str(error))
        except WorkerCrashed as error:
            return Timed("crash", message=str(error))
        except WorkerFailed as error:
            if error.kind not in _CLASS_OF:
                raise
            return Timed(_CLASS_OF[error.kind], message=str(error))
