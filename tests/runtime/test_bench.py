"""The comparison with torch, on the CPU with stand-ins for timers and kernels."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportFunctionMemberAccess=false

from __future__ import annotations

import json
import math

import pytest
import torch

from flashsmith.generator.errors import SpecError, UnsupportedError
from flashsmith.generator.spec import ProblemShape
from flashsmith.runtime import bench as module
from flashsmith.runtime.bench import BenchCase, bench, default_factories, standard_cases
from flashsmith.runtime.reference import attention_reference

SQUARE = ProblemShape(2, 24, 24, 4, 4)
CAUSAL = BenchCase(SQUARE, "fp16", 32, causal=True)


class Stopwatch:
    def __init__(self, times):
        self.times = times

    def warm_up(self, call, sets):
        return 1.0

    def sampler(self, call, sets, rough_ms):
        return (lambda: self.times[call.provider]), "events"

    def sm_clock_mhz(self):
        return 1400


def provider(name, compute):
    def factory(case, data):
        def call(i):
            return compute(case, *data.bshd[i])

        call.provider = name
        return call

    return factory


def right(case, q, k, v):
    problem = case.problem
    return attention_reference(q, k, v, mask=problem.mask, score=problem.score)[0].to(q.dtype)


def test_a_right_provider_is_timed_and_a_wrong_one_is_not():
    def fails(case, q, k, v):
        raise UnsupportedError("not on Tuesdays.\nmore")

    result = bench(
        [CAUSAL],
        providers=["flashsmith", "half", "wrong", "fails"],
        device="cpu",
        stopwatch=Stopwatch({"flashsmith": 1.0, "half": 2.0}),
        factories={
            "flashsmith": provider("flashsmith", right),
            "half": provider("half", right),
            "wrong": provider("wrong", lambda case, q, k, v: right(case, q, k, v) + 0.1),
            "fails": provider("fails", fails),
        },
    )
    times = {row.provider: row.timing and row.timing.median_ms for row in result.rows}
    assert times == {"flashsmith": 1.0, "half": 2.0, "wrong": None, "fails": None}
    notes = {row.provider: row.note for row in result.rows}
    assert notes["wrong"].startswith("wrong: off by 1.0") and notes["fails"] == "not on Tuesdays."
    assert result.ratio(CAUSAL, "half") == 2.0 and result.geometric_mean("half") == pytest.approx(2.0)
    assert math.isnan(result.ratio(CAUSAL, "wrong")) and math.isnan(result.geometric_mean("wrong"))
    row = result.row(CAUSAL, "flashsmith")
    assert row.tflops == pytest.approx(2 * 2 * 4 * (24 * 24 / 2) * 64 / 1e9 / 1.0)
    data = json.loads(json.dumps(result.to_dict()))
    assert data["rows"][2]["tflops"] is None and data["machine"]["torch"] == torch.__version__


def test_torchs_back_ends_compute_the_same_cases(monkeypatch):
    monkeypatch.setattr(module, "SDPA", {"sdpa-math": "MATH"})
    factories = default_factories()
    del factories["flashsmith"]

    def tagged(case, data):
        call = factories["sdpa-math"](case, data)

        def tagged_call(i):
            return call(i)

        tagged_call.provider = "sdpa-math"
        return tagged_call

    grouped = BenchCase(ProblemShape(2, 24, 24, 4, 2), "bf16", 32)
    cross = BenchCase(ProblemShape(2, 24, 30, 4, 4), "bf16", 32, causal=True)
    window = BenchCase(SQUARE, "bf16", 32, window_size=(3, -1))
    result = bench(
        [CAUSAL, grouped, cross, window],
        providers=["sdpa-math"],
        device="cpu",
        stopwatch=Stopwatch({"sdpa-math": 1.0}),
        factories={"sdpa-math": tagged},
    )
    assert [row.note for row in result.rows] == [
        "",
        "",
        "torch's is_causal is aligned top-left.",
        "torch's function has no window and no softcap.",
    ]


def test_an_unknown_provider_is_refused():
    with pytest.raises(SpecError, match="Unknown provider 'fa9'"):
        bench([CAUSAL], providers=["fa9"], device="cpu")


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (BenchCase(ProblemShape(1, 6, 10, 1, 1)), 60),
        (BenchCase(ProblemShape(1, 6, 6, 1, 1), causal=True), 18),
        (BenchCase(ProblemShape(1, 2, 5, 1, 1), causal=True), 4 + 5),
        (BenchCase(ProblemShape(1, 5, 2, 1, 1), causal=True), 1 + 2),
        (BenchCase(ProblemShape(1, 4, 4, 1, 1), window_size=(1, 0)), 1 + 2 + 2 + 2),
        (BenchCase(ProblemShape(1, 4, 4, 1, 1), window_size=(0, 1)), 2 + 2 + 2 + 1),
        (BenchCase(ProblemShape(1, 4, 4, 1, 1), window_size=(1, 9), causal=True), 1 + 2 + 2 + 2),
    ],
)
def test_visible_pairs(case, pairs):
    assert case.pairs == pairs


def test_the_standard_grid():
    cases = standard_cases((64, 128), seqlens=(1024, 16384))
    assert len(cases) == 8
    assert {(c.head_dim, c.shape.batch, c.shape.nheads, c.shape.seqlen_k) for c in cases} == {
        (64, 16, 32, 1024),
        (64, 1, 32, 16384),
        (128, 16, 16, 1024),
        (128, 1, 16, 16384),
    }
    assert str(cases[-1]) == "bf16 d128 causal B1 N16384 H16"
    with pytest.raises(SpecError, match="seqlens must be from 1 to tokens"):
        standard_cases(seqlens=(32768,))


def test_both_layouts_hold_the_same_values():
    data = module.InputSets(CAUSAL, 2, torch.device("cpu"))
    for bshd, bhsd in zip(data.bshd, data.bhsd, strict=True):
        for one, other in zip(bshd, bhsd, strict=True):
            assert torch.equal(one, other.transpose(1, 2)) and other.is_contiguous()
    assert not torch.equal(data.bshd[0][0], data.bshd[1][0])


def test_progress_hears_of_every_case():
    heard = []
    bench(
        [CAUSAL, CAUSAL],
        providers=["flashsmith"],
        device="cpu",
        stopwatch=Stopwatch({"flashsmith": 1.0}),
        factories={"flashsmith": provider("flashsmith", right)},
        progress=lambda case, rows: heard.append((case, len(rows))),
    )
    assert heard == [(CAUSAL, 1)] * 2
