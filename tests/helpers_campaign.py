"""An invented GPU and compiler for many specs at once, for the tests of campaigns."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers_tune import ARCH, DEVICE, unit_hash

from flashsmith.generator.families import FAMILIES
from flashsmith.generator.families.base import KernelConfig
from flashsmith.generator.spec import AttentionSpec, ProblemShape
from flashsmith.runtime.tune.bench_client import Final, Identity, Timed
from flashsmith.runtime.tune.request import TuneProblem, TuneRequest, usual_shape

HOPPER = FAMILIES["forward_sm90"]
#: The file to which the fake compiler writes a line a kernel.
COMPILES = "TEST_COMPILES"
#: Configs (as text) that end the fake GPU worker, one a line.
CRASHERS = "TEST_CRASHERS"


def request_of(
    head_dim: int = 64, *, lengths: Sequence[int] = (512, 2048, 8192), ratios: Sequence[int] = (1,), **more: Any
) -> TuneRequest:
    """A request of one spec at usual sizes."""
    mine = {name: more.pop(name) for name in ("causal", "window_size", "head_dim_v") if name in more}
    shapes = tuple(usual_shape(length, head_dim=head_dim, gqa_ratio=ratio) for ratio in ratios for length in lengths)
    problem = TuneProblem(head_dim=head_dim, **mine)
    return TuneRequest(problem=problem, shapes=shapes, arch=ARCH, family=HOPPER.name, gpu="cuda:0", jobs=2, **more)


def hopper_ms(config: Any, shape: ProblemShape) -> float:
    """An invented time: short lengths like small tiles, long ones large tiles; the ratio of heads hardly matters."""
    wanted = 64 if shape.seqlen_q <= 1024 else 128
    ms = shape.seqlen_q / 1000 * (1 + 0.2 * abs(math.log2(config.B_c / wanted)))
    ms *= 1 + 0.1 * abs(config.num_warpgroups - 2)
    return ms * (1 + 0.02 * unit_hash(str(config)))


class ManyBench:
    """Times by `ms` in this process. `of` gives a bench of another problem that writes to the same lists."""

    def __init__(
        self,
        ms: Callable[[KernelConfig, ProblemShape], float] = hopper_ms,
        *,
        wrong: Callable[[KernelConfig], bool] = lambda config: False,
        after: Callable[[ManyBench], None] = lambda bench: None,
        shared: ManyBench | None = None,
        spec: AttentionSpec | None = None,
    ) -> None:
        self.ms, self.wrong, self.after, self.spec = ms, wrong, after, spec
        self.root = shared or self
        self.timed: list[tuple[str, KernelConfig, ProblemShape]] = []
        self.verified: list[tuple[str, KernelConfig]] = []
        self.finals: list[tuple[str, tuple[KernelConfig, ...], ProblemShape, bool]] = []
        self.closed = False

    def of(self, request: TuneRequest, family: Any) -> ManyBench:
        spec = request.problem.traced().spec
        return ManyBench(self.ms, wrong=self.wrong, after=self.after, shared=self.root, spec=spec)

    def identity(self) -> Identity:
        return Identity(DEVICE, "580.1")

    def time(self, config: KernelConfig, shape: ProblemShape, *, best_ms: float | None) -> Timed:
        self.root.timed.append((str(self.spec), config, shape))
        self.after(self.root)
        return Timed("ok", self.ms(config, shape), 0.0, 9)

    def verify(self, config: KernelConfig) -> Timed:
        self.root.verified.append((str(self.spec), config))
        return Timed("wrong", message="invented") if self.wrong(config) else Timed("ok")

    def final(
        self,
        configs: Sequence[KernelConfig],
        shape: ProblemShape,
        *,
        keep: Sequence[KernelConfig] = (),
        baseline: bool = True,
    ) -> Final:
        self.root.finals.append((str(self.spec), tuple(configs), shape, baseline))
        self.after(self.root)
        times = {config: Timed("ok", self.ms(config, shape), 0.0, 9) for config in configs}
        return Final(times, ("sdpa-cudnn", 2.0) if baseline else None)

    def close(self) -> None:
        self.root.closed = True


def compile_any_handler(arch: str, run_here: bool) -> Any:
    """A compiler that writes a line a kernel; B_c=176 spills, B_c=192 crashes."""

    def handle(message: Mapping[str, Any]) -> dict[str, Any]:
        config = message["config"]
        if COMPILES in os.environ:
            with open(os.environ[COMPILES], "a", encoding="utf-8") as lines:
                lines.write(f"{message['digest']} {HOPPER.config_type.from_dict(config)}\n")
        if config["B_c"] == 192:
            os._exit(3)
        outcome = "spill" if config["B_c"] == 176 else "ok"
        return {"outcome": outcome, "registers": 168, "smem_bytes": 1000 * config["B_c"], "seconds": 0.1}

    return handle


def slow_compile_handler(arch: str, run_here: bool) -> Any:
    """A compiler that takes a while."""
    handle = compile_any_handler(arch, run_here)

    def slow(message: Mapping[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = handle(message)
        time.sleep(0.2)
        return result

    return slow


def missing_handler(arch: str, run_here: bool) -> Any:
    """A compiler that is not installed."""
    from flashsmith.generator.errors import MissingComponentError

    def handle(message: Mapping[str, Any]) -> dict[str, Any]:
        raise MissingComponentError("NVRTC is missing. Install it.")

    return handle


def bench_handler(device: str) -> Any:
    """A GPU worker that the configs in the file `CRASHERS` names end, whatever they are asked for."""

    def handle(message: Mapping[str, Any]) -> dict[str, Any]:
        if message["do"] == "identity":
            return {"device": {**DEVICE.to_dict(), "cc": [9, 0]}, "driver": "580.1", "load": ""}
        configs = [HOPPER.config_type.from_dict(c) for c in message.get("configs", [message.get("config")])]
        bad = Path(os.environ[CRASHERS]).read_text(encoding="utf-8").splitlines()
        if any(f"{message['problem']['head_dim']} {config}" in bad for config in configs):
            os._exit(9)
        if message["do"] == "verify":
            return {"outcome": "ok"}
        shape = ProblemShape.from_dict(message["shape"])
        rows = [{"outcome": "ok", "ms_median": hopper_ms(config, shape), "n": 9} for config in configs]
        return {"times": rows, "baseline": None, "note": ""} if message["do"] == "final" else rows[0]

    return handle
