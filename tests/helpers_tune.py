"""Invented landscapes, benches and worker handlers for the tests of the tuner."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import FAMILIES
from flashsmith.generator.families.base import KernelConfig
from flashsmith.generator.spec import AttentionSpec, ProblemShape
from flashsmith.runtime.store_schema import DeviceIdentity, Provenance, Record, SpecClass, Timing
from flashsmith.runtime.tune.bench_client import Final, Identity, Timed
from flashsmith.runtime.tune.compile_pool import Compiled

FAMILY = FAMILIES["forward_sm80"]
SPEC = AttentionSpec(head_dim=64)
ARCH = ARCHS["sm_90"]
SPACE = FAMILY.space(SPEC, ARCH)
DEFAULT = FAMILY.default_config(SPEC, ARCH)
SHAPE = ProblemShape(batch=4, seqlen_q=4096, seqlen_k=4096, nheads=32, nheads_k=32)
DEVICE = DeviceIdentity("Test GPU", (9, 0), 132, 1 << 30, 1 << 20, 1_500_000, 1_000_000)


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12


def valley_ms(config: KernelConfig) -> float:
    """An invented time: a valley in the tile sizes with interactions and some ruggedness, as in measured spaces."""
    values: Any = config
    rows = math.log2(values.B_r / 128)
    keys = math.log2(values.B_c / 48)
    warps = math.log2(values.rows_per_warp / 32)
    ms = 1.0 + 0.12 * rows**2 + 0.2 * keys**2 + 0.25 * warps**2 + 0.1 * rows * keys
    ms *= 1.0 if values.softmax == "optimistic" else 1.06
    ms *= 1.0 if values.schedule == "linear" else 1.02
    ms *= {1: 1.03, 2: 1.0, 3: 1.01}[values.num_stages]
    ms *= 1.02 if values.q_in_registers == (values.B_r > 64) else 1.0
    return ms * (1 + 0.03 * unit_hash(str(config)))


def valley(fail_share: float = 0.1) -> dict[KernelConfig, float | None]:
    """The landscape of `valley_ms` over the space; a share of it fails."""
    return {config: None if unit_hash(f"fail {config}") < fail_share else valley_ms(config) for config in SPACE}


class FakePool:
    """Compiles nothing; `outcomes` names the configs that fail, and how."""

    def __init__(self, outcomes: Mapping[KernelConfig, str] | None = None) -> None:
        self.outcomes = dict(outcomes or {})
        self.results: dict[KernelConfig, Compiled] = {}

    def submit(self, configs: Sequence[KernelConfig]) -> None:
        pass

    def compile(self, configs: Sequence[KernelConfig]) -> Any:
        for config in configs:
            smem = FAMILY.resources(SPEC, config).smem_bytes
            result = Compiled(config, self.outcomes.get(config, "ok"), registers=128, smem_bytes=smem)
            self.results[config] = result
            yield result

    def close(self) -> None:
        pass


class FakeBench:
    """Times by a function, without a GPU. `wrong` configs fail verification; `failing` ones have no time."""

    def __init__(
        self,
        ms: Callable[[KernelConfig], float] = valley_ms,
        *,
        noise: Callable[[int], float] = lambda count: 0.0,
        wrong: Sequence[KernelConfig] = (),
        failing: Mapping[KernelConfig, str] | None = None,
    ) -> None:
        self.ms = ms
        self.noise = noise
        self.wrong = set(wrong)
        self.failing = dict(failing or {})
        self.timed: list[KernelConfig] = []
        self.verified: list[KernelConfig] = []

    def identity(self) -> Identity:
        return Identity(DEVICE, "580.1")

    def time(self, config: KernelConfig, shape: ProblemShape, *, best_ms: float | None) -> Timed:
        self.timed.append(config)
        if config in self.failing:
            return Timed(self.failing[config], message="invented")
        return self._median([self._one(config) for _ in range(15)])

    def verify(self, config: KernelConfig) -> Timed:
        self.verified.append(config)
        return Timed("wrong", message="invented") if config in self.wrong else Timed("ok")

    def final(
        self,
        configs: Sequence[KernelConfig],
        shape: ProblemShape,
        *,
        keep: Sequence[KernelConfig] = (),
        baseline: bool = True,
    ) -> Final:
        rounds = [{config: self._one(config) for config in configs} for _ in range(15)]
        times = {}
        for config in configs:
            times[config] = self._median([one[config] for one in rounds])
        return Final(times, ("sdpa-flash", 2.0) if baseline else None)

    def of(self, request: Any, family: Any) -> FakeBench:
        return self

    def close(self) -> None:
        pass

    @staticmethod
    def _median(samples: list[float]) -> Timed:
        ordered = sorted(samples)
        return Timed("ok", ordered[7], (ordered[11] - ordered[3]) / ordered[7], 15)

    def _one(self, config: KernelConfig) -> float:
        self.count = getattr(self, "count", 0) + 1
        return self.ms(config) * (1 + self.noise(self.count))


def record(
    config: KernelConfig = DEFAULT, spec: AttentionSpec = SPEC, shape: ProblemShape = SHAPE, **changes: Any
) -> Record:
    """A whole record with invented numbers."""
    plain = Record(
        spec_class=SpecClass.of(spec),
        bucket=shape,
        config=config.to_dict(),
        status="measured",
        time=Timing(1.25, 0.01, 21, 300.5, 1000.25),
        default_ms=1.5,
        device=DEVICE,
        provenance=Provenance(generator="", flashsmith="0.1.0", nvrtc="13.0", driver="580.1"),
        verified="cuda",
        problem=str(spec),
        values={"left": 128},
        baseline=("sdpa-flash", 1.4),
        ties=(DEFAULT.to_dict(),),
        tie_rule="fastest",
        runner_up=(DEFAULT.to_dict(), 1.375),
        why="128 tiles of 128 rows in 1.0 waves",
    )
    return replace(plain, **changes)


def echo_handler(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A worker's function that does what the message says: "say", "print", "raise", "exit", "crash", "hang", "lose"."""
    from flashsmith.runtime.tune.worker import ContextLost

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        match message["do"]:
            case "print":
                print("noise on standard output", flush=True)
            case "raise":
                raise ValueError("a bad candidate")
            case "exit":
                print("last words", file=sys.stderr, flush=True)
                os._exit(7)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                time.sleep(3600)
            case "lose":
                raise ContextLost("the context is gone")
        return {"said": prefix + message["do"], "pid": os.getpid()}

    return handle


def compile_handler(spec: dict[str, Any], arch: str, family: str, run_here: bool) -> Any:
    """A compiler for tests: B_c=64 spills, B_c=32 crashes, num_warps=8 hangs, everything else compiles."""

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        config = message["config"]
        if config["B_c"] == 32:
            os._exit(3)
        if config["num_warps"] == 8:
            time.sleep(3600)
        outcome = "spill" if config["B_c"] == 64 else "ok"
        return {
            "outcome": outcome,
            "registers": 100,
            "spill_bytes": 0,
            "smem_bytes": 1,
            "seconds": 0.1,
            "cached": False,
            "message": "",
        }

    return handle


def missing_compiler_handler(spec: dict[str, Any], arch: str, family: str, run_here: bool) -> Any:
    """A compiler that is not installed."""
    from flashsmith.generator.errors import MissingComponentError

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        raise MissingComponentError("NVRTC is missing. Install it.")

    return handle


def bench_handler(device: str) -> Any:
    """A GPU worker for tests: the first five configs of the space are good, wild, hung, refused and poisonous."""
    from flashsmith.generator.errors import LaunchError
    from flashsmith.runtime.tune.worker import ContextLost

    good, wild, hung, refused, lost = (config.to_dict() for config in SPACE[:5])

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        if message["do"] == "identity":
            values = {**DEVICE.to_dict(), "cc": [9, 0]}
            return {"device": values, "driver": "580.1", "load": ""}
        for config in message.get("configs", [message.get("config")]):
            if config == wild:
                os.kill(os.getpid(), signal.SIGSEGV)
            if config == hung:
                time.sleep(3600)
            if config == refused:
                raise LaunchError("refused")
            if config == lost:
                raise ContextLost("an illegal address")
            assert config == good
        one = {"outcome": "ok", "ms_median": 1.0, "ms_spread": 0.0, "n": 9}
        if message["do"] == "final":
            return {"times": [one] * len(message["configs"]), "baseline": ["sdpa-flash", 2.0], "note": ""}
        return {"outcome": "ok"} if message["do"] == "verify" else one

    return handle
