"""benchmarks/hard_data.py: what is compared, in which configs, and the ratios."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest
import torch
from helpers_attention import FakeBackend

from flashsmith.generator.families import family_named
from flashsmith.generator.families.forward_sm90 import SOFTMAX
from flashsmith.runtime.attention import use_backend
from flashsmith.runtime.bench import BenchCase, ProblemShape
from flashsmith.runtime.compiler import _find_cached

CPU = torch.device("cpu")
SMALL = BenchCase(ProblemShape(1, 96, 96, 2, 2), "bf16", 64)


class Watch:
    """Says that a call takes as many ms as calls were sampled before it, plus one."""

    def __init__(self):
        self.made = 0

    def warm_up(self, call, sets):
        return 1.0

    def sampler(self, call, sets, rough_ms):
        self.made += 1
        return lambda ms=float(self.made): ms, "graph"

    def sm_clock_mhz(self):
        return 1500


@pytest.fixture
def script(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "benchmarks"))
    return importlib.import_module("hard_data")


@pytest.fixture
def backend():
    backend = FakeBackend()
    with use_backend(backend):
        yield backend


def test_every_case_has_the_same_work(script):
    cases = script.cases_of(causal=False)
    assert len(cases) == 8 and len(set(cases)) == 8
    assert {case.shape.batch * case.shape.seqlen_q for case in cases} == {16384}
    assert {case.shape.nheads * case.head_dim for case in cases} == {2048}
    assert {case.dtype for case in cases} == {"bf16", "fp16"}


def test_variants_differ_in_the_softmax_alone(script, backend):
    variants = script.variants_of(SMALL, "B_c=48", CPU)
    assert tuple(variants) == SOFTMAX
    assert {replace(config, softmax="exact") for config in variants.values()} == {variants["exact"]}
    assert variants["exact"].B_c == 48


def test_queries_are_scaled_and_ratios_are_to_exact(script, backend):
    variants = script.variants_of(SMALL, "", CPU)
    backend.launches.clear()
    seen = []

    def check(case, inputs):
        seen.append(inputs)
        return lambda out: ""

    found = list(
        script.measure(SMALL, variants, device=CPU, backend=backend, scales=(1, 64), stopwatch=Watch(), check=check)
    )
    q, k, _ = script.inputs_of(SMALL, CPU)
    assert torch.equal(seen[1][0], q * 64) and torch.equal(seen[1][1], k)
    assert [launch.config for launch in backend.launches] == [*variants.values()] * 2
    assert backend.launches[3].values["q"] == seen[1][0].data_ptr()
    for rows, of_exact in zip(found, (1, 4), strict=True):
        assert [row.softmax for row in rows] == list(SOFTMAX)
        assert [row.ratio for row in rows] == [of_exact / (of_exact + i) for i in range(3)]
        assert "0.500" in script.line_of(found[0])
    assert json.loads(json.dumps(found[1][2].to_dict()))["q_scale"] == 64


def test_a_wrong_output_is_not_timed(script, backend):
    variants = script.variants_of(SMALL, "", CPU)
    faults = iter(("wrong: off by 1", "", ""))
    (rows,) = script.measure(
        SMALL, variants, device=CPU, backend=backend, scales=(1,), stopwatch=Watch(),
        check=lambda case, inputs: lambda out: next(faults),
    )  # fmt: skip
    assert rows[0].timing is None and rows[0].note == "wrong: off by 1"
    assert rows[1].timing is not None and rows[1].ratio is None
    assert "exact: wrong: off by 1" in script.line_of(rows)


def test_the_reference_tells_right_from_wrong(script):
    q, k, v = script.inputs_of(SMALL, CPU)
    out = torch.nn.functional.scaled_dot_product_attention(*(x.float().transpose(1, 2) for x in (q, k, v)))
    fault_of = script.checker_of(SMALL, (q, k, v))
    right = out.transpose(1, 2).to(torch.bfloat16)
    assert fault_of(right) == ""
    assert fault_of(right * 1.1).startswith("wrong: off by")


def test_kernels_are_compiled_ahead(script, backend, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHSMITH_CACHE_DIR", str(tmp_path))
    variants = script.variants_of(SMALL, "num_warpgroups=1 pingpong=False", CPU)
    script.compile_all({SMALL: variants}, backend)
    family = family_named("forward_sm90")
    for config in variants.values():
        assert _find_cached(SMALL.problem.spec, config, backend.arch(0), family=family) is not None
