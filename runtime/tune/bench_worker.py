"""The child side of `bench_client.WorkerBench`: launches, times and verifies candidates on one GPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...generator.errors import ConfigError, FlashsmithError, LaunchError
from ...generator.families import family_named
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import ProblemShape
from .. import driver
from ..device import CudaBackend
from ..launch import prepare
from ..timing import RACE_SAMPLES, Timing, sets_for_cold_l2, time_callable, time_interleaved
from ..verify import verify_config
from .request import TuneProblem
from .worker import ContextLost

if TYPE_CHECKING:
    import torch

#: A candidate slower than this many times the best is dropped after a few samples.
RACE_FACTOR = 2.0
MIN_SAMPLES = 7
#: Memory in use by others, or a clock this far below the maximum while idle work runs, is worth a word.
BUSY_BYTES = 1 << 30

#: Kernels that stay loaded between two quick requests.
MAX_LOADED = 24

Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a config is timed: GPU milliseconds in the search and in a final, the samples of a final at least, the
    milliseconds that a finalist runs before each, and how many times slower than the fastest one may be before it is
    left."""

    search_ms: float
    final_ms: float
    final_samples: int
    final_settle_ms: float
    final_race: float


#: "standard" for one problem, "quick" where hundreds of buckets share a run.
EFFORTS = {
    "standard": Effort(60.0, 60.0, 2 * MIN_SAMPLES, 25.0, math.inf),
    "quick": Effort(25.0, 20.0, MIN_SAMPLES, 20.0, 1.15),
}


class Inputs:
    """Rotating sets of (q, k, v, o) for one shape: enough of them that each call meets a cold L2."""

    def __init__(self, problem: TuneProblem, shape: ProblemShape, device: torch.device) -> None:
        import torch

        from ..tensors import torch_dtype

        self.shape = shape
        self.problem = problem.traced(nheads=shape.nheads, device=str(device))
        spec = self.problem.spec
        dtype = torch_dtype(spec.dtype)
        sizes = (
            (shape.batch, shape.seqlen_q, shape.nheads, spec.head_dim),
            (shape.batch, shape.seqlen_k, shape.nheads_k, spec.head_dim),
            (shape.batch, shape.seqlen_k, shape.nheads_k, spec.head_dim_v),
            (shape.batch, shape.seqlen_q, shape.nheads, spec.head_dim_v),
        )
        bytes_per_set = 2 * sum(batch * length * heads * dim for batch, length, heads, dim in sizes)
        info = driver.device_info(device.index or 0)
        free, _ = torch.cuda.mem_get_info(device)
        if bytes_per_set > free:
            raise ConfigError(
                f"One input set of {shape} needs {bytes_per_set} bytes, but the GPU has {free} free. Lower --batch."
            )
        count = sets_for_cold_l2(bytes_per_set, info.l2_bytes, free_bytes=free)
        generator = torch.Generator(device).manual_seed(0)
        # Normal data: zeros would let the GPU clock higher than real inputs do.
        self.sets = [
            [torch.randn(size, generator=generator, device=device, dtype=dtype) for size in sizes[:3]]
            + [torch.empty(sizes[3], device=device, dtype=dtype)]
            for _ in range(count)
        ]


class GpuWorker:
    """Answers "identity", "time", "verify" and "final" for one problem on one device."""

    def __init__(self, problem: TuneProblem, family: Family, device: torch.device) -> None:
        self._problem = problem
        self._family = family
        self._device = device
        self._backend = CudaBackend()
        self._inputs: Inputs | None = None

    def identity(self) -> dict[str, Any]:
        import torch

        index = self._device.index or 0
        info = driver.device_info(index)
        device = {
            "name": info.name,
            "cc": list(info.cc),
            "sm_count": info.sm_count,
            "memory_bytes": info.memory_bytes,
            "l2_bytes": info.l2_bytes,
            "sm_clock_khz": info.sm_clock_khz,
            "memory_clock_khz": info.memory_clock_khz,
        }
        free, total = torch.cuda.mem_get_info(self._device)
        used = total - free
        load = ""
        if used > BUSY_BYTES + torch.cuda.memory_reserved(self._device):
            load = f"other work holds {used / 2**30:.1f} GiB of this GPU; times may be too long"
        return {"device": device, "driver": info.driver_version, "load": load}

    def time(
        self, config: KernelConfig, shape: ProblemShape, best_ms: float | None, effort: str = "standard"
    ) -> dict[str, Any]:
        """The config's time; stopped after `RACE_SAMPLES` where it is `RACE_FACTOR` times slower than `best_ms`."""
        inputs = self._inputs_for(shape)
        race_ms = math.inf if best_ms is None else RACE_FACTOR * best_ms
        timing = time_callable(
            self._call(inputs, config),
            sets=len(inputs.sets),
            budget_ms=EFFORTS[effort].search_ms,
            min_samples=MIN_SAMPLES,
            race_ms=race_ms,
        )
        return _timed(timing, raced=timing.median_ms > race_ms)

    def verify(self, config: KernelConfig) -> dict[str, Any]:
        verdict = verify_config(
            self._problem.traced(device=str(self._device)),
            config,
            self._backend.arch(self._device.index or 0),
            device=str(self._device),
        )
        return {"outcome": "ok" if verdict.ok else "wrong", "message": "" if verdict.ok else str(verdict)}

    def final(
        self,
        configs: Sequence[KernelConfig],
        shape: ProblemShape,
        *,
        effort: str = "standard",
        keep: Sequence[int] = (),
        baseline: bool = True,
    ) -> dict[str, Any]:
        """Interleaved times of `configs` and, if `baseline`, of torch's back ends, where those can do the problem.

        Those at the positions `keep` stay to the end, however slow.
        """
        inputs = self._inputs_for(shape)
        sets = len(inputs.sets)
        calls: dict[str, Call] = {str(i): self._call(inputs, config) for i, config in enumerate(configs)}
        rivals = torch_calls(self._problem, inputs) if baseline else {}
        times = time_interleaved(
            {**calls, **rivals},
            sets=sets,
            budget_ms=EFFORTS[effort].final_ms,
            min_samples=EFFORTS[effort].final_samples,
            settle_ms=EFFORTS[effort].final_settle_ms,
            race=EFFORTS[effort].final_race,
            keep=[str(i) for i in keep],
        )
        rival_times = {name: times[name].median_ms for name in rivals}
        fastest = min(rival_times, key=lambda name: rival_times[name], default=None)
        found = [times[str(i)] for i in range(len(configs))]
        return {
            "times": [_timed(timing, raced=timing.samples <= RACE_SAMPLES) for timing in found],
            "baseline": [fastest, rival_times[fastest]] if fastest is not None else None,
            "note": "",
        }

    def tidy(self, effort: str) -> None:
        """Unloads what need not stay: everything, or where requests are quick only what has become too much."""
        if effort != "quick" or self._backend.loaded > MAX_LOADED:
            self.clear()

    def clear(self) -> None:
        """Unloads every kernel, so that a long search stays small. Graphs that hold one go first."""
        import torch

        torch.cuda.synchronize()
        gc.collect()
        self._backend.unload()

    def _inputs_for(self, shape: ProblemShape) -> Inputs:
        if self._inputs is None or self._inputs.shape != shape:
            self._inputs = None  # the old sets go before the new ones come
            self._inputs = Inputs(self._problem, shape, self._device)
        return self._inputs

    def _call(self, inputs: Inputs, config: KernelConfig) -> Call:
        import torch

        problem, sets, device = inputs.problem, inputs.sets, self._device
        q, k, v, _ = sets[0]
        plan = prepare(
            problem,
            config,
            family=self._family,
            shape=inputs.shape,
            q=q,
            k=k,
            v=v,
            softmax_scale=problem.spec.head_dim**-0.5,
            backend=self._backend,
        )
        addresses = [(q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()) for q, k, v, o in sets]
        tables = problem.tables

        def call(turn: int) -> None:
            stream = torch.cuda.current_stream(device).cuda_stream
            q_address, k_address, v_address, o_address = addresses[turn]
            plan.launch(q_address, k_address, v_address, o_address, 0, tables, stream)

        return call


def torch_calls(problem: TuneProblem, inputs: Inputs) -> dict[str, Call]:
    """torch's back ends on this problem, those that can do it; empty where torch has no equal call."""
    import torch

    from ..bench import SDPA, BenchCase, InputSets, default_factories

    if problem.alibi or problem.mask_mod or problem.score_mod:
        return {}
    case = BenchCase(
        inputs.shape,
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.causal,
        problem.window_size,
        problem.softcap,
    )
    calls: dict[str, Call] = {}
    data: InputSets | None = None
    for name in SDPA:
        try:
            data = data or InputSets(case, len(inputs.sets), inputs.sets[0][0].device)
            call = default_factories()[name](case, data)
            call(0)
            torch.cuda.synchronize()
        except (FlashsmithError, RuntimeError):  # this back end cannot do it, or memory is short
            continue
        calls[name] = call
    return calls


def _timed(timing: Timing, *, raced: bool = False) -> dict[str, Any]:
    return {
        "outcome": "ok",
        "ms_median": round(timing.median_ms, 6),
        "ms_spread": round(timing.spread, 5),
        "n": timing.samples,
        "raced": raced,
    }


@contextmanager
def sticky_errors_end() -> Iterator[None]:
    """Turns a CUDA error that outlives its call into ContextLost: this process can do no more right work."""
    import torch

    try:
        yield
        torch.cuda.synchronize()
    except (LaunchError, RuntimeError) as error:
        try:
            torch.cuda.synchronize()
        except RuntimeError as later:
            raise ContextLost(f"{error}; afterwards: {later}") from None
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"{type(error).__name__}: {error}") from None


def bench_handler(device: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The child's function.

    Messages: {"do": ..., "problem", "family", "effort", and as `do` needs "config" or "configs", "shape", "best_ms",
    "keep", "baseline"}. One problem is held at a time.
    """
    import torch

    the_device = torch.device(device)
    torch.cuda.set_device(the_device)
    gc.freeze()  # the modules loaded so far are no garbage: later collections need not look at them
    held: dict[str, Any] = {"key": None, "worker": None}

    def worker_of(message: Mapping[str, Any]) -> GpuWorker:
        key = (message["problem"], message["family"])
        if held["key"] != key:
            if held["worker"] is not None:
                held["worker"].clear()
            held.update(key=key, worker=None)  # the old one's inputs go before the new one's come
            problem = TuneProblem.from_dict(message["problem"])
            held["worker"] = GpuWorker(problem, family_named(message["family"]), the_device)
        worker: GpuWorker = held["worker"]
        return worker

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        with sticky_errors_end():
            worker = worker_of(message)
            try:
                return _answer(worker, message)
            finally:
                worker.tidy(message["effort"])

    return handle


def _answer(worker: GpuWorker, message: Mapping[str, Any]) -> dict[str, Any]:
    config_of = family_named(message["family"]).config_type.from_dict
    if message["do"] == "identity":
        return worker.identity()
    if message["do"] == "verify":
        return worker.verify(config_of(message["config"]))
    shape = ProblemShape.from_dict(message["shape"])
    if message["do"] == "time":
        return worker.time(config_of(message["config"]), shape, message["best_ms"], message["effort"])
    return worker.final(
        [config_of(config) for config in message["configs"]],
        shape,
        effort=message["effort"],
        keep=message["keep"],
        baseline=message["baseline"],
    )
