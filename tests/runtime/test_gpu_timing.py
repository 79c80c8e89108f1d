"""The real stopwatch, and the comparison with torch, on a GPU."""

from __future__ import annotations

import pytest
import torch

from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.bench import BenchCase, bench
from flashsmith.runtime.timing import time_callable, time_interleaved

pytestmark = pytest.mark.gpu


def test_a_known_work_takes_its_time():
    cycles = 2_000_000

    def spin(i):
        torch.cuda._sleep(cycles)

    long = time_callable(spin, budget_ms=50, max_samples=20)
    assert long.method in ("graph", "events") and 0.3 < long.median_ms < 20 and long.spread < 0.5
    short = time_callable(lambda i: torch.cuda._sleep(cycles // 50), budget_ms=20)
    assert short.method == "graph" and 0.01 < short.median_ms / long.median_ms < 0.06


def test_a_graph_and_events_agree():
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = time_interleaved({"small": lambda i: x @ x, "large": lambda i: y @ y}, budget_ms=60)
    assert times["small"].method == "graph" and times["large"].method == "events"
    assert 20 < times["large"].median_ms / times["small"].median_ms < 200  # 64 times the work
    assert all(timing.spread < 0.3 for timing in times.values())


def test_the_bench_gives_a_row_a_provider():
    case = BenchCase(ProblemShape(2, 1024, 1024, 8, 8), "fp16", 64, causal=True)
    result = bench([case], budget_ms=30)
    rows = {row.provider: row for row in result.rows}
    assert rows["flashsmith"].timing is not None and "(" in rows["flashsmith"].used
    assert rows["sdpa-flash"].timing is not None, rows["sdpa-flash"].note
    assert all(row.tflops > 1 for row in result.rows if row.timing is not None)
    assert 0.1 < result.ratio(case, "sdpa-flash") < 10
    assert result.machine["gpu"] == torch.cuda.get_device_name()
