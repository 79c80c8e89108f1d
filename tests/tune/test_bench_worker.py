"""The GPU worker's own logic, with a recording back end in place of a GPU; `test_gpu_tune` runs the real one."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers_tune import ARCH, DEFAULT, FAMILY, SPACE

from flashsmith.generator.errors import ConfigError, LaunchError
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.driver import DeviceInfo
from flashsmith.runtime.emulator.forward import RecordingBackend
from flashsmith.runtime.timing import RACE_SAMPLES, Timing
from flashsmith.runtime.tune import bench_worker
from flashsmith.runtime.tune.bench_client import WorkerBench
from flashsmith.runtime.tune.bench_worker import GpuWorker, sticky_errors_end
from flashsmith.runtime.tune.request import TuneProblem, TuneRequest
from flashsmith.runtime.tune.worker import ContextLost

INFO = DeviceInfo("Test GPU", (9, 0), 132, 1 << 30, 1 << 20, 1_500_000, 1_000_000, "580.1")
SHAPE = ProblemShape(2, 100, 130, 4, 2)


@pytest.fixture
def worker(monkeypatch):
    """A worker on CPU tensors: launches are recorded, timings invented from how often a config was launched."""
    monkeypatch.setattr(bench_worker.driver, "device_info", lambda index: INFO)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    made = GpuWorker(TuneProblem(head_dim=64, alibi=True), FAMILY, torch.device("cpu"))
    made._backend = RecordingBackend(ARCH)
    return made


def test_it_names_the_gpu_and_its_driver(worker):
    identity = worker.identity()
    assert identity["device"]["name"] == "Test GPU"
    assert identity["driver"] == "580.1"
    assert identity["load"] == ""


def test_it_notices_that_others_use_the_gpu(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 40 << 30))
    assert "39.0 GiB" in worker.identity()["load"]


def test_a_config_is_launched_over_rotating_inputs(worker, monkeypatch):
    seen = {}

    def time_callable(call, *, sets, **more):
        seen["sets"] = sets
        for turn in range(sets):
            call(turn)
        return Timing(1.5, 0.01, 20, "graph")

    monkeypatch.setattr(bench_worker, "time_callable", time_callable)
    reply = worker.time(DEFAULT, SHAPE, None)
    assert reply == {"outcome": "ok", "ms_median": 1.5, "ms_spread": 0.01, "n": 20, "raced": False}
    launched = worker._backend.launched
    assert len(launched) == seen["sets"] > 3
    assert len({one.arguments for one in launched}) == len(launched)
    expected = FAMILY.geometry(worker._inputs.problem.spec, DEFAULT, SHAPE, sm_count=132).grid[0]
    assert all(one.grid == expected for one in launched)


def test_a_slow_config_is_dropped_after_a_few_samples(worker, monkeypatch):
    calls = []

    def time_callable(call, **options):
        calls.append(options)
        return Timing(2.5, 0.0, RACE_SAMPLES, "graph")

    monkeypatch.setattr(bench_worker, "time_callable", time_callable)
    assert worker.time(DEFAULT, SHAPE, 1.0)["raced"]
    assert not worker.time(DEFAULT, SHAPE, 1.3)["raced"]
    assert not worker.time(DEFAULT, SHAPE, None)["raced"]
    assert [options["race_ms"] for options in calls] == [2.0, 2.6, math.inf]


def test_a_quick_final_leaves_the_slow_but_never_the_default(worker, monkeypatch):
    seen = {}

    def time_interleaved(calls, **options):
        seen.update(options)
        return {name: Timing(1.0, 0.0, 3 + 6 * (name != "1"), "graph") for name in calls}

    monkeypatch.setattr(bench_worker, "time_interleaved", time_interleaved)
    reply = worker.final(list(SPACE[:3]), SHAPE, effort="quick", keep=[2], baseline=False)
    assert [row["raced"] for row in reply["times"]] == [False, True, False]
    assert seen["keep"] == ["2"] and 1 < seen["race"] < 1.5
    assert seen["budget_ms"] < bench_worker.EFFORTS["standard"].final_ms / 2
    worker.final(list(SPACE[:3]), SHAPE)
    assert seen["race"] == math.inf


def test_quick_requests_leave_kernels_loaded_up_to_a_limit(worker, monkeypatch):
    cleared = []
    monkeypatch.setattr(worker, "clear", lambda: cleared.append(worker._backend.loaded))
    for count in (0, bench_worker.MAX_LOADED, bench_worker.MAX_LOADED + 1):
        worker._backend.loaded = count
        worker.tidy("quick")
    worker._backend.loaded = 1
    worker.tidy("standard")
    assert cleared == [bench_worker.MAX_LOADED + 1, 1]


def test_one_child_serves_many_problems_and_holds_one_at_a_time(monkeypatch):
    made = []

    class Fake:
        def __init__(self, problem, family, device):
            self.problem, self.cleared = problem, 0
            made.append(self)

        def verify(self, config):
            return {"outcome": "ok", "message": str(self.problem.head_dim)}

        def time(self, config, shape, best_ms, effort):
            return {"outcome": f"{config == DEFAULT} {shape} {best_ms} {effort}"}

        def final(self, configs, shape, *, effort, keep, baseline):
            return {"times": [{"outcome": f"{shape} {effort} {keep} {baseline}"} for _ in configs]}

        def tidy(self, effort):
            pass

        def clear(self):
            self.cleared += 1

    monkeypatch.setattr(bench_worker, "GpuWorker", Fake)
    monkeypatch.setattr(bench_worker.gc, "freeze", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    handle = bench_worker.bench_handler("cuda:0")

    class Child:
        def request(self, message, *, timeout):
            return handle(json.loads(json.dumps(message)))

    requests = {dim: TuneRequest(problem=TuneProblem(head_dim=dim), shapes=(SHAPE,), arch=ARCH) for dim in (64, 128)}
    first = WorkerBench(requests[64], FAMILY, effort="quick", worker=Child())
    benches = {64: first, 128: first.of(requests[128], FAMILY)}
    assert [benches[dim].verify(DEFAULT).message for dim in (64, 64, 128, 64)] == ["64", "64", "128", "64"]
    assert first.time(DEFAULT, SHAPE, best_ms=1.5).outcome == f"True {SHAPE} 1.5 quick"
    final = first.final(list(SPACE[:2]), SHAPE, keep=[SPACE[1]], baseline=False)
    assert [timed.outcome for timed in final.times.values()] == [f"{SHAPE} quick [1] False"] * 2
    assert [worker.problem.head_dim for worker in made] == [64, 128, 64]
    assert [worker.cleared for worker in made] == [1, 1, 0]


def test_the_final_times_all_in_turns(worker, monkeypatch):
    def time_interleaved(calls, **options):
        return {name: Timing(float(number + 1), 0.0, 9, "graph") for number, name in enumerate(calls)}

    monkeypatch.setattr(bench_worker, "time_interleaved", time_interleaved)
    reply = worker.final(list(SPACE[:3]), SHAPE)
    assert [row["ms_median"] for row in reply["times"]] == [1.0, 2.0, 3.0]
    assert reply["baseline"] is None  # torch has no ALiBi


def test_torch_takes_part_with_the_back_ends_that_can(worker, monkeypatch):
    from flashsmith.runtime import bench

    def cannot(case, data):
        raise RuntimeError("not on this machine")

    turns = []
    factories = {"sdpa-flash": lambda case, data: turns.append, "sdpa-cudnn": cannot, "sdpa-efficient": cannot}
    monkeypatch.setattr(bench, "default_factories", lambda: factories)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    worker._problem = TuneProblem(head_dim=64)
    assert list(bench_worker.torch_calls(worker._problem, worker._inputs_for(SHAPE))) == ["sdpa-flash"]
    assert turns == [0]


def test_a_call_too_large_for_the_gpu_is_an_error_of_the_request(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    with pytest.raises(ConfigError, match="Lower --batch"):
        worker.time(DEFAULT, SHAPE, None)


def test_an_error_that_outlives_its_call_ends_the_process(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(ContextLost, match="illegal memory access"), sticky_errors_end():
        pass


def test_an_error_that_does_not_is_a_launch_failure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(LaunchError, match="out of memory"), sticky_errors_end():
        raise RuntimeError("CUDA out of memory")
    with pytest.raises(LaunchError, match="refused"), sticky_errors_end():
        raise LaunchError("refused")


def bench_with(handler):
    request = TuneRequest(
        problem=TuneProblem(head_dim=64), shapes=(SHAPE,), arch=ARCH, gpu="cuda:0", trial_seconds=1.0
    )  # fmt: skip
    return WorkerBench(request, FAMILY, handler=f"helpers_tune:{handler}")


def test_the_client_classes_what_a_candidate_does():
    bench = bench_with("bench_handler")
    try:
        assert bench.identity().device.cc == (9, 0)
        good, wild, hung, refused, lost = SPACE[:5]
        assert bench.time(good, SHAPE, best_ms=None).ms_median == 1.0
        assert bench.time(wild, SHAPE, best_ms=None).outcome == "crash"
        assert bench.time(hung, SHAPE, best_ms=None).outcome == "timeout"
        assert bench.time(refused, SHAPE, best_ms=None).outcome == "launch"
        assert bench.time(lost, SHAPE, best_ms=None).outcome == "crash"
        assert bench.verify(wild).outcome == "crash"
        assert bench.time(good, SHAPE, best_ms=None).outcome == "ok"
        final = bench.final([good, refused], SHAPE)
        assert final.times == {} and "no interleaved final" in final.note
        final = bench.final([good], SHAPE)
        assert final.times[good].ms_median == 1.0
        assert final.baseline == ("sdpa-flash", 2.0)
    finally:
        bench.close()


def test_crashing_candidates_leave_nothing_open():
    import gc
    import os

    bench = bench_with("bench_handler")
    try:
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(12):
            assert bench.time(SPACE[1], SHAPE, best_ms=None).outcome == "crash"
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= files + 4
    finally:
        bench.close()
