"""The timing protocol, on a stopwatch that tells what the test wants."""
# pyright: reportArgumentType=false

from __future__ import annotations

import math
import random

import pytest

from flashsmith.generator.errors import TuneError
from flashsmith.runtime.timing import (
    REPLAY_MS,
    Timing,
    sets_for_cold_l2,
    summarise,
    time_callable,
    time_interleaved,
)


class FakeStopwatch:
    """Each call is a function that gives its own time in ms."""

    def __init__(self):
        self.order = []
        self.sets = []

    def warm_up(self, call, sets):
        self.sets.append(sets)
        return call(0)

    def sampler(self, call, sets, rough_ms):
        def sample():
            self.order.append(call)
            return call(0)

        return sample, "graph" if rough_ms < 1 else "events"

    def sm_clock_mhz(self):
        return 1500


def test_the_median_and_the_spread():
    assert summarise([1.0, 2.0, 3.0, 4.0, 5.0], "events") == Timing(3.0, pytest.approx(2 / 3), 5, "events", 0)
    assert summarise([2.0] * 4, "graph", sm_clock_mhz=9).to_dict() == {
        "median_ms": 2.0,
        "spread": 0.0,
        "samples": 4,
        "method": "graph",
        "sm_clock_mhz": 9,
    }


def test_samples_that_are_no_times_are_rejected():
    assert summarise([1.0, 0.0, 2.0, -1.0, 3.0, math.nan], "events").samples == 3
    for bad in ([0.0] * 5, [], [1.0, 2.0], [1.0, 2.0, 3.0, 0.0, 0.0, math.inf, -1.0]):
        with pytest.raises(TuneError, match=r"at least 3 positive samples.*time it again"):
            summarise(bad, "events")


def test_one_call():
    watch = FakeStopwatch()
    timing = time_callable(lambda i: 0.25, sets=5, budget_ms=20, stopwatch=watch)
    assert timing == Timing(0.25, 0.0, int(20 / REPLAY_MS), "graph", 1500)
    assert watch.sets == [5]


def test_samples_follow_the_budget_within_limits():
    def count(ms, **kwargs):
        return time_callable(lambda i: ms, stopwatch=FakeStopwatch(), **kwargs).samples

    assert count(10.0, budget_ms=200) == 20
    assert count(1000.0, budget_ms=200, min_samples=4) == 4
    assert count(1.0, budget_ms=1e6, max_samples=50) == 50


def test_rounds_are_shuffled_and_meet_every_name_equally():
    watch = FakeStopwatch()
    calls = {name: (lambda i, ms=ms: ms) for name, ms in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    times = time_interleaved(calls, budget_ms=30, stopwatch=watch, sets={"a": 1, "b": 2, "c": 3})
    assert {name: timing.median_ms for name, timing in times.items()} == {"a": 1.0, "b": 2.0, "c": 3.0}
    rounds = [tuple(watch.order[i : i + 3]) for i in range(0, len(watch.order), 3)]
    assert all(len(set(turn)) == 3 for turn in rounds) and len(set(rounds)) > 1
    assert watch.sets == [1, 2, 3]


def test_each_name_runs_alone_before_its_sample():
    """A kernel whose own power lowers the clock shows it only where nobody else cools the card in between."""
    heat = {"hot": 0, "cool": 0}

    def call(name, ms):
        def run(i):
            other = "cool" if name == "hot" else "hot"
            heat[name], heat[other] = heat[name] + 1, 0
            return ms * (1.3 if name == "hot" and heat[name] > 5 else 1.0)

        return run

    calls = {"hot": call("hot", 1.0), "cool": call("cool", 1.1)}
    together = time_interleaved(calls, budget_ms=0, stopwatch=FakeStopwatch())
    assert together["hot"].median_ms < together["cool"].median_ms
    alone = time_interleaved(calls, budget_ms=0, settle_ms=20.0, stopwatch=FakeStopwatch())
    assert alone["hot"].median_ms == 1.3 and alone["cool"].median_ms == 1.1
    assert alone["hot"].samples == together["hot"].samples


def test_drift_meets_all_alike():
    """A card that slows down by half during the measurement must not change who is faster."""
    now = [0]

    def call(base):
        def run(i):
            now[0] += 1
            return base * (1 + now[0] / 600) * random.Random(now[0]).uniform(0.97, 1.03)

        return run

    times = time_interleaved(
        {"slow": call(1.05), "fast": call(1.0)}, min_samples=100, max_samples=100, stopwatch=FakeStopwatch()
    )
    assert times["fast"].median_ms < times["slow"].median_ms
    assert times["fast"].spread > 0.05


def test_a_race_leaves_the_slow_after_three_rounds_but_not_those_that_are_kept():
    calls = {name: (lambda i, ms=ms: ms) for name, ms in (("fast", 1.0), ("near", 1.1), ("slow", 1.3), ("kept", 3.0))}
    times = time_interleaved(calls, race=1.15, keep=["kept"], min_samples=9, budget_ms=0, stopwatch=FakeStopwatch())
    assert {name: timing.samples for name, timing in times.items()} == {"fast": 9, "near": 9, "slow": 3, "kept": 9}
    times = time_interleaved(calls, race_ms=0.5, min_samples=9, budget_ms=0, stopwatch=FakeStopwatch())
    assert {timing.samples for timing in times.values()} == {3}


def test_one_call_races_against_a_time_known_before():
    def samples(race_ms):
        watch = FakeStopwatch()
        return time_callable(lambda i: 2.0, race_ms=race_ms, budget_ms=40, stopwatch=watch).samples

    assert samples(1.9) == 3
    assert samples(2.0) == 20


def test_nothing_to_time():
    assert time_interleaved({}, stopwatch=FakeStopwatch()) == {}


def test_input_sets_flush_the_cache_within_memory():
    mib = 1 << 20
    assert sets_for_cold_l2(10 * mib, 50 * mib, free_bytes=1 << 40) == 16
    assert sets_for_cold_l2(200 * mib, 50 * mib, free_bytes=1 << 40) == 2
    assert sets_for_cold_l2(1, 50 * mib, free_bytes=1 << 40) == 64
    assert sets_for_cold_l2(10 * mib, 50 * mib, free_bytes=100 * mib) == 5
    assert sets_for_cold_l2(10 * mib, 50 * mib, free_bytes=0) == 1
    assert sets_for_cold_l2(0, 50 * mib, free_bytes=1 << 40) == 1
