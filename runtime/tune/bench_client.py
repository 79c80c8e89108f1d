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
    "TuneError": "launch",  # no positive samples: it may not have run at all
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
    def final(
        self,
        configs: Sequence[KernelConfig],
        shape: ProblemShape,
        *,
        keep: Sequence[KernelConfig] = (),
        baseline: bool = True,
    ) -> Final: ...
    def of(self, request: TuneRequest, family: Family) -> Bench: ...
    def close(self) -> None: ...


class WorkerBench:
    """A `Bench` in a child process; a candidate that ends it, or outlives its time limit, is classed and left.

    `of` gives benches of other problems on the same child. `effort` is one of `bench_worker.EFFORTS`.
    """

    def __init__(
        self,
        request: TuneRequest,
        family: Family,
        *,
        handler: str = HANDLER,
        effort: str = "standard",
        worker: WorkerProcess | None = None,
    ) -> None:
        self._worker = worker or WorkerProcess(handler, {"device": request.gpu})
        self._about = {"problem": request.problem.to_dict(), "family": family.name, "effort": effort}
        self._seconds = request.trial_seconds
        self._effort = effort

    def of(self, request: TuneRequest, family: Family) -> WorkerBench:
        """A bench of another problem on the same child process."""
        return WorkerBench(request, family, effort=self._effort, worker=self._worker)

    def identity(self) -> Identity:
        reply = self._worker.request({"do": "identity", **self._about}, timeout=IDENTITY_SECONDS)
        major, minor = reply["device"]["cc"]
        device = {**reply["device"], "cc": (major, minor)}
        return Identity(DeviceIdentity(**device), str(reply["driver"]), str(reply.get("load", "")))

    def time(self, config: KernelConfig, shape: ProblemShape, *, best_ms: float | None) -> Timed:
        message = {"do": "time", "config": config.to_dict(), "shape": shape.to_dict(), "best_ms": best_ms}
        return self._guarded(message, self._seconds)

    def verify(self, config: KernelConfig) -> Timed:
        """`outcome` "ok" if the config is right on every verification shape."""
        return self._guarded({"do": "verify", "config": config.to_dict()}, max(self._seconds, 60.0))

    def final(
        self,
        configs: Sequence[KernelConfig],
        shape: ProblemShape,
        *,
        keep: Sequence[KernelConfig] = (),
        baseline: bool = True,
    ) -> Final:
        """Interleaved times, and those of torch's back ends if `baseline`.

        Where effort is quick a config that is clearly slower is left, unless it is in `keep`.
        """
        message = {
            "do": "final",
            **self._about,
            "configs": [config.to_dict() for config in configs],
            "shape": shape.to_dict(),
            "keep": [place for place, config in enumerate(configs) if config in keep],
            "baseline": baseline,
        }
        try:
            reply = self._worker.request(message, timeout=FINAL_SECONDS + self._seconds)
        except (WorkerCrashed, WorkerTimeout, WorkerFailed) as error:
            logger.warning("The interleaved final failed: %s", error)
            return Final({}, None, f"no interleaved final: {error}")
        times = {config: Timed(**row) for config, row in zip(configs, reply["times"], strict=True)}
        rival = reply.get("baseline")
        return Final(times, (str(rival[0]), float(rival[1])) if rival else None, str(reply.get("note", "")))

    def close(self) -> None:
        self._worker.close()

    def _guarded(self, message: Mapping[str, Any], seconds: float) -> Timed:
        try:
            return Timed(**self._worker.request({**self._about, **message}, timeout=seconds))
        except WorkerTimeout as error:
            return Timed("timeout", message=str(error))
        except WorkerCrashed as error:
            return Timed("crash", message=str(error))
        except WorkerFailed as error:
            if error.kind not in _CLASS_OF:
                raise
            return Timed(_CLASS_OF[error.kind], message=str(error))
