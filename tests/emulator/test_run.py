"""What `emulate` takes, refuses and returns; and that the schedules are the same in every run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_emulator import run_small, small_kernel

from flashsmith.generator.errors import EmulatorError
from flashsmith.runtime.emulator import build
from flashsmith.runtime.emulator.run import SCHEDULES, HostBuffer, emulate_text

COPY = small_kernel(
    "  const long long i = block_index() * 128 + thread_index();\n"
    "  if (i < args.n) st_global_f32(args.out + i, ld_global_f32(args.in + i) + 1.0f);",
    "const float* in; float* out; int n",
)


def arrays(n: int = 512) -> dict[str, np.ndarray]:
    return {"in": np.arange(n, dtype=np.float32), "out": np.full(n, np.nan, np.float32)}


def test_results_come_back_and_inputs_stay() -> None:
    data = arrays()
    report = run_small(COPY, data, (512,), grid=4)
    assert report.clean
    np.testing.assert_array_equal(data["out"], data["in"] + 1)
    np.testing.assert_array_equal(data["in"], np.arange(512))
    assert report.counters == {"ld_global_f32": 512, "st_global_f32": 512}


def test_a_choice_of_blocks() -> None:
    data = arrays()
    assert run_small(COPY, data, (512,), grid=4, blocks=range(1, 4, 2)).clean
    written = ~np.isnan(data["out"].reshape(4, 128))
    assert written.all(axis=1).tolist() == [False, True, False, True]
    assert not written[0].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "roundrobin"}, r"Unknown schedule 'roundrobin'\. Did you mean 'round_robin'\?"),
        ({"flavour": "tsan"}, r"Unknown flavour 'tsan'.*plain, race, asan"),
        ({"threads": 33}, "whole warps and at most 1024 threads, but got 33"),
        ({"threads": 1056}, "but got 1056"),
        ({"threads": 0}, "but got 0"),
        ({"grid": 4, "blocks": range(2, 5)}, r"inside the grid of 4, but got range\(2, 5\)"),
        ({"grid": 4, "blocks": range(3, 0, -1)}, "must be ascending"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        run_small(COPY, arrays(), (512,), **options)


def test_a_pointer_into_no_buffer_is_refused() -> None:
    data = np.zeros(16, np.float32)
    buffer = HostBuffer(data.ctypes.data, data.nbytes, "in")
    packed = np.array([data.ctypes.data, 12345678, 0], dtype=np.uint64).tobytes()
    with pytest.raises(EmulatorError, match=r"byte 8 of the arguments holds 0xbc614e; buffers: in 0x[0-9a-f]+\+64"):
        emulate_text(COPY, packed, pointers=(0, 8), grid=1, threads=32, smem_bytes=0, buffers=(buffer,))


def test_a_kernel_that_is_no_plain_cpp_is_refused_with_the_compilers_words() -> None:
    text = small_kernel("  __syncthreads();", "float* out")
    with pytest.raises(EmulatorError, match=r"does not compile with .*__syncthreads") as caught:
        run_small(text, {"out": np.zeros(4, np.float32)})
    assert "small.cu:" in caught.value.report


def test_buffers_keep_their_alignment_and_may_overlap() -> None:
    base = np.arange(64, dtype=np.float32)
    data = {"first": base[:40], "second": base[8:48], "out": np.zeros(1, np.float32)}
    body = """  if (thread_index() != 0) return;
  const long long difference = reinterpret_cast<long long>(args.second) - reinterpret_cast<long long>(args.first);
  st_global_f32(args.out, ld_global_f32(args.second + 39) + 100.0f * static_cast<float>(difference % 256 == 32));"""
    text = small_kernel(body, "const float* first; const float* second; float* out")
    assert run_small(text, data).clean
    assert data["out"][0] == 147.0


def test_a_report_is_plain_data_and_prints_the_line() -> None:
    text = small_kernel("  st_global_f32(args.out + 9, 0.0f);", "float* out")
    report = run_small(text, {"out": np.zeros(1, np.float32)}, schedule="greedy")
    data = json.loads(json.dumps(report.to_dict()))
    assert pickle.loads(pickle.dumps(report)) == report  # it crosses process pools
    assert data["clean"] is False
    assert data["schedule"] == "greedy"
    assert data["findings"][0]["line"] == report.findings[0].line
    assert str(report).endswith("    st_global_f32(args.out + 9, 0.0f);")
    with pytest.raises(EmulatorError, match=r"small\.cu:\d+: out-of-bounds") as caught:
        report.require_clean()
    assert "plain, greedy: 1 findings" in caught.value.report


ORDER = small_kernel(
    """  const int t = thread_index();
  float x = static_cast<float>(t);
  for (int i = 0; i < 3; ++i) {
    if (t == args.n) x += 1.0f;
    x = shfl_bfly_f32(x, 1);
    st_global_f32(args.out, static_cast<float>(t));
  }""",
    "float* out; int n",
)


def test_each_schedule_is_the_same_in_every_run_and_differs_from_the_others() -> None:
    def last_writer(schedule: str, seed: int = 0) -> float:
        out = np.zeros(1, np.float32)
        assert run_small(ORDER, {"out": out}, (0,), schedule=schedule, seed=seed).clean
        return float(out[0])

    assert [last_writer(schedule) for schedule in SCHEDULES] == [last_writer(schedule) for schedule in SCHEDULES]
    assert last_writer("round_robin") % 32 == 31
    assert last_writer("greedy") > 95
    assert last_writer("reverse") % 32 == 0
    assert last_writer("reverse_greedy") < 32
    assert len({last_writer("random", seed) for seed in range(8)}) > 2


@pytest.mark.parametrize("flavour", ["plain", "race", "asan"])
def test_the_fibers_of_other_hosts_work_here_too(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_ENGINE_FLAGS", (*build._ENGINE_FLAGS, "-DEMULATOR_UCONTEXT=1"))
    out = np.zeros(1, np.float32)
    assert run_small(ORDER, {"out": out}, (0,), flavour=flavour).kinds <= {"race"}
    assert out[0] > 95


@pytest.mark.parametrize("race", [0, 1])
@pytest.mark.parametrize("asan", [0, 1])
def test_the_engine_compiles_without_a_warning(race: int, asan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (f"-DEMULATOR_RACE={race}", f"-DEMULATOR_ASAN={asan}", "-Wall", "-Wextra", "-Werror")
    monkeypatch.setitem(build._FLAVOURS, "plain", build.Flavour(flags, (), ()))
    assert build.engine_object("plain").exists()


def test_a_program_that_reports_nothing_did_not_run_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernel_program", lambda *_: "/bin/true")
    report = run_small(COPY, arrays(), (512,), grid=4)
    assert [finding.kind for finding in report.findings] == ["crash"]
    assert "without a report" in str(report)


def test_a_program_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "entry" / "kernel"

    def build_none(*_: Any) -> Path:
        program.parent.mkdir(exist_ok=True)
        program.write_text("no program")
        program.chmod(0o755)
        return program

    monkeypatch.setattr(build, "kernel_program", build_none)
    with pytest.raises(EmulatorError, match=r"program does not run: .*FLASHSMITH_CXX"):
        run_small(COPY, arrays(), (512,), grid=4)
    assert not program.exists()
