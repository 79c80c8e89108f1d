"""Tuning on a real GPU: short, but whole."""

from __future__ import annotations

import pytest

from flashsmith.generator.arch import arch_from_cc
from flashsmith.runtime import driver
from flashsmith.runtime.store import forget, resolve
from flashsmith.runtime.tune.campaign import tune_many
from flashsmith.runtime.tune.request import TuneProblem, TuneRequest, usual_shape
from flashsmith.runtime.tune.study import tune

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", str(tmp_path / "config"))
    forget()
    yield
    forget()


def test_a_measured_verified_winner_is_stored_and_used():
    info = driver.device_info(0)
    arch = arch_from_cc(info.cc)
    problem = TuneProblem(head_dim=64, causal=True)
    shapes = (usual_shape(1024, head_dim=64), usual_shape(4096, head_dim=64))
    result = tune(TuneRequest(problem=problem, shapes=shapes, arch=arch, gpu="cuda:0", trials=10, budget_s=60))
    assert result.status == "measured"
    assert result.outcomes["ok"] >= 20
    for bucket in result.buckets:
        record = bucket.record
        assert record.verified == "cuda"
        assert record.time.n >= 14
        assert record.time.median_ms <= 1.01 * record.default_ms
        assert record.baseline is not None
        found = resolve(problem.traced().spec, arch, info.name, bucket.shape)
        assert (found.config, found.source, found.stale) == (bucket.config, "user", False)
    short, long = (bucket.record.time.median_ms for bucket in result.buckets)
    assert long > short


def test_many_specs_share_one_run(tmp_path):
    info = driver.device_info(0)
    arch = arch_from_cc(info.cc)
    shapes = tuple(usual_shape(n, head_dim=64, gqa_ratio=ratio) for ratio in (1, 4) for n in (512, 2048, 8192))
    requests = [
        TuneRequest(problem=problem, shapes=shapes, arch=arch, gpu="cuda:0", root=tmp_path / "out")
        for problem in (TuneProblem(head_dim=64), TuneProblem(head_dim=64, causal=True, window_size=(1024, 0)))
    ]
    result = tune_many(requests, budget_s=90.0, explore=8)
    assert not result.failed and not result.unreached
    assert len(result.buckets) == 12
    for bucket in result.buckets:
        record = bucket.record
        assert record.verified == "cuda" and record.time.n >= 7
        assert record.time.median_ms <= 1.01 * record.default_ms
        assert "waves" in record.why
        spec = requests[0].problem.traced().spec if "mask" not in record.problem else requests[1].problem.traced().spec
        found = resolve(spec, arch, info.name, bucket.shape, user=tmp_path / "out")
        assert (found.config, found.source) == (bucket.config, "user")
    # Two explored sizes a spec cost a search each, the rest a comparison: well below a minute in all, after compiling.
    assert sum(bucket.seconds for bucket in result.buckets) < 60


def test_alibi_and_a_window_are_timed_with_their_tables():
    info = driver.device_info(0)
    problem = TuneProblem(head_dim=128, dtype="fp16", window_size=(256, 0), alibi=True)
    request = TuneRequest(
        problem=problem, shapes=(usual_shape(1024, head_dim=128),), arch=arch_from_cc(info.cc), gpu="cuda:0", trials=4
    )
    record = tune(request).buckets[0].record
    assert record.status == "measured"
    assert record.values == {"left": 256}
    assert record.baseline is None
