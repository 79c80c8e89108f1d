from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from helpers_tune import FakePool

from flashsmith.generator.arch import ARCHS
from flashsmith.generator.errors import TuneError
from flashsmith.generator.families import FAMILIES
from flashsmith.generator.rendering import render
from flashsmith.runtime.store import forget, read_file, resolve, save_records
from flashsmith.runtime.tune import study
from flashsmith.runtime.tune.log import read_rows, read_trials
from flashsmith.runtime.tune.request import TuneProblem, TuneRequest, usual_shape

ARCH = ARCHS["sm_80"]
FAMILY = FAMILIES["forward_sm80"]
PROBLEM = TuneProblem(head_dim=64)
SPEC = PROBLEM.traced().spec
SPACE = FAMILY.space(SPEC, ARCH)
DEFAULT = FAMILY.default_config(SPEC, ARCH)
SHAPES = (usual_shape(1024, head_dim=64), usual_shape(4096, head_dim=64))


@pytest.fixture(autouse=True)
def clean_slate(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHSMITH_CONFIG_DIR", str(tmp_path / "config"))
    forget()
    yield
    forget()


class FakeProver:
    """Says what is wrong with a config; keeps what it was asked."""

    asked: list

    def __init__(self, wrong=()):
        self.wrong, self.asked = wrong, []

    def __call__(self, *arguments):
        return self

    def fault(self, config):
        self.asked.append(config)
        return "invented" if config in self.wrong else ""

    def close(self):
        pass


class Pool(FakePool):
    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.fixture
def run(monkeypatch):
    def tune(*, pool=None, prover=None, **changes):
        monkeypatch.setattr(study, "CompilePool", lambda *a, **k: pool or Pool())
        monkeypatch.setattr(study, "Prover", prover or FakeProver())
        values = {"problem": PROBLEM, "shapes": SHAPES, "arch": ARCH, "max_compile": 40, **changes}
        return study.tune(TuneRequest(**values))

    return tune


def test_each_bucket_gets_a_proved_prediction_marked_as_such(run):
    result = run()
    assert result.status == "predicted"
    assert result.compiled == 40 < result.space == len(SPACE)
    assert "compiled 40 of" in result.notes[0]
    records = yaml.safe_load(result.path.read_text())["records"]
    assert [r["status"] for r in records] == ["predicted"] * 2
    assert [r["verified"] for r in records] == ["emulator"] * 2
    kernels = [render(SPEC, bucket.config, ARCH).digest[:16] for bucket in result.buckets]
    assert [r["provenance"]["kernel"] for r in records] == kernels
    assert result.path.parts[-3:] == ("sm_80", "any", "forward_sm80.yaml")
    found = resolve(SPEC, ARCH, "NVIDIA A30", SHAPES[0], FAMILY)
    assert found.config == result.buckets[0].config
    assert "predicted" in found.note


def test_a_named_gpu_has_its_own_file_and_numbers(run):
    plain, small = run(), run(gpu_name="NVIDIA A30")
    assert small.path.parent.name == "nvidia-a30"
    assert small.buckets[1].record.time.median_ms > 1.5 * plain.buckets[1].record.time.median_ms


def test_the_default_is_always_compiled(run):
    pool = Pool()
    run(pool=pool, max_compile=5)
    assert DEFAULT in pool.results


def test_spilled_candidates_cannot_win(run):
    free = run(prove=0)
    best = free.buckets[0].config
    spilled = run(pool=Pool({best: "spill"}), prove=0)
    assert spilled.buckets[0].config != best
    assert spilled.outcomes["spill"] == 1


def test_a_default_that_does_not_compile_is_said(run):
    result = run(pool=Pool({DEFAULT: "spill"}))
    assert result.buckets[0].config != DEFAULT
    assert result.buckets[0].record.default_ms == 0
    assert "the default config is out (spill)" in result.buckets[0].note


def test_nothing_through_the_gate_is_an_error(run, tmp_path):
    with pytest.raises(TuneError, match="build gate"):
        run(pool=Pool(dict.fromkeys(SPACE, "spill")))
    assert list((tmp_path / "config").rglob("*.yaml")) == []


def test_a_refuted_leader_gives_way_to_the_next(run):
    first = run(shapes=SHAPES[:1]).buckets[0].config
    prover = FakeProver(wrong=[first])
    result = run(shapes=SHAPES[:1], prover=prover)
    assert result.buckets[0].config != first
    assert prover.asked[0] == first


def test_a_config_is_proved_once_for_all_buckets(run):
    prover = FakeProver()
    run(prover=prover)
    assert len(prover.asked) == len(set(prover.asked))


def test_no_right_leader_is_an_error_and_nothing_is_written(run, tmp_path):
    with pytest.raises(TuneError, match="on the emulator"):
        run(prover=FakeProver(wrong=SPACE))
    assert list((tmp_path / "config").rglob("*.yaml")) == []


def test_predictions_are_logged_but_are_no_trials(run):
    result = run()
    assert read_trials(result.log) == []
    rows = [row for row in read_rows(result.log) if row["kind"] == "prediction"]
    assert len(rows) == 80
    assert json.dumps(rows[0])


def test_the_same_request_gives_the_same_file(run, tmp_path):
    files = [run(root=tmp_path / name).path.read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_the_whole_road_with_the_compiler_and_the_emulator():
    pytest.importorskip("cupy")
    problem = replace(PROBLEM, causal=True)
    shapes = (usual_shape(1024, head_dim=64),)
    result = study.tune(TuneRequest(problem=problem, shapes=shapes, arch=ARCH, max_compile=6, jobs=2, prove=6))
    record = result.buckets[0].record
    assert (record.status, record.verified) == ("predicted", "emulator")
    assert result.compiled == 6
    assert record.time.tflops > 50


def test_a_weaker_prediction_does_not_replace_a_stronger_one(run):
    strong = run(shapes=SHAPES[:1])
    weak = run(shapes=SHAPES, max_compile=6, seed=3)
    assert [(r.bucket, r.compiled) for r in weak.kept] == [(SHAPES[0], 40)]
    stored = {r.bucket: r for r in read_file(weak.path).records}
    assert stored[SHAPES[0]].config == strong.buckets[0].record.config
    assert (stored[SHAPES[0]].compiled, stored[SHAPES[1]].compiled) == (40, 6)
    assert run(shapes=SHAPES[:1], prove=0).kept  # as many compiled, but not proved
    assert run(shapes=SHAPES[:1], max_compile=50).kept == ()
    fresh = run(shapes=SHAPES[:1], max_compile=6, resume=False)
    assert fresh.kept == ()
    assert read_file(fresh.path).records[0].compiled == 6


def test_a_prediction_of_another_generator_is_replaced_however_strong(run):
    (old,) = [bucket.record for bucket in run(shapes=SHAPES[:1]).buckets]
    stale = replace(old, provenance=replace(old.provenance, generator="0" * 16))
    save_records([stale], arch="sm_80", family="forward_sm80")
    assert run(shapes=SHAPES[:1], max_compile=6).kept == ()
