from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import yaml
from helpers_tune import (
    ARCH,
    DEFAULT,
    DEVICE,
    FAMILY,
    SHAPE,
    SPACE,
    SPEC,
    FakeBench,
    FakePool,
    record,
    unit_hash,
    valley_ms,
)

from flashsmith.generator.errors import TuneError
from flashsmith.generator.rendering import render
from flashsmith.runtime.store import forget, save_records
from flashsmith.runtime.tune import study
from flashsmith.runtime.tune.log import read_rows, read_trials
from flashsmith.runtime.tune.request import TuneProblem, TuneRequest

BEST = min(SPACE, key=valley_ms)
BEST_MS = valley_ms(BEST)


@pytest.fixture(autouse=True)
def clean_slate(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", str(tmp_path / "config"))
    forget()
    yield
    forget()


@pytest.fixture
def run(monkeypatch):
    """Runs `tune` on an invented bench and compiler."""

    def tune(bench, *, pool=None, progress=None, **changes):
        monkeypatch.setattr(study, "_open_pool", lambda *a: pool or FakePool())
        values = {"problem": TuneProblem(head_dim=64), "shapes": (SHAPE,), "arch": ARCH, "trials": 40}
        values |= {"family": FAMILY.name, **changes}
        return study.tune(TuneRequest(**values), bench=bench, progress=progress)

    return tune


def test_the_winner_is_near_the_best_verified_and_stored(run):
    bench = FakeBench()
    result = run(bench)
    bucket = result.buckets[0]
    assert valley_ms(bucket.config) <= 1.02 * BEST_MS
    assert bucket.config in bench.verified
    assert bucket.record.verified == "cuda"
    assert bucket.record.time.median_ms == pytest.approx(valley_ms(bucket.config))
    assert bucket.record.default_ms == pytest.approx(valley_ms(DEFAULT))
    assert bucket.record.baseline == ("sdpa-flash", 2.0)
    assert result.path.parts[-3:] == ("sm_90", "test-gpu", "forward_sm80.yaml")
    stored = yaml.safe_load(result.path.read_text())["records"][0]
    assert stored["config"] == bucket.config.to_dict()
    assert stored["status"] == "measured"
    assert stored["provenance"]["kernel"] == render(SPEC, bucket.config, ARCH).digest[:16]


def test_no_config_is_timed_twice_and_the_default_is_timed_first(run):
    bench = FakeBench()
    run(bench)
    assert bench.timed[0] == DEFAULT
    assert len(set(bench.timed)) == len(bench.timed) == 40


def test_the_next_proposals_compile_while_the_last_ones_are_timed(run):
    class Watching(FakePool):
        ahead = 0

        def submit(self, configs):
            self.ahead += sum(config not in self.results for config in configs)

    pool, bench = Watching(), FakeBench()
    run(bench, pool=pool, jobs=8)
    assert pool.ahead >= 40  # every one but the first batch, and the seeds before
    assert len(bench.timed) == 40


def test_the_record_names_the_runner_up(run):
    record = run(FakeBench()).buckets[0].record
    config, ms = record.runner_up
    assert config != record.config and ms >= record.time.median_ms
    assert "waves" in record.why


def test_a_wrong_fastest_config_cannot_win(run):
    wrong = sorted(SPACE, key=valley_ms)[:25]
    bench = FakeBench(wrong=wrong)
    result = run(bench, trials=60)
    assert result.buckets[0].config not in wrong
    assert result.outcomes["wrong"] >= 1
    rows = [row for row in read_rows(result.log) if row.get("class") == "wrong"]
    assert rows and all(row["ms_median"] is None for row in rows)


def test_nothing_right_is_an_error_and_nothing_is_written(run, tmp_path):
    with pytest.raises(TuneError, match="none of"):
        run(FakeBench(wrong=SPACE))
    assert list((tmp_path / "config").rglob("*.yaml")) == []


def test_nothing_that_runs_is_an_error_with_the_counts(run):
    with pytest.raises(TuneError, match=r"\d+ launch"):
        run(FakeBench(failing=dict.fromkeys(SPACE, "launch")), trials=5, budget_s=1.0)


def test_failures_do_not_end_the_search(run):
    failing = {c: "crash" if unit_hash(str(c)) < 0.15 else "timeout" for c in SPACE if unit_hash(str(c)) < 0.3}
    spills = {c: "spill" for c in SPACE if unit_hash(f"s{c}") < 0.3}
    result = run(FakeBench(failing=failing), pool=FakePool(spills))
    assert {"ok", "crash", "timeout", "spill"} <= set(result.outcomes)
    assert result.outcomes["ok"] == 40
    assert result.buckets[0].config not in failing


def test_the_default_is_kept_where_nothing_beats_the_noise(run):
    result = run(FakeBench(lambda config: 1.0 if config == DEFAULT else 0.998 + 0.5 * unit_hash(str(config))))
    assert result.buckets[0].config == DEFAULT
    assert "default is kept" in result.buckets[0].record.tie_rule


def test_a_failing_default_is_replaced(run):
    result = run(FakeBench(failing={DEFAULT: "launch"}))
    assert result.buckets[0].config != DEFAULT
    assert result.buckets[0].record.default_ms == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_drift_still_find_a_near_best(run, seed):
    def noise(count):
        return 0.3 * (2 * unit_hash(f"{seed}/{count}") - 1) + 0.1 * math.sin(count / 50)

    result = run(FakeBench(noise=noise), seed=seed, trials=60)
    assert valley_ms(result.buckets[0].config) <= 1.10 * BEST_MS


def test_each_bucket_is_tuned_and_later_ones_start_from_earlier_winners(run):
    longer = replace(SHAPE, seqlen_q=16384, seqlen_k=16384)
    bench = FakeBench()
    result = run(bench, shapes=(SHAPE, longer))
    assert [bucket.shape for bucket in result.buckets] == [SHAPE, longer]
    first = result.buckets[0]
    start = len(first.trials)
    assert first.config in bench.timed[start : start + 2]  # after the default, unless it is that
    assert len(yaml.safe_load(result.path.read_text())["records"]) == 2


def test_stored_records_seed_the_search(run):
    save_records([record(BEST)], arch="sm_90", family="forward_sm80", gpu=DEVICE.name)
    bench = FakeBench()
    run(bench, trials=3)
    assert BEST in bench.timed[:2]


def test_every_trial_is_logged_with_its_problem(run):
    result = run(FakeBench())
    trials = read_trials(result.log)
    assert len(trials) == 40
    assert {trial.spec for trial in trials} == {"forward bf16 d64"}
    kinds = [row["kind"] for row in read_rows(result.log)]
    assert kinds[0] == "session"
    assert kinds[-1] == "winner"


class Interrupting(FakeBench):
    """Ends the run like Ctrl-C after some timings."""

    def __init__(self, after, **more):
        super().__init__(**more)
        self.after = after

    def time(self, config, shape, *, best_ms):
        if len(self.timed) >= self.after:
            raise KeyboardInterrupt
        return super().time(config, shape, best_ms=best_ms)


def test_an_interrupted_run_goes_on_without_repeating(run):
    poisoned = SPACE[10]
    first = Interrupting(17, failing={poisoned: "crash", **dict.fromkeys(SPACE[:5], "timeout")})
    with pytest.raises(KeyboardInterrupt):
        run(first)
    second = FakeBench()
    result = run(second)
    assert not set(first.timed) & set(second.timed)
    assert len(second.timed) + sum(c not in first.failing for c in first.timed) == 40
    assert result.buckets[0].config not in first.failing
    again = FakeBench()
    run(again)
    assert len(again.timed) == 40


def test_a_log_that_cannot_be_written_is_said_or_replaced(run, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match="--log"):
        run(FakeBench(), log=tmp_path / "file" / "log.jsonl")
    (tmp_path / "cache").write_text("")
    result = run(FakeBench(), trials=3)
    assert "The trial log cannot be kept" in caplog.text
    assert len(read_trials(result.log)) == 3


def test_fresh_starts_anew(run):
    with pytest.raises(KeyboardInterrupt):
        run(Interrupting(17))
    bench = FakeBench()
    run(bench, resume=False)
    assert len(bench.timed) == 40


def test_an_interrupted_run_does_not_count_for_other_templates(run, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run(Interrupting(17))
    made = study.current_provenance()
    monkeypatch.setattr(study, "current_provenance", lambda **k: replace(made, generator="other"))
    bench = FakeBench()
    run(bench)
    assert len(bench.timed) == 40


def test_exhaustive_times_every_valid_config_once(run, tmp_path):
    bench = FakeBench()
    result = run(bench, exhaustive=True, trials=3, log=tmp_path / "all.jsonl", budget_s=math.inf)
    assert sorted(bench.timed) == sorted(SPACE)
    assert result.buckets[0].config == BEST or valley_ms(result.buckets[0].config) <= 1.005 * BEST_MS
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    trials = [row for row in rows if row["kind"] == "trial"]
    assert len(trials) == len(SPACE)
    assert {"spec", "shape", "config", "ms_median", "ms_spread", "n", "class", "registers"} <= set(trials[0])


def test_an_exhaustive_run_stops_at_its_budget_and_goes_on(run, tmp_path):
    log = tmp_path / "all.jsonl"
    first, second = FakeBench(), FakeBench()
    with pytest.raises(KeyboardInterrupt):
        run(Interrupting(30), exhaustive=True, log=log, budget_s=math.inf)
    run(first, exhaustive=True, log=log, budget_s=0.0)
    assert len(first.timed) == 1
    run(second, exhaustive=True, log=log, budget_s=math.inf)
    assert len(second.timed) == len(SPACE)


def test_a_spent_budget_still_ends_with_a_winner(run):
    result = run(FakeBench(), budget_s=0.0, jobs=2)
    assert len(result.buckets[0].trials) <= 8
    with pytest.raises(TuneError, match="none of 8"):
        run(FakeBench(failing=dict.fromkeys(SPACE, "launch")), budget_s=0.0, jobs=2)
    assert result.path.exists()


def test_progress_tells_the_best_so_far(run):
    steps = []
    run(FakeBench(), progress=steps.append)
    timed = [step for step in steps if step.phase == "time"]
    assert timed[-1].done == 40
    best = [step.best_ms for step in timed]
    assert best == sorted(best, reverse=True)


@pytest.mark.parametrize("exhaustive", [False, True])
def test_a_config_that_cannot_run_the_shape_is_not_tried(run, monkeypatch, exhaustive):
    def reason(family, spec, config, shape):
        return "no" if config != DEFAULT and (config.num_stages == 1 or config.num_warps == 4) else None

    monkeypatch.setattr(type(FAMILY), "shape_reason", reason)
    bench = FakeBench()
    run(bench, exhaustive=exhaustive, trials=30)
    assert len(bench.timed) >= 20
    assert all(reason(FAMILY, SPEC, config, SHAPE) is None for config in bench.timed)
