"""Reading ptxas's report, and the gate on it."""

from __future__ import annotations

import pytest

from flashsmith.generator.errors import BuildGateError, CompileError
from flashsmith.runtime.gate import (
    REFUSED_ADVISORIES,
    ResourceReport,
    check_gate,
    gate_reasons,
    parse_report,
)

#: Logs as NVRTC returned them, and one in the form of nvcc's ptxas.
CLEAN_13 = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90'
ptxas info    : Function properties for kernel
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compile time = 16.389 ms
"""
CLEAN_12_4 = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'scale' for 'sm_90'
ptxas info    : Function properties for scale
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""
CLEAN_NVCC = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90'
ptxas info    : Function properties for kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 376 bytes cmem[0]
"""
SPILLS = """\
kernel.cu(5): warning #177-D: variable "unused" was declared but never referenced
    int unused = 3;
        ^

ptxas info    : Function properties for kernel
ptxas         .     688 bytes stack frame, 1020 bytes spill stores, 1092 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 700 bytes cumulative stack size
"""
SERIALISED = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to function call
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to function call
ptxas info    : (C7519) warpgroup.arrive is injected in around line 20 by compiler
""" + CLEAN_13  # fmt: skip


def report(**changes: object) -> ResourceReport:
    values: dict[str, object] = {
        "registers": 128,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "stack_bytes": 0,
        "smem_bytes": 0,
    }
    return ResourceReport(**{**values, **changes})  # type: ignore[arg-type]


def test_clean_logs() -> None:
    assert parse_report(CLEAN_13) == report(registers=168)
    assert parse_report(CLEAN_12_4) == report(registers=8)
    assert parse_report(CLEAN_NVCC) == report(registers=40, smem_bytes=1024)


def test_spills_stack_and_warnings() -> None:
    found = parse_report(SPILLS)
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (1020, 1092, 700)
    assert found.warnings == ('kernel.cu(5): warning #177-D: variable "unused" was declared but never referenced',)


def test_several_functions_are_added_up() -> None:
    found = parse_report(CLEAN_13 + SPILLS + CLEAN_NVCC)
    assert found.registers == 168
    assert found.spill_store_bytes == 1020
    assert found.smem_bytes == 1024
    assert parse_report(SPILLS + SPILLS).spill_load_bytes == 2 * 1092


def test_advisories_are_kept_once_without_their_prefix() -> None:
    found = parse_report(SERIALISED)
    assert [w[:7] for w in found.warnings] == ["(C7510)", "(C7519)"]


@pytest.mark.parametrize("log", ["", "ptxas info : Used 3 registers", CLEAN_NVCC.replace("stack frame", "rahmen")])
def test_a_log_without_a_report_does_not_pass(log: str) -> None:
    with pytest.raises(CompileError, match="resource report") as caught:
        parse_report(log)
    assert caught.value.log == log


def test_the_gate_opens_for_clean_kernels_and_harmless_warnings() -> None:
    check_gate(parse_report(CLEAN_13))
    check_gate(report(warnings=("kernel.cu(5): warning #177-D: unused", "(C7519) warpgroup.arrive is injected")))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (report(spill_store_bytes=4), "4 bytes of spill stores"),
        (report(spill_load_bytes=8), "8 of spill loads"),
        (report(stack_bytes=16), "a stack frame of 16 bytes"),
        *((report(warnings=(f"({code}) words",)), code) for code in REFUSED_ADVISORIES),
    ],
)
def test_the_gate_names_each_reason_and_a_remedy(bad: ResourceReport, says: str) -> None:
    with pytest.raises(BuildGateError, match=r"Lower B_r or B_c") as caught:
        check_gate(bad, what="forward_sm80 B_r=128")
    assert says in str(caught.value)
    assert "forward_sm80 B_r=128" in str(caught.value)


def test_the_refused_advisories_are_the_documented_ones() -> None:
    assert set(REFUSED_ADVISORIES) == {"C7508", "C7510", "C7511", "C7512", "C7513", "C7514"}


def test_all_reasons_are_given() -> None:
    assert len(gate_reasons(report(spill_store_bytes=4, stack_bytes=8, warnings=("(C7508) a", "(C7514) b")))) == 4


def test_round_trip() -> None:
    found = parse_report(SPILLS)
    assert ResourceReport.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    "data",
    [
        {},
        {**report().to_dict(), "extra": 1},
        {**report().to_dict(), "registers": "128"},
        {**report().to_dict(), "registers": True},
        {**report().to_dict(), "warnings": "C7510"},
        {**report().to_dict(), "warnings": [3]},
    ],
)
def test_from_dict_refuses_other_data(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a resource report"):
        ResourceReport.from_dict(data)
