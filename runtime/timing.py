"""The one timing protocol: warm up, cold L2 by rotating input sets, medians with spread, clocks noted.

A call under `GRAPH_MS` is timed as a CUDA graph of many calls, so that Python's launch cost stays out; a longer one by
a pair of CUDA events. `calls` take the index of an input set and return anything. Times are milliseconds.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..generator.errors import TuneError

#: Takes the index of an input set; enqueues the work on the current stream.
Call = Callable[[int], object]

GRAPH_MS = 1.0
#: A graph holds so many calls that one replay takes about this long.
REPLAY_MS = 2.0
MAX_CALLS_PER_GRAPH = 512
#: Input sets that rotate hold this many times the L2 cache together.
L2_FACTOR = 3
MIN_SAMPLES = 3
#: Rounds after which a race drops the slow.
RACE_SAMPLES = 3
#: Clock cycles of the spin kernel in front of events: about 100 us.
LEAD_CYCLES = 200_000


@dataclass(frozen=True, slots=True)
class Timing:
    """`median_ms` of `samples` samples; `spread` is (quartile 3 - quartile 1) / median.

    `method` is "graph" or "events". `sm_clock_mhz` is the SM clock right after the samples, 0 where unknown.
    """

    median_ms: float
    spread: float
    samples: int
    method: str
    sm_clock_mhz: int = 0

    def to_dict(self) -> dict[str, float | int | str]:
        return {
            "median_ms": self.median_ms,
            "spread": self.spread,
            "samples": self.samples,
            "method": self.method,
            "sm_clock_mhz": self.sm_clock_mhz,
        }


class Stopwatch(Protocol):
    """What measures. The real one is `CudaStopwatch`; tests bring their own."""

    def warm_up(self, call: Call, sets: int) -> float:
        """Runs `call` once on each set and then a few times; the milliseconds of one call, roughly."""
        ...

    def sampler(self, call: Call, sets: int, rough_ms: float) -> tuple[Callable[[], float], str]:
        """A function that returns one sample in ms per call, and its method."""
        ...

    def sm_clock_mhz(self) -> int: ...


def time_callable(
    call: Call,
    *,
    sets: int = 1,
    budget_ms: float = 200.0,
    min_samples: int = 7,
    max_samples: int = 100,
    race_ms: float = math.inf,
    stopwatch: Stopwatch | None = None,
) -> Timing:
    """The time of one call. See `time_interleaved`, which this is for one name.

    One slower than `race_ms` is left after `RACE_SAMPLES` samples.
    """
    return time_interleaved(
        {"call": call},
        sets=sets,
        budget_ms=budget_ms,
        min_samples=min_samples,
        max_samples=max_samples,
        race_ms=race_ms,
        stopwatch=stopwatch,
    )["call"]


def time_interleaved(
    calls: Mapping[str, Call],
    *,
    sets: int | Mapping[str, int] = 1,
    budget_ms: float = 200.0,
    min_samples: int = 7,
    max_samples: int = 100,
    race: float = math.inf,
    race_ms: float = math.inf,
    keep: Collection[str] = (),
    settle_ms: float = 0.0,
    seed: int = 0,
    stopwatch: Stopwatch | None = None,
) -> dict[str, Timing]:
    """The time of one call of each name, measured in turns: every round samples all of them once, in shuffled order.

    So a drift of clocks or temperature meets all alike. `sets` is how many input sets `call(i)` knows (0 <= i < sets),
    for all or by name. Samples are taken until each name has had `budget_ms`, at least `min_samples` and at most
    `max_samples`. After `RACE_SAMPLES` rounds a name that takes over `race` times the fastest one's median, or over
    `race_ms`, takes part no longer; those in `keep` always do. Raises TuneError where a name gives no positive samples.

    Before each sample the name runs alone for `settle_ms`: on a card that its power limits, each kernel then has the
    clock that its own power leaves, as in long use, where turns without it share one clock.
    """
    watch = stopwatch if stopwatch is not None else CudaStopwatch()
    samplers: dict[str, Callable[[], float]] = {}
    methods: dict[str, str] = {}
    rounds = min_samples
    settling: dict[str, int] = {}
    for name, call in calls.items():
        count = sets if isinstance(sets, int) else sets[name]
        rough_ms = watch.warm_up(call, count)
        samplers[name], methods[name] = watch.sampler(call, count, rough_ms)
        sample_ms = max(rough_ms, REPLAY_MS if methods[name] == "graph" else 0.0, 1e-3)
        rounds = max(rounds, min(max_samples, int(budget_ms / sample_ms)))
        settling[name] = math.ceil(settle_ms / sample_ms)
    order = list(calls)
    shuffle = random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        if turn == RACE_SAMPLES:
            order = _still_racing(samples, race, race_ms, keep)
        shuffle(order)
        for name in order:
            for _ in range(settling[name]):
                samplers[name]()
            samples[name].append(samplers[name]())
    clock = watch.sm_clock_mhz()
    return {name: summarise(samples[name], methods[name], sm_clock_mhz=clock, name=name) for name in calls}


def _still_racing(
    samples: Mapping[str, Sequence[float]], race: float, race_ms: float, keep: Collection[str]
) -> list[str]:
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    limit = min(race_ms, race * min((ms for ms in medians.values() if ms > 0), default=math.inf))
    return [name for name, ms in medians.items() if ms <= limit or name in keep]


def summarise(samples: Sequence[float], method: str, *, sm_clock_mhz: int = 0, name: str = "call") -> Timing:
    """Median and spread of the positive, finite samples. Raises TuneError where fewer than 3, or half, are."""
    good = sorted(s for s in samples if math.isfinite(s) and s > 0)
    if len(good) < MIN_SAMPLES or 2 * len(good) < len(samples):
        raise TuneError(
            f"A timing needs at least {MIN_SAMPLES} positive samples, and half of all; {name} gave {len(good)} of"
            f" {len(samples)}. The work may not have run at all, or another process holds the GPU: time it again."
        )
    median = statistics.median(good)
    quartiles = statistics.quantiles(good, n=4, method="inclusive")
    return Timing(median, (quartiles[2] - quartiles[0]) / median, len(good), method, sm_clock_mhz)


def sets_for_cold_l2(bytes_per_set: int, l2_bytes: int, *, free_bytes: int, most: int = 64) -> int:
    """How many input sets keep the L2 cache cold when they rotate: `L2_FACTOR` times its size, within free memory."""
    if bytes_per_set <= 0:
        return 1
    wanted = -(-L2_FACTOR * max(l2_bytes, 1) // bytes_per_set) + 1
    return max(1, min(wanted, most, free_bytes // (2 * bytes_per_set)))


class CudaStopwatch:
    """CUDA events and graphs on torch's current stream."""

    def __init__(self, *, warm_up_ms: float = 5.0) -> None:
        self.warm_up_ms = warm_up_ms

    def warm_up(self, call: Call, sets: int) -> float:
        import torch

        for i in range(sets):
            call(i)
        torch.cuda.synchronize()
        rough = self._events(call, range(2), sets)
        count = max(1, min(200, int(self.warm_up_ms / max(rough, 1e-3))))
        return self._events(call, range(count), sets)

    def sampler(self, call: Call, sets: int, rough_ms: float) -> tuple[Callable[[], float], str]:
        if rough_ms >= GRAPH_MS:
            turn = iter(range(1 << 62))
            return lambda: self._events(call, (next(turn),), sets), "events"
        count = min(MAX_CALLS_PER_GRAPH, max(sets, int(REPLAY_MS / max(rough_ms, 2e-3))))
        count = -(-count // sets) * sets  # each set equally often
        return self._graph(call, sets, count), "graph"

    def sm_clock_mhz(self) -> int:
        """The SM clock now, through NVML; 0 where pynvml or NVML is missing."""
        import torch

        try:
            return int(torch.cuda.clock_rate())
        except Exception:  # noqa: BLE001 (pynvml raises classes of its own; a clock is a note, not a result)
            return 0

    def _events(self, call: Call, turns: Sequence[int] | range, sets: int) -> float:
        begin, end = _event_pair()
        # The GPU is kept busy while Python enqueues, so that the events enclose the work alone.
        _spin(LEAD_CYCLES)
        begin.record()
        for turn in turns:
            call(turn % sets)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / len(turns)

    def _graph(self, call: Call, sets: int, count: int) -> Callable[[], float]:
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                call(i % sets)  # its outputs go back to the graph's pool: memory stays that of one call
        graph.replay()
        torch.cuda.synchronize()

        def sample() -> float:
            begin, end = _event_pair()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / count

        return sample


def _event_pair() -> tuple[Any, Any]:
    from torch import cuda

    event: Any = cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def _spin(cycles: int) -> None:
    """Keeps the GPU busy for `cycles` clock cycles, where this torch can."""
    from torch import cuda

    sleep: Any = getattr(cuda, "_sleep", None)
    if sleep is not None:
        sleep(cycles)
