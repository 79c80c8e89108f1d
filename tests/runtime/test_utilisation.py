"""benchmarks/utilisation.py: readings of the clock in a kernel's text, the way back, and the numbers."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import helpers_fake_cuda
import pytest
import torch

from flashsmith.generator.arch import arch_from_name
from flashsmith.generator.errors import FlashsmithError, RenderError, SpecError
from flashsmith.generator.families import family_named
from flashsmith.generator.rendering import render
from flashsmith.generator.source import Section
from flashsmith.runtime import driver

FAMILY = family_named("forward_sm90")
ARCH = arch_from_name("sm_90")


@pytest.fixture
def script(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(str(repo_root / "benchmarks"))
    return importlib.import_module("utilisation")


def source_of(case):
    spec = case.problem.spec
    return render(spec, FAMILY.default_config(spec, ARCH), ARCH, family=FAMILY)


def row_of(script, **values):
    case = script.case_of("d128 full B1 N16384 H16")
    config = FAMILY.default_config(case.problem.spec, ARCH)
    return script.Row(case, config, "default", 132, **values)


# ---- Cases and numbers ----


def test_a_case_in_words(script):
    case = script.case_of("d128 causal N16k")
    assert str(case) == "bf16 d128 causal B1 N16384 H16"
    assert str(script.case_of("fp16 d192/128 full B2 N512 M1k H8/2")) == "fp16 d192/128 full B2 N512 M1024 H8/2"
    assert case == script.case_of(str(case))


@pytest.mark.parametrize(
    ("text", "words"),
    [("d128 N512", "lacks mask"), ("d128 full N512 X3", "has 'X3'"), ("d64 d128 full N512", "has 'd128'")],
)
def test_a_case_that_says_too_little_or_too_much(script, text, words):
    with pytest.raises(SpecError, match=words):
        script.case_of(text)


def test_the_numbers_of_a_row(script):
    # 4 * 16 heads * 16384^2 * 128 FLOP on 132 SMs of 4096 FLOP a cycle: 4067173 cycles are full use.
    row = row_of(script, cycles=(5_000_000, 4_000_000, 6_000_000), mean_cycles=(4.5e6, 4e6, 4.5e6), ms=(3.0, 2.0, 4.0))
    assert row.utilisation == pytest.approx(4 * 16 * 16384**2 * 128 / (5e6 * 132 * 4096))
    assert row.tflops == pytest.approx(4 * 16 * 16384**2 * 128 / 3e-3 / 1e12)
    assert row.sm_clock_mhz == pytest.approx(5e6 / 3e-3 / 1e6)
    assert row.balance == pytest.approx(0.9)
    # The three hang together: TFLOP/s is the utilisation at that clock.
    assert row.tflops == pytest.approx(row.utilisation * 132 * 4096 * row.sm_clock_mhz / 1e6)


def test_a_row_without_readings_has_no_numbers(script):
    row = row_of(script, note="not defined: why")
    assert math.isnan(row.utilisation) and row.to_dict()["utilisation"] is None and str(row).endswith("why")
    json.dumps(row.to_dict(), allow_nan=False)


# ---- The readings ----


@pytest.mark.parametrize("text", ["d128 full N512", "d128 causal N512", "d64 full N512", "d256 full N512"])
def test_readings_stand_at_both_ends_of_the_kernel(script, text):
    source = source_of(script.case_of(text))
    clocked = script.with_clocks(source, blocks=132, groups=2).text
    added = [line for line in clocked.splitlines() if line not in source.text.splitlines()]
    assert "__device__ long long flashsmith_clocks[132][2][2];" in added
    entry = clocked[clocked.index('extern "C" __global__') :]
    first, last = entry.index("read_clock(0);"), entry.index("read_clock(1);")
    assert entry[:first].endswith("Arguments args) {\n  ")
    assert entry[:last].rstrip().endswith("consume(args, smem);") and entry[last:].count("consume(") == 0
    without = clocked.replace("  read_clock(0);\n", "").replace("    read_clock(1);\n", "")
    start = without.index('extern "C" {')
    assert without[:start] + without[without.index('extern "C" __global__') :] == source.text


def test_a_template_of_another_shape_is_refused(script):
    source = source_of(script.case_of("d64 full N512"))
    sections = tuple(Section(s.name, s.text.replace("consume(args", "eat(args")) for s in source.sections)
    with pytest.raises(RenderError, match="has 0 such calls"):
        script.with_clocks(replace(source, sections=sections), blocks=132, groups=2)


def test_readings_come_back_from_the_device(script, tmp_path, monkeypatch):
    helpers_fake_cuda.install(monkeypatch, helpers_fake_cuda.build(tmp_path))
    function = driver.load_function(b"\x7fELF", "kernel", smem_bytes=0, device=0)
    found = script.read_clocks(function, blocks=5, groups=3)
    assert torch.equal(found, torch.arange(30).view(5, 3, 2))


# ---- Runs ----


def test_a_run_without_a_gpu(repo_root, tmp_path):
    file = tmp_path / "rows.json"
    arguments = ["--case", "d128 causal N256", "--config", "", "--config", "schedule=grid q_stages=1"]
    arguments += ["--config", "B_c=256", "--json", str(file), "--fake"]
    script = repo_root / "benchmarks" / "utilisation.py"
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert "--fake" in found["command"] and found["machine"]["nvrtc"]
    row, grid, excluded = found["rows"]
    assert row["utilisation"] == pytest.approx(0.5, rel=1e-3) and row["sm_clock_mhz"] == pytest.approx(1500, rel=1e-3)
    assert len(row["cycles"]) == found["repeats"] == 10 and row["same_bits"]
    # The readings cost no register over the kernel, and nothing spills for them.
    assert row["report"] == row["clocked_report"] and " 0/0 bytes spilled" in row["report"]
    assert grid["utilisation"] is None and grid["note"].startswith("not defined")
    assert excluded["utilisation"] is None and "shared memory" in excluded["note"]
    assert "50.0" in done.stdout and "not defined: schedule=grid" in done.stdout


def measured(script, change):
    """The row of a small case on a fake GPU with some of its methods replaced."""
    with script.fake_gpu() as gpu:
        for name, method in change(gpu).items():
            setattr(gpu, name, method)
        (row,) = script.rows_of([script.case_of("d64 full N64 B1 H1")], [], gpu)
        return row


def test_another_output_is_told(script):
    def change(gpu):
        outputs = iter((0.0, 1.0))
        plain = type(gpu).launch

        def launch(plan, inputs, out, lse):
            plain(gpu, plan, inputs, out, lse)
            lse.fill_(next(outputs, 1.0))

        return {"launch": launch}

    row = measured(script, change)
    assert not row.same_bits and " OTHER " in str(row)


def test_an_output_that_nobody_wrote_is_told(script):
    row = measured(script, lambda gpu: {"launch": lambda plan, inputs, out, lse: None})
    assert not row.same_bits


def test_a_block_without_readings_is_told(script):
    def clocks(backend, case, *, blocks, groups):
        return torch.zeros(blocks, groups, 2, dtype=torch.int64)

    row = measured(script, lambda gpu: {"clocks": clocks})
    assert row.note == "failed: Block 0 of bf16 d64 full B1 N64 H1 has left no readings of its clock."


def test_a_failed_row_fails_the_run(script, monkeypatch, capsys):
    def rows(*_):
        yield row_of(script, note="failed: why")

    monkeypatch.setattr(script, "rows_of", rows)
    assert script.report([], [], SimpleNamespace(device=torch.device("cpu")), "") == 1
    assert "failed: why" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["utilisation", "hard_data"])
def test_without_a_gpu_the_scripts_say_so_in_one_line(repo_root, name):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    script = repo_root / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "torch sees none" in done.stderr


@pytest.mark.gpu
def test_utilisation_on_a_gpu(script):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    gpu = script.Gpu(torch.device("cuda", torch.cuda.current_device()), script.CudaBackend())
    with torch.no_grad():
        rows = list(script.rows_of([script.case_of("d128 full N4k"), script.case_of("d64 causal N1k")], [], gpu))
    for row in rows:
        assert not row.note and row.same_bits and row.report == row.clocked_report, row
        assert 0.2 < row.utilisation < 1 and 0.5 < row.balance <= 1
        assert 300 < row.sm_clock_mhz < 2200


def test_errors_reach_the_caller_in_one_sentence(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["utilisation.py", "--fake", "--case", "d128"])
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert "lacks" in str(caught.value) and not isinstance(caught.value, FlashsmithError)
