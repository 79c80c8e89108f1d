"""The asan flavour finds what a kernel's own arithmetic and arrays do wrong, at the line."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_emulator import FILE, run_small, small_kernel

ARGUMENTS = "const float* in; float* out; int n; int large"

BUGS = {
    "read beyond a register array": (
        "undefined",
        "index 9 out of bounds",
        "float r[8] = {};\n  st_global_f32(args.out + thread_index(), r[args.n + 9]);  // BUG",
    ),
    "write beyond a register array through a pointer": (
        "address",
        "stack-buffer-overflow",
        "float r[8] = {};\n  float* p = r;\n  if (thread_index() == 70) p[args.n + 8] = 1;  // BUG\n"
        "  st_global_f32(args.out + thread_index(), r[3]);",
    ),
    "plain read beyond a buffer": (
        "address",
        "heap-buffer-overflow",
        "if (thread_index() == 1) st_global_f32(args.out, args.in[args.n + 512]);  // BUG",
    ),
    "plain read before a buffer": (
        "address",
        "",  # heap-buffer-overflow or use-after-poison, by where the array begins
        "if (thread_index() == 1) st_global_f32(args.out, args.in[args.n - 1]);  // BUG",
    ),
    "signed overflow": (
        "undefined",
        "signed integer overflow",
        "st_global_f32(args.out + thread_index(), static_cast<float>(args.large + 1));  // BUG",
    ),
    "shift by the width": (
        "undefined",
        "shift exponent 32",
        "st_global_f32(args.out + thread_index(), static_cast<float>(1 << (args.n + 32)));  // BUG",
    ),
}


def run(body: str, flavour: str):  # type: ignore[no-untyped-def]
    arrays = {"in": np.zeros(512, np.float32), "out": np.zeros(512, np.float32)}
    return run_small(small_kernel(f"  {body}", ARGUMENTS), arrays, (0, 2**31 - 1), flavour=flavour)


@pytest.mark.parametrize("name", BUGS)
def test_a_sanitizer_names_the_line(name: str) -> None:
    kind, message, body = BUGS[name]
    report = run(body, "asan")
    assert kind in report.kinds, report
    finding = next(finding for finding in report.findings if finding.kind == kind)
    assert message in finding.message
    assert finding.file == FILE
    assert finding.code.endswith("// BUG")


def test_the_plain_flavour_does_not_see_them() -> None:
    # Otherwise the tests above would say nothing about the sanitizers.
    assert run(BUGS["signed overflow"][2], "plain").clean


def test_engine_findings_survive_an_address_error() -> None:
    body = "st_global_f32(args.out + 5000, 0.0f);\n" + "  " + BUGS["plain read beyond a buffer"][2]
    assert {"out-of-bounds", "address"} <= run(body, "asan").kinds


def test_the_end_of_a_buffer_is_exact() -> None:
    assert run("if (thread_index() == 1) st_global_f32(args.out, args.in[args.n + 511]);", "asan").clean
