"""Conformance cases that crash or hang: each is recorded as that, in words, and the others run all the same."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers_fake_cuda
import numpy as np
import pytest
from helpers_conformance import broken_gpu, fake_gpu, no_gpu, run

from flashsmith.generator.errors import EmulatorError, LaunchError, MissingComponentError
from flashsmith.runtime import nvrtc
from flashsmith.runtime.emulator import conformance
from flashsmith.runtime.emulator.conformance_gpu import run_on_gpu
from flashsmith.runtime.emulator.conformance_kernels import Case, all_cases
from flashsmith.runtime.emulator.conformance_worker import Outcome, Worker, isolate

CASES = {case.name: case for case in all_cases()}
NAMES = ("max_s32", "min_s32", "floor_div_s32")


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(run, no_gpu)
    yield made
    made.close()


def calls(outcome: Outcome) -> int:
    """How many cases the process of a worker has run, this one included."""
    assert outcome.status == "ran", outcome
    return int(outcome.words[0])


def test_one_process_runs_case_after_case(worker: Worker) -> None:
    assert [calls(worker.outcome(name, b"", 1, 60)) for name in NAMES] == [1, 2, 3]
    assert worker.outcome("max_s32", b"", 1, 60).words.size == CASES["max_s32"].blocks * CASES["max_s32"].items


def test_after_a_crash_or_a_hang_the_next_case_gets_a_new_process(worker: Worker) -> None:
    assert calls(worker.outcome("max_s32", b"", 1, 60)) == 1
    died = worker.outcome("max_s32", b"die", 1, 60)
    assert (died.status, died.message) == ("crash", "the process of the GPU ended with status 42")
    assert calls(worker.outcome("max_s32", b"", 1, 60)) == 1
    ruined = worker.outcome("max_s32", b"illegal", 1, 60)
    assert ruined.status == "crash"
    assert "CUDA_ERROR_ILLEGAL_INSTRUCTION (715)" in ruined.message
    assert calls(worker.outcome("max_s32", b"", 1, 60)) == 1
    start = time.monotonic()
    hung = worker.outcome("max_s32", b"hang", 1, 0.5)
    assert (hung.status, hung.message) == ("timeout", "it had not ended after 0.5 s")
    assert time.monotonic() - start < 20
    assert calls(worker.outcome("max_s32", b"", 1, 60)) == 1


def test_a_gpu_that_cannot_be_opened_is_said_to_be_that() -> None:
    worker = Worker(run, broken_gpu)
    with pytest.raises(LaunchError, match="must open the GPU, but: LaunchError: the driver is gone"):
        worker.outcome("max_s32", b"", 1, 60)


def test_the_first_block_that_crashes_is_found(worker: Worker) -> None:
    case = CASES["ldmatrix_x4"]

    def gpu(asked: Case, blocks: int, limit_s: float) -> Outcome:
        return worker.outcome(asked.name, b"block 5", blocks, limit_s)

    found = isolate(gpu, case, limit_s=60, deadline=math.inf)
    assert found == f"; block 5 of {case.blocks} is the first that does"
    assert isolate(gpu, case, limit_s=60, deadline=time.monotonic() - 1) == ""
    assert isolate(gpu, CASES["negative_infinity"], limit_s=60, deadline=math.inf) == ""


def conform(gpu: Any, names: tuple[str, ...] = NAMES, **options: Any) -> dict[str, Any]:
    return conformance.conform([CASES[name] for name in names], gpu=gpu, **options)


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "_gpu_identity", lambda: {"name": "no GPU"})


def test_a_case_that_fails_is_recorded_and_the_others_run() -> None:
    ends = {"max_s32": Outcome("crash", message="illegal"), "min_s32": Outcome("timeout", message="too slow")}

    def gpu(case: Case, blocks: int, limit_s: float) -> Outcome:
        return ends.get(case.name) or fake_gpu(case, blocks, limit_s)

    result = conform(gpu)
    assert [(r["name"], r["status"], r["passed"]) for r in result["cases"]] == [
        ("max_s32", "crash", False), ("min_s32", "timeout", False), ("floor_div_s32", "ran", True),
    ]  # fmt: skip
    assert result["passed"] is False
    # No block of the four can be shown to run: the first is named.
    assert result["cases"][0]["example"] == "crash: illegal; block 0 of 4 is the first that does"
    assert result["cases"][1]["example"] == "timeout: too slow"
    # A replay can say nothing new about them.
    again = conformance.conform([CASES[name] for name in NAMES], recorded=json.loads(json.dumps(result)))
    assert again == result


def test_what_the_engine_finds_is_the_cases_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    original = conformance.run_on_engine

    def engine(case: Case) -> Any:
        if case.name == "max_s32":
            raise EmulatorError("a race")
        return original(case)

    monkeypatch.setattr(conformance, "run_on_engine", engine)
    result = conform(lambda case, blocks, limit_s: Outcome("ran", original(case)))
    assert [r["passed"] for r in result["cases"]] == [False, True, True]
    assert result["cases"][0]["example"] == "the engine failed: a race"
    assert result["cases"][0]["gpu_output"], "kept for a replay with another engine"
    again = conformance.conform([CASES[name] for name in NAMES], recorded=result)
    assert [r["passed"] for r in again["cases"]] == [False, True, True]


def test_the_budget_ends_the_run_with_what_there_is() -> None:
    saved: list[dict[str, Any]] = []

    def slow(case: Case, blocks: int, limit_s: float) -> Outcome:
        assert limit_s <= 1.0
        time.sleep(1.1)
        return fake_gpu(case, blocks, limit_s)

    result = conform(slow, deadline=time.monotonic() + 1.0, save=saved.append)
    assert [r["status"] for r in result["cases"]] == ["ran", "not run", "not run"]
    assert result["passed"] is None
    assert saved[-1] == result


def test_a_gpu_that_is_lost_ends_the_run_with_what_there_is() -> None:
    saved: list[dict[str, Any]] = []

    def gpu(case: Case, blocks: int, limit_s: float) -> Outcome:
        if case.name == "min_s32":
            raise LaunchError("no process can open it")
        return fake_gpu(case, blocks, limit_s)

    result = conform(gpu, save=saved.append)
    assert [r["status"] for r in result["cases"]] == ["ran", "not run", "not run"]
    assert "no process can open it" in result["cases"][1]["example"]
    assert saved[-1] == result


def test_an_interrupt_leaves_what_has_run() -> None:
    saved: list[dict[str, Any]] = []

    def gpu(case: Case, blocks: int, limit_s: float) -> Outcome:
        if case.name == "min_s32":
            raise KeyboardInterrupt
        return fake_gpu(case, blocks, limit_s)

    with pytest.raises(KeyboardInterrupt):
        conform(gpu, save=saved.append)
    assert [r["status"] for r in saved[-1]["cases"]] == ["ran", "not run", "not run"]


def test_the_gpus_part_alone_is_compared_in_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Workers:
        def __init__(self, cases: Any) -> None: ...

        def __call__(self, case: Case, blocks: int, limit_s: float) -> Outcome:
            return fake_gpu(case, blocks, limit_s)

        def close(self) -> None: ...

    monkeypatch.setattr(conformance, "WorkerGpu", Workers)
    file, compared = tmp_path / "gpu.json", tmp_path / "compared.json"
    only = ["--only", "cvt_rn"]
    assert conformance.main(["--out", str(file), "--gpu-only", *only]) == 0
    record = json.loads(file.read_text())
    assert record["engine"] is None
    assert [(r["passed"], bool(r["gpu_output"])) for r in record["cases"]] == [(None, True)] * 2
    assert conformance.main(["--replay", str(file), "--out", str(compared), *only]) == 0
    assert json.loads(compared.read_text())["passed"] is True
    with pytest.raises(SystemExit):
        conformance.main(["--replay", str(file), "--gpu-only"])
    assert conformance.main(["--out", str(file), "--budget-s", "0", *only]) == 0
    assert [r["status"] for r in json.loads(file.read_text())["cases"]] == ["not run"] * 2


def test_a_case_runs_through_the_driver_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = helpers_fake_cuda.build(tmp_path)
    helpers_fake_cuda.install(monkeypatch, fake)
    case = CASES["cp_async_wait_group"]
    fake.copied = 256
    words = run_on_gpu(case, b"cubin", 3)
    assert fake.shape == [3, 1, 1, case.threads, 1, 1, case.smem_bytes]
    np.testing.assert_array_equal(words[:64], case.arrays["in"][:64])
    assert words.size == case.blocks * case.items
    assert (words[64:] == 0xFFFFFFFF).all()
    assert (fake.allocated, fake.freed, fake.loads, fake.unloads, fake.depth) == (4, 4, 1, 1, 0)
    fake.blocks = 2
    with pytest.raises(LaunchError, match=r"running 'cp_async_wait_group': CUDA_ERROR \(715\)"):
        run_on_gpu(case, b"cubin", 3)
    assert (fake.allocated, fake.freed, fake.depth) == (8, 8, 0)


@pytest.fixture
def _compiler() -> None:
    try:
        nvrtc.nvrtc_version()
    except MissingComponentError as missing:
        pytest.skip(str(missing))


@pytest.mark.usefixtures("_compiler")
def test_the_program_from_end_to_end_on_a_driver_whose_kernels_fail_beyond_ten_blocks(tmp_path: Path) -> None:
    helpers_fake_cuda.build(tmp_path)
    out = tmp_path / "record.json"
    command = [sys.executable, "-m", "flashsmith.runtime.emulator.conformance", "--out", str(out), "--only", "vote_any"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")])
    environment = {**os.environ, "LD_LIBRARY_PATH": path, "FAKE_CUDA_BLOCKS": "10"}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    record = json.loads(out.read_text())
    assert record["gpu"]["name"] == "NVIDIA Fake"
    assert [(case["name"], case["status"]) for case in record["cases"]] == [("vote_any", "crash")]
    assert "CUDA_ERROR (715)" in record["cases"][0]["example"]
    assert record["cases"][0]["example"].endswith("; block 10 of 64 is the first that does")
    assert "1 failed: vote_any" in done.stdout


@pytest.mark.usefixtures("_compiler")
def test_every_text_is_compiled_once_and_by_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashsmith.runtime.emulator import conformance_worker
    from flashsmith.runtime.emulator.conformance_cases import every_case

    monkeypatch.setattr(conformance_worker, "gpu_target", lambda case: case.target or "sm_90")
    cubins = []
    monkeypatch.setattr(Worker, "outcome", lambda self, name, cubin, blocks, limit_s: cubins.append((name, cubin)))
    cases = every_case()
    chosen = [cases[name] for name in ("tma_load_4d swizzle 64", "tma_load_4d swizzle 64 outside", "max_s32")]
    broken = Case("broken", "  this is no C++;\n", dict, 1, 32)
    gpu = conformance_worker.WorkerGpu([*chosen, broken], processes=1)
    try:
        for case in chosen:
            gpu(case, 1, 60)
        assert [name for name, _ in cubins] == [case.name for case in chosen]
        assert all(cubin[:4] == b"\x7fELF" and len(cubin) % 8 == 0 for _, cubin in cubins)
        assert cubins[0][1] is cubins[1][1]
        failed = gpu(broken, 1, 60)
        assert failed.status == "no cubin"
        assert "conformance.cu" in failed.message
    finally:
        gpu.close()
