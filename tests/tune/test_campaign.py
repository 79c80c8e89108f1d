from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from helpers_campaign import COMPILES, CRASHERS, HOPPER, ManyBench, hopper_ms, request_of
from helpers_tune import ARCH

from flashsmith.generator.errors import MissingComponentError, TuneError
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime.store import forget, resolve
from flashsmith.runtime.tune import campaign, campaign_spec, compile_ahead
from flashsmith.runtime.tune.bench_client import WorkerBench
from flashsmith.runtime.tune.campaign import tune_many
from flashsmith.runtime.tune.campaign_plan import plan_of
from flashsmith.runtime.tune.gpus import gpu_model
from flashsmith.runtime.tune.log import read_rows, read_trials

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@pytest.fixture(autouse=True)
def clean_slate(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv(COMPILES, str(tmp_path / "compiles"))
    (tmp_path / "crashers").write_text("")
    monkeypatch.setenv(CRASHERS, str(tmp_path / "crashers"))
    forget()
    yield
    forget()


@pytest.fixture
def run(tmp_path):
    """Runs a campaign on an invented bench and compiler."""

    def tune(*requests, bench=None, budget_s=60.0, handler="compile_any_handler", **more):
        requests = [replace(request, root=tmp_path / "out") for request in requests]
        return tune_many(
            requests,
            budget_s=budget_s,
            bench=bench or ManyBench(),
            compile_handler=f"helpers_campaign:{handler}",
            **more,
        )

    return tune


@pytest.fixture
def slow(monkeypatch):
    """Makes a bench whose comparisons take a second and whose timings a tenth, on a clock that only the run sees."""
    state = {"ahead": 0.0, "finals": 0, "timed": 0}
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + state["ahead"])
    for module in (campaign, campaign_spec, compile_ahead):
        monkeypatch.setattr(module, "time", clock)

    def after(bench):
        state["ahead"] += len(bench.finals) - state["finals"] + 0.1 * (len(bench.timed) - state["timed"])
        state.update(finals=len(bench.finals), timed=len(bench.timed))

    def make():
        state.update(finals=0, timed=0)
        return ManyBench(after=after)

    return make


def records_of(result):
    assert len(result.paths) == 1
    return yaml.safe_load(result.paths[0].read_text())["records"]


def compiles(tmp_path):
    return (tmp_path / "compiles").read_text().splitlines()


def test_every_bucket_of_every_spec_gets_a_verified_record(run, tmp_path):
    bench = ManyBench()
    requests = [
        request_of(64, lengths=LENGTHS, ratios=(1, 4, 8)),
        request_of(64, lengths=LENGTHS, causal=True),
        request_of(192, head_dim_v=128, lengths=LENGTHS, causal=True, window_size=(1024, 0)),
    ]
    result = run(*requests, bench=bench)
    assert not result.unreached and not result.failed
    records = records_of(result)
    assert len(records) == len(result.buckets) == 21 + 7 + 7
    assert {record["verified"] for record in records} == {"cuda"}
    for bucket in result.buckets:
        assert hopper_ms(bucket.config, bucket.shape) <= 1.12 * hopper_ms(
            min(HOPPER.space(requests[0].problem.traced().spec, ARCH), key=lambda c: hopper_ms(c, bucket.shape)),
            bucket.shape,
        )
    short = [r for r in records if r["bucket"]["seqlen_q"] == 512]
    long = [r for r in records if r["bucket"]["seqlen_q"] == 32768]
    assert max(r["config"]["B_c"] for r in short) < min(r["config"]["B_c"] for r in long)
    assert bench.closed


def test_a_record_says_why_and_names_the_runner_up(run):
    result = run(request_of(128, lengths=LENGTHS, causal=True))
    for record in records_of(result):
        assert record["default_ms"] > 0
        assert record["runner_up"]["median_ms"] > 0
        assert record["runner_up"]["config"] != record["config"]
        assert "waves" in record["why"] and "% prologue" in record["why"] and "tiles of" in record["why"]
        assert "default" in record["why"]
        assert record["tie_rule"]


def test_a_kernel_is_compiled_once_for_all_lengths_and_ratios(run, tmp_path):
    run(request_of(64, lengths=LENGTHS, ratios=(1, 4, 8)), request_of(64, lengths=LENGTHS, causal=True))
    lines = compiles(tmp_path)
    assert len(set(lines)) == len(lines)
    assert len({line.split()[0] for line in lines}) == 2
    assert len(lines) <= 2 * 30


def test_verification_is_once_a_config_not_a_bucket(run):
    bench = ManyBench()
    run(request_of(64, lengths=LENGTHS, ratios=(1, 4)), request_of(128, lengths=LENGTHS), bench=bench)
    assert len(set(bench.verified)) == len(bench.verified)


def test_the_search_is_at_two_lengths_and_the_others_compare_a_few(run):
    bench = ManyBench()
    run(request_of(64, lengths=LENGTHS, ratios=(1, 8)), bench=bench, explore=12, budget_s=math.inf)
    searched = {shape for _, _, shape in bench.timed}
    assert {shape.seqlen_q for shape in searched} == {1024, 16384}
    assert {shape.gqa_ratio for shape in searched} == {1}
    assert all(sum(s == shape for _, _, s in bench.timed) <= 14 for shape in searched)
    others = [configs for _, configs, shape, _ in bench.finals if shape not in searched]
    assert len(others) == 12
    assert all(2 <= len(configs) <= 5 for configs in others)


def test_torch_is_timed_at_the_explored_lengths_alone(run):
    bench = ManyBench()
    records = records_of(run(request_of(64, lengths=LENGTHS), bench=bench))
    assert {r["bucket"]["seqlen_q"] for r in records if "baseline" in r} == {1024, 16384}


def test_the_pool_compiles_the_next_specs_while_the_gpu_is_busy(run, tmp_path):
    last = request_of(256)
    digest = last.problem.traced().spec.digest
    seen = {}

    def after(bench):
        time.sleep(0.03)
        spec = len({name for name, *_ in bench.timed})
        seen.setdefault(spec, sum(line.startswith(digest) for line in compiles(tmp_path)))

    run(request_of(64), request_of(128), last, bench=ManyBench(after=after))
    assert seen[3] >= 10  # when its first kernel is timed; without working ahead it would be the only one


def test_winners_of_one_spec_are_seeds_of_the_next(run):
    first, second = (plan_of(request_of(d), place=0, explore=24) for d in (64, 72))
    model = gpu_model(ARCH)
    odd = first.find_seeds(model, None)[-1]  # drawn at random, so that the other spec does not have it
    assert odd not in second.find_seeds(model, None)
    bench = ManyBench(lambda config, shape: 0.01 if config == odd else hopper_ms(config, shape))
    run(first.request, second.request, bench=bench, explore=40)
    assert odd in [config for name, config, _ in bench.timed if "d72" in name]


def test_a_wrong_config_wins_nowhere(run):
    bench = ManyBench(wrong=lambda config: config.softmax == "optimistic")
    result = run(request_of(64, lengths=LENGTHS, ratios=(1, 4)), bench=bench)
    assert "optimistic" not in {bucket.config.softmax for bucket in result.buckets}
    assert len(set(bench.verified)) == len(bench.verified)


def test_the_default_stays_unless_beaten_by_more_than_the_noise(run):
    request = request_of(128, lengths=LENGTHS)
    default = HOPPER.default_config(request.problem.traced().spec, ARCH)
    result = run(request, bench=ManyBench(lambda config, shape: 1.0 if config == default else 0.998))
    assert {bucket.config for bucket in result.buckets} == {default}
    assert all("It is the default." in record["why"] for record in records_of(result))


def test_a_spent_budget_says_what_was_not_reached_and_is_shared_out(run, slow):
    requests = [request_of(d, lengths=LENGTHS, ratios=(1, 4)) for d in (64, 96, 128)]
    result = run(*requests, bench=slow(), budget_s=36.0)
    per_spec = Counter(bucket.record.problem for bucket in result.buckets)
    assert len(per_spec) == 3 and max(per_spec.values()) - min(per_spec.values()) <= 2
    assert len(result.buckets) >= 18
    reached = {(bucket.record.problem, bucket.shape) for bucket in result.buckets}
    assert reached.isdisjoint(result.unreached)
    assert len(result.unreached) == 3 * 14 - len(reached) > 0
    assert all(bucket.shape.gqa_ratio == 1 for bucket in result.buckets if per_spec[bucket.record.problem] <= 7)


def test_time_left_over_goes_to_those_that_had_too_little(run, slow):
    requests = [request_of(64, lengths=LENGTHS, ratios=(1, 4, 8)), request_of(128, lengths=(512,))]
    result = run(*requests, bench=slow(), budget_s=45.0)
    assert not result.unreached and len(result.buckets) == 22
    problems = [bucket.record.problem for bucket in result.buckets]
    second = problems.index("forward bf16 d128")
    assert "forward bf16 d64" in problems[second:]


def test_the_same_command_goes_on_where_the_budget_ended(run, slow):
    requests = [request_of(d, lengths=LENGTHS) for d in (64, 128)]
    first = run(*requests, bench=slow(), budget_s=12.0)
    assert first.unreached
    bench = ManyBench()
    second = run(*requests, bench=bench)
    assert second.resumed == len(first.buckets)
    assert {(b.record.problem, b.shape) for b in second.buckets} == set(first.unreached)
    assert len(records_of(second)) == 14
    third = run(*requests)
    assert third.resumed == 0 and len(third.buckets) == 14


def test_fresh_starts_anew(run, slow):
    request = request_of(64, lengths=LENGTHS)
    assert run(request, bench=slow(), budget_s=6.0).unreached
    again = run(replace(request, resume=False))
    assert again.resumed == 0 and len(again.buckets) == 7


def test_ctrl_c_keeps_what_was_finished_and_the_next_run_goes_on(run, tmp_path):
    requests = [request_of(64, lengths=LENGTHS), request_of(128, lengths=LENGTHS)]

    def after(bench):
        if len(bench.finals) == 11:  # in the second spec
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(*requests, bench=ManyBench(after=after))
    (path,) = (tmp_path / "out").rglob("*.yaml")
    kept = yaml.safe_load(path.read_text())["records"]
    assert len(kept) == 10
    result = run(*requests)
    assert result.resumed == 10 and len(result.buckets) == 4
    assert len(records_of(result)) == 14


def test_a_killed_run_loses_no_finished_bucket(run, slow, tmp_path):
    """YAML comes after a spec, but the log has each winner at once: what SIGKILL leaves is enough."""
    request = request_of(64, lengths=LENGTHS)
    run(request, bench=slow(), budget_s=6.0)
    for path in (tmp_path / "out").rglob("*.yaml"):
        path.unlink()
    forget()
    result = run(request)
    assert result.resumed and len(records_of(result)) == 7


def test_a_crash_of_the_worker_costs_the_config_that_caused_it(run, tmp_path):
    request = request_of(64, lengths=LENGTHS)
    space = HOPPER.space(request.problem.traced().spec, ARCH)
    bad = sorted(space, key=lambda c: hopper_ms(c, request.shapes[-1]))[:20]
    (tmp_path / "crashers").write_text("".join(f"64 {config}\n" for config in bad))
    bench = WorkerBench(request, HOPPER, handler="helpers_campaign:bench_handler", effort="quick")
    result = run(request, request_of(128, lengths=LENGTHS), bench=bench)
    assert not result.failed and not result.unreached
    mine = [bucket for bucket in result.buckets if bucket.record.problem == "forward bf16 d64"]
    assert len(mine) == 7 and not {bucket.config for bucket in mine} & set(bad)
    assert "crash" in {trial.outcome for trial in read_trials(result.log)}


def test_a_crash_in_a_comparison_is_found_out_alone(run, tmp_path):
    """A config that only breaks at one size ends the worker in the interleaved round; the others go on without it."""
    request = request_of(64, lengths=LENGTHS)
    broken = {}

    class Breaking(ManyBench):
        def of(self, request, family):
            bench = Breaking(self.ms, shared=self.root, spec=request.problem.traced().spec)
            return bench

        def time(self, config, shape, *, best_ms):
            from flashsmith.runtime.tune.bench_client import Timed

            return Timed("crash") if broken.get(shape) == config else super().time(config, shape, best_ms=best_ms)

        def final(self, configs, shape, **more):
            from flashsmith.runtime.tune.bench_client import Final

            if shape.seqlen_q == 4096:
                broken.setdefault(shape, configs[-1])
                if broken[shape] in configs:
                    return Final({}, None, "the worker ended")
            return super().final(configs, shape, **more)

    result = run(request, bench=Breaking())
    assert len(result.buckets) == 7 and not result.failed
    assert len(broken) == 1
    ((shape, config),) = broken.items()
    bucket = next(bucket for bucket in result.buckets if bucket.shape == shape)
    assert bucket.config != config and "crash" in {trial.outcome for trial in bucket.trials}


def test_a_spec_without_a_right_kernel_fails_alone(run):
    def wrong(config):
        return False

    class Half(ManyBench):
        def of(self, request, family):
            bad = request.problem.head_dim == 64
            spec = request.problem.traced().spec
            return ManyBench(self.ms, wrong=lambda config: bad, shared=self.root, spec=spec)

    result = run(request_of(64), request_of(128), bench=Half(wrong=wrong))
    assert {words for words, _, _ in result.failed} == {"forward bf16 d64"}
    assert len(result.buckets) == 3
    assert "must match the reference" in result.failed[0][2]


def test_nothing_right_at_all_is_an_error(run, tmp_path):
    with pytest.raises(TuneError, match="must match the reference"):
        run(request_of(64), bench=ManyBench(wrong=lambda config: True))
    assert not list((tmp_path / "out").rglob("*.yaml"))


def test_a_missing_compiler_ends_the_run(run):
    with pytest.raises(MissingComponentError, match="NVRTC is missing"):
        run(request_of(64), handler="missing_handler")


def test_the_log_can_be_read_like_any_other(run):
    result = run(request_of(64, lengths=LENGTHS), request_of(128))
    kinds = [row["kind"] for row in read_rows(result.log)]
    assert kinds.count("session") == 2 and kinds.count("winner") == 10 and kinds[-1] == "end"
    trials = read_trials(result.log)
    assert {trial.spec for trial in trials} == {"forward bf16 d64", "forward bf16 d128"}


def test_a_call_of_another_ratio_finds_its_own_record_or_the_nearest(run, tmp_path):
    request = request_of(128, lengths=(1024, 4096), ratios=(1, 8))
    result = run(request)
    spec = request.problem.traced().spec
    own = {bucket.shape: bucket.config for bucket in result.buckets}
    for shape in request.shapes:
        found = resolve(spec, ARCH, "Test GPU", shape, HOPPER, user=tmp_path / "out")
        assert found.record.bucket == shape and found.config == own[shape] and found.source == "user"
    four = ProblemShape(4, 4096, 4096, 16, 4)
    found = resolve(spec, ARCH, "Test GPU", four, HOPPER, user=tmp_path / "out")
    assert found.record is not None and found.record.bucket.gqa_ratio == 8 and found.source == "user"
