"""The conformance program: its cases against NumPy, its rules, its record, and each recorded GPU against the engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_conformance import fake_gpu

from flashsmith.generator.errors import EmulatorError, MissingComponentError
from flashsmith.runtime.emulator import conformance
from flashsmith.runtime.emulator.conformance_kernels import all_cases
from flashsmith.runtime.emulator.conformance_record import compare, record_of
from flashsmith.runtime.emulator.conformance_rules import BITS, NAN_OR_BITS, ErrorRule, MmaRule, exact_mma
from flashsmith.runtime.emulator.conformance_worker import Outcome

CASES = {case.name: case for case in all_cases()}
RECORDS = sorted((Path(__file__).parent / "data").glob("conformance_*.json"))
FEW = ("ldmatrix_x4", "mma_m16n8k16_f32_bf16 real", "ex2_approx_f32", "cvt_rn_f16x2_f32")


def engine(name: str) -> np.ndarray:
    return conformance.run_on_engine(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_clean_and_agrees_with_itself(name: str) -> None:
    words = engine(name)
    record = compare(CASES[name], record_of(CASES[name], Outcome("ran", words)), words)
    assert record["passed"], record
    assert record["words"] == CASES[name].blocks * CASES[name].items
    assert len(set(words.tolist())) > (1 if name == "negative_infinity" else 2) - 1


@pytest.mark.parametrize("name", ["ldmatrix_x4", "ldmatrix_x4_trans"])
def test_ldmatrix_by_its_definition(name: str) -> None:
    arrays = CASES[name].arrays
    chunks = arrays["in"].view(np.uint16).reshape(256, 8)
    matrices = chunks[arrays["in2"].reshape(16, 4, 8)]  # (block, matrix, row, column)
    if name.endswith("trans"):
        matrices = matrices.swapaxes(2, 3)
    # Lane l holds row l / 4, columns 2 * (l % 4) and the next: pairs in row order.
    expected = np.ascontiguousarray(matrices).view(np.uint32).reshape(16, 4, 32).swapaxes(1, 2)
    np.testing.assert_array_equal(engine(name), expected.reshape(-1))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_integer_mma_by_its_definition(dtype: str) -> None:
    name = f"mma_m16n8k16_f32_{dtype} integers"
    exact, _ = exact_mma(dtype, CASES[name].arrays)
    np.testing.assert_array_equal(engine(name).view(np.float32), exact.reshape(-1))


def test_cp_async_by_its_definition() -> None:
    for name, sizes in (("cp_async_16 by block", np.repeat(np.arange(17), 32)), ("cp_async_16 by lane", None)):
        case = CASES[name]
        if sizes is None:
            sizes = np.tile(case.arrays["in2"], case.blocks)
        source = case.arrays["in"][: case.blocks * 128].view(np.uint8).reshape(-1, 16)
        expected = np.where(np.arange(16) < sizes[:, None], source, 0).astype(np.uint8)
        np.testing.assert_array_equal(engine(name).view(np.uint8).reshape(-1, 16), expected)
    assert set(CASES["cp_async_16 by lane"].arrays["in2"].tolist()) == set(range(17))


def test_shuffles_and_votes_by_their_definition() -> None:
    words = CASES["shfl_bfly_f32"].arrays["in"][:1024].reshape(32, 32)
    expected = [words[mask][np.arange(32) ^ mask] for mask in range(32)]
    np.testing.assert_array_equal(engine("shfl_bfly_f32"), np.concatenate(expected))
    words = CASES["vote_any"].arrays["in"].reshape(64, 32) % 1024
    expected = np.repeat((words < np.arange(64)[:, None]).any(axis=1), 32)
    np.testing.assert_array_equal(engine("vote_any"), expected)
    assert set(expected.tolist()) == {True, False}


def test_magnitudes_by_their_definition() -> None:
    a = CASES["abs_s32"].arrays["in"].view(np.int32).astype(np.int64)
    np.testing.assert_array_equal(engine("abs_s32"), np.abs(a).astype(np.uint32))
    np.testing.assert_array_equal(engine("abs_s64"), (np.abs(a * 1048573) >> 16).astype(np.uint32))


def test_integer_division_by_its_definition() -> None:
    arrays = CASES["floor_div_s32"].arrays
    a, b = (arrays[name].view(np.int32).astype(np.int64) for name in ("in", "in2"))
    np.testing.assert_array_equal(engine("floor_div_s32"), (a // b).astype(np.int32).view(np.uint32))
    np.testing.assert_array_equal(engine("floor_mod_s32"), (a % b).astype(np.int32).view(np.uint32))
    wide = a * 1048573
    np.testing.assert_array_equal(engine("floor_div_s64"), (wide // b >> 16).astype(np.uint32))
    np.testing.assert_array_equal(engine("floor_mod_s64"), (wide % b >> 16).astype(np.uint32))


def test_functions_by_their_definition() -> None:
    functions = {"ex2_approx_f32": np.exp2, "lg2_approx_f32": np.log2, "exp_f32": np.exp, "log_f32": np.log}
    for name, function in functions.items():
        x = CASES[name].arrays["in"].view(np.float32)
        normal = np.isfinite(x) & (np.abs(x) >= 2.0**-126) & ((x > 0) | (name[0] == "e"))
        with np.errstate(over="ignore", under="ignore"):
            expected = function(x[normal].astype(np.float64)).astype(np.float32)
        found = engine(name).view(np.float32)[normal]
        sized = np.abs(expected) >= 2.0**-126
        np.testing.assert_allclose(found[sized], expected[sized], rtol=2.0**-22)


def test_every_text_compiles_for_a_gpu() -> None:
    from flashsmith.runtime import nvrtc

    try:
        nvrtc.nvrtc_version()
    except MissingComponentError as missing:
        pytest.skip(str(missing))
    for case in CASES.values():
        assert nvrtc.compile_to_cubin(case.text, "sm_80").cubin


def test_a_bit_rule_counts_words_and_may_ignore_what_a_nan_holds() -> None:
    one = np.array([0x3F800000, 0x7FC00000, 0xFF800001], dtype=np.uint32)
    other = np.array([0x3F800000, 0xFFFFFFFF, 0x7F800001], dtype=np.uint32)
    assert BITS.compare(one, other, {}).mismatches == 2
    assert "word 1: gpu 0x7fc00000, engine 0xffffffff" in BITS.compare(one, other, {}).example
    assert NAN_OR_BITS.compare(one, other, {}).mismatches == 0
    other[0] ^= 1
    assert NAN_OR_BITS.compare(one, other, {}).mismatches == 1


def test_an_error_rule_bounds_values_and_compares_kinds() -> None:
    rule = ErrorRule(2.0**-22, near_zero=2.0**-126)
    values = np.array([1.0, 1.0, np.inf, np.nan, 1.0, 1e-39, np.inf], dtype=np.float32)
    near = np.array([1 + 2.0**-23, 1 + 2.0**-20, -np.inf, np.nan, np.nan, 0.0, np.inf], dtype=np.float32)
    found = rule.compare(near.view(np.uint32), values.view(np.uint32), {})
    assert found.mismatches == 3  # the second, the sign of an infinity, NaN against a number
    assert found.worst == pytest.approx(2.0**-20)


def test_the_mma_rule_holds_both_sides_against_the_exact_value() -> None:
    case = CASES["mma_m16n8k16_f32_f16 real"]
    words = engine(case.name)
    assert MmaRule("f16").compare(words, words, case.arrays).worst < 3
    off = words.copy()
    off[7] = (off[7:8].view(np.float32) * np.float32(1 + 2.0**-10)).view(np.uint32)[0]
    assert MmaRule("f16").compare(off, words, case.arrays).mismatches == 1
    assert MmaRule("f16").compare(words, off, case.arrays).mismatches == 1
    special = CASES["mma_m16n8k16_f32_f16 special"]
    words = engine(special.name)
    kinds = words.view(np.float32)
    assert np.isnan(kinds).any()
    assert np.isinf(kinds).any()
    finite = np.where(np.isnan(kinds), np.float32(0), kinds).view(np.uint32)
    assert MmaRule("f16").compare(finite, words, special.arrays).mismatches == np.isnan(kinds).sum()


class Workers:
    """`fake_gpu` in the place of the processes that run cases."""

    def __init__(self, cases: Any) -> None:
        self.close = lambda: None

    def __call__(self, *asked: Any) -> Outcome:
        return fake_gpu(*asked)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fake_gpu` in the place of a GPU."""
    monkeypatch.setattr(conformance, "WorkerGpu", Workers)
    monkeypatch.setattr(conformance, "_gpu_identity", lambda: {"name": "no GPU"})


def conform(names: tuple[str, ...] = FEW, **options: Any) -> dict[str, Any]:
    record = conformance.conform([CASES[name] for name in names], **options)
    return json.loads(json.dumps(record))  # type: ignore[no-any-return]


def test_a_record_replays_without_the_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    record = conform()
    assert record["passed"] is True
    kept = {case["name"]: case["gpu_output"] is not None for case in record["cases"]}
    assert kept == {"ldmatrix_x4": False, FEW[1]: True, FEW[2]: True, "cvt_rn_f16x2_f32": False}
    assert record["cases"][2]["worst"] > 0
    monkeypatch.setattr(conformance, "WorkerGpu", None)
    assert conform(recorded=record) == record


def test_a_replay_sees_another_engine(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    record = conform()
    original = conformance.run_on_engine
    monkeypatch.setattr(conformance, "run_on_engine", lambda case: original(case) ^ (1 << 14))
    assert [case["passed"] for case in conform(recorded=record)["cases"]] == [False] * 4


def test_without_a_compiler_the_gpu_is_recorded_for_later(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise MissingComponentError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr("flashsmith.runtime.emulator.toolchain.find_toolchain", nothing)
        record = conform()
        with pytest.raises(MissingComponentError):
            conform(recorded=record)
    assert record["passed"] is None
    assert record["engine"] is None
    assert all(case["gpu_output"] for case in record["cases"])
    assert conform(recorded=record)["passed"] is True


def test_a_record_of_another_kernel_is_refused(gpu: None) -> None:
    record = conform()
    record["cases"][0]["case_digest"] = "0" * 64
    with pytest.raises(EmulatorError, match="Run the conformance program on a GPU again"):
        conform(recorded=record)
    with pytest.raises(EmulatorError, match="The record has no case 'vote_any'"):
        conform(("vote_any",), recorded=record)


def test_the_command(
    gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "record.json"
    assert conformance.main(["--out", str(file), "--only", "cvt_rn"]) == 0
    assert re.search(r"2 cases in \d+ s: 0 failed\n", capsys.readouterr().out)
    assert conformance.main(["--replay", str(file), "--only", "cvt_rn"]) == 0
    original = conformance.run_on_engine
    monkeypatch.setattr(conformance, "run_on_engine", lambda case: original(case) ^ 1)
    assert conformance.main(["--replay", str(file), "--only", "cvt_rn"]) == 1
    assert "2 failed: cvt_rn_f16x2_f32" in capsys.readouterr().out
    file.write_text("{")
    assert conformance.main(["--replay", str(file)]) == 1
    with pytest.raises(SystemExit) as usage:
        conformance.main([])
    assert usage.value.code == 2


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_gpu_agrees_with_this_engine(path: Path) -> None:
    recorded = json.loads(path.read_text())
    digests = {case["name"]: case["case_digest"] for case in recorded["cases"]}
    # A case whose kernel or inputs have changed since waits for the next run on a GPU.
    unchanged = [case for case in CASES.values() if digests.get(case.name) == case.digest]
    assert len(unchanged) >= 28
    result = conformance.conform(unchanged, recorded=recorded)
    assert [case["name"] for case in result["cases"] if not case["passed"]] == []


@pytest.mark.gpu
def test_the_gpu_here_agrees_with_the_engine() -> None:
    result = conformance.conform(list(CASES.values()))
    assert [case for case in result["cases"] if not case["passed"]] == []
