"""The Hopper cases of the conformance program: the engine against NumPy, and each text compiled for a GPU."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers_conformance import fake_gpu

from flashsmith.generator.environment import environment
from flashsmith.generator.errors import EmulatorError, MissingComponentError
from flashsmith.runtime.emulator import conformance
from flashsmith.runtime.emulator.conformance_cases import every_case
from flashsmith.runtime.emulator.conformance_hopper import hopper_cases
from flashsmith.runtime.emulator.conformance_hopper_case import HopperCase
from flashsmith.runtime.emulator.conformance_kernels import Case, used_primitives
from flashsmith.runtime.emulator.conformance_layouts import accumulators_of, product, swizzled
from flashsmith.runtime.emulator.conformance_record import compare, record_of, replay
from flashsmith.runtime.emulator.conformance_tma import _COORDINATES, starts
from flashsmith.runtime.emulator.conformance_tma_stores import store_cases, trapping_cases
from flashsmith.runtime.emulator.conformance_worker import Outcome

CASES = {case.name: case for case in hopper_cases()}
RECORDS = sorted((Path(__file__).parent / "data").glob("conformance_*.json"))
PRODUCTS = [name for name in CASES if name.startswith("wgmma_")]
#: One N of each kind, and all other layouts.
FEW_PRODUCTS = [
    name
    for name in PRODUCTS
    if "span 128" not in name or name[10:].split("k")[0] in ("8", "80", "176", "256") or "normal" in name
]


STORES = [case.name for case in store_cases()]
TRAPS = [CASES[case.name] for case in trapping_cases()]
TRAPPED = Outcome("crash", message="CUDA failed while running it: CUDA_ERROR_ILLEGAL_INSTRUCTION (715)")


def engine(name: str) -> np.ndarray:
    return conformance.run_on_engine(CASES[name])


def boxes(case: HopperCase, coordinates: tuple[int, ...]) -> Any:
    """(element's place in the box as a byte of shared memory, its index in the tensor or None)."""
    assert case.map is not None
    for at in itertools.product(*(range(size) for size in reversed(case.map.box))):
        offset = 0
        for size, i in zip(reversed(case.map.box), at, strict=True):
            offset = offset * size + i
        index = tuple(c + i for c, i in zip(coordinates, reversed(at), strict=True))
        inside = all(0 <= i < size for i, size in zip(index, case.map.sizes, strict=True))
        yield int(swizzled(np.int64(2 * offset), case.map.swizzle)), index if inside else None


def element(case: HopperCase, index: tuple[int, ...]) -> int:
    assert case.map is not None
    return index[0] + sum(i * stride for i, stride in zip(index[1:], case.map.strides, strict=True)) // 2


@pytest.mark.parametrize("where", ["", " outside"])
@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_tma_loads_by_their_definition(rank: int, swizzle: int, where: str) -> None:
    case = CASES[f"tma_load_{rank}d swizzle {swizzle}{where}"]
    source = case.arrays["in"].view(np.uint16)
    found = engine(case.name).view(np.uint16).reshape(case.blocks, -1)
    touched = 0
    for block, at in enumerate(case.arrays["in2"].view(np.int32).reshape(-1, rank).tolist()):
        expected = np.zeros(found.shape[1], dtype=np.uint16)
        for place, index in boxes(case, at):
            expected[place // 2] = 0 if index is None else source[element(case, index)]
            touched += index is not None
        np.testing.assert_array_equal(found[block], expected)
    assert (touched == 0) == (where != "")


@pytest.mark.parametrize("name", STORES)
def test_tma_stores_by_their_definition(name: str) -> None:
    case = CASES[name]
    assert case.map is not None
    tile = case.arrays["in"].view(np.uint16)
    expected = np.full(case.blocks * case.items * 2, 0xFFFF, dtype=np.uint16)
    for at in case.arrays["in2"].view(np.int32).reshape(case.blocks, -1).tolist():
        assert min(at) >= 0
        touched = [(place, index) for place, index in boxes(case, at) if index is not None]
        for place, index in touched:
            expected[element(case, index)] = tile[place // 2]
        share = len(touched) / math.prod(case.map.box)
        assert share == 0 if "beyond" in name else 0 < share < 1 if "over" in name else share == 1
    np.testing.assert_array_equal(engine(name).view(np.uint16), expected)


def test_stores_end_in_each_dimension_and_for_each_swizzle() -> None:
    for rank, swizzle in itertools.product((3, 4, 5), (16, 32, 64, 128)):
        name = f"tma_store_{rank}d swizzle {swizzle}"
        cases = [CASES[n] for n in STORES if re.fullmatch(f"{name}( [bo].*)?", n)]
        assert len(cases) == (2 + rank if swizzle == 128 else 3)
        assert len({case.text for case in cases}) == 1, "one program serves them all"
        beyond = set()
        for case in cases:
            assert case.map is not None
            for at in case.arrays["in2"].view(np.int32).reshape(case.blocks, -1).tolist():
                beyond |= {d for d in range(rank) if at[d] == case.map.sizes[d]}
        assert beyond == set(range(rank))


def test_stores_before_the_tensor_come_last_and_are_found_by_the_engine() -> None:
    assert list(CASES.values())[-4:] == TRAPS
    for d, case in enumerate(TRAPS):
        at = case.arrays["in2"].view(np.int32).tolist()
        assert case.blocks == 1
        assert [i for i in range(4) if at[i] < 0] == [d]
        record = record_of(case, TRAPPED)
        assert (record["status"], record["passed"]) == ("trap", None)
        messages = conformance.run_on_engine(case)
        assert compare(case, record, messages)["passed"] is True
        assert f"{at[d]} in dimension {d}" in messages[0]


def test_a_case_that_must_trap_fails_where_one_side_does_not() -> None:
    case = TRAPS[0]
    with pytest.raises(EmulatorError, match=r"must find that a TMA store begins at a negative .*, but found nothing"):
        compare(case, record_of(case, TRAPPED), [])
    other = record_of(case, Outcome("crash", message="CUDA_ERROR_ILLEGAL_ADDRESS (700)"))
    assert (other["status"], other["passed"]) == ("crash", False)
    ran = record_of(case, Outcome("ran", np.zeros(5, dtype=np.uint32)))
    found = compare(case, ran, ["a TMA store begins at a negative coordinate"])
    assert (found["passed"], found["mismatches"]) == (False, 5)
    assert found["example"] == "the GPU ran to the end, but should have trapped"
    assert found["gpu_output"]
    # Where nothing asks for it, a trap is a failure like any other.
    unasked = record_of(CASES["bulk groups"], TRAPPED)
    assert (unasked["status"], unasked["passed"]) == ("trap", False)
    assert replay(CASES["bulk groups"], unasked, None) == unasked


def test_traps_are_compared_in_a_run_and_in_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "_gpu_identity", lambda: {"name": "no GPU"})
    chosen = [TRAPS[0], CASES["redux_or_b32"]]
    ran: list[str] = []

    def gpu(case: Case, blocks: int, limit_s: float) -> Outcome:
        ran.append(case.name)
        return TRAPPED if case in TRAPS else fake_gpu(case, blocks, limit_s)

    result = conformance.conform(chosen, gpu=gpu)
    assert ran == ["redux_or_b32", TRAPS[0].name], "a trap costs the process, so it comes last and only once"
    assert [(record["name"], record["passed"]) for record in result["cases"]] == [(c.name, True) for c in chosen]
    assert conformance.conform(chosen, recorded=result) == result
    monkeypatch.setattr(conformance, "run_on_engine", lambda case: [])
    assert conformance.conform([TRAPS[0]], recorded=result)["passed"] is False


def test_a_record_is_of_its_tensor_map_too() -> None:
    case = CASES["tma_store_3d swizzle 64"]
    assert case.map is not None
    other = replace(case, map=replace(case.map, swizzle=16))
    assert other.text == case.text
    assert other.digest != case.digest


def test_each_coordinate_is_in_one_case_of_a_kind() -> None:
    for name, case in CASES.items():
        if name.startswith("tma_load") and not name.endswith("outside"):
            assert case.map is not None
            other = CASES[f"{name} outside"]
            assert case.blocks + other.blocks == len(_COORDINATES)
            assert case.text == other.text, "one program serves both"
    assert starts((8, 8), (8, 2), touching=True) == [(0, 0), (0, 0)]


def test_groups_of_stores_by_their_definition() -> None:
    tiles = CASES["bulk groups"].arrays["in"].view(np.uint16).reshape(3, 256)
    place = swizzled(np.arange(0, 512, 2), 64) // 2
    np.testing.assert_array_equal(engine("bulk groups").view(np.uint16).reshape(3, 256), tiles[:, place])


@pytest.mark.parametrize("name", FEW_PRODUCTS)
def test_products_by_their_definition(name: str) -> None:
    instruction, _, span, kind = name.split(" ")
    _, shape, _, dtype, form = instruction.split("_", 4)
    n = int(shape[4:].split("k")[0])
    made = product(form, dtype, int(span), n, kind)
    exact = made.a.astype(np.float64) @ made.b.T.astype(np.float64) + made.d
    found = engine(name).view(np.float32).reshape(128, n // 2)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for j in range(n // 2):
            row, column = 16 * warp + lane // 4 + 8 * (j // 2 % 2), 8 * (j // 4) + 2 * (lane % 4) + j % 2
            difference = abs(float(found[thread, j]) - exact[row, column])
            assert difference <= (0.0 if kind == "integers" else 2e-5)


def test_rows_of_stmatrix_by_their_definition() -> None:
    case = CASES["stmatrix_x4"]
    registers = case.arrays["in"].reshape(4, 4, 32, 4)  # (block, warp, lane, matrix)
    rows = case.arrays["in2"].reshape(4, 4, 4, 8)  # (block, warp, matrix, row)
    expected = np.zeros((4, 512, 4), dtype=np.uint32)
    for block, warp, matrix, row in np.ndindex(rows.shape):
        expected[block, rows[block, warp, matrix, row]] = registers[block, warp, 4 * row : 4 * row + 4, matrix]
    np.testing.assert_array_equal(engine("stmatrix_x4"), expected.reshape(-1))


def test_barriers_pass_on_what_was_written() -> None:
    expected = CASES["mbarrier phases"].arrays["in"].reshape(5, 64)[:, ::-1].reshape(-1)
    np.testing.assert_array_equal(engine("mbarrier phases"), expected)
    np.testing.assert_array_equal(engine("named barriers"), expected)


@pytest.mark.parametrize("consumers", [1, 2, 3, 4])
def test_registers_and_grid_by_their_definition(consumers: int) -> None:
    threads = 128 * (consumers + 1)
    case = CASES[f"setmaxnreg, grid_size {threads} threads"]
    added = np.where(np.arange(threads) < 128, 0, 3).astype(np.uint32)
    np.testing.assert_array_equal(engine(case.name).reshape(3, threads), np.tile(case.arrays["in"] + added, (3, 1)))


def test_atomics_by_their_definition() -> None:
    np.testing.assert_array_equal(engine("atomic_add_global_s32, st_global_s32"), [3 * 128 - 1, 1])


def test_reductions_by_their_definition() -> None:
    words = CASES["redux_or_b32"].arrays["in"].reshape(-1, 32)
    expected = np.bitwise_or.reduce(words, axis=1)
    np.testing.assert_array_equal(engine("redux_or_b32"), np.repeat(expected, 32))
    assert {0, 0x80000000} < set(expected.tolist())
    assert len(set(expected.tolist())) > 50


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_groups_of_products_by_their_definition(dtype: str) -> None:
    found = engine(f"wgmma groups {dtype}").view(np.float32).reshape(128, 2, 32)
    made = product("ss", dtype, 128, 64, "integers")
    without = made.a @ made.b.T
    for i, exact in enumerate((without + made.d, without)):
        np.testing.assert_array_equal(found[:, i], accumulators_of(exact))


def test_the_kernels_own_products_are_among_the_cases() -> None:
    for n in range(8, 257, 8):
        for form in ("ss", "rs", "ss_tb"):
            assert f"wgmma_m64n{n}k16_f32_bf16_{form} span 128 integers" in CASES
    for dtype, n in itertools.product(("f16", "bf16"), range(48, 257, 16)):
        assert n > 192 or f"wgmma_m64n{n}k16_f32_{dtype}_ss span 128 integers" in CASES
        assert n < 64 or f"wgmma_m64n{n}k16_f32_{dtype}_rs span 128 integers" in CASES
        assert n < 64 or f"wgmma_m64n{n}k16_f32_{dtype}_ss_tb span 128 integers" in CASES


def test_every_primitive_of_every_template_is_in_a_case() -> None:
    defined = re.compile(r"__forceinline__ [\w ]+?\b(\w+)\(")
    called = set(re.findall(r"\w+", "\n".join(case.sections[-1].text for case in every_case().values())))
    for arch, p_operand in (("sm80", ""), ("sm90", "registers"), ("sm90", "shared")):
        context = {"config": SimpleNamespace(B_c=64, p_operand=p_operand), "chunks_v": 8, "mma": "bf16"}
        text = environment().get_template(f"{arch}/primitives.jinja").render(context)
        names = set(defined.findall(text))
        assert len(names) > 30
        assert names - called == set()


@pytest.mark.parametrize("name", [n for n in CASES if n not in PRODUCTS and CASES[n] not in TRAPS])
def test_a_case_is_clean_and_gives_the_same_in_any_order(name: str) -> None:
    # A GPU keeps to no schedule: a case that needs one hangs there, or differs.
    expected = engine(name)
    for schedule in ("greedy", "reverse_greedy", "random"):
        found = conformance.run_on_engine(CASES[name], flavour="race", schedule=schedule)
        np.testing.assert_array_equal(found, expected)


def test_every_text_has_its_primitives_and_compiles_for_a_gpu() -> None:
    from flashsmith.runtime import nvrtc

    try:
        nvrtc.nvrtc_version()
    except MissingComponentError as missing:
        pytest.skip(str(missing))
    for text in {case.text for case in CASES.values()}:
        assert nvrtc.compile_to_cubin(text, "sm_90a").cubin


def test_primitives_that_no_blank_line_parts_are_refused() -> None:
    one, two = (f"__device__ __forceinline__ int {name}(int a) {{\n  return a;\n}}\n" for name in ("one", "two"))
    assert used_primitives(f"{one}\n{two}", "two(1);") == f"{two}\n"
    with pytest.raises(EmulatorError, match=r"but \['one', 'two'\] follow without one"):
        used_primitives(f"{one}{two}", "two(1);")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_gpu_agrees_with_this_engine(path: Path) -> None:
    recorded = json.loads(path.read_text())
    digests = {case["name"]: case["case_digest"] for case in recorded["cases"] if case["passed"]}
    # A case whose kernel or inputs have changed since waits for the next run on a GPU.
    unchanged = [case for case in CASES.values() if digests.get(case.name) == case.digest]
    if not unchanged:
        pytest.skip("the record holds no Hopper case as it is now")
    result = conformance.conform(unchanged, recorded=recorded)
    assert [case["name"] for case in result["cases"] if not case["passed"]] == []


@pytest.mark.gpu
def test_the_gpu_here_agrees_with_the_engine() -> None:
    from flashsmith.runtime import driver

    if driver.device_info(0).cc != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    result = conformance.conform(list(CASES.values()))
    assert [case for case in result["cases"] if not case["passed"]] == []
