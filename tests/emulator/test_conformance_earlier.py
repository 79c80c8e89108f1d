"""A conformance run against an earlier record: what passed there does not run, and stays in the record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers_conformance import fake_gpu

from flashsmith.generator.errors import EmulatorError
from flashsmith.runtime.emulator import conformance
from flashsmith.runtime.emulator.conformance_earlier import in_order, passed_before
from flashsmith.runtime.emulator.conformance_kernels import Case, all_cases
from flashsmith.runtime.emulator.conformance_record import record_of
from flashsmith.runtime.emulator.conformance_rules import TrapRule
from flashsmith.runtime.emulator.conformance_worker import Outcome

CASES = {case.name: case for case in all_cases()}
NAMES = ("max_s32", "min_s32", "floor_div_s32", "floor_mod_s32")
IDENTITY = {"name": "no GPU", "cc": "9.0", "driver": "1"}


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "_gpu_identity", lambda: IDENTITY)


class Gpu:
    """`fake_gpu`, which counts what it runs; `ends` says how some cases end instead."""

    def __init__(self, **ends: Outcome) -> None:
        self.ran: list[str] = []
        self._ends = ends

    def __call__(self, case: Case, blocks: int, limit_s: float) -> Outcome:
        self.ran.append(case.name)
        return self._ends.get(case.name) or fake_gpu(case, blocks, limit_s)


def conform(gpu: Gpu, names: tuple[str, ...] = NAMES, **options: Any) -> dict[str, Any]:
    made = conformance.conform([CASES[name] for name in names], gpu=gpu, **options)
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


def test_only_what_has_not_passed_runs_and_the_records_are_merged() -> None:
    earlier = conform(Gpu(min_s32=Outcome("timeout", message="too slow")), NAMES[:3])
    earlier["engine"] = {"digest": "another"}
    gpu = Gpu()
    result = conform(gpu, earlier=earlier)
    assert gpu.ran == ["floor_mod_s32", "min_s32"], "what has never run comes first"
    assert [(record["name"], record["passed"]) for record in result["cases"]] == [(name, True) for name in NAMES]
    assert result["cases"][0] == earlier["cases"][0]
    assert result["passed"] is True
    assert result["earlier_runs"] == [{"gpu": IDENTITY, "engine": {"digest": "another"}}]
    # Another run on top of that knows of both, and a replay loses neither.
    third = conform(Gpu(), earlier=result)
    assert third["earlier_runs"] == [*result["earlier_runs"], {"gpu": IDENTITY, "engine": result["engine"]}]
    assert conformance.conform([CASES[name] for name in NAMES], recorded=third) == third


def test_a_case_that_has_changed_runs_again() -> None:
    earlier = conform(Gpu())
    earlier["cases"][1]["case_digest"] = "0" * 64
    gpu = Gpu()
    assert conform(gpu, earlier=earlier)["cases"][1]["case_digest"] == CASES[NAMES[1]].digest
    assert gpu.ran == [NAMES[1]]


def test_what_only_the_gpu_has_run_does_not_count_as_passed() -> None:
    earlier = conform(Gpu(), engine=None)
    assert passed_before([CASES[name] for name in NAMES], earlier) == {}
    assert passed_before([CASES[name] for name in NAMES], None) == {}


def test_traps_come_last_and_what_never_compiled_counts_as_new() -> None:
    first, second, third = (CASES[name] for name in NAMES[:3])
    trap = replace(CASES["floor_mod_s32"], rule=TrapRule("it traps"))
    outcomes = {first: Outcome("crash", message="illegal"), second: Outcome("no cubin", message="no such name")}
    earlier = {"cases": [record_of(case, outcome) for case, outcome in outcomes.items()]}
    assert in_order([trap, first, second, third], earlier) == [second, third, first, trap]
    assert in_order([trap, first], None) == [first, trap]


def test_records_of_two_gpus_do_not_mix() -> None:
    earlier = conform(Gpu())
    earlier["gpu"]["driver"] = "2"
    conform(Gpu(), earlier=earlier)
    earlier["gpu"]["name"] = "another GPU"
    with pytest.raises(EmulatorError, match=r"is of another GPU \(9.0\) and this one is no GPU \(9.0\)"):
        conform(Gpu(), earlier=earlier)


def test_the_command_compiles_and_runs_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[str] = []

    class Workers:
        def __init__(self, cases: Any) -> None:
            compiled.extend(case.name for case in cases)

        def __call__(self, *asked: Any) -> Outcome:
            return fake_gpu(*asked)

        def close(self) -> None: ...

    monkeypatch.setattr(conformance, "WorkerGpu", Workers)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert conformance.main(["--out", str(first), "--only", "cvt_rn_f16"]) == 0
    arguments = ["--out", str(second), "--only", "cvt_rn", "--new-against", str(first)]
    assert conformance.main(arguments) == 0
    assert compiled == ["cvt_rn_f16x2_f32", "cvt_rn_bf16x2_f32"]
    assert "1 cases have passed before and do not run" in capsys.readouterr().out
    assert [record["passed"] for record in json.loads(second.read_text())["cases"]] == [True, True]
    with pytest.raises(SystemExit):
        conformance.main(["--replay", str(first), "--new-against", str(first)])
