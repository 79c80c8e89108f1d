"""The Hopper forward's cost model against what an H200 measured: order within a case, and what its favourites cost."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.families import FAMILIES
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.tune.gpus import gpu_model
from flashsmith.runtime.tune.replay import rank_correlation
from flashsmith.runtime.tune.request import TuneProblem
from flashsmith.runtime.tune.seeds import rank_by_model
from flashsmith.runtime.tune.tiles import TileCounter

FAMILY = FAMILIES["forward_sm90"]
SM90 = ARCHS["sm_90"]
MEASURED = json.loads((Path(__file__).parent / "measured" / "h200-forward-sm90.json").read_text())
GPU = gpu_model(SM90, MEASURED["gpu"])


@dataclass(frozen=True)
class Case:
    """One call: measured and estimated times, each relative to the case's geometric mean; the model's order."""

    present: bool
    measured: dict
    guessed: dict
    order: list


def relative(times: dict) -> dict:
    mean = statistics.geometric_mean(times.values())
    return {config: time / mean for config, time in times.items()}


def case_of(row) -> Case:
    head_dim_v = 0 if row["head_dim_v"] == row["head_dim"] else row["head_dim_v"]
    problem = TuneProblem(head_dim=row["head_dim"], head_dim_v=head_dim_v, causal=row["causal"])
    spec = problem.traced().spec
    shape = ProblemShape(row["batch"], row["seqlen"], row["seqlen"], row["nheads"], row["nheads_k"])
    default = FAMILY.default_config(spec, SM90)
    times = {}
    for *values, rate in row["configs"]:
        config = replace(default, **dict(zip(MEASURED["config_fields"], values, strict=True)))
        FAMILY.check(spec, config, SM90)
        times[config] = 1 / rate
    ranked = rank_by_model(FAMILY, spec, times, arch=SM90, gpu=GPU, shape=shape, tiles=TileCounter(problem, shape))
    return Case(
        present=row["kernel"] == "present",
        measured=relative(times),
        guessed=relative({config: guess.ms for config, guess in ranked}),
        order=[config for config, _ in ranked],
    )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [case_of(row) for row in MEASURED["cases"]]


def error(case: Case) -> float:
    """The root mean square of log(guessed / measured)."""
    return math.sqrt(statistics.fmean(math.log(case.guessed[c] / case.measured[c]) ** 2 for c in case.measured))


def regret(case: Case, count: int) -> float:
    """How far the fastest of the model's first `count` is behind the case's fastest."""
    return min(case.measured[config] for config in case.order[:count]) / min(case.measured.values()) - 1


def test_every_config_of_the_data_is_valid_and_estimated(cases):
    assert sum(case.present for case in cases) == 30 and len(cases) > 60
    assert all(set(case.order) == set(case.measured) for case in cases)


@pytest.mark.parametrize(("present", "most"), [(True, 0.0125), (False, 0.025)])
def test_relative_times_are_close_to_the_measured_ones(cases, present, most, record_property):
    found = statistics.fmean(error(case) for case in cases if case.present == present)
    record_property("error", found)
    assert found < most


@pytest.mark.parametrize(("present", "all_cases", "each_case"), [(True, 0.85, 0.5), (False, 0.83, 0.8)])
def test_the_order_is_the_measured_one(cases, present, all_cases, each_case, record_property):
    """Of the present kernel's configs, 2 to 4 a case, many are within 1 % of each other."""
    of_kind = [case for case in cases if case.present == present]
    pooled = rank_correlation(
        {(i, config): time for i, case in enumerate(of_kind) for config, time in case.guessed.items()},
        {(i, config): time for i, case in enumerate(of_kind) for config, time in case.measured.items()},
    )
    each = [rank_correlation(case.guessed, case.measured) for case in of_kind if len(case.measured) > 2]
    record_property("rank correlation of all cases, mean of each", (pooled, statistics.fmean(each)))
    assert pooled > all_cases and statistics.fmean(each) > each_case


@pytest.mark.parametrize(("count", "mean", "most"), [(1, 0.005, 0.07), (2, 0.0015, 0.045), (4, 0.0001, 0.001)])
def test_the_favourites_are_among_the_fastest(cases, count, mean, most, record_property):
    regrets = [regret(case, count) for case in cases]
    record_property(f"regret of the first {count}", (statistics.fmean(regrets), max(regrets)))
    assert statistics.fmean(regrets) < mean and max(regrets) < most
